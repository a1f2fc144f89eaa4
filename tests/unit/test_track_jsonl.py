"""metrics.jsonl: strict JSON per step, flushed at once, cut back to the checkpoint on a resume."""

import errno
import json
import math
from dataclasses import replace

import pytest

from framework.lease import Lease
from framework.track.jsonl import METRICS_FILE, Jsonl, decode, read_records, truncate
from framework.track.mirror import NewRecords
from framework.track.report import RunInfo, StepReport, load_run_info, save_run_info

RUN = RunInfo("r", {}, total_steps=10)


def report(step: int, **values) -> StepReport:
    base = StepReport(step, step * 4, step * 64, 2.5, 1.0, 1e-3, 0.1, 640.0, (320.0, 320.0), 0.0, None, 1 << 20)
    return replace(base, **values)


def write(run_dir, steps, start_step=0):
    jsonl = Jsonl(run_dir, now=lambda: 1.0)
    jsonl.open(replace(RUN, start_step=start_step))
    for step in steps:
        jsonl.report(report(step))
    jsonl.close(0)


def strict(line: str):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def steps_in(path):
    return [record["step"] for record in read_records(path)]


def test_a_record_is_on_disk_when_report_returns(tmp_path):
    jsonl = Jsonl(tmp_path, now=lambda: 1700000000.0)
    jsonl.open(RUN)
    jsonl.report(report(1, traffic={"batch": {"calls": 2, "bytes": 512}}, validation_loss=3.0))
    (record,) = read_records(tmp_path / "metrics.jsonl")  # the writer is still open
    assert record["traffic"] == {"batch": {"calls": 2, "bytes": 512}}
    assert record["tokens_per_s_per_rank"] == [320.0, 320.0]
    assert (record["validation_loss"], record["mfu"], record["unix_s"]) == (3.0, None, 1700000000.0)


def test_numbers_that_are_not_finite_are_strict_json_and_come_back(tmp_path):
    jsonl = Jsonl(tmp_path)
    jsonl.open(RUN)
    jsonl.report(report(1, loss=math.nan, gradient_norm=math.inf, lr=-math.inf, tokens_per_s_per_rank=(math.nan, 1.0)))
    line = (tmp_path / "metrics.jsonl").read_text()
    assert strict(line)["loss"] == "NaN"
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert math.isnan(record["loss"])
    assert math.isnan(record["tokens_per_s_per_rank"][0])
    assert (record["gradient_norm"], record["lr"]) == (math.inf, -math.inf)


def test_a_resume_drops_the_records_beyond_its_step_and_goes_on_with_one_record_per_step(tmp_path):
    write(tmp_path, range(1, 8))
    write(tmp_path, range(6, 11), start_step=5)
    assert steps_in(tmp_path / "metrics.jsonl") == list(range(1, 11))


def test_a_fresh_start_in_a_used_directory_keeps_nothing_of_the_old_curve(tmp_path):
    write(tmp_path, range(1, 4))
    write(tmp_path, range(1, 3), start_step=0)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2]


