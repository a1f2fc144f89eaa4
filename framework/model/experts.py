"""Stacked experts, which Hugging Face keeps as tensors [E, ...] with one matrix per expert: their forms, their capacity, and
the rows that tokens become on their way to them.

    form          call                                                  weights
    routed        (x [T, H], index [T, k], weights [T, k]) -> [T, H]    gate_up_proj or up_proj, down_proj, biases
    expert-major  (x [E * T, H]) -> [E * T, H]                          gate_up_proj [E, H, 2I], down_proj [E, I, H]
    blocks        as routed                                             a child's, [E * I, H]
    grouped       (x [R, H], rows of each expert) -> [R, H']            one, [E, H', H]

All families whose experts transformers lets choose among several kernels have the first form; attributes tell how their weights
lie. longcat_flash's have none and are read off their shapes; an index beyond its experts means the token itself. llama4 has the
second: every expert is given every token, times its score, which is zero where it was not chosen.

The last two (dbrx; jetmoe, also in its attention) compute by their family's own code, which goes by `num_experts`: with a smaller
number, and parts of the weights, it is the code of a rank's experts.

    C = ceil(factor * S k / E)        tokens of one sequence that an expert takes, of S tokens with k experts each of E

Capacity is counted by sequence and not by microbatch or rank, so that every layout drops the same pairs of a token and an expert.
A dropped pair adds nothing to its token, and the weights of the others stay as the router gave them. By default nothing is
dropped.

Where nodes divide experts each has E/N. A router that chooses k of them, any as likely as another, leaves a node out with
probability

    C(E - E/N, k) / C(E, k)

and a token reaches it with the rest, p. A router that is limited to some of several groups of experts chooses those groups first:
a node has the experts of some whole groups, or a part of one, and is reached by fewer tokens. So T tokens become T p rows for
each of N nodes, and a rank, one of G on a node, passes on T k / G rows to each of these.

Padded buffers have room for so many rows times a factor, whatever the router chooses. No more can come than T rows for a node,
than min(k, e) pairs of each row for the e experts of a rank, and than those experts' capacity, where they have one.

    B sequences of S tokens, T tokens in all, k experts per token, E experts, H hidden features, I features inside an expert
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from inspect import signature
from math import ceil, comb
from typing import Any, Literal

import torch
from torch import Tensor, nn

from framework.recipe.schema import Model


@dataclass(frozen=True)
class ExpertsForm:
    """The form of a module of stacked experts: how it holds its weights, and how it is called."""

    # Name of the weight that reads hidden states. Its outputs are gate and up if it `has_gate`, in halves if `is_concatenated`,
    # else in turn.
    first: str
    has_gate: bool
    is_concatenated: bool
    # Weights are [E, inputs, outputs].
    is_transposed: bool
    # Called as llama4's.
    is_expert_major: bool = False
    # An index of E or more means the token itself; the first weight has unused matrices behind its E.
    has_identity: bool = False
    # transformers chooses the kernel, and the module says how gate and up become one.
    has_kernels: bool = True
    is_grouped = False

    @property
    def last(self) -> str:
        """The name of the weight that gives hidden states."""
        return "down_proj"

    def activate(self, experts: Any, x: Tensor) -> Tensor:
        """The activation between the two matmuls.  x: [R, 2I], or [R, I] without a gate -> [R, I]."""
        if not self.has_kernels:
            gate, up = x.chunk(2, dim=-1)
            return up * experts.act_fn(gate)
        return experts._apply_gate(x) if self.has_gate else experts.act_fn(x)


@dataclass(frozen=True)
class StockForm:
    """The form of experts that compute by their family's own code: along dim 0 of every weight an expert's rows are together."""

    is_grouped: bool
    has_identity = is_expert_major = False


def form_of(module: nn.Module) -> ExpertsForm | None:
    """The form of a module of stacked experts; None for any other module."""
    if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
        experts: Any = module
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        return ExpertsForm(first, experts.has_gate, experts.is_concatenated, experts.is_transposed)
    own = {name: each for name, each in module.named_parameters(recurse=False) if "lora_" not in name}
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


def stock_form_of(module: nn.Module) -> StockForm | None:
    """The form of a module of experts that compute by their own code; None for any other module."""
    if form_of(module) is not None or not isinstance(count := getattr(module, "num_experts", None), int):
        return None
    arguments = signature(type(module).forward).parameters
    shapes = {tuple(each.shape) for each in module.parameters()}
    if "expert_size" in arguments and all(len(shape) == 3 and shape[0] == count for shape in shapes) and shapes:
        return StockForm(is_grouped=True)
    widths: Any = [getattr(module, name, None) for name in ("ffn_hidden_size", "hidden_size")]
    if "top_k_index" in arguments and None not in widths and shapes == {(count * widths[0], widths[1])}:
        return StockForm(is_grouped=False)
    return None


def holds_experts(module: nn.Module) -> bool:
    """Whether a module is one of experts that ranks can divide."""
    return form_of(module) is not None or stock_form_of(module) is not None


def find_stock_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, StockForm]]:
    """Every module of experts that compute by their own code, with its name and its form, in order."""
    found = ((name, module, stock_form_of(module)) for name, module in model.named_modules())
    yield from ((name, module, form) for name, module, form in found if form is not None)


def find_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertsForm]]:
    """Every module of stacked experts of a model, with its name and its form, in order."""
    found = ((name, module, form_of(module)) for name, module in model.named_modules())
    yield from ((name, module, form) for name, module, form in found if form is not None)


def find_all_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertsForm | StockForm]]:
    """Every module of experts that ranks can divide, with its name and its form."""
    yield from find_experts(model)
    yield from find_stock_experts(model)


def find_unknown_experts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that hold experts in no form known here, with their names, the outermost of each: lists of MLPs, matrices that lie
    in one of two dims, projections that are routed one by one. Shared experts are none: every token meets them."""
    known = list(count_all_experts(model))
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
    """The number of experts in the module: all, or those that a rank holds."""
    weight, count = getattr(experts, "down_proj", None), getattr(experts, "num_experts", 0)
    return count if weight is None else len(weight)


