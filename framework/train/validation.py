"""A validation: one pass over its microbatches on the weights of one moment, in the bubbles of a training step or by itself."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.connect import Mesh
from framework.data.pack import Microbatch


@dataclass(frozen=True)
class ValidationLoss:
    """Mean losses per token, or pair, of all sources together and of each; None for a source without any."""

    mean: float
    by_source: tuple[float | None, ...]


class Validation:
    """Hands out microbatches and collects their losses; every rank has the same number of them.

    The losses are added up in their order at the end, so it does not matter which of them ran where. num_sources: of the
    microbatches, by `Microbatch.source`. num_taken: microbatches so far. num_free: microbatches that ran in bubbles.
    """

    def __init__(self, microbatches: Iterable[Microbatch], num_sources: int = 1):
        self._waiting = iter(microbatches)
        self._num_sources = num_sources
        self._sources: list[int] = []
        self._losses: list[Tensor] = []
        self._num_tokens: list[Tensor] = []
        self.num_taken = self.num_free = 0

    def take(self, most: int) -> list[Microbatch]:
        """The next ones; none at the end."""
        taken = list(islice(self._waiting, most))
        self.num_taken += len(taken)
        self._sources += [each.source for each in taken]
        return taken

    def add(self, losses: Sequence[Tensor], counts: Iterable[Tensor]) -> None:
        """Add the losses of microbatches, scalars, sums over the tokens of each, none on a rank without the last stage; and the
        numbers of these tokens."""
        self._losses += losses
        if losses:
            self._num_tokens += counts

    def means(self, mesh: Mesh) -> ValidationLoss:
        """The mean losses per token over all ranks' microbatches, of all sources and of each; collective."""
        sums = torch.zeros(2, self._num_sources, dtype=torch.float64, device=mesh.device)
        for number in sorted(set(self._sources)) if self._losses else ():
            own = [index for index, source in enumerate(self._sources) if source == number]
            sums[0, number] = torch.stack([self._losses[index] for index in own]).to(torch.float64).sum()
            sums[1, number] = torch.stack([self._num_tokens[index] for index in own]).sum()
        for name in ("batch", "pp"):
            all_reduce(sums, mesh.axis(name))
        losses, num_tokens = sums.tolist()
        by_source = [loss / count if count else None for loss, count in zip(losses, num_tokens, strict=True)]
        return ValidationLoss(sum(losses) / max(sum(num_tokens), 1.0), tuple(by_source))

    @property
    def free_fraction(self) -> float:
        """Share of the microbatches that ran where ranks would have been idle."""
        return self.num_free / max(self.num_taken, 1)
