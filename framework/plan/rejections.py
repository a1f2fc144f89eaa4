"""Rejections: reasons why layouts are refused, by the rules of recipes, by the model, by a device's memory.

A rule of `recipe/check.py` says which keys it reads. So it is asked once for all layouts that agree in these, as soon as a search
has chosen them, of a real recipe: nothing here knows what is legal.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial, wraps
from typing import Any, Literal

from framework.errors import MeshwrightError
from framework.mesh.token_layout import ContextSlices
from framework.model.load import layer_configs
from framework.model.stage import StageBounds, refuse_shared_layers, refuse_sliced_values
from framework.parallel.attention import (
    find_whole,
    probe_causes,
    refuse_sequence,
    refuse_undivided_context,
    refuse_uneven_heads,
)
from framework.parallel.experts.split import check_experts
from framework.parallel.pipeline.pipeline import refuse_few_layers
from framework.plan.candidate import Candidate, method_of, recipe_of, remember
from framework.plan.forecast import NodeForecast
from framework.plan.shape import DEGREES, ModelShape, refuse_dropped_layers
from framework.plan.space import CHOICES, Space
from framework.plan.text import show_bytes
from framework.recipe.check import layout_rules
from framework.recipe.layout_keys import FOLLOWING_KEYS, LAYOUT_KEYS
from framework.recipe.layout_rules import EXPERT_KEYS
from framework.recipe.problem import Problem
from framework.recipe.schema import Parallel, Recipe

Kind = Literal["rule", "model", "memory", "node"]
# Rejections for lack of memory or disk.
SIZES = ("memory", "node")
_NUMBERS = re.compile(r"\d+(\.\d+)?|=\[.*?\]|=[a-z_]+")

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
        return self.refuse_pp(c) or self.refuse_experts(c) or self.refuse_tp(c) or self.refuse_cp(c)

    @remember(*DEGREES)
    @_as_reason
    def refuse_tp(self, c: Candidate) -> None:
        """Refusal of a tensor-parallel degree: layers are laid out to find it."""
        refuse_dropped_layers(self.shape.config, 1, c.tp)
        self.shape.stage_units(StageBounds(0, 1, 0, self.shape.num_layers), c)

    @remember("tp", "ep", "expert_tp")
    @_as_reason
    def refuse_experts(self, c: Candidate) -> None:
        """Refusal of an expert-parallel degree. A dense model has nothing that expert_tp could divide."""
        if c.ep > 1 or self.shape.mixtures:
            check_experts(self.shape.whole, c.ep, self.shape.recipe.model.expert_capacity, c.expert_tp < c.tp)

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
class Rejection:
    """Layouts that are refused alike. candidate: what they share, chosen up to `choice`; reason: in a line; key: of the recipe,
    where a rule refuses it; missing: bytes that do not fit on the fullest rank, at the least; count: of layouts."""

    kind: Kind
    candidate: Candidate
    choice: str
    reason: str
    key: str = ""
    missing: int = 0
    count: int = 1

    @property
    def layout(self) -> str:
        """The choices so far, in words."""
        return describe(self.candidate, self.choice)

    @property
    def line(self) -> str:
        """Layout and reason in a line."""
        return f"{self.layout}: {self.reason}"


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
    rules = [Constraint("rule", fields_read(reads), partial(_ask_rule, rule, make)) for reads, rule in layout_rules()]
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
    ]
    return [Constraint("model", fields, partial(ask, refusal)) for fields, refusal in asked]


def describe(c: Candidate, choice: str = "states") -> str:
    """A candidate in words, up to a choice: degrees of 1 and what is off are left out."""
    method = method_of(c)
    shards = f"/{c.shard}" if c.zero and c.shard != c.batch else ""
    words: dict[str, list[str]] = {
        "degrees": [f"{name}={getattr(c, name)}" for name in ("dp", "cp", "tp", "pp") if getattr(c, name) > 1],
        "context": ["x".join(map(str, method)) if isinstance(method, list) else method] * (c.cp > 1),
        "sequence": ["no-sp"] * (c.tp > 1 and not c.sequence),
        "experts": [f"ep={c.ep}"] * (c.ep > 1)
        + [f"expert_tp={c.expert_tp}"] * (c.expert_tp != (1 if c.ep > 1 else c.tp)),
        "microbatch": [f"mb={c.sequences}"],
        "schedule": [c.schedule + f"x{c.virtual}" * (c.schedule == "interleaved")] * (c.pp > 1),
        "checkpointing": [c.checkpointing] * (c.checkpointing != "none"),
        "activations": ["offload-activations"] * c.offloads_activations,
        "zero": [f"zero={c.zero}{shards}"],
        "states": [f"offload-{name}" for name in ("optimizer", "parameters") if name in c.offload],
    }
    names = list(CHOICES)
    return " ".join(word for name in names[: names.index(choice) + 1] for word in words[name]) or "one rank"


def too_large(c: Candidate, missing: int, limit: int, choice: str = "states", count: int = 1) -> Rejection:
    """Rejection of layouts whose fullest rank needs more than it may use: by at least so much where later choices are open, or
    for several layouts, of which `c` is the nearest."""
    least = "" if choice == "states" and count == 1 else "at least "
    reason = f"does not fit: {least}{show_bytes(missing)} over the {show_bytes(limit)} of a device"
    return Rejection("memory", c, choice, reason, missing=missing, count=count)


def too_large_for_node(c: Candidate, node: NodeForecast, count: int = 1) -> Rejection:
    """The rejection of layouts whose ranks take more of a node's memory or disk than it has; of several the nearest."""
    reason = "; ".join(describe_shortages(node))
    return Rejection("node", c, "states", f"does not fit: {reason}", missing=max(1, -node.spare), count=count)


