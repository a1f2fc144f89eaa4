"""What a resume may change, and how a change that makes another run is refused."""

from functools import partial

import pytest

from framework.errors import RunError
from framework.launch import local, submit
from framework.launch.directory import RunDirectory, describe_self
from framework.launch.resume import MAY_CHANGE, Change, resume_recipe
from framework.launch.settle import settle
from framework.lease import take
from framework.recipe.compose import compose, save_recipe
from framework.recipe.keys import list_keys


@pytest.fixture
def run(tmp_path):
    """A run of the quickstart with another learning rate, which has trained a step."""
    run = RunDirectory.create(tmp_path, "x", "demo")
    save_recipe(compose(["experiment=quickstart", "optim.lr=0.003", "run.id=x"]).require(), run.recipe)
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    return run


def resume(run, *overrides):
    return resume_recipe(run, [f"run.root={run.path.parent}", "run.id=x", *overrides], [])


def test_resume_without_changes_is_the_saved_recipe(run):
    recipe, changes = resume(run)
    assert recipe.optim.lr == 0.003
    assert recipe.run.name == "quickstart"
    assert changes == []


def test_allowed_changes_are_applied_and_listed(run):
    recipe, changes = resume(run, "train.steps=900", "launch.ranks=4", "batch.sequences_per_microbatch=1")
    assert (recipe.train.steps, recipe.launch.ranks, recipe.batch.sequences_per_microbatch) == (900, 4, 1)
    assert {change.key for change in changes} == {"train.steps", "launch.ranks", "batch.sequences_per_microbatch"}


def test_a_pipeline_may_begin_end_and_change_its_cut_and_its_schedule(run):
    pipeline = ("parallel.pp=2", "launch.ranks=2", "pipeline.schedule=interleaved", "pipeline.layers=[1,1,1,1]")
    recipe, changes = resume(run, *pipeline)
    assert (recipe.parallel.pp, recipe.pipeline.layers) == (2, [1, 1, 1, 1])
    assert {"parallel.pp", "pipeline.schedule", "pipeline.layers"} <= {change.key for change in changes}


@pytest.mark.parametrize(
    "override",
    [
        "optim.lr=0.1",
        "optim.weight_decay=0.5",
        "model.config.hidden_size=512",
        "model.config.new_key=1",
        "model.freeze=[embed]",
        "train.seed=7",
        "batch.context=512",
        "batch.sequences_per_step=64",
        "data.validation=0.3",
        "data.sources.more={path: /data}",
        "precision.compute=bf16",
    ],
)
def test_change_that_makes_another_run_is_refused_with_the_difference(run, override):
    key, _, value = override.partition("=")
    with pytest.raises(RunError, match="cannot change within a run") as caught:
        resume(run, override, "train.steps=900")
    table = [line for line in str(caught.value).splitlines() if line.lstrip().startswith(key)]
    assert len(table) >= 1
    assert "train.steps  " not in str(caught.value)
    if "{" not in value:
        assert value.strip("[]") in table[0]


@pytest.mark.parametrize("go_on", [local._resume, partial(submit._resume, dry_run=False)], ids=["train", "submit"])
def test_a_resume_that_is_refused_leaves_a_start_that_runs_alone(run, go_on):
    """One whose lock is not seen here, as on a file system with locks of one machine only."""
    lease = take(run.path, describe_self())
    with pytest.raises(RunError, match="cannot change within a run"):
        go_on(run, [f"run.root={run.path.parent}", "run.id=x", "optim.lr=0.1"], [])
    lease.check()
    lease.write(run.path / "run_info.json", b"{}")


def test_repeating_the_first_command_goes_on(run):
    recipe, changes = resume(run, "experiment=quickstart", "optim.lr=0.003")
    assert recipe.optim.lr == 0.003
    assert changes == []


def test_what_the_launcher_settled_is_no_change(run):
    save_recipe(settle(resume(run)[0]), run.recipe)
    recipe, changes = resume(run, "experiment=quickstart", "optim.lr=0.003", "precision.compute=auto")
    assert recipe.precision.compute in ("bf16", "fp32")
    assert changes == []


def test_recipe_that_is_chosen_anew_is_compared_in_full(run):
    with pytest.raises(RunError, match=r"optim.lr +0.003 "):
        resume(run, "experiment=quickstart")


def test_choice_does_not_undo_what_may_change(run):
    save_recipe(resume(run, "train.steps=900")[0], run.recipe)
    recipe, _ = resume(run, "experiment=quickstart", "optim.lr=0.003")
    assert recipe.train.steps == 900


def test_every_pattern_of_what_may_change_names_a_key():
    keys = [key.path for key in list_keys()]
    for pattern, _ in MAY_CHANGE:
        assert any(Change(key, 0, 1).is_allowed for key in keys if key.startswith(pattern.partition("*")[0])), pattern


@pytest.mark.parametrize("overrides", [["optim.lr=0.1"], ["experiment=quickstart", "optim=lion"]])
def test_a_run_that_has_not_trained_takes_the_corrected_recipe(run, overrides):
    (run.path / "metrics.jsonl").unlink()
    recipe, changes = resume(run, *overrides)
    assert recipe.optim.lr != 0.003
    assert changes
    (run.path / "checkpoints.json").touch()  # its checkpoints may be gone; it has trained
    with pytest.raises(RunError, match="begun with another recipe"):
        resume(run, *overrides)
