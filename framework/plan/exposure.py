"""Seconds of a layer's collectives over tp, cp and ep, exposed or hidden under computation, by the executor's order.

tp   enter and leave of a region are waited for (parallel/tensor/borders.py); async TP sends chunks under the matmuls beside
     them. In backward the sum of a region's input gradient travels under the weight gradients of its column layers
     (regions.py), where a schedule does not leave these for later
cp   a step of the ring travels under the attention to the block before it; Ulysses' exchange is waited for (docs/context.md)
ep   rows are waited for, there and back; with parallel.expert_overlap tokens go in halves, of which one travels while the
     other is computed; shared experts are computed while rows leave (parallel/experts/dispatch.py)

The order of axes decides who shares a node: a rank's number is ((pp * DP + dp) * CP + cp) * TP + tp, and nodes take ranks in
order (mesh/topology.py, mesh/placement.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from framework.plan.candidate import Candidate, topology_of
from framework.plan.cluster import Group, place_group
from framework.plan.layer_widths import MixtureWidths
from framework.plan.operators import LayerOperators, UnitWork
from framework.plan.profile import Rates
from framework.recipe.schema import Recipe

# Axes over which messages travel.
AXES = (
    *("world", "pp", "tp", "ulysses", "ring", "ep"),
    *("shard", "replica", "expert_shard", "expert_replica", "secondary", "expert_secondary"),
)
Groups = Mapping[str, Group]


def place_groups(c: Candidate, secondary_shard: int | str | None = None, domain: int = 1) -> Groups:
    """The groups of a candidate, by the names of their axes. secondary_shard: as in the recipe's `zero`; domain: devices that
    NVLink joins, where they are more than a node's."""
    topology = topology_of(c, secondary_shard=secondary_shard)
    return {axis: place_group(*topology.size_stride(axis), max(c.ranks_per_node, domain), c.world) for axis in AXES}


@dataclass(frozen=True)
class Exposure:
    """Seconds of a unit's messages over one axis for a microbatch: exposed in forward and in backward (recomputation included),
    and hidden under computation."""

    forward: float = 0.0
    backward: float = 0.0
    hidden: float = 0.0


NOTHING = Exposure()


def hide(seconds: float, behind: float) -> tuple[float, float]:
    """(exposed, hidden) seconds of a collective beside so much computation."""
    hidden = min(seconds, max(behind, 0.0))
    return seconds - hidden, hidden


def count_met(top_k: int, groups: int) -> float:
    """Groups of experts that a token meets in the mean, with equally many tokens for each expert."""
    return groups * (1.0 - (1.0 - 1.0 / groups) ** top_k)


