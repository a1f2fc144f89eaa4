"""Initial values of a parameter as a short program that can be evaluated for any part of it.

A family's initialiser writes whole parameters, or rectangles of them, element by element: random values, a constant, a copy,
then perhaps a factor. Kept as data, these writes give each rank the elements that it owns, and no rank ever holds the others.

Shapes: a parameter has any shape; values are written to a flat tensor `out` [number of elements], the elements of some boxes one
box after the other, each row-major.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from framework.mesh.box import Box
from framework.model.counter_rng import CounterRng, Key, Rows, fill


@dataclass(frozen=True)
class Normal:
    """Independent values of the normal distribution, from RNG stream `key`."""

    mean: float
    std: float
    key: Key

    def write(self, out: Tensor, boxes: Sequence[Box], shape: tuple[int, ...]) -> None:
        fill(out, rows_of(boxes, shape), partial(self._sample, key=self.key))

    def _sample(self, rng: CounterRng, rows: Sequence[Rows], key: Key) -> Tensor:
        return _scale(rng.normals(key, rows), self.std, self.mean)


@dataclass(frozen=True)
class Truncated(Normal):
    """Independent values of a normal distribution truncated to [low, high]: what falls outside is sampled again."""

    low: float
    high: float

    def _sample(self, rng: CounterRng, rows: Sequence[Rows], key: Key) -> Tensor:
        values = super()._sample(rng, rows, key).clone()
        # Each attempt has a stream of its own, so that an element's value depends on its number alone and not on how many
        # others had to be sampled again.
        attempt = 0
        while (outside := (values < self.low) | (values > self.high)).any():
            attempt += 1
            values = torch.where(outside, super()._sample(rng, rows, (*key, attempt)), values)
        return values


@dataclass(frozen=True)
class Uniform:
    """Independent values, uniform in [low, high), from RNG stream `key`."""

    low: float
    high: float
    key: Key

    def write(self, out: Tensor, boxes: Sequence[Box], shape: tuple[int, ...]) -> None:
        fill(out, rows_of(boxes, shape), self._sample)

    def _sample(self, rng: CounterRng, rows: Sequence[Rows]) -> Tensor:
        return _scale(rng.uniforms(self.key, rows), self.high - self.low, self.low)


@dataclass(frozen=True)
class Constant:
    """One value everywhere, rounded to fp32, so that an fp64 master starts from the same values as the others."""

    value: float

    def write(self, out: Tensor, boxes: Sequence[Box], shape: tuple[int, ...]) -> None:
        out.fill_(torch.tensor(self.value, dtype=torch.float32).item())


@dataclass(frozen=True)
class Copy:
    """The values of a tensor that broadcasts to the written shape."""

    values: Tensor

    @property
    def has_nan(self) -> bool:
        return bool(self.values.isnan().any())

    def write(self, out: Tensor, boxes: Sequence[Box], shape: tuple[int, ...]) -> None:
        source = self.values.expand(shape)
        for box, place in zip(boxes, out.split([box.numel for box in boxes]), strict=True):
            place.view(box.sizes).copy_(source[box.slices()])


@dataclass(frozen=True)
class Apply:
    """An elementwise operation of torch, in place, that IEEE 754 rounds in one way only (fp32)."""

    operation: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    def write(self, out: Tensor, boxes: Sequence[Box], shape: tuple[int, ...]) -> None:
        self.operation(out, *self.arguments)


Fill = Normal | Truncated | Uniform | Constant | Copy
Operation = Fill | Apply


class Program:
    """The writes to a parameter of `shape`, in order: operations, each on a box of it."""

    def __init__(self, shape: Sequence[int], steps: Sequence[tuple[Operation, Box]] = ()):
        self.shape = tuple(shape)
        self.steps = tuple(steps)

    def then(self, operation: Operation, region: Box | None = None) -> "Program":
        """This program with one more step. A fill of all elements replaces the steps before it."""
        whole = self._whole_box
        region = region or whole
        is_afresh = region == whole and not isinstance(operation, Apply)
        return Program(self.shape, (*(() if is_afresh else self.steps), (operation, region)))

    @property
    def is_complete(self) -> bool:
        """Whether every element gets a value. NaN in a copy means none."""
        fills = [each for each in self.steps if not isinstance(each[0], Apply)]
        return _covers(self.shape, [box for fill, box in fills if not (isinstance(fill, Copy) and fill.has_nan)])

    def whole(self) -> Tensor:
        """All values as an fp32 tensor of `shape` on the CPU; NaN where none was written."""
        out = torch.full(self.shape, torch.nan, dtype=torch.float32)
        self.write([self._whole_box], out.view(-1))
        return out

    def write(self, boxes: Sequence[Box], out: Tensor) -> None:
        """Write the elements of `boxes`, one box after the other, each row-major: fp32 values, cast to the dtype of `out`.

        out: [number of elements], any floating-point dtype, on any device; values are computed there, a chunk at a time.
        """
        boxes = [box for box in boxes if box.numel]
        if out.dtype != torch.float32 and any(isinstance(operation, Apply) for operation, _ in self.steps):
            exact = torch.empty_like(out, dtype=torch.float32)  # operations round in fp32, whatever the master's dtype
            self.write(boxes, exact)
            out.copy_(exact)
            return
        for operation, region in self.steps:
            if region == self._whole_box:
                operation.write(out, boxes, self.shape)
            else:
                _write_region(operation, region, boxes, out)

    @property
    def _whole_box(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)


def rows_of(boxes: Sequence[Box], shape: tuple[int, ...]) -> list[Rows]:
    """The numbers of the boxes' elements in a row-major tensor of `shape`, in order: the counters of their random values."""
    return [rows for box in boxes for rows in _rows_of_box(box, shape)]


