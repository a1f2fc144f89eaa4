"""Trackers: where a run's curves, its recipe and its pictures go beside the run's folder. A new one is an entry of TRACKERS.

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
import shlex
import shutil
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from framework.files import write_file
from framework.recipe.keys import flatten
from framework.start import python_words
from framework.track.jsonl import METRICS_FILE, parse_line, read_records, rewinds_of
from framework.track.report import TAG_OF_REWOUND, Curve, RunInfo, Tracker, name_curve
from framework.track.summary import thin

# Seconds for wandb to start a run.
INIT_TIMEOUT_S = 30.0
# MLflow's limits.
PARAM_CHARACTERS, PARAMS_AT_ONCE = 500, 100
PAGE_FILE = "track.html"
# The page is written so often, or less often where that takes a larger share of the time.
REFRESH_S, LARGEST_SHARE = 10, 0.05
# Points of a curve that the page's process keeps, several for each that is drawn.
MOST_KEPT = 4000
# The end of a run waits so long for the page of its plan: less than for all trackers, so that the last page is still written.
PLAN_S = 20.0


class WandbTracker(Tracker):
    """A wandb run, whose id is the run's, online where that is asked for and possible; a resume continues it.

    Charts are drawn against our `step`. Records of steps that are trained again after a failure stay as they were sent, for wandb
    changes no step that it was given; metrics.jsonl is right about both. After a rewind the run goes on as another wandb run, and
    the former one gets the tag `rewound`.

    A branch (`run.start_from`) is a fork of its origin's wandb run where the server forks (a preview feature of wandb's) and has
    that run. Else, and offline, it is a run with all steps. Either way it is in the group of its origin, whose id and step its
    config has.
    """

    def open(self, info: RunInfo, run_dir: Path, name: str) -> int:
        """Begin the wandb run or continue it; the newest step that it has."""
        segments = sorted(run_dir.glob(f"wandb/*run-*-{name}/*.wandb"), key=lambda path: path.stat().st_mtime)
        self._run, forked = _start_wandb(info, run_dir, name, may_fork=name == info.run_id and not segments)
        return max(forked, self._run.step - 1) if self._run.url else _find_written(segments, info.start_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self._run.log(values, step=step, commit=True)

    def save(self, file: Path) -> None:
        """Send a file as an artifact: a copy of it, for offline it is sent long after the file has changed."""
        import wandb

        artifact = wandb.Artifact(f"{self._run.id}-{file.name}", type=file.stem)
        artifact.add_file(shutil.copy(file, self._run.dir), policy="immutable", skip_cache=True)
        self._run.log_artifact(artifact)

    def close(self, exit_code: int, is_rewound: bool = False) -> None:
        """Finish the wandb run."""
        if is_rewound:
            self._run.tags = (*(self._run.tags or ()), TAG_OF_REWOUND)
        self._run.finish(exit_code=exit_code)

    @staticmethod
    def advise(run_dir: Path) -> str:
        """Words on the way in which the rest is sent later."""
        return f"; upload later with: {write_sync(run_dir)}"


def _find_written(segments: list[Path], otherwise: int) -> int:
    """The newest step in wandb's files, each of a former start; `otherwise` where wandb cannot read them. The records given to a
    mirror tell less: the last ones of a killed mirror are in no file."""
    for segment in reversed(segments):
        newest = _read_segment(segment)
        if newest is None:
            return otherwise
        if newest:
            return newest
    return 0


def _read_segment(segment: Path) -> int | None:
    """The newest step in a file, by wandb's own reader; 0 without any, None where it cannot be read."""
    command = [sys.executable, *python_words("wandb", "leet", "inspect", "--json", str(segment.parent))]
    newest = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        for line in reader.stdout:
            found = parse_line(line) or {}  # nothing: a record that was torn
            newest = max(newest, found.get("history", {}).get("step", {}).get("num", 0))
    return None if reader.returncode else newest


def write_sync(run_dir: Path) -> str:
    """The command that uploads all segments of a run: each start has one, wandb uploads those of one run in their order."""
    return f"wandb sync {shlex.quote(str((run_dir / 'wandb').absolute()))}/*run-*"


def _start_wandb(info: RunInfo, run_dir: Path, name: str, may_fork: bool) -> tuple[Any, int]:
    """The wandb run `name`, and the steps that it has from a fork. It is online where that is asked for and possible, else
    offline: nothing is lost either way."""
    import wandb

    wanted, (path, _, step) = info.config["track"]["wandb"], (info.config["run"]["start_from"] or "").rpartition("@")
    origin = (Path(path).name, int(step)) if path else None  # of a branch
    told = {} if origin is None else {"branch_of": {"run": origin[0], "step": origin[1]}}
    arguments = {
        "id": name,
        "name": name,
        "project": wanted["project"],
        "entity": wanted.get("entity"),
        "group": wanted["group"] or (origin[0] if origin else None),
        "tags": wanted["tags"],
        "dir": str(run_dir),
        "config": {**info.config, **describe_derived(info), **told},
        "allow_val_change": True,  # a resume may state more steps
        "settings": wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            console="off",
            silent=True,
            x_stats_pid=os.getppid(),  # system metrics of the training process, not of the mirror
        ),
    }
    is_online = wanted["mode"] == "online" or (wanted["mode"] == "auto" and _has_key(wandb))
    ways: list[dict[str, Any]] = [{"mode": "offline", "resume": "allow"}]  # the last one that starts a run is taken
    if is_online:
        ways.append({"mode": "online", "resume": "allow"})
        if may_fork and origin is not None:
            # The origin's curve with the steps that its checkpoint follows: of its last rewind before.
            records = read_records(Path(path, METRICS_FILE))
            rewinds = max((rewinds_of(each) for each in records if each["step"] <= origin[1]), default=0)
            ways.append({"mode": "online", "fork_from": f"{name_curve(origin[0], rewinds)}?_step={origin[1]}"})
    run, why = None, ""
    while run is None:
        way = ways.pop()
        try:
            run = wandb.init(**arguments, **way)
        except wandb.errors.Error as error:
            if not ways:
                raise
            traceback.print_exc()
            why = "" if "fork_from" in way else f"not reachable ({first_line_of(error)}), "
            wandb.teardown()  # else the id is still in use by the run that did not start
    forked = origin[1] if origin is not None and "fork_from" in way else 0
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    say(f"wandb: {why}{run.url or f'offline; upload with: {write_sync(run_dir)}'}")
    return run, forked


def describe_derived(info: RunInfo) -> dict[str, Any]:
    """Numbers derived from the recipe, by which runs are grouped and filtered."""
    sizes = {"world": info.world, "accumulation": info.accumulation, "tokens_per_step": info.tokens_per_step}
    own = {"world": info.world, "device": info.device, "num_parameters": info.num_parameters}
    return {**own, "derived": {**info.degrees, **sizes}}


def _has_key(wandb: Any) -> bool:
    """Whether there is an API key where wandb looks for one (its environment variable, netrc, its settings)."""
    try:
        return bool(wandb.login(verify=False))
    except wandb.errors.UsageError:  # no key, and stdin is no terminal to ask for one
        return False


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


def say(line: str) -> None:
    """Print a line to the training process, which may be gone: its records are sent all the same."""
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


def first_line_of(error: Exception) -> str:
    """The first line of an error's message, behind its type."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"
