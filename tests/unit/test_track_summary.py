"""The report of a run is written from its files alone, at any time, also for a run of one step or of NaN."""

import math
from dataclasses import replace

import pytest

from framework.track.jsonl import LOADS_FILE, METRICS_FILE, Jsonl, loads_of, read_records
from framework.track.page import make_page
from framework.track.report import RunInfo, StepReport, save_run_info
from framework.track.summary import add_loads, write_report
from tests.grid import IN_TURN

pytestmark = IN_TURN

RUN = RunInfo("demo-1", {"optim": {"name": "adamw", "lr": 1e-3}}, total_steps=400, tokens_per_step=512, world=2,
              degrees={"dp": 2}, model="llama", num_parameters=5_200_000, num_parameters_active=1_300_000,
              peak_flops=989.4e12, unigram_entropy=5.5,
              commands={"resume": "meshwright resume-it", "export": "meshwright export-it"})  # fmt: skip


def report(step, **values):
    base = StepReport(step, step * 8, step * 512, 9.0 / step + 2, 1.0, 1e-3, 0.5, 1024.0, (500.0, 524.0), 0.01, 0.4,
                      step << 20, {"batch": {"calls": 3, "bytes": 20_900_000}})  # fmt: skip
    return replace(base, **values)


def write_run(run_dir, reports):
    save_run_info(run_dir, RUN)
    jsonl = Jsonl(run_dir)
    jsonl.open(RUN)
    for each in reports:
        jsonl.report(each)
    jsonl.close(0)


