"""Trackers: each has the steps of metrics.jsonl, and none, nor all of them at once, delays a step or stops a run."""

import csv
import json
import os
import resource
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from framework.plan import pages
from framework.recipe import run_rules
from framework.recipe.compose import compose, save_recipe
from framework.recipe.plugins import import_plugins
from framework.recipe.schema import Mlflow, Recipe, Track
from framework.track import trackers
from framework.track.jsonl import Jsonl
from framework.track.mirror import Mirror, chart_values
from framework.track.report import RunInfo, StepReport, save_run_info
from framework.track.trackers import MOST_KEPT, TRACKERS, Html, Thinned
from tests.grid import IN_TURN

pytestmark = IN_TURN

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugins" / "curve.py"
BUILT_IN = tuple(TRACKERS)
# As in test_track_wandb.py: waits that no tracker has caused.
SPURIOUS_WAITS = 5
SLOW = """
import time
from framework.extend import tracker
from framework.track.report import Tracker

@tracker("slow")
class Slow(Tracker):
    def open(self, info, run_dir, name):
        return 0
    def log(self, step, values):
        time.sleep(5)
"""
# All that the step's thread calls for a tracker: whether its process lives (under a lock that it tries), and what it has said.
ASKED = {"waitpid", "lock.acquire", "lock.release", "BufferedReader.read"}
SAID = {"bytes.decode", "str.splitlines", "list.append", "WIFSTOPPED", "waitstatus_to_exitcode"}


def report(step: int) -> StepReport:
    validated = {"validation_loss": 1.5} if step == 3 else {}
    return StepReport(step, step, step, 9.0 / step, 1.0, 1e-3, 0.1, 640.0, (640.0,), 0.0, None, 1 << 20, **validated)


def count_waits() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def note_call(called: Counter[str], _: FrameType, event: str, function: Any) -> None:
    if event == "c_call" and function is not sys.setprofile:
        called[function.__qualname__] += 1


