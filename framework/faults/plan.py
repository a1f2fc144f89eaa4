"""The kinds of faults, the faults planned for a run (RUN/faults.jsonl), and the faults injected so far (RUN/faults.log).

Both files only grow, a line at a time, so any number of commands and ranks may write them. A fault is noted before it acts: one
that kills its rank is not injected again at the next start.
"""

import json
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from framework.errors import RunError
from framework.monitor.phases import START_UP, Phase
from framework.recipe.keys import nearest
from framework.track.lines import read_lines

PLAN_FILE, LOG_FILE = "faults.jsonl", "faults.log"
HOWS = ("truncate", "flip", "zero", "remove", "manifest")
# Words of the command line: `wait-for-data` for "wait for data".
PHASES = {phase.value.replace(" ", "-"): phase for phase in Phase}
NUMBERS = {"rank": int, "step": int, "times": int, "seconds": float}


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault. options: beside `rank`, `step` and `times`."""

    meaning: str
    options: tuple[str, ...] = ()


_SIGNAL = ("phase", "point")
KINDS: Mapping[str, FaultKind] = {
    "kill": FaultKind("SIGKILL", _SIGNAL),
    "term": FaultKind("SIGTERM: the run is asked to save and stop", _SIGNAL),
    "stop": FaultKind("SIGSTOP, for so many seconds, or for good", (*_SIGNAL, "seconds")),
    "slow": FaultKind("the forward of the rank takes so many seconds more (1), in so many steps (times=10)", ("seconds",)),
    "nan": FaultKind("what the rank's backward begins with becomes NaN"),
    "flip": FaultKind("one bit of the rank's own master weights flips, after the update of the step before"),
    "oom": FaultKind("an allocation in the rank's forward fails"),
    "data-error": FaultKind("the rank's samples of the step cannot be read (EIO)"),
    "disk-full": FaultKind("no room (ENOSPC) when the rank writes its file of the next save"),
    "eio": FaultKind("the disk fails (EIO) for so many seconds (1) when the rank writes its file of the next save", ("seconds",)),
    "corrupt-checkpoint": FaultKind(
        f"the newest checkpoint is damaged; how={'|'.join(HOWS)}: the rank's file cut, with a bit flipped, empty, gone; or the"
        " manifest cut",
        ("how",),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """One fault of one rank.

    It acts as a step begins, the first from `step` on that finds it; with `phase` as that phase begins, in start-up or behind
    the step; with `point` at that point of a save (`SAVE_POINTS`), of the step or a later one; `times` times in all.
    """

    kind: str
    id: str = ""
    rank: int = 0
    step: int | None = None
    phase: str | None = None
    point: str | None = None
    how: str | None = None
    seconds: float | None = None
    times: int = 1

    def describe(self) -> str:
        """The words that a user types for it."""
        words = [
            f"{name}={value:g}" if name == "seconds" else f"{name}={value}"
            for name, value in asdict(self).items()
            if name not in ("kind", "id") and value is not None and (name, value) != ("times", 1)
        ]
        return " ".join([self.kind, *words])


def parse_fault(words: Sequence[str], points: Sequence[str]) -> Fault:
    """Parse words such as `kill rank=1 step=30`. points: of a save. Raises RunError with the words that can be used instead."""
    name, given = words[0], [word.partition("=") for word in words[1:]]
    if name not in KINDS:
        raise RunError(
            f"there is no fault {name!r}{_guess(name, KINDS)}. Faults: {', '.join(KINDS)} (`meshwright inject --list`)"
        )
    options = ("rank", "step", "times", *KINDS[name].options)
    values: dict[str, Any] = {"times": 10} if name == "slow" else {}
    for key, equals, text in given:
        if key not in options or not equals:
            raise RunError(
                f"{name} takes {', '.join(f'{each}=' for each in options)}, not {key + equals + text!r}{_guess(key, options)}"
            )
        values[key] = _read_value(key, text, points)
    fault = Fault(name, secrets.token_hex(3), **values)
    if PHASES.get(values.get("phase", "")) in START_UP and values.get("step") is not None:
        raise RunError(f"phase={values['phase']} is of the start-up, where no step is known yet: leave step= out")
    if fault.phase is not None and fault.point is not None:
        raise RunError("phase and point: a fault acts at one of them; inject two faults")
    return fault


def _read_value(key: str, text: str, points: Sequence[str]) -> Any:
    legal = {"phase": tuple(PHASES), "point": tuple(points), "how": HOWS}.get(key)
    if legal is not None:
        if text not in legal:
            raise RunError(f"{key}={text}: there is no such {key}{_guess(text, legal)}; one of {', '.join(legal)}")
        return text
    try:
        value = NUMBERS[key](text)
    except ValueError:
        value = -1
    least = 0 if key in ("rank", "seconds") else 1
    if not least <= value < float("inf"):
        raise RunError(f"{key}={text}: not a number from {least} on")
    return value


def _guess(word: str, known: Any) -> str:
    near = nearest(word, list(known))
    return f" (did you mean {near[0]}?)" if near else ""


def plan_faults(run_dir: Path, faults: Sequence[Fault]) -> None:
    """Add faults to the run's plan, all at once."""
    _append(run_dir / PLAN_FILE, "\n".join(json.dumps(asdict(fault)) for fault in faults))


def read_plan(run_dir: Path) -> list[Fault]:
    """All faults that were ever planned; torn lines are left out, and those of another version of Meshwright."""
    known, lines = {each.name for each in fields(Fault)}, read_lines(run_dir / PLAN_FILE)
    return [Fault(**values) for values in lines if values.keys() <= known and values.get("kind") in KINDS]


def note_fault(run_dir: Path, fault: Fault, rank: int, **more: Any) -> None:
    """Note durably that the fault is injected into the rank now: it may be the last thing that this process does."""
    record = {"unix_s": time.time(), "fault": fault.describe(), "id": fault.id, "rank": rank, **more}
    _append(
        run_dir / LOG_FILE, json.dumps(record | {"host": socket.gethostname(), "pid": os.getpid()}), is_durable=True
    )


def read_log(run_dir: Path) -> list[dict[str, Any]]:
    """The injected faults, oldest first: unix_s, fault (as typed), id, rank, host, pid, and the step or phase."""
    return list(read_lines(run_dir / LOG_FILE))


def count_injected(run_dir: Path, rank: int) -> Counter[str]:
    """Number of injections of each fault into the rank, by the fault's id."""
    return Counter(record.get("id", "") for record in read_log(run_dir) if record.get("rank") == rank)


def _append(path: Path, line: str, is_durable: bool = False) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, f"{line}\n".encode())  # one write: lines of others do not come between
        if is_durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
