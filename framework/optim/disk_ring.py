"""Optimizer states on a disk (ZeRO-Infinity, Rajbhandari et al. 2021, section 6): a ring of read, compute, write.

    buffer   0          1          2          0          1           three are drawn
    read     chunk 0 -> chunk 1 -> chunk 2 -> chunk 3 ...            one thread, in order
    compute             chunk 0 -> chunk 1 -> chunk 2 ...            the caller's thread
    write                          chunk 0 -> chunk 1 ...            one thread, in order

A *shard* is what the optimizer updates at once, a flat run of n elements with several states (master, exp_avg, ...). It lies
in the file as chunks of a few MiB, which hold all states of their elements: one read brings all that an update of some elements
needs, and an update of all shards goes through the file from its beginning to its end.

    file     [ shard 0: chunk 0 | chunk 1 | ... ][ shard 1: ... ]
    chunk    [ master | exp_avg | exp_avg_sq | stamp ]              each part begins at a page

A chunk ends in a stamp: which chunk this is, and how often it was written. The host remembers that, so a file that was truncated,
overwritten or rolled back is noticed when it is read: zeros of a hole would be taken for moments.

A plan asks how large the file is (`file_bytes`) and how much memory the host needs (`ring_bytes`): the ring and a page, whatever
the shards' sizes.

    states = DiskStates(disk_path / run_id, f"rank-{rank}", shards)
    states.tensor(0, "master").write(values)                 # [n]: the first values; moments are zero
    states.update(range(len(shards)), update_chunk)          # a step
    states.tensor(0, "exp_avg").read()                       # a checkpoint: `pieces` in bounded memory, `[a:b]` an interval
    states.close()                                           # removes the file
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from mmap import mmap
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from framework.errors import StorageError
from framework.optim.disk_file import PAGE_BYTES, DiskFile, print_line

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


# A shard's number, which of its elements, and their states by name: updated in place.
Update = Callable[[int, slice, dict[str, Tensor]], None]


class DiskStates:
    """The states of a rank's shards in one file, all zero at first; closed when the run ends, however it does.

    folder, name: of `DiskFile`, whose errors it raises. For one thread at a time. Raises StorageError, from any method, when the
    disk fails or the file is not as it was written; the states are then of no step, and so is every later use refused.
    """

    def __init__(
        self, folder: Path, name: str, shards: Sequence[DiskShard], say: Callable[[str], None] = print_line
    ) -> None:
        self.shards, self.chunks = tuple(shards), place_chunks(shards)
        every = list(chain.from_iterable(self.chunks))
        self.host_bytes = ring_bytes(self.chunks)
        self.file = DiskFile(folder, name, file_bytes(self.chunks), say)
        self._buffers = [_aligned(max((each.num_bytes for each in every), default=0)) for _ in range(NUM_BUFFERS)]
        self._page = _aligned(PAGE_BYTES)
        self._times_written = np.zeros(len(every), np.int64)
        self._broken = False

    def tensor(self, shard: int, name: str) -> "DiskTensor":
        """A state of a shard: [n]."""
        state = next(state for state in self.shards[shard].states if state.name == name)
        return DiskTensor(self, shard, state, 0, self.shards[shard].numel)

    def update(self, shards: Iterable[int], function: Update) -> None:
        """Call `function` for every chunk of the shards, in order, and write what it leaves in the states' tensors.

        function: (shard, slice of its elements, states by name), in this thread. The tensors are the ring's memory: they must not
        be used after it returns, so it waits for copies that it starts. What it raises ends the update, and the states are lost.
        """
        chunks = [chunk for shard in shards for chunk in self.chunks[shard]]
        # The threads live for this update only: none is left whatever ends the run, and two cost 0.1 ms.
        with self._alone(), ThreadPoolExecutor(1, "disk-read") as reader, ThreadPoolExecutor(1, "disk-write") as writer:
            self._turn(chunks, function, reader, writer)

    def read_part(self, chunk: Chunk, state: DiskState, first: int, last: int) -> Tensor:
        """Values [first, last) of a state in a chunk, in the memory of the ring."""
        with self._alone():
            return self._read_part(chunk, state, first, last)

    def write_part(self, chunk: Chunk, state: DiskState, first: int, values: Tensor) -> None:
        """Set the values [n] of a state in a chunk from `first` on. Pages that they share with other values are read before."""
        with self._alone():
            last = first + len(values)
            self._read_part(chunk, state, first, last).copy_(values)
            offset, num_bytes, _ = chunk.pages(state, first, last)
            self.file.write(memoryview(self._buffers[0])[:num_bytes], offset)
            self._stamp(chunk, memoryview(self._page))
            self.file.write(memoryview(self._page), chunk.offset + chunk.stamp)

    def close(self) -> None:
        """Remove the file. A second call does nothing."""
        self._broken = True
        self.file.close()

    def __enter__(self) -> "DiskStates":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _turn(
        self, chunks: Sequence[Chunk], function: Update, reader: ThreadPoolExecutor, writer: ThreadPoolExecutor
    ) -> None:
        """The ring: chunk i is in buffer i % NUM_BUFFERS, and is read once that buffer's last chunk is written."""
        reads: list[Future[None]] = []
        writes: list[Future[None]] = []

        def read(index: int) -> None:
            # The writer never waits for the reader, so that neither waits for itself. Its error comes out here as well.
            if index >= NUM_BUFFERS:
                writes[index - NUM_BUFFERS].result()
            self._read_chunk(chunks[index], self._buffers[index % NUM_BUFFERS])

        for index, chunk in enumerate(chunks):
            while len(reads) < min(index + NUM_BUFFERS - 1, len(chunks)):
                reads.append(reader.submit(read, len(reads)))
            reads[index].result()
            buffer = self._buffers[index % NUM_BUFFERS]
            function(chunk.shard, slice(chunk.start, chunk.stop), self._tensors(chunk, buffer))
            writes.append(writer.submit(self._write_chunk, chunk, buffer))
        for write in writes[-NUM_BUFFERS:]:
            write.result()

    def _tensors(self, chunk: Chunk, buffer: mmap) -> dict[str, Tensor]:
        return {
            state.name: torch.frombuffer(
                buffer, dtype=state.dtype, count=chunk.stop - chunk.start, offset=chunk.parts[state.name]
            )
            for state in self.shards[chunk.shard].states
        }

    def _read_part(self, chunk: Chunk, state: DiskState, first: int, last: int) -> Tensor:
        self.file.read(memoryview(self._page), chunk.offset + chunk.stamp)
        self._check_stamp(chunk, memoryview(self._page))
        offset, num_bytes, skipped = chunk.pages(state, first, last)
        self.file.read(memoryview(self._buffers[0])[:num_bytes], offset)
        return torch.frombuffer(self._buffers[0], dtype=state.dtype, count=last - first, offset=skipped)

    def _read_chunk(self, chunk: Chunk, buffer: mmap) -> None:
        self.file.read(memoryview(buffer)[: chunk.num_bytes], chunk.offset)
        self._check_stamp(chunk, memoryview(buffer)[chunk.stamp : chunk.num_bytes])

    def _write_chunk(self, chunk: Chunk, buffer: mmap) -> None:
        self._stamp(chunk, memoryview(buffer)[chunk.stamp : chunk.num_bytes])
        self.file.write(memoryview(buffer)[: chunk.num_bytes], chunk.offset)

    def _stamp(self, chunk: Chunk, page: memoryview) -> None:
        self._times_written[chunk.number] += 1
        np.frombuffer(page, np.int64)[:2] = self._expected(chunk)

    def _check_stamp(self, chunk: Chunk, page: memoryview) -> None:
        found = tuple(np.frombuffer(page, np.int64)[:2].tolist())
        if found != self._expected(chunk):
            raise self.file.damaged(f"chunk {chunk.number} has the stamp {found}, not {self._expected(chunk)}")

    def _expected(self, chunk: Chunk) -> tuple[int, int]:
        count = int(self._times_written[chunk.number])
        return (chunk.number + 1, count) if count else (0, 0)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A context for the one user of the ring's memory and the file. If it fails, every later use is refused."""
        if self._broken:
            raise StorageError(
                f"{self.file.path} is closed, in use, or an update of its states failed: they are of no step"
            )
        self._broken = True
        yield
        self._broken = False


