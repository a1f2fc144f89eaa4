"""`meshwright inject`: every fault comes where it was asked for and nowhere else, and a run ends as if it had not suffered it.

Ranks are forked from the test's process, which has imported torch. The ledger of samples says what each step has read.
"""

import json
import multiprocessing
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path

import matplotlib.pyplot  # noqa: F401  each rank draws its report: imported once, and not by each that is forked
import pytest
import torch

from framework.checkpoint.commit import SAVE_POINTS, newest_checkpoint
from framework.checkpoint.index import DamagedCheckpoint, read_manifest
from framework.checkpoint.load import Reader, verify_files
from framework.cli import main
from framework.commands.trained_model import _read
from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_MEMORY, EXIT_RESUME, EXIT_USER
from framework.faults import HOWS, KINDS, Fault, FaultInjector, note_fault, parse_fault, plan_faults, read_log
from framework.monitor.progress import Phase
from framework.track.sample_ledger import find_ledger_problems, read_lineage
from tests import tiny_run
from tests.grid import IN_TURN

pytestmark = IN_TURN

STEPS, BATCH = 40, 4
KILLED = -signal.SIGKILL
RECIPE = (
    *tiny_run.RECIPE,
    f"train.steps={STEPS}",
    f"batch.sequences_per_step={BATCH}",
    "batch.sequences_per_microbatch=2",
    "checkpoint.every_steps=10",
    "checkpoint.mode=sync",
    "train.validate_every_steps=15",
    "data.validation=0.3",
    "track.sample_ledger=true",
    "run.allow_faults=true",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a corpus and, in `runs/whole`, a run that nothing disturbed."""
    place = tmp_path_factory.mktemp("inject")
    tiny_run.write_corpus(place / "corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        assert begin("whole") == EXIT_DONE
    return place


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def in_child(*words):
    """The exit code of the command in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=lambda: exit_with(main(list(words))))
    process.start()
    process.join(120)
    return process.exitcode


def exit_with(code):
    raise SystemExit(code)


def begin(run, *overrides):
    return in_child("train", *RECIPE, f"run.id={run}", *overrides)


def resume(run, *overrides):
    return in_child("train", f"run.id={run}", *overrides)


def prepare_run(run, *faults, **keys):
    """A run that is about to begin with these faults."""
    folder = Path("runs", run)
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps({"id": run, "created": "", "launches": []}))
    for fault in faults:
        plan_faults(folder, [parse_fault(fault.split(), SAVE_POINTS)])
    return folder


