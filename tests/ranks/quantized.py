"""The oracle of quantised gradients: one process that rounds as ranks do, and is exact otherwise.

Stock transformers gives each rank's own gradient of each microbatch. These are cut into the ranks' unit buffers by box
arithmetic, and summed over nodes as `comm/codec.py` says: coded where a message is sent. The update is stock again.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from framework.comm.codec import Wire
from framework.comm.communicator import Communicator
from framework.parallel.zero.buffer_plan import BufferPlan
from framework.plan.plan import Plan, make_plan
from framework.recipe.schema import Launch, Recipe
from framework.verify.evidence import IGNORE, Evidence, TokenBatch
from framework.verify.layout import initial_weights
from framework.verify.oracle import Oracle
from framework.verify.plain import learning_rate
from tests.ranks.parity import CPU, Case

Gradients = dict[str, Tensor]


def on_nodes(recipe: Recipe, ranks_per_node: int) -> Recipe:
    """The recipe on nodes of so many ranks, all of them on this machine."""
    launch = Launch(kind="slurm", ranks=recipe.launch.ranks, ranks_per_node=ranks_per_node, device="cpu")
    return replace(recipe, launch=launch)


def run_quantized_oracle(case: Case, recipe: Recipe, layout: Evidence | None = None) -> Evidence:
    """The evidence of a case, whose recipe quantises gradients. layout: for the blocks of parameters that are codes as well."""
    plan = make_plan(recipe, case.config)
    # Rounded here, by the messages of the plan, and not by the oracle's own words.
    layout = None if layout is None else replace(layout, reduced={})
    oracle = Oracle(recipe, case.config, initial_weights(case.config, recipe.train.seed), torch.float64, CPU, layout)
    losses, norms, first = [], [], {}
    for step, batch in enumerate(case.batches()):
        oracle.set_rate(learning_rate(step, recipe.optim.schedule, recipe.optim.lr, recipe.train.steps))
        losses.append(oracle.find_gradients(batch))
        exact = oracle.gradients()
        for name, gradient in sum_as_ranks(plan, oracle, batch, exact).items():
            oracle.masters[name].grad = gradient
        norms.append(oracle.clip())
        if step == 0:
            first = oracle.gradients()
        oracle.update(batch, {}, step)
    return Evidence(tuple(losses), tuple(norms), first, {n: w.detach() for n, w in oracle.weights().items()})


def sum_as_ranks(plan: Plan, oracle: Oracle, batch: TokenBatch, exact: Gradients) -> Gradients:
    """The sums of all ranks' gradients, by name; those that do not travel as codes are `exact`."""
    by_group = [_own_gradients(plan, oracle, batch, place) for place in range(plan.derived.dp)]
    sums = {name: each.clone() for name, each in exact.items()}
    buffers = {rank: plan.of_rank(rank).buffers for rank in range(plan.topology.world)}
    for rank, own in buffers.items():
        for index, buffer in enumerate(own):
            if buffer.is_trained and buffer.dtypes.reduced is not None:
                part = _sum_part(plan, rank, index, buffers, by_group)
                _put(sums, buffer, part)
    return sums


def _own_gradients(plan: Plan, oracle: Oracle, batch: TokenBatch, place: int) -> list[Gradients]:
    """The gradients of the ranks at a place of dp, of each microbatch."""
    rows = plan.recipe.batch.sequences_per_microbatch
    inputs, labels = (
        batch.input_ids.split(rows)[place :: plan.derived.dp],
        batch.labels.split(rows)[place :: plan.derived.dp],
    )
    total, found = int((batch.labels != IGNORE).sum()), []
    for ids, targets in zip(inputs, labels, strict=True):
        oracle.find_gradients(TokenBatch(ids, targets))
        share = int((targets != IGNORE).sum()) / total
        found.append({name: gradient * share for name, gradient in oracle.gradients().items()})
    return found


