"""Profiles of some steps of some ranks: torch's profiler, with ranges named by unit, action and collective; and a clock of units.

    RUN/profile/rank-0.json.gz        a Chrome trace: ui.perfetto.dev, chrome://tracing
    RUN/profile/rank-0.txt            operators by the time they took
    RUN/profile/rank-0.memory.pickle  on GPUs, the allocator's history: docs.pytorch.org/memory_viz

Actions and collectives name themselves while a profiler records (`Communicator.range`). Units are named here, by hooks that are
there for these steps only.

By the seconds of units' forwards and backwards in one step a pipeline can be split (pipeline/pipeline.py). Hooks time each layer.
Embedding and head are what is left of their stages' actions, as a loss computed in chunks has no module. A stage with both gives
the embedding what hooks on it have seen: no backward, for token ids have no gradient.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from framework.lease import Lease
from framework.model.units import Unit
from framework.parallel.pipeline.simulate import ActionKind, Timed
from framework.recipe.schema import Track
from framework.torch_private import dump_memory_history, record_memory_history
from framework.train.step import TrainingRun

FOLDER = "profile"
OPERATORS_SHOWN = 60
BACKWARDS = (ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT)


class StepProfiler:
    """Records the steps of `track.profile_steps` on a rank of `track.profile_ranks`; on other ranks it does nothing.

    units: the whole model's. lease: of the run into which the trace is written. say: prints where it lies.
    """

    def __init__(self, run: TrainingRun, units: Sequence[Unit], track: Track, lease: Lease, say: Callable[[str], None]):
        self._run, self._units, self._lease, self._say = run, units, lease, say
        is_chosen = track.profile_steps is not None and run.mesh.rank in track.profile_ranks
        self._steps = track.profile_steps if is_chosen else None
        self._profile: profile | None = None
        self._hooks: list[RemovableHandle] = []
        self._is_on_gpu = run.mesh.device.type == "cuda"

    def begin_step(self, step: int) -> None:
        """Start to record, or end, before this step."""
        if self._steps is None:
            return
        first, last = self._steps
        if self._profile is None and first <= step <= last:
            self._start()
        elif self._profile is not None and step > last:
            self.close()

    def close(self) -> None:
        """Write the recorded steps, if there are any."""
        recorded, self._profile, self._steps = self._profile, None, None
        if recorded is None:
            return
        recorded.stop()
        self._name_ranges(False)
        self._lease.check()
        folder = self._lease.run / FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"rank-{self._run.mesh.rank}"
        with self._lease.replacing(Path(f"{path}.json.gz")) as made:
            recorded.export_chrome_trace(str(made))
        by = "self_device_time_total" if self._is_on_gpu else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=by, row_limit=OPERATORS_SHOWN, max_name_column_width=60)
        self._lease.write(Path(f"{path}.txt"), table.encode())
        if self._is_on_gpu:
            with self._lease.replacing(Path(f"{path}.memory.pickle")) as made:
                dump_memory_history(str(made))
            record_memory_history(False)
        self._say(f"profile: {path}.json.gz (ui.perfetto.dev), {path}.txt")

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._is_on_gpu else [])]
        self._profile = profile(activities=activities, profile_memory=True)
        if self._is_on_gpu:
            record_memory_history(True)
        self._name_ranges(True)
        self._profile.start()

    def _name_ranges(self, is_on: bool) -> None:
        for axis in self._run.mesh.axes.values():
            axis.names_ranges = is_on
        for hook in self._hooks:
            hook.remove()
        modules = find_modules(self._run, self._units) if is_on else []
        self._hooks = [hook for name, module in modules for hook in UnitRanges(name, module).handles]


def find_modules(run: TrainingRun, units: Sequence[Unit]) -> list[tuple[str, nn.Module]]:
    """(unit, module) of this rank's stages: a layer as a whole, elsewhere the modules that hold its parameters."""
    owned = (
        (stage.model.model, unit) for stage in run.stages.values() for unit in units if stage.model.bounds.owns(unit)
    )
    return [
        (unit.name, module)
        for model, unit in owned
        for module in map(model.get_submodule, [unit.root] if unit.is_layer else unit.modules)
        if unit.is_layer or any(True for _ in module.parameters(recurse=False))
    ]


