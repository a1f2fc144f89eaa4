"""`meshwright status`: the state of a run, or of many with the best of them marked, read from their folders.

It works for local runs, after the job is gone, and on machines without SLURM.
"""

import argparse
import json
import math
import re
import shlex
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from framework.errors import EXIT_DONE, MeshwrightError, RunError
from framework.launch.directory import RunDirectory, find_run, list_runs
from framework.launch.identity import load_own_recipe
from framework.launch.jobs import WAITING_OR_RUNNING, JobState, find_jobs, is_running
from framework.launch.resume import resume_command, saved_step
from framework.monitor.hang import RankStatus, fold_ranks, read_ranks
from framework.monitor.progress import LONG_S, LONG_STEPS
from framework.output import align
from framework.recipe.compose import load_recipe
from framework.recipe.schema import Recipe, Run
from framework.track.console import format_count, format_duration
from framework.track.goodput import read_account, summarize_goodput
from framework.track.jsonl import METRICS_FILE, decode, read_records

WIDEST = 64  # of the last column, of words that the runs do not share
HEAD = ("run", "state", "step", "loss", "validation", "tokens/s", "differs in")
RECENT_STEPS = 50  # whose median is the pace
RANKS_OLD_S = 30.0  # rank 0 writes what ranks do every few seconds
_SAID_BY_SCRIPT = re.compile(r"\S+ \S+  job \d+: (?P<text>.*)")
# Most telling first: what a rank explained, what Python raised, what SLURM says of its own processes.
_TROUBLE = (
    re.compile(r"\[rank \d+\] (?!Traceback|ends as well).+"),
    re.compile(r"[\w.]*(?:Error|Exception|Interrupt)\b.*"),
    re.compile(r"(?:srun|slurmstepd\S*): error: .+"),
)


@dataclass(frozen=True)
class History:
    """slurm/history of the newest job: how often it started its ranks, and each end's (exit code, step)."""

    starts: int
    ends: tuple[tuple[int, int], ...]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="id or folder of a run or a sweep; a line each for several, or for all runs where none is given",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the state of one run, or a line for each of several."""
    paths = [find_run(name) for name in arguments.runs]
    return status_command(paths[0]) if len(paths) == 1 else overview_command(paths, Path(Run().root))


def status_command(path: Path) -> int:
    """Print the state of the run, or of each run of the sweep, at `path`. Raises RunError where there is none."""
    sweep = RunDirectory(path)
    if not sweep.members:
        print(describe_run(RunDirectory.open(path)))
        return EXIT_DONE
    runs = [RunDirectory(sweep.path.parent / name) for name in sweep.members]
    print("\n\n".join(_describe_member(run) for run in runs))
    if begun := [run for run in runs if run.recipe.is_file()]:
        print(f"\n{describe_runs(begun, marks_best=True)}")
    return EXIT_DONE


def overview_command(paths: Sequence[Path], root: Path) -> int:
    """Print a line for each run at `paths`, for all runs in `root` where there are none. Raises RunError where one is no run."""
    runs = [RunDirectory.open(path) for path in paths] or list_runs(root)
    if not runs:
        raise RunError(
            f"there are no runs in {root}: give a run's folder, or start one with `meshwright train experiment=quickstart`"
        )
    print(describe_runs(runs, marks_best=False))
    return EXIT_DONE


def _describe_member(run: RunDirectory) -> str:
    """A run of a sweep, whose turn may still come."""
    return describe_run(run) if run.recipe.is_file() else f"run      {run.path}, not begun"


def describe_run(run: RunDirectory) -> str:
    """The lines of one run, without those that have nothing to say."""
    recipe, launch = load_own_recipe(run), run.last_launch
    jobs = find_jobs(run)
    history = read_history(run, launch.get("jobs", []))
    step, trouble = 0, ""
    try:
        step = saved_step(run)
    except MeshwrightError as error:
        trouble = str(error)
    is_done = step >= recipe.train.steps
    now_s = time.time() if is_running(run, jobs) else None
    lines = [
        ("run", f"{run.path}{', done' if is_done else ''}"),
        *[("job", _describe_job(job, state)) for job, state in jobs],
        ("here", _describe_holder(run) if not jobs else ""),
        ("restarts", _describe_history(history)),
        ("step", _describe_steps(run, recipe, now_s)),
        *[("ranks", text) for text in ([] if now_s is None else describe_ranks(*read_ranks(run.path), now_s))],
        ("goodput", _describe_goodput(run, recipe)),
        ("saved", trouble or (f"step {step:,}" if step else "no checkpoint yet")),
        ("log", f"{run.job_log}: {line}" if (line := telling_line(run.job_log)) else ""),
        ("next", _next_command(run, recipe, jobs, is_done)),
    ]
    return "\n".join(f"{name:<8} {text}" for name, text in lines if text)


def read_history(run: RunDirectory, jobs: list[str]) -> History | None:
    """The notes of the newest jobs' script; None for a run that no job has started."""
    path = run.script.with_name("history")
    if not jobs or not path.is_file():
        return None
    lines = path.read_text().splitlines()
    ends = [re.search(r" end code=(\d+) step=(\d+)", line) for line in lines]
    return History(sum(" start from=" in line for line in lines), tuple((int(m[1]), int(m[2])) for m in ends if m))


