"""Runs whose data is tokenized beside them: killed, and resumed in another layout, they are the run that was not."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from framework.cli import main
from framework.data import beside
from framework.data.join import hold_lock
from framework.data.store import StoreMeta
from framework.errors import EXIT_DONE, EXIT_RESUME, EXIT_USER
from tests import tiny_run
from tests.faults.test_stages import curve, train

RECIPE = (
    *(word for word in tiny_run.RECIPE if "path" not in word),
    "data.sources.files.path=corpus.jsonl",
    "data.mode=stream",
    "data.bpe_text_bytes=100000",
    "train.steps=9",
    "checkpoint.every_steps=2",
    "batch.sequences_per_step=4",
    "batch.sequences_per_microbatch=1",
    *("precision.compute=fp64", "precision.master=fp64", "precision.reduce=fp64"),
)


def write_corpus(path: Path) -> None:
    draw = random.Random(4)
    with path.open("w") as file:
        file.writelines(json.dumps({"text": " ".join(draw.choices(tiny_run.WORDS, k=40))}) + "\n" for _ in range(9000))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which a test runs, with a corpus whose first shard is the head."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(beside, "HEAD_BYTES", 1)
    write_corpus(tmp_path / "corpus.jsonl")
    return tmp_path


def forget_rest() -> int:
    """Remove the shards behind the head of the only store; how many there were."""
    (folder,) = Path("tokens").glob("files-*")
    meta = StoreMeta.read(folder)
    assert meta is not None
    rest = [path for path in folder.glob("[0-9]*") if int(path.name[:5]) >= meta.source["head"]]
    for path in rest:
        path.unlink()
    assert meta.source["head"] < meta.source["shards"]
    return len([path for path in rest if path.suffix == ".json"])


@pytest.mark.grid
def test_killed_and_resumed_in_another_layout(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *RECIPE, "run.id=whole"]) == EXIT_DONE
    assert re.search(r"the first 1 of \d+ shards, the others come beside the run", capfd.readouterr().out)
    assert forget_rest() > 1
    # One rank, in the process that is killed: ranks of a launcher that is killed save, and may finish.
    assert train(*RECIPE, "run.id=killed", until="step 5/") is None
    assert main(["train", "run.id=killed", "launch.ranks=2", "parallel.tp=2"]) == EXIT_DONE
    for own, other in zip(curve("killed"), curve("whole"), strict=True):
        assert own == pytest.approx(other, rel=1e-9)
    # Then a record that cannot be trained on, which the tokenizer finds beside the run.
    corpus = place / "corpus.jsonl"  # whose last shard is the head
    corpus.write_text("no json\n" + corpus.read_text())
    assert main(["train", *RECIPE, "run.id=bad"]) == EXIT_USER
    assert re.search(r"data.sources.files: .*corpus.jsonl, row 1: not JSON", capfd.readouterr().err)


@pytest.mark.usefixtures("place")
def test_a_stop_is_heard_while_tokens_are_waited_for() -> None:
    words = (*RECIPE, "train.steps=2", "launch.ranks=2", "run.id=stopped")
    assert main(["prepare", *words]) == EXIT_DONE
    (store,) = Path("tokens").glob("files-*")
    with hold_lock(store, is_told=False):  # which the process beside the run waits for
        process = subprocess.Popen(
            [sys.executable, "-m", "framework", "train", *words], stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        assert any("waiting for tokens of data.sources.files" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == EXIT_RESUME, said
    assert main(["train", *words]) == EXIT_DONE
    assert [step for step, *_ in curve("stopped")] == [1, 2]


@pytest.mark.usefixtures("place")
def test_a_stop_before_the_first_step_of_a_stage_leaves_the_checkpoint_before_it() -> None:
    stages = ("train.stages.short.until_step=2", "train.stages.long.batch.context=32", "train.steps=3")
    words, run = (*RECIPE, *stages, "run.id=staged"), Path("runs/staged")
    assert main(["train", *words]) == EXIT_DONE
    shutil.rmtree(run / "checkpoints" / "step-00000003")
    assert forget_rest() > 1
    (store,) = Path("tokens").glob("files-*")
    has_ended = threading.Event()

    def ask() -> None:
        while not has_ended.wait(0.2):  # a launch forgets what was asked before it
            (run / "request-stop").touch()

    with hold_lock(store, is_told=False), ThreadPoolExecutor(1) as asking:
        asking.submit(ask)
        try:
            assert main(["train", *words]) == EXIT_RESUME
        finally:
            has_ended.set()
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == ["step-00000002"]
