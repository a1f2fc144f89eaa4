"""Shared experts, computed while the routed experts' rows travel.

A mixture whose code asks for its shared experts behind the routed ones, and for those of its own input, gets what was computed as
soon as rows had departed. A mixture that asks for them in front computes them where they stand. Which of the two it does is found
by running its code on meta.

During a forward the mixture's attribute of that name is shadowed by this object, in the module's own dict, which Python reads
before it asks for submodules: the module that it stands for keeps its place, its name and its hooks.
"""

from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from framework.torch_private import storage_number, version_of

# Names of what a mixture computes for every token beside its routed experts.
NAMES = ("shared_experts", "shared_expert", "shared_mlp")


class SharedExperts:
    """A call of `module` that returns what `compute_ahead` has computed, if it is asked for that. name: the module's attribute in
    the mixture."""

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        self._input: ref[Tensor] | None = None
        self._ahead: tuple[Tensor, int, Tensor] | None = None

    def enter(self, mixture: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook in front of the mixture: its input, [.., H], is what shared experts are computed from."""
        # Weak: the mixture's own code may free its input before it ends.
        self._input = ref(args[0] if args else kwargs["hidden_states"])
        mixture.__dict__[self.name] = self

    def leave(self, mixture: nn.Module, args: Any, output: Any) -> None:
        """A hook behind the mixture."""
        self._input = self._ahead = None
        mixture.__dict__.pop(self.name, None)

    def compute_ahead(self) -> None:
        """Compute them now, for the model to ask for them later."""
        x = None if self._input is None else self._input()
        if x is not None:
            self._ahead = x, version_of(x), self.module(x)

    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Any:
        # Used once: a second call is of another input, or of this one after a write in place, which its version shows.
        ahead, self._ahead = self._ahead, None
        if ahead is None or not _has_same_rows(x, ahead[0]) or version_of(x) != ahead[1]:
            return self.module(x)
        return ahead[2] if x is ahead[0] else ahead[2].view(x.shape)


def _has_same_rows(x: Tensor, other: Tensor) -> bool:
    """Whether x is the other tensor, perhaps in another shape: families flatten sequences.  x: [.., H]."""
    if x is other:
        return True
    # Compared by storage, not by address: on meta tensors have none. A view of other rows of the storage begins elsewhere.
    is_shared = storage_number(x) == storage_number(other) and x.storage_offset() == other.storage_offset()
    has_same_size = x.numel() == other.numel() and x.shape[-1] == other.shape[-1]
    return is_shared and has_same_size and x.is_contiguous() and other.is_contiguous()


def stand_in(mixture: nn.Module, experts: str, width: int) -> SharedExperts | None:
    """Let the mixture's shared experts be computed while rows travel; None where it has none, or its code does not allow it.

    mixture: on meta. experts: the name of its routed experts; width: H.
    """
    name = next((name for name in NAMES if name in dict(mixture.named_children())), None)
    if name is None or _find_order(mixture, name, experts, width) != ["routed", "shared, of the input"]:
        return None
    shared = SharedExperts(mixture.get_submodule(name), name)
    mixture.register_forward_pre_hook(partial(_enter, shared), with_kwargs=True)
    # Not always called: of such hooks torch's compiler guards on numbers, which differ between layers. Behind a forward that
    # failed what stands in the module's place calls the module.
    mixture.register_forward_hook(partial(_leave, shared))
    return shared


# In a graph they are computed where they stand: within the operator of the routed ones they would not be compiled.


def _enter(shared: SharedExperts, mixture: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not torch.compiler.is_compiling():
        shared.enter(mixture, args, kwargs)


def _leave(shared: SharedExperts, mixture: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        shared.leave(mixture, args, output)


def _find_order(mixture: nn.Module, shared: str, experts: str, width: int) -> list[str]:
    """The order in which the mixture's own code calls its shared and its routed experts; empty where it does not run on hidden
    states alone."""
    # Found by running it without memory: which comes first is in the code of each family, and may change with a version.
    x, module = torch.empty(1, 2, width, device="meta"), mixture.get_submodule(shared)
    calls: list[str] = []

    def compute_routed(hidden: Tensor, *routing: Tensor) -> Tensor:
        calls.append("routed")
        return hidden.clone()

    def compute_shared(given: Tensor) -> Any:
        calls.append("shared, of the input" if _has_same_rows(given, x) else "shared")
        return module(given)

    mixture.__dict__ |= {experts: compute_routed, shared: compute_shared}
    try:
        with torch.no_grad():
            mixture(x)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
        return []  # it asks for more than hidden states: then they are computed where they stand
    finally:
        del mixture.__dict__[experts], mixture.__dict__[shared]
    return calls
