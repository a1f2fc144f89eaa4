"""wandb as a tracker (`mirror.py`): one run is one wandb run, whose id is the run's, and a resume continues it.

Charts are drawn against our `step`. Records of steps that are trained again after a failure stay as they were sent, for wandb
changes no step that it was given; metrics.jsonl is right about both. After a rewind the run goes on as another wandb run, and the
former one gets the tag `rewound`.

A branch (`run.start_from`) is a fork of its origin's wandb run where the server forks (a preview feature of wandb's) and has that
run. Else, and offline, it is a run with all steps. Either way it is in the group of its origin, whose id and step its config has.
"""

import os
import shlex
import shutil
import subprocess
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from framework.start import python_words
from framework.track.lines import in_a_line, parse_line, say
from framework.track.report import TAG_OF_REWOUND, RunInfo, Tracker

INIT_TIMEOUT_S = 30.0


class WandbTracker(Tracker):
    """A wandb run, online where that is asked for and possible."""

    def open(self, info: RunInfo, run_dir: Path, name: str) -> int:
        """Begin the wandb run or continue it; the newest step that it has."""
        segments = sorted(run_dir.glob(f"wandb/*run-*-{name}/*.wandb"), key=lambda path: path.stat().st_mtime)
        self._run, forked = _start(info, run_dir, name, may_fork=name == info.run_id and not segments)
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


def _start(info: RunInfo, run_dir: Path, name: str, may_fork: bool) -> tuple[Any, int]:
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
            ways.append({"mode": "online", "fork_from": f"{origin[0]}?_step={origin[1]}"})
    run, why = None, ""
    while run is None:
        way = ways.pop()
        try:
            run = wandb.init(**arguments, **way)
        except wandb.errors.Error as error:
            if not ways:
                raise
            traceback.print_exc()
            why = "" if "fork_from" in way else f"not reachable ({in_a_line(error)}), "
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
