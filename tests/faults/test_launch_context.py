"""A run whose ranks divide sequences reports the numbers of one process, and goes on as one: 'loss displayed at half' (torchtitan
3280) would show here, as would tokens that are counted twice."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from framework.cli import main
from framework.errors import EXIT_DONE
from framework.parallel.attention.hook import IMPLEMENTATION
from tests.tiny_run import RECIPE, write_corpus

SAME = ("step", "samples", "tokens", "skipped_steps")
ROUNDED = ("loss", "gradient_norm", "validation_loss")


def records(run_id: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs", run_id, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.grid
def test_reports_a_resumed_run_and_its_export_are_those_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_corpus(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    common = (
        "batch.sequences_per_step=4",
        "batch.sequences_per_microbatch=2",
        "batch.context=15",
        "data.pack=documents",
        "data.validation=0.1",
        "train.validate_every_steps=2",
        "train.steps=4",
    )
    for run_id, cp in (("one", 1), ("two", 2)):
        layout = (f"launch.ranks={cp}", f"parallel.cp={cp}")
        assert main(["train", *RECIPE, *common, *layout, f"run.id={run_id}"]) == EXIT_DONE
        assert main(["train", f"run.id={run_id}", "train.steps=6", "launch.ranks=1", "parallel.cp=1"]) == EXIT_DONE
    one, two = records("one"), records("two")
    assert [each["step"] for each in two] == [1, 2, 3, 4, 5, 6]
    assert [[each[name] for name in SAME] for each in two] == [[each[name] for name in SAME] for each in one]
    for name in ROUNDED:
        found, expected = ([each[name] for each in run if each[name] is not None] for run in (two, one))
        assert found == pytest.approx(expected, rel=1e-4)
    assert all(len(each["tokens_per_s_per_rank"]) == 2 for each in two[:4])
    # Written by two ranks: what divides sequences stays behind, and stock attention generates.
    assert main(["export", "two", "--step", "4", "--to", "model"]) == EXIT_DONE
    assert IMPLEMENTATION not in Path("model", "config.json").read_text()
    exported = AutoModelForCausalLM.from_pretrained("model")
    assert exported.generate(torch.tensor([[5, 7]]), min_new_tokens=4, max_new_tokens=4).shape == (1, 6)
