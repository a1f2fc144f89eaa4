"""DeepEP: kernels that send tokens to ranks and add up what comes back, in the place of all-to-alls (parallel.expert_backend).

    dispatch    tokens [T, H], with experts and weights [T, k]  ->  those with an expert on this rank, [R, ...], each once
    combine     results [R, H]                                  ->  the sum over ranks of each token's results, [T, H]

Each is the adjoint of the other: the gradient of what was dispatched is combined, and the other way round. Calls are those of
`deep_ep.Buffer` in DeepEP 1.2 to 2.1 (github.com/deepseek-ai/DeepEP, docs/legacy.md). Kernels run on a stream of DeepEP's own; in
a dispatch the host waits for the number of tokens that come. Tests have a double of the library, `tests/deep_ep_double.py`.
"""

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import Tensor

from framework.comm.algorithms import Pending
from framework.comm.communicator import Communicator
from framework.comm.transfer import AsyncHostCopy
from framework.errors import ModelError

# Ranks for which DeepEP has configurations; of more than one node, in whole nodes of eight.
RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
RANKS_PER_NODE = 8
# Bytes of which rows are whole multiples, as kernels assert on the device: halves are copied 16 bytes at a time, between nodes by
# a warp at once. A row has to fit into a warp's shared memory, with the experts and weights of its token.
ROW_BYTES, ROW_BYTES_BETWEEN_NODES, MAX_ROW_BYTES = 32, 512, 16384


def require_deep_ep() -> None:
    """Raises ModelError where it is not installed."""
    if find_spec("deep_ep") is None:
        raise ModelError(
            "parallel.expert_backend=deepep: DeepEP is not installed: build it from https://github.com/deepseek-ai/DeepEP"
            " (python setup.py install; NVSHMEM for more than one node); or parallel.expert_backend=own"
        )


class Way(NamedTuple):
    """The way of tokens, which results and all gradients take. counts: pairs of each of this rank's experts. rows: tokens that
    this rank has sent, once for each rank."""

    handle: Any
    counts: Sequence[int]
    rows: int


class DeepBuffer:
    """DeepEP's buffer for the ranks of an axis, for all layers and models. It takes memory of the GPU from the first dispatch on,
    until the mesh closes."""

    def __init__(self, axis: Communicator):
        self.axis = axis

    def dispatch(self, x: Tensor, ids: Tensor, weights: Tensor, num_experts: int) -> tuple[list[Tensor], Way, Pending]:
        """Start to send tokens.  x: [T, H]; ids: [T, k] int64, -1: to nobody; weights: [T, k]. Returns the same of those
        that come, [R, .] each, with numbers of this rank's experts, -1: elsewhere. Not read before the end. The host waits
        until others have said how many they send."""
        buffer, ids = self._open(x), ids.contiguous()
        per_rank, per_node, per_expert, goes_to_rank, _ = buffer.get_dispatch_layout(ids, num_experts)
        sent = AsyncHostCopy(per_rank)
        arrived, of_ids, of_weights, counts, handle, event = buffer.dispatch(
            x.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=goes_to_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights.contiguous(),
            async_finish=True,
        )
        rows = sum(map(int, sent.values()))
        pending = self._started(event, rows, [x, ids, weights], "rows of experts")
        return [arrived, of_ids, of_weights], Way(handle, counts, rows), pending

    def dispatch_again(self, x: Tensor, way: Way) -> tuple[Tensor, Pending]:
        """Start to send other rows of the same tokens.  x: [T, H] -> [R, H]."""
        x = x.contiguous()
        arrived, _, _, _, _, event = self._open(x).dispatch(x, handle=way.handle, async_finish=True)
        return arrived, self._started(event, way.rows, [x], "gradient of rows of experts")

    def combine(self, y: Tensor, way: Way, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None, Pending]:
        """Start to add up results.  y: [R, H] -> [T, H]; weights: [R, k] -> [T, k], added up in the same way."""
        y = y.contiguous()
        weights = None if weights is None else weights.contiguous()
        total, of_weights, event = self._open(y).combine(y, way.handle, topk_weights=weights, async_finish=True)
        return total, of_weights, self._started(event, len(y), [y], "sums of experts")

    def _open(self, x: Tensor) -> Any:
        row_bytes, held = x.shape[1] * x.itemsize, self.axis.held
        if row_bytes not in held:
            require_deep_ep()
            kind, group, size = import_module("deep_ep").Buffer, self.axis.group, self.axis.size
            configs = kind.get_dispatch_config(size), kind.get_combine_config(size)
            near, far = (
                max(getattr(each, f"get_{link}_buffer_size_hint")(row_bytes, size) for each in configs)
                for link in ("nvl", "rdma")
            )
            # Left to Python, a rank that ends with an error would wait for the others when it frees the buffer.
            held[row_bytes] = kind(group, near, far, explicitly_destroy=True)
        return held[row_bytes]

    def _started(self, event: Any, rows: int, tensors: Sequence[Tensor], label: str) -> Pending:
        """rows: that this rank sends, its own part included."""
        num_bytes = rows * tensors[0][:1].nbytes * (self.axis.size - 1) // self.axis.size
        operation = self.axis.record("all_to_all", num_bytes, label)
        return Pending([_Finish(event)], tensors).named(operation, self.axis)


class _Finish:
    """The end of a kernel, for which the current stream waits."""

    def __init__(self, event: Any):
        self._event = event

    def wait(self) -> None:
        self._event.current_stream_wait()
