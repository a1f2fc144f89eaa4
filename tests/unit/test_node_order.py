"""Nodes take ranks in an order by which groups of tp and ep lie in one block wherever the allocation allows it."""

import os
import random
import subprocess
from dataclasses import replace
from itertools import permutations

import pytest

from framework.errors import TopologyError
from framework.launch.nodes import NODES, NodeOrder, describe_nodes, find_rank, read_order
from framework.launch.process import adopt_task
from framework.launch.slurm import render
from framework.mesh.topology import BLOCK_AXES, Placement, Topology
from framework.model.load import load_config
from framework.plan.forecast_plan import forecast_cut
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.recipe.derive import derive
from tests.grid import IN_TURN
from tests.unit.test_slurm_script import SHELLCHECK

pytestmark = IN_TURN

# Degrees, ranks of a node.
LAYOUTS = [
    ({"tp": 8, "dp": 3}, 4),  # tp on two nodes
    ({"tp": 4, "dp": 12, "ep": 16, "expert_tp": 1}, 4),  # ep on four nodes, tp within one
    ({"tp": 8, "dp": 4, "ep": 4, "expert_tp": 8}, 4),  # ep on eight nodes, in which tp has runs of two
    ({"tp": 4, "dp": 6, "ep": 24, "pp": 2, "expert_tp": 1}, 4),
    ({"tp": 4, "dp": 12, "ep": 6, "expert_tp": 1}, 2),  # runs of two nodes and of three, which do not nest
    ({"tp": 2, "dp": 8, "ep": 2}, 4),  # all within nodes
    ({"tp": 6, "dp": 4}, 4),  # a group on a node and a half
]


def allocate(rng: random.Random, num_nodes: int) -> list[str]:
    """The block of each node as a busy cluster of blocks of 18 gives them: runs of free nodes, in SLURM's order."""
    blocks: list[str] = []
    for block in range(num_nodes):
        blocks += [f"b{block}"] * min(rng.choice([1, 2, 3, 4, 6, 8, 18]), num_nodes - len(blocks))
    if rng.random() < 0.3:  # nodes are numbered across racks
        rng.shuffle(blocks)
    return blocks


