"""Contain failures of a run's observers: no observer stops training. A new tracker is an entry of TRACKERS (`trackers.py`)."""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from framework.errors import LeaseLost
from framework.lease import Lease
from framework.recipe.plugins import ADDED
from framework.recipe.schema import Recipe
from framework.track.console import Console
from framework.track.jsonl import LOADS_FILE, Jsonl, loads_of
from framework.track.mirror import Mirror
from framework.track.report import Observer, RunInfo, StepReport, save_run_info
from framework.track.summary import Summary

logger = logging.getLogger(__name__)


class Observers:
    """Passes reports to each observer in order, and closes them in reverse order. A rank without observers holds an empty one.

    An observer that cannot open is left out. One that raises later is warned about once and still gets later reports (a full disk
    may be freed); the number of its failures is printed at the end. lease: of the run, checked before each report; LeaseLost is
    the one error that passes, for it ends this process.
    """

    def __init__(
        self,
        observers: Iterable[Observer] = (),
        shout: Callable[[str], None] = logger.warning,
        lease: Lease | None = None,
    ):
        self._observers, self._lease = list(observers), lease
        self._shout = shout
        self._failures: Counter[str] = Counter()
        self._last: dict[str, str] = {}

    def open(self, run: RunInfo) -> None:
        self._observers = [each for each in self._observers if self.contain(_name(each), partial(each.open, run))]

    def report(self, report: StepReport) -> None:
        """Report a step. Raises LeaseLost. Where the lease cannot be read the report is left out: another start may own the
        files."""
        if self._lease is not None and not self.contain("lease", self._lease.check):
            return
        for each in self._observers:
            self.contain(_name(each), partial(each.report, report))

    def rewind(self, step: int) -> None:
        for each in self._observers:
            self.contain(_name(each), partial(each.rewind, step))

    def close(self, exit_code: int | None) -> None:
        for each in reversed(self._observers):
            with suppress(LeaseLost):  # which the run ends with, and has said
                self.contain(_name(each), partial(each.close, exit_code))
        for name, count in self._failures.items():
            if count > 1:
                self._shout(f"{name} failed {count} times in this run, at last with {self._last[name]}")

    def contain(self, name: str, call: Callable[[], None]) -> bool:
        """Run a call and warn about its error under a name; LeaseLost passes. Returns whether the call succeeded."""
        try:
            call()
        except LeaseLost:
            raise
        except Exception as error:  # training goes on whatever an observer does: this is the one place for it
            self._failures[name] += 1
            self._last[name] = f"{type(error).__name__}: {error}"
            if self._failures[name] == 1:
                self._shout(f"{name} failed, training goes on: {type(error).__name__}: {error}")
            return False
        return True


def _name(observer: Observer) -> str:
    return observer.name if isinstance(observer, Mirror) else type(observer).__name__.lower()


def open_observers(
    recipe: Recipe, run_dir: Path, run: RunInfo, lease: Lease | None = None, known: Sequence[Sequence[float]] = ()
) -> Observers:
    """Open the observers that the recipe selects, on rank 0; other ranks use `Observers()`. lease: of the run, None
    without a launcher. known: [step, loss, gradient norm] of the last steps."""
    console, lease = Console(), lease or Lease(run_dir)
    metrics = Jsonl(run_dir, lease=lease, known=known, every_steps=recipe.track.every_steps)
    # Closed in reverse order: the report is made of the files of the others, and the console has the last word.
    observers: list[Observer] = [console, metrics]
    if run.has_experts:
        observers.append(Jsonl(run_dir, file=LOADS_FILE, record_of=loads_of, lease=lease))
    mirrors: list[Mirror] = []
    added = [name for name, plugin in ADDED["tracker"].items() if plugin in recipe.plugins]
    for name in (*recipe.track.trackers, *added):
        mirrors.append(Mirror(name, run_dir, console.say, lease=lease, beside=mirrors))
    observers += mirrors
    observers.append(Summary(run_dir, console.say, lease))
    save_run_info(run_dir, run, lease)
    opened = Observers(observers, lease=lease)
    opened.open(run)
    return opened
