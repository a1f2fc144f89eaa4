"""Layers with experts that compute a microbatch in two halves by turns: rows of one half travel while the other computes.

    half 0    attention, depart                       experts, return                        combine
    half 1                       attention, depart                       experts, return               combine

and where rows go over two hops, each of which needs something to travel under, with half 0 one turn ahead:

    half 0    attention | o, depart |           | pass on |           | gate, up |         | down |          | cross |
    half 1                          | attention |         | o, depart |          | pass on |      | gate, up |       | down ...

A turn ends where rows have departed. Backward goes the same way from the end: autograd runs the nodes that were made last first,
and the halves number theirs as if one thread had made them.

A half is half of the sequences. The layer's own code, whatever family it is of, runs once for each, half 1 on a thread of its
own, but only one of them at a time: the order in which a rank computes and sends is that of the code, and equal on all ranks.
Around a layer both halves are one tensor, so a unit is unsharded once, and a layer that is computed again is so by turns, too.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from framework.comm.transfer import choose_current
from framework.parallel.experts.dispatch import ExpertDispatch
from framework.torch_private import count_nodes_to, modes_of_thread, next_node_number, tree_flatten, tree_unflatten

# Attributes that hooks set for one call of a module, where the other half's call would meet them: (namespace, name).
Place = tuple[dict[str, Any], str]
NOTHING = object()
# (argument, first, stop) -> that of the sequences from first to stop - 1
Cut = Callable[[Any, int, int], Any]


class HalfStopped(Exception):
    """The other half has ended with an error."""


class Turns:
    """Two computations by turns, the second on a thread of its own. One for a stage, which computes one layer at a time.

    ahead: turns that the first computation makes before the second begins, beyond one.
    """

    def __init__(self, device: torch.device, ahead: int = 0) -> None:
        self.device, self.ahead = device, ahead
        self._thread = ThreadPoolExecutor(1, "half 1")  # begins with its first task
        self._first: int | None = None
        self._left = 0
        self._gates = threading.Semaphore(0), threading.Semaphore(0)
        self._ended = [True, True]
        self._has_failed = False
        self._number = 0
        self._places: Sequence[Place] = ()

    def run(self, compute: Callable[[int], Any], places: Sequence[Place]) -> list[Any]:
        """[compute(0), compute(1)]. places: attributes that belong to a half, also while it waits."""
        self._first, self._left, self._places = threading.get_ident(), self.ahead, places
        self._gates, self._ended = (threading.Semaphore(0), threading.Semaphore(0)), [False, False]
        self._has_failed = False
        other = self._thread.submit(_in_this_state(partial(self._compute, compute, 1), self.device))
        try:
            return [self._compute(compute, 0), other.result()]
        finally:
            error = other.exception()
            self._first, self._places = None, ()
            try:
                # If both halves have errors, one only echoes the other.
                if error is not None and not isinstance(error, HalfStopped):
                    raise error
            finally:
                # A recomputation ends with an error, whose frames hold what both halves have computed. This frame is one of them.
                del error, other

    def end(self) -> None:
        """End a turn: the other half computes until it ends its own. Nothing happens where there is no other."""
        if self._first is None:
            return
        half = int(threading.get_ident() != self._first)
        # Behind the end of the other half nobody waits for this one.
        if self._ended[1 - half]:
            return
        if self._left and not half:
            self._left -= 1
            return
        # The other half is about to enter the same modules, and what it leaves there would be met when this one goes on.
        held = [(space, name, space.get(name, NOTHING)) for space, name in self._places]
        self._give(1 - half)
        self._wait(half)
        for space, name, value in held:
            if value is NOTHING:
                space.pop(name, None)
            else:
                space[name] = value

    def _compute(self, compute: Callable[[int], Any], half: int) -> Any:
        try:
            if half:
                self._wait(half)
            return compute(half)
        except BaseException:
            self._has_failed = True
            raise
        finally:
            self._ended[half] = True
            if not self._ended[1 - half]:
                self._give(1 - half)

    def _give(self, half: int) -> None:
        self._number = next_node_number()
        self._gates[half].release()

    def _wait(self, half: int) -> None:
        self._gates[half].acquire()
        if self._has_failed:
            raise HalfStopped
        # Each thread counts its nodes by itself, and of nodes that are ready autograd runs that with the largest number.
        count_nodes_to(self._number)


def _in_this_state(compute: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """`compute` in what torch keeps for each thread, as it is in this one."""
    has_gradients, modes = torch.is_grad_enabled(), modes_of_thread()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def run() -> Any:
        with ExitStack() as stack:
            # Activation checkpointing: what it catches, and what it saves in the place of tensors, in either half.
            for mode in modes:
                stack.enter_context(mode)
            # A new thread computes on the first GPU's own stream, and autograd runs a node where its forward ran.
            if stream is not None:
                choose_current(device)
                stack.enter_context(torch.cuda.stream(stream))
            stack.enter_context(torch.set_grad_enabled(has_gradients))
            return compute()

    return run


class HalvedForward:
    """A layer's forward, in halves of the sequences by turns. places: of the layer, as `Turns` holds them; cut: of an argument,
    such as a tensor [B, ...], the sequences first .. stop - 1."""

    def __init__(self, forward: Callable[..., Any], turns: Turns, places: Sequence[Place], cut: Cut) -> None:
        self.forward, self.turns, self.places, self.cut = forward, turns, places, cut

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        count = len(args[0] if args else kwargs["hidden_states"])
        if count == 1:  # an evaluation may have such rows
            return self.forward(*args, **kwargs)
        given, form = tree_flatten((args, kwargs))
        pairs = [self._halve(x, count) for x in given]

        def compute(half: int) -> Any:
            own_args, own_kwargs = tree_unflatten([pair[half] for pair in pairs], form)
            return self.forward(*own_args, **own_kwargs)

        return _join(*self.turns.run(compute, self.places))

    def _halve(self, x: Any, count: int) -> tuple[Any, Any]:
        """Both halves of an argument [B, ...], or of positions along several axes, [axes, B, T]. What all sequences share,
        [1, ...] or [T, D], is of both."""
        middle = (count + 1) // 2
        if isinstance(x, Tensor):
            # llama4's rotations are complex, [B, T, D].
            if not (x.is_floating_point() or x.is_complex()) and x.ndim == 3 and x.shape[1] == count:
                return x[:, :middle], x[:, middle:]
            if x.ndim < 2 or len(x) != count or (x.ndim == 2 and x.is_floating_point()):
                return x, x
            if x.requires_grad:
                return _Halve.apply(x, middle)
        return self.cut(x, 0, middle), self.cut(x, middle, count)


class _Halve(torch.autograd.Function):
    """Two parts of x, [B, ...], whose gradients are written once: that of a slice is as long as x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, middle: int) -> tuple[Tensor, Tensor]:
        # Detached, and so no views: models write to activations in place, which autograd forbids on views made here.
        return x[:middle].detach(), x[middle:].detach()

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> tuple[Tensor, None]:
        return torch.cat([first, second]), None


