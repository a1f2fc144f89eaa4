"""States of an optimizer in few bits (`precision.moments`), and values in bf16 without a master (`precision.master=none`).

A kernel updates moments and values in the master's dtype. Those of fewer bits are decoded for one chunk after the other, updated
there by the same kernel, and encoded again: only one chunk ever exists in full.

    state (bf16, int8 blocks) or value (bf16) -> scratch -> the optimizer's kernel -> round(scratch, bits of the element) -> back

Moments are rounded stochastically where they would else stall (`stochastic_rounding.is_needed`), values always: to nearest, a
weight would stay where it is while updates are below 1/512 of it, as most are. The bits are a function of (seed, step, parameter,
element), so replicas round alike, and so does every layout. A step that is skipped leaves in the scratch numbers that no bits
round to others.

    storage   [ run | run | pad ][ run ...      one run for each piece of a parameter; blocks begin at multiples of BLOCK of the
              | chunk            | chunk        parameter's local elements, so a piece that begins within a block is padded

Which elements share a block depends on where a layout cuts the parameter: see `low_bit` for how little that changes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from framework.mesh.layout import Box, Run
from framework.optim.bit_kernels import BITS
from framework.optim.low_bit import BLOCK, SIGNED, UNSIGNED
from framework.optim.stochastic_rounding import ROUNDING_BITS, is_needed
from framework.optim.update_rules import FlatShard

MomentsDtype = Literal["fp32", "bf16", "int8"]

# Elements that are decoded at a time. On a CPU torch's grain size, above which it would share one operation among threads; all
# that an update of them touches stays in a core's cache. On a GPU enough to be worth its kernels' launches: some 150 MiB of
# scratch.
CHUNK_CPU = 1 << 15
CHUNK_DEVICE = 1 << 23
# The word of random bits with which two states are rounded to nearest.
HALVES = -0x7FFF8000
BF16_MANTISSA_BITS = 7


@dataclass(frozen=True)
class StateKind:
    """A state of an optimizer. retained: the share of it that an update retains."""

    name: str
    is_signed: bool
    retained: float


@dataclass(frozen=True)
class StateRun:
    """Elements [start, stop) of a shard."""

    shard: FlatShard
    start: int
    stop: int
    parameter: str = ""  # of which they are
    shape: tuple[int, ...] = ()  # of the whole parameter
    boxes: tuple[Box, ...] = ()  # of the parameter, one after the other
    place: int = 0  # where they begin in the storage
    blocks: Run = (0, 0)  # of the storage, [first, last)

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class StateChunk:
    """Runs that are updated together, and the blocks of the storage that they fill: [first, last)."""

    runs: tuple[StateRun, ...]
    blocks: Run = (0, 0)


class States:
    """The states of a group of shards, by name, in the gradient's dtype: a kernel updates them where they are.

    A kernel finds the states of a run in `views` between `load` and `store`. chunks: in the order in which they are updated.
    """

    def __init__(self, names: Sequence[str], shards: Sequence[FlatShard], chunks: Sequence[StateChunk]):
        self.chunks = chunks
        self._states = {shard: {name: torch.zeros_like(shard.gradient) for name in names} for shard in shards}

    def views(self, chunk: StateChunk, run: StateRun) -> dict[str, Tensor]:
        """The run's states as a kernel updates them, [numel] each in the master's dtype."""
        return {name: state[run.start : run.stop] for name, state in self._states[run.shard].items()}

    def load(self, chunk: StateChunk) -> None:
        """Decode the chunk's states into its views."""

    def store(self, chunk: StateChunk, step: int) -> None:
        """Keep what is in the chunk's views; step: of the run, for which random bits are drawn."""

    def values(self, shard: FlatShard, name: str) -> Tensor:
        """A shard's state as a checkpoint keeps it, [n]: its memory, or a copy in bf16, which `close` takes if `open` made it."""
        return self._states[shard][name]

    def memory(self, shard: FlatShard, start: int, stop: int) -> Iterator[Tensor]:
        """All memory of the states of elements [start, stop), which are whole runs."""
        return (state[start:stop] for state in self._states[shard].values())

    def open(self) -> None:
        """Have `values` return memory that may be written."""

    def close(self) -> None:
        """Take what was written since `open`."""


