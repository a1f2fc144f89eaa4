"""A small version of the user's recipe that verification runs in its place. `left_out.py` tells the user of every change.

Kept: the optimizer, groups, freezing, clipping, ZeRO, activation checkpointing, the schedule's shape, the degrees but for dp, and
for ep where it is more than few ranks or the small model's experts take.
"""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from framework.errors import TopologyError
from framework.recipe.derive import context_degrees, count_expert_slices, derive
from framework.recipe.schema import Batch, LearningRateSchedule, Model, Optim, Parallel, Precision, Recipe, Zero
from framework.verify.options import Options

MAX_RANKS = 4
MAX_CONTEXT = 32
MAX_SEQUENCES_PER_MICROBATCH = 2
MAX_ACCUMULATION = 3
# In fp32, bf16 and fp16. Adam divides a gradient by its own root mean square plus eps. Where the true gradient is zero (a key
# bias: softmax does not see a shift) both are rounding noise, and with an eps of 1e-8 the update is noise of the size of a real
# one.
LEAST_EPS = 1e-3
# Below it fp32 weights of 0.1 would hardly move in three steps, whatever the update.
LEAST_LR = 1e-3

CPU_ATTENTION = ("auto", "eager", "sdpa")
CPU_EXPERTS = ("auto", "eager", "batched_mm", "grouped_mm")
# By `--dtype`: compute, master and reduce.
PRECISIONS = {
    "fp64": Precision("fp64", "fp64", "fp64"),
    "fp32": Precision("fp32", "fp32", "fp32"),
    "bf16": Precision("bf16", "fp32", "fp32"),
    "fp8": Precision("fp8", "fp32", "fp32"),
    # Far from an overflow, after which there would be nothing to compare, and enough for gradients of few tokens.
    "fp16": Precision("fp16", "fp32", "fp32", loss_scale=1024.0),
}


@dataclass(frozen=True)
class Small:
    """A recipe that is run in place of the user's. reasons: by key, why it was changed, where that is not for size."""

    recipe: Recipe
    reasons: Mapping[str, str]


def shrink_recipe(
    recipe: Recipe, parameters: Collection[str], positions: int, options: Options, experts: int = 0, heads: int = 0
) -> Small:
    """A recipe that runs in seconds and takes the same paths.

    parameters: names in the small model; positions: the longest sequence that it takes; experts: what every layer's number of
    experts is a multiple of, 0 without experts; heads: likewise its heads. TopologyError if the layout does not fit
    options.ranks.
    """
    derived = derive(recipe)
    dtype = options.dtype or "fp32"
    dp, ep = _choose_degrees(recipe, options.ranks, experts)
    microbatch = min(derived.sequences_per_microbatch, MAX_SEQUENCES_PER_MICROBATCH)
    accumulation = min(derived.accumulation, _most_microbatches(recipe))
    batch = Batch(dp * microbatch * accumulation, None, microbatch, _shrink_context(recipe, positions))
    model, why_model = _simplify_model(recipe.model, parameters, options.device, dtype)
    optim, why_optim = _simplify_optim(recipe.optim, parameters, dtype)
    zero, why_zero = _shrink_shards(recipe.zero, derived.dp * derived.cp, dp * derived.cp)
    small = replace(
        recipe,
        train=replace(recipe.train, steps=options.steps),
        batch=batch,
        model=model,
        parallel=_lower_ulysses(_lower_ep(recipe.parallel, dp, ep), heads),
        pipeline=replace(recipe.pipeline, layers=None),
        zero=zero,
        memory=replace(recipe.memory, compile="never"),
        precision=_choose_precision(recipe.precision, dtype),
        optim=optim,
        launch=replace(recipe.launch, kind="local", ranks=dp * _inner(recipe), device=options.device),
    )
    reasons = {
        "precision.compute": "--dtype chooses another",
        "precision.master": "that of --dtype",
        "precision.reduce": "that of --dtype",
        "precision.loss_scale": "that of --dtype",
        "parallel.dp": "--ranks sets another number",
        "parallel.ep": "what few ranks and the small model's experts take",
        "parallel.context": "the small model has fewer heads",
        "pipeline.layers": "by cost instead, the small model has fewer layers",
        "memory.compile": "it would take longer than all the rest",
    }
    return Small(small, reasons | why_model | why_optim | why_zero)


def _shrink_context(recipe: Recipe, positions: int) -> int:
    """A length of which every rank of cp has tokens, if the small model takes so many."""
    return min(recipe.batch.context, max(MAX_CONTEXT, 2 * recipe.parallel.cp), positions)


def _choose_precision(own: Precision, dtype: str) -> Precision:
    """That of `dtype`, with what of the recipe's own goes with it."""
    master = "none" if own.master == "none" and dtype == "bf16" else PRECISIONS[dtype].master
    return replace(PRECISIONS[dtype], master=master, fp8_scaling=own.fp8_scaling, moments=own.moments)


def _most_microbatches(recipe: Recipe) -> int:
    """The largest number of microbatches: a table has its own, and DualPipeV needs two for each rank."""
    if recipe.pipeline.table is not None:
        return derive(recipe).accumulation
    return 2 * recipe.parallel.pp if recipe.pipeline.schedule == "dualpipe_v" else MAX_ACCUMULATION


def _inner(recipe: Recipe) -> int:
    """Ranks of one data-parallel replica that are not shared by context."""
    return recipe.parallel.tp * recipe.parallel.pp * recipe.parallel.cp


