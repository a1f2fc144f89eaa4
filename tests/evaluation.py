"""A validation all at once, between steps, as tests ask for one."""

from collections.abc import Iterable

from framework.data.pack import Microbatch
from framework.train.step import TrainingRun, run_alone
from framework.train.validation import Validation


def evaluate(run: TrainingRun, microbatches: Iterable[Microbatch]) -> float:
    """Mean loss per token over all ranks' microbatches, of which every rank has the same number; leaves no trace in training."""
    validation = Validation(microbatches)
    run_alone(run, validation)
    return validation.means(run.mesh).mean
