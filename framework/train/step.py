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
from framework.parallel.pipeline.schedules import one_forward_one_backward
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.reduce import GradientSync


@dataclass
class Run:
    """What a rank trains with. `spans`: (buffer, optimizer group) of each of the optimizer's spans."""

    model: PreTrainedModel
    buffers: list[UnitBuffer]
    sync: GradientSync
    optimizer: FlatOptimizer
    spans: list[tuple[UnitBuffer, str]]
    mesh: Mesh
    clip_norm: float | None
    seed: int


def train_step(run: Run, microbatches: Sequence[Microbatch], step: int, lr: float, votes: Sequence[float]) -> Tensor:
    """Forward, backward, reduce, clip, update.

    microbatches: this rank's share of the batch. votes: numbers of this rank that are summed over the world beside the loss,
    so that all ranks decide alike without a collective of their own. Returns fp64 [2 + len(votes)] on the device: the loss
    of the batch, the norm of its gradient before clipping, the summed votes. Nothing here waits for the device.
    """
    world, batch_axis = run.mesh.axis("world"), run.mesh.axis("batch")
    inputs = [_to_device(microbatch, run.mesh.device) for microbatch in microbatches]
    num_tokens = torch.stack([count_loss_tokens(each.labels) for each in inputs]).sum()
    all_reduce(num_tokens, batch_axis)

    run.model.train()
    run.sync.start_step()
    num_global = len(inputs) * batch_axis.size
    schedule = one_forward_one_backward(run.mesh.topology.pp, len(inputs))

    def forward(index: int) -> Tensor:
        torch.manual_seed(seed_for(run.seed, "dropout", step, index * batch_axis.size + batch_axis.rank))
        return _loss(run.model, inputs[index], num_tokens, num_global)

    losses = execute(schedule[run.mesh.axis("pp").rank], forward, run.sync.start_backward)
    run.sync.finish()

    owned = (buffer.gradient[slice(*buffer.owned_trained)] for buffer in run.buffers)
    sums = torch.zeros(2 + len(votes), dtype=torch.float64, device=run.mesh.device)
    sums[0] = torch.stack(losses).sum()
    sums[1] = squared_norm(owned, run.mesh.device)
    sums[2:] = torch.tensor(votes, dtype=torch.float64)
    all_reduce(sums, world)
    sums[1].sqrt_()
    divisor = clip_divisor(sums[1], run.clip_norm)
    with run.optimizer.preserving(_untouched_spans(run)):
        run.optimizer.step(lr, divisor, skip=~sums[:2].isfinite().all())
    for buffer in run.buffers:
        buffer.publish()
    return sums


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


def _untouched_spans(run: Run) -> list[tuple[int, int, int]]:
    """The untouched parameters as (span, start, stop) within the optimizer's spans."""
    index = {(id(buffer), group): number for number, (buffer, group) in enumerate(run.spans)}
    spans = []
    for buffer, slot in run.sync.untouched():
        start = buffer.spans()[slot.group][0]
        spans.append((index[id(buffer), slot.group], slot.start - start, slot.stop - start))
    return spans
