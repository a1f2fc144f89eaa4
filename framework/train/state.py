"""RunState: with the tensors it is all that a resume needs, and it is JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from framework.checkpoint.index import Entry
from framework.optim.optimizers import FlatOptimizer
from framework.parallel.zero.buffers import Span, UnitBuffer


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
    buffers: list[UnitBuffer], optimizer: FlatOptimizer, spans: list[tuple[UnitBuffer, Span]], whole: bool
) -> Iterator[Entry]:
    """Everything of a run that lives in tensors, as checkpoint entries over the run's own memory.

    whole: False for saving (each element once over all ranks), True for loading (each rank all that it holds).
    """
    for buffer in buffers:
        cut = buffer.held if whole else buffer.counted
        for slot in buffer.slots:
            yield Entry(f"weight/{slot.name}", *cut(slot, buffer.master))
    for name in optimizer.state_names:
        states: dict[UnitBuffer, list[tuple[Span, Tensor]]] = {}
        for index, (buffer, span) in enumerate(spans):
            states.setdefault(buffer, []).append((span, optimizer.state(index, name)))
        for buffer, parts in states.items():
            cut = buffer.held if whole else buffer.counted
            for span, state in parts:
                for slot in buffer.slots:
                    if slot.group == span.group:
                        yield Entry(f"{name}/{slot.name}", *cut(slot, state, span.start))
