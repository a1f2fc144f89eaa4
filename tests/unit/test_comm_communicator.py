"""Communicator: an axis is a value; one without a process group plans and does not send; receive buffers are used again."""

import pytest
import torch

from framework.comm.collectives import all_gather, all_reduce, barrier, reduce_scatter, start_broadcast
from framework.comm.communicator import Communicator
from framework.comm.objects import broadcast_object, gather_numbers, gather_object, scatter_object
from framework.comm.p2p import start_send
from framework.mesh.topology import Axis

UNCONNECTED = Communicator(Axis("tp", 2, 0))

OPERATIONS = {
    "all_reduce": lambda: all_reduce(torch.ones(2), UNCONNECTED),
    "all_gather": lambda: all_gather(torch.ones(4), torch.ones(2), UNCONNECTED),
    "reduce_scatter": lambda: reduce_scatter(torch.ones(2), torch.ones(4), UNCONNECTED),
    "broadcast": lambda: start_broadcast(torch.ones(2), UNCONNECTED),
    "barrier": lambda: barrier(UNCONNECTED),
    "send": lambda: start_send(torch.ones(2), UNCONNECTED, 1),
    "broadcast_object": lambda: broadcast_object(lambda: 1, UNCONNECTED),
    "gather_object": lambda: gather_object(1, UNCONNECTED),
    "gather_numbers": lambda: gather_numbers([1.0], UNCONNECTED),
    "scatter_object": lambda: scatter_object(lambda: [1, 2], UNCONNECTED),
}


def test_axes_of_equal_numbers_are_equal() -> None:
    assert Axis("tp", 2, 0, (0, 1)) == Axis("tp", 2, 0, (0, 1))
    assert {Axis("tp", 2, 0): 1}[Axis("tp", 2, 0)] == 1
    assert Axis("tp", 2, 0) != Axis("tp", 2, 1)


def test_a_communicator_has_the_numbers_of_its_axis_and_no_group_until_connected() -> None:
    axis = Axis("dp", 4, 1, (0, 2, 4, 6))
    communicator = Communicator(axis)
    assert (communicator.name, communicator.size, communicator.rank, communicator.ranks) == ("dp", 4, 1, (0, 2, 4, 6))
    assert communicator.axis is axis
    assert communicator.groups == ()


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_unconnected_communicator_refuses_to_send(name: str) -> None:
    with pytest.raises(AssertionError, match=r"communicator of axis tp \(2 ranks\) is unconnected"):
        OPERATIONS[name]()


def test_axes_of_one_rank_need_no_group() -> None:
    alone = Communicator(Axis("tp", 1, 0))
    x = torch.arange(3.0)
    all_reduce(x, alone)
    all_gather(out := torch.empty(3), x, alone)
    assert out.tolist() == x.tolist() == [0.0, 1.0, 2.0]
    assert alone.traffic.calls == {}


def test_reduce_scatters_have_the_group_of_the_others_unless_they_have_their_own() -> None:
    axis = Axis("shard", 2, 0)
    assert Communicator(axis, "group").scatter_group == "group"
    assert Communicator(axis, "group", "second").scatter_group == "second"
    assert Communicator(axis, "group", "second").groups == ("group", "second")
