"""Faults on request: the kinds of faults, those planned for a run (RUN/faults.jsonl), and the observer of a rank that injects
them at their step, phase or point of a save, and notes them in RUN/faults.log.

Both files only grow, a line at a time, so any number of commands and ranks may write them. A fault is noted before it acts: one
that kills its rank is not injected again at the next start.

A rank has an injector only where the recipe says `run.allow_faults=true`. Faults of a computation act through hooks of the model
that are there for one step. The rank reads RUN/faults.jsonl whenever it has changed, which each step asks of the file system:
such a run is for tests. A `run` is the rank's `train.step.TrainingRun`.
"""

import errno
import os
import secrets
import signal
import socket
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from framework.errors import RunError
from framework.monitor.progress import START_UP, Phase, RankObserver
from framework.recipe.keys import nearest
from framework.track.jsonl import append_line, read_lines

if TYPE_CHECKING:  # a rank makes its injector before it loads libraries, which is a phase as well
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

PLAN_FILE, LOG_FILE = "faults.jsonl", "faults.log"
# Values of a line of the log, at the least.
NOTED = frozenset({"unix_s", "fault", "id", "rank", "host", "pid"})
HOWS = ("truncate", "flip", "zero", "remove", "manifest")
# Words of the command line: `wait-for-data` for "wait for data".
PHASES = {phase.value.replace(" ", "-"): phase for phase in Phase}
NUMBERS = {"rank": int, "step": int, "times": int, "seconds": float}
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP}
SAVE_ERRORS = {"disk-full": errno.ENOSPC, "eio": errno.EIO}
# A bit of fp32: high enough that no rounding hides the flip, low enough that the run does not diverge at once.
FLIPPED_BIT = 20


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
                f"{name} takes {', '.join(f'{each}=' for each in options)}, not {key + equals + text!r}"
                f"{_guess(key + '=', [f'{each}=' for each in options])}"
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
    append_line(run_dir / PLAN_FILE, *map(asdict, faults))


def read_plan(run_dir: Path) -> list[Fault]:
    """All faults that were ever planned; torn lines are left out, and those of another version of Meshwright."""
    known, lines = {each.name for each in fields(Fault)}, read_lines(run_dir / PLAN_FILE)
    return [Fault(**values) for values in lines if values.keys() <= known and values.get("kind") in KINDS]


def note_fault(run_dir: Path, fault: Fault, rank: int, **more: Any) -> None:
    """Note durably that the fault is injected into the rank now: it may be the last thing that this process does."""
    record = {"unix_s": time.time(), "fault": fault.describe(), "id": fault.id, "rank": rank, **more}
    append_line(run_dir / LOG_FILE, record | {"host": socket.gethostname(), "pid": os.getpid()}, is_durable=True)


def read_log(run_dir: Path) -> list[dict[str, Any]]:
    """The injected faults, oldest first: unix_s, fault (as typed), id, rank, host, pid, and the step or phase. Lines that damage
    has left without one of these are left out."""
    lines = read_lines(run_dir / LOG_FILE)
    return [each for each in lines if each.keys() >= NOTED and isinstance(each["unix_s"], int | float)]


def count_injected(run_dir: Path, rank: int) -> Counter[str]:
    """Number of injections of each fault into the rank, by the fault's id."""
    records = read_lines(run_dir / LOG_FILE)
    return Counter(record.get("id", "") for record in records if record.get("rank") == rank)


