"""Collectives over an axis that spans nodes, in two levels: results by definition, in any order of waits, and what leaves a node.

Nodes are those of the topology: two of two ranks here, four of two on simulated GPUs (tests/nccl/test_levels.py).
"""

from dataclasses import replace

import pytest
import torch

from framework.comm import collectives
from framework.comm.codec import Rounding
from framework.comm.communicator import read_traffic, sum_traffic
from framework.comm.connect import connect
from framework.mesh.topology import Topology

WORLD, ON_NODE = 4, 2
TOPOLOGY = Topology(dp=WORLD, shard=WORLD, ranks_per_node=ON_NODE, two_levels=True)
FLAT = replace(TOPOLOGY, two_levels=False)
ODD = 7
BF16 = Rounding(torch.bfloat16)
ROWS = [12, 24, 24, 36]  # of an all-to-all


def numbers_of(rank: int, numel: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(numel, dtype=dtype, generator=torch.Generator().manual_seed(rank))


def reduce_all(rank, world, rendezvous):
    """Each operation on numbers that every rank knows: in one dtype, in place, and rounded on the way."""
    mesh = connect(TOPOLOGY, torch.device("cpu"), rendezvous, rank, timeout_s=60)
    axis = mesh.axis("shard")
    assert [each.size for each in axis.levels] == [2, 2]
    xs = [numbers_of(r, WORLD * ODD) for r in range(world)]
    total = sum(xs)

    gathered = torch.full((WORLD, WORLD * ODD), -1.0, dtype=torch.float64)
    gathered[rank] = xs[rank]
    collectives.all_gather(gathered, gathered[rank], axis)
    assert torch.equal(gathered, torch.stack(xs))

    scattered = xs[rank].clone().view(WORLD, ODD)
    collectives.reduce_scatter(scattered[rank], scattered, axis)
    torch.testing.assert_close(scattered[rank], total.view(WORLD, ODD)[rank], rtol=0, atol=1e-12)

    for numel in (WORLD * ODD, ODD, 1):
        x = xs[rank][:numel].clone()
        collectives.all_reduce(x, axis)
        torch.testing.assert_close(x, total[:numel], rtol=0, atol=1e-12)
    x = xs[rank].clone()
    collectives.all_reduce(x, axis, "max")
    assert torch.equal(x, torch.stack(xs).amax(0))

    # Bitwise: every term is rounded, then the sum of a node.
    rounded = [x.bfloat16().double() for x in xs]
    nodes = [sum(rounded[first : first + ON_NODE]).bfloat16().double() for first in range(0, world, ON_NODE)]
    part = torch.empty(ODD, dtype=torch.float64)
    collectives.start_reduce_scatter(part, xs[rank], axis, wire=BF16).wait()
    assert torch.equal(part, sum(nodes).view(WORLD, ODD)[rank])
    x = xs[rank][: WORLD * ODD - 1].clone()
    collectives.start_all_reduce(x, axis, wire=BF16).wait()
    assert torch.equal(x, sum(nodes).bfloat16().double()[:-1])
    mesh.close()


def wait_in_own_order(rank, world, rendezvous):
    """Operations of every kind under way at once, over two axes, for which each rank waits in another order, as where one's data
    leaves a layer out."""
    mesh = connect(replace(TOPOLOGY, expert_shard=WORLD), torch.device("cpu"), rendezvous, rank, timeout_s=60)
    axes = [mesh.axis("shard"), mesh.axis("expert_shard")]
    assert all(axis.levels is not None for axis in axes)
    started, checks = [], []
    for turn in range(4):
        axis = axes[turn % 2]
        xs = [numbers_of(10 * turn + r, WORLD * ODD * (turn + 1)) for r in range(world)]
        gathered, scattered = (
            torch.empty(world * xs[0].numel(), dtype=torch.float64),
            torch.empty(len(xs[0]) // world).double(),
        )
        coded, x, mine = scattered.clone(), xs[rank].clone(), slice(rank * len(scattered), (rank + 1) * len(scattered))
        started.append(collectives.start_all_gather(gathered, xs[rank], axis))
        started.append(collectives.start_reduce_scatter(scattered, xs[rank], axis))
        started.append(collectives.start_all_reduce(x, axis))
        started.append(collectives.start_reduce_scatter(coded, xs[rank], axis, wire=BF16))
        checks += [(gathered, torch.cat(xs), 0), (scattered, sum(xs)[mine], 1e-12), (x, sum(xs), 1e-12)]
        checks.append((coded, sum(xs)[mine], 0.2))
    # In the order of starts what one rank waits for last, another waits for first.
    for place in range(len(started)):
        started[(place + 5 * rank) % len(started)].wait()
    mesh.waits.check_ended("the test")
    for found, expected, atol in checks:
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)
    mesh.close()


def count_what_leaves(rank, world, rendezvous, topology):
    """(bytes, bytes between nodes) by operation, of 96 fp32 numbers each."""
    mesh = connect(topology, torch.device("cpu"), rendezvous, rank, timeout_s=60)
    axis, full, part = mesh.axis("shard"), torch.zeros(96), torch.zeros(96 // WORLD)
    collectives.all_reduce(full, axis)
    collectives.all_gather(full, part, axis)
    collectives.start_reduce_scatter(part, full, axis, wire=BF16).wait()
    collectives.all_to_all(torch.empty(WORLD * ROWS[rank]), full, axis, [ROWS[rank]] * WORLD, ROWS)
    sent, away = (read_traffic(mesh.axes, between_nodes)["shard"] for between_nodes in (False, True))
    mesh.close()
    totals = sum_traffic({"shard": sent}, {"shard": away})["shard"]
    assert totals["bytes_between_nodes"] == sum(num_bytes for _, num_bytes in away.values())
    return {name: (sent[name][1], away[name][1]) for name in sent}


def test_two_levels_equal_the_definition(pool):
    pool.run(WORLD, reduce_all)


def test_ranks_may_wait_in_different_orders(pool):
    pool.run(WORLD, wait_in_own_order)


def test_what_leaves_a_node_is_that_of_theory(pool):
    """k = 2 nodes of m = 2 ranks: (k-1)/k of F/m in two levels, m times as much where each rank sends for itself."""
    full = 96 * 4
    expected = {"all_reduce": full // 2, "all_gather": full // 4, "reduce_scatter": full // 2 // 4}
    found = pool.run(WORLD, count_what_leaves, TOPOLOGY)
    flat = pool.run(WORLD, count_what_leaves, FLAT)
    for rank in range(WORLD):
        assert {name: away for name, (_, away) in found[rank].items() if name != "all_to_all"} == expected
        assert {name: sent for name, (sent, _) in found[rank].items()} == {
            name: sent for name, (sent, _) in flat[rank].items()
        }
        assert flat[rank]["all_gather"][1] == ON_NODE * expected["all_gather"]
        assert flat[rank]["reduce_scatter"][1] == ON_NODE * expected["reduce_scatter"]
        away = sum(ROWS[ON_NODE:] if rank < ON_NODE else ROWS[:ON_NODE])
        assert found[rank]["all_to_all"] == flat[rank]["all_to_all"] == (4 * (96 - ROWS[rank]), 4 * away)
    # The ring has one rank of a node send all of it; in two levels each sends its share.
    ring = max(each["all_reduce"][1] for each in flat)
    assert max(each["all_reduce"][1] for each in found) <= ring / ON_NODE


@pytest.mark.parametrize(
    ("degrees", "ranks_per_node", "sizes"),
    [
        ({"dp": 8, "shard": 8}, 2, {"shard": (2, 4)}),
        ({"dp": 8, "shard": 8}, None, {"shard": (1, 1)}),
        ({"dp": 8, "shard": 8}, 8, {"shard": (1, 1)}),
        ({"dp": 8, "shard": 2}, 2, {"shard": (1, 1), "replica": (1, 1)}),  # HSDP by nodes: replicas are on one each
        ({"dp": 8, "shard": 2}, 4, {"shard": (1, 1), "replica": (2, 2)}),
        ({"dp": 4, "tp": 2, "shard": 4}, 4, {"shard": (2, 2)}),
        ({"dp": 4, "tp": 2, "shard": 4}, 2, {"shard": (1, 1)}),
        ({"dp": 6, "shard": 6}, 4, {"shard": (2, 3)}),  # a node of two and a half pairs keeps pairs together
        ({"pp": 2, "dp": 4, "shard": 4}, 2, {"shard": (2, 2)}),
        ({"dp": 8, "ep": 2, "expert_shard": 4, "shard": 8}, 4, {"expert_shard": (2, 2), "shard": (4, 2)}),
    ],
)
def test_levels_of_an_axis_are_its_neighbours_on_a_node_and_what_is_left(degrees, ranks_per_node, sizes):
    topology = Topology(**degrees, ranks_per_node=ranks_per_node, two_levels=True)
    for rank in range(topology.world):
        axes = topology.axes(rank)
        for name, (inner, outer) in sizes.items():
            near, far = axes[f"{name}_inner"], axes[f"{name}_outer"]
            assert (near.size, far.size) == (inner, outer), (name, rank)
            if outer > 1:
                assert axes[name].rank == far.rank * inner + near.rank
                assert len({each // ranks_per_node for each in near.ranks}) == 1
                assert axes[name].nodes == outer
