"""Collectives over an axis. A blocking one is its `start_` function and a wait. Size 1 is the identity and sends nothing.

Every call is recorded in `axis.traffic` with the bytes that this rank sends by the operation's bandwidth-optimal
algorithm, for n ranks and a full tensor of F bytes:

    all_reduce                 2 (n-1)/n F        broadcast        F at the source, 0 elsewhere
    all_gather, reduce_scatter   (n-1)/n F        all_to_all       the parts meant for others

and those of the bytes that leave a node: of m ranks on each of k nodes (k-1)/(n-1) of them where the algorithm knows nodes, else
(n-m)/(n-1).

A sum may travel on a wire narrower than its tensors (`codec`), as bf16 between fp32: then every part is rounded, a rank's own
too, and added in the tensors' dtype in the order of ranks, so that no result depends on who adds; over two levels a node's sums
are rounded as well, and an all-reduce gathers the sums rounded once more. F is then the bytes of the messages.

Tensors are contiguous, of any shape and of one dtype in a call; one that is not contiguous, or whose size does not fit, is an
AssertionError. `algorithms` says how each operation is made on which backend. All ranks get bitwise equal results from an
all-reduce. Ranks issue the operations of one axis in the same order; waits may come in any order, but for all-reduces over a
narrower reduce_dtype, which have a second half to start. `label` names what a collective is for, such as a unit.

In a debug mode (`Communicator.check_s`) ranks tell each other what they are about to start. Ranks that start collectives in
different orders hang, or worse, exchange each other's data. Each sends the others one line that describes the operation and waits
up to `check_s` seconds for theirs. Another line, or none, is an OrderError on the spot that says who was about to do what. It
costs a round of messages for each collective and hides nothing under compute.

`torch.compiler.disable` stands on whatever starts something, here and in `p2p`, and on the wait: a compiled layer calls them as
they are. Traced, they would be guarded on what they count, and recompiled in every step. It costs 1 us a call.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from framework.comm.algorithms import Pending, choose, copy, leaving_bytes, on_host
from framework.comm.codec import Wire, scatter_coded, sum_coded
from framework.comm.communicator import Communicator
from framework.errors import OrderError

Reduction = Literal["sum", "max", "min"]
Start = Callable[[Tensor, Tensor], Pending]  # of (out, x)

_REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def all_reduce(x: Tensor, axis: Communicator, op: Reduction = "sum", label: str = "") -> None:
    """Reduce all ranks' x over the axis, in place. x: any shape; one shape and dtype on all ranks."""
    start_all_reduce(x, axis, op, label).wait()


@torch.compiler.disable
def start_all_reduce(
    x: Tensor, axis: Communicator, op: Reduction = "sum", label: str = "", wire: Wire | None = None
) -> Pending:
    """Start `all_reduce`. wire: how a sum travels, None: as x is.

    x: any shape, in place; it belongs to the operation until the wait. Bytes: 2 (n-1)/n of x as it travels.
    """
    if axis.size == 1:
        return Pending()
    # Checked here, so that all backends and algorithms refuse the same tensors, before anything is recorded or sent.
    _check(x)
    check_agreement(axis, "all_reduce", label, x)
    num_bytes = 2 * (axis.size - 1) * (x.nbytes if wire is None else wire.message_bytes(x.numel())) // axis.size
    start: Start = partial(_choose, "all_reduce", axis)
    if op != "sum":
        # A maximum of rounded numbers would be one that no rank has.
        assert wire is None, f"{op} over {wire}"
        start = partial(_all_reduce, axis, op)
    elif wire is not None:
        start = lambda out, _: sum_coded(out, axis, wire)  # noqa: E731
    return _start("all_reduce", label, num_bytes, start, x, x, axis, is_coded=wire is not None)


def all_gather(out: Tensor, x: Tensor, axis: Communicator) -> None:
    """Gather all ranks' x: out = [x of rank 0, x of rank 1, ...], flattened. `x` may be this rank's part of `out` itself: then
    nothing is copied.

    x: one size and dtype on all ranks of the axis; out: axis.size times as many elements of that dtype, of any shape.
    """
    start_all_gather(out, x, axis).wait()


@torch.compiler.disable
def start_all_gather(out: Tensor, x: Tensor, axis: Communicator, label: str = "") -> Pending:
    """Start `all_gather`: x of any shape, out of axis.size times its elements. Bytes: (n-1) x, or (n-1)/n of out."""
    _check(out, x, ratio=axis.size)
    if axis.size == 1:
        # The caller reads `out`, which usually is x's memory already.
        copy(out, x)
        return Pending()
    check_agreement(axis, "all_gather", label, x)
    return _start("all_gather", label, (axis.size - 1) * x.nbytes, partial(_choose, "all_gather", axis), out, x, axis)


