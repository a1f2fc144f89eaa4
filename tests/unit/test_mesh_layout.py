"""Boxes and layouts: the boxes of all ranks partition the global tensor, in the order of the owned elements."""

from dataclasses import replace
from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import LayoutError
from framework.mesh.layout import Box, Layout, Shard, interval_to_boxes, part

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@st.composite
def intervals(draw):
    shape = draw(shapes)
    start, stop = sorted((draw(st.integers(0, prod(shape))), draw(st.integers(0, prod(shape)))))
    return shape, start, stop


@st.composite
def divisions(draw):
    """A global shape, its splits as (dim, count, segments), and the number of owners of each local tensor."""
    shape = draw(st.lists(st.integers(1, 9), max_size=3).map(tuple))
    sizes = list(shape)
    splits = []
    for dim in draw(st.lists(st.integers(0, len(shape) - 1), max_size=2)) if shape else []:
        count = draw(st.integers(1, 3))
        segments = ()
        if dim not in [split[0] for split in splits] and draw(st.booleans()):
            cuts = sorted(draw(st.lists(st.integers(0, sizes[dim]), max_size=2)))
            segments = tuple(b - a for a, b in zip([0, *cuts], [*cuts, sizes[dim]], strict=True))
        splits.append((dim, count, segments))
    return shape, splits, draw(st.integers(1, 3))


def layouts_of_all_ranks(shape, splits, owners):
    for indices in product(*(range(count) for _, count, _ in splits)):
        shards = tuple(
            Shard(f"axis{place}", dim, index, count, segments)
            for place, (index, (dim, count, segments)) in enumerate(zip(indices, splits, strict=True))
        )
        held = Layout(shape, shards, replicated=("batch",))
        for owner in range(owners):
            yield Layout(shape, shards, replicated=("batch",), interval=part(held.numel_local, owner, owners))


def take_local(full, layout):
    """The local tensor by numpy alone: index lists per shard, each segment divided separately."""
    for shard in layout.shards:
        size = full.shape[shard.dim]
        rows, first = [], 0
        for segment in shard.segments or (size,):
            rows += range(
                first + shard.index * segment // shard.count, first + (shard.index + 1) * segment // shard.count
            )
            first += segment
        full = np.take(full, rows, axis=shard.dim)
    return full


