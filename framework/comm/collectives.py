"""Collectives over an axis. A blocking one is its `start_` form and a wait. Size 1 is the identity and sends nothing.

Every call is recorded in `axis.traffic` with the bytes that this rank sends by the operation's bandwidth-optimal
algorithm, for n ranks and a full tensor of F bytes:

    all_reduce                 2 (n-1)/n F        broadcast        F at the source, 0 elsewhere
    all_gather, reduce_scatter   (n-1)/n F        all_to_all       the parts meant for others

Tensors are contiguous. On CPU (gloo) all-gather and reduce-scatter are made of point-to-point messages that land in
place, which is faster there than gloo's own (scripts/bench/collectives.py); on CUDA (NCCL) they are NCCL's. All ranks
get bitwise equal results from an all-reduce. Ranks issue the operations of one axis in the same order; waits may come
in any order. `label` names what a collective is of, for the debug mode that compares ranks' orders (`agreement`).
"""

import pickle
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from framework.comm.agreement import check_agreement
from framework.mesh.axis import Axis

Reduction = Literal["sum", "max", "min"]

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renamed the single-tensor forms and warns at the old names; 2.11 has only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Messages of one collective must not match those of another kind, or of `p2p`, that is under way between the same two
# ranks.
_GATHER_TAG, _SCATTER_TAG = 1, 2


class Pending:
    """A started operation. Its tensors belong to it until `wait` returns: neither write to them nor read the results.

    On CUDA `wait` makes the current stream wait, not the CPU. References are held until then, so that the allocator
    cannot give the memory to another tensor while the communication stream still uses it.
    """

    def __init__(
        self, works: Sequence[Any] = (), tensors: Sequence[Tensor] = (), finish: Callable[[], Any] | None = None
    ):
        self._works = works
        self._tensors = tensors
        self._finish = finish

    def wait(self) -> None:
        """Return when the results may be used; a second wait does nothing."""
        for work in self._works:
            work.wait()
        if self._finish is not None:
            self._finish()
        self._works, self._tensors, self._finish = (), (), None


def all_reduce(x: Tensor, axis: Axis, op: Reduction = "sum", label: str = "") -> None:
    """x becomes the reduction of all ranks' x, in place."""
    start_all_reduce(x, axis, op, label).wait()


