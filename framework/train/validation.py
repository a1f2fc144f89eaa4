"""A validation: one pass over its microbatches on the weights of one moment, in the bubbles of a training step or by itself."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.connect import Mesh
from framework.data.pack import Microbatch
from framework.model.objective import Pairs
from framework.recipe.method_schema import NONE


@dataclass(frozen=True)
class ValidationLoss:
    """Mean losses per token, or pair, of all sources together and of each; None for a source without any."""

    mean: float
    by_source: tuple[float | None, ...]


@dataclass(frozen=True)
class Validated:
    """All that was found about one step's weights. loss: None where there was no validation. free_fraction: share of the
    microbatches that ran in bubbles. scores: on tasks, by TASK/NAME. average: validation loss of the average of the weights."""

    loss: ValidationLoss | None = None
    free_fraction: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    average: float | None = None


NOT_VALIDATED = Validated()


class Validation:
    """Hands out microbatches and collects their losses; every rank has the same number of them. Microbatches of an evaluation,
    whose documents are scored, come behind those with losses.

    The losses are added up in their order at the end, so it does not matter which of them ran where. num_sources: of the
    microbatches, by `Microbatch.source`. num_taken: microbatches so far. num_free: microbatches that ran in bubbles.
    """

    def __init__(self, microbatches: Iterable[Microbatch], num_sources: int = 1):
        self._waiting = iter(microbatches)
        self._num_sources = num_sources
        self._sources: list[int] = []
        self._losses: list[Tensor] = []
        self._num_tokens: list[Tensor] = []
        self._documents: list[Pairs] = []
        self._scores: list[Tensor] = []
        self.num_taken = self.num_free = 0

    def take(self, most: int) -> list[Microbatch]:
        """The next ones; none at the end."""
        taken = list(islice(self._waiting, most))
        self.num_taken += len(taken)
        for each in taken:
            if each.asks == "loss":
                self._sources.append(each.source)
            else:
                assert each.pairs is not None, "rows of documents"
                self._documents.append(each.pairs)
        return taken

    def add(
        self,
        microbatches: Sequence[Microbatch],
        results: Sequence[Tensor],
        count: Callable[[Tensor, Pairs | None], Tensor],
    ) -> None:
        """Add the results of microbatches: losses, sums over the units that `count` counts, or scores of documents, [2, b, S].
        None on a rank without the last stage."""
        for each, result in zip(microbatches, results, strict=bool(results)):
            if each.asks == "loss":
                self._losses.append(result)
                self._num_tokens.append(count(each.labels, each.pairs))
            else:
                self._scores.append(result)

    @property
    def has_losses(self) -> bool:
        """Whether any microbatch had a loss: the same answer on all ranks."""
        return bool(self._sources)

    @property
    def has_documents(self) -> bool:
        """The same of documents to score."""
        return bool(self._documents)

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

    def score_documents(self, mesh: Mesh, num_documents: int) -> np.ndarray:
        """The log-probability of each document of an evaluation, and how many of its labels are not the likeliest token: fp64
        [2, num_documents], on all ranks; collective. 0 for a document that no row has."""
        found = np.zeros((2, num_documents))
        for documents, scores in zip(self._documents, self._scores, strict=bool(self._scores)):
            is_there = (documents.kinds != NONE).numpy()
            found[:, documents.numbers.numpy()[is_there]] = scores.to(torch.float64).cpu().numpy()[:, is_there]
        sums = torch.from_numpy(found).to(mesh.device)
        for name in ("dp", "pp"):  # ranks of cp have sums over its tokens
            all_reduce(sums, mesh.axis(name), label="scores of documents")
        return sums.cpu().numpy()

    @property
    def free_fraction(self) -> float:
        """Share of the microbatches that ran where ranks would have been idle."""
        return self.num_free / max(self.num_taken, 1)
