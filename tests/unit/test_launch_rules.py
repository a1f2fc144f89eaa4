"""What a recipe for SLURM may get wrong is said with the key and the way out, before anything is submitted."""

import pytest

from framework.recipe.compose import compose
from framework.recipe.derive import derive
from framework.recipe.machines import seconds_of

SLURM = ("launch=slurm", "batch.sequences_per_step=256")


def problem_of(*overrides, folders=()):
    problems = compose([*SLURM, *overrides], folders).problems
    assert len(problems) == 1, problems
    return problems[0]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800), ("10:30", 630), ("12:30:00", 45000), ("2-12", 216000), ("1-00:30", 88200), ("1-00:00:01", 86401),
        ("12h", None), ("", None), ("1:2:3:4", None),
    ],
)  # fmt: skip
def test_time_limits_are_read_as_sbatch_reads_them(text, seconds):
    assert seconds_of(text) == seconds


def test_an_unquoted_time_is_explained(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nlaunch: {nodes: 1, time: 12:30:00}\n")
    problem = problem_of("experiment=mine", folders=[tmp_path])
    assert (problem.key, problem.value) == ("launch.time", 45000)
    assert "quotes" in problem.fix


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["launch.nodes=2", "launch.ranks=4"], "launch.nodes", "launch.ranks_per_node=2"),
        (["launch.ranks=12"], "launch.ranks", "launch.ranks=8 or 16"),
        (["launch.nodes=2", "parallel.dp=4"], "parallel.dp", "launch.ranks=4"),
        (["launch.nodes=1", "launch.time='soon'"], "launch.time", "HH:MM:SS"),
        (["launch.nodes=1", 'launch.time="2:00"'], "launch.time", "launch.signal_seconds_before_end=60"),
        (["launch.nodes=1", "launch.container.kind=pyxis"], "launch.container.image", "launch.container.image="),
        (["launch.nodes=1", "launch.sbatch=['--time=1:00']"], "launch.sbatch", "launch.time"),
        (["launch.nodes=1", "launch.sbatch=[exclusive]"], "launch.sbatch", "--constraint"),
        (["launch.nodes=1", "launch.environment={A-B: 1}"], "launch.environment.A-B", "NCCL_DEBUG"),
    ],
)
def test_a_mistake_names_its_key_and_the_fix(overrides, key, fix):
    problem = problem_of(*overrides)
    assert problem.key == key
    assert fix in problem.fix


def test_a_site_that_needs_an_account_asks_for_it():
    problem = problem_of("launch=example_site", "launch.nodes=1")
    assert (problem.key, problem.fix) == ("launch.account", "launch.account=...")


@pytest.mark.parametrize(
    ("overrides", "world", "nodes", "ranks_per_node"),
    [
        (["launch.nodes=4"], 32, 4, 8),
        (["launch.ranks=16"], 16, 2, 8),
        (["launch.ranks=2"], 2, 1, 2),
        (["parallel.dp=16"], 16, 2, 8),
        (["launch.nodes=2", "launch.ranks_per_node=1", "launch.ranks=2"], 2, 2, 1),
    ],
)
def test_nodes_and_ranks_follow_from_what_is_said(overrides, world, nodes, ranks_per_node):
    derived = derive(compose([*SLURM, *overrides]).require())
    assert (derived.world, derived.nodes, derived.ranks_per_node) == (world, nodes, ranks_per_node)


@pytest.mark.parametrize(
    "experiment", ["pretrain_llama3_2_1b", "pretrain_gpt2", "finetune_qwen3_0_6b", "sft_llama3_1_8b"]
)
def test_a_shipped_experiment_runs_on_as_many_nodes_as_are_said(experiment):
    words = [f"experiment={experiment}", "launch=slurm", "launch.nodes=2"]
    words += ["data.sources.files.path=x"] if experiment.startswith(("finetune", "sft")) else []
    derived = derive(compose(words).require())
    assert (derived.world, derived.nodes, derived.ranks_per_node) == (16, 2, 8)


def test_ranks_that_are_said_beside_nodes_have_to_agree():
    words = ["experiment=pretrain_gpt2", "launch=slurm", "launch.nodes=2", "launch.ranks=8"]
    (problem,) = compose(words).problems
    assert problem.key == "launch.nodes"
