"""Faults of a rank's computation, by hooks of its model, and of its weights. A `run` is the rank's `train.step.TrainingRun`."""

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from framework.faults.plan import Fault

# A bit of fp32: high enough that no rounding hides the flip, low enough that the run does not diverge at once.
FLIPPED_BIT = 20


def arm(fault: Fault, run: Any) -> RemovableHandle:
    """Inject a fault of kind slow, oom or nan into the next step of this rank, until the handle is removed."""
    model = next(iter(run.stages.values())).model.model
    if fault.kind == "nan":
        return model.register_forward_hook(_poison_backward)
    if fault.kind == "oom":
        return model.register_forward_pre_hook(_once(_run_out_of_memory))
    return model.register_forward_pre_hook(_once(partial(time.sleep, 1.0 if fault.seconds is None else fault.seconds)))


def flip_bit(run: Any) -> None:
    """Flip a bit of the first master weight that this rank has in memory, and of what is computed with."""
    run.optimizer.wait_for_readers()  # a save that is being staged is of the step before
    buffer = next(each for each in run.buffers if each.is_trained and each.master.numel())
    master = buffer.master
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[master.element_size()]
    bits = master[:1].view(integers)
    bits ^= 1 << (FLIPPED_BIT if master.element_size() == 4 else 8 * master.element_size() - 12)
    buffer.copy_master_to_params()


def _once(harm: Callable[[], None]) -> Callable[..., None]:
    """A hook before a forward that harms the first microbatch of a step only."""
    left = [harm]
    return lambda module, arguments: left.pop()() if left else None


def _run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("out of memory (injected)")


def _poison_backward(module: nn.Module, arguments: Any, output: Any) -> None:
    """A hook after a forward that makes the gradients of its outputs NaN."""
    for tensor in _find_tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))


def _find_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ():
        yield from _find_tensors(each)