def _join(first: Any, second: Any) -> Any:
    """A layer's output of all sequences: a tensor, or several, and what else it returns."""
    if isinstance(first, Tensor):
        return torch.cat([first, second])
    if isinstance(first, tuple):
        return tuple(map(_join, first, second))
    return first


def halve_layer(layer: Any, turns: Turns, places: Sequence[Place], cut: Cut) -> None:
    """Have a layer whose experts dispatch compute in halves. places: of the layer, beside those of its experts; cut: as in
    `HalvedForward`."""
    places = list(places)
    found = ((name, each, vars(each).get("dispatch")) for name, each in layer.named_modules())
    dispatches = [each for each in found if isinstance(each[2], ExpertDispatch)]
    for name, module, dispatch in dispatches:
        dispatch.end_turn = turns.end
        places.append((vars(module), "down_proj_bias"))
        mixture = layer.get_submodule(name.rpartition(".")[0])
        if dispatch.shared is not None:
            places += [(vars(mixture), dispatch.shared.name)]
            places += [(vars(dispatch.shared), each) for each in ("_input", "_ahead")]
        if dispatch.route.has_two_hops and (last := _find_last_linear(layer, mixture)) is not None:
            last.register_forward_pre_hook(lambda *_: turns.end())
    if dispatches:
        layer.forward = HalvedForward(layer.forward, turns, places, cut)


def _find_last_linear(layer: nn.Module, mixture: nn.Module) -> nn.Module | None:
    """The last linear layer in front of the mixture: an attention's output projection."""
    inside = set(mixture.modules())
    linears = [each for each in layer.modules() if isinstance(each, nn.Linear) and each not in inside]
    return linears[-1] if linears else None
