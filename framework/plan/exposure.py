"""Seconds of a layer's collectives over tp, cp and ep, exposed or hidden under computation, by the executor's order.

tp   enter and leave of a region are waited for (parallel/tensor/borders.py); async TP sends chunks under the matmuls beside
     them. In backward the sum of a region's input gradient travels under the weight gradients of its column layers
     (regions.py), where a schedule does not leave these for later
cp   a step of the ring travels under the attention to the block before it; Ulysses' exchange is waited for (docs/context.md)
ep   rows are waited for, there and back over both hops, between nodes and within them (messages.py); shared experts are
     computed while rows leave (parallel/experts/dispatch.py), and with parallel.expert_overlap the other half of the microbatch
     (halves.py): its turns are laid out one after the other, and what neither half computes under is exposed

The order of axes decides who shares a node: a rank's number is ((pp * DP + dp) * CP + cp) * TP + tp, and nodes take ranks in
order (mesh/topology.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from framework.plan.candidate import Candidate, topology_of
from framework.plan.cluster import Group, place_group
from framework.plan.layer_widths import MixtureWidths
from framework.plan.messages import ContextCost, TokenHops, rows_of_token
from framework.plan.operators import LayerOperators, UnitWork
from framework.plan.profile import Rates
from framework.recipe.schema import Recipe

# Axes over which messages travel.
AXES = (
    *("world", "pp", "tp", "ulysses", "ring", "ep", "ep_outer", "ep_inner"),
    *("shard", "replica", "expert_shard", "expert_replica", "secondary", "expert_secondary"),
)
Groups = Mapping[str, Group]


def place_groups(
    c: Candidate, secondary_shard: int | str | None = None, hierarchical: int | str | None = "node", domain: int = 1
) -> Groups:
    """The groups of a candidate, by the names of their axes. secondary_shard: as in the recipe's `zero`; hierarchical: its
    parallel.expert_hierarchical; domain: devices that NVLink joins, where they are more than a node's."""
    topology = topology_of(c, secondary_shard=secondary_shard, hierarchical=hierarchical)
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
        regions = layer.regions_beside if is_whole else layer.regions
        num_bytes = c.tokens * layer.hidden * rates.itemsize
        is_again = c.checkpointing != "none"
        under_gradients = 0.0 if c.splits_backward else profile.hides_tp_gradient * work.column
        if not c.sequence:
            reduce_s = seconds("all_reduce", num_bytes, group)
            # Whole experts of tokens that all ranks hold: each routes an interval, and results and gradients are gathered.
            joined = seconds("all_gather", num_bytes, group) if is_whole else 0.0
            late, hidden = hide(regions * reduce_s, under_gradients)
            again = max(regions - 1, 0) * reduce_s + joined if is_again else 0.0
            return Exposure(regions * reduce_s + joined, late + joined + again, hidden)
        gather = seconds("all_gather", num_bytes, group)
        scatter = seconds("reduce_scatter", num_bytes, group)
        # In chunks: what a rank has itself is multiplied first, the others' under it and under one another.
        share = (1.0 if self.settings.parallel.overlap == "always" else profile.hides_tp) * (c.tp - 1) / c.tp
        enter, hidden_in = hide(regions * gather, share * work.column_forward)
        leave, hidden_out = hide(regions * scatter, share * work.row_forward)
        leave_back, hidden_back = hide(regions * gather, share * work.row_forward)
        enter_back, hidden_sum = hide(regions * scatter, under_gradients)
        again = enter + leave * max(regions - 1, 0) / max(regions, 1) if is_again else 0.0
        if self.settings.memory.gathered_inputs == "regather":
            again += regions * gather
        hidden = hidden_in + hidden_out + hidden_back + hidden_sum
        return Exposure(enter + leave, leave_back + enter_back + again, hidden + (hidden_in + hidden_out) * is_again)

    def cp(self) -> Exposure:
        """Exposure of keys and values, and of exchanged heads."""
        c, shape, work, cluster, groups = self.c, self.layer.attention, self.work, self.rates.cluster, self.groups
        if c.cp == 1 or shape is None:
            return NOTHING
        e, ring = self.rates.itemsize, groups["ring"].size
        own = replace(shape, heads=-(-shape.heads // c.tp), kv_heads=max(1, shape.kv_heads // c.tp))
        cost = ContextCost(c, own, e)
        keys_values, steps = cost.keys_values, cost.num_steps
        exchanged = (cost.queries + cost.outputs + keys_values) * e
        exchange = cluster.collective("all_to_all", exchanged, groups["ulysses"])
        # After heads were exchanged a rank has u times the tokens of 1/u of the heads.
        forward_block, backward_block = work.forward.attention / ring, work.input.attention / ring
        sums = keys_values * cost.sum_size
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

    def _travel(self, tokens: float, experts: MixtureWidths) -> tuple[tuple[float, float], ...]:
        """Seconds of the rows of so many tokens on their way to experts, back, and of the gradients of what came back and of what
        was sent: each of the hop that departs first, and of the other one."""
        cluster, itemsize, kind = self.rates.cluster, self.rates.itemsize, self._dispatch
        if kind != "hops":
            once = self._travel_at_once(tokens, experts, sends_once=kind == "once")
            return ((once, 0.0),) * 4
        outer, inner = self.groups["ep_outer"], self.groups["ep_inner"]
        narrows = self.settings.parallel.expert_dispatch == "fp8"
        rows = rows_of_token(self.c, self.settings, experts.router, outer.size, inner.size)
        hops = TokenHops(experts.router, outer.size, inner.size, experts.width, itemsize, narrows, rows)

        def seconds(way: str) -> tuple[float, float]:
            far, near = (
                cluster.collective("all_to_all", tokens * float(getattr(hop, way)), group)
                for hop, group in ((hops.outer, outer), (hops.inner, inner))
            )
            # On one node the outer hop is nothing.
            return (far, near) if outer.size > 1 else (near, far)

        return tuple(seconds(way) for way in ("there", "back", "gradient_there", "gradient_back"))

    def _travel_at_once(self, tokens: float, experts: MixtureWidths, sends_once: bool) -> float:
        """Seconds of one way by other systems: a row for each expert in one all-to-all; or, `sends_once`, a token once to each
        node that it has experts on, and there to each rank, both at the same time, the slower of which counts."""
        rates, group = self.rates, self.groups["ep"]
        cluster, width = rates.cluster, experts.width * rates.itemsize * rates.profile.row_bytes
        if not sends_once:
            return cluster.collective("all_to_all", tokens * experts.top_k * width, group)
        nodes, ranks = (count * float(experts.router.reach(count)) for count in (group.nodes, group.size))
        within = cluster.collective("all_to_all", tokens * ranks * width, Group(group.size // group.nodes, 1))
        crossing = tokens * nodes * (group.nodes - 1) / group.nodes * width
        return max(within, cluster.message(crossing, group)) if group.nodes > 1 else within

    def ep(self) -> Mapping[str, Exposure]:
        """Exposures of rows that travel to experts and back: of `ep`, or of each hop where there are two."""
        c, layer, work, profile = self.c, self.layer, self.work, self.rates.profile
        if c.ep == 1 or layer.experts is None:
            return {}
        tokens = c.tokens / (1 if c.expert_tp == c.tp else c.tp)
        ways = self._travel(tokens, layer.experts)
        again = c.checkpointing != "none"
        forward, backward = ([sum(of_hop, 0.0) for of_hop in zip(*each, strict=True)] for each in (ways[:2], ways[2:]))
        if self.settings.parallel.expert_overlap:
            late, late_back = self._late_of_halves(ways)
        else:
            # Backward has no shared experts left to compute under.
            late, late_back = [forward[0] - hide(ways[0][0], work.shared)[1], forward[1]], backward
        if profile.hides_ep:
            hidden = hide(late[0], profile.hides_ep * work.forward.total)[1]
            hidden_back = hide(backward[0], profile.hides_ep * work.backward)[1]
            behind = forward[0] - late[0] + hidden + hidden_back
            return {"ep": Exposure(late[0] - hidden, backward[0] - hidden_back + again * late[0], behind)}
        hops = [
            Exposure(own, own_back + again * own, (1 + again) * (whole - own) + whole_back - own_back)
            for own, own_back, whole, whole_back in zip(late, late_back, forward, backward, strict=True)
        ]
        # Where there is one hop, the other takes no time.
        return dict(zip(("ep_outer", "ep_inner") if self._has_two_hops else ("ep",), hops, strict=False))

    @property
    def _dispatch(self) -> str:
        """The way of tokens: the profile's, or DeepEP's."""
        return "once" if self.settings.parallel.expert_backend == "deepep" else self.rates.profile.dispatch

    @property
    def _has_two_hops(self) -> bool:
        is_ours = self._dispatch == "hops"
        return is_ours and min(self.groups["ep_outer"].size, self.groups["ep_inner"].size) > 1

    def _late_of_halves(self, ways: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
        """Exposed seconds of both hops in forward and in backward, of a layer whose halves compute by turns. ways: seconds of the
        hop that departs first and of the other one, as `_travel` has them."""
        work = self.work
        (far, near), (far_back, near_back), *of_gradients = ([each / 2 for each in way] for way in ways)
        (far_in, near_in), (far_out, near_out) = of_gradients
        # Shared experts and an attention's output projection are in one turn, all else in front of experts in another.
        late, inside = work.row_forward + work.shared * 2 / 3, work.inside
        forward = [work.forward.total - late - inside, late, 0.0, inside * 2 / 3, inside / 3, 0.0, 0.0]
        there = [NO_WAY, (0, far), (1, near), NO_WAY, (1, near_back), (0, far_back)]
        gradients = [(0, far_in), (1, near_in), NO_WAY, (1, near_out), (0, far_out), NO_WAY]
        if not self._has_two_hops:
            forward = [forward[0] + late, inside, 0.0]
            there, gradients = [(0, far), (0, far_back)], [(0, far_in), (0, far_out)]
        scale = (work.input.total + work.weight.total) / work.forward.total
        turns = [each / 2 for each in forward]
        halves = Halves(len(turns), int(self._has_two_hops))
        backward = [each * scale for each in reversed(turns)]
        return halves.find_late(turns, there, halves.order), halves.find_late(backward, gradients, halves.reversed)


# No rows depart at the end of a turn.
NO_WAY = (0, 0.0)


@dataclass(frozen=True)
class Halves:
    """Two halves of a layer that compute by turns, so many each, of which half 0 is `ahead` (parallel/experts/halves.py)."""

    count: int
    ahead: int

    @property
    def order(self) -> list[tuple[int, int]]:
        """(half, turn) in forward."""
        turns = [(turn + self.ahead * half, half, turn) for half in range(2) for turn in range(self.count)]
        return [(half, turn) for _, half, turn in sorted(turns)]

    @property
    def reversed(self) -> list[tuple[int, int]]:
        """(half, turn) in backward, whose turns are counted from its beginning."""
        return [(half, self.count - 1 - turn) for half, turn in self.order[::-1]]

    def find_late(
        self, turns: Sequence[float], ways: Sequence[tuple[int, float]], order: Sequence[tuple[int, int]]
    ) -> list[float]:
        """Seconds in which neither half computes, by the hop that is waited for. turns: seconds of each; ways: (hop, seconds) of
        what departs at the end of each turn but the last, for the next. Over one hop one way follows the other."""
        clock, free, late = 0.0, [0.0, 0.0], [0.0, 0.0]
        arrival: dict[tuple[int, int], tuple[int, float]] = {}
        for half, turn in order:
            hop, at = arrival.get((half, turn), (0, 0.0))
            late[hop] += max(0.0, at - clock)
            clock = max(clock, at) + turns[turn]
            if turn < self.count - 1:
                hop, seconds = ways[turn]
                if seconds:
                    free[hop] = max(clock, free[hop]) + seconds
                    arrival[half, turn + 1] = hop, free[hop]
        return late
