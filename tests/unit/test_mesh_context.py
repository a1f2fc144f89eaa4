"""ContextSlices: the ranks of cp hold every token once, in front of their padding, and equal causal work."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework.mesh.token_layout import ContextSlices, TokenLayout
from framework.mesh.topology import Axis

degrees = st.tuples(st.integers(1, 70), st.integers(1, 4), st.integers(1, 4))


def all_ranks(context, ulysses, ring):
    return [ContextSlices(context, ulysses, ring, rank) for rank in range(ulysses * ring)]


def rows(slices):
    return [row for start, stop in slices.intervals for row in range(start, stop)]


@given(degrees)
def test_ranks_hold_every_row_once_and_tokens_lie_in_front_of_padding(of):
    everyone = all_ranks(*of)
    held = sorted(row for each in everyone for row in rows(each))
    assert held == list(range(of[0] + everyone[0].padding))
    for each in everyone:
        assert len(rows(each)) == each.tokens_local
        assert [row < of[0] for row in rows(each)] == [place < each.valid_local for place in range(each.tokens_local)]
    assert sum(each.valid_local for each in everyone) == of[0]


@given(degrees)
def test_a_ring_rank_has_its_chunks_when_heads_are_exchanged(of):
    for each in all_ranks(*of):
        neighbours = [each.of_rank(each.ring_index * each.ulysses + j) for j in range(each.ulysses)]
        exchanged = sorted(row for neighbour in neighbours for row in rows(neighbour))
        assert exchanged == sorted(row for start, stop in each.chunk_intervals for row in range(start, stop))


@given(degrees)
def test_what_is_cut_is_joined_again(of):
    x = torch.arange(3 * of[0] * 2).view(3, of[0], 2)
    everyone = all_ranks(*of)
    parts = [each.cut(x, -1) for each in everyone]
    for each, part in zip(everyone, parts, strict=True):
        assert (part[:, each.valid_local :] == -1).all()
        assert part.is_contiguous()
    assert torch.equal(everyone[0].join(torch.stack(parts)), x)


def test_zigzag_rows_of_two_ranks_and_of_two_by_two():
    assert [each.intervals for each in all_ranks(8, 1, 2)] == [((0, 2), (6, 8)), ((2, 4), (4, 6))]
    mixed = all_ranks(15, 2, 2)
    assert [each.intervals for each in mixed] == [
        ((0, 2), (12, 14)),
        ((2, 4), (14, 16)),
        ((4, 6), (8, 10)),
        ((6, 8), (10, 12)),
    ]
    assert [each.valid_local for each in mixed] == [4, 3, 4, 4]
    assert [each.chunk_intervals for each in mixed[1:3]] == [((0, 4), (12, 16)), ((4, 8), (8, 12))]


def test_ulysses_alone_has_one_part_each():
    assert [each.intervals for each in all_ranks(7, 3, 1)] == [((0, 3),), ((3, 6),), ((6, 9),)]


@pytest.mark.parametrize("ring", [2, 3, 4, 8])
def test_ring_ranks_have_equal_causal_work(ring):
    work = {sum(row + 1 for row in rows(each)) for each in all_ranks(16 * ring, 1, ring)}
    assert len(work) == 1


def test_one_rank_has_the_sequence_itself():
    alone, x = ContextSlices(7), torch.arange(7).view(1, 7)
    assert (alone.intervals, alone.padding, alone.valid_local) == (((0, 7),), 0, 7)
    assert alone.cut(x, 0) is x


@given(degrees, st.integers(1, 4))
def test_sequence_parallelism_divides_the_slices_and_counts_their_tokens(of, tp):
    for each in all_ranks(*of):
        layouts = [TokenLayout(2, each.tokens_local, Axis("tp", tp, rank), True, each) for rank in range(tp)]
        assert sum(layout.valid_local for layout in layouts) == each.valid_local
        whole = TokenLayout(2, each.tokens_local, Axis("tp", tp, 0), False, each)
        assert (whole.tokens_local, whole.valid_local) == (each.tokens_local, each.valid_local)
