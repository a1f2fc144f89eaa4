"""Staging: a rank's entries in host memory, so that training may change its tensors while their bytes go to the disk.

    tensors --copy--> segments of host memory --hash--> --write--> file

    whole      all bytes are staged at once: the tensors are free as soon as they are copied, and the copy is written, again after
               an error
    in turns   a segment is filled while the one before is written: the tensors are free when the file is on the disk. Used if
               memory is short, for tensors on a disk, and if the loop waits anyway

The bytes in a segment are hashed once: any change of them on their way to the disk, or on it, is damage.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from framework.checkpoint.blocks import BlockHashes
from framework.checkpoint.index import ALIGNMENT, BLOCK_BYTES
from framework.comm.transfer import Arrival, Moment, segment_on_host, start_copy
from framework.mesh.layout import Layout
from framework.parallel.zero.buffers import StoredTensor

# A power of two, which is what torch's cache of pinned memory rounds up to; large enough that Python is asked rarely.
SEGMENT_BYTES = 16 << 20
# Segments that are filled and written in turns.
FEW_SEGMENTS = 2
# Share of the free memory that a node's ranks may take together to stage everything: loaders and page tables grow as well.
USABLE = 0.5


@dataclass(frozen=True, eq=False)
class Entry:
    """A named tensor as one rank holds it, to be saved or loaded."""

    name: str
    """Such as `weight/model.embed_tokens.weight`."""
    layout: Layout
    data: Tensor | StoredTensor
    """[elements that `layout` owns], contiguous, in the order of its boxes. Read when saving, filled in place when loading."""

    def __post_init__(self) -> None:
        owned = self.layout.numel_owned
        assert self.data.shape == (owned,), (self.name, self.data.shape, owned)
        is_whole = not isinstance(self.data, Tensor) or self.data.is_contiguous()
        assert is_whole, self.name

    def pieces(self) -> Iterator[Tensor]:
        """The data from first to last in 1-D tensors, each valid until the next is taken."""
        return iter((self.data,)) if isinstance(self.data, Tensor) else self.data.pieces()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


class StagingMemory:
    """Segments of host memory for tensors of `device`, allocated when first filled and kept for the run.

    max_bytes: the most that may be allocated; None: what the node can spare, measured at first use; 0: a few segments.
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
        """Bytes allocated so far."""
        return sum(map(len, self._segments))

    def holds(self, num_bytes: int) -> bool:
        """Whether `num_bytes` may be staged at once."""
        if self._max_bytes is None:
            free = free_bytes()
            self._max_bytes = 0 if free is None else int(USABLE * free / self._num_neighbours)
        return num_bytes <= self._max_bytes

    def segment(self, number: int, size: int) -> Tensor:
        """Segment `number`: uint8 [size], at most `segment_bytes`. The last one is as large as the largest size asked for."""
        if number == len(self._segments):
            self._segments.append(segment_on_host(size, self._device))
        elif len(self._segments[number]) < size:
            self._segments[number] = segment_on_host(size, self._device)
        return self._segments[number][:size]


class StagedFile:
    """The bytes of a rank's file: the entries one after another, each aligned to ALIGNMENT, then the tree of their hashes.

    moment: when the entries had the values to be saved. fault: called for every segment that is staged. root: of the tree, once
    `views` has ended.
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
        self.num_bytes = 0
        for entry in entries:
            self.num_bytes += -self.num_bytes % ALIGNMENT + entry.data.nbytes
        self.root: int | None = None
        is_in_memory = all(isinstance(entry.data, Tensor) for entry in entries)
        self.is_whole = is_in_memory and memory.holds(self.num_bytes)
        self._staged: list[tuple[Tensor, Arrival]] = []
        self._hashes, self._num_hashed, self._tree = BlockHashes(block_bytes), 0, b""

    def stage(self) -> Arrival:
        """Start to copy all bytes, if they are staged whole. The tensors may change after the returned end of these copies."""
        if self.is_whole:
            self._staged = list(self._fill(range(-(-self.num_bytes // self._memory.segment_bytes))))
        return Arrival(self._moment.device)

    def views(self) -> Iterator[memoryview]:
        """All bytes of the file, each view valid until the next is taken. Called again after an error, it gives the same bytes if
        they are staged whole, else the tensors', which must not have changed."""
        # Segments that are filled again after an error are hashed again: the tensors are read anew.
        if not self.is_whole:
            self._hashes, self._num_hashed, self.root = BlockHashes(self._block_bytes), 0, None
        for number, (segment, arrival) in enumerate(self._staged if self.is_whole else self._fill_in_turns()):
            # The copy from the device may still be under way: the host must not hash or write half of it.
            arrival.wait_on_host()
            view = segment.numpy().data
            # A second pass over staged bytes writes the same bytes and keeps the first pass's hashes: a later change of the
            # memory is then damage, not a new checkpoint.
            if number == self._num_hashed:
                self._hashes.add(view)
                self._num_hashed += 1
            yield view
        if self.root is None:
            self._tree, self.root = self._hashes.finish()
        yield memoryview(self._tree)

    def _fill_in_turns(self) -> Iterator[tuple[Tensor, Arrival]]:
        """Segments in turns, one ahead: it is copied from the device while the one before is written."""
        count = -(-self.num_bytes // self._memory.segment_bytes)
        former = None
        for filled in self._fill(number % FEW_SEGMENTS for number in range(count)):
            if former is not None:
                yield former
            former = filled
        if former is not None:
            yield former

    def _fill(self, numbers: Iterator[int] | range) -> Iterator[tuple[Tensor, Arrival]]:
        """Fill the segments of these numbers in order. Yields the filled bytes of each, with the end of its copies."""
        chunks = self._chunks()
        chunk, left = torch.empty(0, dtype=torch.uint8), self.num_bytes
        for number in numbers:
            size = min(left, self._memory.segment_bytes)
            segment, used = self._memory.segment(number, size), 0
            while used < size:
                while not len(chunk):
                    chunk = next(chunks)
                count = min(len(chunk), size - used)
                start_copy(segment[used : used + count], chunk[:count])
                chunk, used = chunk[count:], used + count
            left -= size
            yield segment, Arrival(self._moment.device)
            self._fault("staging")

    def _chunks(self) -> Iterator[Tensor]:
        """The bytes of the file in order: uint8, each valid until the next is taken."""
        zeros, size = torch.zeros(ALIGNMENT, dtype=torch.uint8), 0
        for entry in self._entries:
            yield zeros[: -size % ALIGNMENT]
            for piece in entry.pieces():
                yield piece.detach().view(torch.uint8)
            size += -size % ALIGNMENT + entry.data.nbytes


def free_bytes() -> int | None:
    """Free memory of this node, or of this process's container or job; None if the kernel does not say."""
    found = None
    with suppress(OSError):
        match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        found = int(match[1]) << 10 if match else None
    with suppress(OSError, ValueError):  # "max" if there is no limit
        folder = Path("/sys/fs/cgroup")
        left = int((folder / "memory.max").read_text()) - int((folder / "memory.current").read_text())
        # Files in the page cache count as used, but the kernel drops them on demand; not those of a tmpfs.
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        left += int(counts.get("file", 0)) - int(counts.get("shmem", 0))
        found = left if found is None else min(found, left)
    return found
