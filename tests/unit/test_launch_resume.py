"""What a resume may change, and how a change that makes another run is refused."""

import re

import pytest

from framework.errors import EXIT_USER, RunError
from framework.launch.directory import RunDirectory, describe_self
from framework.launch.identity import describe_identity, find_edits, fixed, may_change, values_of
from framework.launch.parts import go_on
from framework.launch.resume import MAY_CHANGE, resume_recipe
from framework.launch.settle import settle
from framework.lease import take
from framework.recipe.compose import compose, load_recipe, save_recipe
from framework.recipe.keys import list_keys
from tests.saving import save_checkpoint
from tests.unit.test_checkpoint import ALONE


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
    assert changes == {}


def test_allowed_changes_are_applied_and_listed(run):
    recipe, changes = resume(run, "train.steps=900", "launch.ranks=4", "batch.sequences_per_microbatch=1")
    assert (recipe.train.steps, recipe.launch.ranks, recipe.batch.sequences_per_microbatch) == (900, 4, 1)
    assert changes.keys() == {"train.steps", "launch.ranks", "batch.sequences_per_microbatch"}


def test_a_pipeline_may_begin_end_and_change_its_cut_and_its_schedule(run):
    pipeline = ("parallel.pp=2", "launch.ranks=2", "pipeline.schedule=interleaved", "pipeline.layers=[1,1,1,1]")
    recipe, changes = resume(run, *pipeline)
    assert (recipe.parallel.pp, recipe.pipeline.layers) == (2, [1, 1, 1, 1])
    assert {"parallel.pp", "pipeline.schedule", "pipeline.layers"} <= changes.keys()


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


def test_a_resume_that_is_refused_leaves_a_start_that_runs_alone(run):
    """One whose lock is not seen here, as on a file system with locks of one machine only."""
    lease = take(run.path, describe_self())
    words = [f"run.root={run.path.parent}", "run.id=x", "optim.lr=0.1"]
    with pytest.raises(RunError, match="cannot change within a run"), go_on(run, words, []):
        pytest.fail("goes on")
    lease.check()
    lease.write(run.path / "run_info.json", b"{}")


def test_repeating_the_first_command_goes_on(run):
    recipe, changes = resume(run, "experiment=quickstart", "optim.lr=0.003")
    assert recipe.optim.lr == 0.003
    assert changes == {}


def test_what_the_launcher_settled_is_no_change(run):
    save_recipe(settle(resume(run)[0]), run.recipe)
    recipe, changes = resume(run, "experiment=quickstart", "optim.lr=0.003", "precision.compute=auto")
    assert recipe.precision.compute in ("bf16", "fp32")
    assert changes == {}


def test_recipe_that_is_chosen_anew_is_compared_in_full(run):
    with pytest.raises(RunError, match=r"optim.lr +0.003 "):
        resume(run, "experiment=quickstart")


def test_choice_does_not_undo_what_may_change(run):
    save_recipe(resume(run, "train.steps=900")[0], run.recipe)
    recipe, _ = resume(run, "experiment=quickstart", "optim.lr=0.003")
    assert recipe.train.steps == 900


def test_a_source_called_memory_is_no_memory():
    assert may_change("train.stages.long.memory.activation_checkpointing")
    assert not may_change("train.stages.long.data.sources.memory.weight")


def test_every_pattern_of_what_may_change_names_a_key():
    keys = [key.path for key in list_keys()]
    for pattern, _ in MAY_CHANGE:
        assert any(may_change(key) for key in keys if key.startswith(pattern.partition("*")[0])), pattern


@pytest.mark.parametrize("overrides", [["optim.lr=0.1"], ["experiment=quickstart", "optim=lion"]])
def test_a_run_that_has_not_trained_takes_the_corrected_recipe(run, overrides):
    (run.path / "metrics.jsonl").unlink()
    recipe, changes = resume(run, *overrides)
    assert recipe.optim.lr != 0.003
    assert changes
    (run.path / "checkpoints.json").touch()  # its checkpoints may be gone; it has trained
    with pytest.raises(RunError, match="begun with another recipe"):
        resume(run, *overrides)