def reduce_scatter(out: Tensor, x: Tensor, axis: Communicator) -> None:
    """Sum all ranks' x and keep this rank's part: out, of x whose flattened parts are [part 0, part 1, ...] of equal size.

    x: one shape and dtype on all ranks of the axis; out: 1/axis.size of its elements, that dtype, any shape. `out` may be this
    rank's part of `x` itself.
    """
    start_reduce_scatter(out, x, axis).wait()


@torch.compiler.disable
def start_reduce_scatter(
    out: Tensor, x: Tensor, axis: Communicator, label: str = "", wire: Wire | None = None
) -> Pending:
    """Start `reduce_scatter`: x of any shape, out of 1/axis.size of its elements. wire: how it travels, None: as it is. Bytes:
    (n-1)/n of x as it travels."""
    _check(x, out, ratio=axis.size)
    if axis.size == 1:
        copy(out, x)
        return Pending()
    check_agreement(axis, "reduce_scatter", label, x)
    start: Start = partial(_choose, "reduce_scatter", axis)
    if wire is not None:
        start = partial(scatter_coded, axis=axis, wire=wire)
    num_bytes = (axis.size - 1) * (out.nbytes if wire is None else wire.message_bytes(out.numel()))
    return _start("reduce_scatter", label, num_bytes, start, out, x, axis, is_coded=wire is not None)


def all_to_all(
    out: Tensor,
    x: Tensor,
    axis: Communicator,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
) -> None:
    """Exchange parts: rank r's part s of x becomes rank s's part r of out.

    x: [sum(in_splits), ...], out: [sum(out_splits), ...], of one dtype. Splits are the numbers of rows (dim 0) of each part, None
    for equal parts; they may be 0. Rank r's in_splits[s] is rank s's out_splits[r]: ranks know them, nothing is exchanged for it.
    """
    start_all_to_all(out, x, axis, out_splits, in_splits).wait()


