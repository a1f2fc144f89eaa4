"""One optimizer step, without a branch on parallelism: sizes of one take the same path."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.connect import Mesh
from framework.comm.transfer import upload, upload_values
from framework.data.pack import Microbatch
from framework.model.loss import TokenLoss, count_loss_tokens
from framework.model.materialize import accepted_arguments
from framework.model.stage import StageModel
from framework.optim.clip import clip_divisor, squared_norm
from framework.optim.optimizers import FlatOptimizer, Missed
from framework.parallel.pipeline.execute import ActivationSpec, Links, Tensors, execute
from framework.parallel.pipeline.pipeline import Pipeline
from framework.parallel.pipeline.simulate import Timed
from framework.parallel.zero.buffers import GradView, UnitBuffer
from framework.parallel.zero.exposed_communication import ExposedCommunication
from framework.parallel.zero.plan_buffers import Slot, Span
from framework.train.stage import Compute, Stage, StageOfStep
from framework.train.validation import Validation

# Microbatches that go through the pipeline together in a validation.
VALIDATION_MICROBATCHES = 64


@dataclass
class Run:
    """What a rank trains with. stages: this rank's, by number. spans: what each of the optimizer's flat tensors is of which
    buffer. copies: buffers of one parameter in two stages of this rank. numbers: of each trained parameter of the whole model.
    waits: for the collectives of parameters and gradients. loss: of logits, or of this rank's part of them. timed: what this
    rank did in its last step, by its host's clock."""

    stages: dict[int, Stage]
    pipeline: Pipeline
    optimizer: FlatOptimizer
    spans: list[tuple[UnitBuffer, Span]]
    copies: list[tuple[UnitBuffer, UnitBuffer]]
    numbers: dict[str, int]
    hidden: ActivationSpec
    waits: ExposedCommunication
    loss: TokenLoss
    mesh: Mesh
    clip_norm: float | None
    seed: int
    timed: tuple[Timed, ...] = ()

    @property
    def buffers(self) -> list[UnitBuffer]:
        return [buffer for stage in self.stages.values() for buffer in stage.buffers]


def train_step(
    run: Run,
    microbatches: Sequence[Microbatch],
    step: int,
    lr: float,
    votes: Sequence[float],
    validation: Validation | None = None,
) -> Tensor:
    """Forward, backward, reduce, clip, update.

    microbatches: this rank's share of the batch. votes: numbers of this rank that are summed over the world beside the loss,
    so that all ranks decide alike without a collective of their own. Returns fp64 [2 + len(votes)] on the device: the loss
    of the batch, the norm of its gradient before clipping, the summed votes. Nothing of ours here waits for the device; the
    model may (transformers asks in every forward whether positions restart).

    validation: of the weights as they are before the update: in the step's bubbles, and what they do not hold right before the
    update.
    """
    batch_axis = run.mesh.axis("batch")
    validation = validation or Validation(())
    inputs = [_to_device(microbatch, run.mesh.device) for microbatch in microbatches]
    filling = _take(run, validation, run.pipeline.room(len(inputs)))
    num_tokens = torch.stack([count_loss_tokens(each.labels) for each in inputs]).sum()
    all_reduce(num_tokens, batch_axis)
    num_microbatches = len(inputs) * batch_axis.size

    def compute(stage: Stage, index: int, received: Tensors) -> Tensors:
        seed = (run.seed, "dropout", step, index * batch_axis.size + batch_axis.rank)
        outputs = _forward(stage.model, received, inputs[index], seed)
        is_last = stage.model.bounds.is_last
        return (_loss(run, stage, outputs, inputs[index], num_tokens, num_microbatches),) if is_last else outputs

    for stage in run.stages.values():
        stage.gradients.start_step()
    losses, run.timed = _execute(run, inputs, filling, compute)
    validation.add(filling, losses[len(inputs) :])
    validation.num_free += len(filling)
    for stage in run.stages.values():
        stage.gradients.finish()
    run_alone(run, validation)
    for buffer, copy in run.copies:
        copy.reduced.copy_(buffer.reduced.add_(copy.reduced))
    own = losses[: len(inputs)]
    return _update(run, torch.stack(own).sum() if own else torch.zeros((), device=run.mesh.device), lr, votes)


def _execute(
    run: Run, inputs: Sequence[Microbatch], filling: Sequence[Microbatch], compute: Compute
) -> tuple[list[Tensor], tuple[Timed, ...]]:
    """The losses of `inputs`, to learn from, and of `filling`, for validation, if this rank has the last stage; and when what
    was done."""
    axis, everything = run.mesh.axis("pp"), [*inputs, *filling]
    lowered = run.pipeline.lowered(len(inputs), len(filling))
    links = Links(axis, lowered, run.hidden)
    evaluate_one = partial(_evaluate, run, everything)
    stages = {number: StageOfStep(stage, compute, evaluate_one) for number, stage in run.stages.items()}
    losses, timed = execute(lowered, axis.rank, stages, links)
    return [losses[index] for index in sorted(losses)], tuple(timed)