@pytest.fixture
def recorded(run):
    """The same run, whose launch has recorded its recipe."""
    run.note_launch([], {}, **describe_identity(run, load_recipe(run.recipe)))
    return run


def edit(run, key, value):
    """Edit a line of recipe.yaml by hand."""
    text = run.recipe.read_text()
    edited = re.sub(rf"(?m)^( *{key}:) .*$", rf"\1 {value}", text, count=1)
    assert edited != text
    run.recipe.write_text(edited)


@pytest.mark.parametrize(
    ("key", "name", "value"), [("lr", "optim.lr", 0.5), ("steps", "train.steps", 77), ("keep", "checkpoint.keep", 9)]
)
def test_a_recipe_that_was_edited_is_refused_by_the_key_and_the_true_value(recorded, key, name, value):
    true = dict(values_of(load_recipe(recorded.recipe)))[name]
    edit(recorded, key, value)
    with pytest.raises(
        RunError, match=rf"recipe.yaml was edited.*\n  {name}: it has {value}, .*with {true}\n"
    ) as caught:
        resume(recorded)
    assert caught.value.exit_code == EXIT_USER
    recipe, changes = resume(recorded, f"{name}={true}")
    assert dict(values_of(recipe))[name] == true
    assert list(changes) == [name], "so recipe.yaml is written anew"


def test_a_value_that_is_added_or_taken_away_is_an_edit_and_a_key_of_a_later_version_is_none():
    recipe = compose(["experiment=quickstart", "run.id=x"]).require()
    now = values_of(recipe)
    assert find_edits({}, now) == {}
    assert find_edits(now, now) == {}
    later = {key: value for key, value in now.items() if key not in ("optim.betas", "train.on_spike")}
    assert find_edits(later, now) == {}
    assert find_edits(now, now | {"model.config.rope_theta": 5.0}) == {"model.config.rope_theta": (5.0, "(not set)")}
    assert find_edits(fixed(now), now) == {}, "what a checkpoint records"
    assert find_edits(now | {"model.config.gone": 1}, now) == {"model.config.gone": ("(not set)", 1)}


def test_a_checkpoint_knows_the_recipe_where_the_record_is_lost(run):
    true = fixed(values_of(load_recipe(run.recipe)))
    save_checkpoint(run.checkpoints, 3, [], {"step": 3, "recipe": true, "tokenizer": ""}, ALONE, 2)
    run.record.write_text("{")
    edit(run, "lr", 0.5)
    edit(run, "steps", 77)
    with pytest.raises(RunError, match=r"optim.lr: it has 0.5, the run has trained with 0.003") as caught:
        resume(run)
    assert "train.steps" not in str(caught.value)


def test_a_run_that_never_trained_may_be_given_another_value_than_the_edited_one(recorded):
    (recorded.path / "metrics.jsonl").unlink()
    edit(recorded, "lr", 0.5)
    with pytest.raises(RunError, match=r"optim.lr"):
        resume(recorded)
    assert resume(recorded, "optim.lr=0.2")[0].optim.lr == 0.2


@pytest.mark.parametrize("harm", ["halve", "empty", "list", "flip", "delete"])
def test_a_damaged_record_is_refused_by_readers_and_made_anew_by_a_launch(recorded, harm, capsys):
    text = recorded.record.read_text()
    harmed = {
        "halve": text[: len(text) // 2],
        "empty": "",
        "list": "[]",
        "flip": text.replace("optim.lr", "optim.ls", 1),
    }
    recorded.record.unlink() if harm == "delete" else recorded.record.write_text(harmed[harm])
    if harm != "delete":
        with pytest.raises(RunError, match=r"run.json was cut or changed") as caught:
            recorded.read_record()
        assert caught.value.exit_code == EXIT_USER
    assert recorded.find_record() == {}
    recorded.note_launch(["a"], {})
    assert "run.json was gone or damaged, and is made anew" in capsys.readouterr().err
    assert [launch["overrides"] for launch in recorded.read_record()["launches"]] == [["a"]]
