"""Trackers: where a run's curves, its recipe and its pictures go beside the run's folder.

    tracker       scalars of a step                         recipe                    files
    wandb         run.log, against `step`                   config of the run         run.save
    tensorboard   an event of each scalar                   a text                    a picture as an image
    mlflow        one log_batch                             params of the run         log_artifact
    csv           a row of RUN/metrics.csv                  beside it: recipe.yaml    beside it
    html          a point of each curve in RUN/track.html   a link                    a link

Each is in a process of its own (`mirror.py`), which imports its package: a slow one delays no step, and none has to handle an
error. CSV, TensorBoard and the page are written anew by every start, so that they have the steps of metrics.jsonl and no others;
wandb and MLflow keep what they were given.
"""

import csv
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from framework.files import write_file
from framework.recipe.keys import flatten
from framework.start import python_words
from framework.track.report import TAG_OF_REWOUND, Curve, RunInfo, Tracker
from framework.track.summary import thin
from framework.track.wandb import WandbTracker

# MLflow's limits.
PARAM_CHARACTERS, PARAMS_AT_ONCE = 500, 100
PAGE_FILE = "track.html"
# The page is written so often, or less often where that takes a larger share of the time.
REFRESH_S, LARGEST_SHARE = 10, 0.05
# Points of a curve that the page's process keeps, several for each that is drawn.
MOST_KEPT = 4000
# The end of a run waits so long for the page of its plan: less than for all trackers, so that the last page is still written.
PLAN_S = 20.0


class Csv(Tracker):
    """RUN/metrics.csv: a line of the names, then one for each step."""

    def open(self, info: RunInfo, run_dir: Path, name: str) -> int:
        """Begin the file anew."""
        self._path, self._names = run_dir / "metrics.csv", ["step"]
        self._file: TextIO | None = None
        return 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a line. With a name that is new, such as a first validation's, all lines are written again."""
        new = [name for name in values if name not in self._names]
        if new or self._file is None:
            self._names += new
            former = self._file and self._path.open(encoding="utf-8", newline="")
            made = self._path.with_name(f"{self._path.name}.{os.getpid()}")
            self._file = made.open("w", encoding="utf-8", newline="")
            self._writer = csv.DictWriter(self._file, self._names, restval="")
            self._writer.writeheader()
            self._writer.writerows(csv.DictReader(former) if former else ())
            made.rename(self._path)
        self._writer.writerow(values)
        self._file.flush()


