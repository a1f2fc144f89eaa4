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
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from framework.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_RESUME, MeshwrightError, RunError
from framework.launch.directory import RunDirectory, find_run, list_runs
from framework.launch.identity import load_own_recipe
from framework.launch.jobs import WAITING_OR_RUNNING, JobState, find_jobs, is_running, read_history
from framework.launch.resume import resume_command, saved_step
from framework.monitor.hang import RankStatus, fold_ranks, read_ranks
from framework.monitor.progress import LONG_S, LONG_STEPS
from framework.output import align, in_a_line
from framework.recipe.compose import load_recipe
from framework.recipe.schema import Recipe, Run
from framework.track.console import format_count, format_duration
from framework.track.goodput import Account, read_account, summarize_goodput
from framework.track.jsonl import METRICS_FILE, decode, read_records
from framework.track.report import load_run_info

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
    # The turn of some may still come.
    each = [describe_run(run) if run.recipe.is_file() else f"run      {run.path}, not begun" for run in runs]
    print("\n\n".join(each), *describe_sweep(runs), sep="\n")
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


def describe_run(run: RunDirectory) -> str:
    """The lines of one run, without those that have nothing to say."""
    recipe, jobs = load_own_recipe(run), find_jobs(run)
    step, trouble = 0, ""
    try:
        step = saved_step(run)
    except MeshwrightError as error:
        trouble = str(error)
    is_done = step >= recipe.train.steps
    now_s = time.time() if is_running(run, jobs) else None
    paid = recipe.launch.price_per_gpu_hour, recipe.launch.device == "cuda"
    account = read_account(run.path)
    lines = [
        ("run", f"{run.path}{', done' if is_done else ''}"),
        *[("job", _describe_job(job, state)) for job, state in jobs],
        ("here", _describe_holder(run, account) if not jobs else ""),
        ("restarts", _describe_history(run) if jobs else ""),
        ("step", _describe_steps(run, recipe, now_s)),
        *[("ranks", text) for text in ([] if now_s is None else describe_ranks(*read_ranks(run.path), now_s))],
        ("goodput", summarize_goodput(account, *paid) if account else ""),
        ("saved", trouble or (f"step {step:,}" if step else "no checkpoint yet")),
        ("log", f"{run.job_log}: {line}" if (line := telling_line(run.job_log)) else ""),
        ("next", _next_command(run, recipe, jobs, is_done)),
    ]
    return "\n".join(f"{name:<8} {text}" for name, text in lines if text)


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
    # After a stop that was asked for, srun's own line on the exit code would look like a failure.
    has_failed = "as it was asked to" not in last and any(
        word in last for word in ("stopped", "ended with", "not started")
    )
    telling = (line.strip() for pattern in _TROUBLE for line in lines[started:] if pattern.match(line))
    trouble = next(telling, "") if has_failed else ""
    return f"{last} | {trouble}" if trouble else last


def _describe_job(job: str, state: JobState | None) -> str:
    if state is None:
        return f"{job}, of which SLURM knows nothing now (it forgets, or is not within reach here)"
    place = f" on {state.nodes}" if state.nodes else ""
    why = f" ({state.reason})" if state.reason not in ("", "None") else ""
    since = f", start {state.start}" if state.state == "PENDING" and state.start not in ("", "Unknown") else ""
    return f"{job} {state.state}{why}{place}{since}"


def _describe_holder(run: RunDirectory, account: Account | None) -> str:
    """The holder of a local run's lock, or the reason for which its newest start has ended."""
    holder = run.find_holder()
    if holder is not None:
        return f"running: {holder}"
    if not (run.path / "lock").is_file():
        return ""
    if account is None:
        return "not running"
    if account.code is None:
        return "not running: it was killed, hung, or this machine went down: nothing has noted its end"
    lines = (run.error.read_text(errors="replace").splitlines() if run.error.is_file() else []) or [""]
    # The line of a traceback with the error, the first that is not indented.
    why = next((each for each in lines if each[:1].strip() and "Traceback (most recent" not in each), "")
    ended = {EXIT_DONE: "done", EXIT_RESUME: "stopped and saved", EXIT_INTERRUPTED: "interrupted"}
    return (
        f"not running: {ended.get(account.code, f'ended with exit code {account.code}')}{why and f': {in_a_line(why)}'}"
    )