@dataclass(frozen=True, eq=False)
class DiskTensor:
    """A flat tensor [stop - start] that is in the file: values `start` to `stop` of a state. Slices are views of it."""

    states: DiskStates
    shard: int
    state: DiskState
    start: int
    stop: int

    @property
    def dtype(self) -> torch.dtype:
        return self.state.dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.stop - self.start,))

    def numel(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        return self.numel() * self.dtype.itemsize

    def __getitem__(self, where: slice) -> "DiskTensor":
        first, last, step = where.indices(self.numel())
        assert step == 1, where
        return DiskTensor(self.states, self.shard, self.state, self.start + first, self.start + max(first, last))

    def pieces(self) -> Iterator[Tensor]:
        """The values from first to last, a chunk's at a time: in the memory of the ring, so each only until the next is asked for
        and until the states are used otherwise."""
        for chunk, first, last in self._parts():
            yield self.states.read_part(chunk, self.state, first, last)

    def read(self) -> Tensor:
        """All values, in memory of their own."""
        whole = torch.empty(self.numel(), dtype=self.dtype)
        first = 0
        for piece in self.pieces():
            whole[first : first + len(piece)] = piece
            first += len(piece)
        return whole

    def write(self, values: Tensor) -> None:
        """Set all values, [n] of the host in any dtype."""
        assert values.shape == self.shape, (values.shape, self.shape)
        for chunk, first, last in self._parts():
            start = chunk.start + first - self.start
            self.states.write_part(chunk, self.state, first, values[start : start + last - first])

    def _parts(self) -> Iterator[tuple[Chunk, int, int]]:
        """The chunks that have some of the values, each with which of the state's values in it."""
        for chunk in self.states.chunks[self.shard]:
            first, last = max(self.start, chunk.start), min(self.stop, chunk.stop)
            if first < last:
                yield chunk, first - chunk.start, last - chunk.start


def _aligned(num_bytes: int) -> mmap:
    """Memory that begins at a page, as direct I/O needs it."""
    return mmap(-1, max(num_bytes, PAGE_BYTES))