class Bf16Storage:
    """One state of all elements in bf16, each by itself."""

    block = 1

    def __init__(self, num_blocks: int, device: torch.device, kind: StateKind):
        self.is_stochastic = is_needed(kind.retained, BF16_MANTISSA_BITS, kind.is_signed)
        self.numbers = torch.zeros(num_blocks, dtype=torch.bfloat16, device=device)
        self._kernel = BITS.on(device)

    def decode(self, blocks: Run, out: Tensor) -> None:
        """Write the numbers of blocks [first, last) to `out`: flat, of any dtype."""
        out.copy_(self.numbers[slice(*blocks)])

    def encode(self, blocks: Run, values: Tensor, bits: Tensor, shift: int) -> None:
        """Keep `values`, fp32, rounded by 16 of `bits`, int32, behind the lowest `shift`: both flat."""
        self._kernel.round(values, bits, shift, self.numbers[slice(*blocks)])

    def memory(self, blocks: Run) -> tuple[Tensor, ...]:
        """All memory of these blocks."""
        return (self.numbers[slice(*blocks)],)


class Int8Storage:
    """One state of all elements as codes of `low_bit`: a byte for each element, and a byte for the exponent of each block."""

    block = BLOCK

    def __init__(self, num_blocks: int, device: torch.device, kind: StateKind):
        self._codes = SIGNED if kind.is_signed else UNSIGNED
        self.is_stochastic = is_needed(kind.retained, self._codes.mantissa_bits, kind.is_signed)
        self.codes = torch.zeros(num_blocks * BLOCK, dtype=self._codes.dtype, device=device)
        self.exponents = torch.zeros(num_blocks, dtype=torch.uint8, device=device)
        self._kernel = BITS.on(device)

    def decode(self, blocks: Run, out: Tensor) -> None:
        self._kernel.decode(*self.memory(blocks), self._codes, out)

    def encode(self, blocks: Run, values: Tensor, bits: Tensor, shift: int) -> None:
        self._kernel.encode(values, bits, shift, *self.memory(blocks), self._codes)

    def memory(self, blocks: Run) -> tuple[Tensor, Tensor]:
        return self.codes[blocks[0] * BLOCK : blocks[1] * BLOCK], self.exponents[slice(*blocks)]


