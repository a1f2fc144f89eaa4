"""Evaluation of a run's weights on tasks, in the layout that trains: rows of documents whose scored tokens are labels go through
the pipeline's forwards behind those of a validation.

Documents share rows where the model keeps them apart, else each has a row of its own: no score depends on a document's
neighbours. Each is in one row of one dp rank, and log-probabilities are summed over its tokens wherever they lie, so every
layout has the scores of one process.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from framework.comm.connect import Mesh
from framework.comm.objects import broadcast_object
from framework.data.loader import batch_rows, keeps_any_documents_apart
from framework.data.pack import Microbatch, Mode, Packer
from framework.data.store import TokenStream
from framework.data.tasks import Task, keep_tasks, open_task, refuse_unknown_score
from framework.data.tokenize import read_info
from framework.plan.plan import Plan
from framework.train.step import TrainingRun, run_alone
from framework.train.validation import Validation

# Share of a rank's FLOPs that evaluations may take with eval.every_steps=auto.
MOST_SHARE = 0.01
# A forward is a third of a forward with its backward.
FORWARD_SHARE = 1 / 3


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


def evaluate(run: TrainingRun, plan: Plan, evaluation: Evaluation) -> dict[str, float]:
    """The scores of a run's weights by TASK/NAME, by forwards alone. Collective."""
    validation = Validation(evaluation.microbatches(plan, run.mesh))
    run_alone(run, validation)
    return evaluation.judge(validation, run.mesh)
