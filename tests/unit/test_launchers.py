"""Foreign launchers: commands that they start several times are refused, and their variables reach neither SLURM nor ranks."""

import os
import resource
import subprocess
from pathlib import Path

import pytest

from framework.cli import main
from framework.commands import stop
from framework.commands.arguments import refuse_launcher
from framework.commands.stop import stop_command
from framework.errors import EXIT_FAILED, EXIT_USER, CheckpointError, RecipeError
from framework.launch import exports, jobs, process
from framework.launch.directory import RunDirectory
from framework.launch.jobs import JobState
from framework.start import without_launchers

SEVERAL = {
    "torchrun": {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    "its second": {"RANK": "1", "LOCAL_RANK": "1"},
    "srun": {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
    "its second task": {"SLURM_NTASKS": "2", "SLURM_PROCID": "1"},
    "an older srun": {"SLURM_STEPID": "3", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
    "MPICH": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "PMIx": {"PMIX_RANK": "1"},
    "srun from srun --pty": {
        "SLURM_STEP_ID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": "0",
        "SLURM_PTY_PORT": "1",
    },
}
ALONE = {
    "no launcher": {},
    "one rank": {"RANK": "0", "WORLD_SIZE": "1", "OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": "1"},
    "salloc on the login node": {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_TASKS_PER_NODE": "4"},
    "salloc's shell on a node": {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "a batch script": {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
    "srun --ntasks=1": {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
}  # fmt: skip
OPTIONS = (
    *(
        "SBATCH_PARTITION",
        "SBATCH_SIGNAL",
        "SLURM_CPU_BIND",
        "SLURM_TIME_FORMAT",
        "SQUEUE_FORMAT",
        "SCANCEL_INTERACTIVE",
    ),
    *(
        "SRUN_CONTAINER",
        "RANK",
        "SLURM_NTASKS",
        "PMIX_RANK",
        "_SLURM_SPANK_OPTION_pyxis_container_image",
        "PYTHONSAFEPATH",
    ),
)
NEEDED = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "PATH", "OMPI_MCA_btl")


@pytest.mark.parametrize("variables", SEVERAL.values(), ids=SEVERAL)
def test_one_of_several_processes_is_refused(variables):
    with pytest.raises(RecipeError, match="Run it once") as error:
        refuse_launcher(variables, "train")
    assert error.value.exit_code == EXIT_USER
    assert "meshwright submit" in str(error.value)


@pytest.mark.parametrize("variables", ALONE.values(), ids=ALONE)
def test_a_process_of_its_own_is_not(variables):
    refuse_launcher(variables, "train")


def test_who_types_in_a_step_of_several_tasks_is_alone():
    pty = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "4000", "PMI_SIZE": "4"}
    refuse_launcher(pty | {"SLURM_PROCID": "0"}, "train", is_terminal=True)
    with pytest.raises(RecipeError):
        refuse_launcher(pty | {"SLURM_PROCID": "1"}, "train", is_terminal=True)


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    "words",
    [
        ("train", "experiment=quickstart"),
        ("train", "-m", "experiment=quickstart", "train.seed=1,2"),
        ("prepare", "experiment=quickstart"),
        ("submit", "experiment=quickstart", "launch=slurm"),
        ("verify", "experiment=quickstart"),
        ("export", "run", "--to", "model"),
        ("search", "experiment=quickstart", "--try", "1"),
        ("doctor", "--measure", "here.yaml"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_no_command_begins_anything(words, rank, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": rank, "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert main([*words]) == EXIT_USER
    assert f"WORLD_SIZE=2, RANK={rank}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["check", "experiment=quickstart"]) == 0  # which only reads


def test_a_rank_may_export(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    refuse_launcher(exports._variables(), "export")
    assert "MASTER_PORT" not in exports._variables()


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The environment that each command of SLURM's was started with, of those that are in its place."""
    for name in (*OPTIONS, *NEEDED[:-2], NEEDED[-1]):
        monkeypatch.setenv(name, f"the shell's {name}")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "scontrol", "squeue", "scancel", "sinfo", "sacct", "srun"):
        (programs / name).write_text(
            f'#!/bin/bash\nenv > "{tmp_path}/{name}"\ncase "$*" in *"show job"*) exit 1 ;; esac\necho 7\n'
        )
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return lambda name: dict(line.split("=", 1) for line in (tmp_path / name).read_text().splitlines() if "=" in line)


def test_slurm_gets_no_option_from_the_shell_and_finds_its_cluster(told, tmp_path, capsys, monkeypatch):
    (tmp_path / "job.sh").touch()
    assert jobs.submit_script(tmp_path / "job.sh") == "7"
    jobs.find_job("7")
    jobs.partitions()
    for command in ("sbatch", "scontrol", "sacct", "sinfo"):
        had = told(command)
        assert [name for name in OPTIONS if name in had] == [], command
        assert [had[name] for name in NEEDED if name != "PATH"] == [
            f"the shell's {name}" for name in NEEDED if name != "PATH"
        ]
    said = capsys.readouterr().err
    assert "SBATCH_PARTITION, SBATCH_SIGNAL" in said
    assert "launch.partition" in said
    assert "the shell's" not in said


def test_scancel_of_stop_gets_none_either(told, tmp_path, monkeypatch):
    run = RunDirectory.create(tmp_path / "runs", "x", "run")
    monkeypatch.setattr(stop, "find_jobs", lambda _: [("7", JobState("7", "PENDING"))])
    monkeypatch.setattr(stop, "load_recipe", lambda _: None)
    (run.path / "recipe.yaml").touch()
    assert stop_command(run.path) == 0
    assert [name for name in OPTIONS if name in told("scancel")] == []


def test_the_script_drops_what_an_sbatch_by_hand_has_passed_on():
    script = (Path(__file__).parents[2] / "slurm" / "job.sh").read_text()
    line = script[script.index('unset "${!SBATCH_@}"') : script.index("run={{")]
    names = ("SBATCH_PARTITION", "SQUEUE_FORMAT", "SLURM_CPU_BIND_LIST", "SCANCEL_NAME", "RANK", "SLURM_TIME_FORMAT")
    variables = {**dict.fromkeys(names, "x"), "SLURM_JOB_ID": "7"}
    words = ["bash", "-euc", f"{line}\nenv"]
    had = subprocess.run(words, env=variables, capture_output=True, text=True, check=True).stdout
    assert [name for name in names if f"{name}=" in had] == []
    assert "SLURM_JOB_ID=7" in had


def test_libraries_settings_stay():
    kept = {"OMPI_MCA_btl": "tcp", "GLOO_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "INFO", "HOME": "/"}
    assert without_launchers(kept) == kept


@pytest.fixture
def outcome(tmp_path, monkeypatch):
    """The file in which the first rank of a job says why it ends."""
    monkeypatch.setenv(process.OUTCOME, str(tmp_path / "slurm" / "outcome"))
    monkeypatch.setenv("SLURM_PROCID", "3")
    (tmp_path / "slurm").mkdir()
    return tmp_path / "slurm" / "outcome"


def test_a_full_disk_takes_from_no_rank_its_exit_code_and_its_words(outcome, capsys):
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, former[1]))
        code = process.report_error(CheckpointError("no room"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)
    assert (code, outcome.read_text()) == (EXIT_USER, "")
    assert capsys.readouterr().err == "[rank 3] no room\n"


def test_an_error_without_a_text_ends_a_rank_as_any_other(outcome, capsys):
    outcome.write_text("1\n")
    assert process.report_error(AssertionError()) == EXIT_FAILED
    assert capsys.readouterr().err == "[rank 3] ends as well: AssertionError: \n"
