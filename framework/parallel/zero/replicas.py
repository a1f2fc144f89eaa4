"""Replicas: ranks that hold the same elements hold the same bits, in every step.

Nothing sends updated replicas around: each rank computes its own from gradients that a sum has made equal, bit by bit. A flipped
bit, a sum that was left out, a kernel that is not deterministic let them drift apart, and no loss shows it soon.
`train/replicas.py` compares hashes; `find_drift` says which parameters they are of.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.comm.transfer import upload
from framework.parallel.zero.bit_hash import BitHash
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.parameters import ParameterSync

# Whole numbers of a value's size: bits compare where numbers would not, NaN with NaN and 0.0 with -0.0.
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class Hashed:
    """The hash of what is equal over `axes`, an int64 scalar. state, unit: what a user hears; key: the same on all replicas, and
    no other's on this rank."""

    state: str
    unit: str
    key: str
    axes: tuple[Communicator, ...]
    hash: Tensor


def hash_parameters(parameters: ParameterSync, hashes: BitHash) -> Iterator[Hashed]:
    """Of a stage's parameters that are there for the whole step. To be called before the update: behind it they are old until
    the next gather."""
    for index in sorted(parameters.unsharded):
        parameters.unshard(index)  # one that was prefetched may still be on its way
        for buffer in parameters.units[index]:
            plan = buffer.plan
            # What travels in fewer bits differs from what its owner has; what is the master's own memory is hashed as that.
            is_alike = plan.lifetimes.resident_parameters and plan.dtypes.gathered is None
            if is_alike and (plan.has_master or not plan.is_whole):
                axes = (plan.axes.shard, plan.axes.update, *plan.axes.replicas)
                yield hash_buffer(buffer, "parameters", axes, hashes.hash([buffer.full[: plan.numel]]))


def hash_buffer(buffer: UnitBuffer, state: str, axes: Iterable[Communicator], value: Tensor) -> Hashed:
    """A hash of a state of a unit's buffer."""
    return Hashed(state, buffer.unit, buffer.slots[0].name, tuple(axes), value)


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
