"""`meshwright prune` says what it would remove, removes exactly that, and leaves alone what anybody may still need."""

from dataclasses import replace

import pytest

from framework.checkpoint.commit import list_checkpoints, step_of
from framework.cli import main
from framework.errors import EXIT_DONE, EXIT_USER, RunError
from framework.launch.directory import RunDirectory
from framework.recipe.compose import compose, load_recipe, save_recipe
from framework.recipe.schema import LossSettings
from tests.unit.test_checkpoint import save


@pytest.fixture
def make_run(tmp_path, monkeypatch):
    """A function that makes a run in runs/, which has saved some steps."""
    monkeypatch.chdir(tmp_path)

    def make(name, steps, *overrides, **state):
        run = RunDirectory.create(tmp_path / "runs", name, "demo")
        save_recipe(compose(["experiment=quickstart", f"run.id={name}", *overrides]).require(), run.recipe)
        for step in steps:
            save(run.checkpoints, step, **state)
        return run

    return make


def steps_of(run):
    return sorted(step_of(path) for path in list_checkpoints(run.checkpoints))


def test_without_yes_nothing_is_removed(make_run, capsys):
    run = make_run("a", (1, 2, 3))
    assert main(["prune"]) == EXIT_DONE
    said = capsys.readouterr().out
    assert "steps 1, 2: " in said
    assert "would be free" in said
    assert steps_of(run) == [1, 2, 3]


def test_what_was_said_is_removed(make_run, capsys):
    first, second = make_run("a", (1, 2, 3)), make_run("b", (5, 6))
    assert main(["prune", "--yes", "--keep", "2"]) == EXIT_DONE
    assert (steps_of(first), steps_of(second)) == ([2, 3], [5, 6])
    assert "b: nothing is old" in capsys.readouterr().out


def test_the_best_those_of_a_rhythm_and_what_others_read_stay(make_run):
    run = make_run("a", (1, 2, 3, 4, 5, 6), "checkpoint.keep_every=4", best_step=2)
    make_run("b", (), "run.start_from=runs/a@3")
    preferring = make_run("c", ()).recipe
    save_recipe(replace(load_recipe(preferring), loss=LossSettings("dpo", reference="runs/a@1")), preferring)
    assert main(["prune", "a", "--yes"]) == EXIT_DONE
    assert steps_of(run) == [1, 2, 3, 4, 6]


def test_a_run_that_runs_is_left_alone(make_run, capsys):
    run = make_run("a", (1, 2))
    with run.lock():
        assert main(["prune", "--yes"]) == EXIT_DONE
    assert steps_of(run) == [1, 2]
    assert "left alone" in capsys.readouterr().out


def test_a_run_that_is_launched_meanwhile_is_left_alone(make_run, capsys, monkeypatch):
    first, second = make_run("a", (1, 2)), make_run("b", (1, 2))
    own = RunDirectory.lock

    def lock(self):
        if self.id == "a":
            raise RunError("the run is held")
        return own(self)

    monkeypatch.setattr(RunDirectory, "lock", lock)
    assert main(["prune", "--yes"]) == EXIT_DONE
    assert (steps_of(first), steps_of(second)) == ([1, 2], [2])
    assert "a: left alone: the run is held" in capsys.readouterr().out


def test_damage_stays_and_is_not_counted(make_run):
    run = make_run("a", (1, 2, 3))
    (run.path / "checkpoints" / "step-00000003" / "index.bin").unlink()
    assert main(["prune", "--yes"]) == EXIT_DONE
    assert steps_of(run) == [2, 3]


def test_a_run_without_a_whole_checkpoint_is_left_alone(make_run, capsys):
    run = make_run("a", (1,))
    (run.path / "checkpoints" / "step-00000001" / "index.bin").unlink()
    assert main(["prune", "--yes"]) == EXIT_DONE
    assert steps_of(run) == [1]
    assert "left alone" in capsys.readouterr().out


@pytest.mark.parametrize("broken", [b"surprise: 1\n", b"train: [\n", b"\xff\xfe"], ids=["key", "torn", "bytes"])
def test_beside_a_recipe_that_cannot_be_read_nothing_is_removed_and_others_go_on(make_run, tmp_path, broken, capsys):
    first, unreadable = make_run("a", (1, 2)), make_run("b", (1, 2))
    unreadable.recipe.write_bytes(broken)
    save_recipe(load_recipe(first.recipe), RunDirectory.create(tmp_path / "elsewhere", "c", "demo").recipe)
    elsewhere = RunDirectory.open(tmp_path / "elsewhere" / "c")
    for step in (1, 2):
        save(elsewhere.checkpoints, step)
    assert main(["prune", "a", "b", str(elsewhere.path), "--yes"]) == EXIT_DONE
    assert (steps_of(first), steps_of(unreadable), steps_of(elsewhere)) == ([1, 2], [1, 2], [2])
    said = capsys.readouterr().out
    assert said.count("left alone") == 2
    assert "b/recipe.yaml" in said


def test_no_runs_are_a_mistake(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["prune"]) == EXIT_USER
    assert "there are no runs" in capsys.readouterr().err
