"""Every kind of process that a command starts, in a folder whose files bear the names of modules."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny_run
from tests.hostile_folder import refuse_imported, write_hostile_modules

# They share a folder and a run.
pytestmark = pytest.mark.grid(part=2)
LAYOUT = ("launch.device=cpu", "launch.ranks=2", "zero.stage=1", "batch.sequences_per_step=4")
KEPT = ("train.steps=20", "track=offline", "checkpoint.every_steps=10", "checkpoint.export_every_steps=10")
TRAIN = (*tiny_run.RECIPE, *LAYOUT, "batch.sequences_per_microbatch=2", *KEPT)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("hostile")
    tiny_run.write_corpus(place / "corpus")
    write_hostile_modules(place)
    return place


@pytest.mark.parametrize(
    "words",
    [
        ("train", *TRAIN, "run.id=here"),
        ("train", "run.id=here", "train.steps=30"),
        (
            "train",
            "-m",
            *TRAIN,
            "track=none",
            "checkpoint.export_every_steps=null",
            "launch.ranks=1",
            "optim.lr=0.1,0.2",
        ),
        ("verify", *TRAIN),
        ("search", *TRAIN, "--try", "2"),
        ("doctor", "--measure", "here.yaml", "launch.device=cpu"),
        ("export", "runs/here", "--to", "model"),
        ("generate", "model", "--prompt", "mesh"),
    ],
    ids=lambda words: f"{words[0]} {words[1]}"[:20],
)
def test_nothing_of_the_folder_is_imported(place, words):
    command = [Path(sys.executable).with_name("meshwright"), *words]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    refuse_imported(place)
    assert "of the working folder" not in done.stdout + done.stderr
    if words[0] == "train" and words[1] == TRAIN[0]:
        assert list(place.glob("runs/here/wandb/offline-run-*"))
        assert list(place.glob("runs/here/exports/*/model.safetensors"))
