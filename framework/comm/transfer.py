"""Copies between the host and this rank's device that nobody waits for.

A copy is asynchronous only if the host's side of it is page-locked ("pinned"): from pageable memory CUDA copies through a buffer
of its own, and `torch.tensor(values, device=cuda)` waits for the device outright. So whatever a step sends goes through here.

Pinned memory comes from torch's cache of it, which gives a block out again only when the copies that were started from it have
run. It has to be asked for with this rank's device as the current one, or a process holds memory on the first GPU as well.

On a CPU the host's memory is the device's, and nothing is copied.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


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
