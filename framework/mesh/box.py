"""Box: an axis-aligned block of a tensor; and the cover of a row-major interval by boxes."""

from dataclasses import dataclass
from math import prod


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