def _update(run: Run, loss: Tensor, lr: float, votes: Sequence[float]) -> Tensor:
    """Sum loss, norm, votes and what was reached over the world, then clip and step, unless they are not finite."""
    trained = (buffer for buffer in run.buffers if buffer.is_trained)
    counted = (elements for buffer in trained for elements in buffer.counted_elements(buffer.reduced))
    reached = [0.0] * len(run.numbers)
    for _, slot, place in _places(run):
        reached[run.numbers[slot.name]] += place.is_reached
    sums = upload_values([0.0, 0.0, *votes, *reached], torch.float64, run.mesh.device)
    sums[0] = loss / run.mesh.axis("tp").size  # all of them have it
    sums[1] = squared_norm(counted, run.mesh.device)
    all_reduce(sums, run.mesh.axis("world"))
    result, reached_anywhere = sums.split([2 + len(votes), len(reached)])
    result[1].sqrt_()
    divisor = clip_divisor(result[1], run.clip_norm)
    for stage in run.stages.values():
        stage.parameters.update()
    with run.optimizer.preserving(_missed_spans(run, reached_anywhere)):
        run.optimizer.step(lr, divisor, skip=~result[:2].isfinite().all())
    for buffer in run.buffers:
        buffer.copy_master_to_params()
    return result


def evaluate(run: Run, microbatches: Iterable[Microbatch]) -> float:
    """Mean loss per token over all ranks' microbatches, of which every rank has the same number; leaves no trace in training."""
    validation = Validation(microbatches)
    run_alone(run, validation)
    return validation.mean(run.mesh)


def run_alone(run: Run, validation: Validation) -> None:
    """Run what is left of a validation, forwards only."""
    while filling := _take(run, validation, VALIDATION_MICROBATCHES):
        validation.add(filling, _execute(run, (), filling, _learn_nothing)[0])


def _take(run: Run, validation: Validation, most: int) -> list[Microbatch]:
    return [_to_device(each, run.mesh.device) for each in validation.take(most)]


def _learn_nothing(stage: Stage, index: int, received: Tensors) -> Tensors:
    raise AssertionError(f"microbatch {index} is not to be learnt from")


def _evaluate(run: Run, inputs: Sequence[Microbatch], stage: Stage, index: int, received: Tensors) -> Tensors:
    """On the last stage the sum of the losses of the microbatch's tokens."""
    outputs = _forward(stage.model, received, inputs[index], None)
    if not stage.model.bounds.is_last:
        return outputs
    one = torch.ones((), dtype=torch.int64, device=run.mesh.device)
    return (run.loss(outputs[0].logits, inputs[index].labels, one),)


def _loss(
    run: Run, stage: Stage, outputs: Sequence[Any], inputs: Microbatch, num_tokens: Tensor, num_microbatches: int
) -> Tensor:
    """This microbatch's part of the batch's loss, with a router's balancing term averaged over the batch's microbatches."""
    output, *sums = outputs
    loss = run.loss(output.logits, inputs.labels, num_tokens)
    if stage.model.routers is not None:
        balance = stage.model.routers.balance
        loss = loss + balance.weight * balance.term(*sums) / num_microbatches
    return loss


def _forward(
    model: StageModel, received: Tensors, inputs: Microbatch, seed: tuple[int | str, ...] | None
) -> tuple[Any, ...]:
    """No cache and no mask: with either, packed positions would be ignored and documents would see one another. No balancing
    term of the model's own: it would be of the layers that are here."""
    positions = {} if inputs.position_ids is None else {"position_ids": inputs.position_ids}
    accepted = accepted_arguments(model.model)
    without = {name: False for name in ("use_cache", "output_router_logits") if name in accepted}
    return model(received, seed, input_ids=inputs.input_ids, **positions, **without)


def _to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    positions = microbatch.position_ids
    return Microbatch(
        upload(microbatch.input_ids, device),
        upload(microbatch.labels, device),
        None if positions is None else upload(positions, device),
    )


def _missed_spans(run: Run, reached_anywhere: Tensor) -> list[Missed]:
    """What this rank's own backward missed in this step, within the optimizer's tensors. Stock optimizers leave alone, decay
    included, what no rank's backward has reached: that is known on the device, and is not asked for."""
    missed = [(buffer, slot) for buffer, slot, place in _places(run) if not place.is_reached]
    return [
        Missed(
            index,
            max(slot.start, span.start) - span.start,
            min(slot.stop, span.stop) - span.start,
            reached_anywhere[run.numbers[slot.name]] > 0,
        )
        for index, (owner, span) in enumerate(run.spans)
        for buffer, slot in missed
        if owner is buffer and max(slot.start, span.start) < min(slot.stop, span.stop)
    ]


def _places(run: Run) -> Iterator[tuple[UnitBuffer, Slot, GradView]]:
    """Every trained parameter of this rank."""
    for stage in run.stages.values():
        yield from stage.gradients.grad_views