def losses(run):
    lines = map(json.loads, Path("runs", run, "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


def weights(run):
    reader = Reader(newest_checkpoint(Path("runs", run, "checkpoints")))
    return _read(reader, "", list(reader.manifest.entries))


def suffered(run):
    return [(record["fault"].split()[0], record.get("step")) for record in read_log(Path("runs", run))]


def assert_as_undisturbed(run):
    assert losses(run) == losses("whole")
    mine, theirs = weights(run), weights("whole")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    lineages = [read_lineage(Path("runs", each)) for each in (run, "whole")]
    assert find_ledger_problems(lineages[0], STEPS * BATCH, lineages[1]) == []


@pytest.mark.grid
def test_deaths_at_any_time_leave_no_trace_in_what_is_trained():
    prepare_run(
        "deaths",
        "kill step=13",
        "kill phase=load-checkpoint",
        "kill point=written step=20",
        "term phase=validate step=15",
        "term point=manifest step=30",
        "kill point=renamed step=40",
    )
    assert begin("deaths") == KILLED
    ends = [resume("deaths") for _ in range(6)]
    assert ends == [KILLED, EXIT_RESUME, KILLED, EXIT_RESUME, KILLED, EXIT_USER]  # the last: all steps are done
    first = [("kill", None), ("kill", 13)]  # of the first start and of the second
    assert suffered("deaths") == [*first, ("term", None), ("kill", 20), ("term", 30), ("kill", 40)]
    assert_as_undisturbed("deaths")
    cursors = read_lineage(Path("runs/deaths")).cursors
    assert cursors[:2] == (0, 10 * BATCH)


@pytest.mark.grid
def test_errors_of_data_memory_and_disk_leave_no_trace_in_what_is_trained(capfd):
    prepare_run("errors", "disk-full step=7", "data-error step=14", "oom step=22", "eio step=30 seconds=0.3")
    assert begin("errors") == EXIT_FAILED
    said = capfd.readouterr().err
    assert "no room for a checkpoint" in said
    assert "samples 52 to 55 cannot be read" in said
    assert resume("errors") == EXIT_MEMORY
    assert resume("errors") == EXIT_DONE
    assert "EIO, Input/output error (injected); trying again" in capfd.readouterr().err
    assert suffered("errors") == [("disk-full", 10), ("data-error", 14), ("oom", 22), ("eio", 30)]
    assert_as_undisturbed("errors")
    assert read_lineage(Path("runs/errors")).cursors == (0, 0, 20 * BATCH)


def test_nan_and_flipped_bits_come_at_their_step_and_slow_steps_last():
    prepare_run("harmed", "nan step=5 times=2", "flip step=11", "slow step=20 times=2 seconds=0.4")
    assert begin("harmed") == EXIT_DONE
    mine, theirs = losses("harmed"), losses("whole")
    assert [step for step in theirs if mine[step] == theirs[step]] == [1, 2, 3, 4, 5]
    records = list(map(json.loads, Path("runs/harmed/metrics.jsonl").read_text().splitlines()))
    assert [record["skipped_steps"] for record in records[3:8]] == [0, 1, 2, 2, 2]
    assert suffered("harmed") == [("nan", 5), ("nan", 6), ("flip", 11), ("slow", 20), ("slow", 21)]
    slow = {record["step"] for record in records if record["step_s"] > 0.4}
    assert {20, 21} <= slow | {step - 1 for step in slow}
    assert len(slow) <= 3


@pytest.mark.grid
def test_a_run_that_does_not_allow_faults_suffers_none(capsys):
    folder = prepare_run("closed", "kill step=2", "nan step=3")
    assert begin("closed", "run.allow_faults=false", "train.steps=5") == EXIT_DONE
    assert read_log(folder) == []
    assert main(["inject", "runs/closed", "nan", "step=4"]) == EXIT_USER
    assert "run.allow_faults=true" in capsys.readouterr().err
    assert resume("closed", "run.allow_faults=true", "train.steps=6") == KILLED
    assert suffered("closed") == [("kill", 6)]


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_checkpoint_is_no_checkpoint(how, tmp_path, capsys):
    """What a run makes of each damage: tests/unit/test_checkpoint_newest.py, test_launch_train.py."""
    run = tmp_path / "damaged"
    shutil.copytree("runs/whole", run)
    newest = newest_checkpoint(run / "checkpoints")
    assert main(["inject", str(run), "corrupt-checkpoint", f"how={how}"]) == EXIT_DONE
    # Only who reads the bytes notices a bit; all else shows when a run looks for a checkpoint.
    assert (newest_checkpoint(run / "checkpoints") == newest) == (how == "flip")
    assert f"{how} of step-00000040" in capsys.readouterr().out
    with suppress(DamagedCheckpoint):  # of the manifest itself
        assert verify_files(newest, read_manifest(newest))


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("kil step=3", "did you mean kill?)"),
        ("kill stp=3", "kill takes rank=, step=, times=, phase=, point="),
        ("kill step", "not 'step' (did you mean step=?)"),
        ("kill step=0", "step=0: not a number from 1 on"),
        ("kill step=nine", "not a number"),
        ("kill step=41", "the run has train.steps=40"),
        ("kill rank=1", "the run has 1 ranks"),
        ("kill phase=savee", "did you mean save?)"),
        ("kill phase=save point=manifest", "phase and point: a fault acts at one of them"),
        ("term phase=connect-ranks step=3", "of the start-up, where no step is known"),
        ("nan phase=save", "nan takes rank=, step=, times="),
        ("corrupt-checkpoint how=badly", "one of truncate, flip, zero, remove, manifest"),
        ("corrupt-checkpoint step=40000", "the run has train.steps=40"),
        ("slow seconds=inf", "not a number"),
        ("", "say which fault"),
    ],
)
def test_bad_input_is_refused_with_what_can_be_written(words, answer, capsys):
    assert main(["inject", "runs/whole", *words.split()]) == EXIT_USER
    assert answer in capsys.readouterr().err
    assert not Path("runs/whole/faults.jsonl").exists()