def picture_size(path):
    """Width and height from a PNG's header."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_the_page_states_what_was_run_and_the_numbers_of_its_steps(tmp_path):
    steps = [report(step, validation_loss={200: 3.2, 400: 3.4}.get(step)) for step in range(1, 401)]
    write_run(tmp_path, steps)
    text, picture = sorted(write_report(tmp_path), key=lambda path: path.suffix, reverse=True)
    page = text.read_text()
    for line in (
        "llama, 5.2M parameters, 1.3M active",
        "2 ranks (dp=2) on cpu",
        "400 of 400, 205k tokens",
        "2.0225 at step 400; 11.0000 at step 1",
        "3.4000 at step 400; lowest 3.2000 at step 200",
        "5.5000",
        "03:20 in 400 reported steps",
        "0.5 s median",
        "1.02k tokens/s median",
        "0 with 500 tokens/s",
        "40.0% median of a peak of 989TFLOP/s per device (dense bf16)",
        "2.00% of the time",
        "400 MiB at the peak",
        "3 calls, 20.9MB",
        "meshwright export-it",
        str(picture),
    ):
        assert line in page, line
    assert picture_size(picture) == (1320, 840)


def test_the_lowest_validation_loss_is_of_the_data_that_a_run_in_stages_ended_with(tmp_path):
    write_run(tmp_path, [report(step, validation_loss={1: 3.2, 3: 3.6, 4: 3.4}.get(step)) for step in range(1, 5)])
    save_run_info(tmp_path, replace(RUN, stages={"a": 0, "b": 2}, data_step=2))
    page = write_report(tmp_path)[-1].read_text()
    assert "3.4000 at step 4; lowest 3.4000 at step 4" in page
    assert "512 tokens per step in the last stage trained, 400 steps" in page


@pytest.mark.parametrize(
    "reports",
    [
        [report(1)],
        [report(step, loss=math.nan, gradient_norm=math.inf) for step in range(1, 301)],
        [report(step, step_s=0.0, tokens_per_s=0.0, gradient_norm=0.0, mfu=None, traffic={}) for step in (1, 2)],
    ],
    ids=["one step", "diverged", "all zero"],
)
def test_odd_runs_get_a_report_too(tmp_path, reports):
    write_run(tmp_path, reports)
    assert {path.name for path in write_report(tmp_path)} == {"report.txt", "report.png"}


def test_a_run_without_a_step_gets_its_page_only(tmp_path):
    write_run(tmp_path, [])
    assert [path.name for path in write_report(tmp_path)] == ["report.txt"]
    assert "no step was reported" in (tmp_path / "report.txt").read_text()


@pytest.mark.parametrize("lost", [(2,), (3,), (1, 2, 3)], ids=str)
@pytest.mark.parametrize("mfu", [None, 0.4])
def test_lines_that_were_lost_and_filled_in_leave_the_report_whole(tmp_path, lost, mfu):
    write_run(tmp_path, [report(step, mfu=mfu) for step in (1, 2, 3) if step not in lost])
    resumed = Jsonl(tmp_path, known=[[step, 2.0, 0.5] for step in (1, 2, 3)])
    resumed.open(replace(RUN, start_step=3))
    resumed.close(0)
    assert [record["step"] for record in read_records(tmp_path / METRICS_FILE)] == [1, 2, 3]
    assert {path.name for path in write_report(tmp_path)} == {"report.txt", "report.png"}
    page = (tmp_path / "report.txt").read_text()
    assert "3 of 400, 1.54k tokens" in page
    assert ("00:01 in 2 reported steps" in page) == (len(lost) == 1)
    assert ("40.0% median of a peak" in page) == (mfu is not None and len(lost) == 1)
    assert "nan" not in page


def test_the_page_estimates_the_time_left_from_steps_whose_time_is_known(tmp_path):
    curves = {"step_s": ([1.0, 2.0, 3.0, 4.0], [5.0, math.nan, 1.0, 3.0])}
    last = {"step": 4.0, "tokens": 2048.0, "tokens_per_s": 170.0, "memory_bytes": 2.0**30}
    assert dict(make_page(RUN, curves, last, tmp_path).facts)["left"] == "19:48"


LOADS = {"layers.1": (30, 10, 20, 20), "layers.3": (20, 20, 20, 20)}
IMBALANCE = {"layers.1": 1.5, "layers.3": 1.0}


def balanced(step, **values):
    return report(
        step,
        expert_imbalance=IMBALANCE,
        expert_imbalance_max=1.5,
        expert_imbalance_mean=1.25,
        router_entropy=1.2,
        **values,
    )


def write_loads(run_dir, reports):
    loads = Jsonl(run_dir, file=LOADS_FILE, record_of=loads_of)
    loads.open(RUN)
    for each in reports:
        loads.report(each)
    loads.close(0)


def test_experts_get_a_heat_map_and_a_block_of_the_page(tmp_path):
    dense = [report(step) for step in (1, 2)]
    write_run(tmp_path, dense)
    write_report(tmp_path)
    width, height = picture_size(tmp_path / "report.png")
    assert "Experts" not in (tmp_path / "report.txt").read_text()
    experts = [balanced(step, expert_loads=LOADS, dropped_tokens=3) for step in (3, 4)]
    write_run(tmp_path, [*dense, *experts])
    write_loads(tmp_path, experts)
    write_report(tmp_path)
    assert picture_size(tmp_path / "report.png") == (width, height * 3 // 2)
    page = (tmp_path / "report.txt").read_text()
    for line in ("1.25 mean over layers; largest 1.50, of layers.1", "1.200 nats", "at most 1.386", "3, a token once"):
        assert line in page


def test_the_heat_map_is_of_the_last_reports(tmp_path):
    other = {layer: tuple(reversed(load)) for layer, load in LOADS.items()}
    reports = [balanced(step, expert_loads=other if step > 5 else LOADS) for step in range(1, 9)]
    write_loads(tmp_path, reports)
    sums = add_loads(read_records(tmp_path / LOADS_FILE, 3))
    assert sums == {layer: [3 * each for each in load] for layer, load in other.items()}


def test_loads_are_in_a_file_of_their_own(tmp_path):
    write_run(tmp_path, [balanced(1, expert_loads=LOADS)])
    (record,) = read_records(tmp_path / METRICS_FILE)
    assert record["expert_imbalance"] == IMBALANCE
    assert "expert_loads" not in record
