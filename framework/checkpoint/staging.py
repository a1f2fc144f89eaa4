"""What a rank writes, staged in host memory, so that training may change its tensors while their bytes go to the disk.

    tensors --copy--> segments of host memory --hash--> --write--> file

    whole      all bytes have a place: the tensors are free as soon as they are copied, and what is written, once more after an
               error, is the copy
    in turns   a segment is filled while the one before is written: the tensors are free when the file is on the disk. Where
               memory is short, for tensors on a disk, and where the loop waits anyway

A hash is of the bytes in a segment, and taken once: what changes them on their way to the disk, or on it, is damage.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from framework.checkpoint.blocks import BlockHashes
from framework.checkpoint.entry import Entry
from framework.checkpoint.index import ALIGNMENT, BLOCK_BYTES
from framework.comm.transfer import Arrival, Moment, segment_on_host

# A power of two, which is what torch's cache of pinned memory rounds up to; large enough that Python is asked rarely.
SEGMENT_BYTES = 16 << 20
# How many go in turns.
FEW_SEGMENTS = 2
# The share of the free memory that a node's ranks may take together to stage everything: loaders and page tables grow as well.
USABLE = 0.5


class StagingMemory:
    """Segments of host memory, kept for the run: taken when they are first filled. For tensors of `device`.

    max_bytes: what may be taken; None: as much as the node can spare, found out when it is first asked for; 0: a few segments.
    num_neighbours: ranks that share the node's memory.
    """

    def __init__(
        self,
        device: torch.device,
        max_bytes: int | None = None,
        num_neighbours: int = 1,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.segment_bytes = segment_bytes
        self._device, self._max_bytes, self._num_neighbours = device, max_bytes, num_neighbours
        self._segments: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Taken so far."""
        return sum(map(len, self._segments))

    def holds(self, num_bytes: int) -> bool:
        """Whether so many bytes may be staged at once."""
        if self._max_bytes is None:
            free = free_bytes()
            self._max_bytes = 0 if free is None else int(USABLE * free / self._num_neighbours)
        return num_bytes <= self._max_bytes

    def segment(self, number: int, size: int) -> Tensor:
        """uint8 [size], at most `segment_bytes`. The last one is as large as it was ever asked for."""
        if number == len(self._segments):
            self._segments.append(segment_on_host(size, self._device))
        elif len(self._segments[number]) < size:
            self._segments[number] = segment_on_host(size, self._device)
        return self._segments[number][:size]


class StagedFile:
    """The bytes of a rank's file: the entries one after another, each aligned to ALIGNMENT, then the tree of their hashes.

    moment: when the entries had the values to be saved. fault: is told of every segment that is staged. root: of the tree, once
    `views` has come to its end.
    """

    def __init__(
        self,
        entries: Sequence[Entry],
        memory: StagingMemory,
        moment: Moment,
        fault: Callable[[str], None] = lambda point: None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._entries, self._memory, self._moment, self._fault = entries, memory, moment, fault
        self._block_bytes = block_bytes
        self.offsets, self.num_bytes = place_entries(entries)
        self.root: int | None = None
        is_in_memory = all(isinstance(entry.data, Tensor) for entry in entries)
        self.is_whole = is_in_memory and memory.holds(self.num_bytes)
        self._staged: list[tuple[Tensor, Arrival]] = []
        self._hashes, self._num_hashed, self._tree = BlockHashes(block_bytes), 0, b""

    def stage(self) -> Arrival:
        """Where all bytes have a place, start to copy them there; the tensors may change behind the end of these copies, which
        is returned. Else nothing."""
        if self.is_whole:
            self._staged = list(self._fill(range(-(-self.num_bytes // self._memory.segment_bytes))))
        return self._moment.arrival()

    def views(self) -> Iterator[memoryview]:
        """All bytes of the file, each view until the next is asked for. Once more after an error: the same bytes where they are
        staged whole, else the tensors', which must not have changed."""
        if not self.is_whole:
            self._hashes, self._num_hashed, self.root = BlockHashes(self._block_bytes), 0, None
        for number, (segment, arrival) in enumerate(self._staged if self.is_whole else self._fill_in_turns()):
            arrival.wait_on_host()
            view = segment.numpy().data
            if number == self._num_hashed:
                self._hashes.add(view)
                self._num_hashed += 1
            yield view
        if self.root is None:
            self._tree, self.root = self._hashes.finish()
        yield memoryview(self._tree)

    def _fill_in_turns(self) -> Iterator[tuple[Tensor, Arrival]]:
        """One segment ahead: it is copied from the device while the one before is written."""
        count = -(-self.num_bytes // self._memory.segment_bytes)
        former = None
        for filled in self._fill(number % FEW_SEGMENTS for number in range(count)):
            if former is not None:
                yield former
            former = filled
        if former is not None:
            yield former

    def _fill(self, numbers: Iterator[int] | range) -> Iterator[tuple[Tensor, Arrival]]:
        """The parts of segments that were filled, in order, each with the end of its copies. numbers: of the segments to fill."""
        parts = self._parts()
        part, left = torch.empty(0, dtype=torch.uint8), self.num_bytes
        for number in numbers:
            size = min(left, self._memory.segment_bytes)
            segment, used = self._memory.segment(number, size), 0
            while used < size:
                while not len(part):
                    part = next(parts)
                count = min(len(part), size - used)
                self._moment.copy(part[:count], segment[used : used + count])
                part, used = part[count:], used + count
            left -= size
            yield segment, self._moment.arrival()
            self._fault("staging")

    def _parts(self) -> Iterator[Tensor]:
        """The bytes of the file in order, each part until the next is asked for."""
        zeros, size = torch.zeros(ALIGNMENT, dtype=torch.uint8), 0
        for entry in self._entries:
            yield zeros[: -size % ALIGNMENT]
            for piece in entry.pieces():
                yield piece.detach().view(torch.uint8)
            size += -size % ALIGNMENT + entry.data.nbytes


def place_entries(entries: Sequence[Entry]) -> tuple[list[int], int]:
    """The offset of each entry in the file that has them one after another, and the file's bytes of data."""
    offsets, size = [], 0
    for entry in entries:
        offsets.append(size + -size % ALIGNMENT)
        size = offsets[-1] + entry.data.nbytes
    return offsets, size


def free_bytes() -> int | None:
    """Memory that this node, or this process's container or job, can still give; None where the kernel does not say."""
    found = None
    with suppress(OSError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        found = int(match[1]) << 10 if match else None
    with suppress(OSError, ValueError):  # "max" where there is no limit
        folder = Path("/sys/fs/cgroup")
        left = int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
        # What files have in the page cache counts as taken, and goes where memory is asked for; but for those of a tmpfs.
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        left += int(counts.get("file", 0)) - int(counts.get("shmem", 0))
        found = left if found is None else min(found, left)
    return found
