"""Status: how old the last step of a run is, and what stops it."""

import json
import re
import time

import pytest

from framework.commands.status import describe_run, telling_line
from framework.commands.train import _note_error
from framework.errors import EXIT_DONE, EXIT_RESUME
from framework.launch.directory import RunDirectory
from framework.monitor.goodput import note_gone
from framework.monitor.hang import RANKS_FILE, RankStatus, write_ranks
from framework.recipe.compose import compose, save_recipe
from framework.track.goodput import GOODPUT_FILE, Event, Note, append_note


@pytest.fixture
def run(tmp_path):
    run = RunDirectory.create(tmp_path, "mine", "run")
    save_recipe(compose(["train.steps=100"]).require(), run.recipe)
    return run


def report(run, age_s, steps=20, step_s=0.5):
    """So many steps, of which the last one was reported so many seconds ago."""
    records = [
        {"step": step, "loss": 5.0, "step_s": step_s, "unix_s": time.time() - age_s} for step in range(1, steps + 1)
    ]
    (run.path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_a_running_run_says_how_old_its_last_step_is_and_what_stops_it(run):
    report(run, age_s=3)
    with run.lock():
        described = describe_run(run)
        holder = run.find_holder()
    assert holder is not None
    assert "step     20 of 100 (20%), loss 5.0000, 00:03 ago, 00:40 of training left" in described
    assert f"running: {holder}" in described
    assert f"next     meshwright stop {run.path}    # saves and stops" in described


def test_a_run_that_reports_nothing_for_long_may_hang(run):
    report(run, age_s=1830)
    with run.lock():
        assert re.search(r"30:\d\d ago: it saves, validates, or hangs", describe_run(run))


def test_the_age_of_a_step_is_no_matter_of_a_run_that_has_ended(run):
    report(run, age_s=1830)
    with run.lock():
        pass
    described = describe_run(run)
    assert " ago" not in described
    assert "not running" in described


@pytest.mark.parametrize(
    ("code", "error", "shown"),
    [
        (None, "", "not running: it was killed, hung, or this machine went down"),
        (EXIT_DONE, "", "not running: done\n"),
        (EXIT_RESUME, "", "not running: stopped and saved\n"),
        (88, "NumericsError: loss was not finite\nand more\n", "exit code 88: NumericsError: loss was not finite\n"),
        (1, "[rank 1] Traceback (most recent call last):\n  File\nKeyError: 'a'\n", "exit code 1: KeyError: 'a'\n"),
    ],
)
def test_a_run_of_this_machine_says_why_it_has_ended(run, code, error, shown):
    with run.lock() as lease:
        append_note(run.path / GOODPUT_FILE, Note(Event.BEGIN, 1, time.time()))
        if code is not None:
            note_gone(run.path, code)
        _note_error(run, lease, "of an earlier launch")
        _note_error(run, lease, error)
    assert shown in describe_run(run)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("ended with 85 at step 9, as it was asked to: go on with  meshwright submit run.id=mine", ""),
        ("stopped: failure 11 of this job (launch.retries=10); the last exit code is 85", " | srun: error: n1: task 0"),
    ],
)
def test_the_end_of_a_run_that_was_asked_to_end_is_no_trouble(tmp_path, said, shown):
    """srun calls every exit code but 0 an error."""
    log = tmp_path / "job.log"
    log.write_text(
        "2026-11-22 20:54:00  job 1: starts 1 rank on n1, from step 0\nsrun: error: n1: task 0: Exited with exit code 85\n"
        f"2026-11-22 20:54:12  job 1: {said}\n"
    )
    assert telling_line(log) == said + (f"{shown}: Exited with exit code 85" if shown else "")


def test_phase_and_step_of_every_rank_are_shown_alike_ones_together(run):
    report(run, age_s=1)
    place = "pp0 dp{} cp0 tp0"
    lines = [RankStatus(rank, f"n{rank // 512}", 9, place.format(rank), "step", 21, 0.5) for rank in range(1024)]
    lines[7] = RankStatus(7, "n0", 9, place.format(7), "wait for data", 21, 12.0)
    lines[9] = RankStatus(9, "n0", 9, place.format(9), "step", 20, 1.0, "all_reduce of sums over world")
    write_ranks(run.path, lines)
    with run.lock():
        described = describe_run(run)
    assert "ranks    0-6, 8, 10-1023 (1022 ranks) on n0, n1: step 21, 0 s" in described
    assert "ranks    7 [pp0 dp7 cp0 tp0] on n0: wait for data, step 21, 12 s" in described
    assert "ranks    9 [pp0 dp9 cp0 tp0] on n0: step 20, 1 s, in all_reduce of sums over world" in described
    assert "ranks" not in describe_run(run), "a run that has ended has none"


def test_what_ranks_did_long_ago_is_said_to_be_old(run):
    report(run, age_s=1)
    write_ranks(run.path, [RankStatus(0, "n0", 9, "pp0 dp0 cp0 tp0", "step", 21, 0.5)])
    written = json.loads((run.path / RANKS_FILE).read_text())
    (run.path / RANKS_FILE).write_text(json.dumps(written | {"unix_s": time.time() - 90}))
    with run.lock():
        assert "as they were 01:30 ago: rank 0 has not written since" in describe_run(run)