def _describe_history(run: RunDirectory) -> str:
    """Restarts of the ranks by the newest job, and how they ended."""
    notes = read_history(run.history)
    starts = sum(note.what == "start" for note in notes)
    ends = [f"{note.values['code']} at step {int(note.values['step']):,}" for note in notes if note.what == "end"]
    return (
        (f"{max(0, starts - 1)}" + (f"; the ranks ended with {', '.join(ends[-5:])}" if ends else "")) if notes else ""
    )


def _describe_steps(run: RunDirectory, recipe: Recipe, now_s: float | None) -> str:
    """The last reported step, its loss and the time left. now_s: the clock, for a run that runs: the age of the report is
    added, and whether that is long for reports that come every so many steps."""
    records = list(read_records(run.path / METRICS_FILE, last=RECENT_STEPS))
    total = recipe.train.steps
    if not records:
        return f"none of {total:,} yet"
    last = records[-1]
    paces = [record["step_s"] for record in records if not math.isnan(record["step_s"])]
    pace_s = statistics.median(paces) if paces else 0.0
    left = total - last["step"]
    text = f"{last['step']:,} of {total:,} ({last['step'] / total:.0%}), loss {last['loss']:.4f}"
    if now_s is not None:
        age_s = now_s - last["unix_s"]
        hangs = age_s > max(LONG_S, LONG_STEPS * pace_s * recipe.track.every_steps)
        text += f", {format_duration(age_s)} ago" + (": it saves, validates, or hangs" if hangs else "")
    return text + (f", {format_duration(pace_s * left)} of training left" if left else "")


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


def describe_runs(runs: Sequence[RunDirectory], marks_best: bool) -> str:
    """A table of at least one run. marks_best: `*` is at the lowest validation loss, or at the lowest loss where no run has
    validated; for runs that train on the same text."""
    scored, typed = [_read_line(run) for run in runs], [_overrides(run) for run in runs]
    best, common = min(score for score, _ in scored), set(typed[0]).intersection(*typed)
    table: list[tuple[str, ...]] = [HEAD]
    for (score, (name, *cells)), words in zip(scored, typed, strict=True):
        differs = " ".join(word for word in words if word not in common and not word.startswith("run.id="))
        mark = " *" if marks_best and score == best and not any(row[0].endswith(" *") for row in table) else ""
        table.append((name + mark, *cells, differs if len(differs) <= WIDEST else differs[: WIDEST - 4] + " ..."))
    return "\n".join(align(table))


def _read_line(run: RunDirectory) -> tuple[tuple[bool, float], list[str]]:
    """The score of a run, lower is better, and the cells of its line but for the last."""
    try:
        recipe = load_recipe(run.recipe)
    except MeshwrightError:
        return (True, math.inf), [run.id, "unreadable", *"----"]
    data_step = 0
    with suppress(OSError, json.JSONDecodeError, TypeError):  # of a run that has not begun, or of another version
        data_step = load_run_info(run.path).data_step
    step, loss, tokens_per_s, validation = read_curve_end(run.path / METRICS_FILE, data_step)
    numbers = ["-" if value is None else f"{value:.4f}" for value in (loss, validation)]
    speed = "-" if tokens_per_s is None else format_count(tokens_per_s)
    # A validation loss before a loss of training, which is of other data in each step.
    judged = loss if validation is None else validation
    score = validation is None, math.inf if judged is None or math.isnan(judged) else judged
    state, steps = _find_state(run, recipe.train.steps), f"{step:,}/{recipe.train.steps:,}"
    return score, [run.id, state, steps, *numbers, speed]


def read_curve_end(metrics: Path, data_step: int = 0) -> tuple[int, float | None, float | None, float | None]:
    """(last step, its loss, its tokens/s, the lowest validation loss but NaN), without decoding what is in between. data_step:
    behind which validations are of the present data."""
    records = list(read_records(metrics, last=2))  # a crash may have torn the last line
    if not records:
        return 0, None, None, None
    with metrics.open(encoding="utf-8", errors="replace") as lines:
        validated = [record for line in lines if '"validation_loss": null' not in line and (record := decode(line))]
    losses = (each["validation_loss"] for each in validated if each["step"] > data_step)
    lowest = min(losses, key=lambda x: (math.isnan(x), x), default=None)
    return records[-1]["step"], records[-1]["loss"], records[-1]["tokens_per_s"], lowest


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


def describe_sweep(runs: Sequence[RunDirectory]) -> list[str]:
    """The table of those of a sweep's runs that have begun, if one has."""
    begun = [run for run in runs if run.recipe.is_file()]
    return [f"\n{describe_runs(begun, marks_best=True)}"] if begun else []
