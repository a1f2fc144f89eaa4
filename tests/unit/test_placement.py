"""Where ranks lie is arithmetic: tp innermost in a node, pp outermost, whatever the degrees."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.errors import TopologyError
from framework.mesh.topology import Placement, Topology
from framework.recipe.layout_rules import placement
from framework.recipe.schema import Launch, Parallel, Recipe

DEGREES = st.sampled_from((1, 2, 3, 4))


@given(pp=DEGREES, dp=DEGREES, cp=DEGREES, tp=DEGREES, ranks_per_node=st.integers(1, 16))
def test_inner_axes_leave_their_node_last(pp, dp, cp, tp, ranks_per_node):
    topology = Topology(pp=pp, dp=dp, cp=cp, tp=tp)
    if topology.world % ranks_per_node:
        with pytest.raises(TopologyError, match="do not fill"):
            Placement(topology, ranks_per_node)
        return
    placement = Placement(topology, ranks_per_node)
    sizes = [sum(placement.node(rank) == node for rank in range(topology.world)) for node in range(placement.num_nodes)]
    assert sizes == [ranks_per_node] * placement.num_nodes
    if ranks_per_node % tp == 0:
        assert placement.nodes_spanned("tp") == 1
    if ranks_per_node % (tp * cp) == 0:
        assert placement.nodes_spanned("cp") == 1
    if (tp * cp * dp) % ranks_per_node == 0:  # a stage is whole nodes: every message between stages leaves its node
        assert placement.nodes_spanned("pp") == pp
    assert placement.nodes_spanned("world") == placement.num_nodes


def test_dense_64_on_8_nodes():
    placement = Placement(Topology(pp=2, dp=8, tp=4), ranks_per_node=8)
    assert placement.describe() == "8 nodes of 8 ranks: tp in a node, dp over 4 nodes, pp over 2 nodes"


@pytest.mark.parametrize(
    ("degrees", "advised"),
    [
        ({"dp": 16, "ep": 8}, None),
        ({"dp": 32, "ep": 16}, 8),
        ({"dp": 24, "ep": 6}, 2),  # fits a node of 8, but every third group lies on two
        ({"dp": 16, "tp": 4, "ep": 4, "expert_tp": 4}, 2),
        ({"dp": 16, "tp": 4, "ep": 4, "expert_tp": 1}, None),
        (
            {"dp": 9, "tp": 8, "ep": 9, "expert_tp": 8},
            None,
        ),  # a slice of an expert fills a node's rank: nothing is left to advise
    ],
)
def test_experts_that_leave_their_node_without_need_are_told_the_degree_that_stays(degrees, advised):
    advice = Placement(Topology(**degrees), ranks_per_node=8).advise_experts()
    assert (f"parallel.ep={advised} " in advice) if advised else advice == ""


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 6, 8, 16])
@pytest.mark.parametrize("ranks_per_node", [1, 2, 4, 6, 8])
def test_the_rule_refuses_just_the_degrees_whose_group_leaves_its_node(tp, ranks_per_node):
    spans = Placement(Topology(dp=2 * ranks_per_node, tp=tp), ranks_per_node).nodes_spanned("tp")
    launch = Launch(kind="slurm", ranks=None, nodes=2 * tp, ranks_per_node=ranks_per_node)
    recipe = Recipe(parallel=Parallel(tp=tp), launch=launch)
    assert bool(list(placement.find(recipe))) == (spans > 1)
    assert not list(placement.find(replace(recipe, launch=replace(launch, tp_across_nodes=True))))