def install(files: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put modules of the test's making before the real ones, in processes that are started from now on."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        for package in (folder / path).relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()
        (folder / path).write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")


def train(
    run_dir: Path,
    trackers: Sequence[str],
    steps: range,
    plugins: Sequence[str] = (),
    close_timeout_s: float = 60.0,
    called: Counter[str] | None = None,
    is_over: Callable[[], bool] = lambda: True,
) -> tuple[list[str], int, float]:
    """Report steps; returns (what was said, how often reports waited, close in seconds). called: gets the calls of C functions by
    reports. is_over: asked before the end of the run."""
    recipe = Recipe(track=Track(mlflow=Mlflow(uri="http://nowhere")), plugins=list(plugins))
    info = RunInfo("r-1", asdict(recipe), total_steps=100, start_step=steps[0] - 1)
    save_run_info(run_dir, info)
    said: list[str] = []
    jsonl, mirrors = Jsonl(run_dir), list[Mirror]()
    for name in trackers:
        mirrors.append(Mirror(name, run_dir, said.append, close_timeout_s, beside=mirrors))
    for observer in (jsonl, *mirrors):
        observer.open(info)
    waits = 0
    for step in steps:
        jsonl.report(report(step))
        before = count_waits()
        sys.setprofile(None if called is None else partial(note_call, called))
        for mirror in mirrors:
            mirror.report(report(step))
        sys.setprofile(None)
        waits += count_waits() - before
        if steps[0] == 1:
            time.sleep(0.02)
    until_s = time.monotonic() + 120
    while not is_over() and time.monotonic() < until_s:
        time.sleep(0.1)
    start_s = time.perf_counter()
    for mirror in mirrors:
        mirror.close(0)
    return said, waits, time.perf_counter() - start_s


def test_csv_has_each_step_of_metrics_jsonl(tmp_path: Path) -> None:
    train(tmp_path, ["csv"], range(1, 6))
    train(tmp_path, ["csv"], range(5, 8))  # goes on from step 4
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [(step, 9.0 / step) for step in range(1, 8)]
    assert [row["validation_loss"] for row in rows] == ["", "", "1.5", "", "", "", ""]


def test_trackers_of_every_kind_that_hang_refuse_and_die_delay_no_step_and_end_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = {
        "wandb.py": "import time\ntime.sleep(1000)",
        "tensorboard/summary/writer/event_file_writer.py": "import os\nos._exit(7)",
        "mlflow/__init__.py": "def MlflowClient(uri): raise ConnectionRefusedError('no such server')",
    }
    install(bad, tmp_path / "fake", monkeypatch)
    plugin, run, called = tmp_path / "bad_trackers.py", tmp_path / "run", Counter[str]()
    plugin.write_text(SLOW)
    run.mkdir()
    import_plugins([str(plugin)])
    names, num_steps = [*BUILT_IN, "slow"], 20
    said, waits, close_s = train(
        run, names, range(1, num_steps + 1), [str(plugin)], 12.0, called, (run / "track.html").exists
    )
    assert waits <= SPURIOUS_WAITS
    assert ASKED < called.keys() <= ASKED | SAID
    assert max(called.values()) <= num_steps * len(names), "each once a step for each tracker that lives"
    assert close_s < 20
    text = "\n".join(said)
    assert "wandb: not finished after 12 s, ended" in text
    assert "slow: not finished after 12 s, ended" in text
    assert "mlflow: failed, training goes on: ConnectionRefusedError: no such server" in text
    assert "tensorboard: the mirror died (7), training goes on" in text
    assert "csv: " not in text
    assert "html: " not in text
    assert len((run / "metrics.csv").read_text().splitlines()) == num_steps + 1
    assert f"stopped and saved: step {num_steps} of 100" in (run / "track.html").read_text()


def test_a_curve_of_many_steps_is_kept_in_means_of_equally_many() -> None:
    curve, num_steps = Thinned(), 10 * MOST_KEPT + 3
    for step in range(1, num_steps + 1):
        curve.add(step, 2.0 * step)
    steps, values = curve.points
    assert MOST_KEPT / 2 <= len(steps) < MOST_KEPT
    assert values == [2 * step for step in steps]
    gaps = {later - step for step, later in pairwise(steps[:-1])}
    assert gaps == {16.0}
    assert steps[0] == 8.5
    assert steps[-1] == num_steps - 1, "of the last three, which are no 16 yet"


def test_the_page_of_a_plan_is_written_for_a_run(tmp_path: Path) -> None:
    save_recipe(
        compose(["experiment=quickstart", "launch.ranks=2", "launch.device=cpu"]).require(), tmp_path / "recipe.yaml"
    )
    pages.main(tmp_path)
    text = (tmp_path / "plan.html").read_text()
    assert "meshwright plan; machine" in text
    assert "dp=2, zero 0" in text


def test_a_plan_that_hangs_does_not_take_the_last_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")  # nobody writes into it: the plan's process waits for its first byte
    monkeypatch.setattr(trackers, "PLAN_S", 0.5)
    page = Html()
    page.open(RunInfo("r-1", asdict(Recipe()), total_steps=100, start_step=0), tmp_path, "r-1")
    page.log(3, chart_values(asdict(report(3))))
    page.close(0)
    assert "step 3 of 100" in (tmp_path / "track.html").read_text()


def test_files_that_cannot_be_written_delay_no_step(tmp_path: Path) -> None:
    for name in ("track.html", "metrics.csv"):
        (tmp_path / name / "in the way").mkdir(parents=True)
    said, waits, _ = train(tmp_path, ["csv", "html"], range(1, 4))
    assert waits <= SPURIOUS_WAITS
    assert sorted(line.partition(" failed, training goes on: IsADirectoryError")[0] for line in said) == [
        "csv:",
        "html:",
    ]


# Packages of the test's making, which write down what they are asked.
FAKES = {
    "tensorboard": {
        "tensorboard/summary/writer/event_file_writer.py": """
            import json
            class EventFileWriter:
                def __init__(self, folder): self.file = open({asked!r}, "a"); self.note(["folder", folder])
                def note(self, what): print(json.dumps(what, default=repr), file=self.file, flush=True)
                def add_event(self, event):
                    for each in event["summary"]["value"]: self.note([event["step"], each["tag"], each.get("simple_value")])
                def close(self): self.note(["closed"])
        """,
        "tensorboard/compat/proto/event_pb2.py": "Event = dict",
    },
    "mlflow": {
        "mlflow/__init__.py": """
            import json
            from types import SimpleNamespace as Some
            entities = Some(Param=lambda key, value: (key, value), Metric=lambda *values: values)
            class MlflowClient:
                def __init__(self, uri): self.file = open({asked!r}, "a"); self.note(["uri", uri])
                def note(self, what): print(json.dumps(what, default=repr), file=self.file, flush=True)
                def get_experiment_by_name(self, name): return Some(experiment_id="e-1")
                def search_runs(self, experiments, query, max_results): return []
                def create_run(self, experiment, run_name, tags): return Some(info=Some(run_id=run_name))
                def update_run(self, run, status): self.note([run, status])
                def log_batch(self, run, params=(), metrics=()):
                    for name, value, _, step in metrics: self.note([step, name, value])
                def log_artifact(self, run, file): self.note(["file", file.rpartition("/")[2]])
                def set_terminated(self, run, status): self.note(["closed"])
        """
    },
}


@pytest.mark.parametrize("name", FAKES)
def test_a_tracker_gets_each_step_once_and_the_recipe(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked.jsonl"
    files = {path: text.replace("{asked!r}", repr(str(asked))) for path, text in FAKES[name].items()}
    install(files, tmp_path / "fake", monkeypatch)
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("batch: {}\n")
    said, _, _ = train(run, [name], range(1, 4))
    assert said == [], (run / f"{name}.log").read_text()
    lines = [json.loads(line) for line in asked.read_text().splitlines()]
    assert [line for line in lines if line[1:2] == ["loss"]] == [[step, "loss", 9.0 / step] for step in (1, 2, 3)]
    assert any("recipe.yaml" in line for line in lines)
    assert lines[-1] == ["closed"]


def test_a_package_that_is_missing_is_said_before_a_device_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_rules, "find_spec", lambda name: None)
    found = compose(
        [
            "track=none",
            "track.tensorboard=true",
            "track.mlflow.uri=http://host:5000",
            "track.csv=true",
            "track.html=true",
        ]
    )
    assert {each.key: each.fix for each in found.problems} == {
        "track.html": "`pip install 'meshwright[page]'`; or leave it out",
        "track.tensorboard": "`pip install tensorboard`; or leave it out",
        "track.mlflow.uri": "`pip install mlflow`; or leave it out",
    }


def test_a_plugins_tracker_has_the_steps(tmp_path: Path) -> None:
    import_plugins([str(EXAMPLE)])
    train(tmp_path, ["curve"], range(1, 4), [str(EXAMPLE)])
    assert (tmp_path / "r-1.curve").read_text() == "".join(f"{step} {9.0 / step}\n" for step in (1, 2, 3))


def test_trackers_are_chosen_by_the_recipe() -> None:
    track = Track(tensorboard=True, csv=True)
    assert track.trackers == ("wandb", "tensorboard", "csv")
    assert replace(track, wandb=replace(track.wandb, mode="disabled"), mlflow=Mlflow("x")).trackers == (
        "tensorboard",
        "mlflow",
        "csv",
    )
