"""Fused kernels, and the torch operations that they stand for: which of the two a device runs is chosen once.

torch launches a kernel for each operation, and each reads and writes all elements. A kernel in Triton reads and writes them once.
Files named `triton_*` import Triton, which torch for CUDA brings along; they are loaded for CUDA devices alone.
Elsewhere, and where Triton is missing, torch's operations compute the same. Before the first use on a device both forms compute
a small example there, and a difference is an error: it would show in the loss only.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from framework.comm.transfer import Arrival, choose_current
from framework.errors import ModelError

log = logging.getLogger(__name__)

Form = TypeVar("Form")
T = TypeVar("T")
# The first NVIDIA GPUs for which Triton casts to fp8's e4m3.
FP8_CAPABILITY = 8, 9
# Difference of two forms that add in another order, of the largest number: a number may be rounded to bf16's next.
AGREEMENT = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True, eq=False)
class Fused(Generic[Form]):
    """Kernels in two forms.

    name: in errors. plain: torch's operations. load: imports Triton, and gives an object of the same methods. compute: an
    example, with a form on a device. is_exact: the two are bitwise equal. capability: of the first GPUs that kernels compile for.
    """

    name: str
    plain: Form
    load: Callable[[], Any]
    compute: Callable[[Form, torch.device], Sequence[Tensor]]
    is_exact: bool
    capability: tuple[int, int] = (0, 0)

    def on(self, device: torch.device) -> Form:
        """The form that a device runs. Raises ModelError where the two differ there."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < self.capability:
            return self.plain
        return _choose(self, device)

    def find_fault(self, form: Form, device: torch.device) -> str | None:
        """Difference between a form and torch's operations; None where they agree. Waits for the device."""
        found, wanted = self.compute(form, device), self.compute(self.plain, device)
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            bound = 0.0 if self.is_exact else AGREEMENT[other.dtype] * float(other.abs().max())
            difference = float((one.double() - other.double()).abs().max())
            # A NaN is no agreement.
            if not difference <= bound:
                return f"is off by {difference:.2g} in place {index}"
        return None


@cache
def _choose(fused: Fused[Form], device: torch.device) -> Form:
    if find_spec("triton") is None:
        log.warning(
            "%s on %s: Triton is not installed, so torch's operations run, in several passes: pip install triton",
            fused.name,
            device,
        )
        return fused.plain
    form: Form = fused.load()
    fault = fused.find_fault(form, device)
    if fault is not None:
        raise ModelError(
            f"{fused.name} on {device}: the kernel in Triton {fault}: another version of triton and torch, or none of triton"
        )
    return form


def compute_apart(device: torch.device, compute: Callable[..., T], *args: Any) -> T:
    """The result of a check that a layer needs in the midst of its forward, from a thread of its own.

    That knows no checkpointing, no autocast and no operator: they would keep what is computed to compare, compute the layer
    again for the check's own backward, or record none.
    """
    so_far = Arrival(device)

    def run() -> T:
        choose_current(device)
        # Its stream may be another than the one that computes the arguments.
        so_far.wait()
        return compute(*args)

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run).result()
