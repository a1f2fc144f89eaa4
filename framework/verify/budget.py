"""Bytes that each rank of a pipeline holds and sends, in closed form. Ranks that differ in other coordinates hold as much."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from framework.model.precision import DTYPES, compute_dtype
from framework.optim.optimizers import state_names
from framework.parallel.pipeline.lower import SENDS
from framework.parallel.pipeline.pipeline import Pipeline
from framework.parallel.pipeline.simulate import peak_live
from framework.parallel.zero.buffers import UnitBuffer
from framework.recipe.derive import derive
from framework.recipe.schema import Recipe
from framework.verify.activations import bytes_sent_per_layer, hidden_bytes, stage_activations

KINDS = ("parameters", "gradients", "master", "optimizer", "gathered")


@dataclass(frozen=True)
class Budget:
    """Of one rank. held: bytes by kind, activations included; sent: bytes of a step by what they are for; live: the most
    microbatches of its stages at once between their forward and the end of their backward."""

    held: dict[str, int]
    sent: dict[str, int]
    live: int


def make_budgets(
    recipe: Recipe, model: PreTrainedModel, pipeline: Pipeline, by_rank: Sequence[Sequence[UnitBuffer]]
) -> list[Budget]:
    """by_rank: the buffers of each rank of the pipeline."""
    derived, compute = derive(recipe), compute_dtype(recipe.precision, torch.device("cpu"))
    accumulation, reduce_dtype = derived.accumulation, DTYPES[recipe.precision.reduce]
    schedule, lowered = pipeline.make(accumulation), pipeline.lowered(accumulation)
    kept, recomputed = stage_activations(recipe, model, pipeline.cuts, compute)
    numbers, most = peak_live(schedule), peak_live(schedule, kept)
    over_tp = bytes_sent_per_layer(derived, model.config, compute) * accumulation
    of_message = hidden_bytes(recipe, model.config, compute)
    budgets = []
    for rank, buffers in enumerate(by_rank):
        own = [cut for cut in pipeline.cuts if schedule.rank_of_stage[cut.index] == rank]
        messages = sum(action.kind in SENDS for action in lowered.ranks[rank])
        held = bytes_per_rank(buffers, state_names(recipe.optim)) | {"activations": most[rank] + recomputed}
        sent = bytes_sent(buffers, accumulation, reduce_dtype) | {
            "tp": over_tp * sum(cut.stop - cut.start for cut in own),
            "pp": of_message * messages,
        }
        budgets.append(Budget(held, sent, numbers[rank]))
    return budgets


def bytes_per_rank(buffers: Sequence[UnitBuffer], states: Sequence[str]) -> dict[str, int]:
    """What lives for the whole run, by kind, and the most that gathered parameters and unreduced gradients add to it.

    The table of `parallel/zero/lifetimes.py` in bytes, padding included.
    """
    total = dict.fromkeys(KINDS, 0)
    for buffer in buffers:
        lifetimes, compute, master = buffer.lifetimes, buffer.compute_dtype.itemsize, buffer.master_dtype.itemsize
        resident = buffer.numel_padded if lifetimes.resident_parameters else buffer.numel_part
        total["parameters"] += resident * compute
        if buffer.is_trained:
            kept = buffer.numel_padded if lifetimes.keeps_gradients else buffer.numel_part
            total["gradients"] += kept * master
            total["master"] += buffer.numel_owned * master if buffer.compute_dtype != buffer.master_dtype else 0
            total["optimizer"] += buffer.numel_owned * master * len(states)
    total["gathered"] = _largest_gathered(buffers)
    return total


def bytes_sent(buffers: Sequence[UnitBuffer], accumulation: int, reduce_dtype: torch.dtype) -> dict[str, int]:
    """Bytes that a rank sends in a step for parameters and gradients, by the forms that docs/zero.md states.

    With P bytes of a unit, n shards and k microbatches: gathers (n-1)/n P for each time that a released unit is used again,
    reductions (n-1)/n P for each time that a gradient is reduced, and 2 (r-1)/r P/n once for each partial axis of r ranks.
    Where replicas divide the update, one half of that is a reduction and the other a gather of updated parameters.
    reduce_dtype: the dtype of gradients on their way.
    """
    gathers = reductions = replicas = 0
    for buffer in buffers:
        n, lifetimes = buffer.shard_axis.size, buffer.lifetimes
        uses = 1 if lifetimes.keeps_parameters else accumulation * (2 if buffer.unit.startswith("layers.") else 1)
        gathers += (n - 1) * buffer.numel_part * buffer.compute_dtype.itemsize * uses
        if buffer.is_trained:
            times = 1 if lifetimes.keeps_gradients else accumulation
            reductions += (n - 1) * buffer.numel_part * reduce_dtype.itemsize * times
            gathers += (buffer.update_axis.size - 1) * buffer.numel_owned * buffer.compute_dtype.itemsize
            replicas += (buffer.update_axis.size - 1) * buffer.numel_owned * reduce_dtype.itemsize
            for axis in buffer.partial_axes:
                replicas += 2 * (axis.size - 1) * buffer.numel_owned * reduce_dtype.itemsize // axis.size
    return {"gathers": gathers, "reductions to shards": reductions, "to replicas": replicas}


def _largest_gathered(buffers: Sequence[UnitBuffer]) -> int:
    """Two units' full parameters beside the larger of embedding and head, and three units' full gradients, where these come
    and go: one in use, one ahead; one being written, two under way."""
    parameters: dict[str, int] = {}
    gradients: dict[str, int] = {}
    for buffer in buffers:
        if not buffer.lifetimes.resident_parameters:
            full = buffer.numel_padded * buffer.compute_dtype.itemsize
            parameters[buffer.unit] = parameters.get(buffer.unit, 0) + full
        if buffer.is_trained and not buffer.lifetimes.keeps_gradients:
            full = buffer.numel_padded * buffer.master_dtype.itemsize
            gradients[buffer.unit] = gradients.get(buffer.unit, 0) + full
    layers = sorted((num for unit, num in parameters.items() if unit.startswith("layers.")), reverse=True)
    ends = [num for unit, num in parameters.items() if not unit.startswith("layers.")]
    return sum(layers[:2]) + max(ends, default=0) + sum(sorted(gradients.values(), reverse=True)[:3])
