"""The record of goodput: what the meter makes of a rank's time, what is on disk, and what becomes of both when a thing fails."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.errors import EXIT_DONE
from framework.launch.process import read_job
from framework.monitor.goodput import (
    FIRST_STEPS,
    NORMAL_STEPS,
    Goodput,
    GoodputLog,
    Job,
    Meter,
    find_age_s,
    note_gone,
)
from framework.monitor.progress import Phase, Phases
from framework.track.goodput import (
    GOODPUT_FILE,
    OF_STEPS,
    Event,
    Note,
    TimePart,
    append_note,
    describe_goodput,
    read_account,
    read_notes,
    summarize_goodput,
)
from framework.track.report import Observers
from framework.track.summary import SHOWN_STARTS, draw_goodput


class Clock:
    """Phases whose seconds a test spends."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(Phase, 0.0)

    def so_far(self) -> dict[Phase, float]:
        return dict(self.spent)

    def spend(self, phase: Phase, seconds: float) -> None:
        self.spent[phase] += seconds

    @property
    def total(self) -> float:
        return sum(self.spent.values())


def test_a_rank_that_compiles_waits_saves_and_validates_says_so():
    clock, saver = Clock(), SimpleNamespace(stalled_s=0.0)
    clock.spend(Phase.LIBRARIES, 5.0)
    clock.spend(Phase.RESTORE, 2.0)
    meter = Meter(clock, lambda: saver.stalled_s)
    for step, seconds in enumerate((60.0, 4.0, 2.0, *[2.0] * 7), start=1):
        clock.spend(Phase.DATA, 0.5)
        clock.spend(Phase.STEP, seconds)
        if step == 9:
            clock.spend(Phase.SAVE, 3.0)  # of which a second waited for the step
            saver.stalled_s += 2.0
            clock.spend(Phase.VALIDATE, 5.0)
            clock.spend(Phase.RESTORE, 4.0)  # the loop went back
        meter.end_step(exposed_s=0.25)
    meter.mark(TimePart.STEP)
    clock.spend(Phase.CLOSE, 11.0)
    meter.mark(TimePart.CLOSE)
    assert meter.step_s == 2.0
    assert meter.seconds == pytest.approx({
        TimePart.START_UP: 7.0, TimePart.DATA_WAIT: 5.0, TimePart.VALIDATION: 5.0, TimePart.CHECKPOINT: 2.0,
        TimePart.COMPILE: 58.0 + 2.0,
        TimePart.RECOVERY: 4.0, TimePart.STEP: 10 * 2.0 + 1.0 - 4 * 0.25, TimePart.EXPOSED: 4 * 0.25, TimePart.CLOSE: 11.0,
    })  # fmt: skip
    assert sum(meter.seconds.values()) == pytest.approx(clock.total)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(*[st.floats(0, 1e3)] * 6), max_size=20))
def test_whatever_a_rank_does_its_parts_add_up_and_those_of_steps_never_shrink(steps):
    clock, saver = Clock(), SimpleNamespace(stalled_s=0.0)
    meter = Meter(clock, lambda: saver.stalled_s)
    before = dict.fromkeys(OF_STEPS, 0.0)
    for data, step, save, stalled, validate, exposed in steps:
        for phase, seconds in zip((Phase.DATA, Phase.STEP, Phase.SAVE, Phase.VALIDATE), (data, step, save, validate)):  # noqa: B905
            clock.spend(phase, seconds)
        saver.stalled_s += stalled
        meter.end_step(exposed)
        assert sum(meter.seconds.values()) == pytest.approx(clock.total)
        now = {part: meter.seconds.get(part, 0.0) for part in OF_STEPS}
        assert all(now[part] >= before[part] - 1e-6 for part in OF_STEPS)
        assert min(meter.seconds.values()) >= -1e-6
        before = now


def goodput_of(run_dir: Path, clock: Any, now: list[float]) -> tuple[Goodput, GoodputLog]:
    log = GoodputLog(run_dir, ranks=2, now=lambda: 1e9 + now[0])
    log.begin(now[0], Job())
    return Goodput(clock, log, Observers().contain, lambda: now[0]), log


def test_notes_are_made_by_time_and_the_shares_between_them_are_new(tmp_path):
    """A step of 10 ms does not write a line."""
    clock, now = Clock(), [0.0]
    goodput, _ = goodput_of(tmp_path, clock, now)
    goodput.begin_loop(0, lambda: 0.0)
    for step in range(1, 501):
        clock.spend(Phase.STEP, 0.01)
        now[0] += 0.01
        goodput.end_step(step, 0.0)
        if step > FIRST_STEPS + NORMAL_STEPS:
            assert sum(goodput.shares().values()) == pytest.approx(1.0)
    assert goodput.shares()["step"] == pytest.approx(1.0)
    notes = list(read_notes(tmp_path / GOODPUT_FILE))
    assert 20 <= sum(note.event is Event.STEP for note in notes) <= 26
    assert [note.event for note in notes[:2]] == [Event.BEGIN, Event.GO]


def test_a_loop_that_goes_back_is_noted_where_it_was_and_where_it_is(tmp_path):
    clock, now = Clock(), [0.0]
    goodput, _ = goodput_of(tmp_path, clock, now)
    goodput.begin_loop(0, lambda: 0.0)
    for step in (*range(1, 11), *range(5, 8)):
        clock.spend(Phase.STEP, 0.01)
        goodput.end_step(step, 0.0)
    notes = [(note.event, note.step) for note in read_notes(tmp_path / GOODPUT_FILE)]
    assert notes[-2:] == [(Event.STEP, 10), (Event.GO, 4)]
    goodput.end(EXIT_DONE)
    account = read_account(tmp_path)
    assert account is not None
    assert account.seconds[TimePart.LOST] == pytest.approx(0.06)