def telling_line(log: Path) -> str:
    """The line of a job's log that says most about the last start: its first trouble if it had any, else the script's last
    word. Empty without a log."""
    if not log.is_file():
        return ""
    lines = log.read_text(errors="replace").splitlines()
    said = [(index, found["text"]) for index, line in enumerate(lines) if (found := _SAID_BY_SCRIPT.fullmatch(line))]
    if not said:
        return lines[-1] if lines else ""
    started = max((index for index, text in said if text.startswith("starts ")), default=0)
    last = said[-1][1]
    if "as it was asked to" in last:  # srun's own line on the exit code would look like a failure
        return last
    if "stopped" in last or "ended with" in last or "not started" in last:
        trouble = next(_find_trouble(lines[started:]), "")
        return f"{last} | {trouble}" if trouble else last
    return last


def _find_trouble(lines: list[str]) -> Iterator[str]:
    for pattern in _TROUBLE:
        yield from (line.strip() for line in lines if pattern.match(line))


def _describe_job(job: str, state: JobState | None) -> str:
    if state is None:
        return f"{job}, of which SLURM knows nothing now (it forgets, or is not within reach here)"
    place = f" on {state.nodes}" if state.nodes else ""
    why = f" ({state.reason})" if state.reason not in ("", "None") else ""
    since = f", start {state.start}" if state.state == "PENDING" and state.start not in ("", "Unknown") else ""
    return f"{job} {state.state}{why}{place}{since}"


def _describe_holder(run: RunDirectory) -> str:
    """The holder of a local run's lock."""
    holder = run.find_holder()
    if holder is not None:
        return f"running: {holder}"
    return "not running" if (run.path / "lock").is_file() else ""


def _describe_history(history: History | None) -> str:
    if history is None:
        return ""
    ends = ", ".join(f"{code} at step {step:,}" for code, step in history.ends[-5:])
    return f"{max(0, history.starts - 1)}" + (f"; the ranks ended with {ends}" if ends else "")


def _describe_steps(run: RunDirectory, recipe: Recipe, now_s: float | None) -> str:
    """The last reported step, its loss and the time left. now_s: the clock, for a run that runs: the age of the report is
    added."""
    metrics = run.path / METRICS_FILE
    records = list(read_records(metrics))
    total = recipe.train.steps
    if not records:
        return f"none of {total:,} yet"
    last = records[-1]
    paces = [record["step_s"] for record in records[-RECENT_STEPS:] if not math.isnan(record["step_s"])]
    pace_s = statistics.median(paces) if paces else 0.0
    left = total - last["step"]
    eta = f", {format_duration(pace_s * left)} of training left" if left else ""
    age = "" if now_s is None else _describe_age(now_s - last["unix_s"], pace_s * recipe.track.every_steps)
    return f"{last['step']:,} of {total:,} ({last['step'] / total:.0%}), loss {last['loss']:.4f}{age}{eta}"


def describe_ranks(unix_s: float, lines: Sequence[RankStatus], now_s: float) -> list[str]:
    """The phase of every rank, ranks that do the same in one line. unix_s: when rank 0 wrote the lines."""
    alike: dict[tuple[str, str], list[RankStatus]] = {}
    for line in lines:
        alike.setdefault((line.doing, line.wait), []).append(line)
    found = [_describe_alike(doing, wait, group) for (doing, wait), group in alike.items()]
    if found and now_s - unix_s > RANKS_OLD_S:
        found.append(f"as they were {format_duration(now_s - unix_s)} ago: rank 0 has not written since")
    return found


def _describe_alike(doing: str, wait: str, lines: Sequence[RankStatus]) -> str:
    hosts = list(dict.fromkeys(line.host for line in lines))
    where = f" on {', '.join(hosts[:3])}{' and others' if len(hosts) > 3 else ''}"
    who = f"[{lines[0].coordinates}]" if len(lines) == 1 else f"({len(lines)} ranks)"
    seconds = max(line.seconds for line in lines)
    return f"{fold_ranks([line.rank for line in lines])} {who}{where}: {doing}, {seconds:.0f} s{f', in {wait}' if wait else ''}"


def _describe_goodput(run: RunDirectory, recipe: Recipe) -> str:
    """Where the time went, up to the newest start's last note."""
    account = read_account(run.path)
    if account is None:
        return ""
    return summarize_goodput(account, recipe.launch.price_per_gpu_hour, recipe.launch.device == "cuda")


def _describe_age(age_s: float, pace_s: float) -> str:
    """The age of the last report, and whether that is long for reports which come every pace_s seconds."""
    hangs = age_s > max(LONG_S, LONG_STEPS * pace_s)
    return f", {format_duration(age_s)} ago" + (": it saves, validates, or hangs" if hangs else "")


