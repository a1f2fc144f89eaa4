"""Bytes that a rank sends in a step, in closed form (docs/zero.md, docs/tensor.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from framework.model.precision import DTYPES
from framework.parallel.pipeline.lower import SENDS
from framework.parallel.zero.plan_buffers import BufferPlan
from framework.plan.activations import bytes_sent_per_layer, hidden_bytes

if TYPE_CHECKING:
    from framework.plan.plan import Plan


def measure_traffic(plan: Plan, rank: int) -> dict[str, int]:
    """The rank's bytes: parameters (`gathers`), gradients (`reductions to shards`, `to replicas`), hidden states over `tp` and
    `pp`."""
    accumulation, place = plan.derived.accumulation, plan.topology.index("pp", rank)
    own = [bounds for bounds in plan.pipeline.stages if plan.pipeline.rank_of_stage[bounds.index] == place]
    messages = sum(action.kind in SENDS for action in plan.pipeline.lowered(accumulation).ranks[place])
    sent = bytes_sent(plan.of_rank(rank).buffers, accumulation, DTYPES[plan.recipe.precision.reduce])
    return sent | {
        "tp": bytes_sent_per_layer(plan) * accumulation * sum(bounds.stop - bounds.start for bounds in own),
        "pp": hidden_bytes(plan) * messages,
    }


def bytes_sent(buffers: Sequence[BufferPlan], accumulation: int, reduce_dtype: torch.dtype) -> dict[str, int]:
    """Bytes that a rank sends in a step for parameters and gradients, by the forms that docs/zero.md states.

    With P bytes of a unit, n shards and k microbatches: gathers (n-1)/n P for each time that a released unit is used again,
    reductions (n-1)/n P for each time that a gradient is reduced, and 2 (r-1)/r P/n once for each partial axis of r ranks.
    Where replicas divide the update, one half of that is a reduction and the other a gather of updated parameters.
    reduce_dtype: the dtype of gradients on their way.
    """
    gathers = reductions = replicas = 0
    for buffer in buffers:
        n, lifetimes = buffer.axes.shard.size, buffer.lifetimes
        uses = 1 if lifetimes.keeps_parameters else accumulation * (2 if buffer.unit.startswith("layers.") else 1)
        gathers += (n - 1) * buffer.numel_part * buffer.dtypes.compute.itemsize * uses
        if buffer.is_trained:
            times = 1 if lifetimes.keeps_gradients else accumulation
            reductions += (n - 1) * buffer.numel_part * reduce_dtype.itemsize * times
            gathers += (buffer.axes.update.size - 1) * buffer.numel_owned * buffer.dtypes.compute.itemsize
            replicas += (buffer.axes.update.size - 1) * buffer.numel_owned * reduce_dtype.itemsize
            for axis in buffer.axes.partial:
                replicas += 2 * (axis.size - 1) * buffer.numel_owned * reduce_dtype.itemsize // axis.size
    return {"gathers": gathers, "reductions to shards": reductions, "to replicas": replicas}
