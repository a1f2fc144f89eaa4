"""A started operation is open, under its name and with its memory, until somebody has waited for its last part."""

from weakref import ref

import pytest
import torch

from framework.comm.algorithms import Pending, then
from framework.comm.communicator import Communicator, Operation
from framework.mesh.topology import Axis

TP, DP = Communicator(Axis("tp", 2, 0)), Communicator(Axis("dp", 2, 0, (0, 2)))


class Work:
    """A work of torch's that has ended."""

    def wait(self) -> None:
        """Return."""


def start(axis: Communicator, name: str, label: str, *tensors: torch.Tensor) -> Pending:
    return Pending([Work()], tensors).named(Operation(axis.axis, name, label, 0), axis)


def names(axis: Communicator) -> list[str]:
    return list(map(str, axis.waits.open.values()))


def test_an_operation_is_open_until_it_is_waited_for() -> None:
    pending = start(TP, "all_gather", "tokens")
    assert names(TP) == ["all_gather of tokens over axis tp"]
    pending.wait()
    pending.wait()
    assert names(TP) == []
    TP.waits.check_ended("a step")


def test_a_dropped_one_is_an_error_with_its_name_and_keeps_its_memory() -> None:
    axis, tensor = Communicator(DP.axis), torch.zeros(3)
    memory = ref(tensor)
    start(axis, "reduce_scatter", "gradient of layers.1", tensor)
    Pending([Work()]).named(Operation(axis.axis, "send", "", 0, (2,)), axis)
    del tensor
    with pytest.raises(AssertionError, match=r"at the end of step 3: reduce_scatter of gradient of layers\.1 over"):
        axis.waits.check_ended("step 3")
    assert memory() is not None
    assert names(axis)[1] == r"send of (unnamed) over axis dp with ranks [2]"


def test_an_operation_without_anything_to_wait_for_is_not_open() -> None:
    Pending().named(Operation(TP.axis, "send", "", 0), TP)
    assert names(TP) == []


def test_what_is_to_be_done_behind_it_leaves_it_its_name() -> None:
    done = []
    pending = then(start(TP, "all_gather", "parameters"), lambda: done.append("copied"))
    assert names(TP) == ["all_gather of parameters over axis tp"]
    assert not pending.advance()
    assert (names(TP), done) == ([], ["copied"])


def test_a_second_part_is_open_in_its_turn() -> None:
    first = Pending([Work()], finish=lambda: Pending([Work()])).named(Operation(TP.axis, "all_reduce", "", 0), TP)
    assert first.advance()
    assert names(TP) == ["all_reduce of (unnamed) over axis tp"]
    assert not first.advance()
    assert names(TP) == []


def test_what_another_operation_starts_is_open_under_its_own_name() -> None:
    first = start(TP, "all_gather", "tokens")
    then_other = Pending(finish=lambda: start(DP, "all_gather", "updated part"))
    assert then_other.advance()
    assert names(DP) == ["all_gather of updated part over axis dp"]
    first.wait()
    then_other.wait()
    assert (names(TP), names(DP)) == ([], [])
