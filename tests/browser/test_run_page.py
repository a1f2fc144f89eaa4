"""The page of a run in a real browser: it shows the run's numbers, asks nobody for anything, and is read again."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from framework.plan.page_html import MOST_BYTES, render_html
from framework.track.goodput import Event, Note, append_note
from framework.track.jsonl import LOADS_FILE, append_line, metrics_of
from framework.track.mirror import chart_values
from framework.track.page import curve_chart, make_page
from framework.track.report import HANGS_FILE, Curve, RunInfo, StepReport
from tests.browser.chromium import Chromium, Tab
from tests.browser.test_plan_page import read_marks
from tests.grid import IN_TURN

pytestmark = IN_TURN

INFO = RunInfo("demo-1", {}, total_steps=3000, stages={"base": 0, "long<b>": 1000}, model="llama", num_parameters=10**9)
REPORT = StepReport(1, 8, 512, 2.0, 1.0, 1e-3, 0.5, 1024.0, (1024.0,), 0.01, 0.4, 3 << 30)
HANG = "step 7 hangs: rank 3, is behind\nIt is at data.py:12"


def make_values(num_steps: int) -> tuple[dict[str, Curve], dict[str, float]]:
    curves: dict[str, Curve] = {}
    last: dict[str, float] = {}
    for step in range(1, num_steps + 1):
        scores = {"arc/acc": 0.25, "average/arc/acc": 0.5} if step % 50 == 0 else {}
        loss = float("nan") if step == 5 else 9.0 / step
        report = replace(REPORT, step=step, loss=loss, scores=scores, validation_losses={"web": 1.5})
        for name, value in chart_values(metrics_of(report)).items():
            steps, column = curves.setdefault(name, ([], []))
            steps.append(step)
            column.append(value)
            last[name] = value
    return curves, last


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    append_note(folder / "goodput.jsonl", Note(Event.BEGIN, 1, 1000.0))
    append_note(folder / "goodput.jsonl", Note(Event.STEP, 1, 4600.0, 3600.0, 100, {"step": 2700.0, "start_up": 900.0}))
    append_line(folder / HANGS_FILE, {"unix_s": 4600.0, "text": HANG})
    append_line(folder / LOADS_FILE, {"step": 9, "expert_loads": {"layers.0": [10, 30], "layers.1": [20, 20]}})
    rank = {"rank": 0, "host": "node-7", "phase": "step", "step": 9, "seconds": 1.5, "wait": "all_reduce over world"}
    (folder / "ranks.json").write_text(json.dumps({"unix_s": 4600.0, "ranks": [rank]}))
    (folder / "report.txt").touch()
    return folder


def show(browser: Chromium, run_dir: Path, num_steps: int, **how) -> Tab:
    page = make_page(INFO, *make_values(num_steps), run_dir, **how)
    (run_dir / "track.html").write_text(render_html(page), encoding="utf-8")
    return Tab(browser, run_dir / "track.html")


def test_a_page_shows_what_the_run_has_and_asks_nobody(browser: Chromium, run_dir: Path) -> None:
    tab = show(browser, run_dir, 2000, exit_code=1)
    losses = {
        float(mark["step"].replace(",", "")): float(mark["value"]) for mark in read_marks(tab, "loss", "value", "step")
    }
    assert len(losses) == 400, "2000 steps, thinned"
    assert losses[max(losses)] == pytest.approx(9 / 1998, rel=1e-3)
    assert {mark["curve"] for mark in read_marks(tab, "scores", "curve")} == {"eval/arc/acc", "eval/average/arc/acc"}
    hours = {mark["part"]: float(mark["hours"]) for mark in read_marks(tab, "goodput", "part", "hours")}
    assert hours == pytest.approx({"step": 0.75, "start-up": 0.25})
    assert {mark["load"] for mark in read_marks(tab, "loads", "load")} == {"0.5", "1.5", "1"}
    text = tab.ask("document.body.innerText")
    for words in (
        "rank 0 ended with exit code 1: step 2,000 of 3,000; hang reports are below",
        HANG,
        "long<b>",
        "75.0%",
        "3.00 GiB",
    ):
        assert words in text
    assert tab.ask("getComputedStyle(document.getElementById('verdict')).color") == "rgb(179, 22, 42)"
    assert tab.ask("[...document.querySelectorAll('a')].map((each) => each.getAttribute('href'))") == ["report.txt"]
    assert tab.complaints() == []
    assert len(tab.requests()) == 1, "the page itself"
    assert (run_dir / "track.html").stat().st_size < MOST_BYTES
    tab.close()


def test_a_page_is_read_again_where_its_reader_is(browser: Chromium, run_dir: Path) -> None:
    tab = show(browser, run_dir, 10, refresh_s=1)
    assert "running: step 10 of" in tab.ask("document.body.innerText")
    assert "all_reduce over world" in tab.ask("document.body.innerText")
    tab.ask("document.getElementById('theme').click(); scrollTo(0, 400)")
    made = run_dir / "made.html"
    made.write_text(render_html(make_page(INFO, *make_values(11), run_dir, exit_code=0)), encoding="utf-8")
    os.replace(made, run_dir / "track.html")
    tab.wait_until(
        "document.body?.innerText.includes('stopped and saved: step 11 of') && document.documentElement.dataset.ready"
    )
    tab.wait_until("Math.abs(scrollY - 400) < 2")
    assert tab.ask("document.documentElement.dataset.theme") == "dark"
    assert tab.complaints() == []
    tab.close()


def test_curves_of_one_chart_have_colors_of_their_own() -> None:
    line = curve_chart("times", "seconds", has_borders=False).to_dict()["layer"][0]
    colors = line["encoding"]["color"]["scale"]["range"]
    assert len(colors) == len(set(colors)) > 10
