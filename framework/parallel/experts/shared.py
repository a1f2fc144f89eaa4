"""SharedExperts: experts of all tokens, computed while the routed experts' rows travel.

The model computes them in code of its own, in front of the routed experts or behind them. Either way they are computed when rows
have departed:

    behind      early, from the mixture's input; what the model asks for later is there already
    in front    late: the model gets a tensor without memory, which becomes the result before anything reads it

Which of the two a mixture does is found by running its code on meta; where it is neither, they are computed where they stand.

During a forward the mixture's attribute of that name is shadowed by this object, in the module's own dict, which Python reads
before it asks for submodules: the module that it stands for keeps its place, its name and its hooks.
"""

from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# Names of what a mixture computes for every token beside its routed experts.
NAMES = ("shared_experts", "shared_expert", "shared_mlp")


class SharedExperts:
    """Calls `module` when it is asked, behind the routed experts, unless what it is asked for has been computed ahead. name: its
    attribute's."""

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        self._input: ref[Tensor] | None = None
        self._ahead: tuple[Tensor, int, Tensor] | None = None

    @torch.compiler.disable
    def enter(self, mixture: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook in front of the mixture: its input, [.., H], is what shared experts are computed from."""
        self._input = ref(args[0] if args else kwargs["hidden_states"])
        mixture.__dict__[self.name] = self

    @torch.compiler.disable
    def leave(self, mixture: nn.Module, args: Any, output: Any) -> None:
        """A hook behind the mixture, also where it has failed."""
        self._input = self._ahead = None
        mixture.__dict__.pop(self.name, None)

    def compute_ahead(self) -> None:
        """Compute them now, for the model to ask for them later."""
        x = None if self._input is None else self._input()
        if x is not None:
            self._ahead = x, x._version, self.module(x)

    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Any:
        ahead, self._ahead = self._ahead, None
        if ahead is None or not _has_same_rows(x, ahead[0]) or x._version != ahead[1]:
            return self.module(x)
        return ahead[2] if x is ahead[0] else ahead[2].view(x.shape)


def _has_same_rows(x: Tensor, other: Tensor) -> bool:
    """Whether x is the other tensor, perhaps in another shape: families flatten sequences.  x: [.., H]."""
    if x is other:
        return True
    # By storage, not by address: on meta tensors have none.
    is_shared = (
        x.untyped_storage()._cdata == other.untyped_storage()._cdata and x.storage_offset() == other.storage_offset()
    )
    has_same_size = x.numel() == other.numel() and x.shape[-1] == other.shape[-1]
    return is_shared and has_same_size and x.is_contiguous() and other.is_contiguous()


class LateSharedExperts(SharedExperts):
    """Gives a promise when it is asked, in front of the routed experts, and keeps it in `compute_ahead`."""

    _asked: tuple[Tensor, int, Tensor] | None = None

    @torch.compiler.disable
    def leave(self, mixture: nn.Module, args: Any, output: Any) -> None:
        """As for those behind. A promise that nobody has kept would be a wrong result."""
        assert self._asked is None or output is None, f"{self.name} was asked for, and no routed expert was"
        self._asked = None
        super().leave(mixture, args, output)

    def compute_ahead(self) -> None:
        """Keep the promise that was given last."""
        asked, self._asked = self._asked, None
        if asked is None:
            return
        x, version, promise = asked
        assert x._version == version, f"the input of {self.name} has changed since the model asked"
        _Keep.apply(promise, self.module(x))

    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Tensor:
        # One element in memory, and no view: in place of a view autograd would write to what it is a view of.
        promise = torch.empty_strided(x.shape, (0,) * x.ndim, dtype=x.dtype, device=x.device)
        self._asked = x, x._version, promise
        return promise


class _Keep(torch.autograd.Function):
    """Make `promise` what y is, in the same memory: [..., H] both. Nobody else has y, and nobody has read the promise."""

    @staticmethod
    def forward(ctx: Any, promise: Tensor, y: Tensor) -> Tensor:
        promise.set_(y.detach())  # type: ignore[call-overload]
        ctx.mark_dirty(promise)
        return promise

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        return None, dy


def stand_in(mixture: nn.Module, experts: str, width: int) -> SharedExperts | None:
    """Let the mixture's shared experts be computed while rows travel; None where it has none, or its code does not allow it.

    mixture: on meta. experts: the name of its routed experts; width: H.
    """
    name = next((name for name in NAMES if name in mixture._modules), None)
    kind = None if name is None else _KINDS.get(_find_order(mixture, name, experts, width))
    if name is None or kind is None:
        return None
    shared = kind(mixture.get_submodule(name), name)
    mixture.register_forward_pre_hook(shared.enter, with_kwargs=True)
    mixture.register_forward_hook(shared.leave, always_call=True)
    return shared


# What mixtures do, in order, where shared experts may be computed at another time.
_KINDS: dict[tuple[str, ...], type[SharedExperts]] = {
    ("routed", "shared, of the input"): SharedExperts,
    ("shared", "routed"): LateSharedExperts,
    ("shared, of the input", "routed"): LateSharedExperts,
}


def _find_order(mixture: nn.Module, shared: str, experts: str, width: int) -> tuple[str, ...]:
    """The order in which the mixture's own code calls its shared and its routed experts; () where it does not run on hidden
    states alone. "other" is in it where between the two it reads what shared experts in front gave, or wrote to their input."""
    # Found by running it without memory: which comes first is in the code of each family, and may change with a version.
    x, module = torch.empty(1, 2, width, device="meta"), mixture.get_submodule(shared)
    trial = _Trial(x)
    mixture.__dict__ |= {experts: trial.compute_routed, shared: partial(trial.compute_shared, module)}
    try:
        with torch.no_grad(), trial:
            mixture(x)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
        return ()  # it asks for more than hidden states: then they are computed where they stand
    finally:
        del mixture.__dict__[experts], mixture.__dict__[shared]
    return tuple(trial.calls)


class _Trial(TorchFunctionMode):
    """What a mixture with the input x calls. Active, it sees every operation on tensors."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.x, self.calls = x, []  # type: tuple[Tensor, list[str]]
        self._given: tuple[Tensor, int] | None = None
        self._promise: Tensor | None = None

    def compute_routed(self, hidden: Tensor, *routing: Tensor) -> Tensor:
        if self._given is not None and self._given[0]._version != self._given[1]:
            self.calls.append("other")
        self._promise = None
        self.calls.append("routed")
        return hidden.clone()

    def compute_shared(self, module: nn.Module, given: Tensor) -> Tensor:
        self.calls.append("shared, of the input" if _has_same_rows(given, self.x) else "shared")
        y = module(given)
        if y.shape != given.shape:
            self.calls.append("other")
        if "routed" not in self.calls:
            self._given, self._promise = (given, given._version), y
        return y

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._promise is not None and any(each is self._promise for each in tree_leaves((args, kwargs))):
            self.calls.append("other")
        return func(*args, **(kwargs or {}))