def _waits_for_the_clock(state: JobState) -> bool:
    """Whether only SLURM's delay after a requeue keeps the job. Other reasons have a start time that is a guess."""
    with suppress(ValueError):
        is_due = datetime.fromisoformat(state.start) <= datetime.now()
        return state.state == "PENDING" and state.reason in ("BeginTime", "None", "") and not is_due
    return False


def _next_command(run: RunDirectory, recipe: Recipe, jobs: list[tuple[str, JobState | None]], is_done: bool) -> str:
    if is_running(run, jobs):
        return shlex.join(["meshwright", "stop", str(run.path)]) + "    # saves and stops"
    active = [(job, state) for job, state in jobs if state and state.state in WAITING_OR_RUNNING]
    if not active:
        export = f"{shlex.join(['meshwright', 'export', str(run.path)])} --to DIR"
        return export if is_done else resume_command(run, recipe)
    job, state = active[0]
    if _waits_for_the_clock(state):
        return f"scontrol update JobId={job} StartTime=now    # instead of waiting until {state.start}"
    return f"scancel {' '.join(job for job, _ in active)}    # saves and stops"


# --- many runs, one a line


@dataclass(frozen=True)
class RunLine:
    """One run in numbers. loss: the last step's; validation: the lowest; None where nothing was measured."""

    id: str
    state: str
    steps: str
    loss: float | None
    validation: float | None
    tokens_per_s: float | None
    overrides: tuple[str, ...]

    @property
    def score(self) -> tuple[bool, float]:
        """Lower is better: a validation loss before a loss of training, which is of other data in each step."""
        loss = self.loss if self.validation is None else self.validation
        return self.validation is None, float("inf") if loss is None or loss != loss else loss


def describe_runs(runs: Sequence[RunDirectory], marks_best: bool) -> str:
    """A table of at least one run. marks_best: `*` is at the lowest validation loss, or at the lowest loss where no run has
    validated; for runs that train on the same text."""
    lines = [_read_line(run) for run in runs]
    best = min(lines, key=lambda line: line.score) if marks_best else None
    common = set.intersection(*(set(line.overrides) for line in lines))
    return "\n".join(align([HEAD, *(_cells(line, line is best, common) for line in lines)]))


def _cells(line: RunLine, is_best: bool, common: set[str]) -> tuple[str, ...]:
    own = [word for word in line.overrides if word not in common and not word.startswith("run.id=")]
    numbers = [f"{value:.4f}" if value is not None else "-" for value in (line.loss, line.validation)]
    speed = format_count(line.tokens_per_s) if line.tokens_per_s is not None else "-"
    differs = " ".join(own)
    differs = differs if len(differs) <= WIDEST else differs[: WIDEST - 4] + " ..."
    return line.id + (" *" if is_best else ""), line.state, line.steps, *numbers, speed, differs


def _read_line(run: RunDirectory) -> RunLine:
    try:
        recipe = load_recipe(run.recipe)
    except MeshwrightError:
        return RunLine(run.id, "unreadable", "-", None, None, None, _overrides(run))
    step, loss, tokens_per_s, validation = read_curve_end(run.path / METRICS_FILE)
    steps = f"{step:,}/{recipe.train.steps:,}"
    return RunLine(run.id, _find_state(run, recipe.train.steps), steps, loss, validation, tokens_per_s, _overrides(run))


def read_curve_end(metrics: Path) -> tuple[int, float | None, float | None, float | None]:
    """(last step, its loss, its tokens/s, the lowest validation loss but NaN), without decoding what is in between."""
    if not metrics.is_file():
        return 0, None, None, None
    last, validations = None, []
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            last = line
            if '"validation_loss": null' not in line and (record := decode(line)):
                validations.append(record["validation_loss"])
    # A crash may have torn the last line; which one is then the last is worth a second reading.
    record = decode(last or "") or next(iter(deque(read_records(metrics), maxlen=1)), None)
    record = record or {"step": 0, "loss": None, "tokens_per_s": None}
    lowest = min(validations, key=lambda loss: (math.isnan(loss), loss), default=None)
    return record["step"], record["loss"], record["tokens_per_s"], lowest


def _find_state(run: RunDirectory, total: int) -> str:
    job = next((state for _, state in find_jobs(run) if state and state.state in WAITING_OR_RUNNING), None)
    if job is not None:
        return job.state.lower()
    if run.find_holder() is not None:
        return "running"
    with suppress(MeshwrightError):
        step = saved_step(run)
        return "done" if step >= total else f"ended at {step:,}" if step else "no checkpoint"
    return "damaged"


def _overrides(run: RunDirectory) -> tuple[str, ...]:
    with suppress(MeshwrightError, json.JSONDecodeError):
        return tuple(run.last_launch.get("overrides", ()))
    return ()


def describe_sweep(runs: Sequence[RunDirectory]) -> Iterator[str]:
    """The table of those of a sweep's runs that have begun, if one has."""
    begun = [run for run in runs if run.recipe.is_file()]
    if begun:
        yield f"\n{describe_runs(begun, marks_best=True)}"
        if len(begun) > 1:
            yield f"compare  meshwright diff {begun[0].path} {begun[1].path}"
