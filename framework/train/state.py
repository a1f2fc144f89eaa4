"""RunState: with the tensors it is all that a resume needs, and it is JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from framework.checkpoint.index import Entry
from framework.mesh.layout import Layout
from framework.model.materialize import persistent_buffers
from framework.train.step import Run


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


def entries(run: Run, whole: bool) -> Iterator[Entry]:
    """Everything of a run that lives in tensors, as checkpoint entries over the run's own memory.

    weight/NAME: the truth of a parameter, its master copy, or what a frozen one is. buffer/NAME: a buffer of the model's
    state dict. Others: the optimizer's state of that name. whole: False for saving (each element once over all ranks), True
    for loading (each rank all that it holds).
    """
    for buffer in run.buffers:
        cut = buffer.held if whole else buffer.counted
        for slot in buffer.slots if whole or not buffer.is_copy else ():
            yield Entry(f"weight/{slot.name}", *cut(slot, buffer.master))
    saved: set[str] = set()
    for stage in run.stages.values():
        for name, tensor in persistent_buffers(stage.model.model).items():
            if whole or name not in saved:
                saved.add(name)
                yield Entry(f"buffer/{name}", Layout(tuple(tensor.shape), replicated=("world",)), tensor.view(-1))
    for name in run.optimizer.state_names:
        for index, (buffer, span) in enumerate(run.spans):
            cut = buffer.held if whole else buffer.counted
            for slot in buffer.slots if whole or not buffer.is_copy else ():
                if slot.group == span.group:
                    yield Entry(f"{name}/{slot.name}", *cut(slot, run.optimizer.state(index, name), span.start))
