"""The layout of a rank's file of offloaded states: shards, cut into chunks that hold all states of their elements side by side.

    file     [ shard 0: chunk 0 | chunk 1 | ... ][ shard 1: ... ]
    chunk    [ master | exp_avg | exp_avg_sq | stamp ]              each part begins at a page

Pure: a plan asks it how large the file is and how much memory the host needs (`file_bytes`, `ring_bytes`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from framework.optim.disk_file import PAGE_BYTES

# Size of a chunk with all its states: large enough that a disk reads it at its full speed, small enough for any host.
CHUNK_BYTES = 8 << 20
# Three would do: a chunk is computed while the next is read and the one before is written. On two busy cores three reached 0.87
# of the disk's bandwidth, four 0.99 and six 1.09 (scripts/bench/disk_ring.py): a thread that comes late holds up nobody.
NUM_BUFFERS = 6


@dataclass(frozen=True)
class DiskState:
    """A state of a shard, such as its master: one value for each element."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class DiskShard:
    """`numel` elements that are updated at once, and their states. cuts: elements at which a chunk begins whatever its size."""

    numel: int
    states: tuple[DiskState, ...]
    cuts: tuple[int, ...] = ()

    @property
    def chunk_numel(self) -> int:
        """Elements of a full chunk: their states fill whole pages."""
        bytes_each = sum(state.dtype.itemsize for state in self.states)
        return max(1, CHUNK_BYTES // (bytes_each * PAGE_BYTES)) * PAGE_BYTES

    def bounds(self) -> Iterator[tuple[int, int]]:
        """The elements [start, stop) of each chunk."""
        for low, high in pairwise(sorted({0, *self.cuts, self.numel})):
            for start in range(low, high, self.chunk_numel):
                yield start, min(start + self.chunk_numel, high)


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a shard."""

    number: int  # among all chunks
    shard: int
    start: int
    stop: int
    offset: int  # in the file
    num_bytes: int  # in the file, with the stamp
    parts: dict[str, int]  # where each state begins in the chunk

    @property
    def stamp(self) -> int:
        """Where the stamp begins in the chunk."""
        return self.num_bytes - PAGE_BYTES

    def pages(self, state: DiskState, first: int, last: int) -> tuple[int, int, int]:
        """The whole pages that values [first, last) of a state are on: where the first begins in the file, the bytes of all, and
        those of the first one before the first value."""
        start = first * state.dtype.itemsize
        skipped = start % PAGE_BYTES
        num_bytes = whole_pages(skipped + (last - first) * state.dtype.itemsize)
        return self.offset + self.parts[state.name] + start - skipped, num_bytes, skipped


def place_chunks(shards: Sequence[DiskShard]) -> list[list[Chunk]]:
    """The chunks of each shard, in the order of the file. Pure: a plan asks it how large the file is."""
    placed: list[list[Chunk]] = []
    number = offset = 0
    for index, shard in enumerate(shards):
        placed.append([])
        for start, stop in shard.bounds():
            parts, size = {}, 0
            for state in shard.states:
                parts[state.name] = size
                size += whole_pages((stop - start) * state.dtype.itemsize)
            placed[-1].append(Chunk(number, index, start, stop, offset, size + PAGE_BYTES, parts))
            number, offset = number + 1, offset + size + PAGE_BYTES
    return placed


def file_bytes(chunks: Sequence[Sequence[Chunk]]) -> int:
    """Bytes of the file."""
    return sum(chunk.num_bytes for each in chunks for chunk in each)


def ring_bytes(chunks: Sequence[Sequence[Chunk]]) -> int:
    """Bytes of the host's memory: NUM_BUFFERS of the largest chunk, and a page."""
    return NUM_BUFFERS * max((chunk.num_bytes for each in chunks for chunk in each), default=0) + PAGE_BYTES


def whole_pages(num_bytes: int) -> int:
    """The bytes of all pages that `num_bytes` need."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
