"""A validation: one pass over its microbatches on the weights of one moment, in the bubbles of a training step or by itself."""

from collections.abc import Iterable
from itertools import islice

import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.connect import Mesh
from framework.data.pack import Microbatch
from framework.model.loss import count_loss_tokens


class Validation:
    """Gives microbatches and collects what was found of them; every rank has the same number.

    The losses are added up in their order at the end, so it does not matter which of them ran where. num_taken: microbatches so
    far; num_free: those of them that ran in bubbles.
    """

    def __init__(self, microbatches: Iterable[Microbatch]):
        self._waiting = iter(microbatches)
        self._losses: list[Tensor] = []
        self._num_tokens: list[Tensor] = []
        self.num_taken = self.num_free = 0

    def take(self, most: int) -> list[Microbatch]:
        """The next ones; none at the end."""
        taken = list(islice(self._waiting, most))
        self.num_taken += len(taken)
        return taken

    def add(self, microbatches: Iterable[Microbatch], losses: Iterable[Tensor]) -> None:
        """Note the losses of microbatches: scalars, sums over the tokens of each; nothing on a rank without the last stage."""
        found = list(losses)
        self._losses += found
        if found:
            self._num_tokens += [count_loss_tokens(each.labels) for each in microbatches]

    def mean(self, mesh: Mesh) -> float:
        """The mean loss per token over all ranks' microbatches; collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
        if self._losses:
            sums[0] = torch.stack(self._losses).to(torch.float64).sum()
            sums[1] = torch.stack(self._num_tokens).sum()
        for name in ("batch", "pp"):
            all_reduce(sums, mesh.axis(name))
        return float(sums[0] / sums[1].clamp(min=1))

    @property
    def free_fraction(self) -> float:
        """Share of the microbatches that ran where ranks would have been idle."""
        return self.num_free / max(self.num_taken, 1)