def _lower_ep(parallel: Parallel, dp: int, ep: int) -> Parallel:
    # Where ep becomes 1, experts stay whole: what is not said would then mean slices.
    return replace(
        parallel, dp=dp, ep=ep, expert_tp=count_expert_slices(parallel) if ep < parallel.ep else parallel.expert_tp
    )


def _lower_ulysses(parallel: Parallel, heads: int) -> Parallel:
    ulysses = context_degrees(parallel)[0]
    fitting = math.gcd(ulysses, heads // parallel.tp)
    return parallel if fitting == ulysses else replace(parallel, context=[fitting, parallel.cp // fitting])


def _choose_degrees(recipe: Recipe, ranks: int | None, experts: int) -> tuple[int, int]:
    """(dp, ep): the recipe's ep if few ranks and the experts take it, else a divisor of it, more than 1 if any fits.

    dp is the largest that needs at most MAX_RANKS ranks, or else the smallest legal one; with `ranks`, the dp that fills them.
    """
    inner, parallel = _inner(recipe), recipe.parallel
    per_dp, most = parallel.cp * parallel.tp // count_expert_slices(parallel), derive(recipe).dp
    degrees = [each for each in range(parallel.ep, 0, -1) if parallel.ep % each == 0 and experts % each == 0]
    if ranks is not None:
        degree = next((each for each in degrees if ranks // inner * per_dp % each == 0), 1)
        if ranks < 1 or ranks % inner or degree < min(parallel.ep, 2):
            smallest = inner * next(dp for dp in range(1, parallel.ep + 1) if dp * per_dp % degrees[0] == 0)
            raise TopologyError(
                f"--ranks {ranks} does not fit tp * pp * cp = {inner} with ep = {parallel.ep}: use a multiple of {smallest}"
            )
        return ranks // inner, degree
    legal = {ep: [dp for dp in range(1, most + 1) if dp * per_dp % ep == 0] for ep in degrees}
    few = {ep: [dp for dp in legal[ep] if dp * inner <= MAX_RANKS] for ep in degrees}
    fitting = [ep for ep in degrees if few[ep] and (ep > 1 or len(degrees) == 1)]
    if not fitting:
        ep = min(degrees[:-1], default=1)
        return legal[ep][0], ep
    # Where ranks share experts they still do, unless then no experts are divided.
    shares = most * per_dp > parallel.ep and fitting[0] < parallel.ep
    ep = next((ep for ep in fitting if shares and max(few[ep]) * per_dp > ep), fitting[0])
    return max(few[ep]), ep


def _shrink_shards(zero: Zero, batch: int, batch_small: int) -> tuple[Zero, dict[str, str]]:
    """HSDP with both its axes, as far as the ranks go. batch: ranks of dp x cp, in the recipe and in the small one."""
    within = zero.shard_within
    if within is None or (isinstance(within, int) and (within == batch or batch_small % within == 0)):
        return zero, {}
    small = 2 if batch_small > 2 and batch_small % 2 == 0 else batch_small
    replicas = batch_small // small
    return replace(zero, shard_within=small), {"zero.shard_within": f"{replicas} replicas of {small} ranks"}


def _simplify_model(model: Model, parameters: Collection[str], device: str, dtype: str) -> tuple[Model, dict[str, str]]:
    runs_here = {
        "attention": model.attention in CPU_ATTENTION or (device == "cuda" and dtype in ("bf16", "fp16")),
        "experts": model.experts in CPU_EXPERTS and not (dtype == "fp64" and model.experts == "grouped_mm"),
    }
    why = {
        f"model.{name}": f"it does not run on {device} in {dtype}: the model's own choice instead" for name in runs_here
    }
    why["model.weights"] = "not read: both sides start from seeded weights"
    freeze = [pattern for pattern in model.freeze if _is_found(pattern, parameters)]
    why["model.freeze"] = "what is missing is found in no parameter of the small model"
    attention, experts = (getattr(model, name) if runs else "auto" for name, runs in runs_here.items())
    return replace(model, weights=None, freeze=freeze, attention=attention, experts=experts), why


def _simplify_optim(optim: Optim, parameters: Collection[str], dtype: str) -> tuple[Optim, dict[str, str]]:
    why = {
        "optim.eps": f"it would divide {dtype}'s rounding noise by itself where a gradient is zero",
        "optim.lr": "so that a wrong update shows after few steps",
        "optim.schedule.warmup_steps": "few steps see all of the schedule",
        "optim.schedule.decay_steps": "few steps see all of the schedule",
    }
    groups = {name: each for name, each in optim.groups.items() if _is_found(each.pattern, parameters)}
    for name in optim.groups.keys() - groups.keys():
        why[f"optim.groups.{name}"] = "its pattern is found in no parameter of the small model"
    eps = max(optim.eps, LEAST_EPS) if dtype != "fp64" and optim.name == "adamw" else optim.eps
    small = replace(optim, groups=groups, schedule=_compress(optim.schedule), eps=eps, lr=max(optim.lr, LEAST_LR))
    return small, why


def _compress(schedule: LearningRateSchedule) -> LearningRateSchedule:
    """The schedule with at most one step in each phase, so that few steps see all of them."""
    decay = None if schedule.decay_steps is None else 1
    return replace(schedule, warmup_steps=min(schedule.warmup_steps, 1), decay_steps=decay)


def _is_found(pattern: str, parameters: Collection[str]) -> bool:
    return any(re.search(pattern, name) for name in parameters)
