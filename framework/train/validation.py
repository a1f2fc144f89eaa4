"""Validations, and evaluations on tasks: passes of forwards over the weights of one moment, in the layout that trains, in the
bubbles of a training step or by themselves.

Of an evaluation rows of documents, whose scored tokens are labels, come behind the microbatches of a validation. Documents share
rows where the model keeps them apart, else each has a row of its own: no score depends on a document's neighbours. Each is in one
row of one dp rank, and log-probabilities are summed over its tokens wherever they lie, so every layout has the scores of one
process.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.connect import Mesh
from framework.comm.objects import broadcast_object
from framework.data.loader import batch_rows, keeps_any_documents_apart
from framework.data.pack import Microbatch, Mode, Packer
from framework.data.store import TokenStream
from framework.data.tasks import Task, keep_tasks, open_task, refuse_unknown_score
from framework.data.tokenize import read_info
from framework.model.objective import Pairs
from framework.plan.plan import Plan
from framework.recipe.method_schema import NONE

# Share of a rank's FLOPs that evaluations may take with eval.every_steps=auto.
MOST_SHARE = 0.01
# A forward is a third of a forward with its backward.
FORWARD_SHARE = 1 / 3


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


@dataclass(frozen=True)
class Evaluation:
    """The tasks of a run. packer: of their documents in one stream; None without tasks. every_steps: between evaluations."""

    tasks: Sequence[Task] = ()
    packer: Packer | None = None
    every_steps: int = 1
    num_steps: int = 0

    def is_due(self, step: int) -> bool:
        """Whether the weights of this step are evaluated."""
        return bool(self.tasks) and (step % self.every_steps == 0 or step == self.num_steps)

    def microbatches(self, plan: Plan, mesh: Mesh) -> Iterator[Microbatch]:
        """The rows of this rank, in microbatches as those of training, as many on every rank."""
        if self.packer is not None:
            rows, dp = np.arange(self.packer.sizes[0]), mesh.axis("dp")
            size, slices = plan.derived.sequences_per_microbatch, plan.context_slices(mesh.rank)
            yield from batch_rows(self.packer, rows, size, dp.rank, dp.size, slices)

    def judge(self, validation: Validation, mesh: Mesh, of: str = "") -> dict[str, float]:
        """The scores by TASK/NAME after all microbatches have run, on all ranks; collective. of: begins the names."""
        ends = np.cumsum([len(task.ends) for task in self.tasks])
        found = validation.score_documents(mesh, int(ends[-1]))
        parts = np.split(found, ends[:-1], axis=1)
        return {
            f"{of}{task.name}/{name}": score
            for task, part in zip(self.tasks, parts, strict=True)
            for name, score in task.judge(*part).items()
        }


NO_EVALUATION = Evaluation()


def open_evaluation(plan: Plan, tokenizer: Path, mesh: Mesh) -> Evaluation:
    """The evaluation of a run. Rank 0 looks for the kept tokens, or makes them, and sends them: other nodes may see neither the
    tasks nor its folder. tokenizer: its folder. Collective."""
    recipe, settings = plan.recipe, plan.recipe.eval
    if not settings.tasks:
        return NO_EVALUATION

    def find() -> tuple[list[Task], int]:
        kept = keep_tasks(settings.tasks, tokenizer, recipe.batch.context)
        info = read_info(tokenizer)
        assert info is not None, f"a tokenizer in {tokenizer}"
        return [open_task(place).head(settings.limit) for place in kept], info.eos_id

    tasks, eos_id = broadcast_object(find, mesh.axis("world"))
    refuse_unknown_score(recipe.checkpoint.keep_best, tasks, settings.average)
    mode: Mode = "best_fit" if keeps_any_documents_apart(recipe, plan.config) else "alone"
    packer = pack_tasks(tasks, recipe.batch.context, mode, eos_id)
    every = settings.every_steps
    if every == "auto":
        every = find_rhythm(plan, packer.sizes[0] * (1 + settings.average))
    return Evaluation(tasks, packer, every, recipe.train.steps)


def find_rhythm(plan: Plan, num_rows: int) -> int:
    """Steps between evaluations of so many rows that take MOST_SHARE of the work of a rank."""
    derived = plan.derived
    # The microbatches of a rank, and those for which a pipeline of forwards alone fills and drains.
    microbatches = math.ceil(num_rows / derived.dp / derived.sequences_per_microbatch) + plan.recipe.parallel.pp - 1
    return max(1, math.ceil(FORWARD_SHARE * microbatches / derived.accumulation / MOST_SHARE))


def pack_tasks(tasks: Sequence[Task], context: int, mode: Mode, eos_id: int) -> Packer:
    """The packer of the documents of all tasks, one behind the other."""
    lengths = np.cumsum([0, *(len(task.tokens) for task in tasks)])
    ends = np.concatenate([task.ends + start for task, start in zip(tasks, lengths, strict=False)])
    tokens, scored = (np.concatenate([getattr(task, name) for task in tasks]) for name in ("tokens", "scored"))
    return Packer([TokenStream(tokens, ends, trained=scored)], context, mode, eos_id, "truncate", asks="documents")
