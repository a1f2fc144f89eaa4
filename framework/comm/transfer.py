"""Copies between the host and this rank's device that nobody waits for.

A copy is asynchronous only if the host's side of it is page-locked ("pinned"): from pageable memory CUDA copies through a buffer
of its own, and `torch.tensor(values, device=cuda)` waits for the device outright. So whatever a step sends goes through here.

Pinned memory comes from torch's cache of it, which gives a block out again only when the copies that were started from it have
run. It has to be asked for with this rank's device as the current one, or a process holds memory on the first GPU as well.

On a CPU the host's memory is the device's. What a step sends is then not copied; what has its home on the host is copied from
memory to memory, at once, so that offload can be proved without a GPU.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

# Of the host's memory.
PAGE_BYTES = 4096


def choose_current(device: torch.device) -> None:
    """Make the device current in this thread: a new thread's is the first GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def pin(x: Tensor, device: torch.device) -> Tensor:
    """x in memory from which `upload` to the device need not copy it again; x itself where it is in such memory.

    x: a tensor of the host, any shape and dtype.
    """
    return x.pin_memory() if device.type == "cuda" and not x.is_pinned() else x


def upload(x: Tensor, device: torch.device) -> Tensor:
    """x on the device, in the order of its current stream. x may be dropped or given back at once, but not written to.

    x: a tensor of the host, any shape and dtype; the result has both.
    """
    return pin(x, device).to(device, non_blocking=True)


def upload_values(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host as a vector [len(values)] on the device."""
    return upload(torch.tensor(values, dtype=dtype), device)


class AsyncHostCopy:
    """A vector on its way from the device to the host: started now, waited for only when its values are asked for.

    vector: [n], any dtype. It may be written to afterwards by what is queued on its current stream.
    """

    def __init__(self, vector: Tensor):
        self._done = torch.cuda.Event() if vector.is_cuda else None
        # Pinned, or the copy would wait for all that the device has still to do, here and now.
        self._host = torch.empty_like(vector, device="cpu", pin_memory=vector.is_cuda).copy_(vector, non_blocking=True)
        if self._done:
            # On the current stream, behind the copy: the event says that the host's memory is filled.
            self._done.record()

    def values(self) -> list[float]:
        """The values; waits until they have arrived."""
        # The host waits for this copy alone, not for the step that the device has begun since.
        if self._done:
            self._done.synchronize()
        return self._host.tolist()


def zeros_on_host(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of the host, [numel], that copies to and from the device can use beside what it computes."""
    return torch.zeros(numel, dtype=dtype, pin_memory=device.type == "cuda")


def write_across(target: Tensor, source: Tensor) -> None:
    """Cast and copy, in the order of the device's current stream; `source` may be written to at once.

    target, source: [n], on the host or the device, of any dtypes; memory of the device's side is not taken.
    """
    if target.is_cuda and not source.is_cuda:
        # Cast here, so that half of the bytes travel. torch's cache of pinned memory keeps a block until its copy has run.
        staging = torch.empty(source.shape, dtype=target.dtype, pin_memory=True)
        target.copy_(staging.copy_(source), non_blocking=True)
    else:
        target.copy_(source)


def fetch(x: Tensor, device: torch.device) -> Tensor:
    """x, any shape, where `device` reads it: x itself if it is there. The host waits for what it fetches from a device."""
    return x if x.device == device else x.to(device)


class Arrival:
    """The end of the copies that were queued on a `HomeTransfers`."""

    def __init__(self) -> None:
        self._done: torch.cuda.Event | None = None

    def record(self) -> None:
        """Take what is queued on the current stream for its end."""
        self._done = torch.cuda.Event()
        self._done.record()

    def wait(self) -> None:
        """Have the device's current stream wait; the host goes on."""
        if self._done is not None:
            self._done.wait()

    def wait_on_host(self) -> None:
        """Return when the host may read what has come."""
        if self._done is not None:
            self._done.synchronize()


def segment_on_host(num_bytes: int, device: torch.device) -> Tensor:
    """Memory of the host, uint8 [num_bytes], that a `Moment` copies to; from a multiple of PAGE_BYTES on, so that a file can be
    written straight from it. What is pinned is whole pages anyway."""
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    memory = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE_BYTES :][:num_bytes]


