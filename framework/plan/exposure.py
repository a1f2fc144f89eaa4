"""What a layer's collectives over tp, cp and ep cost beside what computation hides of them, by the executor's own order.

tp   enter and leave of a region are waited for (parallel/tensor/borders.py); async TP sends pieces under the matmuls beside
     them. In backward the sum of a region's input gradient travels under the weight gradients of its column layers
     (regions.py), where a schedule does not leave these for later
cp   a step of the ring travels under the attention to the block before it; what Ulysses exchanges is waited for (docs/context.md)
ep   rows are waited for, there and back; with parallel.expert_overlap tokens go in halves, of which one travels while the
     other is computed; shared experts are computed while rows leave (parallel/experts/dispatch.py)
"""

from dataclasses import dataclass

from framework.plan.candidate import Candidate
from framework.plan.collectives import Groups, Links
from framework.plan.operators import LayerOperators, UnitWork
from framework.plan.profile import Profile


@dataclass(frozen=True)
class Exposure:
    """Seconds of one unit and microbatch over one axis: that nothing hides, in forward and in backward (a recomputation's
    messages included), and that computation hides."""

    forward: float = 0.0
    backward: float = 0.0
    hidden: float = 0.0


NOTHING = Exposure()


@dataclass(frozen=True)
class Overlaps:
    """The choices of a recipe that decide what is hidden. is_async: parallel.overlap; regathers: memory.gathered_inputs; halves:
    parallel.expert_overlap; keeps_attention: recomputation does not run it again; splits: the schedule leaves weight gradients
    for later."""

    is_async: bool
    regathers: bool
    halves: bool
    keeps_attention: bool
    splits: bool = False


def hide(seconds: float, behind: float) -> tuple[float, float]:
    """(what is left of a collective under so much computation, what is hidden)."""
    hidden = min(seconds, max(behind, 0.0))
    return seconds - hidden, hidden


def expose_tp(
    layer: LayerOperators, work: UnitWork, c: Candidate, groups: Groups, links: Links, profile: Profile, own: Overlaps
) -> Exposure:
    """Of the borders of a layer's regions."""
    if c.tp == 1:
        return NOTHING
    is_whole = layer.experts is not None and c.expert_tp < c.tp
    regions = 1 if is_whole else 2
    num_bytes = c.tokens * layer.hidden * links.itemsize
    is_again = c.checkpointing != "none"
    under_gradients = 0.0 if own.splits else profile.hides_tp_gradient * work.column
    if not c.sequence:
        reduce_s = links.collective("all_reduce", num_bytes, groups.tp)
        # Whole experts of tokens that all ranks hold: each routes an interval, and results and gradients are gathered.
        joined = links.collective("all_gather", num_bytes, groups.tp) if is_whole else 0.0
        late, hidden = hide(regions * reduce_s, under_gradients)
        again = (regions - 1) * reduce_s + joined if is_again else 0.0
        return Exposure(regions * reduce_s + joined, late + joined + again, hidden)
    gather = links.collective("all_gather", num_bytes, groups.tp)
    scatter = links.collective("reduce_scatter", num_bytes, groups.tp)
    # In pieces: what a rank has itself is multiplied first, the others' under it and under one another.
    share = (1.0 if own.is_async else profile.hides_tp) * (c.tp - 1) / c.tp
    enter, hidden_in = hide(regions * gather, share * work.column_forward)
    leave, hidden_out = hide(regions * scatter, share * work.row_forward)
    leave_back, hidden_back = hide(regions * gather, share * work.row_forward)
    enter_back, hidden_sum = hide(regions * scatter, under_gradients)
    again = enter + leave * (regions - 1) / regions if is_again else 0.0
    if own.regathers:
        again += regions * gather
    hidden = hidden_in + hidden_out + hidden_back + hidden_sum
    return Exposure(enter + leave, leave_back + enter_back + again, hidden + (hidden_in + hidden_out) * is_again)


def expose_cp(
    layer: LayerOperators, work: UnitWork, c: Candidate, groups: Groups, links: Links, profile: Profile, own: Overlaps
) -> Exposure:
    """Of keys and values, and of heads."""
    shape = layer.attention
    if c.cp == 1 or shape is None:
        return NOTHING
    heads, kv_heads = -(-shape.heads // c.tp), max(1, shape.kv_heads // c.tp)
    queries, outputs = c.tokens * heads * shape.key_dim, c.tokens * heads * shape.value_dim
    keys_values = c.tokens * kv_heads * (shape.key_dim + shape.value_dim)
    e, ring = links.itemsize, groups.ring.size
    exchange = links.collective("all_to_all", (queries + outputs + keys_values) * e, groups.ulysses)
    # After heads were exchanged a rank has u times the tokens of 1/u of the heads.
    forward_block, backward_block = work.forward.attention / ring, work.input.attention / ring
    steps, sums = ring - 1, keys_values * max(e, 4)
    if c.is_gather:
        gathered = links.collective("all_gather", ring * keys_values * e, groups.ring)
        late, hidden = hide(gathered, forward_block)
        late_back, hidden_back = hide(gathered, backward_block)
        late_back += links.collective("reduce_scatter", ring * sums, groups.ring)
    elif steps:
        late, hidden = hide(links.message(keys_values * e, groups.ring), forward_block)
        late_back, hidden_back = hide(links.message(keys_values * e + sums, groups.ring), backward_block)
        first = links.message(keys_values * e, groups.ring)
        late, hidden, hidden_back = late * steps, hidden * steps, hidden_back * steps
        late_back = late_back * steps + first
    else:
        late = late_back = hidden = hidden_back = 0.0
    is_again = c.checkpointing != "none"
    again = is_again * (exchange + (0.0 if own.keeps_attention else late))
    hidden += hidden_back + hidden * (is_again and not own.keeps_attention)
    return Exposure(exchange + late, exchange + late_back + again, hidden)


def expose_ep(
    layer: LayerOperators, work: UnitWork, c: Candidate, groups: Groups, links: Links, profile: Profile, own: Overlaps
) -> Exposure:
    """Of rows that travel to experts and back."""
    if c.ep == 1 or layer.experts is None:
        return NOTHING
    rows = profile.rows_sent * c.tokens * layer.experts.top_k / (1 if c.expert_tp == c.tp else c.tp)
    once = links.collective("all_to_all", rows * layer.hidden * links.itemsize, groups.ep)
    passes = 2 if c.checkpointing != "none" else 1
    if own.halves:
        # The second half's way there and the first half's way back are under the other half's experts; the others are not.
        there, _ = hide(once / 2, work.inside / 2 + work.shared)
        back, _ = hide(once / 2, work.inside / 2)
        forward = once + there + back
        hidden = 2 * once - forward
        return Exposure(forward, passes * forward, (1 + passes) * hidden)
    there, hidden_there = hide(once, work.shared)
    if not profile.hides_ep:
        # Backward has no shared experts left to compute under.
        return Exposure(there + once, (passes - 1) * (there + once) + 2 * once, passes * hidden_there)
    late, hidden = hide(there + once, profile.hides_ep * work.forward.total)
    late_back, hidden_back = hide(2 * once, profile.hides_ep * work.backward)
    again = (passes - 1) * (there + once)
    return Exposure(late, late_back + again, hidden_there + hidden + hidden_back)