def count_all_experts(model: nn.Module) -> dict[str, int]:
    """The number of experts of every module that ranks can divide, by its name."""
    return {name: count_experts(experts) for name, experts, _ in find_all_experts(model)}


Priority = Literal["weight", "position"]
# Weights are compared in units of 2^-16. Equal first tokens of a sequence have equal hidden states and so equal weights, and
# rounding, which differs between layouts, must not decide which of them is dropped.
UNITS = 1 << 16


def as_stated(factor: float) -> Fraction:
    """The decimal that the recipe has: no float is 1.1, and 30 rows would have room for 34."""
    return Fraction(str(factor))


@dataclass(frozen=True)
class Capacity:
    """The capacity of experts, C above."""

    factor: float  # at least 1, which is room for exactly an even load
    priority: (
        Priority  # the pairs that an expert takes first: those with the largest weights, or the first of the sequence
    )

    def room(self, tokens: int, top_k: int, num_experts: int) -> int:
        """The capacity C for a sequence of `tokens` tokens."""
        return ceil(as_stated(self.factor) * tokens * top_k / num_experts)

    def find_dropped(self, index: Tensor, weights: Tensor, num_experts: int) -> Tensor:
        """Whether each pair is dropped: [B, S, k] bool.  index, weights: [B, S, k], the router's."""
        tokens, top_k = index.shape[1:]
        experts = index.flatten(1)
        pairs = torch.arange(experts.shape[1], device=index.device).expand_as(experts)
        if self.priority == "weight":
            # Stable: of equal weights the first in the sequence.
            units = (weights.detach().flatten(1).to(torch.float64) * UNITS).round()
            pairs = units.argsort(dim=1, descending=True, stable=True)
        # Sorted by expert and priority; then a pair's place within its expert's run is its number less the run's first.
        by_expert, order = experts.gather(1, pairs).sort(dim=1, stable=True)
        first = torch.searchsorted(by_expert, by_expert)
        place = torch.arange(experts.shape[1], device=index.device) - first
        is_dropped = torch.empty_like(experts, dtype=torch.bool)
        is_dropped.scatter_(1, pairs.gather(1, order), place >= self.room(tokens, top_k, num_experts))
        return is_dropped.view_as(index)


def capacity_of(model: Model) -> Capacity | None:
    """The capacity that the recipe states; None where nothing is dropped."""
    return None if model.expert_capacity is None else Capacity(model.expert_capacity, model.expert_drop)


@dataclass(frozen=True)
class Router:
    """A router that chooses `top_k` of `experts`, out of the best `kept` of `groups` of them."""

    experts: int
    top_k: int
    groups: int = 1
    kept: int = 1

    def reach(self, nodes: int) -> Fraction:
        """Probability that a token has an expert on one of so many nodes."""
        return _reach(self, nodes)


@cache
def _reach(router: Router, nodes: int) -> Fraction:
    own, size, choices = router.experts // nodes, router.experts // router.groups, comb(router.groups, router.kept)
    if router.kept == router.groups or (own % size and size % own):
        return 1 - _miss(router.experts, own, router.top_k)
    missed, inside = Fraction(0), max(1, own // size)
    # Some of the node's groups are chosen; it holds all of their experts, or a part.
    for chosen in range(min(inside, router.kept) + 1):
        ways = comb(inside, chosen) * comb(router.groups - inside, router.kept - chosen)
        missed += Fraction(ways, choices) * _miss(router.kept * size, chosen * min(own, size), router.top_k)
    return 1 - missed


def _miss(experts: int, own: int, top_k: int) -> Fraction:
    """Probability that none of `own` experts is among the chosen."""
    return Fraction(comb(experts - own, top_k), comb(experts, top_k))


@dataclass(frozen=True)
class Room:
    """Rows that a rank's padded buffers hold for each node and for each rank of a node, and as many as an even router sends."""

    outer: int
    inner: int
    even: tuple[float, float]


def find_room(
    tokens: int, router: Router, nodes: int, ranks: int, factor: float | None, most: int | None
) -> Room | None:
    """The room for so many tokens of a rank; None where nothing bounds their rows before they are counted, or the bound would
    have more bytes cross nodes than are needed. factor: parallel.expert_padding; most: pairs that the experts of one rank take
    of a rank's tokens at most, by their capacity."""
    if factor is None and (most is None or nodes > 1):
        return None
    outer, inner = tokens * router.reach(nodes), Fraction(tokens * router.top_k, ranks)
    stated = as_stated(factor or 0)
    room = min(tokens, ceil(stated * outer)) if stated else tokens
    limits = [nodes * room * min(router.top_k, router.experts // (nodes * ranks))]
    if stated:
        limits.append(ceil(stated * inner))
    if most is not None:
        limits.append(nodes * most)
    return Room(room, min(limits), (float(outer), float(inner)))
