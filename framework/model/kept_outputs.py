"""Outputs of a layer's operations that its recomputation takes over instead of computing them again.

    forward          y = operation(x)       y is kept, if the operation is named in `memory.kept_operations`
    recomputation    y = what was kept      whatever is not kept is computed again

Linear layers, experts and attention over ranks are functions of ours, which ask here themselves. What stands in a model's code is
caught below autograd, which then saves what it saved in forward: fused attentions, whose outputs may be kept, and `topk` and
`max` of a matrix [tokens, experts], whose choice is always kept. A router that chose other experts the second time would send
other rows to other ranks.

Recomputation ends with the last tensor that backward asks for. A function of autograd saves its inputs when it has computed;
`save` saves them before, so that a layer's last matmul, whose output backward does not read, is not computed twice.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from framework.torch_private import ATTENTIONS, TorchDispatchMode, tree_leaves, tree_map_only, version_of

Policy = Literal["none", "selective", "full", "sqrt"]
ATTENTION, EXPERTS = "attention", "experts"
aten = torch.ops.aten


class _Kept:
    """A kept output, a tensor or several, and the versions that its tensors had."""

    def __init__(self, value: Any) -> None:
        # Detached: what is kept must not hold the graph that made it. It shares its memory and its version counter.
        self.value = tree_map_only(Tensor, Tensor.detach, value)
        self._versions = self._read_versions()

    @property
    def is_unchanged(self) -> bool:
        return self._versions == self._read_versions()

    def _read_versions(self) -> list[int]:
        return [version_of(each) for each in tree_leaves(self.value) if isinstance(each, Tensor)]


class LayerCall:
    """One microbatch's call of a layer: the outputs that its forward keeps for its recomputation, in order."""

    def __init__(self) -> None:
        self._kept: list[_Kept | None] = []
        self._next = 0

    def keep(self, value: Any) -> Any:
        """Keep an output, and return it."""
        self._kept.append(_Kept(value))
        return value

    def take(self, compute: Callable[[], Any]) -> Any:
        """The next kept output; computed where it could not be kept."""
        assert self._next < len(self._kept), "a recomputation meets an operation that its forward has not met"
        kept, self._next = self._kept[self._next], self._next + 1
        if kept is None:
            return compute()
        assert kept.is_unchanged, "what a layer keeps for its recomputation has been written to"
        # Detached again: autograd makes what a function returns part of its graph.
        return tree_map_only(Tensor, Tensor.detach, kept.value)

    def end_forward(self) -> None:
        """Drop outputs that the layer has since written to: they were other values when the operation returned them."""
        self._kept = [kept if kept is not None and kept.is_unchanged else None for kept in self._kept]

    def start_recomputation(self) -> None:
        self._next = 0

    def forget(self) -> None:
        """End the last recomputation: drop all kept outputs."""
        self._kept.clear()


