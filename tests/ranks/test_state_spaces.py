"""State-space mixers, whatever ranks divide their heads or channels: the training run of stock transformers in one process."""

from contextlib import AbstractContextManager
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from framework.comm.connect import connect
from framework.mesh.context import ContextSlices
from framework.mesh.topology import Topology
from framework.parallel.attention.documents import Documents
from framework.parallel.attention.recurrent.convolution import convolve
from framework.parallel.attention.recurrent.pieces import Pieces
from framework.parallel.attention.recurrent.state_space import scan_heads
from framework.parallel.tensor import state_space
from framework.recipe.schema import Zero
from tests.families import STATE_SPACES
from tests.grid import EVERY_DAY, few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.mixers import PLAIN, RECOMPUTES, Way, find
from tests.ranks.parity import CPU, assert_equal
from tests.ranks.pool import RankPool
from tests.ranks.tensor_parity import TensorCase, compare_cases

pytestmark = EVERY_DAY

NAMES = tuple(each.name for each in STATE_SPACES)


def assert_ways_equal(pool: RankPool, *ways: Way) -> None:
    assert_equal(pool, max(way.world for way in ways), [way.case(clips=False) for way in ways])


@pytest.mark.parametrize("name", few_of(NAMES, lambda name: name in ("granitemoehybrid", "jamba")))
def test_heads_and_channels_over_tp(pool: RankPool, name: str) -> None:
    assert_ways_equal(pool, Way(name, tp=2))


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_heads_and_channels_over_tp_otherwise(pool: RankPool, name: str) -> None:
    """On more ranks than groups; tokens not divided; with shards of ZeRO-3 beside, and recomputed."""
    plain, sharded = Way(name, tp=2, sequence=False), Way(name, tp=2, dp=2, zero=Zero(stage=3), memory=RECOMPUTES)
    assert_ways_equal(pool, plain, sharded, Way(name, tp=4))


@pytest.mark.parametrize("name", few_of(NAMES, lambda name: name == "nemotron_h"))
def test_stages_of_layers_of_several_kinds(pool: RankPool, name: str) -> None:
    assert_ways_equal(pool, Way(name, pp=2, count=3))


@pytest.mark.parametrize("name", few_of(NAMES, lambda name: name in ("bamba", "mamba")))
def test_states_and_windows_over_cp(pool: RankPool, name: str) -> None:
    """With documents that span ranks."""
    assert_ways_equal(pool, Way(name, cp=2, packs=True))


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_states_and_windows_over_cp_otherwise(pool: RankPool, name: str) -> None:
    """Without documents; on more ranks, where pieces are shorter than windows; by Ulysses, recomputed; on one rank; beside tp."""
    assert_ways_equal(
        pool,
        Way(name, cp=2),
        Way(name, cp=4, context=10, packs=True),
        Way(name, cp=2, method="ulysses", memory=RECOMPUTES, packs=True),
        Way(name, packs=True),
        Way(name, cp=2, tp=2, packs=True, zero=Zero(stage=3)),
    )


HEADS, WIDTH, GROUPS, STATE, TAPS, CHUNK = 4, 3, 2, 5, 4, 4


def mix(pieces: Pieces, x: Tensor) -> Tensor:
    """A window of each channel, then a state of each head: x [B, T, channels] of a rank -> [B, T, HEADS * WIDTH]."""
    generator = torch.Generator().manual_seed(3)
    sizes = [HEADS * WIDTH, GROUPS * STATE, GROUPS * STATE, HEADS]
    weight = torch.rand(sum(sizes), TAPS, generator=generator, dtype=x.dtype)
    inner, b, c, dt = convolve(pieces, x.mT, weight, activation="silu").mT.split(sizes, -1)
    heads, (b, c) = torch.ones(HEADS, dtype=x.dtype), (each.unflatten(-1, (GROUPS, STATE)) for each in (b, c))
    inner = inner.unflatten(-1, (HEADS, WIDTH))
    return scan_heads(pieces, inner, dt, -heads, b, c, CHUNK, D=heads, dt_bias=heads).flatten(2)


CHANNELS = HEADS * WIDTH + 2 * GROUPS * STATE + HEADS


# Values of each factor of a run on at most four ranks: tp, cp, pp, ep, whether documents are packed, ZeRO's stage, recomputation.
FACTORS = ((1, 2), (1, 2), (1, 2), (1, 2), (False, True), (1, 3), (PLAIN, RECOMPUTES))
COVERED = [
    Way(
        "nemotron_h",
        cp,
        dp=4 // (tp * cp * pp),
        tp=tp,
        pp=pp,
        ep=ep,
        packs=packs,
        zero=Zero(stage=stage),
        count=2,
        memory=memory,
    )
    for tp, cp, pp, ep, packs, stage, memory in cover_pairs(
        FACTORS, lambda tp, cp, pp, ep, *_: tp * cp * pp <= 4 and ep <= 4 // pp
    )
]


