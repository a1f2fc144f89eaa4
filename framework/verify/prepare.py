"""From a user's recipe to the run that a verification compares: the recipe made small, or with --strict as it is.

The small version keeps the optimizer, groups, freezing, clipping, ZeRO, activation checkpointing, the schedule's shape, and the
degrees but for dp, and for ep where few ranks or the small model's experts do not take it. `sides.py` tells the user of every
change. A strict verification keeps sizes, dtypes, ranks and `torch.compile`; only the data is random tokens, and only the first
steps are run. Where that is impossible the recipe is refused with everything that would have to be left out.
"""

import math
import os
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from transformers import PretrainedConfig

from framework.data.loader import find_sequence_problems
from framework.errors import RecipeError, TopologyError
from framework.mesh.topology import count_passing
from framework.model.experts import count_all_experts
from framework.model.initial import find_scales
from framework.model.load import build_meta, layer_configs, load_config, load_config_file
from framework.model.precision import DTYPES, compute_dtype
from framework.model.shrink import MIN_LAYERS, shrink
from framework.parallel.attention.hook import refuse_uneven_heads
from framework.parallel.layer_matmuls import require_torchao
from framework.plan.policies import keep_chunked_loss
from framework.recipe.derive import Derived, context_degrees, count_expert_slices, count_virtual_stages, derive
from framework.recipe.problem import render_problems
from framework.recipe.schema import Batch, LearningRateSchedule, Model, Optim, Parallel, Recipe, Zero
from framework.recipe.stages import split_stages
from framework.verify.sides import (
    DRAWN,
    PRECISIONS,
    ChangedValue,
    Sides,
    find_changes,
    find_config_changes,
    find_dropout,
    find_lots,
)

MAX_RANKS = 4
# Elements of a small model's matrix that still travels as codes.
SMALL_MATRIX = 64
MAX_CONTEXT = 32
MAX_SEQUENCES_PER_MICROBATCH = 2
MAX_ACCUMULATION = 3
# In fp32, bf16 and fp16. Adam divides a gradient by its own root mean square plus eps. Where the true gradient is zero (a key
# bias: softmax does not see a shift) both are rounding noise, and with an eps of 1e-8 the update is noise of the size of a real
# one.
LEAST_EPS = 1e-3
# Below it fp32 weights of 0.1 would hardly move in three steps, whatever the update.
LEAST_LR = 1e-3
STARTS_SEEDED = "not read: both sides start from seeded weights"

CPU_ATTENTION = ("auto", "eager", "sdpa")
CPU_EXPERTS = ("auto", "eager", "batched_mm", "grouped_mm")

# --strict. A few minutes: a core does 1e10 to 1e11 floating-point operations a second, a GPU a thousand times as many.
MAX_FLOPS = {"cpu": 3e13, "cuda": 1e16}
MAX_STRICT_RANKS = 16
# Bytes of a parameter on each side: weights, gradients, master, two moments, copies, all in fp32; activations come on top.
BYTES_PER_PARAMETER = 32


@dataclass(frozen=True)
class VerifyOptions:
    """Options of `meshwright verify`."""

    # A Hugging Face config.json in place of the recipe's model.
    model_config: Path | None = None
    # None: fp32; with `strict` the recipe's.
    dtype: Literal["fp64", "fp32", "bf16", "fp16", "fp8"] | None = None
    steps: int = 3
    # None: as many as the layout needs.
    ranks: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    # Leave nothing of the recipe out.
    strict: bool = False

    def check(self) -> None:
        """Raise RecipeError for options that cannot be met, before any rank starts."""
        if self.steps < 1:
            raise RecipeError(f"--steps {self.steps}: at least one step is needed to compare anything")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise RecipeError("--device cuda: torch sees no GPU here; leave it out to verify on CPU ranks")
        given = {"--model-config": self.model_config, "--dtype": self.dtype, "--ranks": self.ranks}
        contrary = [name for name, value in given.items() if value is not None]
        if self.strict and contrary:
            raise RecipeError(
                f"--strict verifies the recipe as it is, and {', '.join(contrary)} would change it: set the recipe's own keys"
                " instead (model.config, precision.compute, launch.ranks)"
            )


@dataclass(frozen=True)
class Verification:
    """A verification that is ready to run: its two sides, and the values of the user's recipe that it changes."""

    sides: Sides
    changes: list[ChangedValue]
    num_parameters: int