class KeptOutputs:
    """The operations of one layer whose outputs are kept; and, while a pass of one of its calls is under way, that call.

    catches: whether operations are caught below autograd, which costs some microseconds of Python in each.
    """

    def __init__(self, operations: Collection[str] = (), catches: bool = False) -> None:
        self.operations = frozenset(operations)
        self._catch = _Catch(self) if catches else None
        self._call: LayerCall | None = None
        self._is_recomputing = self._saves_first = False

    def forward(self, call: LayerCall) -> AbstractContextManager[None]:
        """A context for the layer's forward."""
        return _Pass(self, call, is_recomputing=False)

    def recomputation(self, call: LayerCall) -> AbstractContextManager[None]:
        """A context for the recomputation, which takes kept outputs over. With a graph it is the last one."""
        return _Pass(self, call, is_recomputing=True)

    def compute(self, operation: str, compute: Callable[[], Any]) -> Any:
        """The operation's output: computed, and kept if it is named; or taken over."""
        if self._call is None or operation not in self.operations:
            return compute()
        return self.compute_once(compute)

    def compute_once(self, compute: Callable[[], Any]) -> Any:
        """`compute` of an operation that is always kept."""
        if self._call is None:
            return compute()
        return self._call.take(compute) if self._is_recomputing else self._call.keep(compute())

    def compute_attention(self, compute: Callable[[], Any]) -> Any:
        """The output of an attention that consists of several of torch's: kept and taken over as one.

        Else each part would be kept. Messages between parts are not sent again either.
        """
        return compute() if self._catch is None else self._catch.compute_whole(compute)

    def save(self, ctx: Any, x: Tensor) -> None:
        """Save x for the backward of a function of autograd, from within its forward.  x: any shape."""
        if not self._saves_first:
            ctx.save_for_backward(x)
        elif ctx.next_functions:
            # Only what is part of a graph: an indexer, which runs without gradients, has saved nothing in forward either. The
            # graph of a recomputation runs no backward: what counts is what was saved, in the order of forward.
            with torch.enable_grad():
                _Save.apply(x.detach().requires_grad_())

    def start(self, call: LayerCall, is_recomputing: bool) -> AbstractContextManager[Any] | None:
        """Begin a pass. Returns the mode that catches operations, if there is one."""
        self._call, self._is_recomputing = call, is_recomputing
        # Without a graph nothing is saved: a layer then runs for its output alone.
        self._saves_first = is_recomputing and torch.is_grad_enabled()
        if is_recomputing:
            call.start_recomputation()
        return self._catch

    def end(self) -> None:
        """End the pass."""
        call = self._call
        assert call is not None, "a pass that was not started"
        if not self._is_recomputing:
            call.end_forward()
        elif self._saves_first:
            call.forget()
        self._call, self._is_recomputing, self._saves_first = None, False, False


class _Pass(AbstractContextManager[None]):
    def __init__(self, outputs: KeptOutputs, call: LayerCall, is_recomputing: bool) -> None:
        self._start, self._end = partial(outputs.start, call, is_recomputing), outputs.end
        self._stack = ExitStack()

    def __enter__(self) -> None:
        catch = self._start()
        if catch is not None:
            self._stack.enter_context(catch)

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        self._end()


class KeepsOutputs(Protocol):
    """An operation of a layer that keeps its own output."""

    def keep_outputs(self, kept: KeptOutputs, operation: str, /) -> None:
        """Keep outputs from now on, as the layer is recomputed in backward. operation: the name of this output in recipes."""


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.new_empty(())


class _Catch(TorchDispatchMode):
    """Catches the attentions and the choices of one layer."""

    def __init__(self, outputs: KeptOutputs) -> None:
        super().__init__()
        self._outputs, self._dropouts = outputs, dict(ATTENTIONS)
        self._is_inside = False

    def compute_whole(self, compute: Callable[[], Any]) -> Any:
        """An attention's output, whose parts are not caught."""
        self._is_inside = True
        try:
            return self._outputs.compute(ATTENTION, compute)
        finally:
            self._is_inside = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is aten.topk.default:
            return self._choose(partial(func, *args, **kwargs), args[0], args[2] if len(args) > 2 else -1)
        # phimoe's router chooses by maxima. Attentions have maxima as well, of more dims, and choose nothing by them.
        if func is aten.max.dim and args[0].ndim == 2:
            return self._choose(partial(func, *args, **kwargs), args[0], args[1], keeps_dim=any(args[2:]))
        # One with dropout is computed again: it takes random numbers, and those behind it take the next.
        if self._is_inside or func not in self._dropouts or any(args[self._dropouts[func] :][:1]):
            return func(*args, **kwargs)
        return self._outputs.compute(ATTENTION, partial(func, *args, **kwargs))

    def _choose(self, compute: Callable[[], Any], x: Tensor, dim: int, keeps_dim: bool = True) -> tuple[Tensor, Tensor]:
        """topk or max of x, [..., n, ...], whose indices are those of forward and whose values are what stands there now.
        keeps_dim: the results have as many dims as x."""
        found: list[Tensor] = []

        def find() -> Tensor:
            found.extend(compute())
            return found[1].to(torch.int32)

        index = self._outputs.compute_once(find)
        if found:
            return found[0], found[1]
        index = index.to(torch.int64)
        if keeps_dim:
            return x.gather(dim, index), index
        return x.gather(dim, index.unsqueeze(dim)).squeeze(dim), index
