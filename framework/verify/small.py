"""The recipe made small: what of it verification keeps, what it changes and why.

Kept: the optimizer, groups, freezing, clipping, ZeRO, activation checkpointing, the degrees but for dp, the schedule's shape.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace

from framework.errors import TopologyError
from framework.recipe.derive import derive
from framework.recipe.schema import Batch, LearningRateSchedule, Model, Optim, Precision, Recipe, Zero

MAX_RANKS = 4
MAX_CONTEXT = 32
MAX_SEQUENCES_PER_MICROBATCH = 2
MAX_ACCUMULATION = 3
# In fp32. Adam divides a gradient by its own root mean square plus eps. Where the true gradient is zero (a key bias: softmax
# does not see a shift) both are rounding noise, and with an eps of 1e-8 the update is noise of the size of a real one.
LEAST_EPS_FP32 = 1e-3
# Below it fp32 weights of 0.1 would hardly move in three steps, whatever the update.
LEAST_LR = 1e-3

CPU_ATTENTION = ("auto", "eager", "sdpa")
CPU_EXPERTS = ("auto", "eager", "batched_mm", "grouped_mm")


@dataclass(frozen=True)
class SmallRecipe:
    """`notes`: what was changed that a user may wonder about, one line each."""

    recipe: Recipe
    notes: tuple[str, ...]


def shrink_recipe(
    recipe: Recipe, parameters: Collection[str], positions: int, fp64: bool, steps: int, ranks: int | None
) -> SmallRecipe:
    """A recipe that runs in seconds on CPU ranks and takes the same paths.

    parameters: names in the small model; positions: the longest sequence that it takes; ranks: how many to use, None for at
    most 4 where dp allows it. TopologyError if the layout does not fit the ranks.
    """
    derived = derive(recipe)
    dp = _choose_dp(recipe, ranks)
    microbatch = min(derived.sequences_per_microbatch, MAX_SEQUENCES_PER_MICROBATCH)
    accumulation = min(derived.accumulation, _most_microbatches(recipe))
    batch = Batch(dp * microbatch * accumulation, None, microbatch, min(derived.context, MAX_CONTEXT, positions))
    model, model_notes = _simplify_model(recipe.model, parameters, fp64)
    optim, optim_notes = _simplify_optim(recipe.optim, parameters, fp64)
    zero, zero_notes = _shrink_shards(recipe.zero, derived.dp * derived.cp, dp * derived.cp)
    notes = [*model_notes, *optim_notes, *zero_notes]
    if dp != derived.dp:
        notes.append(f"parallel.dp: {dp} instead of {derived.dp} (--ranks sets another number)")
    if recipe.pipeline.layers is not None:
        notes.append(f"pipeline.layers={recipe.pipeline.layers}: by cost instead, the small model has fewer layers")
    if recipe.memory.compile == "always":
        notes.append("memory.compile: left out, it would take longer than all the rest")
    small = replace(
        recipe,
        train=replace(recipe.train, steps=steps),
        batch=batch,
        model=model,
        parallel=replace(recipe.parallel, dp=dp),
        pipeline=replace(recipe.pipeline, layers=None),
        zero=zero,
        memory=replace(recipe.memory, compile="never"),
        precision=Precision("fp64", "fp64", "fp64") if fp64 else Precision("fp32", "fp32", "fp32"),
        optim=optim,
        launch=replace(recipe.launch, kind="local", ranks=dp * _inner(recipe), device="cpu"),
    )
    return SmallRecipe(small, tuple(notes))


def _most_microbatches(recipe: Recipe) -> int:
    """A schedule from a table has its own number, and DualPipeV needs two for each rank."""
    if recipe.pipeline.table is not None:
        return derive(recipe).accumulation
    return 2 * recipe.parallel.pp if recipe.pipeline.schedule == "dualpipe_v" else MAX_ACCUMULATION


def _inner(recipe: Recipe) -> int:
    """Ranks of one data-parallel replica that are not shared by context."""
    return recipe.parallel.tp * recipe.parallel.pp * recipe.parallel.cp


def _choose_dp(recipe: Recipe, ranks: int | None) -> int:
    """The largest dp that needs at most MAX_RANKS ranks, or the smallest that the layout takes; with `ranks`, what fills them."""
    inner, ep, cp = _inner(recipe), recipe.parallel.ep, recipe.parallel.cp
    if ranks is not None:
        if ranks < 1 or ranks % inner or (ranks // inner * cp) % ep:
            smallest = inner * next(dp for dp in range(1, ep + 1) if dp * cp % ep == 0)
            raise TopologyError(
                f"--ranks {ranks} does not fit tp * pp * cp = {inner} with ep = {ep}: use a multiple of {smallest}"
            )
        return ranks // inner
    legal = [dp for dp in range(1, derive(recipe).dp + 1) if dp * cp % ep == 0]
    return max((dp for dp in legal if dp * inner <= MAX_RANKS), default=legal[0])


def _shrink_shards(zero: Zero, batch: int, batch_small: int) -> tuple[Zero, list[str]]:
    """HSDP with both its axes, as far as the ranks go. batch: ranks of dp x cp, in the recipe and in the small one."""
    within = zero.shard_within
    if within is None or (isinstance(within, int) and (within == batch or batch_small % within == 0)):
        return zero, []
    small = 2 if batch_small > 2 and batch_small % 2 == 0 else batch_small
    replicas = batch_small // small
    return replace(zero, shard_within=small), [
        f"zero.shard_within: {small} ranks instead of {within}, {replicas} replicas"
    ]


def _simplify_model(model: Model, parameters: Collection[str], fp64: bool) -> tuple[Model, list[str]]:
    notes = []
    attention, experts = model.attention, model.experts
    if attention not in CPU_ATTENTION:
        notes.append(f"model.attention={attention} needs a GPU: the model's own choice instead")
        attention = "auto"
    if experts not in CPU_EXPERTS or (fp64 and experts == "grouped_mm"):
        notes.append(f"model.experts={experts} does not run here: the model's own choice instead")
        experts = "auto"
    freeze = [pattern for pattern in model.freeze if _is_found(pattern, parameters)]
    notes += [_explain_unmatched("model.freeze", each) for each in model.freeze if each not in freeze]
    return replace(model, weights=None, attention=attention, experts=experts, freeze=freeze), notes


def _simplify_optim(optim: Optim, parameters: Collection[str], fp64: bool) -> tuple[Optim, list[str]]:
    notes = []
    if not fp64 and optim.name == "adamw" and optim.eps < LEAST_EPS_FP32:
        notes.append(
            f"optim.eps: {LEAST_EPS_FP32:g} instead of {optim.eps:g}, which would divide fp32's rounding noise by itself"
            " where a gradient is zero"
        )
        optim = replace(optim, eps=LEAST_EPS_FP32)
    if optim.name == "lion":
        notes.append("optim=lion: weights whose update is the sign of rounding noise are not compared")
    if optim.lr < LEAST_LR:
        notes.append(f"optim.lr: {LEAST_LR:g} instead of {optim.lr:g}, so that a wrong update shows after few steps")
        optim = replace(optim, lr=LEAST_LR)
    groups = {name: each for name, each in optim.groups.items() if _is_found(each.pattern, parameters)}
    notes += [
        _explain_unmatched(f"optim.groups.{name}", each.pattern)
        for name, each in optim.groups.items()
        if name not in groups
    ]
    return replace(optim, groups=groups, schedule=_compress(optim.schedule)), notes


def _compress(schedule: LearningRateSchedule) -> LearningRateSchedule:
    """At most one step of each phase, so that few steps see all of them."""
    decay = None if schedule.decay_steps is None else 1
    return replace(schedule, warmup_steps=min(schedule.warmup_steps, 1), decay_steps=decay)


def _is_found(pattern: str, parameters: Collection[str]) -> bool:
    return any(re.search(pattern, name) for name in parameters)


def _explain_unmatched(key: str, pattern: str) -> str:
    return f"{key}: {pattern!r} is found in no parameter of the small model, and is left out"
