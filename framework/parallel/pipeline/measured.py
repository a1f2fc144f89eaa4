"""The split of a pipeline by measured seconds of units, in place of their FLOPs.

The step track.timeline_step of any run writes RUN/units.json: seconds of the forward and of the whole backward of embedding,
layers and head, of one microbatch. They tell what FLOPs do not: how fast a mixer's recurrence is on this machine, a mixture's
grouped matmul, a loss over a large vocabulary.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import permutations
from math import isfinite
from pathlib import Path
from typing import Any

from framework.errors import RecipeError
from framework.model.stage import StageBounds
from framework.parallel.pipeline.simulate import Costs
from framework.recipe.schema import Run

UNITS_FILE = "units.json"
# Splits that are simulated at the most, some milliseconds each.
MOST = 2000


@dataclass(frozen=True)
class UnitTimes:
    """Seconds of each unit with one microbatch, by name. source: the file, as the recipe names it."""

    source: str
    forward: Mapping[str, float]
    backward: Mapping[str, float]

    @property
    def layers(self) -> list[float]:
        """Seconds of each layer, forward and backward."""
        return [self.forward[name] + self.backward[name] for name in self.forward if name.startswith("layers.")]

    @property
    def ends(self) -> tuple[float, float]:
        """Seconds of the embedding and of the head, forward and backward."""
        first, last = (self.forward.get(name, 0.0) + self.backward.get(name, 0.0) for name in ("embedding", "head"))
        return first, last

    def of_stages(self, stages: Sequence[StageBounds]) -> Costs:
        """Costs of stages. Of a backward that a schedule divides, input and weights are taken to be a half each."""
        forward, backward = (
            [
                sum(times[f"layers.{number}"] for number in range(each.start, each.stop))
                + times.get("embedding", 0.0) * each.is_first
                + times.get("head", 0.0) * each.is_last
                for each in stages
            ]
            for times in (self.forward, self.backward)
        )
        # Both halves have as many matmuls; hooks, which see only the input's gradient, cannot time them apart.
        half = [seconds / 2 for seconds in backward]
        return Costs(forward, half, half)


def encode_unit_times(model: str, numel: int, units: Mapping[str, tuple[float, float]]) -> bytes:
    """The file's text. model, numel: by which another one is told; units: (forward, backward) seconds."""
    return f"{json.dumps({'model': model, 'parameters': numel, 'units': units}, indent=1)}\n".encode()


def read_unit_times(named: str, model: str, numel: int, names: Sequence[str]) -> UnitTimes:
    """Read the times of a run, or of a file. names: the units of this model, in order. Raises RecipeError for another model's."""
    key, path = f"pipeline.layers={named}", Path(named).expanduser()
    if not path.exists() and len(path.parts) == 1:
        path = Path(Run().root) / path  # a run's id
    path = path / UNITS_FILE if path.is_dir() else path
    way = "train a few steps of this model with track.timeline_step=5, or set pipeline.layers=null, to cut by FLOPs"
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        units = {name: tuple(map(float, times)) for name, times in found["units"].items()}
        measured, size = str(found["model"]), int(found["parameters"])
    except OSError as error:
        raise RecipeError(f"{key}: {path} cannot be read ({error.strerror}): {way}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(f"{key}: {path} is no file of unit times: {way}") from error
    # Layers are compared by number and the model by its size: a unit's name alone would take any model of as many layers.
    if (measured, size, sorted(units)) != (model, numel, sorted(names)):
        raise RecipeError(
            f"{key} has measured another model, {measured} with {size:,} parameters in {len(units)} units; this one is {model}"
            f" with {numel:,} in {len(names)}: {way}"
        )
    if any(len(each) != 2 or not all(isfinite(s) and s >= 0 for s in each) for each in units.values()):
        raise RecipeError(f"{key}: {path} has times that are no pairs of seconds: {way}")
    return UnitTimes(named, *({name: units[name][place] for name in names} for place in (0, 1)))


def fastest_split(
    starts: Sequence[tuple[int, ...]], length_of: Callable[[tuple[int, ...]], float], most: int = MOST
) -> tuple[int, ...]:
    """Layers of each stage, at least one, with which a step is shortest; of equals the one that is found first.

    Best first: from the shortest known split one layer is moved between any two stages, and so on until all splits are known, or
    `most`. starts: splits of all layers to begin with. length_of: a step of a split.
    """
    # Greedy descent stops where no single move helps: of some V schedules 6% above the best bubble. Going on from the next best
    # found the best of all that were enumerated.
    known = {split: length_of(split) for split in starts}
    waiting = [(length, split) for split, length in known.items()]
    heapify(waiting)
    while waiting and len(known) < most:
        for split in _moves(heappop(waiting)[1]):
            if split not in known:
                known[split] = length_of(split)
                heappush(waiting, (known[split], split))
    return min(known, key=lambda split: known[split])


def _moves(split: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for source, target in permutations(range(len(split)), 2):
        if split[source] > 1:
            yield tuple(count + (stage == target) - (stage == source) for stage, count in enumerate(split))
