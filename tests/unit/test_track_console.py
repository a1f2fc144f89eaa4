"""The console: equal fields in bar and log, remaining time from the clock it is given, a summary at the end."""

import io
from dataclasses import replace

import pytest

from framework.track.console import Console, format_count
from framework.track.report import RunInfo, StepReport

RUN = RunInfo("demo-1", {}, total_steps=100, tokens_per_step=512, world=2, degrees={"dp": 2}, model="llama",
              num_parameters=5_200_000, unigram_entropy=5.5,
              commands={"resume": "meshwright resume-it", "export": "meshwright export-it"})  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self):
        return True


def report(step, validation_loss=None, mfu=None):
    return StepReport(step, step * 8, step * 512, 3.25, 0.75, 3e-4, 0.5, 1024.0, (512.0, 512.0), 0.01, mfu, 1 << 20,
                      validation_loss=validation_loss)  # fmt: skip


def run_console(stream, reports, seconds_per_report=2.0, exit_code=0, run=RUN):
    clock = iter(seconds_per_report * i for i in range(10_000))
    console = Console(stream, now=lambda: next(clock))
    console.open(run)
    for each in reports:
        console.report(each)
    console.close(exit_code)
    return stream.getvalue()


def test_a_log_has_one_line_per_report_with_the_same_fields_in_the_same_order():
    lines = run_console(io.StringIO(), [report(step) for step in (1, 2, 3)]).splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split(" | ")[0] for line in steps] == ["step 1/100", "step 2/100", "step 3/100"]
    names = [[field.split()[0] for field in line.split(" | ")] for line in steps]
    assert names == [["step", "loss", "1.02k", "eta", "grad", "lr", "wait"]] * 3
    assert "loss 3.2500 | 1.02k tokens/s | eta 00:50 | grad 0.75 | lr 3.00e-04 | wait 2.0%" in steps[0]


def test_the_remaining_time_follows_the_clock_not_the_step_time():
    lines = run_console(io.StringIO(), [report(10), report(20), report(30)], seconds_per_report=30.0).splitlines()
    etas = [line.split("eta ")[1].split()[0] for line in lines if "eta" in line]
    assert etas == [
        "00:45",
        "04:00",
        "03:30",
    ]  # 90 steps of 0.5 s; then 3 s per step, which includes validation and saving


def test_a_stage_that_ends_is_not_the_end_of_the_run():
    assert run_console(io.StringIO(), [report(1)], exit_code=None).splitlines()[-1].startswith("step 1/100 | ")


def bars_of(text):
    return [bar.rstrip() for bar in text.split("summary")[0].split("\r") if "%|" in bar]


def test_a_terminal_of_80_columns_gets_a_bar_with_the_first_fields_of_the_log():
    bars = bars_of(run_console(Terminal(), [report(step, mfu=0.41) for step in range(1, 101)]))
    assert "100/100 | loss 3.2500 | 1.02k tokens/s | eta 00:00 | mfu 41.0%" in bars[-1]
    assert all("loss 3.2500 | 1.02k tokens/s | eta " in bar for bar in bars[2:])
    assert max(len(bar.splitlines()[0]) for bar in bars) <= 80


def test_the_bar_of_a_long_run_fits_80_columns_and_cuts_no_field(monkeypatch):
    bars = bars_of(run_console(Terminal(), [report(step, validation_loss=3.25) for step in (1, 50)], 36000.0))
    assert all(
        bar.splitlines()[0].split(" | ")[-1].split()[0] in ("loss", "eta", "validation", "grad") for bar in bars[1:]
    )
    monkeypatch.setattr("framework.track.console._count_columns", lambda _: 200)
    assert bars_of(run_console(Terminal(), [report(1)]))[-1].splitlines()[0].endswith("wait 2.0%")


def test_a_resumed_bar_starts_at_the_step_it_goes_on_from():
    stream = Terminal()
    console = Console(stream)
    console.open(RunInfo("demo-1", {}, total_steps=100, start_step=40))
    assert "40/100" in stream.getvalue()
    console.close(0)


def test_the_summary_has_the_last_losses_the_entropy_and_the_next_commands():
    text = run_console(io.StringIO(), [report(99, validation_loss=3.5), report(100)])
    summary = text[text.index("done: run demo-1") :]
    for part in (
        "step 100 of 100",
        "loss             3.2500",
        "3.5000  (unigram entropy 5.5000)",
        "meshwright export-it",
    ):
        assert part in summary
    assert "resume-it" not in summary


def test_a_stopped_run_is_told_how_it_is_resumed():
    assert "meshwright resume-it" in run_console(io.StringIO(), [report(7)], exit_code=85)


def test_a_run_of_this_machine_leaves_that_to_its_launcher():
    run = replace(RUN, config={"launch": {"kind": "local"}})
    text = run_console(io.StringIO(), [report(7)], exit_code=85, run=run)
    assert "resume-it" not in text
    assert "export-it" in text


@pytest.mark.parametrize(
    ("exit_code", "words"), [(85, "stopped and saved: run"), (88, "rank 0 ended with exit code 88: run")]
)
def test_the_summary_says_how_a_run_ended(exit_code, words):
    text = run_console(io.StringIO(), [report(7)], exit_code=exit_code)
    assert words in text
    assert "reported up to step 7 of" in text, "the step that is saved may be a later one"


def test_a_run_that_failed_before_its_first_step_still_closes():
    assert "rank 0 ended with exit code 86: run demo-1, no step reported" in run_console(
        io.StringIO(), [], exit_code=86
    )


def test_a_line_said_during_the_bar_is_a_line_of_its_own():
    stream = Terminal()
    console = Console(stream)
    console.open(RUN)
    console.report(report(1))
    console.say("wandb: https://wandb.ai/run")
    assert "wandb: https://wandb.ai/run\n" in stream.getvalue()
    console.close(0)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (12_345, "12.3k"), (4_560_000, "4.56M"), (7e9, "7G"), (2.5e12, "2.5T")]
)
def test_counts_are_three_digits_with_a_prefix(count, text):
    assert format_count(count) == text


def test_a_run_that_failed_promises_no_model():
    text = run_console(io.StringIO(), [report(7)], exit_code=1)
    assert "meshwright export-it" not in text
    assert "meshwright resume-it" in text
