"""The seconds of one stage of a pipeline on one rank, summed up of its units by part."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from framework.model.stage import StageBounds
from framework.plan.candidate import Candidate
from framework.plan.exposure import Exposure
from framework.plan.operators import UnitWork, Work
from framework.plan.profile import Profile
from framework.plan.sharding import ShardedUnit, ShardingTime

Seconds = dict[str, float]


@dataclass(frozen=True, eq=False)
class StageForm:
    """A stage as far as its time depends on it. bounds: of the first such stage; layers: (kind, number of them), in order."""

    bounds: StageBounds
    layers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StageTime:
    """forward, input, weight: seconds of a microbatch's three passes, by part in `parts`, and in `hidden` by axis what messages
    take that computation hides. once, hidden_once: of a step, whatever the number of microbatches. owned: elements of
    parameters that the rank's optimizer updates."""

    forward: float
    input: float
    weight: float
    parts: Mapping[str, float]
    hidden: Mapping[str, float]
    once: Mapping[str, float]
    hidden_once: Mapping[str, float]
    owned: float

    @cached_property
    def microbatch(self) -> float:
        """Seconds of one microbatch."""
        return self.forward + self.input + self.weight

    @cached_property
    def after(self) -> float:
        """Seconds of what comes once."""
        return sum(self.once.values())


@dataclass(frozen=True)
class UnitTime:
    """A unit for one microbatch. exposures: of its messages, by axis. grouped: share of its forwards that run a second time to
    bring back the input of another layer (activation checkpointing by groups)."""

    work: UnitWork
    exposures: Mapping[str, Exposure] = field(default_factory=dict)
    grouped: float = 0.0

    @cached_property
    def again(self) -> Work:
        """What is computed once more."""
        return self.work.again + self.work.forward.times(self.grouped) if self.grouped else self.work.again

    @cached_property
    def forward(self) -> float:
        """Seconds of its forward."""
        return self.work.forward.total + sum(each.forward for each in self.exposures.values())

    @cached_property
    def input(self) -> float:
        """Seconds of its input gradient, and of what is computed once more for it."""
        messages = sum(each.backward + self.grouped * each.forward for each in self.exposures.values())
        return self.work.input.total + self.again.total + messages

    @property
    def weight(self) -> float:
        """Seconds of its weight gradients."""
        return self.work.weight.total

    @property
    def seconds(self) -> float:
        """All of these where no group of layers is computed again."""
        return self.work.total + sum([each.forward + each.backward for each in self.exposures.values()])


class StageSum:
    """A stage while its units are added."""

    def __init__(self) -> None:
        self._forward = self._input = self._weight = 0.0
        self._parts: Seconds = {}
        self._hidden: Seconds = {}
        self._units: list[ShardedUnit] = []

    def add(self, unit: UnitTime, count: int, elements: tuple[float, float], end: str = "") -> None:
        """So many equal units. elements: (dense, of experts) of one on a rank, before ZeRO; end: embedding or head, "" for
        layers."""
        work, again = unit.work, unit.again
        self._forward += count * unit.forward
        self._input += count * unit.input
        self._weight += count * unit.weight
        computed = work.forward + work.input + work.weight
        for name, seconds in (
            ("matmuls", computed.matmuls),
            ("attention", computed.attention),
            ("elementwise", computed.elementwise),
            ("recomputation", again.total),
            *((axis, each.forward * (1 + unit.grouped) + each.backward) for axis, each in unit.exposures.items()),
        ):
            self._parts[name] = self._parts.get(name, 0.0) + count * seconds
        for axis, each in unit.exposures.items():
            self._hidden[axis] = self._hidden.get(axis, 0.0) + count * each.hidden
        backward = unit.input + unit.weight
        self._units.append(ShardedUnit(*elements, unit.forward, backward, count, end == "embedding", end == "head"))

    @property
    def units(self) -> list[ShardedUnit]:
        """What ZeRO shards, in order of computation."""
        return self._units

    def conclude(self, sharding: ShardingTime, waits: float, profile: Profile, c: Candidate, experts: int) -> StageTime:
        """The stage with ZeRO's messages. waits: seconds for which a message to or from a neighbour holds the rank up; experts:
        ranks that shard experts."""
        bounds_s = profile.microbatch_s
        forward_gather, backward_gather = sharding.gathers
        hidden = self._hidden | {"shard": sharding.hidden}
        # What goes to the host and back is carried by copy engines.
        slowed = profile.stolen * sum(seconds for axis, seconds in hidden.items() if axis != "offload")
        slowed_once = profile.stolen * sharding.hidden_once
        # What a message slows is somewhere in forward and backward: a third and two.
        forward = self._forward + forward_gather + waits + bounds_s / 3 + slowed / 3
        inputs = self._input + backward_gather + sharding.reductions + waits + 2 * bounds_s / 3 + 2 * slowed / 3
        parts = self._parts | {
            "gathers": forward_gather + backward_gather,
            "reductions": sharding.reductions,
            "pp": 2 * waits,
            "contention": slowed,
            "host": bounds_s,
        }
        once = {
            "gathers": sharding.gathers_once,
            "reductions": sharding.reductions_once,
            "contention": slowed_once,
        }
        owned = sum(each.count * (each.dense / c.shard + each.experts / experts) for each in self._units)
        return StageTime(forward, inputs, self._weight, parts, hidden, once, {"shard": sharding.hidden_once}, owned)
