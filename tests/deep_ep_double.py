"""Contract double of `deep_ep`: `Buffer` in its normal mode by all-to-alls of gloo, with the arguments, shapes, dtypes and order
of results that DeepEP documents (README, docs/legacy.md, and docstrings of `deep_ep.Buffer`, 1.2 to 2.1).

Results are there when their event is waited for, and hold no number until then. In fp64 it is exact; DeepEP takes bf16 alone.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NO_VALUE = float("nan")


@dataclass
class Config:
    num_ranks: int

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert num_ranks == self.num_ranks
        return 1 << 20

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        assert hidden_bytes > 0
        return 0


class EventOverlap:
    """Its wait writes results, which the caller has in hand already."""

    def __init__(self, results: list[tuple[Tensor, Tensor]]):
        self._results = results

    def current_stream_wait(self) -> None:
        for target, value in self._results:
            target.copy_(value)
        self._results = []


def late(values: list[Tensor | None], is_async: bool) -> tuple[list[Tensor | None], EventOverlap]:
    """Tensors that get these values when the event is waited for."""
    if not is_async:
        return values, EventOverlap([])
    found = [None if x is None else torch.full_like(x, NO_VALUE if x.is_floating_point() else -99) for x in values]
    pairs = [(target, x) for target, x in zip(found, values, strict=True) if target is not None and x is not None]
    return found, EventOverlap(pairs)


@dataclass
class Handle:
    tokens: Tensor  # of each row that was sent, by rank
    sent: list[int]
    received: list[int]
    num_tokens: int


class Buffer:
    num_open = 0

    def __init__(
        self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, *, explicitly_destroy: bool = False
    ) -> None:
        assert num_nvl_bytes > 0
        assert explicitly_destroy, "freed by Python it waits for ranks that may be gone"
        self.group, self.size, self.rank = group, group.size(), group.rank()
        Buffer.num_open += 1

    def destroy(self) -> None:
        dist.barrier(self.group)
        Buffer.num_open -= 1

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
        return Config(num_ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        assert num_experts % self.size == 0
        chosen = torch.nn.functional.one_hot(topk_idx + 1, num_experts + 1)[..., 1:].sum(1).bool()
        goes = chosen.unflatten(1, (self.size, -1)).any(2)
        return goes.sum(0).int(), None, chosen.sum(0).int(), goes, EventOverlap([])

    def dispatch(
        self,
        x: Tensor,
        handle: Handle | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Handle | None, EventOverlap]:
        assert x.ndim == 2
        assert x.is_contiguous()
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            (again,), event = late([self._send(x[handle.tokens], handle)], async_finish)
            assert again is not None
            return again, None, None, None, None, event
        assert topk_idx is not None and topk_weights is not None and is_token_in_rank is not None  # noqa: PT018
        assert num_tokens_per_rank is not None and num_tokens_per_expert is not None  # noqa: PT018
        assert topk_weights.dtype == torch.promote_types(x.dtype, torch.float32)
        assert topk_weights.is_contiguous()
        ranks, tokens = is_token_in_rank.t().nonzero(as_tuple=True)
        sent = num_tokens_per_rank.tolist()
        assert sent == ranks.bincount(minlength=self.size).tolist()
        received = torch.empty(self.size, dtype=torch.int64)
        dist.all_to_all_single(received, torch.tensor(sent), group=self.group)
        handle = Handle(tokens, sent, received.tolist(), len(x))
        of_rank = len(num_tokens_per_expert) // self.size
        local = topk_idx[tokens] - (ranks * of_rank).unsqueeze(1)
        is_there = (local >= 0) & (local < of_rank)
        ids = self._send(local.where(is_there, -1), handle)
        weights = self._send(topk_weights[tokens].where(is_there, 0.0), handle)
        counts = (ids.flatten() + 1).bincount(minlength=of_rank + 1)[1:].tolist()
        found, event = late([self._send(x[tokens], handle), ids, weights], async_finish)
        return found[0], found[1], found[2], counts, handle, event  # type: ignore[return-value]

    def combine(
        self,
        x: Tensor,
        handle: Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        assert x.is_contiguous()
        assert len(x) == sum(handle.received)
        assert topk_weights is None or topk_weights.is_contiguous()
        sums = [None if each is None else self._add_up(each, handle) for each in (x, topk_weights)]
        (total, weights), event = late(sums, async_finish)
        assert total is not None
        return total, weights, event

    def _send(self, rows: Tensor, handle: Handle) -> Tensor:
        found = rows.new_empty(sum(handle.received), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), handle.received, handle.sent, group=self.group)
        return found

    def _add_up(self, rows: Tensor, handle: Handle) -> Tensor:
        back = rows.new_empty(sum(handle.sent), rows.shape[1])
        dist.all_to_all_single(back, rows, handle.sent, handle.received, group=self.group)
        return rows.new_zeros(handle.num_tokens, rows.shape[1]).index_add_(0, handle.tokens, back)
