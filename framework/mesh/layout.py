"""Layout: which elements of a global tensor a rank holds, which of them it owns, and over which axes they are shared; and the
boxes that these are.

A dim is described by *runs*: the global indices that are local, as [start, stop) ranges in local order. Without a
shard a dim is one run; a shard with segments leaves one run per segment. The product of the dims' runs is the local
tensor. A *box* is an axis-aligned block of a tensor; a row-major interval is covered by a few of them.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from framework.errors import LayoutError


@dataclass(frozen=True)
class Box:
    """The block [offsets, offsets + sizes) of a tensor; one element when the tensor has no dims.

    Its elements are ordered row-major within the block.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Slices of the block: `tensor[box.slices()]` has shape `box.sizes`."""
        return tuple(slice(offset, offset + size) for offset, size in zip(self.offsets, self.sizes, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The block common to both, None when they share no element."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(min(a.stop, b.stop) for a, b in zip(self.slices(), other.slices(), strict=True))
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def relative_to(self, other: "Box") -> "Box":
        """The same block, with offsets counted from the first element of `other`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)


def interval_to_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Cover elements [start, stop) of the row-major flattened tensor by at most 2*ndim-1 boxes (one for a scalar).

    The boxes follow one another: their row-major elements, concatenated, are the interval in order. An interval
    consists of the tail of its first row, whole rows, and the head of its last row; head and tail are intervals of a
    tensor of one dim less.
    """
    assert 0 <= start <= stop <= prod(shape), (shape, start, stop)
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    row_numel = prod(shape[1:])
    first_row, first_element = divmod(start, row_numel)
    last_row, last_element = divmod(stop, row_numel)
    if first_row == last_row:
        return _in_row(first_row, interval_to_boxes(shape[1:], first_element, last_element))
    # Tails and heads of rows recurse, whole rows do not: so each dim adds at most two boxes, and 2*ndim-1 are all.
    boxes = []
    if first_element:
        boxes += _in_row(first_row, interval_to_boxes(shape[1:], first_element, row_numel))
        first_row += 1
    if first_row < last_row:
        whole_rows = Box((first_row,) + (0,) * (len(shape) - 1), (last_row - first_row, *shape[1:]))
        boxes.append(whole_rows)
    if last_element:
        boxes += _in_row(last_row, interval_to_boxes(shape[1:], 0, last_element))
    return boxes


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    """Boxes of one row, of a tensor of one dim less, as boxes of the whole tensor."""
    return [Box((row, *box.offsets), (1, *box.sizes)) for box in boxes]


Run = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """A split of tensor dim `dim` over mesh axis `axis` of `count` ranks, of which this one is `index`.

    `segments` are the sizes along the dim of a packed weight's parts (q, k and v in one matrix): each part is split
    separately, so that every rank holds a piece of each. Empty: one part. Several shards of one dim nest: a later one
    splits what an earlier one left.

    `pieces`: into how many pieces each segment is cut, where that is fewer than `count`; then count/pieces neighbours
    hold the same one (key-value heads that are fewer than ranks). Empty: `count` for all.
    """

    axis: str
    dim: int
    index: int
    count: int
    segments: tuple[int, ...] = ()
    pieces: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """The place of one rank's part of one tensor of global `shape`. Raises LayoutError when it cannot be laid out so.

    ZeRO divides the local tensor among ranks that compute with all of it on different data: `shard_axis` names who holds
    the parts of its buffer, `replica_axis` who holds equal parts. They are a pair: together, all ranks that share the
    parameter's data-parallel gradient, which is partial over both without `partial` saying so. `replicated` and `partial`
    are what tensor parallelism and ties add to that. A dense parameter says "shard", "replica"; an expert, whose gradient
    fewer ranks share, "expert_shard", "expert_replica". Empty: not laid out by ZeRO.
    """

    shape: tuple[int, ...]
    shards: tuple[Shard, ...] = ()
    replicated: tuple[str, ...] = ()
    """Axes along which every rank holds the same elements."""
    partial: tuple[str, ...] = ()
    """Axes over which the gradient is a sum of the ranks' parts, still to be reduced."""
    interval: tuple[int, int] | None = None
    """The [start, stop) of the row-major flattened *local* tensor that this rank owns, None for all of it; the owners' intervals
    partition the local tensor."""
    shard_axis: str = ""
    replica_axis: str = ""
    gathered_in: str = ""
    """The form in which its parts travel: "fp8" with one scale, "fp8 blocks" or "int8 blocks" with one for each block; "nf4 rows"
    or "fp8 rows", frozen, with one for each block of the global rows; "": in the dtype that forward reads."""
    reduced_in: str = ""
    """The codes as which its gradient leaves a node, as `zero.quantize_reduce` names them; "": none."""

    def __post_init__(self) -> None:
        numel_local = self.numel_local
        start, stop = self._bounds()
        if not 0 <= start <= stop <= numel_local:
            raise LayoutError(f"interval [{start}, {stop}) is outside the {numel_local} local elements of {self}")

    @property
    def shape_local(self) -> tuple[int, ...]:
        """Shape of what this rank holds."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @property
    def numel_local(self) -> int:
        """Number of elements this rank holds."""
        return prod(self.shape_local)

    @property
    def numel_owned(self) -> int:
        """Number of elements this rank owns."""
        start, stop = self._bounds()
        return stop - start

    def boxes(self) -> list[Box]:
        """Global boxes of the owned elements; their row-major elements, concatenated, are the interval in order.

        At most 2*ndim-1 boxes where no segments cut a dim into several runs.
        """
        return self.boxes_between(*self._bounds())

    def boxes_between(self, start: int, stop: int) -> list[Box]:
        """`boxes` of elements [start, stop) of the row-major flattened local tensor, whoever owns them."""
        boxes = []
        for local in interval_to_boxes(self.shape_local, start, stop):
            boxes += _to_global(local, self.runs)
        return boxes

    def span(self, box: Box) -> Run | None:
        """Where the local elements of a global box lie in the row-major flattened local tensor: from the first, and to after the
        last of them; others may lie between. None where no local element is in the box."""
        first = last = 0
        for runs, size, low, each in zip(self.runs, self.shape_local, box.offsets, box.sizes, strict=True):
            bounds = _bounds_within(runs, low, low + each)
            if bounds is None:
                return None
            first, last = first * size + bounds[0], last * size + bounds[1] - 1
        return first, last + 1

    def _bounds(self) -> tuple[int, int]:
        return self.interval if self.interval is not None else (0, self.numel_local)

    @cached_property
    def runs(self) -> list[list[Run]]:
        """The global indices that are local, of each dim."""
        runs = [[(0, size)] for size in self.shape]
        for shard in self.shards:
            if not 0 <= shard.dim < len(self.shape):
                raise LayoutError(f"{shard} splits a dim that a tensor of shape {self.shape} does not have")
            runs[shard.dim] = _split(runs[shard.dim], shard)
        return runs


def part(size: int, index: int, count: int) -> Run:
    """The [start, stop) of part `index` when `size` things are divided among `count`; sizes differ by at most one."""
    return index * size // count, (index + 1) * size // count


def _split(runs: list[Run], shard: Shard) -> list[Run]:
    """The runs that a shard leaves of a dim's: this rank's piece of each segment. LayoutError when it cannot split them."""
    size = sum(stop - start for start, stop in runs)
    segments = shard.segments or (size,)
    if not 0 <= shard.index < shard.count or sum(segments) != size or min(segments) < 0:
        raise LayoutError(
            f"{shard} cannot split {size} indices: needs 0 <= index < count and segments that sum to {size}"
        )
    pieces = shard.pieces or (shard.count,) * len(segments)
    if len(pieces) != len(segments) or any(each < 1 or shard.count % each for each in pieces):
        raise LayoutError(f"{shard}: needs one number of pieces, a divisor of {shard.count}, for each of {segments}")
    # Segment by segment, so that every rank has a piece of q, of k and of v, and not one rank all of q.
    taken: list[Run] = []
    first = 0
    for segment, count in zip(segments, pieces, strict=True):
        start, stop = part(segment, shard.index * count // shard.count, count)
        taken += _take(runs, first + start, first + stop)
        first += segment
    return _join(taken)


def _take(runs: list[Run], start: int, stop: int) -> list[Run]:
    """The global runs of local indices [start, stop)."""
    taken = []
    first = 0
    for run_start, run_stop in runs:
        low, high = max(start - first, 0), min(stop - first, run_stop - run_start)
        if low < high:
            taken.append((run_start + low, run_start + high))
        first += run_stop - run_start
    return taken


def _bounds_within(runs: list[Run], start: int, stop: int) -> Run | None:
    """The first and the end of the last local index whose global index is in [start, stop); None without any."""
    bounds: Run | None = None
    first = 0
    for run_start, run_stop in runs:
        low, high = max(start, run_start), min(stop, run_stop)
        if low < high:
            bounds = (bounds[0] if bounds else first + low - run_start, first + high - run_start)
        first += run_stop - run_start
    return bounds


def _join(runs: list[Run]) -> list[Run]:
    """The same indices in the same order with adjacent runs made one; an empty dim is one empty run."""
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            start = joined.pop()[0]
        joined.append((start, stop))
    return joined or [(0, 0)]


def _to_global(local: Box, runs: list[list[Run]]) -> list[Box]:
    """Global boxes of a local box, in its row-major order.

    Where a dim's runs cut the box, everything left of that dim goes index by index: all runs of one row come before the
    next row.
    """
    pieces = [
        _take(dim_runs, offset, offset + size)
        for dim_runs, offset, size in zip(runs, local.offsets, local.sizes, strict=True)
    ]
    # Right of the last dim in several runs, boxes stay whole: there row-major order within a box is that of the local tensor.
    last_cut = max((dim for dim, cuts in enumerate(pieces) if len(cuts) > 1), default=0)
    for dim in range(last_cut):
        pieces[dim] = [(index, index + 1) for start, stop in pieces[dim] for index in range(start, stop)]
    return [
        Box(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell)) for cell in product(*pieces)
    ]
