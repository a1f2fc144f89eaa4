"""Replicas: ranks that own the same elements hold the same bits, in every step.

Nothing sends updated replicas around: each rank computes its own from gradients that a sum has made equal, bit by bit. A sum
that was left out, a kernel that is not deterministic or a faulty device lets them drift apart, and no loss shows it soon.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.comm.transfer import upload
from framework.errors import DriftError
from framework.parallel.zero.buffers import UnitBuffer

# Whole numbers of a value's size: bits compare where numbers would not, NaN with NaN and 0.0 with -0.0.
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def find_drift(buffers: Sequence[UnitBuffer]) -> list[str]:
    """Parameters of which ranks hold different values that should be equal, as `name over axis`: the same list on all ranks of
    that axis.

    Sums each parameter's bits as whole numbers and compares the sums. Collective over each replica axis: an all-reduce of 16
    bytes per parameter.
    """
    sums: dict[Communicator, dict[str, Tensor]] = {}
    for buffer in buffers:
        for axis in (axis for axis in buffer.plan.axes.replicas if axis.size > 1):
            # The master and not what forward reads: a drift below bf16's precision would show there only after many steps.
            with buffer.master_in_memory() as master:
                for slot in buffer.slots:
                    held = buffer.held(slot, master)[1]
                    bits = held.view(BITS[held.itemsize]).sum(dtype=torch.int64)
                    sums.setdefault(axis, {})[slot.name] = upload(bits, buffer.full.device)
    found = []
    # In one order on all ranks: stages of a pipeline may meet the axes in different ones.
    for axis, by_name in sorted(sums.items(), key=lambda each: each[0].name):
        mine = torch.stack(list(by_name.values()))
        # The largest and the smallest sum in one message: the smallest is the largest of the negated. They differ if any two do.
        largest = torch.cat([mine, -mine])
        all_reduce(largest, axis, "max", "bits of replicas")
        differs = (largest[: len(mine)] != -largest[len(mine) :]).tolist()
        found += [f"{name} over {axis.name}" for name, drifts in zip(by_name, differs, strict=True) if drifts]
    return found


def check_replicas(buffers: Sequence[UnitBuffer], world: Communicator, step: int) -> None:
    """Raise DriftError on all ranks if some of them hold different values of one parameter that they own alike. Collective over
    `world`: one number, so that ranks that saw nothing stop with the others instead of waiting for them in the next step."""
    drifted = find_drift(buffers)
    count = torch.full((), len(drifted), device=buffers[0].full.device)
    all_reduce(count, world)
    if count:
        names = ", ".join(drifted[:3]) + (f" and {len(drifted) - 3} more" if len(drifted) > 3 else "")
        raise DriftError(
            f"after step {step} ranks hold different values of what they should hold alike"
            f" ({names or 'seen by other ranks'}): a device or a network is faulty, or ranks computed the same with different"
            " kernels. Resume from the last checkpoint, on other nodes; if it comes again, `meshwright verify` tells whether the"
            " layout is at fault"
        )
