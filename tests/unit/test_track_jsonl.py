"""metrics.jsonl: strict JSON per step, flushed at once, cut back to the checkpoint on a resume."""

import json
import math
from dataclasses import replace

import pytest

from framework.lease import Lease
from framework.track.jsonl import METRICS_FILE, Jsonl, read_records, truncate
from framework.track.report import RunInfo, StepReport, load_run_info, save_run_info
from framework.track.wandb import NewRecords

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


def test_a_write_that_failed_half_way_does_not_spoil_the_record_after_it(tmp_path):
    jsonl = Jsonl(tmp_path)
    jsonl.open(RUN)
    write_whole = jsonl._file.write

    def full_disk(text):
        write_whole(text[:20])
        raise OSError(28, "No space left on device")

    jsonl._file = _Writer(jsonl._file, full_disk)
    with pytest.raises(OSError, match="No space"):
        jsonl.report(report(1))
    jsonl._file = jsonl._file.file
    jsonl.report(report(2))
    jsonl.report(report(3))
    assert steps_in(tmp_path / "metrics.jsonl") == [2, 3]


class _Writer:
    def __init__(self, file, write):
        self.file, self.write = file, write

    def flush(self):
        self.file.flush()


def test_run_info_comes_back_as_it_was_saved(tmp_path):
    run = RunInfo(
        "r", {"optim": {"lr": 1e-3}}, 10, 5, 64, 2, {"dp": 2}, "cpu", "llama", 7, 7, 1e9, None, 5.5, {"a": "b"}
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
