"""Parameters: gathered unit by unit just before their use, one ahead of it, and given back when the use is over.

A unit's parameters are views of one flat tensor for the whole run, and autograd keeps some of these views for backward. So
the memory of a released unit goes back by shrinking the tensor's storage to nothing, and comes again in place (the idea of
torch's FSDP): every view stays true. The gather lands in the tensor itself; nothing is copied out.
"""

from collections.abc import Sequence
from enum import Enum

from torch import Tensor

from framework.comm.collectives import Pending, start_all_gather
from framework.parallel.zero.buffers import UnitBuffer


class State(Enum):
    """SHARDED: only the parts are up to date. GATHERING: on the way. GATHERED: `full` is what forward and backward read."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    GATHERED = "gathered"


class ParameterSync:
    """The states of the units, in order of computation, and the collectives between them."""

    def __init__(self, units: Sequence[Sequence[UnitBuffer]]):
        self.units = units
        self.states = [State.SHARDED] * len(units)
        self._pending: dict[int, list[Pending]] = {}

    def use(self, index: int, ahead: Sequence[int]) -> None:
        """Return when unit `index` can be read; start to gather the units `ahead` before waiting for anything."""
        for each in (index, *ahead):
            self.start_gather(each)
        for pending in self._pending.pop(index, ()):
            pending.wait()
        self.states[index] = State.GATHERED

    def start_gather(self, index: int) -> None:
        """Start to gather a unit that is not there and not on its way."""
        if self.states[index] is not State.SHARDED:
            return
        self.states[index] = State.GATHERING
        self._pending[index] = [_start_gather(buffer) for buffer in self.units[index]]

    def release(self, index: int) -> None:
        """Give the memory of a gathered unit back, where its lifetime ends with its use."""
        if (
            self.states[index] is State.GATHERED
            and self.units[index]
            and not self.units[index][0].lifetimes.keeps_parameters
        ):
            self._drop(index)

    def update(self) -> None:
        """The parts have changed: what was gathered is old."""
        for index in range(len(self.units)):
            for pending in self._pending.pop(index, ()):
                pending.wait()
            self._drop(index)

    def _drop(self, index: int) -> None:
        for buffer in self.units[index]:
            if not buffer.lifetimes.resident_parameters:
                buffer.full.untyped_storage().resize_(0)
        self.states[index] = State.SHARDED


def _start_gather(buffer: UnitBuffer) -> Pending:
    storage = buffer.full.untyped_storage()
    num_bytes = buffer.numel_padded * buffer.full.element_size()
    if storage.nbytes() < num_bytes:
        storage.resize_(num_bytes)
    return start_all_gather(_unversioned(buffer.full), buffer.shard, buffer.shard_axis)


def _unversioned(tensor: Tensor) -> Tensor:
    """The same memory with a version counter of its own: autograd must not take a gather for a change of the values that it
    keeps for backward, because they are the same values as before."""
    return tensor.data
