"""Epochs: passes over the text become steps, by what was prepared and not by what the recipe guesses."""

from pathlib import Path

import pytest

from framework.errors import RecipeError
from framework.launch.directory import RunDirectory
from framework.launch.parts import decide_next
from framework.launch.settle import settle_steps
from framework.recipe.compose import compose, save_recipe
from framework.recipe.derive import derive
from framework.recipe.describe import describe_derived
from tests import tiny_run

WORDS = (
    *tiny_run.RECIPE,
    "batch.sequences_per_step=4",
    "batch.sequences_per_microbatch=2",
    "optim.schedule.warmup_steps=1",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("epochs")
    tiny_run.write_corpus(place / "corpus")
    return place


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def settle(*words):
    return settle_steps(compose([*WORDS, *words]).require())[0]


def test_one_epoch_reads_every_sequence_once_and_two_twice(capsys):
    one, two = settle("train.epochs=1"), settle("train.epochs=2")
    assert abs(two.train.steps - 2 * one.train.steps) <= 1
    assert (one.train.epochs, two.train.epochs) == (None, None)
    said = capsys.readouterr().out
    assert f"epochs   1 are {one.train.steps} steps: passes 1.0" in said
    assert "of files" in said


def test_what_weights_make_of_an_epoch_is_said(capsys):
    """Of two equal sources one has three quarters of the tokens."""
    settle("train.epochs=1", "+data.sources.more={path: corpus, weight: 3}")
    said = capsys.readouterr().out
    assert "passes 0.50 of files, 1.50 of more" in said


def test_steps_are_what_they_are_without_epochs():
    assert settle("train.steps=77").train.steps == 77


def test_a_schedule_is_judged_by_the_steps_that_follow():
    """Longer than the 250 steps of config.yaml, which nobody asked for, is no mistake; longer than the run is."""
    recipe = compose([*WORDS, "train.epochs=40", "optim.schedule.warmup_steps=300"]).require()
    assert "40 passes over the text" in describe_derived(derive(recipe))
    assert settle_steps(recipe)[0].train.steps > 300
    with pytest.raises(RecipeError, match=r"train.epochs=0.1 sets train.steps=\d+\n(.|\n)*warm-up is longer"):
        settle("train.epochs=0.1", "optim.schedule.warmup_steps=50")


def test_a_run_goes_on_by_epochs(place):
    run = RunDirectory.create(Path("runs"), "mine", "run")
    save_recipe(settle("train.epochs=1", "run.id=mine"), run.recipe)
    part = decide_next(run, ["run.id=mine", "train.epochs=3"], [])
    assert part.recipe.train.steps == settle("train.epochs=3").train.steps
    assert {key: now for key, (_, now) in part.changes.items()} == {"train.steps": part.recipe.train.steps}


def test_steps_that_are_typed_count_more_than_the_epochs_of_a_file(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrain: {epochs: 2}\n")
    recipe = compose([*WORDS, "experiment=mine", "train.steps=77"], [tmp_path]).require()
    assert (recipe.train.steps, recipe.train.epochs) == (77, None)
    assert compose([*WORDS, "experiment=mine"], [tmp_path]).require().train.epochs == 2
    with pytest.raises(RecipeError, match=r"train.steps = 77(.|\n)*train.epochs=2 sets the number of steps too"):
        compose([*WORDS, "train.steps=77", "train.epochs=2"]).require()
