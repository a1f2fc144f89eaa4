"""The most that a rank holds at once: the bytes of its stages' activations at every moment of its schedule."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from framework.parallel.pipeline.lower import LiveMoment


class StageActivations(NamedTuple):
    """Bytes of a stage. Of each microbatch between its forward and its backward: kept by its layers, by what stands behind them
    (head) and of logits; left, where gradients of weights wait: the factors of those. While it computes: recomputed and
    transient, of one layer in backward; chunk, of the loss. hidden: of hidden states between two stages."""

    kept: int
    head: int
    logits: int
    left: int
    recomputed: int
    transient: int
    chunk: int
    hidden: int = 0


class Peak(NamedTuple):
    """The bytes of a rank at one moment: activations, recomputed ones included, logits, what is there beside them, and hidden
    states between stages."""

    activations: int = 0
    logits: int = 0
    beside: int = 0
    between: int = 0

    @property
    def total(self) -> int:
        """All."""
        return sum(self)


@dataclass(frozen=True, eq=False)
class MomentTable:
    """Moments of a rank's step as arrays, which many sizes of the same stages are asked of. stages: their indices; forwards,
    backwards: places of the moments of either kind; own: the place among `stages` of each moment's; whole, left: [moments,
    stages], as in `LiveMoment.live`; between: [moments], hidden states between stages."""

    stages: tuple[int, ...]
    forwards: np.ndarray
    backwards: np.ndarray
    own: np.ndarray
    whole: np.ndarray
    left: np.ndarray
    between: np.ndarray

    @classmethod
    def of(cls, moments: Iterable[LiveMoment]) -> "MomentTable":
        """Those of one rank."""
        listed = list(moments)
        stages = tuple(index for index, _, _ in listed[0].live)
        forward = np.array([each.is_forward for each in listed])
        live = np.array([[counts[1:] for counts in each.live] for each in listed], dtype=np.int64)
        own = np.array([stages.index(each.stage) for each in listed])
        between = np.array([each.between for each in listed], dtype=np.int64)
        kinds = np.flatnonzero(forward), np.flatnonzero(~forward)
        return cls(stages, *kinds, own, live[:, :, 0], live[:, :, 1], between)

    def covers(self, other: "MomentTable") -> bool:
        """Whether at each moment of another rank with equal stages this one has at least as much at a moment of its own."""
        own, theirs = self._numbers, other._numbers
        as_much = np.all(own[None, :, :] >= theirs[:, None, :], axis=2)
        return bool(np.all(np.any(as_much, axis=1)))

    @cached_property
    def _numbers(self) -> np.ndarray:
        """[moments, numbers]: what is compared of a moment. Its kind and its stage have to be the same: a one at a place of
        theirs, zeros elsewhere."""
        kinds = np.zeros((len(self.own), 2 * len(self.stages)), dtype=np.int64)
        kinds[self.forwards, 2 * self.own[self.forwards]] = 1
        kinds[self.backwards, 2 * self.own[self.backwards] + 1] = 1
        return np.hstack([kinds, self.whole, self.left, self.between[:, None]])

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


def find_peaks(moments: Iterable[LiveMoment], stages: Mapping[int, StageActivations]) -> dict[str, Peak]:
    """The most that a rank has in `forward`, `loss` and `backward` of its stages, which are given by index."""
    return MomentTable.of(moments).find_peaks(stages)