def prepare_stages(recipe: Recipe, options: VerifyOptions) -> dict[str, Verification]:
    """A verification of each stage of the run by its name; one for several, as "a, b", of which no step differs."""
    found: dict[str, Verification] = {}
    for stage in split_stages(recipe):
        own = prepare(stage.recipe, options)
        names = next((names for names, each in found.items() if each.sides.has_steps_of(own.sides)), "")
        found[f"{names}, {stage.name}" if names else stage.name] = found.pop(names, own)
    return found


def prepare(recipe: Recipe, options: VerifyOptions) -> Verification:
    """Prepare a verification of a recipe without stages. MeshwrightError where recipe, model or machine have to change first."""
    prepared = _choose_sides(recipe, options)
    problems = list(find_sequence_problems(prepared.sides.recipe, prepared.sides.config))
    if problems:
        raise RecipeError(render_problems(problems))
    if prepared.sides.recipe.precision.compute == "fp8":
        require_torchao()
    return prepared


def _choose_sides(recipe: Recipe, options: VerifyOptions) -> Verification:
    original, changes = _load(recipe.model, options.model_config)
    if options.strict:
        model = build_meta(original, recipe.model.attention)
        find_scales(model, recipe.model.mup_base)
        kept = keep_whole(recipe, original, model, options)
        return Verification(Sides(kept, original, options.steps), changes, _count(model))
    recipe = keep_chunked_loss(recipe, original)
    config = shrink(original, max(MIN_LAYERS, recipe.parallel.pp * count_virtual_stages(recipe.pipeline)))
    model = build_meta(config)
    find_scales(model, recipe.model.mup_base)  # raises where there is no muP
    names = [name for name, _ in model.named_parameters()]
    experts = math.gcd(*count_all_experts(model).values())
    # Checked on the model as it is: that a small one has fewer heads is no fault of the recipe's.
    refuse_uneven_heads(layer_configs(original), recipe.parallel)
    if lots := find_lots(model, options.dtype or "fp32"):
        raise RecipeError("\n".join(lots))
    # Common divisor of the heads of every layer; 0 in a model without.
    heads = math.gcd(*(getattr(each.get_text_config(), "num_attention_heads", 0) for each in layer_configs(config)))
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    positions = limit if isinstance(limit, int) and limit > 0 else sys.maxsize
    small, reasons = shrink_recipe(recipe, names, positions, options, experts, heads)
    changes += find_config_changes(original, config) + find_changes(recipe, small, reasons)
    return Verification(Sides(small, config, options.steps), changes, _count(model))