@torch.compiler.disable
def start_all_to_all(
    out: Tensor,
    x: Tensor,
    axis: Communicator,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
    label: str = "",
) -> Pending:
    """Start `all_to_all`: x [sum(in_splits), ...], out [sum(out_splits), ...]. Bytes: the rows meant for others."""
    _check(x)
    _check(out)
    if axis.size == 1:
        copy(out, x)
        return Pending()
    # Without x: uneven splits give ranks tensors of different sizes.
    check_agreement(axis, "all_to_all", label, None)
    splits = in_splits or [x.shape[0] // axis.size] * axis.size
    rows_leaving = sum(rows for peer, rows in enumerate(splits) if not axis.is_on_node(peer))
    out_list = None if out_splits is None else list(out_splits)
    in_list = None if in_splits is None else list(in_splits)

    def start(out: Tensor, x: Tensor) -> Pending:
        return Pending([dist.all_to_all_single(out, x, out_list, in_list, axis.group, async_op=True)], [out, x])

    row_bytes = prod(x.shape[1:]) * x.itemsize
    num_bytes = (x.shape[0] - splits[axis.rank]) * row_bytes
    return _start("all_to_all", label, num_bytes, start, out, x, axis, rows_leaving * row_bytes)


@torch.compiler.disable
def start_broadcast(x: Tensor, axis: Communicator, source: int = 0, label: str = "") -> Pending:
    """Start to broadcast x of the rank at index `source`, in place. x: any shape; one shape and dtype on all ranks."""
    if axis.size == 1:
        return Pending()
    _check(x)
    check_agreement(axis, "broadcast", label, x)

    def start(x: Tensor, _: Tensor) -> Pending:
        return Pending([dist.broadcast(x, group=axis.group, group_src=source, async_op=True)], [x])

    # A tree's inner ranks forward what they get; whom the backend lets forward is its affair, and the source is charged for all.
    return _start("broadcast", label, x.nbytes if axis.rank == source else 0, start, x, x, axis)


@torch.compiler.disable
def barrier(axis: Communicator) -> None:
    """Return when all ranks of the axis have called."""
    if axis.size == 1:
        return
    check_agreement(axis, "barrier", "", None)
    # No bytes, but a call: ranks wait in it, so it counts among what a step communicates.
    operation = axis.record("barrier", 0)
    with axis.waiting(operation):
        dist.barrier(group=axis.group)


def _start(
    name: str,
    label: str,
    num_bytes: int,
    start: Start,
    out: Tensor,
    x: Tensor,
    axis: Communicator,
    leaving: int | None = None,
    is_coded: bool = False,
) -> Pending:
    """Record the operation and start it, on host copies where the axis is staged. leaving: bytes that go to other nodes, where
    the caller knows them."""
    if leaving is None:
        leaving = leaving_bytes(name, num_bytes, x, axis, is_coded)
    operation = axis.record(name, num_bytes, label, leaving)
    with axis.range(name, label):
        return on_host(start, out, x, axis).named(operation, axis)


def _choose(name: str, axis: Communicator, out: Tensor, x: Tensor) -> Pending:
    # Chosen by the device of the tensors that are sent, which are host copies where the axis is staged.
    return choose(name, x, axis)(out, x, axis)


def _all_reduce(axis: Communicator, op: Reduction, x: Tensor, _: Tensor) -> Pending:
    return Pending([dist.all_reduce(x, op=_REDUCTIONS[op], group=axis.group, async_op=True)], [x])


def _check(full: Tensor, part: Tensor | None = None, ratio: int = 1) -> None:
    """AssertionError unless the tensors are contiguous, and full is as large as `ratio` parts of its dtype."""
    assert full.is_contiguous(), f"shape {tuple(full.shape)} with strides {full.stride()} is not contiguous"
    if part is not None:
        _check(part)
        fits = full.numel() == ratio * part.numel() and full.dtype == part.dtype
        assert fits, f"{ratio} x {tuple(part.shape)} {part.dtype} do not make {tuple(full.shape)} {full.dtype}"


# Lines have one size, so that a rank can post its receives before it knows what the others will say. A longer line is cut: the
# operation and the label come first, and these are what differs.
LINE_BYTES = 256
# Apart from the tags of `algorithms` and `objects`: a line must not be taken for a part of a collective that is under way. Lines
# are tensors of the CPU, so over gloo on every device.
LINE_TAG = 3


def check_agreement(axis: Communicator, operation: str, label: str, x: Tensor | None) -> None:
    """Return when all ranks of the axis are about to start this operation on equal tensors; at once without debug mode.

    label: what the operation is for, such as a unit's name. x: any shape and dtype, of which dtype and number of elements are
    compared, and which is not read; None where ranks' tensors may differ. Sends LINE_BYTES to each other rank. Raises
    OrderError when a rank is about to start something else, or has started nothing for `check_s` seconds.
    """
    if axis.check_s is None:
        return
    tensor = "" if x is None else f" {str(x.dtype).removeprefix('torch.')}[{x.numel()}]"
    mine = f"{operation} {label or '(unnamed)'}{tensor} on axis {axis.name}"
    others = _exchange(axis, mine)
    silent = [rank for rank, line in others.items() if line is None]
    different = {rank: line for rank, line in others.items() if line not in (mine, None)}
    # A rank that says something else is the cause, a silent one often only waits for it on another axis: so it is named first.
    if different:
        told = "; ".join(f"rank {rank} {line}" for rank, line in different.items())
        raise OrderError(
            f"ranks are about to start different collectives: rank {axis.ranks[axis.rank]} {mine}; {told}. Their code took"
            " different ways before this point, as for a model that skips a part of itself depending on the data"
        )
    if silent:
        raise OrderError(
            f"rank {axis.ranks[axis.rank]} is about to start {mine}, and for {axis.check_s:g} s rank(s) {silent} have started"
            " no collective there: they are slower than that, have ended, or wait on another axis"
        )


def _exchange(axis: Communicator, line: str) -> dict[int, str | None]:
    """The line of each other rank of the axis, by world rank; None for a rank that sent none in time."""
    mine = torch.zeros(LINE_BYTES, dtype=torch.uint8)
    encoded = line.encode()[:LINE_BYTES]
    mine[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    received = {peer: torch.zeros(LINE_BYTES, dtype=torch.uint8) for peer in range(axis.size) if peer != axis.rank}
    # Messages between pairs and not an all-gather: a collective would fail as a whole, and not say who is missing.
    arriving: dict[int, Any] = {
        peer: dist.irecv(place, group=axis.group, group_src=peer, tag=LINE_TAG) for peer, place in received.items()
    }
    leaving: list[Any] = [dist.isend(mine, group=axis.group, group_dst=peer, tag=LINE_TAG) for peer in received]
    found: dict[int, str | None] = {}
    for peer, work in arriving.items():
        try:
            # A deadline of its own: that of the group is half an hour.
            work.wait(timedelta(seconds=axis.check_s or 0.0))
            # The cut at LINE_BYTES may be inside a character.
            found[axis.ranks[peer]] = bytes(received[peer].tolist()).rstrip(b"\0").decode(errors="replace")
        except RuntimeError:  # gloo's, for a timeout and for a peer that has ended
            found[axis.ranks[peer]] = None
    # A send to a rank that never receives would wait for the group's timeout, in place of the error that names that rank.
    if None not in found.values():
        for work in leaving:
            work.wait()
    return found