class UnitRanges:
    """Hooks that name the forward of a module, and its backward: from the gradient of its output to that of its input.

    make: a context for each of them, of its name. They are opened and closed by one thread each: autograd has its own on GPUs.
    is_ended: `end` is called behind each backward, perhaps by another thread, so that also one is named that comes to no gradient
    of an input, as above frozen units."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        make: Callable[[str], AbstractContextManager[Any]] = record_function,
        is_ended: bool = False,
    ):
        self._name, self._make, self._is_ended = name, make, is_ended
        self._open: dict[str, Any] = {}
        self._has_end = False
        self.handles = (
            module.register_forward_pre_hook(self.before_forward, with_kwargs=True),
            module.register_forward_hook(self.after_forward, always_call=True),
        )

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._begin("forward")
        inputs = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.requires_grad]
        self._has_end = bool(inputs) and torch.is_grad_enabled()
        for tensor in inputs if self._has_end else ():
            tensor.register_hook(lambda gradient: self._end("backward"))

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        self._end("forward")
        first = output[0] if isinstance(output, tuple) else output
        # Without a gradient of an input, as of token ids, no hook would end the backward's range.
        if isinstance(first, Tensor) and first.requires_grad and (self._has_end or self._is_ended):
            first.register_hook(lambda gradient: self._begin("backward"))

    def end(self) -> None:
        """End what is under way."""
        for what in list(self._open):
            self._end(what)

    def _begin(self, what: str) -> None:
        self._end(what)  # of a call that an error has left
        self._open[what] = self._make(f"{what} of {self._name}")
        self._open[what].__enter__()

    def _end(self, what: str) -> None:
        if what in self._open:
            self._open.pop(what).__exit__(None, None, None)


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
        self._ranges: list[UnitRanges] = []

    def begin_step(self, step: int) -> Callable[[], float]:
        """Start to time before the step, or end behind it. Returns the clock of the step's actions."""
        for hook in chain.from_iterable(each.handles for each in self._ranges):
            hook.remove()
        is_on = step == self._step
        if is_on:  # once more, perhaps: a rewind takes steps back
            self._seconds.clear()
        modules = find_modules(self._run, self._units) if is_on else []
        # Below the first trained layer no backward goes on: that layer's ends with its action.
        self._ranges = [UnitRanges(name, each, self._range, name.startswith("layers.")) for name, each in modules]
        return self._end_ranges if is_on else self._clock

    def measure(self, timed: Sequence[Timed]) -> dict[str, tuple[float, float]]:
        """Medians over microbatches of (forward, backward) of this rank's units. timed: the step's actions."""
        found: dict[str, tuple[float, float]] = {}
        for stage in self._run.stages.values():
            forwards, seen, whole = list[float](), dict[int, float](), defaultdict[int, float](float)
            own_actions = [each for each in timed if each.action.stage == stage.model.bounds.index]
            for (_, kind, microbatch), seconds in [(each.action, each.end - each.start) for each in own_actions]:
                if kind is ActionKind.FORWARD:
                    forwards.append(seconds)
                elif kind in BACKWARDS:
                    whole[microbatch] += seconds
                    seen.setdefault(microbatch, seconds)  # of B or I; W comes later
            # The hooks' backward is that of the input where a schedule leaves the weights for later, of some microbatches or all.
            more = [whole[microbatch] / (seconds or 1.0) for microbatch, seconds in seen.items()]
            own = [unit for unit in self._units if stage.model.bounds.owns(unit)]
            times = {
                unit.name: (self._of("forward", unit, [1.0] * len(forwards)), self._of("backward", unit, more))
                for unit in own
            }
            forward, backward = _median(forwards), _median([*whole.values()])
            for end in [unit.name for unit in own if not unit.is_layer][-1:]:
                others = [each for name, each in times.items() if name != end]
                rest = forward - sum(each[0] for each in others), backward - sum(each[1] for each in others)
                times[end] = max(rest[0], 0.0), max(rest[1], 0.0)
            found |= times
        return found

    def _of(self, what: str, unit: Unit, factors: Sequence[float]) -> float:
        """Seconds of all modules of a unit: an embedding may have several. factors: by microbatch, in the order of `what`."""
        seconds = self._seconds[f"{what} of {unit.name}"]
        scaled = [each * factors[at * len(factors) // len(seconds)] for at, each in enumerate(seconds)]
        return _median(scaled) * len(seconds) / len(factors)

    @contextmanager
    def _range(self, text: str) -> Iterator[None]:
        began = self._now()
        is_counted = text.startswith("backward") or torch.is_grad_enabled()  # not a validation's
        yield
        if is_counted:
            self._seconds[text].append(self._now() - began)

    def _end_ranges(self) -> float:
        """The time at a border of actions, where all units' ranges have ended."""
        for each in self._ranges:
            each.end()
        return self._now()

    def _now(self) -> float:
        if self._run.mesh.device.type == "cuda":
            torch.cuda.synchronize(self._run.mesh.device)
        return self._clock()


def _median(seconds: Sequence[float]) -> float:
    return median(seconds) if seconds else 0.0
