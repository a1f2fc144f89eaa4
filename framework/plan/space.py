"""The space of layouts: the values that each choice may take on so many ranks, those that the user has fixed, and
constraints, which refuse some of them by the rules of recipes and by the model.

Nothing is left out of the values that a recipe could say, except what another layout stands for, exactly or at no cost:

- schedules where there is one stage, and shards where there is one rank: all say the same
- gpipe: 1f1b is as long and holds fewer microbatches
- sequence parallelism without tp, and how a sequence is divided without cp: they do nothing

A rule of `recipe/check.py` says which keys it reads. So it is asked once for all layouts that agree in these, as soon as a
search has chosen them, of a real recipe: nothing here knows what is legal.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, wraps
from typing import Any, Literal, get_args

from framework.errors import MeshwrightError, RecipeError, TopologyError
from framework.mesh.token_layout import ContextSlices
from framework.mesh.topology import shards_within_node
from framework.model.load import layer_configs, refuse_dropped_layers
from framework.model.stage import StageBounds, refuse_shared_layers, refuse_sliced_values
from framework.parallel.attention import (
    find_shared_rope,
    find_whole,
    probe_causes,
    refuse_sequence,
    refuse_undivided_context,
    refuse_uneven_heads,
)
from framework.parallel.experts.deep_rows import refuse_deep_ranks
from framework.parallel.experts.split import check_experts
from framework.parallel.pipeline.pipeline import refuse_few_layers
from framework.plan.candidate import Candidate, Checkpointing, method_of, recipe_of, remember
from framework.plan.cluster import place_group
from framework.plan.shape import DEGREES, ModelShape
from framework.recipe.check import FOLLOWING_KEYS, LAYOUT_KEYS, layout_rules
from framework.recipe.derive import count_nodes, count_ranks, divisors
from framework.recipe.keys import value_of
from framework.recipe.layout_rules import EXPERT_KEYS
from framework.recipe.problem import Problem
from framework.recipe.schema import Parallel, Recipe

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
# --- constraints
Kind = Literal["rule", "model", "memory", "node"]
# The fields of a candidate on which the value of a key depends, in the recipe that `recipe_of` makes of it.
FIELDS_OF_KEYS: dict[str, tuple[str, ...]] = {
    **{f"parallel.{name}": (name,) for name in ("dp", "tp", "pp", "cp", "ep")},
    "parallel.context": ("cp", "ulysses", "is_gather"),
    "parallel.expert_tp": ("ep", "tp", "expert_tp"),
    **dict.fromkeys(("parallel.sequence", "parallel.overlap", "memory.gathered_inputs"), ("sequence", "tp")),
    **{f"parallel.{name}": ("ep",) for name in EXPERT_KEYS},
    **dict.fromkeys(("pipeline.schedule", "pipeline.virtual_stages"), ("schedule", "virtual")),
    "pipeline.layers": ("pp", "schedule", "virtual"),
    "pipeline.table": (),
    "pipeline.fill_bubbles": ("pp",),
    **dict.fromkeys(("zero.stage", "zero.accumulate", "zero.keep_gathered", "zero.quantize_reduce"), ("zero",)),
    **dict.fromkeys(("zero.quantize_gather", "zero.quantize_min_elements"), ("zero",)),
    "zero.secondary_shard": ("zero", "shard", "dp", "cp", "tp", "pp"),
    "optim.muon.ranks_per_matrix": ("zero", "shard", "dp", "cp", "tp", "pp"),
    **dict.fromkeys(("zero.shard_within", "zero.optimizer_within"), ("zero", "shard", "dp", "cp")),
    **{f"memory.{name}": ("checkpointing",) for name in ("activation_checkpointing", "kept_operations", "budget_gb")},
    **{f"memory.offload.{name}": (f"offload.{name}",) for name in ("activations", "optimizer", "parameters")},
    **{f"memory.offload.{name}": ("offload.optimizer",) for name in ("home", "disk_path")},
    "batch.sequences_per_microbatch": ("sequences",),
}


def _as_reason(check: Callable[["ModelRules", Candidate], None]) -> Callable[["ModelRules", Candidate], str | None]:
    """A check that gives what it would raise, in one line."""

    def refuse(self: "ModelRules", c: Candidate) -> str | None:
        try:
            check(self, c)
        except MeshwrightError as error:
            return " ".join(str(error).split())
        return None

    return wraps(check)(refuse)


@dataclass(frozen=True)
class ModelRules:
    """Degrees that a model cannot have: the reason in one line, or None. Rules of recipes (degrees that do not multiply to the
    world, batches that do not divide) are not asked here."""

    shape: ModelShape

    def refuse(self, c: Candidate) -> str | None:
        """The first reason against a candidate."""
        refused = self.refuse_pp(c) or self.refuse_experts(c) or self.refuse_tp(c) or self.refuse_cp(c)
        return refused or self.refuse_sequences(c)

    def refuse_sequences(self, c: Candidate) -> str | None:
        """Refusal of a number of sequences in a microbatch."""
        text, packs = self.shape.config.get_text_config(), self.shape.recipe.data.isolates
        found = find_shared_rope(text, c.context, c.sequences, packs)
        return None if found is None else found.what

    @remember(*DEGREES)
    @_as_reason
    def refuse_tp(self, c: Candidate) -> None:
        """Refusal of a tensor-parallel degree: layers are laid out to find it."""
        refuse_dropped_layers(self.shape.config, 1, c.tp)
        self.shape.stage_units(StageBounds(0, 1, 0, self.shape.num_layers), c)

    @remember("tp", "ep", "expert_tp", "world", "ranks_per_node")
    @_as_reason
    def refuse_experts(self, c: Candidate) -> None:
        """Refusal of an expert-parallel degree. A dense model has nothing that expert_tp could divide."""
        recipe = self.shape.recipe
        if c.ep > 1 or self.shape.mixtures:
            check_experts(self.shape.whole, c.ep, recipe.model.expert_capacity, c.expert_tp < c.tp)
        # A rule refuses slices of experts, so that ranks of ep are neighbours.
        if c.ep > 1 and c.expert_tp == 1 and recipe.parallel.expert_backend == "deepep":
            nodes = place_group(c.ep, 1, c.ranks_per_node, c.world).nodes
            refuse_deep_ranks(c.ep, nodes, self.shape.text.hidden_size)

    @remember("pp", "schedule", "virtual", "tp", "context")
    @_as_reason
    def refuse_pp(self, c: Candidate) -> None:
        """Refusal of a number of stages."""
        refuse_dropped_layers(self.shape.config, c.pp, 1)
        if c.pp > 1 or c.virtual > 1:
            refuse_few_layers(self.shape.num_layers, self.shape.owners(c.pp, c.schedule, c.virtual))
            stages = self.shape.stages(c.pp, c.schedule, c.virtual, c.context)
            refuse_shared_layers(self.shape.config, self.shape.units, self.shape.ties, stages)
            if not self.shape.layer_calls.is_plain:
                refuse_sliced_values(self.shape.config, c.tp)

    @remember("tp", "cp", "ulysses", "context", "sequence")
    @_as_reason
    def refuse_cp(self, c: Candidate) -> None:
        """Refusal of a context-parallel degree and its method: a small copy of the model is run to find it."""
        if c.cp > 1:
            config, packs = self.shape.config, self.shape.recipe.data.isolates
            refuse_uneven_heads(layer_configs(config), Parallel(tp=c.tp, cp=c.cp, context=[c.ulysses, c.ring]))
            if mixers := find_whole(config, self.shape.recipe):
                if c.tp > 1 and c.sequence:
                    refuse_sequence(config, mixers)
            else:
                refuse_undivided_context(config, ContextSlices(c.context, c.ulysses, c.ring), packs, self._causes)

    @cached_property
    def _causes(self) -> tuple[Any, ...]:
        return tuple(probe_causes(self.shape.config, self.shape.recipe.data.isolates))


@dataclass(frozen=True)
class Constraint:
    """A rule that refuses layouts. fields: of the candidate, all that its answer depends on; ask: the reason, or None."""

    kind: Kind
    fields: tuple[str, ...]
    ask: Callable[[Candidate], tuple[str, str] | None]

    @cached_property
    def refuse(self) -> Callable[[Candidate], tuple[str, str] | None]:
        """(key, reason), asked once for all candidates that agree in its fields."""
        # `offload` is one argument: its fields count as one name.
        names = dict.fromkeys(name.partition(".")[0] for name in self.fields) or ("world",)

        @remember(*names)
        def refuse(self: Constraint, c: Candidate) -> tuple[str, str] | None:
            return self.ask(c)

        return partial(refuse, self)


# All constraints, by the choice behind which they can be asked.
Constraints = Mapping[str, tuple[Constraint, ...]]


def collect_constraints(space: Space, model: ModelShape) -> Constraints:
    """Collect the constraints of recipes and of the model, each at the choice behind which it can be asked."""
    # Several rules are asked of a candidate one after another.
    make = lru_cache(maxsize=1)(partial(recipe_of, base=space.base, pinned=space.pinned))
    rules = [
        Constraint("rule", fields_read(rule.reads), partial(_ask_rule, rule.find, make)) for rule in layout_rules()
    ]
    found = [*rules, *_model_constraints(model)]
    return {choice: tuple(each for each in found if _last_choice(each.fields) == choice) for choice in CHOICES}


def fields_read(reads: Iterable[str]) -> tuple[str, ...]:
    """The fields of a candidate that a rule reads which reads these keys and groups."""
    known = (*LAYOUT_KEYS, *FOLLOWING_KEYS)
    keys = [key for read in reads for key in known if key == read or key.startswith(f"{read}.")]
    return tuple(dict.fromkeys(name for key in keys for name in FIELDS_OF_KEYS[key]))


def _last_choice(fields: Sequence[str]) -> str:
    """The choice behind which all of these fields are set; the first one for a rule that needs none."""
    first, *others = CHOICES
    return next((choice for choice in reversed(others) if set(fields) & {*CHOICES[choice]}), first)


def _ask_rule(
    rule: Callable[[Recipe], Iterable[Problem]], make: Callable[[Candidate], Recipe], c: Candidate
) -> tuple[str, str] | None:
    problem = next(iter(rule(make(c))), None)
    if problem is None:
        return None
    value = "" if problem.value is None else f"={problem.value}"
    return problem.key, f"{problem.key}{value}: {problem.message}"


def _model_constraints(shape: ModelShape) -> list[Constraint]:
    rules = ModelRules(shape)

    def ask(refusal: Callable[[Candidate], str | None], c: Candidate) -> tuple[str, str] | None:
        reason = refusal(c)
        return None if reason is None else ("", reason)

    whole_experts = {"sequence": False, "ep": 1}
    asked: list[tuple[tuple[str, ...], Callable[[Candidate], str | None]]] = [
        # First what degrees alone are refused for, before other choices are made.
        (("tp", "pp"), lambda c: rules.refuse_pp(c.changed({"schedule": "1f1b", "virtual": 1}))),
        (("tp",), lambda c: rules.refuse_tp(c.changed(whole_experts | {"expert_tp": c.tp}))),
        (("tp", "cp", "ulysses"), rules.refuse_cp),
        (("ep", "expert_tp", "tp"), rules.refuse_experts),
        (("tp", "sequence", "ep", "expert_tp"), rules.refuse_tp),
        (("pp", "schedule", "virtual"), rules.refuse_pp),
        (("sequences",), rules.refuse_sequences),
    ]
    return [Constraint("model", fields, partial(ask, refusal)) for fields, refusal in asked]
