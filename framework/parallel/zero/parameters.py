"""Parameters: gathered unit by unit just before their use, and given back when the use is over.

A unit's parameters are views of one flat tensor for the whole run, and autograd keeps some of these views for backward. So
the memory of a released unit goes back by shrinking the tensor's storage to nothing, and comes again in place (the idea of
torch's FSDP): every view stays true. The gather lands in the tensor itself; nothing is copied out.
"""

from collections.abc import Sequence

from torch import Tensor

from framework.comm.algorithms import Pending
from framework.comm.collectives import start_all_gather
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.exposed_communication import ExposedCommunication


class ParameterSync:
    """gathered: units that are there or on their way. transient: those of them whose lifetime ends with their use."""

    def __init__(self, units: Sequence[Sequence[UnitBuffer]], waits: ExposedCommunication):
        self.units, self.waits = units, waits
        self.unsharded: set[int] = set()
        self.transient: set[int] = set()
        self._pending: dict[int, list[Pending]] = {}
        self._are_parts_old = True  # where replicas divide the update, each has renewed only what it owns
        self._renewals: dict[int, list[Pending]] = {}

    def start_unshard(self, index: int) -> None:
        """Start to gather a unit that is not there and not on its way."""
        if index not in self.unsharded:
            self._renew_parts()
            self.unsharded.add(index)
            if not all(buffer.plan.lifetimes.keeps_parameters for buffer in self.units[index]):
                self.transient.add(index)
            self.waits.wait(self._renewals.pop(index, ()))
            self._pending[index] = [_start_unshard(buffer) for buffer in self.units[index]]

    def unshard(self, index: int) -> None:
        """Return when the unit's parameters can be read."""
        self.start_unshard(index)
        self.waits.wait(self._pending.pop(index, ()))

    def reshard(self, index: int) -> None:
        """Give a gathered unit's memory back."""
        self.waits.wait(self._pending.pop(index, ()))
        self.unsharded.remove(index)
        self.transient.discard(index)
        for buffer in self.units[index]:
            if not buffer.plan.lifetimes.resident_parameters:
                buffer.full.untyped_storage().resize_(0)

    def reshard_transient(self) -> None:
        """Give back what is gathered for one use at a time."""
        for index in list(self.transient):
            self.reshard(index)

    def _renew_parts(self) -> None:
        """At the first gather after an update start to bring each rank's part together, of all units in their order. In place,
        so it takes no memory; a unit's own gather waits for it."""
        if self._are_parts_old:
            self._are_parts_old = False
            self._renewals = {index: [_start_renewal(each) for each in unit] for index, unit in enumerate(self.units)}

    def update(self) -> None:
        """What ranks own has changed: what was gathered is old."""
        self._are_parts_old = True
        for index in list(self.unsharded):
            self.reshard(index)


def _start_renewal(buffer: UnitBuffer) -> Pending:
    part = _unversioned(buffer.shard)
    return start_all_gather(part, buffer.owned(part), buffer.plan.axes.update, f"updated part of {buffer.unit}")


def _start_unshard(buffer: UnitBuffer) -> Pending:
    storage = buffer.full.untyped_storage()
    num_bytes = buffer.plan.numel_padded * buffer.full.element_size()
    if storage.nbytes() < num_bytes:
        storage.resize_(num_bytes)
    return start_all_gather(
        _unversioned(buffer.full), buffer.shard, buffer.plan.axes.shard, f"parameters of {buffer.unit}"
    )


def _unversioned(tensor: Tensor) -> Tensor:
    """The same memory with a version counter of its own: autograd must not take a gather for a change of the values that it
    keeps for backward, because they are the same values as before."""
    return tensor.data
