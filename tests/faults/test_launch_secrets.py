"""Whole runs with a secret in launch.environment: the ranks have it from their first moment, and no file has it."""

import os
from pathlib import Path

import pytest
import yaml

from framework.cli import main
from framework.errors import EXIT_DONE
from framework.track.report import load_run_info
from tests import tiny_run

SECRET = "hf_sEcReTsEcReT"
RECIPE = (
    *tiny_run.RECIPE[1:], "track=offline", "train.steps=2", "batch.sequences_per_step=4", "batch.sequences_per_microbatch=2",
    "launch.environment.HF_TOKEN=${oc.env:HF_TOKEN}", "launch.environment.https_proxy='http://me:${oc.env:HF_TOKEN}@p:1'",
)  # fmt: skip
# Python reads this when it starts, before anything of ours.
NOTE = (
    "import os\nif 'TORCHELASTIC_RUN_ID' in os.environ:\n    open('rank-had', 'w').write(os.environ['https_proxy'])\n"
)


# One day has them all: they share a run.
pytestmark = pytest.mark.grid(part=4)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a run, of one rank of this machine, `runs/here`."""
    place = tmp_path_factory.mktemp("secrets")
    tiny_run.write_corpus(place / "corpus")
    (place / "path").mkdir()
    (place / "path" / "sitecustomize.py").write_text(NOTE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setenv("HF_TOKEN", SECRET)
        assert main(["train", *RECIPE, "run.id=here", f"launch.environment.PYTHONPATH={place / 'path'}"]) == EXIT_DONE
        assert "https_proxy" not in os.environ
    return place


def files_with(text: str, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


def test_the_rank_has_the_variables_and_no_file_has_the_secret(place):
    run = place / "runs" / "here"
    assert (place / "rank-had").read_text() == f"http://me:{SECRET}@p:1"
    assert files_with(SECRET, run) == []
    assert {path.name for path in files_with("oc.env:HF_TOKEN", run)} == {"recipe.yaml", "run.json"}
    assert load_run_info(run).config["launch"]["environment"] == ["HF_TOKEN", "PYTHONPATH", "https_proxy"]
    (mirror,) = run.glob("wandb/offline-run-*-here/*.wandb")
    assert b"https_proxy" in mirror.read_bytes()
    assert files_with(str(place / "path"), run / "wandb") == []


@pytest.mark.parametrize("name", ["recipe.yaml", "run.json"])
def test_what_has_values_is_for_the_user_alone(place, name):
    assert (place / "runs" / "here" / name).stat().st_mode & 0o777 == 0o600


def test_a_submitted_run_keeps_references_in_a_script_for_the_user_alone(place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_TOKEN", SECRET)
    (place / "bin").mkdir()
    (place / "bin" / "sbatch").write_text("#!/bin/sh\necho 7\n")
    (place / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:/usr/bin:/bin")
    words = ["launch=slurm", "launch.ranks=1", "launch.gres=null", 'run.root="it\'s here"', "run.id=queued"]
    assert main(["submit", *RECIPE, *words]) == EXIT_DONE
    said, run = capfd.readouterr().out, place / "it's here" / "queued"
    assert files_with(SECRET, run) == []
    assert SECRET not in said
    assert '  HF_TOKEN="${HF_TOKEN}" \\\n' in (run / "slurm" / "job.sh").read_text()
    assert [(run / name).stat().st_mode & 0o777 for name in ("slurm/job.sh", "recipe.yaml", "run.json")] == [0o600] * 3
    assert (
        yaml.safe_load((run / "recipe.yaml").read_text())["launch"]["environment"]["HF_TOKEN"] == "${oc.env:HF_TOKEN}"
    )
    assert """resume   meshwright submit run.id=queued 'run.root="it'"'"'s here"'""" in said
    assert """status   meshwright status 'it'"'"'s here/queued'""" in said
