"""UnitClock: seconds of units' forwards and backwards in one step, by which a pipeline can be split (`pipeline.pipeline`).

Hooks time each layer. Embedding and head are what is left of their stages' actions, as a loss computed in chunks has no module. A
stage with both gives the embedding what hooks on it have seen: no backward, for token ids have no gradient.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch.utils.hooks import RemovableHandle

from framework.model.units import Unit
from framework.parallel.pipeline.simulate import ActionKind, Timed
from framework.train.profiler import UnitRanges, find_modules
from framework.train.step import TrainingRun

BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT)


class UnitClock:
    """Times the units of this rank in the step `step`; None: in none. units: the whole model's.

    On a GPU the clock waits for the device at each border of a unit, in this step alone.
    """

    def __init__(
        self,
        run: TrainingRun,
        units: Sequence[Unit],
        step: int | None,
        now: Callable[[], float] = time.perf_counter,
    ):
        self._run, self._units, self._step, self._clock = run, units, step, now
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self._hooks: list[RemovableHandle] = []

    def begin_step(self, step: int) -> Callable[[], float]:
        """Start to time before the step, or end behind it. Returns the clock of the step's actions."""
        for hook in self._hooks:
            hook.remove()
        is_on = step == self._step
        if is_on:  # once more, perhaps: a rewind takes steps back
            self._seconds.clear()
        modules = find_modules(self._run, self._units) if is_on else []
        self._hooks = [hook for name, each in modules for hook in UnitRanges(name, each, self._range).handles]
        return self._now if is_on else self._clock

    def measure(self, timed: Sequence[Timed]) -> dict[str, tuple[float, float]]:
        """Medians over microbatches of (forward, backward) of this rank's units. timed: the step's actions."""
        found: dict[str, tuple[float, float]] = {}
        for stage in self._run.stages.values():
            durations: dict[ActionKind, list[float]] = defaultdict(list)
            for each in timed:
                if each.action.stage == stage.model.bounds.index:
                    durations[each.action.kind].append(each.end - each.start)
            forward, *backwards = (_median(durations[kind]) for kind in (ActionKind.FORWARD, *BACKWARDS))
            # The hooks' backward is that of the input where a schedule leaves the weights for later.
            more = sum(backwards) / (sum(backwards[:2]) or 1.0)
            own = [unit for unit in self._units if stage.model.bounds.owns(unit)]
            count = len(durations[ActionKind.FORWARD])
            times = {
                unit.name: (self._of("forward", unit, count), more * self._of("backward", unit, count)) for unit in own
            }
            for end in [unit.name for unit in own if not unit.is_layer][-1:]:
                others = [each for name, each in times.items() if name != end]
                rest = forward - sum(each[0] for each in others), sum(backwards) - sum(each[1] for each in others)
                times[end] = max(rest[0], 0.0), max(rest[1], 0.0)
            found |= times
        return found

    def _of(self, what: str, unit: Unit, num_microbatches: int) -> float:
        """Seconds of all modules of a unit: an embedding may have several."""
        seconds = self._seconds[f"{what} of {unit.name}"]
        return _median(seconds) * len(seconds) / num_microbatches

    @contextmanager
    def _range(self, text: str) -> Iterator[None]:
        began = self._now()
        is_counted = text.startswith("backward") or torch.is_grad_enabled()  # not a validation's
        yield
        if is_counted:
            self._seconds[text].append(self._now() - began)

    def _now(self) -> float:
        if self._run.mesh.device.type == "cuda":
            torch.cuda.synchronize(self._run.mesh.device)
        return self._clock()


def _median(seconds: Sequence[float]) -> float:
    return median(seconds) if seconds else 0.0
