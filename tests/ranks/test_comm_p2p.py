"""Messages arrive where they are sent, in order, whichever side starts first."""

import time
from unittest.mock import patch

import pytest
import torch

from framework.comm import collectives, groups, p2p
from framework.comm.communicator import read_traffic
from framework.comm.connect import connect
from framework.comm.objects import gather_object
from framework.mesh.topology import Topology
from tests.ranks.pool import RankFailure


def connect_line(rank, world, rendezvous):
    mesh = connect(Topology(pp=world), torch.device("cpu"), rendezvous, rank, timeout_s=60)
    return mesh, mesh.axis("pp")


def pass_along_a_line(rank, world, rendezvous, dtype):
    """Each rank adds its index and passes on: what pipeline stages do. Several microbatches are under way at once."""
    mesh, axis = connect_line(rank, world, rendezvous)
    sent, results = [], []
    for microbatch in range(3):
        x = torch.full((2, 3), microbatch, dtype=dtype)
        if rank > 0:
            p2p.start_receive(x, axis, rank - 1).wait()
        x = x + rank
        if rank < world - 1:
            sent.append(p2p.start_send(x, axis, rank + 1))
        results.append(x)
    for pending in sent:
        pending.wait()
    carried = read_traffic(mesh.axes)["pp"]
    mesh.close()
    return results, carried


def exchange_with_everyone(rank, world, rendezvous):
    """Two tensors of different sizes to every peer in one batch, beside a gather on the same axis."""
    mesh, axis = connect_line(rank, world, rendezvous)
    peers = [peer for peer in range(world) if peer != rank]
    sizes = (5, 1000)
    sends = [(torch.full((size,), 10.0 * rank + peer), peer) for peer in peers for size in sizes]
    receives = [(torch.empty(size), peer) for peer in peers for size in sizes]
    pending = p2p.exchange(sends, receives, axis)
    gathered = torch.empty(world, 5)
    collectives.all_gather(gathered, torch.full((5,), float(rank)), axis)
    pending.wait()
    assert all((x == 10 * source + rank).all() for x, source in receives)
    assert torch.equal(gathered, torch.arange(float(world)).repeat_interleave(5).view(world, 5))
    mesh.close()


def send_to_itself(rank, world, rendezvous):
    _, axis = connect_line(rank, world, rendezvous)
    p2p.start_send(torch.zeros(1), axis, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_microbatches_pass_along_a_line_in_order(pool, world, dtype):
    for rank, (results, carried) in enumerate(pool.run(world, pass_along_a_line, dtype)):
        assert [x.unique().tolist() for x in results] == [
            [microbatch + sum(range(rank + 1))] for microbatch in range(3)
        ]
        assert carried == ({} if rank == world - 1 else {"send": (3, 3 * 6 * dtype.itemsize)})


@pytest.mark.parametrize("world", [2, 3, 4])
def test_batched_exchange_matches_messages_in_order(pool, world):
    pool.run(world, exchange_with_everyone)


@pytest.mark.parametrize("world", [1, 2])
def test_a_rank_is_not_its_own_peer(pool, world):
    with pytest.raises(RankFailure, match="no peer 0 of rank 0"):
        pool.run(world, send_to_itself)


def wait_for_a_late_peer(rank, world, rendezvous):
    """Body: rank 1 comes to each message 1.5 s late, though the groups were connected with a time-out of 1 s."""
    with (
        patch.object(groups, "CONNECT_S", 1.0),
        patch.object(groups, "CONNECT_S_PER_RANK", 0.0),
    ):
        mesh = connect(Topology(dp=world), torch.device("cpu"), rendezvous, rank, timeout_s=60)
    axis, mine = mesh.axis("world"), torch.full((2,), float(rank))
    out, place = torch.empty(2 * world), torch.empty(2)
    works = (
        lambda: p2p.exchange([(mine, 1 - rank)], [(place, 1 - rank)], axis).wait(),
        lambda: collectives.start_all_gather(out, mine, axis).wait(),
        lambda: gather_object("x", axis),
    )
    for work in works:
        time.sleep(1.5 * rank)
        work()
    mesh.close()
    return place.tolist(), out.tolist()


def test_a_message_waits_for_a_busy_peer_as_long_as_a_collective_does(pool):
    """gloo's own time-out of a message is that of connecting: a peer that was busy for a minute ended the run."""
    assert pool.run(2, wait_for_a_late_peer) == [([1.0, 1.0], [0.0, 0.0, 1.0, 1.0]), ([0.0, 0.0], [0.0, 0.0, 1.0, 1.0])]
