"""The interface of observers and their input: the description of the run (`RunInfo`), then a `StepReport` for each reported step.
docs/metrics.md defines each metric: unit, where it is measured, over which ranks. No observer stops training (`Observers`).
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from framework.errors import LeaseLost
from framework.lease import Lease

logger = logging.getLogger(__name__)

RUN_INFO_FILE = "run_info.json"
# The line of each rank, which rank 0 writes, and the verdicts on hangs, a line each.
RANKS_FILE, HANGS_FILE = "ranks.json", "hangs.jsonl"
# (steps, values).
Curve = tuple[list[float], list[float]]
# The tag of a curve whose last steps the run has taken back, and a part of the name of the next one.
TAG_OF_REWOUND = "rewound"


def name_curve(run_id: str, rewinds: int) -> str:
    """The name of a run's curve in trackers, behind so many rewinds."""
    return f"{run_id}-{TAG_OF_REWOUND}-{rewinds}" if rewinds else run_id


@dataclass(frozen=True)
class StepReport:
    """An optimizer step as rank 0 sees it. Counts are of the whole run, `traffic` is of this step and this rank."""

    step: int
    samples: int
    tokens: int
    loss: float
    gradient_norm: float
    lr: float
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_rank: tuple[float, ...]
    data_wait_s: float
    mfu: float | None
    memory_bytes: int
    traffic: dict[str, dict[str, int]] = field(default_factory=dict)
    source_losses: dict[str, float] = field(default_factory=dict)  # of those in this step
    validation_loss: float | None = None
    validation_losses: dict[str, float] = field(default_factory=dict)
    validation_free_fraction: float | None = None
    average_validation_loss: float | None = None  # of the average of the weights (train.ema)
    scores: dict[str, float] = field(default_factory=dict)  # on tasks (eval.tasks), by TASK/NAME
    skipped_steps: int = 0
    spikes: int = 0
    loss_limit: float | None = None
    gradient_norm_limit: float | None = None
    rewinds: int = 0
    skipped_samples: tuple[tuple[int, int], ...] = ()
    loss_scale: float | None = None
    noise_scale_tokens: float | None = None
    preference: dict[str, float] = field(default_factory=dict)
    save_stall_s: float = 0.0
    failed_saves: int = 0
    stragglers: dict[str, float] = field(default_factory=dict)
    exposed_communication_s: float = 0.0
    pipeline_bubble: float = 0.0
    goodput: dict[str, float] = field(default_factory=dict)
    expert_imbalance: dict[str, float] = field(default_factory=dict)
    expert_imbalance_max: float | None = None
    expert_imbalance_mean: float | None = None
    router_entropy: float | None = None
    dropped_tokens: int | None = None
    # In a file of its own: with hundreds of experts in each layer it would be nearly all of metrics.jsonl.
    expert_loads: dict[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class RunInfo:
    """The description of a run. JSON-able; kept as `run_info.json` beside the metrics, so that a report can be written
    afterwards. None: unknown."""

    run_id: str
    config: dict[str, Any]  # the recipe as plain dicts, without secrets (`recipe/environment.py`)
    total_steps: int
    start_step: int = 0  # steps done before this process took over
    start_tokens: int = 0  # on which it was trained then
    data_step: int = 0  # steps on data before the present one: their losses are of others
    stages: dict[str, int] = field(default_factory=dict)  # by name, steps done before each begins
    tokens_per_step: int = 0
    accumulation: int = 1  # microbatches of a rank in a step
    world: int = 1
    degrees: dict[str, int] = field(default_factory=dict)  # by axis
    device: str = "cpu"
    model: str = ""
    num_parameters: int = 0
    num_parameters_active: int = 0
    flops_per_token: float | None = None
    peak_flops: float | None = None  # of one device
    unigram_entropy: float | None = None  # nats per token
    sources: tuple[str, ...] = ()  # names of the data's sources
    has_experts: bool = False
    nodes: tuple[str, ...] = ()  # lines on where they lie, where their order matters
    commands: dict[str, str] = field(default_factory=dict)  # command lines that a user may want next, by purpose

    def next_commands(self, is_done: bool, is_saved: bool) -> dict[str, str]:
        """The commands that apply: a run that is done cannot be resumed, one that has not saved has no model to use."""
        hidden = {"resume"} if is_done else set() if is_saved else self.commands.keys() - {"resume"}
        return {what: command for what, command in self.commands.items() if what not in hidden}


class Observer:
    """Observes a run from rank 0. Its errors are contained by `Observers`. By default it ignores all events."""

    @property
    def name(self) -> str:
        """The name under which its failures are reported."""
        return type(self).__name__.lower()

    def open(self, run: RunInfo) -> None:
        """The run begins, or goes on."""

    def report(self, report: StepReport) -> None:
        """A step is reported."""

    def rewind(self, step: int) -> None:
        """The run goes back to the end of `step`: reports of later steps come again."""

    def close(self, exit_code: int | None) -> None:
        """The run ends, or with None a stage of it, behind which others observe."""


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
        self._observers = [each for each in self._observers if self.contain(each.name, partial(each.open, run))]

    def report(self, report: StepReport) -> None:
        """Report a step. Raises LeaseLost. Where the lease cannot be read the report is left out: another start may own the
        files."""
        if self._lease is not None and not self.contain("lease", self._lease.check):
            return
        for each in self._observers:
            self.contain(each.name, partial(each.report, report))

    def rewind(self, step: int) -> None:
        for each in self._observers:
            self.contain(each.name, partial(each.rewind, step))

    def close(self, exit_code: int | None) -> None:
        for each in reversed(self._observers):
            with suppress(LeaseLost):  # which the run ends with, and has said
                self.contain(each.name, partial(each.close, exit_code))
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


class Tracker:
    """One curve of a run in a tracker; after a rewind another begins. Methods may raise, wait and hang."""

    def open(self, info: RunInfo, run_dir: Path, name: str) -> int:
        """Begin the curve, or go on with it; the newest step that it has. name: of the curve, the run's id or made of it."""
        raise NotImplementedError

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a step, which comes once."""
        raise NotImplementedError

    def save(self, file: Path) -> None:
        """Take a file of the run: its recipe, or at the end its report. By default it stays where it is."""

    def look(self) -> None:
        """The run goes on: called twice a second, once all steps so far are sent."""

    def close(self, exit_code: int, is_rewound: bool = False) -> None:
        """End the curve. exit_code: 0 as well for a run that is to be resumed."""

    @staticmethod
    def advise(run_dir: Path) -> str:
        """Words on how the rest gets there after a tracker that did not end in time."""
        return ""


def save_run_info(run_dir: Path, run: RunInfo, lease: Lease | None = None) -> None:
    """Write run_info.json atomically."""
    text = json.dumps(asdict(run), indent=2) + "\n"
    (lease or Lease(run_dir)).write(run_dir / RUN_INFO_FILE, text.encode())


def load_run_info(run_dir: Path) -> RunInfo:
    """The `RunInfo` of the run's newest process."""
    values = json.loads((run_dir / RUN_INFO_FILE).read_text(encoding="utf-8"))
    return RunInfo(**values | {name: tuple(values.get(name, ())) for name in ("sources", "nodes")})
