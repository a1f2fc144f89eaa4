"""The space of layouts: the values that each choice may take on so many ranks, and those that the user has fixed.

Nothing is refused here that a recipe could say, except what another layout stands for, exactly or at no cost:

- schedules where there is one stage, and shards where there is one rank: all say the same
- gpipe: 1f1b is as long and holds fewer microbatches
- sequence parallelism without tp, and how a sequence is divided without cp: they do nothing
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

from framework.errors import RecipeError, TopologyError
from framework.mesh.topology import shards_within_node
from framework.plan.candidate import Candidate, Checkpointing, method_of, remember
from framework.recipe.check import value_of
from framework.recipe.derive import count_nodes, count_ranks, divisors
from framework.recipe.schema import Recipe

# The fields of a candidate that each choice sets (of `offload`, which names), in the order in which they are chosen: what decides
# most of a step's time first.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "degrees": ("dp", "cp", "tp", "pp"),
    "context": ("ulysses", "is_gather"),
    "sequence": ("sequence",),
    "experts": ("ep", "expert_tp"),
    "microbatch": ("sequences", "accumulation"),
    "schedule": ("schedule", "virtual"),
    "checkpointing": ("checkpointing",),
    "activations": ("offload.activations",),
    "zero": ("zero", "shard"),
    "states": ("offload.optimizer", "offload.parameters"),
}
Values = tuple[Mapping[str, Any], ...]
Keeps = Callable[[Recipe, Candidate], bool]


@dataclass(frozen=True)
class Space:
    """The layouts of `base` on its ranks. pinned: keys whose values stay as the recipe has them; num_layers: of the model;
    num_experts: of a mixture, 0 of a dense model."""

    base: Recipe
    pinned: frozenset[str]
    num_layers: int
    num_experts: int = 0

    @cached_property
    def world(self) -> int:
        """Ranks of each layout."""
        return count_ranks(self.base)

    @cached_property
    def ranks_per_node(self) -> int:
        """Ranks of a node."""
        return max(1, self.world // count_nodes(self.base))

    @cached_property
    def sequences_per_step(self) -> int:
        """Sequences of a step. RecipeError where the recipe does not state them."""
        batch = self.base.batch
        stated = batch.sequences_per_step or (batch.tokens_per_step or 0) // batch.context
        if not stated:
            raise RecipeError(
                "the batch of one step is not stated: batch.sequences_per_step=1024, or batch.tokens_per_step=..."
            )
        return stated

    def root(self) -> Candidate:
        """A candidate with no choice made."""
        return Candidate(context=self.base.batch.context, ranks_per_node=self.ranks_per_node)

    def values(self, choice: str, c: Candidate) -> Values:
        """The values that a choice may take behind those that `c` has made, in order, as fields of a candidate."""
        found: Values = getattr(self, f"_{choice}")(c)
        return found

    def children(self, choice: str, c: Candidate) -> Iterator[Candidate]:
        """`c` with each value of a choice."""
        return map(c.changed, self.values(choice, c))

    def _open(self, choice: str, c: Candidate, found: Iterable[Mapping[str, Any]]) -> Values:
        """The values that what the user has fixed lets a choice take."""
        keeps = [keep for key, keep in KEEPS[choice].items() if key in self.pinned]
        return tuple(each for each in found if all(keep(self.base, c.changed(each)) for keep in keeps))

    # --- the choices, each by what its values depend on

    @remember()
    def _degrees(self, c: Candidate) -> Values:
        found = [
            {"tp": tp, "pp": pp, "cp": cp, "dp": max(1, self.world // tp // pp // cp)}
            for tp in self._degrees_of("tp", self.world)
            for pp in self._degrees_of("pp", self.world // tp)
            for cp in self._degrees_of("cp", self.world // tp // pp)
        ]
        return self._open("degrees", c, found)

    def _degrees_of(self, name: str, ranks: int) -> list[int]:
        """Divisors of `ranks`; or the pinned value, which the rules then judge."""
        if f"parallel.{name}" in self.pinned:
            return [getattr(self.base.parallel, name)]
        return divisors(max(1, ranks))

    @remember("cp", "tp")
    def _context(self, c: Candidate) -> Values:
        found = [{"ulysses": ulysses, "is_gather": False} for ulysses in divisors(c.cp)]
        found += [{"ulysses": 1, "is_gather": True}] * (c.cp > 1)
        return self._open("context", c, found)

    @remember("tp")
    def _sequence(self, c: Candidate) -> Values:
        return self._open("sequence", c, [{"sequence": each} for each in ((True, False) if c.tp > 1 else (False,))])

    @remember("batch", "tp")
    def _experts(self, c: Candidate) -> Values:
        pinned = self.base.parallel.ep if "parallel.ep" in self.pinned else 1
        degrees = divisors(c.batch * c.tp) if self.num_experts else sorted({1, pinned})
        slices = sorted({1, c.tp}, reverse=True) if self.num_experts else [c.tp]
        return self._open("experts", c, [{"ep": ep, "expert_tp": each} for ep in degrees for each in slices])

    @remember("dp")
    def _microbatch(self, c: Candidate) -> Values:
        share = self.sequences_per_step // c.dp
        # Where they do not divide among the ranks, the rule says it of a microbatch of one.
        sizes = divisors(share) if share * c.dp == self.sequences_per_step else [1]
        if "batch.sequences_per_microbatch" in self.pinned:
            sizes = [self.base.batch.sequences_per_microbatch]
        return tuple({"sequences": size, "accumulation": max(1, share // size)} for size in sizes)

    @remember("pp")
    def _schedule(self, c: Candidate) -> Values:
        names = [("1f1b", 1)]
        if c.pp > 1:
            names += [("zb_h1", 1), ("zbv", 2), ("dualpipe_v", 2)]
            names += [("interleaved", virtual) for virtual in self._virtual_stages(c.pp)]
            names += [("gpipe", 1)] * ("pipeline.schedule" in self.pinned and self.base.pipeline.schedule == "gpipe")
        return self._open("schedule", c, [{"schedule": name, "virtual": virtual} for name, virtual in names])

    def _virtual_stages(self, pp: int) -> list[int]:
        """Powers of two, and as many as there are layers for; at least 2, which the rules then judge."""
        most = self.num_layers // pp
        powers = [1 << bits for bits in range(1, max(most, 2).bit_length()) if 1 << bits <= max(most, 2)]
        own = self.base.pipeline.virtual_stages
        pinned = [own] if own and own > 1 and "pipeline.virtual_stages" in self.pinned else []
        return sorted({*powers, *([most] if most > 1 else []), *pinned})

    @remember("world")
    def _checkpointing(self, c: Candidate) -> Values:
        return self._open("checkpointing", c, [{"checkpointing": each} for each in get_args(Checkpointing)])

    @remember("world")
    def _activations(self, c: Candidate) -> Values:
        return self._open("activations", c, [{"offload": frozenset(each)} for each in ((), ("activations",))])

    @remember("batch", "tp")
    def _zero(self, c: Candidate) -> Values:
        stages = [0, 1, 2, 3]
        if c.batch == 1:  # one rank has everything whatever the stage is; a stage that is asked for stays
            stages = [self.base.zero.stage if "zero.stage" in self.pinned else 0]
        shards = [each for each in reversed(divisors(c.batch)) if each > 1 or c.batch == 1]
        found = [{"zero": stage, "shard": each} for stage in stages for each in (shards if stage else [1])]
        return self._open("zero", c, found)

    @remember("offload")
    def _states(self, c: Candidate) -> Values:
        places = ((), ("optimizer",), ("optimizer", "parameters"), ("parameters",))
        return self._open("states", c, [{"offload": c.offload | set(each)} for each in places])


def _keeps_context(base: Recipe, c: Candidate) -> bool:
    found = base.parallel.context
    if isinstance(found, list):
        return c.cp == 1 or (c.ulysses == found[0] and not c.is_gather)
    return c.cp == 1 or method_of(c) == found


def _keeps_shard(base: Recipe, c: Candidate) -> bool:
    within = base.zero.shard_within
    if c.zero == 0 or within != "node":
        return c.zero == 0 or c.shard == (within or c.batch)
    try:
        return c.shard == shards_within_node(c.world, c.batch, c.tp, c.ranks_per_node, count_nodes(base))
    except TopologyError:
        return False


def _keeps(key: str, name: str) -> Keeps:
    """Whether the candidate's field has the value of the key."""
    return lambda base, c: bool(value_of(base, key) == getattr(c, name))


