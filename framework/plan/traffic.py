"""Bytes that a rank of a plan sends in a step, in closed form (docs: zero, tensor, context, experts)."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import prod

import torch
from torch import nn

from framework.comm.communicator import Communicator
from framework.mesh.token_layout import ContextSlices
from framework.model.borders import message_dtype, message_width
from framework.model.experts import Router
from framework.model.flops import expert_groups, experts_per_token
from framework.model.kept_outputs import ATTENTION
from framework.model.mixtures import Mixture
from framework.model.precision import DTYPES
from framework.model.units import count_channels, count_map, find_mixers
from framework.optim.muon import group_matrices
from framework.parallel.pipeline.lower import SENDS
from framework.parallel.pipeline.simulate import ActionKind
from framework.parallel.zero.buffer_plan import BufferDtypes, BufferPlan
from framework.plan.context import ContextCost, MixerCost, Passes, attention_shapes
from framework.plan.plan import Plan, unconnected
from framework.plan.policies import count_forwards, spell
from framework.plan.token_hops import TokenHops, rows_of_token

META = torch.device("meta")


def measure_traffic(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes that the rank sends in a step: parameters (`gathers`, those of ZeRO's second copy apart), gradients (`reductions to
    shards`, `to replicas`), updates of Muon on their way to owners and back (`matrices`), hidden states over `tp` and over `pp`,
    keys and values, heads, or recurrent states over `cp`, and over `ep` with equally many tokens for each expert."""
    place, accumulation = plan.topology.index("pp", rank), plan.derived.accumulation
    # Each tells the border that it crosses: a gradient that of its own stage, what goes forward that of the next.
    sends = (each for each in plan.pipeline.lowered(accumulation).ranks[place] if each.kind in SENDS)
    crossed = [plan.borders[each.stage + (each.kind is ActionKind.SEND_ACTIVATION)] for each in sends]
    messages = sum(message_width(border) * message_dtype(border).itemsize for border in crossed)
    layers = [number for bounds in plan.own_stages(rank) for number in range(bounds.start, bounds.stop)]
    costs = context_costs(plan, rank)
    cp = sum(cost.sent(passes_of_layer(plan, each)) for each in layers if costs and (cost := costs[each]) is not None)
    cp += sum(cost.sent(passes_of_layer(plan, number)) for number, cost in mixer_costs(plan, rank) if number in layers)
    matrices = group_matrices(
        plan.of_rank(rank).buffers, plan.groups, unconnected(plan.topology, rank), plan.recipe.optim.muon, META
    )
    reduce_dtype = DTYPES[plan.recipe.precision.reduce]
    return _parameter_traffic(plan.of_rank(rank).buffers, accumulation, reduce_dtype, lambda _, sent: sent) | {
        "matrices": sum(num_bytes for each in matrices for num_bytes in each.bytes_sent.values()),
        "tp": sum(plan.tensor_bytes[number] for number in layers) * accumulation,
        "pp": prod(plan.token_layout(rank).hidden_shape(1)) * messages,
        "cp": cp * accumulation,
        "ep": sum(sum(sent_over_hops(plan, each)) for each in mixtures_of(plan, rank)) * accumulation,
    }