def _rows_of_box(box: Box, shape: tuple[int, ...]) -> list[Rows]:
    """Merge dims that are contiguous, then describe the last two that are left by `Rows` and enumerate those before them."""
    dims: list[tuple[int, int]] = []  # (size, stride), innermost first
    start, stride = 0, 1
    for offset, size, of_all in zip(reversed(box.offsets), reversed(box.sizes), reversed(shape), strict=True):
        start += offset * stride
        if dims and (size == 1 or stride == dims[-1][0] * dims[-1][1]):
            dims[-1] = (dims[-1][0] * size, dims[-1][1])
        elif dims and dims[-1][0] == 1:
            dims[-1] = (size, stride)
        else:
            dims.append((size, stride))
        stride *= of_all
    if not dims or dims[0][1] != 1:  # a single element, or columns of width one
        dims.insert(0, (1, 1))
    (length, _), (count, distance), *outer = [*dims, (1, 0)] if len(dims) == 1 else dims
    starts = [start]
    for size, stride in outer:
        starts = [first + index * stride for index in range(size) for first in starts]
    return [Rows(each, count, distance, length) for each in starts]


def _write_region(operation: Operation, region: Box, boxes: Sequence[Box], out: Tensor) -> None:
    """Write the part of `region` that is in the boxes; counters of random values count the elements of the region."""
    for box, flat in zip(boxes, out.split([box.numel for box in boxes]), strict=True):
        common = box.intersect(region)
        if common is None:
            continue
        place = flat.view(box.sizes)[common.relative_to(box).slices()]
        if isinstance(operation, Apply):
            operation.write(place, [], ())
            continue
        values = torch.empty(common.sizes, dtype=out.dtype, device=out.device)
        operation.write(values.view(-1), [common.relative_to(region)], region.sizes)
        place.copy_(values)


def _covers(shape: tuple[int, ...], regions: Sequence[Box]) -> bool:
    """Whether every element is in a region. Edges of regions divide the tensor into cells, each inside or outside as a whole."""
    edges = [{0, size} for size in shape]
    for region in regions:
        for dim, side in enumerate(region.slices()):
            edges[dim] |= {side.start, side.stop}
    cells = product(*(list(pairwise(sorted(each))) for each in edges))
    corners = (Box(tuple(start for start, _ in cell), (1,) * len(shape)) for cell in cells)
    return all(any(corner.intersect(region) for region in regions) for corner in corners)


def _scale(values: Tensor, factor: float, offset: float) -> Tensor:
    """values * factor + offset, in place and in two roundings: a fused operation rounds once, and not all hardware has one."""
    values.mul_(factor)
    return values.add_(offset) if offset else values
