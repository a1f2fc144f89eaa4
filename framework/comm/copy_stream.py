"""Copies between the device and pinned memory of the host, on a stream beside that of the computation.

    start     the copies run behind all that the current stream has been given so far; the host goes on
    wait      what the current stream is given from now on runs behind them; the host goes on

Between the two, nobody writes to either side, reads the target or gives up the memory of either. Behind the wait the memory of
the device may be given up at once: a block that was freed on the current stream the allocator gives to later work of that stream
only.

On a CPU there is one memory and no stream. There the copies are made in the wait, as late as a device may make them, the target
has no value until then, and a side that was given up before is an error. So a wait that is missing, or comes too late, shows
where there is no GPU.
"""

from collections.abc import Sequence
from typing import Protocol
from weakref import ref

import torch
from torch import Tensor

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