class FaultInjector(RankObserver):
    """Injects the faults planned for one rank of a run. Used by the main thread, but for `reach`: by the thread that saves."""

    def __init__(self, run_dir: Path, rank: int) -> None:
        self._run_dir, self._rank = run_dir, rank
        self._stamp: tuple[int, int] | None = None
        self._faults: list[Fault] = []
        self._injected = count_injected(run_dir, rank)
        self._step = 0
        self._hooks: list[RemovableHandle] = []
        self._data_fails = False
        self._saves: deque[int] = deque()
        self._saved_step = 0
        self._fails_until_s: dict[str, float] = {}

    def begin_phase(self, phase: Phase) -> None:
        for fault in self._due(lambda fault: fault.phase is not None and PHASES[fault.phase] == phase, self._step):
            self._note(fault, phase=phase.value)
            send_signal(fault, os.getpid())

    def begin_step(self, step: int, run: Any) -> None:
        """End the faults of the step before; inject those of this one, or prepare them."""
        self._step = step
        while self._hooks:
            self._hooks.pop().remove()
        at_an_edge = lambda fault: fault.phase is None and fault.point is None and fault.kind not in SAVE_ERRORS  # noqa: E731
        for fault in self._due(at_an_edge, step):
            self._note(fault, step=step)
            self._act(fault, run)

    def begin_save(self, step: int) -> None:
        self._saves.append(step)

    def reach(self, point: str) -> None:
        if point == "planned":
            self._saved_step = self._saves.popleft()
        for fault in self._due(lambda fault: fault.point == point, self._saved_step):
            self._note(fault, point=point, step=self._saved_step)
            send_signal(fault, os.getpid())
        if point != "writing":
            return
        for fault in self._due(lambda fault: fault.kind in SAVE_ERRORS and fault.point is None, self._saved_step):
            self._note(fault, point=point, step=self._saved_step)
            lasts_s = 0.0 if fault.kind == "disk-full" else 1.0 if fault.seconds is None else fault.seconds
            self._fails_until_s[fault.kind] = time.monotonic() + lasts_s
            raise OSError(SAVE_ERRORS[fault.kind], f"{os.strerror(SAVE_ERRORS[fault.kind])} (injected)")
        if time.monotonic() < self._fails_until_s.get("eio", 0.0):
            raise OSError(errno.EIO, f"{os.strerror(errno.EIO)} (injected)")

    def read_batch(self, cursor: int, samples: Any, microbatches: Any) -> None:
        if self._data_fails:
            self._data_fails = False
            raise OSError(errno.EIO, f"samples {samples[0]:,} to {samples[-1]:,} cannot be read (injected)")

    def _act(self, fault: Fault, run: Any) -> None:
        if fault.kind in SIGNALS:
            send_signal(fault, os.getpid())
        elif fault.kind == "flip":
            flip_bit(run)
        elif fault.kind == "data-error":
            self._data_fails = True
        else:
            self._hooks.append(arm(fault, run))

    def _due(self, concerns: Callable[[Fault], bool], step: int) -> list[Fault]:
        """This rank's faults that act at this moment."""
        self._read()
        return [
            fault
            for fault in self._faults
            if concerns(fault) and (fault.step or 0) <= step and self._injected[fault.id] < fault.times
        ]

    def _note(self, fault: Fault, **more: Any) -> None:
        self._injected[fault.id] += 1
        note_fault(self._run_dir, fault, self._rank, **more)

    def _read(self) -> None:
        try:
            found = os.stat(self._run_dir / PLAN_FILE)
        except FileNotFoundError:
            return
        stamp = found.st_mtime_ns, found.st_size
        if stamp != self._stamp:
            self._stamp = stamp
            self._faults = [fault for fault in read_plan(self._run_dir) if fault.rank == self._rank]


def send_signal(fault: Fault, pid: int) -> None:
    """Send a process the fault's signal. A process that stops for a while is continued by another one."""
    if fault.kind == "stop" and fault.seconds is not None:
        words = ["sh", "-c", f"sleep {fault.seconds}; kill -CONT {pid}"]
        subprocess.Popen(
            words,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    os.kill(pid, SIGNALS[fault.kind])


def arm(fault: Fault, run: Any) -> "RemovableHandle":
    """Inject a fault of kind slow, oom or nan into the next step of this rank, until the handle is removed."""
    model = next(iter(run.stages.values())).model.model
    if fault.kind == "nan":
        return model.register_forward_hook(_poison_backward)
    if fault.kind == "oom":
        return model.register_forward_pre_hook(_once(_run_out_of_memory))
    return model.register_forward_pre_hook(_once(partial(time.sleep, 1.0 if fault.seconds is None else fault.seconds)))


def flip_bit(run: Any) -> None:
    """Flip a bit of the first master weight that this rank has in memory, and of what is computed with."""
    import torch

    run.optimizer.wait_for_readers()  # a save that is being staged is of the step before
    buffer = next(each for each in run.buffers if each.is_trained and each.master.numel())
    master = buffer.master
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[master.element_size()]
    bits = master[:1].view(integers)
    bits ^= 1 << (FLIPPED_BIT if master.element_size() == 4 else 8 * master.element_size() - 12)
    buffer.copy_master_to_params()


def _once(harm: Callable[[], None]) -> Callable[..., None]:
    """A hook before a forward that harms the first microbatch of a step only."""
    left = [harm]
    return lambda module, arguments: left.pop()() if left else None


def _run_out_of_memory() -> None:
    import torch

    raise torch.OutOfMemoryError("out of memory (injected)")


def _poison_backward(module: "nn.Module", arguments: Any, output: Any) -> None:
    """A hook after a forward that makes the gradients of its outputs NaN."""
    import torch

    for tensor in _find_tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: torch.full_like(gradient, torch.nan))


def _find_tensors(value: Any) -> "Iterator[Tensor]":
    from torch import Tensor

    if isinstance(value, Tensor):
        yield value
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ():
        yield from _find_tensors(each)