def test_a_full_disk_stops_nothing_and_what_the_process_says_stays_right(tmp_path, caplog):
    clock, now = Clock(), [0.0]
    (tmp_path / GOODPUT_FILE).symlink_to("/dev/full")
    log = GoodputLog(tmp_path, ranks=2)
    goodput = Goodput(clock, log, Observers().contain, lambda: now[0])
    goodput.begin_loop(0, lambda: 0.0)
    for step in range(1, 5):
        clock.spend(Phase.STEP, 10.0)
        now[0] += 10.0
        goodput.end_step(step, 0.0)
    goodput.end(EXIT_DONE)
    assert len([line for line in caplog.messages if "goodput failed, training goes on" in line]) == 1
    assert sum(log.shares(goodput._meter.seconds).values()) == pytest.approx(1.0)


def test_torn_and_foreign_lines_are_left_out_and_what_follows_them_is_not(tmp_path):
    path = tmp_path / GOODPUT_FILE
    append_note(path, Note(Event.BEGIN, 1, 1000.0, ranks=2))
    with path.open("a") as file:
        file.write('{"event": "step", "start": 1, "unix_s": 10')  # killed in a write
    append_note(path, Note(Event.GO, 1, 1003.0, 3.0, 0, {TimePart.START_UP: 3.0}))
    with path.open("a") as file:
        file.write('[1]\n{"event": "party"}\n{"event": "step", "start": "x", "unix_s": 1}\n')
    assert [note.event for note in read_notes(path)] == [Event.BEGIN, Event.GO]
    account = read_account(tmp_path)
    assert account is not None
    assert account.wall_s == 3.0


def test_a_start_reads_what_the_former_ones_left(tmp_path):
    for number in (1, 2, 3):
        log = GoodputLog(tmp_path, 1, now=lambda number=number: 1000.0 * number)
        log.begin(0.0, Job())
        log.note(Event.GO, {TimePart.START_UP: 5.0}, step=0)
        note_gone(tmp_path, EXIT_DONE)
    begins = [note.start for note in read_notes(tmp_path / GOODPUT_FILE) if note.event is Event.BEGIN]
    assert begins == [1, 2, 3]


HISTORY = """\
2026-11-21T04:54:00+0000 job=4 restart=0 start from=0 nodes=n1
2026-11-21T04:54:51+0000 job=4 restart=0 end code=85 step=95
2026-11-21T04:54:58+0000 job=4 restart=1 start from=95 nodes=n3
"""


def test_the_job_says_how_long_it_waited_and_how_the_former_start_ended(tmp_path):
    history = tmp_path / "history"
    assert read_job(history, "") == Job()
    history.write_text(HISTORY)
    assert read_job(history, "1795236892 1795236897") == Job(1795236892.0, 1795236897.0, 1795236891.0, 85)
    first, end, last = HISTORY.splitlines()
    left_out = "2026-11-21T04:54:53+0000 job=4 restart=0 left out node=n2"
    history.write_text("\n".join([first, end, left_out, left_out, last]) + "\n")
    assert read_job(history, "") == Job(None, None, 1795236891.0, 85)
    history.write_text(f"{first}\n")
    assert read_job(history, "1795230800 1795230830") == Job(1795230800.0, 1795230830.0)
    history.write_text(f"{first}\n{last}\n")  # of a node that was lost nobody noted the end
    assert read_job(history, " 1795236897") == Job()  # SLURM has not said when it was submitted


def test_a_process_knows_its_age():
    age_s = find_age_s()
    time.sleep(0.05)
    assert 0.02 < find_age_s() - age_s < 10


def test_the_table_and_the_picture_have_what_the_account_has(tmp_path):
    clock, now = Clock(), [0.0]
    for number in range(1, SHOWN_STARTS + 6):
        goodput, log = goodput_of(tmp_path, clock, now)
        goodput.begin_loop(10 * (number - 1), lambda: 0.0)
        for step in range(10 * (number - 1) + 1, 10 * number + 1):
            clock.spend(Phase.STEP, 360.0)
            now[0] += 360.0
            goodput.end_step(step, 36.0)
        goodput.end(EXIT_DONE)
        clock = Clock()
        now[0] += 3600.0
    account = log._accountant.account()
    lines = list(describe_goodput(account, price=2.0, is_gpu=True))
    assert "GPU hours" in lines[1]
    hours = account.on_s / 3600
    assert f"{2 * hours:,.3g}" in lines[-1]
    assert lines[-1].endswith(f"{4 * hours:.2f}")
    assert len({len(line) for line in lines[1:]}) == 1
    assert f"cost {4 * hours:.2f}" in summarize_goodput(account, 2.0, True)
    assert "rank hours" in summarize_goodput(account, None, False)
    assert draw_goodput(account, "x").startswith(b"\x89PNG")


def test_every_line_is_strict_json_of_its_own(tmp_path):
    clock, now = Clock(), [0.0]
    goodput, _ = goodput_of(tmp_path, clock, now)
    goodput.begin_loop(0, lambda: 0.0)
    goodput.end(EXIT_DONE)
    for line in (tmp_path / GOODPUT_FILE).read_text().splitlines():
        assert {"event", "start", "unix_s"} <= json.loads(line).keys()


def test_phases_so_far_have_the_one_under_way():
    phases = Phases()
    time.sleep(0.02)
    assert sum(phases.so_far().values()) >= 0.02
    phases.begin(Phase.STEP)
    assert phases.so_far()[Phase.LIBRARIES] >= 0.02
