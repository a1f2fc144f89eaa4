"""The most activations that a rank holds at once: the moments of its schedule, and the bytes of its stages at each of them.

For a search the schedule is as short as may be: a few microbatches, of which a rank has as many in flight at once as of all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from framework.parallel.pipeline.lower import LiveMoment, live_moments, lower
from framework.parallel.pipeline.schedules import make_schedule
from framework.parallel.pipeline.simulate import Costs


class StageActivations(NamedTuple):
    """Bytes of a stage's activations."""

    # Bytes of each microbatch between forward and backward: kept by layers, kept behind them, logits.
    kept: int
    head: int
    logits: int
    # Factors of deferred weight gradients, for each microbatch that has some.
    left: int
    # While one layer computes in backward.
    recomputed: int
    transient: int
    # While a chunk of the loss is computed.
    chunk: int
    # Hidden states between two stages.
    hidden: int = 0


class Peak(NamedTuple):
    """Bytes of a rank at one moment: activations (recomputed ones included), logits, transients, hidden states between stages."""

    activations: int = 0
    logits: int = 0
    beside: int = 0
    between: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self)


@dataclass(frozen=True, eq=False)
class MomentTable:
    """Moments of a rank's step as arrays, from which peaks for many sizes of the same stages follow."""

    # Indices of the rank's stages.
    stages: tuple[int, ...]
    # Positions of the moments of forwards and of backwards.
    forwards: np.ndarray
    backwards: np.ndarray
    # [moments]: the position in `stages` of the stage that computes.
    own: np.ndarray
    # [moments, stages], as in `LiveMoment.live`.
    whole: np.ndarray
    left: np.ndarray
    # [moments]: hidden states between stages.
    between: np.ndarray

    @classmethod
    def of(cls, moments: Sequence[LiveMoment]) -> "MomentTable":
        """Tabulate the moments of one rank."""
        listed = list(moments)
        stages = tuple(index for index, _, _ in listed[0].live)
        forward = np.array([each.is_forward for each in listed])
        live = np.array([[counts[1:] for counts in each.live] for each in listed], dtype=np.int64)
        own = np.array([stages.index(each.stage) for each in listed])
        between = np.array([each.between for each in listed], dtype=np.int64)
        kinds = np.flatnonzero(forward), np.flatnonzero(~forward)
        return cls(stages, *kinds, own, live[:, :, 0], live[:, :, 1], between)

    def find_peaks(self, stages: Mapping[int, StageActivations]) -> dict[str, Peak]:
        """The most that the rank has in `forward`, `loss` and `backward` of its stages, which are given by index."""
        sizes = np.array([stages[index] for index in self.stages], dtype=np.int64)
        of = {name: sizes[:, place] for place, name in enumerate(StageActivations._fields)}
        kept = self.whole @ (of["kept"] + of["head"]) + self.left @ of["left"]
        logits, own, nothing = self.whole @ of["logits"], self.own, np.zeros_like(kept)
        between = self.between * of["hidden"][own]
        # In forward they are not there yet, in the backward of layers they have gone.
        before, logits_before = kept - of["head"][own], logits - of["logits"][own]
        ends = self.forwards[of["head"][own][self.forwards] > 0]
        return {
            "forward": _largest(self.forwards, before, logits_before, nothing, between),
            "loss": _largest(ends, kept, logits, of["chunk"][own], between),
            "backward": _largest(
                self.backwards, before + of["recomputed"][own], logits_before, of["transient"][own], between
            ),
        }


def _largest(places: np.ndarray, *kinds: np.ndarray) -> Peak:
    """The first of the largest among the moments at these places."""
    if not len(places):
        return Peak()
    place = places[np.argmax(np.sum(kinds, axis=0)[places])]
    return Peak(*(int(each[place]) for each in kinds))


def representative(schedule: str, pp: int, accumulation: int) -> int:
    """The fewest microbatches, of those that are known to do, with which a rank has as many in flight at once as with so many."""
    if schedule == "gpipe":
        return accumulation
    if schedule != "interleaved":
        # From here on each more only repeats: of a V both halves have to be full.
        return min(accumulation, {"zbv": 2 * pp, "dualpipe_v": 2 * pp + 1}.get(schedule, pp + 1))
    # Groups of pp and, first, so many of pp + 1 as the division leaves over: beyond them the same comes again.
    groups, longer = divmod(accumulation, pp)
    most = max(4, longer + 2) if longer else 3
    return most * pp + longer if groups > most else accumulation


def make_moments(
    schedule: str, pp: int, virtual: int, accumulation: int, costs: Costs
) -> Callable[[int], list[LiveMoment]]:
    """A function from a rank to its moments. costs: of each stage, by which messages are ordered."""
    few = min(accumulation, 4 * pp) if schedule == "gpipe" else representative(schedule, pp, accumulation)
    lowered = lower(make_schedule(schedule, pp, few, virtual), costs)

    def make(rank: int) -> list[LiveMoment]:
        own = _undominated(live_moments(lowered, rank))
        if few == accumulation or schedule != "gpipe":
            return own
        # All are in flight at once: with each one more there is one more of them, and one more that was sent.
        return [_with_more(each, accumulation - few, rank < pp - 1) for each in own if each.live[0][1] == few]

    return make


def _with_more(moment: LiveMoment, count: int, sends: bool) -> LiveMoment:
    ((stage, whole, waiting),) = moment.live
    between = moment.between + count * (moment.is_forward and sends)
    return moment._replace(live=((stage, whole + count, waiting),), between=between)


def _undominated(moments: Sequence[LiveMoment]) -> list[LiveMoment]:
    kept: dict[tuple[bool, int], list[LiveMoment]] = {}
    for each in sorted(moments, key=lambda each: -sum(whole + left for _, whole, left in each.live)):
        others = kept.setdefault((each.is_forward, each.stage), [])
        if not any(_has_as_much(other, each) for other in others):
            others.append(each)
    return [each for group in kept.values() for each in group]


def _has_as_much(one: LiveMoment, other: LiveMoment) -> bool:
    """A microbatch in flight keeps its hidden states at least, so it stands for one between stages as well."""
    pairs = list(zip(one.live, other.live, strict=True))
    more = sum(a[1] - b[1] for a, b in pairs)
    return one.between + more >= other.between and all(a[1] >= b[1] and a[2] >= b[2] for a, b in pairs)
