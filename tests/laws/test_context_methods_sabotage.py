"""Sabotage of attention over ranks: break one step of it, and the comparison with one process fails."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from framework.parallel.attention import attention, blocks, ring, ulysses
from framework.parallel.attention.attention import RankBlocks
from framework.parallel.attention.passes import BackwardPass, ChunkSums, MergedOutput
from framework.parallel.attention.visible_rows import Documents
from tests.grid import IN_TURN
from tests.ranks.pool import RankPool
from tests.ranks.test_context_methods import CASES, TOLERANCE, Case, Layout, find_errors

pytestmark = IN_TURN

# A broken step must show far beyond the tolerance, not at its edge.
VISIBLE = 1e-4

RING, GATHER, ULYSSES = Layout(1, 2), Layout(1, 2, "gather"), Layout(2, 1)
SINKS = replace(CASES["sinks"], sequences=1)


def merge_in_bf16() -> AbstractContextManager[Any]:
    """Outputs are merged in the dtype of a bf16 model's."""
    whole = ChunkSums.__init__

    def narrow(mine: ChunkSums, *given: Any) -> None:
        whole(mine, *given)
        mine.dtype = torch.bfloat16

    return patch.object(ChunkSums, "__init__", narrow)


def sum_key_gradients_in_bf16() -> AbstractContextManager[Any]:
    """dK and dV travel in the dtype of a bf16 model's K and V."""
    return patch.object(ring, "sums_dtype", lambda dtype: torch.bfloat16)


def shift_once_too_few() -> AbstractContextManager[Any]:
    """The last step of the ring is left out."""
    return patch.object(blocks, "find_steps", lambda slices, window: tuple(range(1, slices.ring - 1)))


def mask_the_wrong_pair() -> AbstractContextManager[Any]:
    """K/V of another rank are taken for those of the rank after it: chunks see what they must not, or miss what they may see."""
    whole = RankBlocks.plan
    return patch.object(
        RankBlocks, "plan", lambda mine, portion, source: whole(mine, portion, (source + 1) % mine.slices.ring)
    )


def keep_gradients_of_keys() -> AbstractContextManager[Any]:
    """What other ranks' queries give to a rank's keys and values does not come home (TransformerEngine 1557, Megatron 1464)."""
    return patch.object(BackwardPass, "add", lambda work, portion, sums: None)


def normalise_blocks_alone() -> AbstractContextManager[Any]:
    """Backward is not told the log-sum-exp of all blocks: dQ, dK and dV are wrong though out is right."""
    return patch.object(MergedOutput, "write_log_sums", lambda merged, log_sum: log_sum.zero_())


def ignore_sinks() -> AbstractContextManager[Any]:
    """Learned sinks are left out (TransformerEngine, before PR 3551)."""
    return patch.object(MergedOutput, "add_sinks", lambda merged, sinks: None)


def forget_sinks_gradient() -> AbstractContextManager[Any]:
    """Sinks are used but never learn."""
    return patch.object(attention, "sinks_gradient", lambda sinks, *more: torch.zeros_like(sinks))


def forget_other_sequences_documents() -> AbstractContextManager[Any]:
    """All sequences of a microbatch are cut as the first one is."""
    whole = Documents.runs
    return patch.object(Documents, "runs", lambda mine, rows: [(None, next(iter(whole(mine, rows)))[1])])


def drop_the_window() -> AbstractContextManager[Any]:
    """Layers with a sliding window see everything (accelerate 4177)."""
    whole = attention.ContextAttention.__call__

    def see_all(mine: Any, q: Tensor, k: Tensor, v: Tensor, scores: Any, *more: Any) -> Tensor:
        return whole(mine, q, k, v, replace(scores, window=None), *more)

    return patch.object(attention.ContextAttention, "__call__", see_all)


def keep_one_gradient_of_shared_heads() -> AbstractContextManager[Any]:
    """Of a key-value head that several ranks have, home gets the gradient of one of them."""
    return patch.object(ulysses, "_sum_views", lambda came, places, shares: ulysses._copy_views(came, places))


def take_the_first_sinks() -> AbstractContextManager[Any]:
    """Under Ulysses every rank takes the sinks of the first heads."""
    return patch.object(ulysses.HeadExchange, "select", lambda exchange, x: x[: len(x) // exchange.axis.size])


Sabotage = Callable[[], AbstractContextManager[Any]]
CAUSAL = replace(CASES["grouped heads"], context=21)
SABOTAGES: list[tuple[Sabotage, Layout, Case]] = [
    (merge_in_bf16, RING, CAUSAL),
    (sum_key_gradients_in_bf16, RING, CAUSAL),
    (shift_once_too_few, RING, CAUSAL),
    (shift_once_too_few, GATHER, CAUSAL),
    (mask_the_wrong_pair, RING, CAUSAL),
    (mask_the_wrong_pair, GATHER, CAUSAL),
    (keep_gradients_of_keys, RING, CAUSAL),
    (keep_gradients_of_keys, GATHER, CAUSAL),
    (normalise_blocks_alone, RING, CAUSAL),
    (ignore_sinks, RING, SINKS),
    (forget_sinks_gradient, ULYSSES, SINKS),
    (forget_other_sequences_documents, ULYSSES, CASES["documents"]),
    (drop_the_window, RING, CASES["window"]),
    (keep_one_gradient_of_shared_heads, ULYSSES, CASES["one key-value head"]),
    (take_the_first_sinks, ULYSSES, SINKS),
]


@pytest.mark.parametrize(
    ("sabotage", "layout", "case"), SABOTAGES, ids=[f"{each.__name__}-{layout}" for each, layout, _ in SABOTAGES]
)
def test_sabotage_shows(pool: RankPool, sabotage: Sabotage, layout: Layout, case: Case) -> None:
    found = pool.run(2, find_errors, layout, {"": case}, sabotage)
    assert not max(max(errors[""].values()) for errors in found) <= VISIBLE


def test_what_is_sabotaged_is_right(pool: RankPool) -> None:
    for layout in (RING, GATHER, ULYSSES):
        cases = {str(number): case for number, (_, of, case) in enumerate(SABOTAGES) if of == layout}
        for errors in pool.run(2, find_errors, layout, cases):
            assert max(max(each.values()) for each in errors.values()) <= TOLERANCE
