"""The start-up probe: each check says what is odd, and nothing where all is well."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from framework.errors import EXIT_NODE, EXIT_USER, LeaseLost, NodeError, RunError
from framework.launch.places import place_checkpoints
from framework.launch.process import OUTCOME
from framework.lease import Holder, Lease, take
from framework.model.load import load_config
from framework.plan.cluster import ClusterRates
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.recipe.schema import Launch, Recipe
from framework.train import probe
from framework.train.probe import Expected, Facts, check_room, compute_known, find_slow, hadamard, judge, refuse

CPU = torch.device("cpu")
WELL = Facts("n1", 1000.0, 0.001, "", 0.002, 1 << 34, True, {"world": (0, 0.004)})
EXPECTED = Expected(host_bytes=1 << 30, link_s={}, is_gpu=False)


def world_of(**changes):
    """Four ranks on two nodes; changes: of rank 2, the first on n2."""
    ranks = [replace(WELL, node=f"n{1 + rank // 2}", clock_s=1000.0 + 0.01 * rank) for rank in range(4)]
    ranks[2] = replace(ranks[2], **changes)
    return ranks


def texts(facts, expected=EXPECTED):
    return [(each.node, each.text, each.is_bad) for each in judge(facts, expected)]


def test_a_world_that_is_well_is_silent():
    assert texts(world_of()) == []
    assert texts([WELL]) == []


@pytest.mark.parametrize(
    ("changes", "text", "is_bad"),
    [
        ({"wrong": "3 of 9 elements"}, "the device of rank 2 on n2 computes wrongly: 3 of 9 elements", True),
        ({"sees_run": False}, "n2 does not see what rank 0 wrote into the run's folder 10 s ago", True),
        ({"clock_s": 1003.5}, "the clock of n2 is 3.5 s ahead of that of rank 0's node", False),
        ({"clock_s": 990.0}, "the clock of n2 is 10.0 s behind that of rank 0's node", False),
    ],
)
def test_what_is_wrong_on_a_node_is_said_with_its_name(changes, text, is_bad):
    [(node, said, bad)] = texts(world_of(**changes))
    assert (node, bad) == ("n2", is_bad)
    assert said.startswith(text)


def test_clocks_within_the_bound_and_what_the_barrier_took_are_alike():
    assert texts(world_of(clock_s=1000.9)) == []
    assert texts(world_of(clock_s=1004.0, barrier_s=5.0)) == [], "the rank was late out of the barrier"


def test_memory_that_is_short_is_said_and_a_kernel_that_does_not_know_is_not():
    facts = world_of()
    facts[3] = replace(facts[3], free=1 << 29)
    [(node, said, is_bad)] = texts(facts)
    assert (node, is_bad) == ("n2", False)
    assert "of free memory; its ranks need at least" in said
    assert texts([replace(each, free=None) for each in facts]) == []


@pytest.mark.parametrize(
    ("seconds", "slow"),
    [
        ((1.0, 1.1, 0.9, 1.0, 9.0), [4]),
        ((1.0, 1.1, 0.9, 1.0, 2.5), []),  # a little slow is not ill
        ((1.0, 1.1, 9.0), []),  # too few to say who is usual
        ((0.001, 0.001, 0.001, 0.020), []),  # within the noise of a busy machine
        ((1.0, 5.0, 1.0, 5.0, 1.0, 5.0), []),  # two kinds of nodes are no outlier
        ((1.0,) * 60 + (4.0, 5.0), [60, 61]),
    ],
)
def test_who_is_slow_is_found_by_medians(seconds, slow):
    assert list(find_slow(dict(enumerate(seconds)), 0.1)) == slow


@pytest.mark.parametrize("is_gpu", [False, True])
def test_a_slow_device_is_bad_on_gpus_and_said_on_cpus(is_gpu):
    facts = [replace(WELL, node=f"n{rank}", device_s=0.5 if rank == 3 else 0.01, reduce_s={}) for rank in range(8)]
    [(node, said, is_bad)] = texts(facts, replace(EXPECTED, is_gpu=is_gpu))
    assert (node, is_bad) == ("n3", is_gpu)
    assert "rank 3 on n3 multiplies matrices in 500 ms, 50.0 times the median" in said


def groups_of(slow, ranks_per_node=2, seconds=0.9):
    """Eight ranks in groups of two over tp; those of `slow` take long, of which the last to arrive sees the shortest time."""
    facts = []
    for rank in range(8):
        first = rank - rank % 2
        took = seconds if first in slow else 0.01
        facts.append(replace(WELL, node=f"n{rank // ranks_per_node}", reduce_s={"tp": (first, took + rank % 2)}))
    return facts


def test_a_slow_group_within_a_node_names_it():
    [(node, said, is_bad)] = texts(groups_of({4}), replace(EXPECTED, is_gpu=True))
    assert (node, is_bad) == ("n2", True)
    assert "an all-reduce over tp takes 900 ms on n2, 90.0 times the median of 4 groups" in said
    assert texts(groups_of({4})) == [(node, said, False)], "on CPUs it is said"
    assert texts(groups_of(set())) == []


def test_a_slow_group_over_two_nodes_condemns_neither():
    [(_, said, is_bad)] = texts(groups_of({4}, ranks_per_node=1), replace(EXPECTED, is_gpu=True))
    assert not is_bad
    assert "on n4, n5" in said


def test_links_far_below_their_rates_are_said():
    cluster = ClusterRates.from_recipe(Recipe(launch=Launch(gres="gpu:h100", device="cuda")))
    planned_s = cluster.collective_seconds("all_reduce", probe.BYTES_ON_GPU, ranks=4, nodes=4)
    assert 0.001 < planned_s < 0.01
    facts = [replace(WELL, reduce_s={"world": (0, 20 * planned_s)})] * 4
    [(_, said, is_bad)] = texts(facts, Expected(0, {"world": planned_s}, True))
    assert not is_bad
    assert "by the rates of its links: is NCCL on the right network" in said
    assert (
        texts([replace(WELL, reduce_s={"world": (0, 5 * planned_s)})] * 4, Expected(0, {"world": planned_s}, True))
        == []
    )


def test_a_device_that_computes_rightly_is_well_and_one_wrong_bit_is_not():
    wrong, seconds = compute_known(CPU)
    assert wrong == ""
    assert 0 < seconds < 5
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        rows = hadamard(64).to(dtype)
        assert torch.equal((rows @ rows.T).double(), 64.0 * torch.eye(64, dtype=torch.float64))
    signs = hadamard(256)
    signs[3, 4] += 2.0**-10
    assert "elements of a known matmul are wrong" in compute_known(CPU, signs)[0]


def test_room_is_asked_for_the_checkpoints_that_are_still_to_come(tmp_path, monkeypatch):
    def plan_of(keep=2):
        return SimpleNamespace(recipe=SimpleNamespace(checkpoint=SimpleNamespace(keep=keep)))

    monkeypatch.setattr(probe, "checkpoint_bytes", lambda plan: 12_000)
    place_checkpoints(tmp_path, str(tmp_path / "scratch"))
    free = {tmp_path: 1 << 40, tmp_path / "scratch" / tmp_path.name: 30_000}
    monkeypatch.setattr(probe.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[path.resolve()]))
    [finding] = check_room(plan_of(), tmp_path)
    assert not finding.is_bad
    assert "the run writes 3 more checkpoints" in finding.text
    assert finding.text.startswith(f"{tmp_path}/scratch/{tmp_path.name} has")
    (tmp_path / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert check_room(plan_of(), tmp_path) == [], "one of three is there"
    assert check_room(plan_of(keep=1), tmp_path) == []


def test_a_checkpoint_has_a_master_and_two_moments_of_each_parameter_on_any_layout():
    for words in ([], ["parallel.dp=2", "zero.stage=3"], ["parallel.pp=2"]):
        recipe = compose(["experiment=quickstart", "launch.ranks=2", *words]).require()
        plan = make_plan(recipe, load_config(recipe.model))
        assert probe.checkpoint_bytes(plan) == pytest.approx(12 * plan.size.total, rel=0.02)


def bad_of(facts):
    return [each for each in judge(facts, EXPECTED) if each.is_bad]


def test_a_bad_node_is_left_out_by_the_job_and_named(tmp_path, monkeypatch):
    (tmp_path / "slurm").mkdir()
    facts = world_of(wrong="3 of 9 elements")
    with pytest.raises(NodeError, match="rank 2 on n2 computes wrongly") as caught:
        refuse(bad_of(facts), facts, Lease(tmp_path))
    assert caught.value.exit_code == EXIT_NODE
    assert not (tmp_path / "slurm" / "bad-nodes").exists(), "nobody reads it outside of a job"
    monkeypatch.setenv(OUTCOME, "x")
    monkeypatch.setenv("SLURM_PROCID", "0")
    with pytest.raises(NodeError):
        refuse(bad_of(facts), facts, Lease(tmp_path))
    assert (tmp_path / "slurm" / "bad-nodes").read_text() == "n2\n"
    take(tmp_path, Holder("n9", 1, "now"))
    with pytest.raises(LeaseLost):
        refuse(bad_of(facts), facts, Lease(tmp_path))
    assert (tmp_path / "slurm" / "bad-nodes").read_text() == "n2\n"
    refuse([], facts, Lease(tmp_path))


def test_a_folder_that_no_other_node_sees_is_the_users_mistake(tmp_path):
    facts = [replace(WELL, node=f"n{rank}", sees_run=rank == 0) for rank in range(3)]
    with pytest.raises(RunError, match=r"is not on a file system that all nodes share: n1, n2 do not see") as caught:
        refuse(bad_of(facts), facts, Lease(tmp_path))
    assert caught.value.exit_code == EXIT_USER
    with pytest.raises(NodeError, match="n1 does not see"):
        refuse(bad_of(facts[:2]), facts[:2], Lease(tmp_path))