def test_list_explains_all_faults_and_those_of_a_run(capsys):
    assert main(["inject", "--list"]) == EXIT_DONE
    said = capsys.readouterr().out
    assert all(kind.meaning in said for kind in KINDS.values())
    folder = prepare_run("listed", "kill rank=0 step=3")
    (folder / "recipe.yaml").write_text(Path("runs/whole/recipe.yaml").read_text())
    assert main(["inject", "runs/listed", "--list"]) == EXIT_DONE
    assert "planned  kill rank=0 step=3" in capsys.readouterr().out
    with (folder / "faults.jsonl").open("a") as file:
        file.write('{"kind": "kill", "rank')  # a full disk
    (folder / "faults.log").write_text('{"unix_s": 1, "fault": "kill"}\n{"unix_s": "x", "fault": 3}\n')
    plan_faults(folder, [Fault("nan", "a", step=4)])
    note_fault(folder, Fault("nan", "a", step=4), 0, step=4)
    assert main(["inject", "runs/listed", "--list"]) == EXIT_DONE
    said = capsys.readouterr().out
    assert "planned  nan rank=0 step=4" in said, "a fault behind a torn line counts"
    assert said.count("injected") == 1, "lines without fields are left out"


class Signals:
    """What a door would have done to its own process."""

    def __init__(self, monkeypatch):
        self.sent = []
        monkeypatch.setattr(os, "kill", lambda pid, number: self.sent.append(number))


def test_a_fault_comes_as_often_as_it_was_asked_for_and_not_again_after_a_restart(tmp_path, monkeypatch):
    signals = Signals(monkeypatch)
    plan_faults(tmp_path, [Fault("kill", "a", rank=1, phase="validate", step=0, times=2)])
    for expected in (1, 2, 2):  # each door is that of another start
        FaultInjector(tmp_path, 1).begin_phase(Phase.VALIDATE)
        FaultInjector(tmp_path, 0).begin_phase(Phase.VALIDATE)
        FaultInjector(tmp_path, 1).begin_phase(Phase.SAVE)
        assert len(signals.sent) == expected
    assert [record["rank"] for record in read_log(tmp_path)] == [1, 1]


def test_sabotaged_a_fault_that_is_not_noted_before_it_acts_comes_again(tmp_path, monkeypatch):
    monkeypatch.setattr(FaultInjector, "_note", lambda *args, **more: None)
    with pytest.raises(AssertionError):
        test_a_fault_comes_as_often_as_it_was_asked_for_and_not_again_after_a_restart(tmp_path, monkeypatch)


def test_a_line_that_is_half_written_or_of_another_version_is_no_fault(tmp_path, monkeypatch):
    signals = Signals(monkeypatch)
    (tmp_path / "faults.log").write_text('{"unix_s": 1, "fault": "kill"}\n')
    (tmp_path / "faults.jsonl").write_text(
        '{"kind": "kill", "node": 0}\n{"rank": 0}\n{"kind": "melt"}\n{"kind": "kill", "id": "a", "phase": "save'
    )
    door = FaultInjector(tmp_path, 0)
    door.begin_phase(Phase.SAVE)
    assert not signals.sent
    with (tmp_path / "faults.jsonl").open("a") as file:
        file.write('"}\n')
    door.begin_phase(Phase.SAVE)
    assert signals.sent == [signal.SIGKILL]
