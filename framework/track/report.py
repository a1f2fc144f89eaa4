"""What observers are told: once what is run (`RunInfo`), then one `StepReport` per reported step. docs/metrics.md defines
each metric: unit, where it is measured, over which ranks."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from framework.lease import Lease

RUN_INFO_FILE = "run_info.json"


@dataclass(frozen=True)
class StepReport:
    """One optimizer step as rank 0 sees it. Counts are of the whole run, `traffic` is of this step and this rank."""

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
    validation_loss: float | None = None
    validation_losses: dict[str, float] = field(default_factory=dict)
    validation_free_fraction: float | None = None
    skipped_steps: int = 0
    spikes: int = 0
    loss_limit: float | None = None
    gradient_norm_limit: float | None = None
    rewinds: int = 0
    skipped_samples: tuple[tuple[int, int], ...] = ()
    loss_scale: float | None = None
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
    """What is run. JSON-able; kept as `run_info.json` beside the metrics so that a report can be written afterwards.

    config: the recipe as plain dicts, without what nobody else may see (`recipe/environment.py`). start_step: steps done
    before this process took over (0: a fresh run). accumulation: microbatches of a rank in a step. degrees: {axis: size}.
    flops_per_token, peak_flops (of one device), unigram_entropy (nats per token): None if unknown.
    sources: names of the data's sources. has_experts: whether the model has mixtures of experts. commands: {what: command line},
    what a user may want to type next.
    """

    run_id: str
    config: dict[str, Any]
    total_steps: int
    start_step: int = 0
    tokens_per_step: int = 0
    accumulation: int = 1
    world: int = 1
    degrees: dict[str, int] = field(default_factory=dict)
    device: str = "cpu"
    model: str = ""
    num_parameters: int = 0
    num_parameters_active: int = 0
    flops_per_token: float | None = None
    peak_flops: float | None = None
    unigram_entropy: float | None = None
    sources: tuple[str, ...] = ()
    has_experts: bool = False
    commands: dict[str, str] = field(default_factory=dict)

    def next_commands(self, is_done: bool, is_saved: bool) -> dict[str, str]:
        """What makes sense to type next: a run that is done cannot be resumed, one that has not saved has no model to use."""
        hidden = {"resume"} if is_done else set() if is_saved else self.commands.keys() - {"resume"}
        return {what: command for what, command in self.commands.items() if what not in hidden}


class Observer(Protocol):
    """Watches a run from rank 0. Whatever it raises is contained: see `observers.py`."""

    def open(self, run: RunInfo) -> None: ...

    def report(self, report: StepReport) -> None: ...

    def rewind(self, step: int) -> None:
        """The run goes back to the end of `step`: reports of later ones come again."""

    def close(self, exit_code: int) -> None: ...


def save_run_info(run_dir: Path, run: RunInfo, lease: Lease | None = None) -> None:
    """Written whole or not at all."""
    text = json.dumps(asdict(run), indent=2) + "\n"
    (lease or Lease(run_dir)).write(run_dir / RUN_INFO_FILE, text.encode())


def load_run_info(run_dir: Path) -> RunInfo:
    """The `RunInfo` of the run's newest process."""
    values = json.loads((run_dir / RUN_INFO_FILE).read_text(encoding="utf-8"))
    return RunInfo(**values | {"sources": tuple(values.get("sources", ()))})
