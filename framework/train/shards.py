"""The optimizer's shards: what this rank owns of its unit buffers, one flat run for each optimizer group of a buffer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from framework.optim.groups import GroupAssignment
from framework.optim.update_rules import FlatShard, ShardGroup
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.plan_buffers import GroupSpan


@dataclass(frozen=True, eq=False)
class OwnedShard:
    """A shard of the optimizer and where it lies: `span` of `buffer`."""

    buffer: UnitBuffer
    span: GroupSpan
    shard: FlatShard


def own_shards(buffers: Iterable[UnitBuffer]) -> list[OwnedShard]:
    """Views of the buffers' masters and of the reduced gradients where these live, in the order of computation. The buffers have
    memory."""
    return [
        OwnedShard(buffer, span, _shard(buffer, span))
        for buffer in buffers
        if buffer.plan.is_trained
        for span in buffer.plan.spans
    ]


def group_shards(shards: Sequence[OwnedShard], assignments: Iterable[GroupAssignment]) -> list[ShardGroup]:
    """The shards by optimizer group."""
    by_group = {each.key: each for each in assignments}
    return [
        ShardGroup(
            by_group[key].group,
            tuple(each.shard for each in shards if each.span.group == key),
            by_group[key].lr_ratio,
            by_group[key].weight_decay,
        )
        for key in dict.fromkeys(each.span.group for each in shards)
    ]


def find_copies(buffers: Sequence[UnitBuffer]) -> list[tuple[UnitBuffer, UnitBuffer]]:
    """Buffers of one parameter in two stages of this rank; the second of each pair counts nothing."""
    known: dict[str, UnitBuffer] = {}
    copies = []
    for buffer in buffers:
        first = known.setdefault(buffer.plan.slots[0].name, buffer)
        if first is not buffer:
            buffer.is_copy = True
            copies.append((first, buffer))
    return copies


def _shard(buffer: UnitBuffer, span: GroupSpan) -> FlatShard:
    where = slice(span.start - buffer.plan.start, span.stop - buffer.plan.start)
    held = {slot.name: buffer.plan.held[slot.name] for slot in buffer.slots if slot.group == span.group}
    layouts = {name: each.layout for name, each in held.items() if each.start < each.stop}
    return FlatShard(tuple(layouts.values()), buffer.master[where], buffer.delivered[where], tuple(layouts))