@pytest.mark.grid
@pytest.mark.parametrize("way", COVERED, ids=str)
def test_any_two_axes_beside_a_state_space(pool: RankPool, way: Way) -> None:
    assert_ways_equal(pool, way)


def find_changes(rank: int, world: int, rendezvous: str) -> dict[tuple[int, int], list[int]]:
    """Body: this rank's rows that change with a token, by the token and the context; documents begin at rows 0, 6 and 17."""
    mesh, found = connect(Topology(cp=world), CPU, rendezvous, rank), {}
    for context, token in product((24, 26), (3, 6, 16, 23)):
        slices = ContextSlices(context, ring=world, rank=rank)
        pieces = Pieces(slices, mesh.axis("cp"))
        x = torch.rand(1, context, CHANNELS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        moved = x.index_fill(1, torch.tensor([token]), 2.0)
        with pieces.of(Documents(((0, 6, 17),), context + slices.padding)):
            one, other = (mix(pieces, slices.cut(each, 0)) for each in (x, moved))
        rows = torch.cat([torch.arange(*interval) for interval in slices.intervals])
        found[context, token] = rows[(one != other).any(-1)[0] & (rows < context)].tolist()
    mesh.close()
    return found


def test_a_token_changes_what_is_behind_it_in_its_document_on_every_rank(pool: RankPool) -> None:
    for world in (2, 4):
        of_ranks = pool.run(world, find_changes)
        for context, token in of_ranks[0]:
            end = next(each for each in (6, 17, context) if token < each)
            changed = sorted(row for found in of_ranks for row in found[context, token])
            assert changed == list(range(token, end)), f"{token} of {context} on {world} ranks"


def measure_sent(rank: int, world: int, rendezvous: str, context: int) -> list[int]:
    """Body: bytes that a rank sends over cp in forward, and in backward."""
    mesh = connect(Topology(cp=world), CPU, rendezvous, rank)
    slices = ContextSlices(context, ring=world, rank=rank)
    pieces, traffic = Pieces(slices, mesh.axis("cp")), mesh.axis("cp").traffic
    x = torch.rand(2, slices.tokens_local, CHANNELS, dtype=torch.float64, requires_grad=True)
    out = mix(pieces, x)
    forward = sum(traffic.bytes.values())
    out.sum().backward()
    mesh.close()
    return [forward, sum(traffic.bytes.values()) - forward]


def test_bytes_of_windows_and_states_do_not_grow_with_the_sequence(pool: RankPool) -> None:
    """Each of two ranks sends one window, and a state with its decay for each of its two pieces; backward as much."""
    windows = 2 * (TAPS - 1) * CHANNELS * 8
    states = 2 * 2 * HEADS * (WIDTH * STATE + 1) * 8
    for context in (16, 96):
        assert pool.run(2, measure_sent, context) == [[windows + states] * 2] * 2


# --- sabotage


def share_without_a_sum() -> AbstractContextManager[Any]:
    """Ranks keep their own part of the gradient of a convolution that they share."""

    def share(x: Tensor, sizes: Any, own: Any, tp: Any) -> Tensor:
        divided, shared = x.split([sizes[0], sum(sizes[1:])])
        return state_space.torch.cat([divided, state_space._select(shared, sizes[1:], own, dim=0)])

    return patch.object(state_space, "_share_channels", share)


def norm_each_for_itself() -> AbstractContextManager[Any]:
    """The gated norm's mean is over a rank's own features."""
    return patch.object(state_space.duals, "reduce_from", lambda x, axis: x * axis.size)


@pytest.mark.grid
@pytest.mark.parametrize("sabotage", [share_without_a_sum, norm_each_for_itself])
def test_each_sum_over_tp_matters(pool: RankPool, sabotage: Any) -> None:
    cases = [TensorCase(find("bamba"), 2, True, sabotage=each) for each in (None, sabotage)]
    found = [compare_and_take_worst(pool, case) for case in cases]
    assert found[0] < 1e-9
    assert found[1] > 1e-4


def compare_and_take_worst(pool: RankPool, case: TensorCase) -> float:
    return max(error for of_rank in pool.run(2, compare_cases, [case]) for error in of_rank.values())