@dataclass(frozen=True)
class LayerMessages:
    """A layer's collectives beside its computation, by axis."""

    layer: LayerOperators
    work: UnitWork
    c: Candidate
    groups: Groups
    rates: Rates
    settings: Recipe

    def tp(self) -> Exposure:
        """Exposure of the borders of a layer's regions."""
        c, layer, work, rates, group = self.c, self.layer, self.work, self.rates, self.groups["tp"]
        seconds, profile = rates.cluster.collective, rates.profile
        if c.tp == 1:
            return NOTHING
        is_whole = layer.experts is not None and c.expert_tp < c.tp
        regions = 1 if is_whole else 2
        num_bytes = c.tokens * layer.hidden * rates.itemsize
        is_again = c.checkpointing != "none"
        under_gradients = 0.0 if c.splits_backward else profile.hides_tp_gradient * work.column
        if not c.sequence:
            reduce_s = seconds("all_reduce", num_bytes, group)
            # Whole experts of tokens that all ranks hold: each routes an interval, and results and gradients are gathered.
            joined = seconds("all_gather", num_bytes, group) if is_whole else 0.0
            late, hidden = hide(regions * reduce_s, under_gradients)
            again = (regions - 1) * reduce_s + joined if is_again else 0.0
            return Exposure(regions * reduce_s + joined, late + joined + again, hidden)
        gather = seconds("all_gather", num_bytes, group)
        scatter = seconds("reduce_scatter", num_bytes, group)
        # In chunks: what a rank has itself is multiplied first, the others' under it and under one another.
        share = (1.0 if self.settings.parallel.overlap == "always" else profile.hides_tp) * (c.tp - 1) / c.tp
        enter, hidden_in = hide(regions * gather, share * work.column_forward)
        leave, hidden_out = hide(regions * scatter, share * work.row_forward)
        leave_back, hidden_back = hide(regions * gather, share * work.row_forward)
        enter_back, hidden_sum = hide(regions * scatter, under_gradients)
        again = enter + leave * (regions - 1) / regions if is_again else 0.0
        if self.settings.memory.gathered_inputs == "regather":
            again += regions * gather
        hidden = hidden_in + hidden_out + hidden_back + hidden_sum
        return Exposure(enter + leave, leave_back + enter_back + again, hidden + (hidden_in + hidden_out) * is_again)

    def cp(self) -> Exposure:
        """Exposure of keys and values, and of exchanged heads."""
        c, shape, work, cluster, groups = self.c, self.layer.attention, self.work, self.rates.cluster, self.groups
        if c.cp == 1 or shape is None:
            return NOTHING
        heads, kv_heads = -(-shape.heads // c.tp), max(1, shape.kv_heads // c.tp)
        queries, outputs = c.tokens * heads * shape.key_dim, c.tokens * heads * shape.value_dim
        keys_values = c.tokens * kv_heads * (shape.key_dim + shape.value_dim)
        e, ring = self.rates.itemsize, groups["ring"].size
        exchange = cluster.collective("all_to_all", (queries + outputs + keys_values) * e, groups["ulysses"])
        # After heads were exchanged a rank has u times the tokens of 1/u of the heads.
        forward_block, backward_block = work.forward.attention / ring, work.input.attention / ring
        steps, sums = ring - 1, keys_values * max(e, 4)
        if c.is_gather:
            gathered = cluster.collective("all_gather", ring * keys_values * e, groups["ring"])
            late, hidden = hide(gathered, forward_block)
            late_back, hidden_back = hide(gathered, backward_block)
            late_back += cluster.collective("reduce_scatter", ring * sums, groups["ring"])
        elif steps:
            late, hidden = hide(cluster.message(keys_values * e, groups["ring"]), forward_block)
            late_back, hidden_back = hide(cluster.message(keys_values * e + sums, groups["ring"]), backward_block)
            first = cluster.message(keys_values * e, groups["ring"])
            late, hidden, hidden_back = late * steps, hidden * steps, hidden_back * steps
            late_back = late_back * steps + first
        else:
            late = late_back = hidden = hidden_back = 0.0
        is_again = c.checkpointing != "none"
        keeps_attention = "attention" in self.settings.memory.kept_operations
        again = is_again * (exchange + (0.0 if keeps_attention else late))
        hidden += hidden_back + hidden * (is_again and not keeps_attention)
        return Exposure(exchange + late, exchange + late_back + again, hidden)

    def _dispatch_s(self, tokens: float, experts: MixtureWidths) -> float:
        """Seconds in which the rows of so many tokens travel to their experts. Deduplicated, a token crosses once to each node
        that it has experts on, and there to each rank; both hops at the same time, the slower of which counts."""
        rates, group = self.rates, self.groups["ep"]
        cluster, top_k = rates.cluster, experts.top_k
        width = experts.width * rates.itemsize * rates.profile.row_bytes
        if not rates.profile.sends_once:
            return cluster.collective("all_to_all", tokens * top_k * width, group)
        near = Group(group.size // group.nodes, 1)
        met = (
            count_met(top_k, group.size) / group.nodes
        )  # a node's ranks that have experts of a token, in the mean of nodes
        within = cluster.collective("all_to_all", tokens * group.nodes * met * width, near)
        crossing = tokens * count_met(top_k, group.nodes) * (group.nodes - 1) / group.nodes * width
        return max(within, cluster.message(crossing, group)) if group.nodes > 1 else within

    def ep(self) -> Exposure:
        """Exposure of rows that travel to experts and back."""
        c, layer, work, profile = self.c, self.layer, self.work, self.rates.profile
        if c.ep == 1 or layer.experts is None:
            return NOTHING
        once = self._dispatch_s(c.tokens / (1 if c.expert_tp == c.tp else c.tp), layer.experts)
        passes = 2 if c.checkpointing != "none" else 1
        if self.settings.parallel.expert_overlap:
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
