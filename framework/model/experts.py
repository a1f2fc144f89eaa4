"""Stacked experts: the modules in which Hugging Face keeps all experts of a layer as tensors [E, ...], one matrix per expert.

    form        experts(...)                                          weights
    routed      (hidden [T, H], index [T, k], weights [T, k]) -> [T, H]   gate_up_proj or up_proj, down_proj, biases
    expert-major  (hidden [E * T, H]) -> [E * T, H]                       gate_up_proj [E, H, 2I], down_proj [E, I, H]

The first is that of all families whose experts transformers lets choose among several kernels; they say by attributes how their
weights lie. longcat_flash's do not and are read off their shapes; a number beyond its experts' means the token itself. The second
is llama4's: every expert is given every token, times its score, which is zero where it was not chosen.

    T tokens, k experts per token, E experts, H hidden features, I features inside an expert
"""

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class ExpertsForm:
    """How a module of stacked experts holds its weights and how it is called.

    first: the name of the weight that reads hidden states; its outputs are gate and up if it `has_gate`, in halves if
    `is_concatenated`, else in turn. is_transposed: weights are [E, inputs, outputs]. is_expert_major: called as llama4's.
    has_identity: an index of E or more means the token itself; the first weight has unused matrices behind its E.
    has_kernels: transformers chooses its kernel, and it says how gate and up become one.
    """

    first: str
    has_gate: bool
    is_concatenated: bool
    is_transposed: bool
    is_expert_major: bool = False
    has_identity: bool = False
    has_kernels: bool = True

    @property
    def last(self) -> str:
        """The name of the weight that gives hidden states."""
        return "down_proj"

    def activate(self, experts: Any, x: Tensor) -> Tensor:
        """What stands between the two matmuls: [R, 2I], or [R, I] without a gate -> [R, I]."""
        if not self.has_kernels:
            gate, up = x.chunk(2, dim=-1)
            return up * experts.act_fn(gate)
        return experts._apply_gate(x) if self.has_gate else experts.act_fn(x)


def form_of(module: nn.Module) -> ExpertsForm | None:
    """The form of a module of stacked experts; None for any other module."""
    if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
        experts: Any = module
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        return ExpertsForm(first, experts.has_gate, experts.is_concatenated, experts.is_transposed)
    own = dict(module.named_parameters(recurse=False))
    if set(own) == {"gate_up_proj", "down_proj"} and all(each.ndim == 3 for each in own.values()):
        return _read_shapes(module, own["gate_up_proj"].shape, own["down_proj"].shape)
    return None


def _read_shapes(module: nn.Module, first: torch.Size, last: torch.Size) -> ExpertsForm | None:
    """The form of gate_up_proj and down_proj that are all of a module. first, last: their shapes."""
    is_routed = "top_k_index" in signature(type(module).forward).parameters
    if not is_routed and first == (last[0], last[2], 2 * last[1]):
        return ExpertsForm("gate_up_proj", True, True, True, is_expert_major=True, has_kernels=False)
    if is_routed and first[1:] == (2 * last[2], last[1]):
        return ExpertsForm("gate_up_proj", True, True, False, has_identity=first[0] > last[0], has_kernels=False)
    return None


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertsForm]]:
    """Every module of stacked experts of a model, with its name and its form, in order."""
    for name, module in model.named_modules():
        form = form_of(module)
        if form is not None:
            yield name, module, form


def find_unknown_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that hold experts in no form known here, with their names, the outermost of each: lists of MLPs, matrices that lie
    in one of two dims, projections that are routed one by one. Shared experts are none: every token meets them."""
    known = [name for name, _, _ in find_experts(model)]
    found: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_named = name.rpartition(".")[2] == "experts" or "Experts" in type(module).__name__
        is_outer = not any(name.startswith(f"{other}.") for other in known + [each for each, _ in found])
        holds_known = any(other == name or other.startswith(f"{name}.") for other in known)
        if (
            is_named
            and is_outer
            and not holds_known
            and "shared" not in name
            and any(True for _ in module.parameters())
        ):
            found.append((name, module))
    return found


def count_experts(experts: nn.Module) -> int:
    """The number of experts in the module: of all, or of those that a rank holds."""
    return experts.get_parameter("down_proj").shape[0]