def start_all_reduce(x: Tensor, axis: Axis, op: Reduction = "sum", label: str = "") -> Pending:
    """Start `all_reduce`."""
    if axis.size == 1:
        return Pending()
    _check(x)
    check_agreement(axis, "all_reduce", label, x)
    axis.traffic.record("all_reduce", 2 * (axis.size - 1) * x.nbytes // axis.size)
    return Pending([dist.all_reduce(x, op=_REDUCTIONS[op], group=axis.group, async_op=True)], [x])


def all_gather(out: Tensor, x: Tensor, axis: Axis) -> None:
    """out = [x of rank 0, x of rank 1, ...], flattened. `x` may be this rank's part of `out` itself: then nothing is
    copied.

    All ranks' x have one size; out has axis.size times as many elements.
    """
    start_all_gather(out, x, axis).wait()


def start_all_gather(out: Tensor, x: Tensor, axis: Axis, label: str = "") -> Pending:
    """Start `all_gather`."""
    _check(out, x, ratio=axis.size)
    if axis.size == 1:
        _copy(out, x)
        return Pending()
    check_agreement(axis, "all_gather", label, x)
    axis.traffic.record("all_gather", (axis.size - 1) * x.nbytes)
    return _gather_by_tensor(out, x, axis) if x.is_cuda else _gather_by_messages(out, x, axis)


def reduce_scatter(out: Tensor, x: Tensor, axis: Axis) -> None:
    """out = this rank's part of the sum of all ranks' x, whose flattened parts are [part 0, part 1, ...] of equal size.

    `out` may be this rank's part of `x` itself.
    """
    start_reduce_scatter(out, x, axis).wait()


def start_reduce_scatter(out: Tensor, x: Tensor, axis: Axis, label: str = "") -> Pending:
    """Start `reduce_scatter`."""
    _check(x, out, ratio=axis.size)
    if axis.size == 1:
        _copy(out, x)
        return Pending()
    check_agreement(axis, "reduce_scatter", label, x)
    axis.traffic.record("reduce_scatter", (axis.size - 1) * out.nbytes)
    return _scatter_by_tensor(out, x, axis) if x.is_cuda else _scatter_by_messages(out, x, axis)


def all_to_all(
    out: Tensor,
    x: Tensor,
    axis: Axis,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
) -> None:
    """Rank r's part s of x becomes rank s's part r of out.

    Splits are the numbers of rows (dim 0) of each part, None for equal parts; they may be 0.
    """
    start_all_to_all(out, x, axis, out_splits, in_splits).wait()


def start_all_to_all(
    out: Tensor,
    x: Tensor,
    axis: Axis,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
) -> Pending:
    """Start `all_to_all`."""
    _check(x)
    _check(out)
    if axis.size == 1:
        _copy(out, x)
        return Pending()
    check_agreement(axis, "all_to_all", "", None)
    rows_kept = in_splits[axis.rank] if in_splits is not None else x.shape[0] // axis.size
    axis.traffic.record("all_to_all", (x.shape[0] - rows_kept) * prod(x.shape[1:]) * x.itemsize)
    out_list = None if out_splits is None else list(out_splits)
    in_list = None if in_splits is None else list(in_splits)
    return Pending([dist.all_to_all_single(out, x, out_list, in_list, axis.group, async_op=True)], [out, x])


def broadcast(x: Tensor, axis: Axis, source: int = 0) -> None:
    """x becomes the x of the rank at index `source` of the axis, in place."""
    if axis.size == 1:
        return
    _check(x)
    check_agreement(axis, "broadcast", "", x)
    axis.traffic.record("broadcast", x.nbytes if axis.rank == source else 0)
    dist.broadcast(x, group=axis.group, group_src=source)


def barrier(axis: Axis) -> None:
    """Return when all ranks of the axis have called."""
    if axis.size == 1:
        return
    check_agreement(axis, "barrier", "", None)
    axis.traffic.record("barrier", 0)
    dist.barrier(group=axis.group)


def gather_objects(obj: Any, axis: Axis) -> list[Any]:
    """Every rank's picklable object, in the axis's order. For words and small numbers, not for tensors."""
    if axis.size == 1:
        return [obj]
    check_agreement(axis, "gather_objects", "", None)
    axis.traffic.record("gather_objects", (axis.size - 1) * len(pickle.dumps(obj)))
    gathered = [None] * axis.size
    dist.all_gather_object(gathered, obj, group=axis.group)
    return gathered


def _gather_by_tensor(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    return Pending([_all_gather_single(out.view(-1), x.view(-1), group=axis.group, async_op=True)], [out, x])


def _gather_by_messages(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Send x to every peer and receive each peer's part where it belongs."""
    parts = out.view(axis.size, -1)
    _copy(parts[axis.rank], x)
    works = []
    for to, source in _peers(axis):
        works.append(dist.irecv(parts[source], group=axis.group, group_src=source, tag=_GATHER_TAG))
        works.append(dist.isend(x, group=axis.group, group_dst=to, tag=_GATHER_TAG))
    return Pending(works, [out, x])


def _scatter_by_tensor(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    return Pending([_reduce_scatter_single(out.view(-1), x.view(-1), group=axis.group, async_op=True)], [out, x])


def _scatter_by_messages(out: Tensor, x: Tensor, axis: Axis) -> Pending:
    """Send every peer its part of x; when the peers' parts have come, add them to this rank's own.

    The sum goes in the order of ranks, so that an element's result does not depend on which rank's part it is in.
    """
    parts = x.view(axis.size, -1)
    buffer = _take_buffer(axis, (axis.size - 1) * out.numel(), x)
    received = buffer[: (axis.size - 1) * out.numel()].view(axis.size - 1, -1).unbind()
    works = []
    for to, source in _peers(axis):
        place = received[source if source < axis.rank else source - 1]
        works.append(dist.irecv(place, group=axis.group, group_src=source, tag=_SCATTER_TAG))
        works.append(dist.isend(parts[to], group=axis.group, group_dst=to, tag=_SCATTER_TAG))

    def add() -> None:
        terms: list[Tensor] = [*received[: axis.rank], parts[axis.rank], *received[axis.rank :]]
        total = terms[0]
        for term in terms[1:-1]:
            # Not into `out`, which may be this rank's own part, still to be added; received[0] has been added.
            total = torch.add(total, term, out=received[0])
        torch.add(total, terms[-1], out=out.view(-1))
        axis.buffers.append(buffer)

    return Pending(works, [x], add)


def _take_buffer(axis: Axis, numel: int, like: Tensor) -> Tensor:
    """A buffer of at least so many elements that an earlier operation has done with, else a new one in its stead.

    On CPUs a large new tensor costs a page fault every 4 KiB: half as much again as receiving into it.
    """
    for index, buffer in enumerate(axis.buffers):
        if buffer.numel() >= numel and buffer.dtype == like.dtype:
            return axis.buffers.pop(index)
    if axis.buffers:
        axis.buffers.pop()
    return like.new_empty(numel)


def _peers(axis: Axis) -> list[tuple[int, int]]:
    """(send to, receive from) at distance 1, 2, ...: at each distance every rank sends one message and receives one."""
    return [((axis.rank + by) % axis.size, (axis.rank - by) % axis.size) for by in range(1, axis.size)]


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy unless both are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.view(-1).copy_(source.view(-1))


def _check(full: Tensor, part: Tensor | None = None, ratio: int = 1) -> None:
    """Contiguous, and full = ratio parts."""
    assert full.is_contiguous(), f"shape {tuple(full.shape)} with strides {full.stride()} is not contiguous"
    if part is not None:
        _check(part)
        fits = full.numel() == ratio * part.numel() and full.dtype == part.dtype
        assert fits, f"{ratio} x {tuple(part.shape)} {part.dtype} do not make {tuple(full.shape)} {full.dtype}"
