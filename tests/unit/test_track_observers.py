"""No observer can stop a run."""

import io
import json
from dataclasses import asdict

import pytest

from framework.recipe.schema import Recipe, Track, Wandb
from framework.track.report import Observer, Observers, RunInfo, StepReport
from framework.train.reports import open_observers

RUN = RunInfo("r", {}, total_steps=2)
REPORT = StepReport(1, 4, 64, 2.5, 1.0, 1e-3, 0.1, 640.0, (640.0,), 0.0, None, 1 << 20)


class Recorder(Observer):
    def __init__(self, calls, fails_in=()):
        self.calls, self.fails_in = calls, fails_in

    def _called(self, name):
        self.calls.append((type(self).__name__, name))
        if name in self.fails_in:
            raise OSError(28, f"No space left in {name}")

    def open(self, run):
        self._called("open")

    def report(self, report):
        self._called("report")

    def close(self, exit_code):
        self._called("close")


class Broken(Recorder):
    pass


def run_all(observers, num_reports=3):
    observers.open(RUN)
    for _ in range(num_reports):
        observers.report(REPORT)
    observers.close(0)


@pytest.mark.parametrize("where", ["open", "report", "close"])
def test_an_observer_that_raises_is_shouted_about_once_and_the_others_get_every_call(where):
    calls, shouts = [], []
    run_all(Observers([Broken(calls, fails_in=(where,)), Recorder(calls)], shouts.append))
    assert [name for who, name in calls if who == "Recorder"] == ["open", "report", "report", "report", "close"]
    assert sum("broken failed, training goes on: OSError" in shout for shout in shouts) == 1
    assert len(shouts) == (2 if where == "report" else 1)


def test_an_observer_that_recovers_gets_the_later_reports_and_the_failures_are_counted():
    calls, shouts = [], []
    broken = Broken(calls, fails_in=("report",))
    observers = Observers([broken], shouts.append)
    observers.open(RUN)
    observers.report(REPORT)
    observers.report(REPORT)
    broken.fails_in = ()
    observers.report(REPORT)
    observers.close(0)
    assert calls.count(("Broken", "report")) == 3
    assert shouts[-1].startswith("broken failed 2 times in this run, at last with ")


def test_an_observer_that_cannot_open_is_not_called_again():
    calls = []
    run_all(Observers([Broken(calls, fails_in=("open",))], lambda _: None))
    assert calls == [("Broken", "open")]


def test_ctrl_c_is_not_contained():
    class Interrupted(Recorder):
        def report(self, report):
            raise KeyboardInterrupt

    observers = Observers([Interrupted([])])
    observers.open(RUN)
    with pytest.raises(KeyboardInterrupt):
        observers.report(REPORT)


def test_observers_close_in_reverse_order():
    calls = []
    run_all(Observers([Recorder(calls), Broken(calls)]), num_reports=0)
    assert calls == [("Recorder", "open"), ("Broken", "open"), ("Broken", "close"), ("Recorder", "close")]


def test_a_rank_without_observers_takes_the_same_path():
    run_all(Observers())


def test_a_run_leaves_metrics_info_and_report_behind(tmp_path, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    recipe = Recipe(track=Track(wandb=Wandb(mode="disabled")))
    observers = open_observers(recipe, tmp_path, RunInfo("r", asdict(recipe), total_steps=1))
    observers.report(REPORT)
    observers.close(0)
    assert "step 1/1 | loss 2.5000" in stream.getvalue()
    assert f"report: {tmp_path}/report.png, {tmp_path}/report.txt\n" in stream.getvalue()
    assert {path.name for path in tmp_path.iterdir()} == {"run_info.json", "metrics.jsonl", "report.txt", "report.png"}
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 2.5