def _keeps_offload(name: str) -> dict[str, Keeps]:
    return {f"memory.offload.{name}": lambda base, c: (name in c.offload) == bool(getattr(base.memory.offload, name))}


# The keys that may fix each choice, and whether a candidate has the recipe's value of it.
KEEPS: Mapping[str, Mapping[str, Keeps]] = {
    "degrees": {
        "parallel.dp": lambda base, c: base.parallel.dp in (None, c.dp),
        **{f"parallel.{name}": _keeps(f"parallel.{name}", name) for name in ("tp", "pp", "cp")},
    },
    "context": {"parallel.context": _keeps_context},
    "sequence": {"parallel.sequence": lambda base, c: c.tp == 1 or c.sequence == base.parallel.sequence},
    "experts": {
        "parallel.ep": _keeps("parallel.ep", "ep"),
        "parallel.expert_tp": lambda base, c: base.parallel.expert_tp in (None, c.expert_tp),
    },
    "schedule": {
        "pipeline.schedule": lambda base, c: c.pp == 1 or c.schedule == base.pipeline.schedule,
        "pipeline.virtual_stages": lambda base, c: c.pp == 1 or base.pipeline.virtual_stages in (None, c.virtual),
    },
    "checkpointing": {"memory.activation_checkpointing": _keeps("memory.activation_checkpointing", "checkpointing")},
    "activations": _keeps_offload("activations"),
    "zero": {"zero.stage": _keeps("zero.stage", "zero"), "zero.shard_within": _keeps_shard},
    "states": _keeps_offload("optimizer") | _keeps_offload("parameters"),
}
