"""Async TP: a region's borders under sequence parallelism, with communication under the matmuls (`parallel.overlap`).

    border in     Y[r] = X[r] W^T              rank r's tokens are multiplied when they have come
    border out    y[s] = sum_r X_r[s] W_r^T    what is meant for rank s travels while the next rank's is multiplied

A gather becomes one exchange of tokens with each other rank, all started at once, and a reduce-scatter one exchange of
partial sums: the same bytes. NCCL runs exchanges in turn on a stream of its own, and a wait for one makes the current stream
wait, never the host.

Until the region's input has come it is an `AsyncGatherTensor`, with a shape and no memory. A column layer
multiplies its pieces. Every other operation, of whatever library, reaches `__torch_dispatch__`, which waits and hands it the
whole; so nothing can read what has not come.

    S tokens of a whole sequence, s = ceil(S / tp) tokens of it on each rank, D, K, N features
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import increment_version

from framework.comm.algorithms import Pending, peers
from framework.comm.communicator import Communicator
from framework.comm.p2p import exchange
from framework.model.matmul import Matmul
from framework.torch_private import make_wrapper, schema_of, tree_map


class AsyncGather:
    """All ranks' tokens on their way to this rank, over `axis`.  shard: [..., s, D], this rank's; length: S of the whole, padding
    taken away."""

    def __init__(self, shard: Tensor, length: int, axis: Communicator) -> None:
        self.axis, self.length = axis, length
        self.rows = shard.shape[-2]
        self.shape = (*shard.shape[:-2], length, shard.shape[-1])
        self._pieces: Tensor | None = shard.new_empty(axis.size, *shard.shape)
        # Sent from here, not from the shard: that may be written to before the message has left.
        self._pieces[axis.rank] = shard
        self._whole: Tensor | None = None
        self._pending: dict[int, Pending] = {}
        for to, source in peers(axis):
            messages = [(self._pieces[axis.rank], to)], [(self._pieces[source], source)]
            self._pending[source] = exchange(*messages, axis, "tokens of a region")

    def whole(self) -> Tensor:
        """[..., S, D], contiguous, when all has come: the current stream waits for every piece."""
        if self._whole is None:
            assert self._pieces is not None, "pieces go when the whole has come"
            self.wait()
            joined = self._pieces.movedim(0, -3).flatten(-3, -2)
            self._whole = joined[..., : self.length, :].contiguous()
            self._pieces = None  # the same tokens twice would be what sequence parallelism is to avoid
        return self._whole

    def wait(self) -> None:
        """Let the current stream wait for every piece that nobody has waited for."""
        for pending in self._pending.values():
            pending.wait()
        self._pending.clear()

    def multiply(self, compute: Callable[..., Tensor], num_features: int) -> Tensor:
        """Each rank's tokens multiplied as they come: [..., S, num_features]. Not differentiable.

        compute: `Matmul.forward` or `Matmul.input_gradient`, [..., s, D] -> [..., s, num_features], with `out`.
        """
        if self._whole is not None:
            return compute(self._whole)
        assert self._pieces is not None, "pieces go when the whole has come"
        y = self._pieces.new_empty(*self.shape[:-1], num_features)
        # Own tokens first: the others' come under their matmul, in the order in which the exchanges were started.
        for rank in (self.axis.rank, *(source for _, source in peers(self.axis))):
            if rank in self._pending:
                self._pending.pop(rank).wait()
            start, stop = rows_of(rank, self.rows, self.length)
            if start < stop:
                compute(self._pieces[rank][..., : stop - start, :], out=y[..., start:stop, :])
        return y


class AsyncGatherTensor(Tensor):
    """A region's input while its tokens come, [..., length, D]."""

    arrival: AsyncGather

    @staticmethod
    def __new__(cls, arrival: AsyncGather, like: Tensor) -> "AsyncGatherTensor":
        """like: a tensor of its dtype and device."""
        made: AsyncGatherTensor = make_wrapper(cls, arrival.shape, like)
        made.arrival = arrival
        return made

    # Not traced: where a compiled layer stops at its input, the compiler would go on in here and break at each wait.
    @classmethod
    @torch.compiler.disable
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait, then compute with the whole. What writes to its first argument returns that, as callers expect."""
        out = func(*tree_map(_whole, args), **tree_map(_whole, kwargs or {}))
        first = schema_of(func).arguments[0].alias_info
        if args and isinstance(args[0], AsyncGatherTensor) and first is not None and first.is_write:
            # Column layers may have kept the whole for backward: autograd must see that it is another now, and refuse.
            increment_version(args[0].arrival.whole())
            return args[0]
        return out


def _whole(value: Any) -> Any:
    return value.arrival.whole() if isinstance(value, AsyncGatherTensor) else value


def matmul_reduce_scatter(x: Tensor, matmul: Matmul, axis: Communicator) -> Tensor:
    """This rank's tokens of sum_r X_r W_r^T, summed over `axis`.  x: [..., S, K_r] -> [..., s, N]. Not differentiable."""
    length = x.shape[-2]
    rows = -(-length // axis.size)

    def multiply(rank: int) -> Tensor:
        start, stop = rows_of(rank, rows, length)
        y = matmul.forward(x[..., start:stop, :])
        return F.pad(y, (0, 0, 0, rows - (stop - start))) if stop - start < rows else y

    terms = x.new_empty(axis.size, *x.shape[:-2], rows, matmul.matrix.shape[0])
    pending = []
    # Own tokens last: nobody waits for their sum but this rank, and their matmul covers the last exchange.
    for to, source in peers(axis):
        pending.append(exchange([(multiply(to), to)], [(terms[source], source)], axis, "sum of a region"))
    terms[axis.rank] = multiply(axis.rank)
    for each in pending:
        each.wait()
    # One sum in the order of ranks, not of arrival: the result must not depend on who was late.
    return terms.sum(0)


def rows_of(rank: int, rows: int, length: int) -> tuple[int, int]:
    """[start, stop) of a rank's tokens among `length`, of which the last ranks may have fewer or none."""
    return min(rank * rows, length), min((rank + 1) * rows, length)