def shrink_recipe(
    recipe: Recipe,
    parameters: Collection[str],
    positions: int,
    options: VerifyOptions,
    experts: int = 0,
    heads: int = 0,
) -> tuple[Recipe, dict[str, str]]:
    """A recipe that runs in seconds and takes the same paths, and by key the reasons of changes that are not for size.

    parameters: names in the small model; positions: the longest sequence that it takes; experts: a divisor of every layer's
    number of experts, 0 without experts; heads: likewise of its heads. TopologyError if the layout does not fit options.ranks.
    """
    derived = derive(recipe)
    dtype = options.dtype or "fp32"
    dp, ep = _choose_degrees(recipe, options.ranks, experts)
    microbatch = min(derived.sequences_per_microbatch, MAX_SEQUENCES_PER_MICROBATCH)
    accumulation = min(derived.accumulation, _most_microbatches(recipe))
    # A length of which every rank of cp has tokens, if the small model takes so many.
    context = min(recipe.batch.context, max(MAX_CONTEXT, 2 * recipe.parallel.cp), positions)
    batch = Batch(dp * microbatch * accumulation, None, microbatch, context)
    model, why_model = _simplify_model(recipe.model, parameters, options.device, dtype)
    optim, why_optim = _simplify_optim(recipe.optim, parameters, dtype, options.steps)
    zero, why_zero = _shrink_shards(recipe, dtype, derived.dp * derived.cp, dp * derived.cp)
    ranks = dp * _inner(recipe)
    # Two nodes by name, on this machine: what leaves a node leaves it here.
    nodes = {"kind": "local"} if zero.quantize_reduce == "none" else {"kind": "slurm", "ranks_per_node": ranks // 2}
    own = recipe.precision
    master = "none" if own.master == "none" and dtype == "bf16" else PRECISIONS[dtype].master
    small = replace(
        recipe,
        train=replace(recipe.train, steps=options.steps),
        batch=batch,
        model=model,
        adapter=replace(recipe.adapter, dropout=0.0, weights=None),
        parallel=_lower_ulysses(_send_tokens(_lower_ep(recipe.parallel, dp, ep), derived, dtype), heads),
        pipeline=replace(recipe.pipeline, layers=None),
        zero=zero,
        memory=replace(recipe.memory, compile="never"),
        precision=replace(PRECISIONS[dtype], master=master, fp8_scaling=own.fp8_scaling, moments=own.moments),
        optim=optim,
        launch=replace(recipe.launch, **nodes, ranks=ranks, device=options.device),
    )
    reasons = {
        "precision.compute": "--dtype chooses another",
        "precision": "that of --dtype",
        "adapter.dropout": "drawn per microbatch",
        "adapter.weights": STARTS_SEEDED,
        "parallel.dp": "--ranks sets another number",
        "parallel.ep": "what few ranks and the small model's experts take",
        "parallel.expert_hierarchical": "as if nodes were smaller, so that tokens take two hops here, too",
        "parallel.expert_backend": "it needs GPUs, and bf16",
        "parallel.expert_padding": "few tokens are spread less evenly: buffers have room for all",
        "parallel.expert_dispatch": "a sum in another order would round to another code: --dtype fp64 compares it",
        "parallel.context": "the small model has fewer heads",
        "pipeline.layers": "by cost instead, the small model has fewer layers",
        "memory.compile": "it would take longer than all the rest",
    }
    return small, reasons | why_model | why_optim | why_zero


def _most_microbatches(recipe: Recipe) -> int:
    """Largest number of microbatches: a table has its own, and DualPipeV needs two for each rank."""
    if recipe.pipeline.table is not None:
        return derive(recipe).accumulation
    return 2 * recipe.parallel.pp if recipe.pipeline.schedule == "dualpipe_v" else MAX_ACCUMULATION


def _inner(recipe: Recipe) -> int:
    """Ranks of one data-parallel replica that are not shared by context."""
    return recipe.parallel.tp * recipe.parallel.pp * recipe.parallel.cp


def _lower_ep(parallel: Parallel, dp: int, ep: int) -> Parallel:
    # Where ep becomes 1, experts stay whole: the default would then mean slices.
    return replace(
        parallel, dp=dp, ep=ep, expert_tp=count_expert_slices(parallel) if ep < parallel.ep else parallel.expert_tp
    )


def _send_tokens(parallel: Parallel, derived: Derived, dtype: str) -> Parallel:
    """Two hops where the recipe has them, and rows that travel as codes where the oracle can round as ranks do. parallel: of few
    ranks; derived: of the recipe."""
    places = derived.ep, derived.expert_tp, derived.ranks_per_node, derived.world
    inner, ep = parallel.expert_hierarchical, parallel.ep
    if ep > 1 and count_passing(inner, *places) < derived.ep:
        inner = 2 if ep > 2 and ep % 2 == 0 else 1
    elif isinstance(inner, int):
        inner = "node"
    dispatch = parallel.expert_dispatch if dtype == "fp64" and ep > 1 else "bf16"
    padding = None if parallel.expert_padding is None or ep == 1 else float(ep)
    parallel = replace(parallel, expert_hierarchical=inner, expert_dispatch=dispatch, expert_padding=padding)
    return replace(parallel, expert_backend="own")


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


def _shrink_shards(recipe: Recipe, dtype: str, batch: int, batch_small: int) -> tuple[Zero, dict[str, str]]:
    """HSDP with both its axes, and a second copy of shards, as far as the ranks allow; codes also of small matrices. batch: ranks
    of dp x cp, in the recipe and in the small one."""
    zero, reasons = recipe.zero, {}
    within, copied = zero.shard_within, zero.secondary_shard
    if zero.quantize_reduce != "none" and (why := _why_exact(recipe, dtype, batch_small)):
        zero = replace(zero, quantize_reduce="none")
        reasons["zero.quantize_reduce"] = why
    if zero.quantize_gather != "none" or zero.quantize_reduce != "none":
        zero = replace(zero, quantize_min_elements=min(zero.quantize_min_elements, SMALL_MATRIX))
    if within is not None and (within == "node" or (within != batch and batch_small % within)):
        small = 2 if batch_small > 2 and batch_small % 2 == 0 else batch_small
        zero = replace(zero, shard_within=small)
        reasons["zero.shard_within"] = f"{batch_small // small} replicas of {small} ranks"
    shard = zero.shard_within if isinstance(zero.shard_within, int) else batch_small
    if copied is not None and (copied == "node" or copied >= shard or shard % copied):
        zero = replace(zero, secondary_shard=2 if shard > 2 and shard % 2 == 0 else None)
        reasons["zero.secondary_shard"] = f"what divides {shard} ranks, if anything does"
    return zero, reasons


def _why_exact(recipe: Recipe, dtype: str, batch_small: int) -> str:
    """The reason why gradients are not sent as codes here; "" where the oracle can round as ranks do."""
    parallel, zero = recipe.parallel, recipe.zero
    if dtype != "fp64":
        return "a sum in another order would round to another code: --dtype fp64 compares it"
    if batch_small % 2:
        return "two nodes take ranks of dp by two: --ranks"
    if parallel.cp > 1 or parallel.pp > 1 or parallel.ep > 1:
        return "one process cannot tell the ranks' gradients apart under cp, pp or ep"
    if zero.shard_within is not None or zero.quantize_reduce == "int4_rotated":
        return "the oracle rounds neither sums over replicas nor turned blocks"
    return ""


def _simplify_model(model: Model, parameters: Collection[str], device: str, dtype: str) -> tuple[Model, dict[str, str]]:
    runs_here = {
        "attention": model.attention in CPU_ATTENTION or (device == "cuda" and dtype in ("bf16", "fp16")),
        "experts": model.experts in CPU_EXPERTS and not (dtype == "fp64" and model.experts == "grouped_mm"),
    }
    why = {
        f"model.{name}": f"it does not run on {device} in {dtype}: the model's own choice instead" for name in runs_here
    }
    why["model.weights"] = STARTS_SEEDED
    freeze = [pattern for pattern in model.freeze if _is_found(pattern, parameters)]
    why["model.freeze"] = "what is missing is found in no parameter of the small model"
    attention, experts = (getattr(model, name) if runs else "auto" for name, runs in runs_here.items())
    return replace(model, weights=None, freeze=freeze, attention=attention, experts=experts), why


def _simplify_optim(optim: Optim, parameters: Collection[str], dtype: str, steps: int) -> tuple[Optim, dict[str, str]]:
    why = {
        "optim.eps": f"it would divide {dtype}'s rounding noise by itself where a gradient is zero",
        "optim.lr": "so that a wrong update shows after few steps",
        "optim.schedule": "few steps see all of the schedule",
    }
    groups = {name: each for name, each in optim.groups.items() if _is_found(each.pattern, parameters)}
    for name in optim.groups.keys() - groups.keys():
        why[f"optim.groups.{name}"] = "its pattern is found in no parameter of the small model"
    eps = max(optim.eps, LEAST_EPS) if dtype != "fp64" and optim.name in ("adamw", "muon") else optim.eps
    small = replace(
        optim, groups=groups, schedule=_compress(optim.schedule, steps), eps=eps, lr=max(optim.lr, LEAST_LR)
    )
    if optim.name == "muon" and optim.muon.dtype == "bf16":
        small = replace(small, muon=replace(optim.muon, dtype="master"))
        why["optim.muon.dtype"] = "iterations in bf16 turn rounding noise into differences of 2^-9"
    return small, why


def _compress(schedule: LearningRateSchedule, steps: int) -> LearningRateSchedule:
    """The schedule with at most one step in each phase and its end within `steps`, so that few steps see all of it."""
    warmup, start = min(schedule.warmup_steps, 1), min(schedule.start_step, 1)
    decay = None if schedule.decay_steps is None else 1
    stop = None if schedule.stop_step is None else min(schedule.stop_step, steps)
    return replace(schedule, warmup_steps=warmup, decay_steps=decay, start_step=start, stop_step=stop)


def _is_found(pattern: str, parameters: Collection[str]) -> bool:
    return any(re.search(pattern, name) for name in parameters)


def keep_whole(recipe: Recipe, config: PretrainedConfig, model: nn.Module, options: VerifyOptions) -> Recipe:
    """The recipe with its precision explicit, to run on this machine. model: of the config. Raises RecipeError that lists
    everything against it."""
    derived = derive(recipe)
    compute = compute_dtype(recipe.precision, torch.device(options.device))
    chosen = recipe.precision.compute
    word = chosen if chosen != "auto" else next(name for name, dtype in DTYPES.items() if dtype == compute)
    kept = replace(
        recipe,
        precision=replace(recipe.precision, compute=word),  # type: ignore[arg-type]
        launch=replace(recipe.launch, kind="local", ranks=derived.world, device=options.device),
    )
    problems = [str(change) for change in (*find_dropout(config), *_find_absent(recipe, options, word))]
    problems += find_lots(model, word)
    problems += _find_too_large(recipe, sum(parameter.numel() for parameter in model.parameters()), options)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise RecipeError(
            f"--strict leaves nothing out, and this recipe cannot be verified whole here:\n{listed}\n"
            "Change these keys, or verify without --strict, which names what it leaves out"
        )
    changes = [change for change in find_changes(recipe, kept, {}) if change.before != "auto"]
    assert not changes, f"--strict has changed {', '.join(map(str, changes))}"
    return kept


def _find_absent(recipe: Recipe, options: VerifyOptions, dtype: str) -> list[ChangedValue]:
    """Values of the recipe that a verification cannot run."""
    model, adapter, on_cpu, master = recipe.model, recipe.adapter, options.device == "cpu", recipe.precision.master
    within, copied, needs_gpu = recipe.zero.shard_within, recipe.zero.secondary_shard, "it needs --device cuda"
    on_one, codes = "all ranks are on this machine: state the degree", recipe.zero.quantize_reduce
    found = (
        (model.weights is not None, "model.weights", model.weights, None, STARTS_SEEDED),
        (adapter.weights is not None, "adapter.weights", adapter.weights, None, STARTS_SEEDED),
        (adapter.dropout > 0, "adapter.dropout", adapter.dropout, 0.0, DRAWN),
        (within == "node", "zero.shard_within", within, None, on_one),
        (copied == "node", "zero.secondary_shard", copied, None, on_one),
        (codes != "none", "zero.quantize_reduce", codes, "none", "all ranks are on one node, where nothing travels so"),
        (on_cpu and model.attention not in CPU_ATTENTION, "model.attention", model.attention, "auto", needs_gpu),
        (on_cpu and model.experts not in CPU_EXPERTS, "model.experts", model.experts, "auto", needs_gpu),
        (
            master == "fp64" != dtype,
            "precision.master",
            "fp64",
            "fp32",
            f"the oracle's masters are fp32 beside {dtype}",
        ),
    )
    return [ChangedValue(*change) for is_absent, *change in found if is_absent]


def _find_too_large(recipe: Recipe, num_parameters: int, options: VerifyOptions) -> list[str]:
    derived = derive(recipe)
    flops, most = 6.0 * num_parameters * derived.tokens_per_step * options.steps, MAX_FLOPS[options.device]
    problems = []
    if flops > most:
        problems.append(
            f"{num_parameters:,} parameters on {derived.tokens_per_step:,} tokens a step, {options.steps} steps: {flops:.0e}"
            f" floating-point operations on each side, more than the {most:.0e} that --device {options.device} may take"
        )
    needed = num_parameters * BYTES_PER_PARAMETER * (derived.world + 1)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        gib, here = (f"{each / 2**30:.0f} GiB" for each in (needed, available))
        problems.append(f"about {gib} for {derived.world} ranks, of {here} here")
    if derived.world > MAX_STRICT_RANKS:
        problems.append(f"{derived.world} ranks, more than the {MAX_STRICT_RANKS} that one machine runs here")
    return problems


def _count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _load(model: Model, model_config: Path | None) -> tuple[PretrainedConfig, list[ChangedValue]]:
    """The full-size config. Pretrained weights are never downloaded, and only the config of a local folder is read."""
    if model_config is not None:
        change = ChangedValue("model", model.family, str(model_config), "--model-config")
        return load_config_file(model_config), [change]
    if model.weights is None or Path(model.weights).is_dir():
        return load_config(model), []
    return load_config(replace(model, weights=None)), []