def test_truncation_keeps_every_kept_record_as_it_was(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(tmp_path, range(1, 4))
    before = path.read_text().splitlines()[:2]
    truncate(path, 2, Lease(tmp_path))
    assert path.read_text().splitlines() == before
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", ['{"step": 4, "loss": 2.', "\x00\x00\x00", '"step"', '{"loss": 1}'])
def test_a_line_torn_by_a_crash_is_left_out_and_the_next_record_is_whole(tmp_path, torn):
    write(tmp_path, [1, 2, 3])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(torn)
    write(tmp_path, [4, 5], start_step=3)
    assert steps_in(tmp_path / "metrics.jsonl") == [1, 2, 3, 4, 5]


class FullDisk:
    """A file whose disk has room for so many bytes, in the place of a run's metrics."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(bytes(data[: self.room]))
        self.room -= written
        return written

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_lines_that_a_full_disk_keeps_out_are_written_once_there_is_room(tmp_path):
    jsonl = Jsonl(tmp_path, now=lambda: 1.0)
    jsonl.open(RUN)
    disk = jsonl._file = FullDisk(jsonl._file, 20)
    for step in range(1, 147):
        with pytest.raises(OSError, match=rf"No space left on device; {step} lines wait in memory"):
            jsonl.report(report(step))
    disk.room = 1 << 20
    jsonl.report(report(147))
    jsonl.close(0)
    assert steps_in(tmp_path / METRICS_FILE) == list(range(1, 148))
    assert all(decode(line) for line in (tmp_path / METRICS_FILE).read_text().splitlines())


def test_a_disk_that_stays_full_says_so_at_the_end(tmp_path):
    jsonl = Jsonl(tmp_path)
    jsonl.open(RUN)
    jsonl._file = FullDisk(jsonl._file, 0)
    with pytest.raises(OSError, match="1 lines wait"):
        jsonl.report(report(1))
    with pytest.raises(OSError, match="1 lines wait"):
        jsonl.close(0)


def known(first, last):
    return [[step, 10.0 + step, 0.5] for step in range(first, last + 1)]


@pytest.mark.parametrize("lost", [(7, 8), (1, 2), (3, 4, 5), tuple(range(1, 9))])
def test_a_resume_says_which_lines_are_missing_and_fills_what_the_checkpoint_knows(tmp_path, capsys, lost):
    write(tmp_path, [step for step in range(1, 11) if step not in lost])
    jsonl = Jsonl(tmp_path, known=known(2, 8))
    jsonl.open(replace(RUN, start_step=8, start_tokens=8 * 64, tokens_per_step=256))  # of the stage that begins
    jsonl.report(report(9))
    jsonl.close(0)
    records = {record["step"]: record for record in read_records(tmp_path / METRICS_FILE)}
    assert list(records) == [step for step in range(1, 10) if step not in lost or step > 1]
    assert f"lacks {len(lost)} lines of steps {lost[0]} to {lost[-1]}" in capsys.readouterr().err
    for step in (each for each in lost if each > 1):
        assert (records[step]["loss"], records[step]["gradient_norm"], records[step]["tokens"]) == (
            10.0 + step,
            0.5,
            64 * step,
        )
        assert records[step]["filled"]
        assert math.isnan(records[step]["step_s"])
        assert records[step].keys() - {"filled"} == records[9].keys()


def test_tokens_of_lines_that_are_filled_in_are_those_of_their_stage(tmp_path):
    """Four steps of 64 tokens, then steps of 256: a line is lost in each stage, and the last one."""
    tokens = {1: 64, 2: 128, 3: 192, 4: 256, 5: 512, 6: 768, 7: 1024, 8: 1280}
    jsonl = Jsonl(tmp_path)
    jsonl.open(RUN)
    for step in (1, 2, 4, 5, 7):
        jsonl.report(report(step, tokens=tokens[step]))
    jsonl.close(0)
    jsonl = Jsonl(tmp_path, known=known(1, 8))
    jsonl.open(replace(RUN, start_step=8, start_tokens=1280, tokens_per_step=256))
    jsonl.close(0)
    assert {each["step"]: each["tokens"] for each in read_records(tmp_path / METRICS_FILE)} == tokens


def test_a_line_whose_key_is_damaged_is_filled_as_one_that_is_missing(tmp_path, capsys):
    write(tmp_path, range(1, 9))
    path = tmp_path / METRICS_FILE
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:4], lines[4].replace('"tokens"', '"tokenr"'), *lines[5:]]))
    jsonl = Jsonl(tmp_path, known=known(2, 8))
    jsonl.open(replace(RUN, start_step=8, start_tokens=8 * 64))
    jsonl.close(0)
    filled = [record["step"] for record in read_records(path) if record.get("filled")]
    assert filled == [5]
    assert "lacks 1 lines of steps 5 to 5" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "every"), [(range(10, 61, 10), 1), (range(1, 61), 10), ([*range(1, 51), 60], 10)])
def test_a_rhythm_of_reports_that_changed_leaves_no_gap(tmp_path, capsys, steps, every):
    write(tmp_path, steps)
    before = (tmp_path / METRICS_FILE).read_bytes()
    jsonl = Jsonl(tmp_path, known=known(1, 60), every_steps=every)
    jsonl.open(replace(RUN, start_step=60))
    jsonl.close(0)
    assert (tmp_path / METRICS_FILE).read_bytes() == before
    assert capsys.readouterr().err == ""


def test_a_step_that_was_written_twice_is_there_once(tmp_path):
    write(tmp_path, [1, 2])
    path = tmp_path / METRICS_FILE
    path.write_text(path.read_text() * 2)
    write(tmp_path, [3], start_step=2)
    assert steps_in(path) == [1, 2, 3]


def test_run_info_comes_back_as_it_was_saved(tmp_path):
    run = RunInfo(
        "r", {"optim": {"lr": 1e-3}}, 10, 5, 64, 2, {"dp": 2}, "cpu", "llama", 7, 7, 1e9, None, 5.5, sources=("a",)
    )
    save_run_info(tmp_path, run)
    assert load_run_info(tmp_path) == run


def test_a_rewind_drops_what_comes_again_and_a_follower_begins_anew(tmp_path):
    now = iter(range(1, 100))
    metrics = Jsonl(tmp_path, now=lambda: float(next(now)))
    metrics.open(RunInfo("r", {}, 9))
    for step in (1, 2, 3):
        metrics.report(report(step))
    follower = NewRecords(tmp_path / METRICS_FILE)
    assert [each["step"] for each in follower.read()] == [1, 2, 3]
    metrics.report(report(4))
    metrics.rewind(2)
    for step in (3, 4, 5):
        metrics.report(report(step))
    assert [each["step"] for each in follower.read()] == [4, 1, 2, 3, 4, 5]
    metrics.report(report(6))
    assert [each["step"] for each in follower.read()] == [6]
    metrics.close(0)
    assert [each["step"] for each in read_records(tmp_path / METRICS_FILE)] == [1, 2, 3, 4, 5, 6]