def describe_shortages(node: NodeForecast) -> Iterator[str]:
    """Resources that a node lacks, each with the key that states what it has; empty where the layout fits."""
    needed = node.offloaded + node.copies
    if needed and node.spare < 0:
        what = [f"{show_bytes(node.offloaded)} of what is offloaded"] * (node.offloaded > 0)
        what += [f"{show_bytes(node.copies)} of copies of steps (checkpoint.neighbor_copies)"] * (node.copies > 0)
        where = f"{show_bytes(node.limit)} of a node's {show_bytes(node.there)} of host memory (cluster.host_memory_gb)"
        if node.offloaded + node.copies <= node.limit:
            where = f"{show_bytes(node.there // 2)} of /dev/shm, half of a node's host memory (cluster.host_memory_gb)"
        yield f"{show_bytes(-node.spare)} over the {where}, for {' and '.join(what)}"
    if node.disk_limit is not None and node.disk > node.disk_limit:
        yield (
            f"{show_bytes(node.disk - node.disk_limit)} over the {show_bytes(node.disk_limit)} of a node's own disks"
            f" (cluster.node_disk_gb), for {show_bytes(node.disk)} of files of states"
        )


def group_rejections(rejections: Iterable[Rejection]) -> list[tuple[Rejection, int]]:
    """One of each reason, with the number of layouts, the most frequent first. Reasons that differ in numbers only are one, as
    which the smallest layout's is shown; of those that do not fit the one that comes nearest."""
    counts: Counter[tuple[str, str]] = Counter()
    shown: dict[tuple[str, str], Rejection] = {}
    for each in rejections:
        group = (each.kind, "" if each.kind in SIZES else _NUMBERS.sub("0", each.reason))
        counts[group] += each.count
        if group not in shown or (each.kind in SIZES and each.missing < shown[group].missing):
            shown[group] = each
    ordered = sorted(counts, key=lambda group: (-counts[group], group))
    return [(shown[group], counts[group]) for group in ordered]