@given(intervals())
def test_boxes_of_an_interval_are_the_interval_in_order(interval):
    shape, start, stop = interval
    full = np.arange(prod(shape)).reshape(shape)
    boxes = interval_to_boxes(shape, start, stop)
    elements = np.concatenate([full[box.slices()].ravel() for box in boxes]) if boxes else np.array([])
    assert elements.tolist() == list(range(start, stop))
    assert all(box.numel > 0 for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@given(divisions())
def test_boxes_of_all_ranks_partition_the_global_tensor(division):
    count = np.zeros(division[0], dtype=int)
    for layout in layouts_of_all_ranks(*division):
        for box in layout.boxes():
            count[box.slices()] += 1
    assert (count == 1).all()


@given(divisions())
def test_owned_elements_are_the_concatenation_of_the_boxes(division):
    full = np.arange(prod(division[0])).reshape(division[0])
    for layout in layouts_of_all_ranks(*division):
        local = take_local(full, layout)
        assert local.shape == layout.shape_local
        start, stop = layout.interval
        owned = local.reshape(-1)[start:stop].tolist()
        assert owned == [element for box in layout.boxes() for element in full[box.slices()].ravel().tolist()]
        assert sum(box.numel for box in layout.boxes()) == layout.numel_owned == stop - start


@given(divisions())
def test_without_segments_an_interval_is_at_most_2_ndim_minus_1_boxes(division):
    shape, splits, owners = division
    plain = [(dim, count, ()) for dim, count, _ in splits]
    for layout in layouts_of_all_ranks(shape, plain, owners):
        assert len(layout.boxes()) <= max(1, 2 * len(shape) - 1)


@given(intervals(), intervals())
def test_intersection_is_what_both_contain(first, second):
    shape = first[0]
    if len(second[0]) != len(shape):
        return
    canvas = tuple(map(max, shape, second[0]))
    for a in interval_to_boxes(*first):
        for b in interval_to_boxes(*second):
            in_a, in_b, in_both = (np.zeros(canvas, dtype=bool) for _ in range(3))
            in_a[a.slices()] = in_b[b.slices()] = True
            common = a.intersect(b)
            if common is not None:
                in_both[common.slices()] = True
            assert ((in_a & in_b) == in_both).all()


def test_relative_box_indexes_the_piece_as_the_global_box_indexes_the_whole():
    full = np.arange(48).reshape(6, 8)
    outer, inner = Box((2, 1), (3, 5)), Box((3, 4), (2, 2))
    assert (full[outer.slices()][inner.relative_to(outer).slices()] == full[inner.slices()]).all()


def test_packed_columns_give_each_rank_a_piece_of_every_segment():
    layout = Layout((2, 12), (Shard("tp", 1, 1, 2, segments=(8, 2, 2)),))
    assert layout.shape_local == (2, 6)
    columns = [(4, 4), (9, 1), (11, 1)]
    assert layout.boxes() == [Box((row, start), (1, size)) for row in range(2) for start, size in columns]


def test_packed_rows_are_one_box_per_segment():
    layout = Layout((12, 5), (Shard("tp", 0, 0, 2, segments=(8, 2, 2)),))
    assert layout.boxes() == [Box((0, 0), (4, 5)), Box((8, 0), (1, 5)), Box((10, 0), (1, 5))]


def test_a_scalar_has_one_box_and_one_owner():
    assert Layout(()).boxes() == [Box((), ())]
    assert Layout((), interval=(0, 0)).boxes() == []
    assert Layout(()).shape_local == ()


def test_more_ranks_than_rows_leave_some_empty():
    layouts = [Layout((2, 3), (Shard("tp", 0, index, 3),)) for index in range(3)]
    assert [layout.shape_local for layout in layouts] == [(0, 3), (1, 3), (1, 3)]
    assert layouts[0].boxes() == []


def test_whole_owns_all_local_elements():
    layout = Layout((4, 4), (Shard("tp", 0, 1, 2),), interval=(3, 5))
    assert layout.numel_owned == 2
    assert replace(layout, interval=None).boxes() == [Box((2, 0), (2, 4))]


@pytest.mark.parametrize(
    ("shards", "interval"),
    [
        ((Shard("tp", 2, 0, 2),), None),
        ((Shard("tp", 0, 2, 2),), None),
        ((Shard("tp", 0, 0, 2, segments=(3, 3)),), None),
        ((Shard("tp", 0, 0, 2, segments=(5, -1)),), None),
        ((), (0, 17)),
        ((), (3, 2)),
    ],
)
def test_what_cannot_be_laid_out_is_an_error(shards, interval):
    with pytest.raises(LayoutError):
        Layout((4, 4), shards, interval=interval)


@st.composite
def shared_divisions(draw):
    """Sizes of segments, a number of ranks, and into how many pieces, a divisor of it, each segment is cut."""
    segments = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    count = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    return segments, count, tuple(draw(st.sampled_from(divisors)) for _ in segments)


@given(shared_divisions())
def test_neighbours_share_the_pieces_of_segments_that_have_fewer_than_ranks(division):
    segments, count, pieces = division
    held = [Layout((sum(segments),), (Shard("tp", 0, index, count, segments, pieces),)) for index in range(count)]
    rows = [
        [row for box in layout.boxes() for row in range(*box.slices()[0].indices(sum(segments)))] for layout in held
    ]
    first = 0
    for segment, number in zip(segments, pieces, strict=True):
        within = [[row - first for row in each if first <= row < first + segment] for each in rows]
        expected = [list(range(*part(segment, index // (count // number), number))) for index in range(count)]
        assert within == expected
        first += segment


@pytest.mark.parametrize("pieces", [(3,), (2, 2), (0,)])
def test_pieces_that_do_not_fit_the_ranks_are_refused(pieces):
    with pytest.raises(LayoutError, match="number of pieces"):
        Layout((8,), (Shard("tp", 0, 0, 4, (), pieces),))


@given(divisions(), st.data())
def test_span_of_a_box_is_where_its_local_elements_lie(division, data):
    shape = division[0]
    bounds = [sorted((data.draw(st.integers(0, size)), data.draw(st.integers(0, size)))) for size in shape]
    box = Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
    inside = np.zeros(shape, dtype=bool)
    inside[box.slices()] = True
    for layout in layouts_of_all_ranks(*division):
        places = np.flatnonzero(take_local(inside, layout))
        assert layout.span(box) == ((places[0], places[-1] + 1) if len(places) else None)