class LowBitStates(States):
    """States in few bits, each in a storage of class `make`."""

    def __init__(
        self,
        make: type[Bf16Storage] | type[Int8Storage],
        kinds: Sequence[StateKind],
        shards: Sequence[FlatShard],
        device: torch.device,
        seed: int,
    ):
        assert len(kinds) <= 2, "a word of random bits is enough for two roundings"
        block = make.block
        self.chunks: Sequence[StateChunk] = list(cut_chunks(shards, block, chunk_size(device)))
        self.storages: dict[str, Bf16Storage | Int8Storage] = {
            kind.name: make(self.chunks[-1].blocks[1], device, kind) for kind in kinds
        }
        size = max(1, *(chunk.blocks[1] - chunk.blocks[0] for chunk in self.chunks)) * block
        dtype = shards[0].gradient.dtype
        self._scratch = {name: torch.zeros(size, dtype=dtype, device=device) for name in self.storages}
        self._bits = torch.full((size,), HALVES, dtype=torch.int32, device=device)
        self._nearest = self._bits.clone()
        # Values are encoded in fp32, also where a verification keeps fp64: it does so to new memory alone.
        self._narrow = None if dtype == torch.float32 else torch.zeros(size, device=device)
        self._kernel = BITS.on(device)
        self._draws = any(each.is_stochastic for each in self.storages.values())
        self._seed, self._block, self._device = seed, block, device
        self._copies: dict[tuple[FlatShard, str], Tensor] = {}

    def views(self, chunk: StateChunk, run: StateRun) -> dict[str, Tensor]:
        return {name: scratch[self._within(chunk, run)] for name, scratch in self._scratch.items()}

    def load(self, chunk: StateChunk) -> None:
        size = self._size_of(chunk)
        for name, storage in self.storages.items():
            storage.decode(chunk.blocks, self._scratch[name][:size])

    def store(self, chunk: StateChunk, step: int) -> None:
        for run in chunk.runs if self._draws else ():
            key = (self._seed, "moments", step, run.parameter)
            self._kernel.draw(key, run.boxes, run.shape, self._bits[self._within(chunk, run)])
        self._encode(chunk)

    def values(self, shard: FlatShard, name: str) -> Tensor:
        if (shard, name) in self._copies:
            return self._copies[shard, name]
        copy = torch.empty(shard.value.numel(), dtype=torch.bfloat16, device=self._device)
        for run in self._runs(shard):
            numbers = copy.new_empty((run.blocks[1] - run.blocks[0]) * self._block)
            self.storages[name].decode(run.blocks, numbers)
            copy[run.start : run.stop] = numbers[self._in_blocks(run)]
        return copy

    def memory(self, shard: FlatShard, start: int, stop: int) -> Iterator[Tensor]:
        runs = [run for run in self._runs(shard) if start <= run.start < stop]
        return (each for run in runs for storage in self.storages.values() for each in storage.memory(run.blocks))

    def open(self) -> None:
        shards = dict.fromkeys(run.shard for chunk in self.chunks for run in chunk.runs)
        self._copies = {(shard, name): self.values(shard, name) for shard in shards for name in self.storages}

    def close(self) -> None:
        self._bits.copy_(self._nearest)
        for chunk in self.chunks:
            for name, scratch in self._scratch.items():
                scratch.zero_()  # padding, where another chunk has its numbers
                for run in chunk.runs:
                    scratch[self._within(chunk, run)] = self._copies[run.shard, name][run.start : run.stop]
            self._encode(chunk)
        self._copies = {}

    def block_starts(self, shard: FlatShard) -> Tensor:
        """For each element of a shard the number, within its parameter, of the first element of its block: int64 [n]."""
        starts = torch.empty(shard.value.numel(), dtype=torch.int64)
        for run in self._runs(shard):
            numbers = torch.cat([_number_elements(box, run.shape) for box in run.boxes])
            offset = self._in_blocks(run).start
            block = (torch.arange(run.numel) + offset) // self._block
            starts[run.start : run.stop] = numbers[(block * self._block - offset).clamp(min=0)]
        return starts

    def _encode(self, chunk: StateChunk) -> None:
        size = self._size_of(chunk)
        for index, (name, storage) in enumerate(self.storages.items()):
            bits = (self._bits if storage.is_stochastic else self._nearest)[:size]
            values = self._scratch[name][:size]
            values = values if self._narrow is None else self._narrow[:size].copy_(values)
            storage.encode(chunk.blocks, values, bits, index * ROUNDING_BITS)

    def _size_of(self, chunk: StateChunk) -> int:
        """Elements of a chunk's blocks."""
        return (chunk.blocks[1] - chunk.blocks[0]) * self._block

    def _runs(self, shard: FlatShard) -> list[StateRun]:
        return [run for chunk in self.chunks for run in chunk.runs if run.shard is shard]

    def _within(self, chunk: StateChunk, run: StateRun) -> slice:
        """The place of a run's elements in the scratch of its chunk."""
        first = run.place - chunk.blocks[0] * self._block
        return slice(first, first + run.numel)

    def _in_blocks(self, run: StateRun) -> slice:
        """The place of a run's elements in its blocks."""
        first = run.place - run.blocks[0] * self._block
        return slice(first, first + run.numel)


def make_states(
    dtype: MomentsDtype, kinds: Sequence[StateKind], shards: Sequence[FlatShard], device: torch.device, seed: int
) -> States:
    """States of zeros. seed: of stochastic rounding."""
    has_elements = any(shard.value.numel() for shard in shards)  # a rank may train nothing
    if dtype == "fp32" or not kinds or not has_elements:
        # All at once, unless a shard's values are brought to fp32 for the update.
        is_chunked = any(map(is_rounded, shards))
        whole = StateChunk(tuple(StateRun(shard, 0, shard.value.numel()) for shard in shards))
        chunks = list(cut_chunks(shards, 1, chunk_size(device))) if is_chunked else [whole]
        return States([kind.name for kind in kinds], shards, chunks)
    return LowBitStates(Bf16Storage if dtype == "bf16" else Int8Storage, kinds, shards, device, seed)


def chunk_size(device: torch.device) -> int:
    """Elements that are decoded at a time."""
    return CHUNK_CPU if device.type == "cpu" else CHUNK_DEVICE


def cut_chunks(shards: Iterable[FlatShard], block: int, size: int) -> Iterator[StateChunk]:
    """The runs of all shards, in order, in chunks of at most `size` elements of storage; at least one, perhaps without a run."""
    runs: list[StateRun] = []
    first = last = 0  # blocks
    for shard in shards:
        for run in _cut_runs(shard, block, size):
            count = run.blocks[1] - run.blocks[0]
            if runs and (last + count - first) * block > size:
                yield StateChunk(tuple(runs), (first, last))
                runs, first = [], last
            offset = last - run.blocks[0]
            runs.append(replace(run, place=run.place + offset * block, blocks=(last, last + count)))
            last += count
    yield StateChunk(tuple(runs), (first, last))


