"""RunState: with the tensors it is all that a resume needs, and it is JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from framework.checkpoint.index import Entry
from framework.mesh.layout import Layout
from framework.optim.optimizers import FlatOptimizer
from framework.parallel.zero.buffers import Slot, UnitBuffer


@dataclass
class RunState:
    """How far a run has come. `samples` is the data cursor: order belongs to the data, so this one integer continues it on
    any number of ranks. There is no random state to keep: every seed is a function of (seed, step, microbatch)."""

    run_id: str
    data: str  # fingerprint of the prepared data that `samples` counts
    step: int = 0
    samples: int = 0
    tokens: int = 0
    skipped_steps: int = 0
    num_updates: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunState":
        return cls(**values)


def entries(
    buffers: list[UnitBuffer], optimizer: FlatOptimizer, spans: list[tuple[UnitBuffer, str]], whole: bool
) -> Iterator[Entry]:
    """Everything of a run that lives in tensors, as checkpoint entries over the run's own memory.

    whole: False for saving (each rank the interval it owns), True for loading (each rank all that it holds).
    """
    for buffer in buffers:
        for slot in buffer.slots:
            yield _entry(f"weight/{slot.name}", buffer, slot, buffer.values(slot), whole)
    for index, (buffer, group) in enumerate(spans):
        start = buffer.spans()[group][0]
        for slot in buffer.trained:
            if slot.group == group:
                for name in optimizer.state_names:
                    state = optimizer.state(index, name)[slot.start - start : slot.stop - start]
                    yield _entry(f"{name}/{slot.name}", buffer, slot, state, whole)


def _entry(name: str, buffer: UnitBuffer, slot: Slot, values: Any, whole: bool) -> Entry:
    layout: Layout = buffer.layout(slot)
    if whole:
        return Entry(name, layout.whole(), values)
    start, stop = layout.interval or (0, values.numel())
    return Entry(name, layout, values[start:stop])
