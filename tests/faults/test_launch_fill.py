"""A run that validates in bubbles reports the numbers of one that validates by itself, step by step."""

import json
from pathlib import Path
from typing import Any

import pytest

from framework.cli import main
from framework.errors import EXIT_DONE
from tests.faults.test_launch_train import RECIPE
from tests.tiny_run import WORDS

SAME = ("step", "samples", "tokens", "loss", "gradient_norm", "validation_loss", "skipped_steps")


def records(place: Path, run_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (place / "runs" / run_id / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.grid
def test_reports_are_those_of_validation_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 2, 4 and 5 are validated; step 4 is saved before its validation has run, step 5 is the last."""
    (tmp_path / "corpus").mkdir()
    for number in range(40):
        words = (WORDS[(number * index * index + index) % len(WORDS)] for index in range(1, 200))
        (tmp_path / "corpus" / f"{number}.txt").write_text(" ".join(words))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    layers = "model.config.num_hidden_layers=8"  # with fewer the head makes one stage too slow for any room
    common = (
        layers,
        "data.validation=0.2",
        "train.validate_every_steps=2",
        "train.steps=5",
        "checkpoint.every_steps=4",
    )
    for run_id, fills in (("alone", "none"), ("filled", "validation")):
        layout = ("parallel.pp=2", "launch.ranks=2", "pipeline.schedule=gpipe", f"pipeline.fill_bubbles={fills}")
        assert main(["train", *RECIPE, *common, *layout, f"run.id={run_id}"]) == EXIT_DONE
    alone, filled = records(tmp_path, "alone"), records(tmp_path, "filled")
    assert [[each[name] for name in SAME] for each in filled] == [[each[name] for name in SAME] for each in alone]
    assert [each["step"] for each in filled if each["validation_loss"] is not None] == [2, 4, 5]
    free = {each["step"]: each["validation_free_fraction"] for each in filled}
    assert free == {1: None, 2: free[2], 3: None, 4: free[2], 5: 0.0}
    assert 0.0 < free[2] < 1.0
    assert all(each["validation_free_fraction"] is None for each in alone)
