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
from functools import cache
from weakref import ref

import torch
from torch import Tensor

# Page size of the host's memory.
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


class Arrival:
    """The end of what the device's current stream has been given so far; on a CPU, which copies at once, it is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            # Blocking: a host that spins until the event has passed takes a core from NCCL's proxy, for nearly all of a step.
            self._done = torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True))

    def wait(self) -> None:
        """Have the device's current stream wait; the host goes on."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def wait_on_host(self) -> None:
        """Return when the host may read what has come."""
        if self._done is not None:
            self._done.synchronize()


class AsyncHostCopy:
    """A vector on its way from the device to the host: started now, waited for only when its values are asked for.

    vector: [n], any dtype. It may be written to afterwards by what is queued on its current stream.
    """

    def __init__(self, vector: Tensor):
        # Pinned, or the copy would wait for all that the device has still to do, here and now.
        self._host = torch.empty_like(vector, device="cpu", pin_memory=vector.is_cuda).copy_(vector, non_blocking=True)
        # Behind the copy: the host's memory is filled then.
        self._arrival = Arrival(vector.device)

    def values(self) -> list[float]:
        """The values; waits until they have arrived."""
        # The host waits for this copy alone, not for the step that the device has begun since.
        self._arrival.wait_on_host()
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


def start_copy(target: Tensor, source: Tensor) -> None:
    """Start to copy, in the order of the device's current stream. target, source: [n] of one dtype, on the device and in memory
    of the host from `zeros_on_host` or `segment_on_host`."""
    target.copy_(source, non_blocking=True)


def fetch(x: Tensor, device: torch.device) -> Tensor:
    """x, any shape, where `device` reads it: x itself if it is there. The host waits for what it fetches from a device."""
    return x if x.device == device else x.to(device)


def segment_on_host(num_bytes: int, device: torch.device) -> Tensor:
    """Memory of the host, uint8 [num_bytes] of any content, that the device copies to and from without the host; from a multiple
    of PAGE_BYTES on, so that a file can be written straight from it. What is pinned is whole pages anyway."""
    if device.type == "cuda":
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    memory = torch.empty(num_bytes + PAGE_BYTES, dtype=torch.uint8)
    return memory[-memory.data_ptr() % PAGE_BYTES :][:num_bytes]


class Moment:
    """A point in the device's work, up to which another thread copies results to the host beside later work. On a CPU there is
    nothing to wait for: whoever changes a source waits until it is copied."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._computed = Arrival(device)

    @contextmanager
    def copies(self) -> Iterator[None]:
        """A context in which this thread's copies run behind all that was computed at the moment, and beside what comes later."""
        if self.device.type != "cuda":
            yield
            return
        choose_current(self.device)
        with torch.cuda.stream(_stream_of_moments(self.device)):
            # In this stream, not the host: the copies may be queued long before the device gets there.
            self._computed.wait()
            yield


@cache
def _stream_of_moments(device: torch.device) -> torch.cuda.Stream:
    # One for all saves. torch deals streams in turn from a pool of 32, NCCL's as well: with a new one for each save the copies
    # would in the end be queued in front of a collective.
    return torch.cuda.Stream(device)


# (target, source), of equal numbers of elements and equal dtypes.
CopyPair = tuple[Tensor, Tensor]


class CopyStream:
    """A stream of a GPU for copies beside computation, one after the other. PCIe carries both directions at once, so each
    direction has one of its own where they need no order. Without a GPU copies happen at once, or with `start` in the wait for
    them."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def queue(self, device: torch.device) -> Iterator[None]:
        """A context in which copies run behind all that is on the current stream now, and beside what comes there later."""
        if device.type != "cuda":
            yield
            return
        self._stream = self._stream or torch.cuda.Stream(device)
        # A copy reads what the device has computed so far, and may write into memory that kernels before it still read.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            yield

    def start(self, pairs: Sequence[CopyPair]) -> "Copies":
        """Start the copies, in this order, behind what the current stream has been given so far. The host's side of each pair is
        pinned."""
        device = next((each.device for pair in pairs for each in pair if each.is_cuda), None)
        if device is None:
            return LateCopies(pairs)
        with self.queue(device):
            for target, source in pairs:
                start_copy(target, source)
            return Arrival(device)


class Download:
    """A copy on its way to the host. `source` must not be written to before `wait` returns, `target` not be read.

    source: [n] of the device; target: [n] of the host, from `zeros_on_host`.
    """

    def __init__(self, source: Tensor, target: Tensor, stream: CopyStream):
        self._source, self._target = source, target
        with stream.queue(source.device):
            start_copy(target, source)
            self._arrival = Arrival(source.device)

    def wait(self) -> None:
        """Return when the host may read the target."""
        self._arrival.wait_on_host()
        # A CPU copies at once, so an order that is wrong would go unnoticed there: a GPU might have read the new values.
        if not self._source.is_cuda:
            same = torch.equal(self._source.view(torch.uint8), self._target.view(torch.uint8))
            assert same, f"{tuple(self._source.shape)} was written to while it was on its way to the host"


# Byte of memory that no copy has reached yet: as a float of any width it is NaN.
NO_VALUE = 0xFF


class LateCopies:
    """Copies that are made in the wait: the form for CPUs, which checks its callers."""

    def __init__(self, pairs: Sequence[CopyPair]):
        for target, _ in pairs:
            target.view(torch.uint8).fill_(NO_VALUE)
        # Weak: whoever starts copies keeps both sides until the wait, as a device would need it.
        self._pairs = [(ref(target), ref(source)) for target, source in pairs]

    def wait(self) -> None:
        """Make the copies. Any number of times."""
        pairs, self._pairs = self._pairs, []
        for to, of in pairs:
            target, source = to(), of()
            assert target is not None, "the target of a copy was given up before anybody waited for the copy"
            assert source is not None, "the source of a copy was given up before anybody waited for the copy"
            target.copy_(source)


# Copies under way, for which the current stream can be made to wait.
Copies = Arrival | LateCopies
