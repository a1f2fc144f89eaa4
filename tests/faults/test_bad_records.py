"""A bad record in the corpus is put aside, and the run is the one that never had it; kill -9 of a launcher costs steps only."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from framework.cli import main
from framework.errors import EXIT_DONE, EXIT_USER
from framework.launch.directory import RunDirectory
from framework.track.sample_ledger import find_ledger_problems, read_lineage
from tests import tiny_run
from tests.faults.test_inject import in_child
from tests.grid import IN_TURN

pytestmark = IN_TURN

STEPS, BATCH = 12, 4
RECIPE = (
    *tiny_run.RECIPE,
    f"train.steps={STEPS}",
    f"batch.sequences_per_step={BATCH}",
    "batch.sequences_per_microbatch=2",
    "track.sample_ledger=true",
)
BAD_LINES = ('{"text": "cut in the mid', '{"text": 7}', '{"words": "no text"}')


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def write_records(path, bad=()):
    words = tiny_run.WORDS
    texts = [" ".join(words[(number * n * n + n) % len(words)] for n in range(1, 200)) for number in range(20)]
    lines = [json.dumps({"text": text}) for text in texts]
    for number, line in enumerate(bad):
        lines.insert(5 + 3 * number, line)
    path.write_text("\n".join(lines) + "\n")


def train(run, *overrides):
    return in_child("train", *RECIPE, f"run.id={run}", f"data.sources.files.path={run}.jsonl", *overrides)


def losses(run):
    lines = map(json.loads, Path("runs", run, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def test_bad_records_are_put_aside_and_cost_nothing_else(capfd):
    write_records(Path("good.jsonl"))
    write_records(Path("bad.jsonl"), BAD_LINES)
    assert train("good") == EXIT_DONE
    assert train("bad") == EXIT_USER
    assert "data.bad_records" in capfd.readouterr().err
    tokenizer = "model.tokenizer=runs/good/tokenizer"
    assert train("bad", "data.bad_records=3", tokenizer, "data.bpe_vocab=null") == EXIT_DONE
    assert losses("bad") == losses("good")
    lineages = [read_lineage(Path("runs", run)) for run in ("bad", "good")]
    assert find_ledger_problems(lineages[0], STEPS * BATCH, lineages[1]) == []


@pytest.mark.grid
def test_a_run_goes_on_bitwise_after_kill_9_of_its_launcher():
    words = ("train.steps=200", "launch.ranks=2", "batch.sequences_per_microbatch=1")
    write_records(Path("killed.jsonl"))
    write_records(Path("whole.jsonl"))
    assert train("whole", *words) == EXIT_DONE
    command = ["train", *RECIPE, *words, "run.id=killed", "data.sources.files.path=killed.jsonl"]
    launcher = subprocess.Popen([sys.executable, "-m", "framework", *command], start_new_session=True)
    run = RunDirectory(Path("runs/killed"))
    deadline = time.monotonic() + 120
    while not (run.path / "metrics.jsonl").exists() or len(losses("killed")) < 30:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    while (code := main(["train", "run.id=killed"])) != EXIT_DONE:  # its ranks save, and hold the run until then
        assert code == EXIT_USER
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert losses("killed") == losses("whole")
    lineages = [read_lineage(Path("runs", each)) for each in ("killed", "whole")]
    assert find_ledger_problems(lineages[0], 200 * BATCH, lineages[1]) == []
    assert len(lineages[0].cursors) == 2