def count_state_bytes(dtype: MomentsDtype, intervals: Iterable[Run]) -> int:
    """Bytes of one state in few bits. intervals: of the local elements of each parameter that a shard has some of."""
    assert dtype != "fp32", "a state in the master's dtype has the master's bytes"
    if dtype == "bf16":
        return sum(torch.bfloat16.itemsize * (stop - start) for start, stop in intervals)
    return sum((last - first) * (BLOCK + 1) for first, last in (_blocks_of(each, BLOCK) for each in intervals))


def _cut_runs(shard: FlatShard, block: int, size: int) -> Iterator[StateRun]:
    """A shard's runs, as if the storage had all local elements of each parameter."""
    assert size % block == 0, (size, block)
    origin = 0
    for parameter, layout in zip(shard.parameters, shard.layouts, strict=True):
        low, high = layout.interval or (0, layout.numel_local)
        cuts = [low, *range((low // size + 1) * size, high, size), high]
        for start, stop in pairwise(cuts):
            boxes = tuple(layout.boxes_between(start, stop))
            where = origin + start - low, origin + stop - low
            yield StateRun(shard, *where, parameter, layout.shape, boxes, start, _blocks_of((start, stop), block))
        origin += high - low
    assert origin == shard.value.numel(), "a shard without layouts has moments in the master's dtype only"


def _blocks_of(interval: Run, block: int) -> Run:
    """The blocks in which elements [start, stop) of a parameter lie."""
    start, stop = interval
    return (start // block, -(-stop // block)) if start < stop else (0, 0)


def _number_elements(box: Box, shape: tuple[int, ...]) -> Tensor:
    """The numbers of a box's elements in a row-major tensor of `shape`, in order: int64."""
    numbers = torch.zeros((), dtype=torch.int64)
    for offset, size, of_all in zip(box.offsets, box.sizes, shape, strict=True):
        numbers = numbers[..., None] * of_all + torch.arange(offset, offset + size)
    return numbers.flatten()


def is_rounded(shard: FlatShard) -> bool:
    """Whether a shard's values have fewer bits than its gradient, in whose dtype a kernel updates."""
    return shard.value.dtype != shard.gradient.dtype


class Masters:
    """The values of chunks, by their number, as a kernel updates them. seed: of the rounding.

    Memory: the largest chunk in fp32, and its random bits.
    """

    def __init__(self, chunks: Sequence[StateChunk], device: torch.device, seed: int):
        self._chunks, self._seed = chunks, seed
        self._rounded = [[run for run in chunk.runs if is_rounded(run.shard)] for chunk in chunks]
        size = max((sum(run.numel for run in runs) for runs in self._rounded), default=0)
        self._scratch = torch.zeros(size, device=device)
        self._bits = torch.zeros(size, dtype=torch.int32, device=device)
        self._kernel = BITS.on(device)

    def views(self, number: int) -> list[Tensor]:
        """For each run of a chunk the values that a kernel updates between `load` and `store`: [numel], the gradient's dtype."""
        rounded = iter(self._split(self._scratch, number))
        return [next(rounded) if is_rounded(run.shard) else _values(run) for run in self._chunks[number].runs]

    def load(self, number: int) -> None:
        """Copy a chunk's values to its views."""
        for run, scratch in zip(self._rounded[number], self._split(self._scratch, number), strict=True):
            scratch.copy_(_values(run))

    def store(self, number: int, step: int) -> None:
        """Keep what is in a chunk's views; step: of the run, for which random bits are drawn."""
        scratches, bits = self._split(self._scratch, number), self._split(self._bits, number)
        for run, scratch, words in zip(self._rounded[number], scratches, bits, strict=True):
            self._kernel.draw((self._seed, "master", step, run.parameter), run.boxes, run.shape, words)
            self._kernel.round(scratch, words, 0, _values(run))

    def _split(self, flat: Tensor, number: int) -> Sequence[Tensor]:
        sizes = [run.numel for run in self._rounded[number]]
        return flat[: sum(sizes)].split_with_sizes(sizes) if sizes else ()


def _values(run: StateRun) -> Tensor:
    return run.shard.value[run.start : run.stop]
