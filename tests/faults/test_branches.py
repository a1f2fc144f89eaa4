"""Branches: a new run from the checkpoint of another one, with another recipe."""

import json
from pathlib import Path

import pytest

from framework.checkpoint.commit import newest_checkpoint
from framework.checkpoint.load import Reader
from framework.cli import main
from framework.errors import EXIT_DONE, EXIT_USER
from framework.launch.directory import RunDirectory
from framework.recipe.compose import load_recipe
from framework.track.jsonl import METRICS_FILE, read_records
from tests import tiny_run
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

RECIPE = (
    *tiny_run.RECIPE,
    "train.steps=9",
    "checkpoint.every_steps=3",
    "checkpoint.keep=9",
    "batch.sequences_per_step=4",
)


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `runs/origin` of nine steps."""
    place = tmp_path_factory.mktemp("branches")
    tiny_run.write_corpus(place / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert main(["train", *RECIPE, "run.id=origin"]) == EXIT_DONE
    return place


def weights(run: Path) -> dict[str, bytes]:
    """The bytes of all entries of a run's last checkpoint, by file."""
    newest = newest_checkpoint(RunDirectory(run).checkpoints)
    assert isinstance(newest, Path)
    reader = Reader(newest)
    return {
        name: (newest / name).read_bytes() for name in sorted(each.name for each in newest.iterdir()) if "rank" in name
    } | {"step": str(reader.manifest.state["step"]).encode()}


@pytest.mark.parametrize("step", few_of((3, 0), lambda step: step == 3))
def test_a_branch_with_nothing_changed_is_its_origin(origin: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    monkeypatch.chdir(origin)
    words = ["train", f"run.start_from=origin@{step}", f"run.id=same-{step}"]
    assert main(words) == EXIT_DONE
    assert weights(Path(f"runs/same-{step}")) == weights(Path("runs/origin"))
    curves = [
        [(each["step"], each["loss"]) for each in read_records(Path("runs", run, METRICS_FILE))]
        for run in (f"same-{step}", "origin")
    ]
    assert curves[0] == curves[1]
    launch = json.loads(Path(f"runs/same-{step}/run.json").read_text())["launches"][0]
    assert launch["start_from"].endswith(f"runs/origin@{step}")
    assert main([*words, "train.steps=10"]) == EXIT_DONE


def test_a_branch_changes_its_recipe_and_says_what(
    origin: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(origin)
    words = (
        "optim.lr=1e-4",
        "optim/schedule=wsd",
        "optim.schedule.decay_steps=4",
        "optim.schedule.warmup_steps=2",
        "batch.context=8",
        "zero.stage=2",
    )
    assert main(["train", "run.start_from=origin@6", "run.id=decay", *words]) == EXIT_DONE
    out = capfd.readouterr().out
    for line in (
        "branch   of",
        "from step 6",
        "changed  optim.schedule.name: cosine -> wsd",
        "changed  batch.context: 16 -> 8",
    ):
        assert line in out
    recipe = load_recipe(Path("runs/decay/recipe.yaml"))
    assert (recipe.optim.schedule.name, recipe.optim.lr, recipe.batch.sequences_per_step) == ("wsd", 1e-4, 4)
    newest = newest_checkpoint(RunDirectory(Path("runs/decay")).checkpoints)
    assert newest is not None
    state = Reader(newest).manifest.state
    # Samples of another length are other samples: the position begins anew.
    assert (state["step"], state["samples"]) == (9, 3 * 4)


def test_moments_that_the_origin_lacks_begin_at_zero(
    origin: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(origin)
    assert main(["train", "run.start_from=origin@6", "run.name=muon", "optim=muon"]) == EXIT_DONE
    err = capfd.readouterr().err
    assert "moments begin at zero" in err
    assert "model.layers.0" in err
    assert Path("runs/muon-001").is_dir()


def test_states_of_another_rule_are_not_taken_over(
    origin: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(origin)
    lion = ("optim=lion", "optim.lr=1e-4")
    assert main(["train", *RECIPE, *lion, "run.id=lion", "train.steps=3"]) == EXIT_DONE
    assert main(["train", "run.start_from=lion", "run.id=after", "optim=adamw", "train.steps=4"]) == EXIT_DONE
    assert "moments begin at zero" in capfd.readouterr().err
    newest = newest_checkpoint(RunDirectory(Path("runs/after")).checkpoints)
    assert newest is not None
    assert Reader(newest).manifest.state["num_updates"] == 1


def test_a_resume_keeps_the_origin(
    origin: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(origin)
    branch = ("run.start_from=origin@6", "run.id=resumed", "optim=sgd", "optim.lr=1e-3")
    assert main(["train", *branch]) == EXIT_DONE
    assert main(["train", *branch, "train.steps=10"]) == EXIT_DONE
    recipe = load_recipe(Path("runs/resumed/recipe.yaml"))
    assert recipe.run.start_from is not None
    assert recipe.run.start_from.endswith("origin@6")
    assert (recipe.optim.name, recipe.model.config["hidden_size"]) == ("sgd", 16)
    assert main(["train", "run.id=resumed", "run.start_from=origin@3", "train.steps=11"]) == EXIT_USER
    assert "has begun with" in capfd.readouterr().err
    assert main(["train", "run.id=origin", "run.start_from=resumed", "train.steps=11"]) == EXIT_USER
    assert "without another run" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run.start_from=origin@4"], "Saved steps: 3, 6, 9"),
        (["run.start_from=nothing"], "is not a run"),
        (["run.start_from=origin@6", "train.steps=6"], "set train.steps=12"),
        (["run.start_from=origin@6", "experiment=quickstart"], "a saved run has a recipe"),
        (["run.start_from=origin@6", "optim.lr=-1"], "optim.lr"),
        (["run.start_from=origin@6", "model.weights=elsewhere"], "leave model.weights out"),
    ],
)
def test_bad_input(
    origin: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.chdir(origin)
    before = sorted(Path("runs").iterdir())
    assert main(["train", *words]) == EXIT_USER
    assert said in capfd.readouterr().err
    assert sorted(Path("runs").iterdir()) == before


def test_weights_of_another_shape_are_refused(
    origin: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(origin)
    assert main(["train", "run.start_from=origin@6", "run.id=wide", "model.config.intermediate_size=48"]) == EXIT_USER
    assert "a branch keeps its origin's model" in capfd.readouterr().err
    assert not Path("runs/wide").exists()
