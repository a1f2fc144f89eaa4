"""Rejections: reasons why layouts are refused, by the rules of recipes, by the model, by a device's memory.

A rule of `recipe/check.py` says which keys it reads. So it is asked once for all layouts that agree in these, as soon as a search
has chosen them, of a real recipe: nothing here knows what is legal.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from operator import attrgetter
from typing import Literal

from framework.errors import MeshwrightError
from framework.mesh.context import ContextSlices
from framework.model.load import layer_configs
from framework.model.probe import find_layer_outputs
from framework.model.stage import StageBounds, refuse_shared_layers
from framework.parallel.attention import probe_causes, refuse_undivided_context, refuse_uneven_heads
from framework.parallel.experts import check_experts
from framework.parallel.pipeline.pipeline import refuse_few_layers
from framework.plan.candidate import Candidate, method_of, recipe_of
from framework.plan.forecast import NodeForecast
from framework.plan.memory import show_bytes
from framework.plan.shape import Degrees, ModelShape, refuse_dropped_layers
from framework.plan.space import CHOICES, Space
from framework.recipe.check import layout_rules
from framework.recipe.layout_keys import FOLLOWING_KEYS, LAYOUT_KEYS
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
    **dict.fromkeys(("parallel.expert_overlap", "parallel.expert_hierarchical"), ("ep",)),
    **dict.fromkeys(("pipeline.schedule", "pipeline.virtual_stages"), ("schedule", "virtual")),
    "pipeline.layers": ("pp", "schedule", "virtual"),
    "pipeline.table": (),
    "pipeline.fill_bubbles": ("pp",),
    **dict.fromkeys(("zero.stage", "zero.accumulate", "zero.keep_gathered"), ("zero",)),
    **dict.fromkeys(("zero.shard_within", "zero.optimizer_within"), ("zero", "shard", "dp", "cp")),
    **{f"memory.{name}": ("checkpointing",) for name in ("activation_checkpointing", "kept_operations", "budget_gb")},
    **{f"memory.offload.{name}": (f"offload.{name}",) for name in ("activations", "optimizer", "parameters")},
    **{f"memory.offload.{name}": ("offload.optimizer",) for name in ("home", "disk_path")},
    "batch.sequences_per_microbatch": ("sequences",),
}


@dataclass(frozen=True)
class ModelRules:
    """Degrees that a model cannot have: the reason in one line, or None. Rules of recipes (degrees that do not multiply to the
    world, batches that do not divide) are not asked here."""

    shape: ModelShape

    def refuse(self, c: Candidate) -> str | None:
        """The first reason against a candidate."""
        return self.refuse_pp(c) or self.refuse_experts(c) or self.refuse_tp(c) or self.refuse_cp(c)

    def refuse_tp(self, c: Candidate) -> str | None:
        """Refusal of a tensor-parallel degree: layers are laid out to find it."""
        degrees = Degrees.of(c)

        def check() -> None:
            refuse_dropped_layers(self.shape.config, 1, c.tp)
            self.shape.stage_units(StageBounds(0, 1, 0, self.shape.num_layers), degrees)

        return self._ask(("tp", degrees), check)

    def refuse_experts(self, c: Candidate) -> str | None:
        """Refusal of an expert-parallel degree. A dense model has nothing that expert_tp could divide."""
        if c.ep == 1 and not self.shape.mixtures:
            return None
        capacity, is_whole = self.shape.recipe.model.expert_capacity, c.expert_tp < c.tp
        return self._ask(("ep", c.ep, is_whole), lambda: check_experts(self.shape.whole, c.ep, capacity, is_whole))

    def refuse_pp(self, c: Candidate) -> str | None:
        """Refusal of a number of stages."""
        shape, owners = self.shape, self.shape.owners(c.pp, c.schedule, c.virtual)

        def check() -> None:
            refuse_dropped_layers(shape.config, c.pp, 1)
            if c.pp == 1 and c.virtual == 1:
                return
            refuse_shared_layers(shape.config, shape.units, shape.ties)
            refuse_few_layers(shape.num_layers, owners)
            shape.remember("layer outputs", lambda: find_layer_outputs(shape.config))

        return self._ask(("pp", owners, c.context), check)

    def refuse_cp(self, c: Candidate) -> str | None:
        """Refusal of a context-parallel degree and its method: a small copy of the model is run to find it."""
        config, ring, packs = self.shape.config, c.cp // c.ulysses, self.shape.recipe.data.pack == "documents"

        def check() -> None:
            if c.cp == 1:
                return
            refuse_uneven_heads(layer_configs(config), Parallel(tp=c.tp, cp=c.cp, context=[c.ulysses, ring]))
            causes = self.shape.remember("causes", lambda: tuple(probe_causes(config, packs)))
            refuse_undivided_context(config, ContextSlices(c.context, c.ulysses, ring), packs, causes)

        return self._ask(("cp", c.tp, c.cp, c.ulysses, c.context), check)

    def _ask(self, key: tuple[object, ...], check: Callable[[], object]) -> str | None:
        def ask() -> str | None:
            try:
                check()
            except MeshwrightError as error:
                return " ".join(str(error).split())
            return None

        found: str | None = self.shape.remember(("refusal", *key), ask)
        return found


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
    _known: dict[object, tuple[str, str] | None] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def _read(self) -> Callable[[Candidate], object]:
        # In one call, and what is offloaded as a whole: a search reads them a hundred thousand times.
        names = dict.fromkeys(name.partition(".")[0] for name in self.fields)
        return attrgetter(*names) if names else lambda c: ()

    def refuse(self, c: Candidate) -> tuple[str, str] | None:
        """(key, reason), asked once for all candidates that agree in its fields."""
        values = self._read(c)
        if values not in self._known:
            self._known[values] = self.ask(c)
        return self._known[values]


@dataclass(frozen=True)
class Constraints:
    """All constraints, by the choice behind which they can be asked."""

    by_choice: dict[str, tuple[Constraint, ...]]

    def refuse(self, choice: str, c: Candidate) -> tuple[Constraint, tuple[str, str]] | None:
        """The first that is against a candidate whose choices up to this one are made, with (key, reason)."""
        for each in self.by_choice[choice]:
            found = each.refuse(c)
            if found is not None:
                return each, found
        return None


def collect_constraints(space: Space, model: ModelShape) -> Constraints:
    """Collect the constraints of recipes and of the model, each at the choice behind which it can be asked."""
    recipes = _Recipes(space)
    rules = [
        Constraint("rule", fields_read(reads), partial(_ask_rule, rule, recipes)) for reads, rule in layout_rules()
    ]
    found = [*rules, *_model_constraints(model)]
    return Constraints(
        {choice: tuple(each for each in found if _last_choice(each.fields) == choice) for choice in CHOICES}
    )


def read_field(c: Candidate, name: str) -> object:
    """The value of a field, or whether `offload.NAME` is in what is offloaded."""
    return name[8:] in c.offload if name.startswith("offload.") else getattr(c, name)


def fields_read(reads: Iterable[str]) -> tuple[str, ...]:
    """The fields of a candidate that a rule reads which reads these keys and groups."""
    known = (*LAYOUT_KEYS, *FOLLOWING_KEYS)
    keys = [key for read in reads for key in known if key == read or key.startswith(f"{read}.")]
    return tuple(dict.fromkeys(name for key in keys for name in FIELDS_OF_KEYS[key]))


def _last_choice(fields: Sequence[str]) -> str:
    """The choice behind which all of these fields are set; the first one for a rule that needs none."""
    last = next(iter(CHOICES))
    for choice, names in CHOICES.items():
        if any(name in names for name in fields):
            last = choice
    return last


@dataclass
class _Recipes:
    """Recipes of candidates. The last one is kept, for several rules are asked of a candidate one after another."""

    space: Space
    _last: tuple[Candidate, Recipe] | None = None

    def of(self, c: Candidate) -> Recipe:
        """The space's base recipe with the candidate's layout."""
        if self._last is None or self._last[0] is not c:
            self._last = c, recipe_of(c, self.space.base, self.space.pinned)
        return self._last[1]


def _ask_rule(rule: Callable[[Recipe], Iterable[Problem]], recipes: _Recipes, c: Candidate) -> tuple[str, str] | None:
    problem = next(iter(rule(recipes.of(c))), None)
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
    words: list[str] = []
    for name in CHOICES:
        words += _WORDS[name](c)
        if name == choice:
            break
    return " ".join(words) or "one rank"


def _describe_degrees(c: Candidate) -> list[str]:
    return [f"{name}={getattr(c, name)}" for name in ("dp", "cp", "tp", "pp") if getattr(c, name) > 1]


def _describe_context(c: Candidate) -> list[str]:
    method = method_of(c)
    return [] if c.cp == 1 else [f"{method[0]}x{method[1]}" if isinstance(method, list) else method]


def _describe_sequence(c: Candidate) -> list[str]:
    return ["no-sp"] if c.tp > 1 and not c.sequence else []


def _describe_experts(c: Candidate) -> list[str]:
    default = 1 if c.ep > 1 else c.tp
    return [f"ep={c.ep}"] * (c.ep > 1) + [f"expert_tp={c.expert_tp}"] * (c.expert_tp != default)


def _describe_schedule(c: Candidate) -> list[str]:
    return [] if c.pp == 1 else [c.schedule + (f"x{c.virtual}" if c.schedule == "interleaved" else "")]


def _describe_zero(c: Candidate) -> list[str]:
    return [f"zero={c.zero}" + (f"/{c.shard}" if c.zero and c.shard != c.dp * c.cp else "")]


_WORDS: dict[str, Callable[[Candidate], list[str]]] = {
    "degrees": _describe_degrees,
    "context": _describe_context,
    "sequence": _describe_sequence,
    "experts": _describe_experts,
    "microbatch": lambda c: [f"mb={c.sequences}"],
    "schedule": _describe_schedule,
    "checkpointing": lambda c: [] if c.checkpointing == "none" else [c.checkpointing],
    "activations": lambda c: ["offload-activations"] if "activations" in c.offload else [],
    "zero": _describe_zero,
    "states": lambda c: [f"offload-{name}" for name in ("optimizer", "parameters") if name in c.offload],
}


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
