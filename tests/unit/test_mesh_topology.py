"""Topology: the groups of every axis partition the world."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import TopologyError
from framework.mesh.topology import (
    AXIS_NAMES,
    Axis,
    Topology,
    count_expert_shards,
    count_node_neighbours,
    shards_within_node,
)


@st.composite
def topologies(draw):
    pp, dp, cp, tp = (draw(st.integers(1, 4)) for _ in range(4))
    expert_tp = draw(st.sampled_from([None, 1, tp]))
    among = dp * cp * tp // (tp if expert_tp is None else expert_tp)
    ep = draw(st.sampled_from([d for d in range(1, among + 1) if among % d == 0]))
    shards = draw(st.sampled_from([d for d in range(1, among // ep + 1) if among // ep % d == 0]))
    stages = draw(st.none() | st.tuples(st.integers(0, pp - 1), st.integers(0, pp - 1)))
    ulysses = draw(st.sampled_from([d for d in range(1, cp + 1) if cp % d == 0]))
    experts = {"ep": ep, "expert_tp": expert_tp, "expert_shard": shards}
    return Topology(pp=pp, dp=dp, cp=cp, tp=tp, ulysses=ulysses, embedding_ranks=stages, **experts)


@given(topologies(), st.sampled_from(AXIS_NAMES))
def test_groups_of_an_axis_partition_the_world(topology, axis):
    groups = {topology.ranks(axis, rank) for rank in range(topology.world)}
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world))
    # Of a pipeline's ranks only those with the first and the last stage share an embedding.
    others = {1} if axis == "embedding" and topology.pp > topology.size(axis) else set()
    assert {len(group) for group in groups} == {topology.size(axis)} | others


@given(topologies(), st.sampled_from(AXIS_NAMES))
def test_index_is_the_position_in_the_group(topology, axis):
    for rank in range(topology.world):
        assert topology.ranks(axis, rank)[topology.index(axis, rank)] == rank


@given(topologies())
def test_coordinates_identify_a_rank(topology):
    experts = ("pp", "expert_batch", "ep", "expert_tp")
    for independent in (("pp", "dp", "cp", "tp"), experts, ("pp", "batch", "tp")):
        seen = {tuple(topology.index(axis, rank) for axis in independent) for rank in range(topology.world)}
        assert len(seen) == topology.world


@given(topologies())
def test_batch_is_dp_times_cp_and_experts_divide_the_ranks_of_a_stage(topology):
    stage = topology.size("batch") * topology.tp
    for rank in range(topology.world):
        at = {axis: topology.index(axis, rank) for axis in AXIS_NAMES if axis != "embedding"}
        assert at["batch"] == at["dp"] * topology.cp + at["cp"]
        assert at["cp"] == at["ring"] * topology.ulysses + at["ulysses"]
        assert at["context_tp"] == at["cp"] * topology.tp + at["tp"]
        assert at["expert_batch"] == at["expert_replica"] * topology.expert_shard + at["expert_shard"]
        within = (at["expert_batch"] * topology.ep + at["ep"]) * topology.size("expert_tp") + at["expert_tp"]
        assert within == rank % stage
        assert set(topology.ranks("expert_tp", rank)) <= set(topology.ranks("tp", rank))


def test_whole_experts_divide_tensor_parallel_neighbours_too():
    topology = Topology(dp=2, tp=2, ep=2, expert_tp=1, expert_shard=2)
    assert topology.ranks("ep", 0) == topology.ranks("tp", 0) == (0, 1)
    assert topology.ranks("expert_batch", 1) == topology.ranks("expert_shard", 1) == (1, 3)
    assert topology.ranks("expert_tp", 1) == (1,)


@pytest.mark.parametrize(
    ("shard", "tp", "ep", "expert_tp", "batch", "degree"),
    [
        (8, 1, 2, 1, 8, 4),
        (4, 1, 8, 1, 8, 1),
        (2, 4, 2, 1, 4, 4),
        (2, 4, 2, 4, 4, 1),
        (6, 1, 4, 1, 12, 1),
        (1, 2, 1, 1, 4, 2),
    ],
)
def test_experts_are_sharded_over_those_who_share_them_within_the_dense_shards(shard, tp, ep, expert_tp, batch, degree):
    assert count_expert_shards(shard, tp, ep, expert_tp, batch) == degree


@pytest.mark.parametrize(
    ("ep", "expert_tp", "per_node", "degree"),
    [(8, 1, 8, 8), (16, 1, 8, 8), (12, 1, 8, 4), (6, 1, 4, 2), (8, 4, 8, 2), (8, 8, 8, 1)],
)
def test_neighbours_of_the_first_hop_are_on_one_node(ep, expert_tp, per_node, degree):
    assert count_node_neighbours(ep, expert_tp, per_node) == degree
    topology = Topology(dp=per_node * ep, tp=expert_tp, ep=ep, expert_tp=expert_tp, ep_inner=degree)
    for rank in range(topology.world):
        assert len({each // per_node for each in topology.ranks("ep_inner", rank)}) == 1


def test_shards_of_experts_stay_among_the_neighbours_that_share_dense_shards():
    topology = Topology(dp=24, ep=3, shard=8, expert_shard=count_expert_shards(8, 1, 3, 1, 24))
    for rank in range(24):
        assert len({each // 8 for each in topology.ranks("expert_shard", rank)}) == 1


def test_numbering_has_tp_innermost_and_pp_outermost():
    topology = Topology(pp=2, dp=2, cp=2, tp=2, ep=2)
    assert topology.ranks("tp", 0) == (0, 1)
    assert topology.ranks("cp", 0) == (0, 2)
    assert topology.ranks("dp", 0) == (0, 4)
    assert topology.ranks("pp", 0) == (0, 8)
    assert topology.ranks("batch", 9) == (9, 11, 13, 15)
    assert topology.ranks("ep", 5) == (5, 7)
    assert topology.ranks("expert_batch", 5) == (1, 5)
    mixed = Topology(dp=2, cp=4, tp=2, ulysses=2)
    assert mixed.ranks("ulysses", 0) == (0, 2)
    assert mixed.ranks("ring", 0) == (0, 4)
    assert mixed.ranks("context_tp", 9) == tuple(range(8, 16))


def test_the_embedding_axis_joins_the_first_and_the_last_stage_of_each_pipeline():
    topology = Topology(pp=3, dp=2)
    assert [topology.ranks("embedding", rank) for rank in range(6)] == [(0, 4), (1, 5), (2,), (3,), (0, 4), (1, 5)]
    assert [topology.index("embedding", rank) for rank in range(6)] == [0, 0, 0, 0, 1, 1]
    assert topology.size("embedding") == 2
    assert topology.axes(5)["embedding"] == Axis("embedding", 2, 1, (1, 5))


@pytest.mark.parametrize("stages", [(0, 0), (1, 1)])
def test_an_embedding_and_a_head_on_one_rank_have_nobody_to_share_with(stages):
    topology = Topology(pp=2, dp=2, embedding_ranks=stages)
    assert [topology.ranks("embedding", rank) for rank in range(4)] == [(0,), (1,), (2,), (3,)]
    assert topology.size("embedding") == 1


def test_stages_may_lie_anywhere_in_the_pipeline():
    topology = Topology(pp=4, embedding_ranks=(3, 1))
    assert [topology.ranks("embedding", rank) for rank in range(4)] == [(0,), (1, 3), (2,), (1, 3)]


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 0},
        {"tp": -1},
        {"dp": 2, "ep": 4},
        {"dp": 3, "cp": 2, "ep": 4},
        {"pp": 2, "embedding_ranks": (0, 2)},
        {"tp": 4, "expert_tp": 2},
        {"cp": 4, "ulysses": 3},
        {"dp": 2, "expert_shard": 4},
    ],
)
def test_degrees_that_form_no_mesh_are_errors(degrees):
    with pytest.raises(AssertionError, match="Topology"):
        Topology(**degrees)


def test_a_rank_outside_the_world_is_an_error():
    with pytest.raises(AssertionError, match="rank 2 of 2"):
        Topology(dp=2).index("dp", 2)


@pytest.mark.parametrize(
    ("world", "batch", "tp", "per_node", "nodes", "degree"),
    [(8, 8, 1, 4, 2, 4), (8, 8, 1, 8, 1, 8), (16, 8, 2, 8, 2, 4), (16, 4, 1, 8, 2, 4), (4, 1, 4, 4, 1, 1)],
)
def test_a_node_shards_over_its_own_ranks(world, batch, tp, per_node, nodes, degree):
    assert shards_within_node(world, batch, tp, per_node, nodes) == degree


@pytest.mark.parametrize(("per_node", "nodes"), [(3, 2), (1, 2), (4, 3), (2, 3)])
def test_uneven_nodes_are_refused_on_every_one_of_them(per_node, nodes):
    with pytest.raises(TopologyError, match=r"zero\.shard_within=node needs equally many ranks on every node"):
        shards_within_node({2: 4, 3: 8}[nodes], 4, 1, per_node, nodes)


@pytest.mark.parametrize(("batch", "tp", "per_node"), [(4, 8, 4), (6, 1, 4), (4, 3, 4)])
def test_nodes_that_cannot_hold_whole_shards_are_refused_with_the_ways_out(batch, tp, per_node):
    with pytest.raises(TopologyError, match=r"set zero\.shard_within to one of \[1, 2"):
        shards_within_node(per_node * 3, batch, tp, per_node, 3)
