"""Candidate: a layout as numbers, of which bytes and seconds are forecast, and of which a search tries thousands.

`candidate_of` reads the layout of a recipe, `recipe_of` is its inverse. Thousands of layouts share most of what is computed for
one: `remember` keeps results by the fields that they depend on. Nothing of it is `auto`: `resolve_target` has the device and the
dtype of where the layout will run, also on a machine that has no such device: a login node without a GPU plans and submits for
the cluster's GPUs. Torch is not imported unless this machine is asked.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import wraps
from math import ceil
from operator import attrgetter
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

from framework.errors import RecipeError
from framework.mesh.topology import Topology, count_expert_shards, count_passing, shards_within_node
from framework.recipe.check import FOLLOWING_KEYS, LAYOUT_KEYS, is_world_stated, let_rest_follow
from framework.recipe.derive import (
    SPLIT_BACKWARDS,
    Derived,
    carry_derived,
    count_secondary,
    count_virtual_stages,
    derive,
)
from framework.recipe.keys import value_of
from framework.recipe.schema import Launch, Offload, Precision, Recipe

Checkpointing = Literal["none", "selective", "full", "sqrt"]
OFFLOADED = ("optimizer", "parameters", "activations")
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """The degrees and choices of a recipe that memory and time depend on, all resolved: nothing here is `auto`. A world has
    dp x cp x tp x pp ranks."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence: bool = False
    """Sequence parallelism over tp."""
    ulysses: int = 1
    """Ranks of cp that exchange heads; the others divide keys and values."""
    is_gather: bool = False
    """Whether these gather keys and values instead of passing them round."""
    expert_tp: int = 1
    """Ranks of tp that slice each expert; 1: experts are whole."""
    schedule: str = "1f1b"
    virtual: int = 1
    """Stages of a rank of the pipeline."""
    zero: int = 0
    """ZeRO's stage."""
    shard: int = 1
    """Ranks over which ZeRO shards; 1 at stage 0."""
    checkpointing: Checkpointing = "none"
    """Activation checkpointing of all layers."""
    offload: frozenset[str] = field(default_factory=frozenset)
    """Names as in memory.offload."""
    sequences: int = 1
    """Sequences of a microbatch on a rank."""
    accumulation: int = 1
    """Microbatches of a step."""
    context: int = 4096
    """Tokens of a sequence."""
    ranks_per_node: int = 8

    def changed(self, values: Mapping[str, Any]) -> "Candidate":
        """Replace some fields: `dataclasses.replace` in a fifth of the time, as searches make many."""
        own = list(_READ(self))
        for name, value in values.items():
            own[_PLACES[name]] = value
        return Candidate(*own)

    @property
    def world(self) -> int:
        """Ranks of the run."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def batch(self) -> int:
        """Ranks that divide a step's tokens before tp does."""
        return self.dp * self.cp

    @property
    def ring(self) -> int:
        """Ranks of cp that divide keys and values."""
        return self.cp // self.ulysses

    @property
    def adds(self) -> bool:
        """Whether gradients of several microbatches are added."""
        return self.accumulation > 1

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule leaves weight gradients for later."""
        return self.schedule in SPLIT_BACKWARDS

    @property
    def offloads_activations(self) -> bool:
        """Whether layers' activations wait for backward on the host."""
        return "activations" in self.offload

    @property
    def offloads_parameters(self) -> bool:
        """Whether shards of parameters wait on the host."""
        return "parameters" in self.offload

    @property
    def share(self) -> float:
        """Sequences whose work a rank has of a microbatch."""
        return self.sequences / self.cp

    @property
    def states_offloaded(self) -> frozenset[str]:
        """States whose home is the host or a disk."""
        return self.offload - _ACTIVATIONS

    @property
    def nodes(self) -> int:
        """Nodes of the run."""
        return -(-self.world // self.ranks_per_node)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank, before tp divides anything; padding of cp not counted."""
        return self.sequences * self.context // self.cp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.dp * self.accumulation * self.sequences * self.context


_ACTIVATIONS = frozenset({"activations"})
_PLACES = {each.name: place for place, each in enumerate(fields(Candidate))}
_READ = attrgetter(*_PLACES)


def candidate_of(recipe: Recipe) -> Candidate:
    """The layout of a checked recipe as numbers. RecipeError where no candidate says what the recipe does: parts of units
    offloaded, activation checkpointing by layer, a schedule of the user's own."""
    derived, policy = derive(recipe), recipe.memory.activation_checkpointing
    if recipe.pipeline.table is not None:
        raise RecipeError(
            f"pipeline.table={recipe.pipeline.table} is a schedule of your own, which no layout is compared by: leave it out,"
            " and choose one of pipeline.schedule"
        )
    if policy == "auto":
        raise RecipeError(
            "memory.activation_checkpointing=auto chooses by layer, which no layout is compared by: none, selective, full or sqrt"
        )
    return Candidate(
        dp=derived.dp,
        cp=derived.cp,
        tp=derived.tp,
        pp=derived.pp,
        ep=derived.ep,
        sequence=recipe.parallel.sequence and derived.tp > 1,
        ulysses=derived.ulysses,
        is_gather=recipe.parallel.context == "gather" and derived.cp > 1,
        expert_tp=derived.expert_tp,
        schedule=recipe.pipeline.schedule,
        virtual=count_virtual_stages(recipe.pipeline),
        zero=recipe.zero.stage,
        shard=count_shards(recipe, derived),
        checkpointing=policy,
        offload=_offloaded(recipe.memory.offload),
        sequences=derived.sequences_per_microbatch,
        accumulation=derived.accumulation,
        context=derived.context,
        ranks_per_node=derived.ranks_per_node,
    )


def planned_candidate(recipe: Recipe) -> Candidate:
    """The candidate of a planned recipe, also where no candidate states all that the recipe does: of what is offloaded in part
    the recipe has the fraction, memory.activation_checkpointing=auto is chosen beside it (`Plan.chosen`), and the stages of a
    pipeline.table are the Plan's; times are those of 1f1b in its place."""
    offload, policy = recipe.memory.offload, recipe.memory.activation_checkpointing
    whole = replace(offload, **{name: ceil(getattr(offload, name)) for name in OFFLOADED})
    memory = replace(recipe.memory, offload=whole, activation_checkpointing="none" if policy == "auto" else policy)
    pipeline = recipe.pipeline
    if pipeline.table is not None:
        pipeline = replace(pipeline, table=None, schedule="1f1b", virtual_stages=None)
    return candidate_of(carry_derived(recipe, replace(recipe, memory=memory, pipeline=pipeline)))


def recipe_of(candidate: Candidate, base: Recipe, pinned: frozenset[str] = frozenset()) -> Recipe:
    """`base` with the candidate's layout. pinned: keys that stay as `base` has them, for the rules to judge."""
    parallel, offload = base.parallel, candidate.offload
    within = None if candidate.zero == 0 or candidate.shard == candidate.batch else candidate.shard
    fractions: dict[str, Any] = {name: float(name in offload) for name in OFFLOADED}
    recipe = replace(
        base,
        parallel=replace(
            parallel,
            # Where the ranks are stated dp follows: the same layout then serves another number of nodes.
            dp=None if is_world_stated(base) and "parallel.dp" not in pinned else candidate.dp,
            tp=candidate.tp,
            pp=candidate.pp,
            cp=candidate.cp,
            ep=candidate.ep,
            sequence=candidate.sequence if candidate.tp > 1 else parallel.sequence,
            context=method_of(candidate),
            # null where it is what ep and tp make of it.
            expert_tp=None if candidate.expert_tp == (1 if candidate.ep > 1 else candidate.tp) else candidate.expert_tp,
        ),
        pipeline=replace(base.pipeline, schedule=cast(Any, candidate.schedule), virtual_stages=candidate.virtual),
        zero=replace(base.zero, stage=candidate.zero, shard_within=within),
        memory=replace(
            base.memory,
            activation_checkpointing=candidate.checkpointing,
            offload=replace(base.memory.offload, **fractions),
        ),
        batch=replace(base.batch, sequences_per_microbatch=candidate.sequences),
    )
    return let_rest_follow(recipe, pinned)


def values_of(recipe: Recipe, base: Recipe) -> dict[str, Any]:
    """The keys of a file that make `base` into `recipe`: those of the layout, and those that follow from it and differ."""
    stated = {"parallel.layout": "stated"} if base.parallel.layout != "stated" else {}
    followers = {key: value_of(recipe, key) for key in FOLLOWING_KEYS if value_of(recipe, key) != value_of(base, key)}
    return stated | {key: value_of(recipe, key) for key in LAYOUT_KEYS} | followers


def method_of(candidate: Candidate) -> Any:
    """The value of parallel.context."""
    if candidate.cp == 1:
        return "ring"
    if candidate.ulysses == candidate.cp:
        return "ulysses"
    if candidate.ulysses > 1:
        return [candidate.ulysses, candidate.cp // candidate.ulysses]
    return "gather" if candidate.is_gather else "ring"


def topology_of(
    c: Candidate, kv: int = 1, secondary_shard: int | str | None = None, hierarchical: int | str | None = None
) -> Topology:
    """The axes of a layout. kv: ranks of tp with the same key-value heads; secondary_shard: as in the recipe's `zero`;
    hierarchical: its parallel.expert_hierarchical."""

    def count_of_experts(shard: int) -> int:
        return count_expert_shards(shard, c.tp, c.ep, c.expert_tp, c.batch)

    names = ("pp", "dp", "cp", "tp", "ep", "expert_tp", "ulysses", "shard")
    expert_shard = count_of_experts(c.shard) if c.zero else 1
    secondary = count_secondary(secondary_shard if c.zero == 3 else None, c.shard, c.tp, c.ranks_per_node)
    expert_secondary = count_of_experts(secondary) if secondary > 1 else 1
    return Topology(
        **{name: getattr(c, name) for name in names},
        kv=kv,
        ep_inner=count_passing(hierarchical, c.ep, c.expert_tp, c.ranks_per_node, c.world),
        expert_shard=expert_shard,
        secondary=secondary,
        expert_secondary=expert_secondary if expert_secondary < expert_shard else 1,
    )


def full_topology(
    recipe: Recipe, c: Candidate, embedding_ranks: tuple[int, int], kv: int = 1, matrix: int = 1
) -> Topology:
    """`topology_of` with all that the recipe says of axes. embedding_ranks, matrix: as of `Topology`."""
    # ZeRO's collectives go in two levels: those of gloo do, and sums that NCCL does not make itself.
    is_coded = recipe.precision.reduce == "bf16" or recipe.zero.quantize_reduce != "none"
    return replace(
        topology_of(c, kv, recipe.zero.secondary_shard, recipe.parallel.expert_hierarchical),
        embedding_ranks=embedding_ranks,
        ranks_per_node=c.ranks_per_node,
        two_levels=recipe.launch.device == "cpu" or is_coded,
        matrix=matrix,
    )


def count_shards(recipe: Recipe, derived: Derived) -> int:
    """Ranks over which ZeRO shards. Stage 0 shards over one rank; `zero.shard_within=null` is everyone."""
    batch, within = derived.dp * derived.cp, recipe.zero.shard_within
    if recipe.zero.stage == 0:
        return 1
    if within == "node":
        return shards_within_node(derived.world, batch, derived.tp, derived.ranks_per_node, derived.nodes)
    return within or batch


def _offloaded(offload: Offload) -> frozenset[str]:
    fractions: Mapping[str, float] = {name: getattr(offload, name) for name in OFFLOADED}
    partial = {name: fraction for name, fraction in fractions.items() if fraction not in (0.0, 1.0)}
    if partial:
        name, fraction = next(iter(partial.items()))
        raise RecipeError(
            f"memory.offload.{name}={fraction} offloads a part, and layouts are compared with all or none: 0 or 1"
        )
    return frozenset(name for name, fraction in fractions.items() if fraction)


# --- the device and the dtype that `auto` is


def resolve_target(recipe: Recipe) -> Recipe:
    """The recipe with no `auto` left in launch.device and precision.compute, for planning: nothing is checked of this machine,
    and a cluster that the recipe names says what its devices are."""
    device = target_device(recipe.launch)
    if device is None and recipe.cluster.name is not None:
        device = "cpu" if recipe.cluster.device == "cpu" else "cuda"
    if device is None:
        import torch

        has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= derive(recipe).world
        device = "cuda" if has_gpus else "cpu"
    launch = replace(recipe.launch, device=device)
    return carry_derived(recipe, replace(recipe, launch=launch, precision=resolve_precision(recipe.precision, launch)))


def target_device(launch: Launch) -> Device | None:
    """The ranks' device as the recipe states it; None where it leaves that to this machine. Under SLURM it is cuda where GPUs
    are asked for, whatever the login node has."""
    if launch.device != "auto":
        return launch.device
    if launch.kind == "slurm":
        return "cuda" if launch.gres is not None else "cpu"
    return None


def resolve_precision(precision: Precision, launch: Launch) -> Precision:
    """`precision.compute` without auto: bf16 where the target multiplies it natively. Of a cluster's nodes, and of GPUs where
    there are none, only the kind is known: GPUs get bf16, CPUs fp32."""
    if precision.compute != "auto":
        return precision
    is_bf16 = launch.device == "cuda"
    if launch.kind == "local":
        import torch

        from framework.model.precision import compute_dtype

        if launch.device == "cpu" or torch.cuda.is_available():
            is_bf16 = compute_dtype(precision, torch.device(launch.device)) == torch.bfloat16
    return replace(precision, compute="bf16" if is_bf16 else "fp32")


# --- results by what they depend on

Result = TypeVar("Result")
First = TypeVar("First")
Others = ParamSpec("Others")
Method = Callable[Concatenate[Any, First, Others], Result]


def remember(*fields: str) -> Callable[[Method[First, Others, Result]], Method[First, Others, Result]]:
    """Decorate a method: its result is kept by these fields of its first argument, or by the argument itself where none are
    named, and by the other arguments, for as long as the object lives. For one thread."""
    read: Callable[[Any], Any] = attrgetter(*fields) if fields else lambda first: first

    def decorate(method: Method[First, Others, Result]) -> Method[First, Others, Result]:
        slot, make = f"_results_of_{method.__name__}", cast(Callable[..., Result], method)

        @wraps(method)
        def ask(self: Any, first: Any, *others: Any) -> Result:
            key = read(first), others
            try:
                found: Result = self.__dict__[slot][key]
            except KeyError:
                found = self.__dict__.setdefault(slot, {})[key] = make(self, first, *others)
            return found

        return cast(Method[First, Others, Result], ask)

    return decorate