def measure_leaving(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes of parameters, gradients and tokens on their way to experts that the rank sends to other nodes in a step; those of
    `measure_traffic`."""
    buffers, reduce_dtype = plan.of_rank(rank).buffers, DTYPES[plan.recipe.precision.reduce]
    found = _parameter_traffic(buffers, plan.derived.accumulation, reduce_dtype, Communicator.least_leaving)
    axes = unconnected(plan.topology, rank)
    for mixture in mixtures_of(plan, rank):
        hops = zip(("ep_outer", "ep_inner"), sent_over_hops(plan, mixture), strict=True)
        leaving = sum(axes[name].most_leaving(num_bytes) for name, num_bytes in hops)
        found["ep"] = found.get("ep", 0) + leaving * plan.derived.accumulation
    return found


def _parameter_traffic(
    buffers: Sequence[BufferPlan],
    accumulation: int,
    reduce_dtype: torch.dtype,
    count: Callable[[Communicator, int], int],
) -> dict[str, int]:
    """Bytes that a rank sends in a step for parameters and gradients, as docs/zero.md states them. count: what counts of the
    bytes that a message sends over an axis.

    With P bytes of a unit, n shards and k microbatches: gathers (n-1)/n P for each time that a resharded unit is used again,
    reductions (n-1)/n P for each time that a gradient is reduced, and 2 (r-1)/r P/n once for each partial axis of r ranks.
    Where replicas divide the update, one half of that is a reduction and the other a gather of updated parameters.
    """
    gathers = copies = reductions = replicas = 0
    for buffer in buffers:
        n, axes, dtypes, lifetimes = buffer.axes.shard.size, buffer.axes, buffer.dtypes, buffer.lifetimes

        def reduced(axis: Communicator, numel: int, dtypes: BufferDtypes = dtypes) -> int:
            wire = dtypes.reduce_wire(axis, reduce_dtype)
            return numel * reduce_dtype.itemsize if wire is None else wire.message_bytes(numel)

        uses = 1 if lifetimes.keeps_parameters else accumulation * (2 if buffer.unit.startswith("layers.") else 1)
        sent, inner = buffer.arriving_bytes, axes.secondary.size
        # From the second time in a step on parameters come from the second copy, if there is one.
        again = uses - 1 if inner > 1 else 0
        gathers += count(axes.shard, (n - 1) * sent // n) * (uses - again)
        copies += count(axes.secondary, (inner - 1) * sent // inner) * again
        if buffer.is_trained:
            times = 1 if lifetimes.keeps_gradients else accumulation
            reductions += count(axes.shard, (n - 1) * reduced(axes.shard, buffer.numel_part)) * times
            others = axes.update.size - 1
            gathers += count(axes.update, others * dtypes.kept_bytes(buffer.numel_owned))
            replicas += count(axes.update, others * reduced(axes.update, buffer.numel_owned))
            for axis in axes.partial:
                replicas += count(axis, 2 * (axis.size - 1) * reduced(axis, buffer.numel_owned) // axis.size)
    return {
        "gathers": gathers,
        "gathers of copies": copies,
        "reductions to shards": reductions,
        "to replicas": replicas,
    }


def context_costs(plan: Plan, rank: int) -> list[ContextCost | None]:
    """The cost of cp to a rank for each layer of the model and microbatch; empty where no sequence is divided."""
    derived, itemsize = plan.derived, plan.compute_dtype.itemsize
    if derived.cp == 1:
        return []
    shapes = attention_shapes(plan.config.get_text_config(), derived.tp, derived.context)
    index = plan.topology.index("ulysses", rank)
    return [None if shape is None else ContextCost(plan.candidate, shape, itemsize, index) for shape in shapes]


def mixer_costs(plan: Plan, rank: int) -> Iterator[tuple[int, MixerCost]]:
    """The cost of cp to a rank for each recurrent mixer and microbatch, with the number of its layer."""
    derived, batch, index = plan.derived, plan.recipe.batch, plan.topology.index("cp", rank)
    slices = ContextSlices(derived.context, derived.ulysses, derived.ring, index)
    for number, unit in enumerate(each for each in plan.units if each.is_layer):
        for _, mixer in find_mixers(plan.whole.get_submodule(unit.root)):
            filters = next(each.weight for each in mixer.modules() if isinstance(each, nn.Conv1d))
            channels, state = count_channels(mixer, filters.shape[0], derived.tp), count_map(mixer) // derived.tp
            lengths = batch.sequences_per_microbatch, channels, filters.shape[-1], state, plan.compute_dtype.itemsize
            yield number, MixerCost(slices, *lengths)


def sent_over_hops(plan: Plan, mixture: Mixture) -> tuple[int, int]:
    """Bytes that a rank sends between nodes and within its own for one mixture and one microbatch, with equally many tokens for
    each expert, and for each choice of experts that its router can make.

    Rows travel there and back in forward, their gradients in backward, half as much again with recomputation; numbers of rows go
    ahead of them in each forward (`TokenHops`). Ranks of `tp` that have whole experts route a part of the tokens each; those that
    slice experts all route the same.
    """
    config, activations = plan.config.get_text_config(), plan.activations
    top_k, nodes, ranks = experts_per_token(config) or 1, *map(plan.topology.size, ("ep_outer", "ep_inner"))
    router = Router(mixture.num_experts, top_k, *expert_groups(config))
    parallel = plan.recipe.parallel
    narrows, parts = parallel.expert_dispatch == "fp8", 2 if parallel.expert_overlap else 1
    rows = rows_of_token(plan.candidate, plan.recipe, router, nodes, ranks)
    hops = TokenHops(router, nodes, ranks, activations.width, activations.itemsize, narrows, rows)
    return hops.sent(Fraction(activations.rows_routed(top_k), top_k), forwards_of(plan, mixture), parts)


def forwards_of(plan: Plan, mixture: Mixture) -> int:
    """Number of times that the mixture's forward runs for one microbatch."""
    layers = [unit.name for unit in plan.units if unit.is_layer]
    return passes_of_layer(plan, layers.index(mixture.layer)).forwards


def passes_of_layer(plan: Plan, number: int) -> Passes:
    """Number of times that a layer and its attention run for one microbatch."""
    bounds = next(each for each in plan.pipeline.stages if each.start <= number < each.stop)
    counts, position = plan.chosen[bounds.index], number - bounds.start
    forwards = count_forwards(counts, position)
    is_kept = spell(counts)[position] == "selective" and ATTENTION in plan.recipe.memory.kept_operations
    return Passes(forwards, 1 if is_kept else forwards)


def mixtures_of(plan: Plan, rank: int) -> list[Mixture]:
    """The mixtures of the rank's stages, in order."""
    own = {unit.name for stage in plan.of_rank(rank).stages for unit in stage.units}
    return [mixture for mixture in plan.mixtures if mixture.layer in own]