def count_whole(placement: Placement, blocks: list[str], order) -> dict[str, int]:
    """Groups within one block, by each rank's own node: nothing of the placement's runs."""
    at = [blocks[order[rank // placement.ranks_per_node]] for rank in range(placement.topology.world)]
    found = {}
    for axis in BLOCK_AXES:
        groups = {placement.topology.ranks(axis, rank) for rank in range(placement.topology.world)}
        found[axis] = sum(len({at[rank] for rank in group}) == 1 for group in groups)
    return found


def test_every_group_lies_in_one_block_where_that_is_possible():
    """Of 200 allocations. Between two nodes that a group joins, blocks cannot change: all groups can be whole only if every block
    is filled by chains of such nodes, hence by as many chains as it has nodes for."""
    rng = random.Random(46)
    possible = 0
    for _ in range(200):
        degrees, ranks_per_node = rng.choice(LAYOUTS)
        scale = rng.choice([1, 2, 4])
        placement = Placement(Topology(**(degrees | {"dp": degrees["dp"] * scale})), ranks_per_node)
        blocks, nodes = allocate(rng, placement.num_nodes), range(placement.num_nodes)
        order = placement.order_nodes(blocks)
        assert sorted(order) == list(nodes)
        assert order[0] == 0
        # Chains of nodes joined by groups, from the ranks of the groups themselves.
        topology = placement.topology
        groups = {topology.ranks(axis, rank) for axis in BLOCK_AXES for rank in range(topology.world)}
        joined = {node for each in groups for node in range(placement.node(min(each)), placement.node(max(each)))}
        starts = [node for node in nodes if node - 1 not in joined]
        chains = {stop - start for start, stop in zip(starts, [*starts[1:], len(blocks)], strict=True)}
        assert len(chains) == 1
        (length,) = chains
        whole, there = count_whole(placement, blocks, order), count_whole(placement, ["b"] * len(blocks), order)
        stated = count_whole(placement, blocks, nodes)
        if all(blocks.count(block) % length == 0 for block in set(blocks)):
            possible += 1
            assert whole == there
        assert whole["tp"] >= stated["tp"]
        assert {axis: there[axis] - whole[axis] for axis in BLOCK_AXES} == {
            axis: placement.count_cut(axis, blocks, order) for axis in BLOCK_AXES
        }
    assert possible >= 40


@pytest.mark.parametrize(
    ("degrees", "ranks_per_node"),
    [({"tp": 2, "dp": 3}, 1), ({"dp": 6, "ep": 3}, 1), ({"tp": 2, "dp": 3, "ep": 3}, 1), ({"dp": 6, "ep": 6}, 2)],
)
def test_no_other_order_keeps_more_groups_whole(degrees, ranks_per_node):
    """Beside all orders of a few nodes: most groups of tp whole, and then most of ep."""
    rng = random.Random(0)
    placement = Placement(Topology(**degrees), ranks_per_node)
    for _ in range(6):
        blocks = [f"b{rng.randrange(3)}" for _ in range(placement.num_nodes)]
        orders = permutations(range(placement.num_nodes))
        cut = [[placement.count_cut(axis, blocks, order) for axis in BLOCK_AXES] for order in orders]
        found = [placement.count_cut(axis, blocks, placement.order_nodes(blocks)) for axis in BLOCK_AXES]
        assert found <= min(cut)


def test_an_order_that_changes_nothing_is_slurms():
    placement = Placement(Topology(tp=2, dp=4), ranks_per_node=4)
    assert placement.units == ()
    assert placement.order_nodes(["b", "a"]) == (0, 1)
    wide = Placement(Topology(tp=8, dp=4), ranks_per_node=4)
    assert wide.units == (2,)
    assert wide.order_nodes(list("aabbccdd")) == tuple(range(8))
    assert wide.order_nodes(list("ababcdcd")) == (0, 2, 1, 3, 4, 6, 5, 7)
    # The first node, whose block has no other, keeps its place: its group is cut, and no second one.
    assert wide.order_nodes(list("abbbccdd"))[0] == 0
    assert wide.count_cut("tp", "abbbccdd", wide.order_nodes(list("abbbccdd"))) == 1


# --- what SLURM says

SLURM = (
    *("launch=slurm", "launch.gres=null", "launch.nodes=4", "launch.ranks_per_node=2", "launch.tp_across_nodes=true"),
    *("parallel.tp=4", "batch.sequences_per_step=16"),
)


def recipe_of(*overrides: str):
    return compose([*SLURM, *overrides]).require()


def answers(addresses: list[str], pattern: str) -> dict[str, str]:
    lines = [f"{node} {each.rpartition('.')[2]} {each} {pattern}" for node, each in enumerate(addresses)]
    return {NODES: ";".join(reversed(lines))}  # nodes answer in any order


@pytest.mark.parametrize(
    ("addresses", "pattern", "source", "blocks"),
    [
        (["r1.n1", "r2.n2", "r1.n3", "r2.n4"], "block.node", "block", ["r1", "r2", "r1", "r2"]),
        (["s0.s1.n1", "s0.s2.n2", "s0.s1.n3", "s0.s2.n4"], "switch.switch.node", "switch", ["s0.s1", "s0.s2"] * 2),
        (["r1n1", "r2n2", "r1n3", "r2n4"], "node", "name", ["r1n", "r2n", "r1n", "r2n"]),
        (["t:0:0:1.n1", "t:0:1:0.n2", "t:0:0:2.n3", "t.n4"], "torus:x:y:z.node", "name", ["n"] * 4),
        (["ada", "bob", "cyd", "dan"], "node", "name", [""] * 4),
    ],
)
def test_blocks_are_read_from_slurms_addresses_or_from_names(addresses, pattern, source, blocks):
    order = read_order(derive(recipe_of()), answers(addresses, pattern))
    assert (order.source, list(order.blocks)) == (source, blocks)
    moved = len(set(blocks)) > 1
    assert order.nodes == ((0, 2, 1, 3) if moved else (0, 1, 2, 3))
    assert [order.rank_of(rank) for rank in range(8)] == ([0, 1, 4, 5, 2, 3, 6, 7] if moved else list(range(8)))
    assert order.cut == {}


def test_without_all_answers_ranks_keep_their_numbers():
    derived = derive(recipe_of())
    said = answers(["r1.n1", "r2.n2", "r1.n3", "r2.n4"], "block.node")[NODES]
    for text in ("", said.rpartition(";")[0], said.replace("block.node", "")):
        assert read_order(derived, {NODES: text}) is None
        assert find_rank(derived, 5, {NODES: text}) == 5


def test_a_rank_adopts_its_place_in_the_order_once_slurms_own_numbers_are_seen_to_fit(monkeypatch):
    variables = answers(["r1.n1", "r2.n2", "r2.n3", "r1.n4"], "block.node") | {
        "SLURM_PROCID": "2", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_NODES": "4",
    }  # fmt: skip
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with monkeypatch.context() as again:
        adopt_task(derive(recipe_of()))
        assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("4", "0")
        again.setenv("RANK", "2")
        again.setenv("SLURM_NODEID", "3")
        with pytest.raises(TopologyError, match="rank 2 is on node 3 of 4, but the plan is node 1"):
            adopt_task(derive(recipe_of()))


def test_the_header_names_the_nodes_and_what_a_group_in_two_blocks_costs():
    plan = make_plan(
        recipe := recipe_of("launch.gres=gpu", "launch.device=cuda", "precision.compute=bf16"),
        load_config(recipe.model),
    )
    placement = read_order(derive(recipe), answers(["r1.n1", "r1.n2", "r1.n3", "r2.n4"], "block.node")).placement
    order = NodeOrder(placement, ("n1", "n2", "n3", "n4"), ("r1", "r1", "r1", "r2"), "block")
    step_s, lost_s = forecast_cut(plan, 2)
    assert 0 < lost_s < step_s
    line, warning = describe_nodes(order, lambda _: (step_s, lost_s))
    assert line == "nodes by block, SLURM's order: r1: n1 n2 n3; r2: n4"
    assert "WARNING: 1 of 2 tp groups lie in more than one block: by the plan messages of tp and ep" in warning
    assert f"{lost_s:.3g} s of a step's {step_s:.3g} s" in warning
    assert "launch.segment=2" in warning
    _, warning = describe_nodes(replace(order, source="switch"), lambda _: (step_s, lost_s))
    assert "launch.switches=1" in warning
    assert len(list(describe_nodes(replace(order, blocks=("r1", "r2", "r1", "r2")), lambda _: (1.0, 1.0)))) == 1
    assert list(describe_nodes(None, lambda _: (1.0, 1.0))) == []


# --- sbatch


def script_of(tmp_path, *overrides: str) -> str:
    return render(recipe_of(*overrides), tmp_path / "x", tmp_path).text


@pytest.mark.parametrize("spares", [0, 1])
def test_nodes_are_asked_only_where_their_order_matters(tmp_path, spares):
    script = script_of(tmp_path, f"launch.spares={spares}")
    assert "  ask_nodes\n" in script
    checked = subprocess.run([SHELLCHECK, "-"], input=script, text=True, capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout
    assert "ask_nodes" not in script_of(tmp_path, "parallel.tp=2")


def test_the_script_asks_slurm_for_segments_switches_and_whole_nodes(tmp_path):
    options = [
        line.removeprefix("#SBATCH ")
        for line in script_of(
            tmp_path, "launch.segment=2", "launch.switches=2@60", "launch.exclusive=true"
        ).splitlines()
        if line.startswith("#SBATCH")
    ]
    assert {"--segment=2", "--switches=2@60", "--exclusive"} <= set(options)
    plain = script_of(tmp_path)
    assert not any(option in plain for option in ("--segment", "--switches", "--exclusive"))


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["launch.segment=3"], "launch.segment", "launch.segment=1 or 2 or 4; or null"),
        (["launch.segment=2", "launch.spares=1"], "launch.segment", "launch.segment=1 or 5"),
        (["launch.switches=some"], "launch.switches", "launch.switches=1@60"),
        (["launch.switches=2@soon"], "launch.switches", "launch.switches=1@60"),
        (["launch.sbatch=['--segment=2']"], "launch.sbatch", "launch.segment"),
    ],
)
def test_a_mistake_in_a_topology_key_is_named_with_its_fix(overrides, key, fix):
    (problem,) = compose([*SLURM, *overrides]).problems
    assert problem.key == key
    assert fix in problem.fix
