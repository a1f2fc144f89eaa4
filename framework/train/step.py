"""One optimizer step, without a branch on parallelism: sizes of one take the same path."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from framework.comm.collectives import all_reduce
from framework.data.pack import Microbatch
from framework.mesh.connect import Mesh
from framework.model.loss import count_loss_tokens, token_loss
from framework.model.materialize import accepted_arguments, seed_for
from framework.optim.clip import clip_divisor, squared_norm
from framework.optim.optimizers import FlatOptimizer
from framework.parallel.pipeline.execute import execute
from framework.parallel.pipeline.schedules import make_schedule
from framework.parallel.zero.buffers import Span, UnitBuffer
from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.hooks import UnitHooks
from framework.parallel.zero.parameters import ParameterSync
from framework.parallel.zero.waits import Waits


@dataclass
class Run:
    """What a rank trains with. `spans`: what each of the optimizer's flat tensors is of which buffer; `waits`: for the
    collectives of parameters and gradients."""

    model: PreTrainedModel
    buffers: list[UnitBuffer]
    parameters: ParameterSync
    gradients: GradientSync
    hooks: UnitHooks
    optimizer: FlatOptimizer
    spans: list[tuple[UnitBuffer, Span]]
    waits: Waits
    mesh: Mesh
    clip_norm: float | None
    seed: int


def train_step(run: Run, microbatches: Sequence[Microbatch], step: int, lr: float, votes: Sequence[float]) -> Tensor:
    """Forward, backward, reduce, clip, update.

    microbatches: this rank's share of the batch. votes: numbers of this rank that are summed over the world beside the loss,
    so that all ranks decide alike without a collective of their own. Returns fp64 [2 + len(votes)] on the device: the loss
    of the batch, the norm of its gradient before clipping, the summed votes. Nothing here waits for the device.
    """
    batch_axis = run.mesh.axis("batch")
    inputs = [_to_device(microbatch, run.mesh.device) for microbatch in microbatches]
    num_tokens = torch.stack([count_loss_tokens(each.labels) for each in inputs]).sum()
    all_reduce(num_tokens, batch_axis)
    num_microbatches = len(inputs) * batch_axis.size
    schedule = make_schedule("1f1b", run.mesh.topology.pp, len(inputs))
    run.model.train()
    run.gradients.start_step()

    def forward(index: int) -> Tensor:
        torch.manual_seed(seed_for(run.seed, "dropout", step, index * batch_axis.size + batch_axis.rank))
        return _loss(run.model, inputs[index], num_tokens, num_microbatches)

    def backward(loss: Tensor, is_last: bool) -> None:
        run.gradients.start_backward(is_last)
        loss.backward()
        run.hooks.end_backward()

    losses = execute(schedule.actions[run.mesh.axis("pp").rank], forward, backward)
    run.gradients.finish()
    return _update(run, torch.stack(losses).sum(), lr, votes)


def _update(run: Run, loss: Tensor, lr: float, votes: Sequence[float]) -> Tensor:
    """Sum loss, norm, votes and what was reached over the world, then clip and step, unless they are not finite."""
    counted = (buffer.counted_elements(buffer.reduced) for buffer in run.buffers if buffer.is_trained)
    reached = [float(place.is_reached) for _, _, place in run.gradients.places]
    sums = torch.tensor([0.0, 0.0, *votes, *reached], dtype=torch.float64, device=run.mesh.device)
    sums[0] = loss
    sums[1] = squared_norm(counted, run.mesh.device)
    all_reduce(sums, run.mesh.axis("world"))
    result, reached_anywhere = sums.split([2 + len(votes), len(reached)])
    result[1].sqrt_()
    divisor = clip_divisor(result[1], run.clip_norm)
    run.parameters.update()
    with run.optimizer.preserving(_unreached_spans(run, reached_anywhere)):
        run.optimizer.step(lr, divisor, skip=~result[:2].isfinite().all())
    for buffer in run.buffers:
        buffer.publish()
    return result


@torch.no_grad()
def evaluate(run: Run, microbatches: Iterable[Microbatch]) -> float:
    """Mean loss per token over all ranks' microbatches, of which every rank has the same number; leaves no trace in training."""
    run.model.eval()
    one = torch.ones((), dtype=torch.int64, device=run.mesh.device)
    sums = torch.zeros(2, dtype=torch.float64, device=run.mesh.device)
    for microbatch in microbatches:
        each = _to_device(microbatch, run.mesh.device)
        sums[0] += token_loss(_forward(run.model, each).logits, each.labels, one)
        sums[1] += count_loss_tokens(each.labels)
    all_reduce(sums, run.mesh.axis("batch"))
    return float(sums[0] / sums[1].clamp(min=1))


def _loss(model: PreTrainedModel, inputs: Microbatch, num_tokens: Tensor, num_microbatches: int) -> Tensor:
    """This microbatch's part of the batch's loss, with a router's balancing term averaged over the batch's microbatches."""
    output = _forward(model, inputs)
    loss = token_loss(output.logits, inputs.labels, num_tokens)
    balance = getattr(output, "aux_loss", None)
    if balance is not None and getattr(model.config, "output_router_logits", False):
        loss = loss + model.config.router_aux_loss_coef * balance / num_microbatches
    return loss


def _forward(model: PreTrainedModel, inputs: Microbatch):
    """No cache and no mask: with either, packed positions would be ignored and documents would see one another."""
    positions = {} if inputs.position_ids is None else {"position_ids": inputs.position_ids}
    cache = {"use_cache": False} if "use_cache" in accepted_arguments(model) else {}
    return model(input_ids=inputs.input_ids, **positions, **cache)


def _to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    positions = microbatch.position_ids
    return Microbatch(
        microbatch.input_ids.to(device, non_blocking=True),
        microbatch.labels.to(device, non_blocking=True),
        None if positions is None else positions.to(device, non_blocking=True),
    )


def _unreached_spans(run: Run, reached_anywhere: Tensor) -> list[tuple[int, int, int]]:
    """(span, start, stop) within the optimizer's tensors of parameters that no rank's backward reached in this step: stock
    optimizers leave those alone, decay included. Asks the device only where this rank's own backward missed a parameter."""
    missed = {
        (buffer, slot)
        for (buffer, slot, place), reached in zip(run.gradients.places, reached_anywhere, strict=True)
        if not place.is_reached and reached == 0
    }
    return [
        (index, max(slot.start, span.start) - span.start, min(slot.stop, span.stop) - span.start)
        for index, (owner, span) in enumerate(run.spans)
        for buffer, slot in missed
        if owner is buffer and max(slot.start, span.start) < min(slot.stop, span.stop)
    ]
