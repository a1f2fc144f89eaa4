"""Seconds of ZeRO's collectives in a stage, and of a step beside forward and backward: the update, states that travel, saves.

Collectives are exposed or hidden under computation, by the order of parallel/zero/hooks.py:

    forward    a unit is gathered while the one before it computes; nothing hides the first one's gather
    backward   the same from the last unit to the first; a unit that forward has just left is still there. Reductions run under
               what is left of backward, behind the gathers: on one link what is needed first is sent first
    the end    nothing hides the reductions of the units that backward leaves last, the first layer and the embedding

Parameters that are kept are gathered in a step's first forward alone; gradients that are kept are reduced in its last backward.

The update is passes over memory: of each owned element the gradient and the master, each moment and the parameter are read and
written once (one fused kernel), and the gradient once before that for its norm. Offloaded states go over the host's link,
gradients there and parameters back, and are updated at the rate of that link. An asynchronous save holds training up while
states are copied to the host; a synchronous one until the node's disk has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt

from framework.comm.codec import REDUCE_CODECS
from framework.plan.candidate import Candidate, remember
from framework.plan.cluster import ClusterRates, Group, place_group
from framework.plan.exposure import Groups, hide
from framework.plan.profile import Profile
from framework.plan.shape import ModelShape
from framework.recipe.schema import Recipe, Zero

# Bytes of a gradient as codes, their scales included; and from how many on a backend adds it up itself.
CODE_BYTES = {kind: codec.message_bytes(codec.block) / codec.block for kind, codec in REDUCE_CODECS.items()}
WIDE_BYTES = 4.0
# Bytes that decoding one number reads and writes, by one kernel.
DECODED_BYTES = 3.0


@dataclass(frozen=True)
class ShardedUnit:
    """Equal units of a stage. dense, experts: elements of one on a rank before ZeRO, and those of them that are trained; forward,
    backward: its seconds, no backward where none comes."""

    dense: float
    experts: float
    trained_dense: float
    trained_experts: float
    forward: float
    backward: float
    count: int = 1
    is_embedding: bool = False
    is_head: bool = False

    @property
    def trained(self) -> "ShardedUnit":
        """The unit with its trained elements alone: those that have gradients."""
        return replace(self, dense=self.trained_dense, experts=self.trained_experts)


@dataclass(frozen=True)
class ShardingTime:
    """Exposed seconds, of a microbatch in forward and in backward, and once a step; and hidden ones."""

    gathers: tuple[float, float] = (0.0, 0.0)
    reductions: float = 0.0
    gathers_once: float = 0.0
    reductions_once: float = 0.0
    hidden: float = 0.0
    hidden_once: float = 0.0


@dataclass(frozen=True)
class Sharding:
    """ZeRO's choices. zero: the recipe's, but for the stage, which is the candidate's; parameter_bytes: of one as it travels;
    gradient_bytes: of one as it is reduced; keeps_codes: parameters are frozen codes, which are decoded for each use."""

    zero: Zero
    parameter_bytes: float
    gradient_bytes: float
    cluster: ClusterRates
    profile: Profile
    keeps_codes: bool = False

    def time(self, units: Sequence[ShardedUnit], c: Candidate, groups: Groups) -> ShardingTime:
        """Seconds of a stage, whose units are in order of computation."""
        of_dense, of_experts = (groups["shard"], groups["replica"]), (groups["expert_shard"], groups["expert_replica"])
        trained = [each.trained for each in units]
        messages, of_gradients = (
            [self._messages_s(each.dense, each.experts, of_dense, of_experts, c.offloads_parameters) for each in own]
            for own in (units, trained)
        )
        gathers = [each[0] for each in messages]
        reductions, sums = ([each[place] for each in of_gradients] for place in (1, 2))
        keeps_parameters = (c.zero < 3 or self.zero.keep_gathered) and not self.keeps_codes
        keeps_gradients = c.zero < 2 or self.zero.accumulate == "local"
        late, hidden = self._forward(units, gathers)
        copied = self._copies_s(units, self.parameter_bytes, self.profile.gather_copies, groups)
        if self.keeps_codes:  # also where nothing is sent
            elements = sum(each.count * (each.dense + each.experts) for each in units)
            copied += elements * DECODED_BYTES / self.cluster.memory_rate
        elif self.zero.quantize_gather != "none":  # codes are read, and two bytes written for each
            copied += self._copies_s(units, DECODED_BYTES, 1.0, groups)
        # From the second time in a step on units come from the second copy, if there is one.
        nearer = self._secondary(groups)
        again = [
            self._messages_s(each.dense, each.experts, *nearer, c.offloads_parameters)[0] if nearer else gather
            for each, gather in zip(units, gathers, strict=True)
        ]
        reduced = self._copies_s(trained, self.gradient_bytes, self.profile.reduce_copies, groups)
        late += copied
        if keeps_parameters:
            gathers_once, hidden_once, per_microbatch, back, hidden_back = late, hidden, 0.0, 0.0, 0.0
            hidden = 0.0
        else:
            first = late
            late, hidden = self._forward(units, again)
            per_microbatch = late + copied
            gathers_once, hidden_once = first - per_microbatch, 0.0
            back, hidden_back = self._backward(units, again)
            back += copied
        room = sum(each.count * each.backward for each in units) - hidden_back
        room *= self.profile.hides_reductions
        again_late, again_hidden = 0.0, 0.0
        if not keeps_gradients:
            # Reductions that a backward leaves under way have the next forward's time as well.
            whole = sum(each.count * seconds for each, seconds in zip(units, reductions, strict=True))
            again_late, again_hidden = hide(whole, room + sum(each.count * each.forward for each in units))
        final = [seconds + more for seconds, more in zip(reductions, sums, strict=True)] if keeps_gradients else sums
        last = self._tail(units, final)
        body = sum(each.count * seconds for each, seconds in zip(units, final, strict=True)) - last
        body_late, body_hidden = hide(body, room - again_hidden)
        return ShardingTime(
            (per_microbatch, back),
            again_late + (0.0 if keeps_gradients else reduced),
            gathers_once,
            last + body_late + (reduced if keeps_gradients else 0.0),
            hidden + hidden_back + again_hidden,
            hidden_once + body_hidden,
        )

    def _secondary(self, groups: Groups) -> tuple[tuple[Group, Group], tuple[Group, Group]] | None:
        """Ranks that keep a second copy among themselves, beside those that have copies of a shard, of dense parameters and of
        experts; None without one."""
        if groups["secondary"].size == 1:
            return None
        experts = "expert_secondary" if groups["expert_secondary"].size > 1 else "expert_shard"
        return (groups["secondary"], groups["replica"]), (groups[experts], groups["expert_replica"])

    @remember()
    def _messages_s(
        self,
        dense: float,
        experts: float,
        of_dense: tuple[Group, Group],
        of_experts: tuple[Group, Group],
        uploads: bool,
    ) -> tuple[float, float, float]:
        """(gather, reduction, sum over replicas) of a unit of so many elements. of_dense, of_experts: ranks that shard them, and
        those that have copies of a shard; uploads: shards live on the host."""
        seconds, wide, narrow = self.cluster.collective, self.gradient_bytes, self.parameter_bytes
        (shard, replica), (expert_shard, copies) = of_dense, of_experts
        own_dense, own_experts = dense / shard.size, experts / expert_shard.size
        # Shards that live on the host come up first.
        upload = (own_dense + own_experts) * narrow / self.cluster.host_rate if uploads else 0.0
        gather = upload + seconds("all_gather", dense * narrow, shard)
        gather += seconds("all_gather", experts * narrow, expert_shard)
        reduction = self._reduce_s(dense, shard) + self._reduce_s(experts, expert_shard)
        sums = seconds("all_reduce", own_dense * wide, replica) + seconds("all_reduce", own_experts * wide, copies)
        return gather, reduction, sums

    def _reduce_s(self, elements: float, group: Group) -> float:
        """Seconds of a reduce-scatter. What travels coded is exchanged in two hops, whose messages are written and read again."""
        cluster, codes = self.cluster, CODE_BYTES.get(self.zero.quantize_reduce)
        size = self.gradient_bytes if codes is None or group.nodes == 1 else codes
        if size == self.gradient_bytes >= WIDE_BYTES:
            return cluster.collective("reduce_scatter", elements * size, group)
        inner = Group(group.size // group.nodes, 1)
        across = Group(group.nodes, group.nodes)
        hops = ((elements, inner), (elements / inner.size, across)) if group.nodes > 1 else ((elements, inner),)
        return sum(
            cluster.collective("all_to_all", each * size, ranks)
            + each * (2 * WIDE_BYTES + 2 * size) / cluster.memory_rate
            for each, ranks in hops
            if ranks.size > 1
        )

    def _copies_s(self, units: Sequence[ShardedUnit], size: float, passes: float, groups: Groups) -> float:
        """Seconds of copying what is gathered or reduced, which the compute device does."""
        rate = self.cluster.memory_rate
        dense = sum(each.count * each.dense for each in units) * (groups["shard"].size > 1)
        experts = sum(each.count * each.experts for each in units) * (groups["expert_shard"].size > 1)
        return passes * size * (dense + experts) / rate

    def _forward(self, units: Sequence[ShardedUnit], gathers: Sequence[float]) -> tuple[float, float]:
        """(exposed, hidden) seconds of all gathers in a forward."""
        late = hidden = before = 0.0
        for unit, seconds in zip(units, gathers, strict=True):
            for times, behind in ((1, before), (unit.count - 1, unit.forward)):
                shown, under = hide(seconds, behind * self.profile.hides_gathers)
                late, hidden = late + times * shown, hidden + times * under
            before = unit.forward
        return late, hidden

    def _backward(self, units: Sequence[ShardedUnit], gathers: Sequence[float]) -> tuple[float, float]:
        late = hidden = 0.0
        behind: float | None = None
        for unit, seconds in zip(reversed(units), reversed(gathers), strict=True):
            if unit.is_embedding or not unit.backward:
                continue  # an embedding's gradient needs no weight, and below the first trained unit there is none
            # The head is the unit that forward read last: it is still there.
            first = (0.0, 0.0) if behind is None and unit.is_head else hide(seconds, self._share(behind or 0.0))
            others = hide(seconds, self._share(unit.backward))
            late += first[0] + (unit.count - 1) * others[0]
            hidden += first[1] + (unit.count - 1) * others[1]
            behind = unit.backward
        return late, hidden

    def _share(self, seconds: float) -> float:
        return seconds * self.profile.hides_gathers

    def _tail(self, units: Sequence[ShardedUnit], seconds: Sequence[float]) -> float:
        """Seconds of what backward leaves last: the first layer with gradients, and the embedding, whose backward is short."""
        ends = [value for unit, value in zip(units, seconds, strict=True) if unit.is_embedding]
        layers = [value for unit, value in zip(units, seconds, strict=True) if value and not unit.is_embedding]
        return sum(ends) + sum(layers[:1])


# --- the update, saves and failures

# muon: of what adamw updates; one fewer of matrices.
MOMENTS: dict[str, int] = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 2}
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0}
# A run that says nothing of saves is taken to save so often, where failures are counted.
ASSUMED_INTERVAL_S = 3600.0
# From a failure to the first step behind it.
RESTART_S = 300.0


@dataclass(frozen=True)
class Update:
    """The update of one rank. itemsize: bytes of a parameter that forward reads."""

    settings: Recipe
    cluster: ClusterRates
    profile: Profile
    itemsize: int
    shape: ModelShape

    @property
    def _state_bytes(self) -> tuple[float, float, float]:
        """(master, gradient, all moments and the average) of an element."""
        precision = self.settings.precision
        wide = 8.0 if precision.master == "fp64" else 4.0
        master = 0.0 if precision.master == "none" else wide
        moment = wide if precision.moments == "fp32" else MOMENT_BYTES[precision.moments]
        average = wide * (self.settings.train.ema is not None)
        return master, wide, moment * (MOMENTS[self.settings.optim.name] - self.shape.matrices(1).share) + average

    def seconds(self, elements: float, c: Candidate) -> dict[str, float]:
        """Seconds of a rank that owns so many elements, by part. The norm's sum over ranks is not in it."""
        master, gradient, moments = self._state_bytes
        offload, cluster = self.settings.memory.offload, self.cluster
        away = elements * ("optimizer" in c.offload)
        moved = 2 * (master + moments) + gradient + self.itemsize * (1 if master else 2)
        norm = cluster.memory_seconds(elements * gradient) if elements else 0.0
        here = cluster.memory_seconds((elements - away) * moved * self.profile.optimizer_passes) if elements else 0.0
        host = away * (gradient + self.itemsize + moved) / cluster.host_rate
        if offload.home == "disk":
            host += away * 2 * (master + moments) * c.ranks_per_node / cluster.disk_rate
        return {"optimizer": norm + here + self._orthogonalize(elements, c), "offload": host}

    def _orthogonalize(self, elements: float, c: Candidate) -> float:
        """Seconds of Muon's iterations, and of the way of matrices to their owners and back, for a rank that owns so many
        elements and as many of whole matrices; a step waits for the busiest owner."""
        if self.settings.optim.name != "muon":
            return 0.0
        (ranks, balance), hidden, settings = self.shape.sharing(c), self.shape.hidden, self.settings.optim.muon
        work, send = self.shape.matrices(ranks), self.cluster.collective
        dtype = "bf16" if settings.dtype == "bf16" else "fp32"
        per_flop = self.cluster.matmul_seconds(hidden, hidden, hidden, dtype) / (2.0 * hidden**3)
        num_bytes = elements * (2 if dtype == "bf16" else 4)
        shard, tp, team = (
            place_group(size, stride, c.ranks_per_node, c.world)
            for size, stride in ((c.shard, c.tp), (c.tp, 1), (ranks, 1))
        )
        # Heads are on one rank of tp, and experts are not shared.
        hops = (shard, work.share), (tp, work.share - work.of_heads), (team, work.shared)
        way = 2 * sum(send("all_to_all", num_bytes * part, each) for each, part in hops)
        rows = num_bytes * work.grams * ranks * settings.steps
        way += send("all_to_all", rows, team) + 2 * send("all_gather", rows, team)
        return elements * work.flops * balance * per_flop + way

    def save(self, elements: float, c: Candidate, step_s: float) -> tuple[float, float]:
        """(seconds for which a save holds training up, seconds from one save to the next); 0 and 0 where nothing is saved on the
        way. elements: owned by the rank that owns most."""
        checkpoint, cluster = self.settings.checkpoint, self.cluster
        master, _, moments = self._state_bytes
        num_bytes = elements * (master or self.itemsize) + elements * moments
        on_node = min(c.world, c.ranks_per_node)
        stall_s = num_bytes / cluster.host_rate
        if checkpoint.mode == "sync":
            stall_s += num_bytes * on_node / cluster.disk_rate
        if checkpoint.every_steps is not None:
            return stall_s, checkpoint.every_steps * step_s
        if checkpoint.interval == "young_daly" and checkpoint.mtbf_hours:
            return stall_s, sqrt(2 * stall_s * checkpoint.mtbf_hours * 3600)
        return (stall_s, checkpoint.every_minutes * 60) if checkpoint.every_minutes else (0.0, 0.0)


def expected_goodput(failures_per_s: float, interval_s: float) -> float:
    """Share of the time that is no restart and no work done again: a failure loses half of the time since the last save, on
    average, and the restart."""
    return 1.0 / (1.0 + failures_per_s * (RESTART_S + (interval_s or ASSUMED_INTERVAL_S) / 2))
