"""A range of nodes: what the recipe is on each of them, and what contradicts it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.cli import main
from framework.errors import EXIT_DONE, EXIT_USER, RecipeError, TopologyError
from framework.launch.nodes import describe_counts, legal_counts, plan_counts
from framework.launch.process import check_place
from framework.plan.check import bytes_checkpointed, bytes_of_copies, check_copies, check_layout
from framework.recipe.compose import compose, load_recipe, save_recipe
from framework.recipe.derive import at_nodes, can_move, derive, node_counts
from framework.recipe.schema import Batch, Launch, Recipe
from tests.grid import IN_TURN
from tests.tiny_run import RECIPE, write_corpus

pytestmark = IN_TURN

SLURM = ("launch=slurm", "launch.gres=null", "launch.ranks_per_node=2")
TINY = (*RECIPE, *SLURM, "batch.sequences_per_microbatch=1")


def of(*words):
    return compose([*TINY, *words]).require()


def test_data_parallel_ranks_follow_the_nodes_and_the_batch_stays():
    recipe = of(
        "launch.nodes=[1,4]", "batch.sequences_per_step=32", "batch.sequences_per_microbatch=2", "parallel.tp=2"
    )
    derived = [derive(at_nodes(recipe, nodes)) for nodes in node_counts(recipe) if nodes != 3]
    assert [(each.world, each.dp, each.tp, each.accumulation) for each in derived] == [
        (2, 1, 2, 16),
        (4, 2, 2, 8),
        (8, 4, 2, 4),
    ]
    assert {each.sequences_per_step for each in derived} == {32}
    assert derive(recipe) == derived[-1]  # what a recipe is planned for is the most


def test_microbatches_become_smaller_where_they_would_not_be_whole():
    recipe = of("launch.nodes=[1,3]", "batch.sequences_per_step=36", "batch.sequences_per_microbatch=6")
    derived = [derive(at_nodes(recipe, nodes)) for nodes in (1, 2, 3)]
    assert [(each.dp, each.sequences_per_microbatch, each.accumulation) for each in derived] == [
        (2, 6, 3),
        (4, 3, 3),
        (6, 6, 1),
    ]


@settings(max_examples=50, deadline=None)
@given(most=st.integers(1, 6), share=st.integers(1, 12), size=st.integers(1, 4))
def test_every_step_has_the_same_sequences_on_every_number_of_nodes(most, share, size):
    sequences = most * 2 * share * size
    launch = Launch(kind="slurm", ranks=None, nodes=(1, most), ranks_per_node=2)
    batch = Batch(sequences_per_step=sequences, sequences_per_microbatch=size)
    recipe = replace(Recipe(), launch=launch, batch=batch)
    for nodes in node_counts(recipe):
        if sequences % (2 * nodes) == 0:
            derived = derive(at_nodes(recipe, nodes))
            assert derived.dp * derived.accumulation * derived.sequences_per_microbatch == sequences
            assert derived.sequences_per_microbatch <= size


def test_a_recipe_of_one_number_is_the_same_wherever_it_is_started():
    recipe = of("launch.nodes=2", "batch.sequences_per_step=8")
    assert at_nodes(recipe, 1) is recipe
    assert not can_move(recipe)
    assert can_move(of("launch.nodes=2", "launch.spares=1", "batch.sequences_per_step=8"))


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        (["launch.nodes=[4,2]"], "launch.nodes", "launch.nodes=[2,4]"),
        (["launch.nodes=[0,2]"], "launch.nodes", ""),
        (["launch.nodes=[1,2,3]"], "launch.nodes", ""),
        (["launch.nodes=two"], "launch.nodes", ""),
        (["launch.nodes=[1,2]", "launch.ranks=4"], "launch.ranks", "launch.ranks=null"),
        (["launch.nodes=[1,2]", "parallel.dp=4"], "parallel.dp", "parallel.dp=null"),
        (["launch.nodes=[1,3]"], "batch.sequences_per_step", "launch.nodes=[1,2]"),
        (["launch.nodes=[1,2]", "launch=local"], "launch.nodes", "launch.nodes=null"),
        (["launch.spares=1", "launch=local"], "launch.spares", "launch.spares=0"),
        (["launch.spares=-1"], "launch.spares", ""),
    ],
)
def test_a_mistake_names_its_key_and_the_fix(words, key, fix):
    problems = compose([*TINY, "batch.sequences_per_step=32", *words]).problems
    assert [problem.key for problem in problems] == [key]
    assert fix in problems[0].fix


def test_a_range_is_read_back_from_the_run(tmp_path):
    recipe = of("launch.nodes=[1,4]", "launch.spares=1", "batch.sequences_per_step=32")
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_each_number_of_nodes_is_planned_and_the_illegal_ones_say_why():
    recipe = of("launch.nodes=[1,4]", "batch.sequences_per_step=32", "zero=stage_3", "zero.shard_within=4")
    counts = plan_counts(recipe)
    assert legal_counts(recipe, counts) == (2, 4)
    said = describe_counts(recipe, counts)
    assert "SLURM is asked for 2 to 4 nodes" in said
    assert "1 node   not: zero.shard_within: does not divide the 2 ranks" in said
    assert "3 nodes  not: batch.sequences_per_step" in said
    assert "2 nodes  dp=4, 8 x 1 sequences on a rank" in said


def test_experts_that_do_not_divide_make_a_number_illegal():
    words = ["launch.nodes=[1,4]", "batch.sequences_per_step=32", "parallel.ep=4", "model.family=mixtral"]
    recipe = of(*words, "model.config.num_local_experts=4")
    refusals = {each.nodes: each.refusal for each in plan_counts(recipe)}
    assert [nodes for nodes, refusal in refusals.items() if not refusal] == [2, 4]
    assert refusals[1].startswith("parallel.ep: ep divides")


@pytest.mark.parametrize(
    "words",
    [
        ["checkpoint.neighbor_copies=2", "checkpoint.neighbor_every_steps=10"],
        ["track.profile_ranks=[0,7]", "track.profile_steps=[2,3]"],
    ],
)
def test_what_fewer_nodes_do_less_of_makes_no_number_illegal(words):
    """Two copies need three nodes, and rank 7 the fourth: a start on fewer keeps what copies it can, and has no rank 7."""
    recipe = of("launch.nodes=[1,4]", "batch.sequences_per_step=48", *words)
    assert legal_counts(recipe, plan_counts(recipe)) == (1, 2, 3, 4)


def test_on_the_most_nodes_copies_and_profiled_ranks_must_fit():
    """`check` says so; a recipe that comes here unchecked is refused as well."""
    recipe = of("launch.nodes=[1,2]", "batch.sequences_per_step=32")
    recipe = replace(recipe, track=replace(recipe.track, profile_steps=(2, 3)))
    for group, key, value in (("checkpoint", "neighbor_copies", 2), ("track", "profile_ranks", [4])):
        changed = replace(recipe, **{group: replace(getattr(recipe, group), **{key: value})})
        refusals = [each.refusal for each in plan_counts(changed)]
        assert refusals[0] == ""
        assert refusals[1].startswith(f"{group}.{key}: ")


def test_a_node_holds_no_more_copies_than_there_are_nodes():
    words = ["checkpoint.neighbor_copies=2", "checkpoint.neighbor_every_steps=10", "batch.sequences_per_step=48"]
    recipe = of("launch.nodes=[1,3]", *words)
    held = {nodes: bytes_of_copies(check_layout(at_nodes(recipe, nodes))) for nodes in (1, 2, 3)}
    assert held[1] > 0
    plan = check_layout(at_nodes(recipe, 1))
    assert held[1] == 2 * sum(bytes_checkpointed(plan, rank) for rank in (0, 1))
    with pytest.raises(RecipeError, match="of 0 other nodes"):
        check_copies(plan, node_bytes=1, tmpfs_bytes=1)


def test_too_few_nodes_for_the_memory_are_not_asked_for():
    """Sharded over eight ranks a rank holds less than over two."""
    words = ["launch.nodes=[1,4]", "batch.sequences_per_step=32", "zero=stage_3"]
    recipe = of(*words, "model.config.hidden_size=4096")
    limit_gb = math.sqrt(bytes_of(recipe, 1) * bytes_of(recipe, 4)) / 2**30
    recipe = replace(recipe, launch=replace(recipe.launch, memory_per_rank_gb=limit_gb))
    counts = plan_counts(recipe)
    assert legal_counts(recipe, counts)[-1] == 4
    assert "and its device has" in counts[0].refusal


def bytes_of(recipe, nodes):
    from framework.plan.check import check_layout, most_bytes

    return most_bytes(check_layout(at_nodes(recipe, nodes)))


@pytest.mark.parametrize("more", [[], ["launch.chain=3"], ["launch.starter=torchrun"]])
def test_a_dry_run_shows_the_layouts_and_the_range(tmp_path, monkeypatch, capsys, more):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    words = ["launch.nodes=[1,2]", "launch.spares=1", "batch.sequences_per_step=32", *more]
    assert main(["submit", "--dry-run", *TINY, *words]) == EXIT_DONE
    shown = capsys.readouterr()
    assert "#SBATCH --nodes=2-3\n" in shown.out
    assert "counts=(1 2)" in shown.out
    assert "2 nodes  dp=4, 8 x 1 sequences on a rank" in shown.err
    assert ('--nnodes="$SLURM_STEP_NUM_NODES"' in shown.out) == ("launch.starter=torchrun" in more)


def test_runs_of_a_sweep_must_have_the_same_range(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    words = ["launch.nodes=[1,4]", "batch.sequences_per_step=32,48", "launch.ranks_per_node=1"]
    assert main(["submit", "-m", "--dry-run", *TINY, *words]) == EXIT_USER
    assert "runs have the same resources" in capsys.readouterr().err


def test_train_refuses_a_range_and_says_how_it_could(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [*TINY, "launch.nodes=[1,2]", "batch.sequences_per_step=32"]
    assert main(["train", *words]) == EXIT_USER
    assert "launch.kind=local launch.ranks=4 launch.nodes=null" in capsys.readouterr().err


def test_a_rank_checks_its_place_by_the_nodes_of_its_start(monkeypatch):
    """The third of four ranks on two nodes of a recipe for up to four."""
    for name, value in {"RANK": "2", "SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    recipe = of("launch.nodes=[1,4]", "batch.sequences_per_step=32")
    check_place(derive(at_nodes(recipe, 2)))
    with pytest.raises(TopologyError, match="node 1 of 2, but the plan is node 1 of 4"):
        check_place(derive(recipe))
