"""What can be known before a job is queued is said then: exit code 86, one screen, the key and the fix."""

import subprocess
import sys
from pathlib import Path

import pytest

from framework.cli import main
from framework.errors import EXIT_USER
from tests.slurm.cluster import RECIPE, SLURM
from tests.tiny_run import write_corpus

SITE = "# A site that counts every job.\nkind: slurm\nranks: null\nranks_per_node: 1\ngres: null\naccount: ???\n"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a corpus, a site's file and an experiment with a bare time; no sbatch on the path."""
    write_corpus(tmp_path / "corpus")
    (tmp_path / "mine" / "launch").mkdir(parents=True)
    (tmp_path / "mine" / "launch" / "site.yaml").write_text(SITE)
    (tmp_path / "mine" / "experiment").mkdir()
    bare = "# @package _global_\nlaunch: {time: 12:30:00}\n"
    (tmp_path / "mine" / "experiment" / "bare_time.yaml").write_text(bare)
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_sbatch(place, monkeypatch):
    """An sbatch that is never to be called."""
    (place / "bin").mkdir()
    (place / "bin" / "sbatch").write_text("#!/bin/sh\nexit 3\n")
    (place / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place / 'bin'}:/usr/bin:/bin")


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["launch.nodes=1", "experiment=bare_time"], "launch.time = 45000", "quotes"),
        (["launch.nodes=2", "launch.ranks=4"], "launch.nodes = 2", "launch.ranks_per_node=2"),
        (["launch=site", "launch.nodes=1"], "launch.account", "launch.account=..."),
        (["launch.nodes=1", "run.root=file/runs"], "is no folder", "Set run.root to a folder of yours"),
        (
            ["launch.nodes=1", "launch.container.kind=apptainer", "launch.container.image=./none.sif"],
            "launch.container.image = ./none.sif",
            "build it",
        ),
        (
            ["launch.nodes=1", "launch.ranks_per_node=3", "parallel.tp=3"],
            "parallel.tp=3 does not divide the 2 heads",
            "use parallel.tp in [1, 2]",
        ),
        (["launch=local"], "launch.kind=local", "launch=slurm"),
    ],
)
def test_a_mistake_is_explained_on_one_screen(place, monkeypatch, capsys, overrides, key, fix):
    with_sbatch(place, monkeypatch)
    assert main(["submit", "--recipes", "mine", *RECIPE, *SLURM[:-2], *overrides]) == EXIT_USER
    said = capsys.readouterr().err
    assert key in said
    assert fix in said
    assert len(said.splitlines()) <= 24
    assert not (place / "runs").exists() or not any((place / "runs").iterdir())


def test_without_sbatch_one_is_told_how_to_try(place, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(place))
    assert main(["submit", *RECIPE, *SLURM, "launch.nodes=1"]) == EXIT_USER
    said = capsys.readouterr().err
    assert "no sbatch on the path" in said
    assert "scripts/local_cluster.sh" in said
    assert main(["submit", "--dry-run", *RECIPE, *SLURM, "launch.nodes=1"]) == 0
    assert "srun --nodes=1" in capsys.readouterr().out


def test_doctor_says_ok_or_how_to_fix_it(place, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(place))
    assert main(["doctor", *RECIPE]) == 0
    assert all(line.startswith("ok  ") for line in capsys.readouterr().out.splitlines())
    assert main(["doctor", *RECIPE, *SLURM, "launch.nodes=1", "run.root=/proc/runs"]) == EXIT_USER
    lines = capsys.readouterr().out.splitlines()
    wrong = [line.split()[1] for line in lines if line.startswith("fix ")]
    assert wrong == ["slurm", "run"]
    assert sum("->" in line for line in lines) == 2


def test_a_controller_that_does_not_answer_is_a_mistake_only_where_the_recipe_asks_it(place, monkeypatch, capsys):
    with_sbatch(place, monkeypatch)
    (place / "bin" / "scontrol").write_text("#!/bin/sh\necho 'Slurmctld(primary) at c is DOWN'\n")
    (place / "bin" / "scontrol").chmod(0o755)
    assert main(["doctor", *RECIPE]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("warn")] == ["slurm"]
    assert main(["doctor", *RECIPE, *SLURM, "launch.nodes=1"]) == EXIT_USER
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("fix")] == ["slurm"]


def test_doctor_says_whether_the_layout_can_be_built(place, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(place))
    assert main(["doctor", *RECIPE, "precision=fp32"]) == 0
    assert "parameters in fp32, at most" in capsys.readouterr().out
    assert main(["doctor", *RECIPE, "parallel.tp=3", "launch.ranks=3"]) == EXIT_USER
    assert "use parallel.tp in [1, 2]" in capsys.readouterr().out


@pytest.mark.parametrize("starter", ["srun", "torchrun"])
@pytest.mark.parametrize("container", ["none", "apptainer", "pyxis"])
def test_every_template_is_sound_bash(place, capsys, starter, container):
    image = "launch.container.image=docker://meshwright:gpu"
    words = (
        "launch.nodes=2",
        "launch.gres=gpu",
        f"launch.starter={starter}",
        f"launch.container.kind={container}",
        image,
    )
    more = (
        "launch.set_up=[module load cuda]",
        "launch.environment={NCCL_DEBUG: WARN, A: b}",
        "launch.cpus_per_rank=4",
    )
    assert main(["submit", "--dry-run", *RECIPE, *SLURM, *words, *more]) == 0
    script = capsys.readouterr().out
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    shellcheck = [Path(sys.executable).with_name("shellcheck"), "--exclude=SC2016", "-"]
    found = subprocess.run(shellcheck, input=script, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    assert {"none": "train.program", "apptainer": "apptainer exec --nv", "pyxis": "--container-image="}[
        container
    ] in script