class TensorBoard(Tracker):
    """RUN/tensorboard/NAME: event files, made by TensorBoard's own writer without torch or TensorFlow."""

    def open(self, info: RunInfo, run_dir: Path, name: str) -> int:
        """Begin the curve's folder anew."""
        folder = run_dir / "tensorboard" / name
        shutil.rmtree(folder, ignore_errors=True)
        self._writer = import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(str(folder))
        self._step = 0
        return 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add an event of all values."""
        self._step = step
        self._add([{"tag": name, "simple_value": float(value)} for name, value in values.items()])

    def save(self, file: Path) -> None:
        """Add a picture, or a text."""
        data = file.read_bytes()
        if file.suffix == ".png":
            width, height = struct.unpack(">II", data[16:24])  # of a PNG's header
            image = {"encoded_image_string": data, "width": width, "height": height, "colorspace": 4}
            return self._add([{"tag": file.name, "image": image}])
        text = b"\n".join(b"    " + line for line in data.splitlines())
        plugin = {"plugin_data": {"plugin_name": "text"}}
        tensor = {"dtype": 7, "string_val": [text], "tensor_shape": {"dim": [{"size": 1}]}}  # 7: of strings
        return self._add([{"tag": file.name, "metadata": plugin, "tensor": tensor}])

    def close(self, exit_code: int, is_rewound: bool = False) -> None:
        """Write what waits."""
        self._writer.close()

    def _add(self, values: list[dict[str, Any]]) -> None:
        event = import_module("tensorboard.compat.proto.event_pb2").Event
        self._writer.add_event(event(wall_time=time.time(), step=self._step, summary={"value": values}))


class MLflow(Tracker):
    """A run of MLflow, found again by a tag with its name."""

    def open(self, info: RunInfo, run_dir: Path, name: str) -> int:
        """Begin the run, with the recipe as its params, or continue it; the newest step that it has."""
        mlflow = import_module("mlflow")
        wanted = info.config["track"]["mlflow"]
        self._client = client = mlflow.MlflowClient(wanted["uri"])
        experiment = client.get_experiment_by_name(wanted["experiment"])
        number = experiment.experiment_id if experiment else client.create_experiment(wanted["experiment"])
        found = client.search_runs([number], f"tags.meshwright = '{name}'", max_results=1)
        run = found[0] if found else client.create_run(number, run_name=name, tags={"meshwright": name})
        self._id, self._entities = run.info.run_id, mlflow.entities
        client.update_run(self._id, "RUNNING")
        if not found:
            params = [
                self._entities.Param(key, str(value)[:PARAM_CHARACTERS]) for key, value in flatten(info.config).items()
            ]
            for start in range(0, len(params), PARAMS_AT_ONCE):
                client.log_batch(self._id, params=params[start : start + PARAMS_AT_ONCE])
        return int(run.data.metrics.get("step", 0)) if found else 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def save(self, file: Path) -> None:
        """Send a file."""
        self._client.log_artifact(self._id, str(file))

    def close(self, exit_code: int, is_rewound: bool = False) -> None:
        """End the run."""
        if is_rewound:
            self._client.set_tag(self._id, TAG_OF_REWOUND, "true")
        self._client.set_terminated(self._id, "FAILED" if exit_code else "FINISHED")


class Thinned:
    """A curve of fewer than MOST_KEPT points, of which each is the mean of equally many steps, however many there are."""

    def __init__(self) -> None:
        self._kept: Curve = ([], [])
        self._new: Curve = ([], [])
        self._width = 1

    @property
    def points(self) -> Curve:
        """Steps and values, with those for which no mean is complete yet."""
        (steps, values), (new_steps, new_values) = self._kept, thin(*self._new, self._width)
        return steps + new_steps, values + new_values

    def add(self, step: float, value: float) -> None:
        self._new[0].append(step)
        self._new[1].append(value)
        if len(self._new[0]) == self._width:
            self._kept, self._new = self.points, ([], [])
        if len(self._kept[0]) == MOST_KEPT:
            self._kept, self._width = thin(*self._kept, 2), 2 * self._width


class Html(Tracker):
    """RUN/track.html: keeps the curves of a run, and writes the page of them."""

    def open(self, info: RunInfo, run_dir: Path, name: str) -> int:
        """Begin the page anew, and have that of the plan written, by a process that takes torch's memory for seconds."""
        self._info, self._run_dir = info, run_dir
        self._plan: subprocess.Popen[bytes] | None = None
        if (run_dir / "recipe.yaml").exists():
            words = python_words("framework.plan.pages", str(run_dir))
            self._plan = subprocess.Popen([sys.executable, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        self._curves: dict[str, Thinned] = {}
        self._last: dict[str, float] = {}
        self._due_s = 0.0
        return 0

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a point to each curve that is drawn: of a rank's rates, say, the last ones do."""
        # Half a second to import, which only this process should pay.
        from framework.track.page import is_drawn

        self._last |= values
        for name in filter(is_drawn, values):
            self._curves.setdefault(name, Thinned()).add(step, values[name])

    def look(self) -> None:
        """Write the page where that is due."""
        began_s = time.monotonic()
        if began_s >= self._due_s:
            self._write(None)
            took_s = time.monotonic() - began_s
            self._due_s = began_s + max(REFRESH_S, took_s / LARGEST_SHARE)

    def close(self, exit_code: int, is_rewound: bool = False) -> None:
        """Write the page that stays: no browser reads it again. That of the plan is left out if it takes long."""
        if self._plan is not None:
            try:
                self._plan.wait(PLAN_S)
            except subprocess.TimeoutExpired:
                self._plan.kill()
                self._plan.wait()
        if not is_rewound:
            self._write(exit_code)

    def _write(self, exit_code: int | None) -> None:
        from framework.plan.page_html import render_html
        from framework.track.page import make_page

        refresh_s = REFRESH_S if exit_code is None else None
        curves = {name: each.points for name, each in self._curves.items()}
        page = make_page(self._info, curves, self._last, self._run_dir, exit_code, refresh_s)
        write_file(self._run_dir / PAGE_FILE, render_html(page).encode())


# Plugins add to it.
TRACKERS: dict[str, type[Tracker]] = {
    "wandb": WandbTracker,
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "csv": Csv,
    "html": Html,
}
