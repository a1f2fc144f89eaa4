"""The space of layouts: the values that each choice may take on so many ranks, and those that the user has fixed.

Nothing is refused here that a recipe could say, except what another layout stands for, exactly or at no cost:

- schedules where there is one stage, and shards where there is one rank: all say the same
- gpipe: 1f1b is as long and holds fewer microbatches
- sequence parallelism without tp, and how a sequence is divided without cp: they do nothing
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

from framework.errors import RecipeError, TopologyError
from framework.mesh.topology import shards_within_node
from framework.plan.candidate import Candidate, Checkpointing, method_of
from framework.recipe.derive import count_nodes, count_ranks
from framework.recipe.layout_keys import value_of
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
Values = Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Space:
    """The layouts of `base` on its ranks. pinned: keys whose values stay as the recipe has them; num_layers: of the model;
    num_experts: of a mixture, 0 of a dense model."""

    base: Recipe
    pinned: frozenset[str]
    num_layers: int
    num_experts: int = 0
    _values: dict[Any, tuple[Mapping[str, Any], ...]] = field(default_factory=dict, repr=False, compare=False)

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

    def values(self, choice: str, c: Candidate) -> tuple[Mapping[str, Any], ...]:
        """The values that a choice may take behind those that `c` has made, in order, as fields of a candidate."""
        key = (choice, *_KEYS[choice](self, c))
        if key not in self._values:
            found = getattr(self, f"_{choice}")(c)
            self._values[key] = tuple(each for each in found if self._is_open(choice, c, each))
        return self._values[key]

    def children(self, choice: str, c: Candidate) -> Iterator[Candidate]:
        """`c` with each value of a choice."""
        return map(c.changed, self.values(choice, c))

    # --- the choices

    def _degrees(self, c: Candidate) -> Values:
        for tp in self._degrees_of("tp", self.world):
            for pp in self._degrees_of("pp", self.world // tp):
                for cp in self._degrees_of("cp", self.world // tp // pp):
                    yield {"tp": tp, "pp": pp, "cp": cp, "dp": max(1, self.world // tp // pp // cp)}

    def _degrees_of(self, name: str, ranks: int) -> list[int]:
        """Divisors of `ranks`; or the pinned value, which the rules then judge."""
        if f"parallel.{name}" in self.pinned:
            return [getattr(self.base.parallel, name)]
        return divisors(max(1, ranks))

    def _context(self, c: Candidate) -> Values:
        for ulysses in divisors(c.cp):
            yield {"ulysses": ulysses, "is_gather": False}
        if c.cp > 1:
            yield {"ulysses": 1, "is_gather": True}

    def _sequence(self, c: Candidate) -> Values:
        return [{"sequence": True}, {"sequence": False}] if c.tp > 1 else [{"sequence": False}]

    def _experts(self, c: Candidate) -> Values:
        pinned = self.base.parallel.ep if "parallel.ep" in self.pinned else 1
        degrees = divisors(c.dp * c.cp * c.tp) if self.num_experts else sorted({1, pinned})
        slices = sorted({1, c.tp}, reverse=True) if self.num_experts else [c.tp]
        for ep in degrees:
            for expert_tp in slices:
                yield {"ep": ep, "expert_tp": expert_tp}

    def _microbatch(self, c: Candidate) -> Values:
        share = self.sequences_per_step // c.dp
        # Where they do not divide among the ranks, the rule says it of a microbatch of one.
        sizes = divisors(share) if share * c.dp == self.sequences_per_step else [1]
        if "batch.sequences_per_microbatch" in self.pinned:
            sizes = [self.base.batch.sequences_per_microbatch]
        for size in sizes:
            yield {"sequences": size, "accumulation": max(1, share // size)}

    def _schedule(self, c: Candidate) -> Values:
        pinned = self.base.pipeline
        if c.pp == 1:
            names = [("1f1b", 1)]
        else:
            names = [("1f1b", 1), ("zb_h1", 1), ("zbv", 2), ("dualpipe_v", 2)]
            names += [("interleaved", virtual) for virtual in self._virtual_stages(c.pp)]
        if "pipeline.schedule" in self.pinned and c.pp > 1:
            names += [("gpipe", 1)] * (pinned.schedule == "gpipe")
        for schedule, virtual in names:
            yield {"schedule": schedule, "virtual": virtual}

    def _virtual_stages(self, pp: int) -> list[int]:
        """Powers of two, and as many as there are layers for; at least 2, which the rules then judge."""
        most = self.num_layers // pp
        powers = [1 << bits for bits in range(1, max(most, 2).bit_length()) if 1 << bits <= max(most, 2)]
        own = self.base.pipeline.virtual_stages
        pinned = [own] if own and own > 1 and "pipeline.virtual_stages" in self.pinned else []
        return sorted({*powers, *([most] if most > 1 else []), *pinned})

    def _checkpointing(self, c: Candidate) -> Values:
        return [{"checkpointing": each} for each in get_args(Checkpointing)]

    def _activations(self, c: Candidate) -> Values:
        return [{"offload": frozenset()}, {"offload": frozenset({"activations"})}]

    def _zero(self, c: Candidate) -> Values:
        batch, stages = c.dp * c.cp, [0, 1, 2, 3]
        if batch == 1:  # one rank has everything whatever the stage is; a stage that is asked for stays
            stages = [self.base.zero.stage if "zero.stage" in self.pinned else 0]
        for stage in stages:
            shards = [1] if stage == 0 else [each for each in divisors(batch) if each > 1 or batch == 1]
            for shard in reversed(shards):
                yield {"zero": stage, "shard": shard}

    def _states(self, c: Candidate) -> Values:
        for states in ((), ("optimizer",), ("optimizer", "parameters"), ("parameters",)):
            yield {"offload": c.offload | set(states)}

    # --- what is fixed

    def _is_open(self, choice: str, c: Candidate, values: Mapping[str, Any]) -> bool:
        """Whether what the user has fixed lets a choice take these values."""
        checks = _PINS[choice]
        return all(key not in self.pinned or is_same(self, c.changed(values)) for key, is_same in checks.items())


def divisors(number: int) -> list[int]:
    """Divisors in rising order."""
    return [each for each in range(1, number + 1) if number % each == 0]


def _keeps_dp(space: Space, c: Candidate) -> bool:
    return space.base.parallel.dp in (None, c.dp)


def _keeps_context(space: Space, c: Candidate) -> bool:
    found, cp = space.base.parallel.context, c.cp
    if isinstance(found, list):
        return cp == 1 or (c.ulysses == found[0] and not c.is_gather)
    return cp == 1 or method_of(c) == found


def _keeps_experts(space: Space, c: Candidate) -> bool:
    return space.base.parallel.expert_tp in (None, c.expert_tp)


def _keeps_virtual(space: Space, c: Candidate) -> bool:
    return c.pp == 1 or space.base.pipeline.virtual_stages in (None, c.virtual)


def _keeps_shard(space: Space, c: Candidate) -> bool:
    within, batch = space.base.zero.shard_within, c.dp * c.cp
    if c.zero == 0:
        return True
    if within == "node":
        nodes = count_nodes(space.base)
        try:
            return c.shard == shards_within_node(space.world, batch, c.tp, space.ranks_per_node, nodes)
        except TopologyError:
            return False
    return c.shard == (within or batch)


def _keeps_offload(name: str) -> Any:
    def is_same(space: Space, c: Candidate) -> bool:
        return (name in c.offload) == bool(getattr(space.base.memory.offload, name))

    return is_same


def _keeps(key: str, field_name: str) -> Any:
    def is_same(space: Space, c: Candidate) -> bool:
        return bool(value_of(space.base, key) == getattr(c, field_name))

    return is_same


# Of each choice, the keys that may fix it, and whether a candidate has their value.
_PINS: Mapping[str, Mapping[str, Any]] = {
    "degrees": {
        "parallel.dp": _keeps_dp,
        **{f"parallel.{name}": _keeps(f"parallel.{name}", name) for name in ("tp", "pp", "cp")},
    },
    "context": {"parallel.context": _keeps_context},
    "sequence": {"parallel.sequence": lambda space, c: c.tp == 1 or c.sequence == space.base.parallel.sequence},
    "experts": {"parallel.ep": _keeps("parallel.ep", "ep"), "parallel.expert_tp": _keeps_experts},
    "microbatch": {},
    "schedule": {
        "pipeline.schedule": lambda space, c: c.pp == 1 or c.schedule == space.base.pipeline.schedule,
        "pipeline.virtual_stages": _keeps_virtual,
    },
    "checkpointing": {"memory.activation_checkpointing": _keeps("memory.activation_checkpointing", "checkpointing")},
    "activations": {"memory.offload.activations": _keeps_offload("activations")},
    "zero": {"zero.stage": _keeps("zero.stage", "zero"), "zero.shard_within": _keeps_shard},
    "states": {
        "memory.offload.optimizer": _keeps_offload("optimizer"),
        "memory.offload.parameters": _keeps_offload("parameters"),
    },
}
# What the values of a choice depend on, beside the space.
_KEYS: Mapping[str, Any] = {
    "degrees": lambda space, c: (),
    "context": lambda space, c: (c.cp, c.tp),
    "sequence": lambda space, c: (c.tp,),
    "experts": lambda space, c: (c.dp * c.cp * c.tp, c.tp),
    "microbatch": lambda space, c: (c.dp,),
    "schedule": lambda space, c: (c.pp,),
    "checkpointing": lambda space, c: (),
    "activations": lambda space, c: (),
    "zero": lambda space, c: (c.dp * c.cp, c.tp),
    "states": lambda space, c: (c.offload,),
}