def _sum_part(
    plan: Plan, rank: int, index: int, buffers: dict[int, list[BufferPlan]], by_group: Sequence[list[Gradients]]
) -> Tensor:
    """What the rank holds of the sum of its buffer `index`, [numel_owned]."""
    buffer, topology = buffers[rank][index], plan.topology
    axes, rounds = buffer.axes, len(by_group[0])
    is_expert = axes.shard.name == "expert_shard"

    def flat(of_rank: int, microbatches: Iterable[int]) -> Tensor:
        other = buffers[of_rank][index]
        peers = topology.ranks("ep", of_rank) if is_expert else (of_rank,)  # those whose tokens it has seen
        places = {topology.index("dp", peer) for peer in peers}
        whole = torch.zeros(other.numel_padded, dtype=torch.float64)
        for number in microbatches:
            for place in places:
                whole[: other.numel] += torch.cat([_local(by_group[place][number], slot) for slot in other.slots])
        return whole

    def over_shard(of_rank: int) -> Tensor:
        own = buffers[of_rank][index]
        shard, wire = own.axes.shard, own.dtypes.reduce_wire(own.axes.shard, torch.float64)
        each = [range(rounds)] if own.lifetimes.keeps_gradients else [[number] for number in range(rounds)]
        terms = [[flat(r, numbers).view(shard.size, -1)[shard.rank] for r in shard.ranks] for numbers in each]
        return sum(add_over(shard, of_microbatch, wire) for of_microbatch in terms)

    update = axes.update
    part = over_shard(rank)
    if update.size > 1:
        terms = [over_shard(r).view(update.size, -1)[update.rank] for r in update.ranks]
        part = add_over(update, terms, buffer.dtypes.reduce_wire(update, torch.float64))
    for axis in (axis for axis in axes.partial if axis.size > 1):
        wire = buffer.dtypes.reduce_wire(axis, torch.float64)
        assert axis.name in ("replica", "expert_replica"), axis.name
        whole = [over_shard(r) for r in axis.ranks]
        if wire is None:
            part = sum(whole)
            continue
        # Every rank adds up a piece, and its sum is coded once more on its way to all.
        size = -(-len(part) // axis.size)
        padded = [torch.nn.functional.pad(each, (0, axis.size * size - len(each))) for each in whole]
        pieces = [
            add_over(axis, [each.view(axis.size, -1)[piece] for each in padded], wire) for piece in range(axis.size)
        ]
        part = torch.cat([arrived(piece, wire) for piece in pieces])[: len(part)]
    return part


def add_over(axis: Communicator, terms: Sequence[Tensor], wire: Wire | None) -> Tensor:
    """The sum of all ranks' terms for one of them, each [n]."""
    if wire is None:
        return sum(terms)  # type: ignore[return-value]
    inner = axis.size // axis.nodes if axis.levels else 1
    if axis.levels is None:
        return sum(arrived(each, wire) for each in terms)  # type: ignore[return-value]
    nodes = [sum(arrived(each, wire) for each in terms[first : first + inner]) for first in range(0, axis.size, inner)]
    return sum(arrived(each, wire) for each in nodes)  # type: ignore[return-value,arg-type]


def arrived(x: Tensor, wire: Wire) -> Tensor:
    """What a message of x, [n], is read as."""
    out = torch.empty_like(x)
    wire.decode(wire.encode(x, torch.empty(wire.message_bytes(len(x)), dtype=torch.uint8)), out)
    return out


def _local(gradients: Gradients, slot) -> Tensor:
    """A rank's elements of a whole gradient, flat, in the order of its buffer."""
    boxes = slot.layout.boxes_between(0, slot.layout.numel_local)
    return torch.cat([gradients[slot.name][box.slices()].flatten() for box in boxes])


def _put(sums: Gradients, buffer: BufferPlan, owned: Tensor) -> None:
    """Write what a rank owns of a buffer to the whole gradients."""
    for slot in buffer.slots:
        low, high = max(slot.start, buffer.start), min(slot.stop, buffer.stop)
        first = low
        for box in slot.layout.boxes_between(low - slot.start, max(low, high) - slot.start) if low < high else ():
            sums[slot.name][box.slices()] = owned[first - buffer.start : first - buffer.start + prod(box.sizes)].view(
                box.sizes
            )
            first += prod(box.sizes)
