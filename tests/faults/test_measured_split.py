"""A run times its units, and goes on with stages split by them: the same run."""

import json
from pathlib import Path

import pytest

from framework.cli import main
from framework.errors import EXIT_DONE
from framework.recipe.compose import load_recipe
from tests.tiny_run import RECIPE, write_corpus

COMMON = (
    *RECIPE,
    "optim.schedule.name=constant",
    "model.config.num_hidden_layers=5",
    "batch.sequences_per_step=8",
    "batch.sequences_per_microbatch=2",
)
PIPELINE = ("parallel.pp=2", "launch.ranks=2")


def losses_of(run_id: str) -> list[float]:
    return [json.loads(line)["loss"] for line in Path("runs", run_id, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.grid
def test_a_run_goes_on_with_the_stages_that_its_own_times_say(tmp_path, monkeypatch, capsys) -> None:
    write_corpus(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    assert main(["train", *COMMON, *PIPELINE, "train.steps=4", "track.timeline_step=3", "run.id=split"]) == EXIT_DONE
    units = json.loads(Path("runs/split/units.json").read_text())["units"]
    assert list(units) == ["embedding", *(f"layers.{number}" for number in range(5)), "head"]
    assert all(seconds >= 0 for pair in units.values() for seconds in pair)
    assert all(min(pair) > 0 for name, pair in units.items() if name.startswith("layers."))
    # As if the machine were slow in the first layer: its own times may differ little from FLOPs.
    file = Path("runs/slow.json")
    found = json.loads(Path("runs/split/units.json").read_text())
    file.write_text(json.dumps(found | {"units": units | {"layers.0": [9.0, 18.0]}}))
    words = ["run.id=split", "train.steps=8", f"pipeline.layers={file}"]
    assert main(["train", *words]) == EXIT_DONE
    assert "layers [1, 4] take" in capsys.readouterr().out
    assert load_recipe(Path("runs/split/recipe.yaml")).pipeline.layers == [1, 4]
    assert main(["train", *COMMON, "train.steps=8", "track.timeline_step=3", "run.id=alone"]) == EXIT_DONE
    assert losses_of("split")[4:] == pytest.approx(losses_of("alone")[4:], rel=1e-5)
    assert list(json.loads(Path("runs/alone/units.json").read_text())["units"]) == list(units)