class Moment:
    """A point in the device's work, up to which another thread copies results to the host beside later work. On a CPU there is
    nothing to wait for: whoever changes a source waits until it is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._computed = Arrival()
        if device.type == "cuda":
            self._computed.record()

    @contextmanager
    def copies(self) -> Iterator[None]:
        """A context in which this thread's copies run behind all that was computed at the moment, and beside what comes later."""
        if self._device.type != "cuda":
            yield
            return
        choose_current(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            # In this stream, not the host: the copies may be queued long before the device gets there.
            self._computed.wait()
            yield

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Start to copy bytes, uint8 [n], from anywhere into memory of `segment_on_host`."""
        target.copy_(source, non_blocking=True)

    def arrival(self) -> Arrival:
        """The end of the copies so far, of this thread."""
        arrival = Arrival()
        if self._device.type == "cuda":
            arrival.record()
        return arrival


class HomeTransfers:
    """Copies between host and device beside what the device computes, one after the other. On a CPU they happen at once."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def queue(self, device: torch.device) -> Iterator[Arrival]:
        """A context in which copies run behind all that is on the current stream now, and beside what comes there later."""
        arrival = Arrival()
        if device.type != "cuda":
            yield arrival
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        # A copy reads what the device has computed so far, and may write into memory that kernels before it still read.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield arrival
            arrival.record()

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Start to copy `source`, [n] of the host and from `zeros_on_host`, into `target`, [n] of the device, in the order of the
        current stream, which within `queue` is that of these transfers."""
        target.copy_(source, non_blocking=True)

    def download(self, source: Tensor, target: Tensor) -> "Download":
        """Start to copy `source`, [n] of the device, into `target`, [n] of the host and from `zeros_on_host`."""
        with self.queue(source.device) as arrival:
            target.copy_(source, non_blocking=True)
        return Download(source, target, arrival)


class Download:
    """A copy on its way to the host. `source` must not be written to before `wait` returns, `target` not be read."""

    def __init__(self, source: Tensor, target: Tensor, arrival: Arrival):
        self._source, self._target, self._arrival = source, target, arrival

    def wait(self) -> None:
        """Return when the host may read the target."""
        self._arrival.wait_on_host()
        # A CPU copies at once, so an order that is wrong would go unnoticed there: a GPU might have read the new values.
        if not self._source.is_cuda:
            same = torch.equal(self._source.view(torch.uint8), self._target.view(torch.uint8))
            assert same, f"{tuple(self._source.shape)} was written to while it was on its way to the host"


# What memory holds that nobody has copied to yet: as a float of any width it is NaN.
NO_VALUE = 0xFF

# (target, source), of equal numbers of elements and equal dtypes.
CopyPair = tuple[Tensor, Tensor]


class Copies(Protocol):
    """Copies under way."""

    def wait(self) -> None:
        """Make the current stream wait for them. Any number of times."""


class CopyStream(Protocol):
    """A stream that does nothing but copy."""

    def start(self, pairs: Sequence[CopyPair]) -> Copies:
        """Start the copies, in this order, behind what the current stream has been given so far."""


def open_copy_stream(device: torch.device) -> CopyStream:
    """A new stream for copies to or from the device."""
    return CudaCopyStream(device) if device.type == "cuda" else LateCopyStream()


def make_host_block(num_bytes: int, device: torch.device) -> Tensor:
    """Host memory, uint8 [num_bytes] of any content, that the device copies to and from without the host."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


class CudaCopyStream:
    """A CUDA stream of its own: PCIe carries both directions at once, so each direction has one."""

    def __init__(self, device: torch.device):
        self._device, self._stream = device, torch.cuda.Stream(device)

    def start(self, pairs: Sequence[CopyPair]) -> "CudaCopies":
        """See `CopyStream`. The host's side of each pair is pinned."""
        # A source is complete, and nobody reads a target's former content any more, when the computation has come this far.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
            return CudaCopies(self._device, self._stream.record_event())


class CudaCopies:
    """done: the event behind the last copy."""

    def __init__(self, device: torch.device, done: torch.cuda.Event):
        self._device, self._done = device, done

    def wait(self) -> None:
        """See `Copies`."""
        torch.cuda.current_stream(self._device).wait_event(self._done)


class LateCopyStream:
    """The form for CPUs, which checks its callers."""

    def start(self, pairs: Sequence[CopyPair]) -> "LateCopies":
        """See `CopyStream`."""
        for target, _ in pairs:
            target.view(torch.uint8).fill_(NO_VALUE)
        return LateCopies(pairs)


class LateCopies:
    """Copies that are made in the wait."""

    def __init__(self, pairs: Sequence[CopyPair]):
        # Weak: whoever starts copies keeps both sides until the wait, as a device would need it.
        self._pairs = [(ref(target), ref(source)) for target, source in pairs]

    def wait(self) -> None:
        """See `Copies`."""
        pairs, self._pairs = self._pairs, []
        for to, of in pairs:
            target, source = to(), of()
            assert target is not None, "the target of a copy was given up before anybody waited for the copy"
            assert source is not None, "the source of a copy was given up before anybody waited for the copy"
            target.copy_(source)
