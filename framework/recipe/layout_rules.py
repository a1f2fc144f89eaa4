"""Rules of the layout: degrees, experts, context parallelism, ZeRO, the pipeline, memory and precision."""

from collections.abc import Iterator
from itertools import count, islice

from framework.recipe.derive import (
    VIRTUAL_STAGES,
    context_degrees,
    count_dp,
    count_nodes,
    count_ranks,
    count_secondary,
    count_sequences,
    count_virtual_stages,
    divisors,
    find_batch_problems,
    find_compile_obstacle,
    find_node_problems,
    find_statement_problems,
    find_world_problems,
    has_range,
    has_tokens_everywhere,
    ulysses_degrees,
)
from framework.recipe.derive import count_context_parts as count_parts
from framework.recipe.problem import COUNTED, DEGREES, Findings, Problem, Rule, refuse, refuse_useless, rule
from framework.recipe.schema import Parallel, Pipeline, Recipe

# Why the optimizer has to have weights of its own beside some compute dtypes.
NO_MASTER = {
    "fp16": "fp16 has nothing between 0 and 6e-8: small weights and updates would be lost, however they are rounded",
    "fp8": "nothing has shown that fp8 learns from weights that bf16 has rounded",
    "auto": "precision.compute=auto may be fp32 here, where weights are what the optimizer updates already",
}


# --- degrees


@rule("parallel.dp", "launch.spares", *COUNTED)
def node_range(recipe: Recipe) -> Findings:
    """A range of nodes, or spare ones. `submit` finds out whether each number of nodes can be laid out."""
    launch, parallel = recipe.launch, recipe.parallel
    if launch.spares and launch.kind == "local":
        message = "spare nodes are SLURM's, and launch.kind=local trains on this machine"
        yield "launch.spares", message, "launch.spares=0; or launch=slurm and `meshwright submit`"
    if launch.nodes is None or isinstance(launch.nodes, int):
        return
    least, most = launch.nodes
    if launch.kind == "local":
        message = "nodes are SLURM's, and launch.kind=local trains on this machine"
        yield "launch.nodes", message, "launch.nodes=null; or launch=slurm and `meshwright submit`"
    elif least > most:
        yield "launch.nodes", "the least number of nodes comes first", f"launch.nodes=[{most},{least}]"
    elif has_range(launch):
        for key, value in (("launch.ranks", launch.ranks), ("parallel.dp", parallel.dp)):
            if value is not None:
                message = f"one number, and launch.nodes=[{least},{most}] has as many ranks as there are nodes"
                yield Problem(key, value, message, f"{key}=null, which follows; or launch.nodes=one number")


@rule("launch", *DEGREES)
def placement(recipe: Recipe) -> Findings:
    """A tensor-parallel group communicates in every layer: it stays within a node, unless the recipe allows otherwise."""
    tp, nodes = recipe.parallel.tp, count_nodes(recipe)
    here = count_ranks(recipe) // nodes
    if nodes > 1 and here % tp and not recipe.launch.tp_across_nodes:
        message = f"a tensor-parallel group of {tp} would lie on two nodes, which have {here} ranks each"
        legal = " or ".join(map(str, divisors(here)))
        yield "parallel.tp", message, f"parallel.tp={legal}; or launch.tp_across_nodes=true"


# --- context parallelism


@rule("parallel.cp", "parallel.context")
def context_method(recipe: Recipe) -> Findings:
    """The Ulysses and the ring degree multiply to cp; a method needs ranks that divide sequences."""
    key, found, cp = "parallel.context", recipe.parallel.context, recipe.parallel.cp
    if isinstance(found, list):
        pairs = " or ".join(f"[{u},{cp // u}]" for u in divisors(cp))
        if len(found) != 2:
            yield key, "a list is of two degrees, the Ulysses and the ring degree", f"{key}={pairs}"
        elif found[0] * found[1] != cp:
            ranks = found[0] * found[1]
            message = f"{found[0]} * {found[1]} = {ranks} ranks divide a sequence, but parallel.cp={cp}"
            yield key, message, f"{key}={pairs}; or parallel.cp={ranks}"
    elif cp == 1 and found != Parallel().context:
        message = "with parallel.cp=1 every rank has whole sequences, so it would do nothing"
        yield key, message, f"{key}={Parallel().context}, the default; or parallel.cp=2 or more"


@rule("parallel.cp", "parallel.context", "batch.context")
def context_length(recipe: Recipe) -> Findings:
    """Every rank has a token of every sequence. Other lengths that do not divide are padded (`unpadded_lengths`)."""
    context, (ulysses, ring) = recipe.batch.context, context_degrees(recipe.parallel)
    if has_tokens_everywhere(context, ulysses, ring):
        return
    parts = count_parts(ulysses, ring)
    longer = list(islice((n for n in count(context) if has_tokens_everywhere(n, ulysses, ring)), 2))
    message = f"cut into {parts} parts for parallel.cp={ulysses * ring}, it leaves a rank without a token"
    fix = f"batch.context={longer[0]} or {longer[1]}, or a multiple of {parts}; or a smaller parallel.cp"
    yield "batch.context", message, fix


@rule("parallel.tp", "parallel.cp", "parallel.context", "model.config")
def context_heads(recipe: Recipe) -> Findings:
    """Ulysses gives each rank some of the heads, where the recipe says how many there are; a plan knows it for all models."""
    parallel, heads = recipe.parallel, recipe.model.config.get("num_attention_heads")
    if isinstance(heads, int) and heads % parallel.tp == 0:
        yield from find_uneven_heads(parallel, heads)


def find_uneven_heads(parallel: Parallel, heads: int) -> Iterator[Problem]:
    """Heads of a layer that, divided over `tp`, do not divide over Ulysses' ranks."""
    ulysses, own = context_degrees(parallel)[0], heads // parallel.tp
    if own % ulysses == 0:
        return
    pairs = " or ".join(f"[{degree},{parallel.cp // degree}]" for degree in ulysses_degrees(parallel.cp, own))
    held = f"num_attention_heads={heads}" + (f" / parallel.tp={parallel.tp}" if parallel.tp > 1 else "")
    message = f"a Ulysses degree of {ulysses} does not divide the {own} heads of a rank ({held})"
    yield Problem("parallel.context", parallel.context, message, f"parallel.context={pairs}; or ring")


@rule("parallel.cp", "model.attention")
def context_attention(recipe: Recipe) -> Findings:
    """Attention across ranks is Meshwright's: an implementation of Hugging Face's would not be asked."""
    if recipe.parallel.cp > 1 and recipe.model.attention != "auto":
        message = f"with parallel.cp={recipe.parallel.cp} attention is computed by Meshwright, across ranks"
        yield "model.attention", message, "model.attention=auto"


# --- experts

# Keys of tokens that travel to other ranks' experts.
EXPERT_KEYS = ("expert_overlap", "expert_hierarchical", "expert_dispatch", "expert_padding", "expert_backend")


@rule(
    *(f"parallel.{name}" for name in ("ep", *EXPERT_KEYS)),
    *(f"model.{name}" for name in ("experts", "expert_capacity", "expert_drop")),
    *("batch.sequences_per_microbatch", "memory.compile"),
)
def experts(recipe: Recipe) -> Findings:
    parallel, inner = recipe.parallel, recipe.parallel.expert_hierarchical
    if recipe.model.experts != "auto" and (parallel.ep > 1 or recipe.model.expert_capacity is not None):
        message = (
            "experts that tokens are sent to are multiplied by Meshwright, not by an implementation of Hugging Face's"
        )
        yield "model.experts", message, "model.experts=auto"
    if recipe.model.expert_capacity is None:
        message = "without model.expert_capacity nothing is dropped"
        yield from refuse_useless(recipe, "model.expert_drop", message, "model.expert_capacity=1.25")
    if parallel.ep == 1:
        for name in EXPERT_KEYS:
            message = "with parallel.ep=1 no token is sent to an expert"
            yield from refuse_useless(recipe, f"parallel.{name}", message, "parallel.ep=2 or more")
    elif isinstance(inner, int) and parallel.ep % inner:
        legal = ", ".join(map(str, divisors(parallel.ep)))
        message = f"does not divide the parallel.ep={parallel.ep} ranks that have different experts"
        yield "parallel.expert_hierarchical", message, f"one of {legal}; node; or null"
    if parallel.ep > 1 and parallel.expert_backend == "deepep":
        yield from _deep_ep(recipe)
    if parallel.ep > 1 and parallel.expert_overlap:
        key = "parallel.expert_overlap"
        if recipe.batch.sequences_per_microbatch == 1:
            message = "a microbatch of one sequence has no halves: batch.sequences_per_microbatch=1"
            yield key, message, "batch.sequences_per_microbatch=2; or parallel.expert_overlap=false"
        if recipe.memory.compile == "always":
            message = (
                "halves of a layer compute by turns, also backward, and memory.compile=always makes a layer one graph"
            )
            yield key, message, "memory.compile=never; or parallel.expert_overlap=false"


def _deep_ep(recipe: Recipe) -> Findings:
    """Options that DeepEP's kernels do not have."""
    reasons = {
        "expert_dispatch": "its codes are of other blocks than ours, which `verify` rounds by",
        "expert_padding": "it counts rows in its own kernels",
        "expert_hierarchical": "it sends a token once to each node by itself",
    }
    for name, reason in reasons.items():
        message = f"parallel.expert_backend=deepep: {reason}"
        yield from refuse_useless(recipe, f"parallel.{name}", message, "parallel.expert_backend=own")
    if (recipe.parallel.expert_tp or 1) > 1:
        message = "parallel.expert_backend=deepep takes neighbours, and ranks of ep with slices of experts are tp apart"
        yield "parallel.expert_tp", message, "parallel.expert_tp=1; or parallel.expert_backend=own"


# --- ZeRO and sequence parallelism


@rule(*DEGREES, *COUNTED, "zero")
def zero(recipe: Recipe) -> Findings:
    stage, within = recipe.zero.stage, recipe.zero.shard_within
    batch = count_ranks(recipe) // (recipe.parallel.tp * recipe.parallel.pp)
    if isinstance(within, int) and batch % within:
        message = f"does not divide the {batch} ranks among which is sharded (dp * cp)"
        legal = ", ".join(map(str, divisors(batch)))
        yield "zero.shard_within", message, f"one of {legal}; or null for all"
    if stage and within is None:
        message = "zero.shard_within=null leaves no replicas: all ranks divide the optimizer state already"
        yield from refuse_useless(recipe, "zero.optimizer_within", message, "zero.shard_within=node")
    sharded = ("shard_within", "optimizer_within", "quantize_gather", "quantize_reduce")
    later = {"accumulate": (2, 3), "keep_gathered": (3,), "secondary_shard": (3,)}
    for name, stages in {**dict.fromkeys(sharded, (1, 2, 3)), **later}.items():
        if stage not in stages:
            way = f"zero.stage={' or '.join(map(str, stages))}"
            yield from refuse_useless(recipe, f"zero.{name}", f"zero.stage={stage} has no use for it", way)


@rule(*DEGREES, *COUNTED, "zero", "memory.offload.home", "memory.offload.optimizer")
def quantized(recipe: Recipe) -> Findings:
    zero, copied, key = recipe.zero, recipe.zero.secondary_shard, "zero.secondary_shard"
    if zero.quantize_gather == zero.quantize_reduce == "none":
        message = "with zero.quantize_gather=none and zero.quantize_reduce=none the recipe quantizes nothing"
        yield from refuse_useless(recipe, "zero.quantize_min_elements", message, "zero.quantize_gather=int8")
    if zero.stage and count_nodes(recipe) == 1:
        message = "all ranks are on one node: nothing goes between nodes, and within one codes cost more than they save"
        yield from refuse_useless(recipe, "zero.quantize_reduce", message, "launch=slurm on several nodes")
    if zero.quantize_gather != "none" and recipe.memory.offload.optimizer and recipe.memory.offload.home == "disk":
        message = "masters on a disk come in pieces, which cut the blocks that are quantized"
        yield "zero.quantize_gather", message, "none; or memory.offload.home=host"
    if zero.stage < 3 or copied is None:
        return
    shard, node = _count_shards(recipe), count_ranks(recipe) // count_nodes(recipe)
    if zero.keep_gathered:
        message = "zero.keep_gathered=true unshards once a step: there is no second time"
        yield from refuse_useless(recipe, key, message, "zero.keep_gathered=false")
    elif copied == "node" and count_secondary(copied, shard, recipe.parallel.tp, node) == 1:
        message = f"shards over {shard} ranks and nodes of {node} ranks: unshards do not leave a node, or no node has two of the"
        yield from refuse_useless(recipe, key, f"{message} ranks", "more nodes, or zero.shard_within=null")
    elif isinstance(copied, int) and (copied >= shard or shard % copied):
        legal = ", ".join(map(str, divisors(shard)[1:-1])) or "none"
        yield key, f"is no part of the {shard} ranks that hold the shards", f"one of {legal}; node; or null"


@rule(*DEGREES, *COUNTED, "zero", "optim.name", "optim.muon")
def shared_matrices(recipe: Recipe) -> Findings:
    stated, tp = recipe.optim.muon.ranks_per_matrix, recipe.parallel.tp
    if recipe.optim.name == "muon" and stated != "auto":
        among = tp * (_count_shards(recipe) if recipe.zero.stage else 1)
        legal = [each for each in divisors(among) if each % tp == 0 or tp % each == 0]
        if stated not in legal:
            message = f"is no part of the {among} ranks that hold the parts of a matrix (ZeRO's shards x tp)"
            yield "optim.muon.ranks_per_matrix", message, f"one of {', '.join(map(str, legal))}; or auto"


def _count_shards(recipe: Recipe) -> int:
    """Ranks over which ZeRO shards from stage 1 on."""
    ranks, tp, within = count_ranks(recipe), recipe.parallel.tp, recipe.zero.shard_within
    batch = ranks // (tp * recipe.parallel.pp)
    if within == "node":
        return min(batch, ranks // count_nodes(recipe) // tp)
    return within or batch


@rule("parallel.sequence", "parallel.overlap", "memory.gathered_inputs")
def sequence(recipe: Recipe) -> Findings:
    if recipe.parallel.sequence:
        return
    message, way = "parallel.sequence=false gathers no inputs, so it would do nothing", "parallel.sequence=true"
    if recipe.parallel.overlap != "never":
        yield from refuse_useless(recipe, "parallel.overlap", message, way)
    yield from refuse_useless(recipe, "memory.gathered_inputs", message, way)


# --- pipeline


@rule("parallel.pp", *(f"pipeline.{name}" for name in ("schedule", "virtual_stages", "layers", "table")))
def stages(recipe: Recipe) -> Findings:
    pipeline, pp, virtual = recipe.pipeline, recipe.parallel.pp, count_virtual_stages(recipe.pipeline)
    legal = "2 or more" if pipeline.schedule == "interleaved" else str(VIRTUAL_STAGES.get(pipeline.schedule, 1))
    if pipeline.table is None and (virtual < 2 if legal == "2 or more" else str(virtual) != legal):
        message = f"pipeline.schedule={pipeline.schedule} has {legal} on each rank"
        fix = "pipeline.virtual_stages=null" + "; or pipeline.schedule=interleaved" * (legal == "1")
        yield Problem("pipeline.virtual_stages", virtual, message, fix)
    elif isinstance(pipeline.layers, list) and (
        # A table says itself how many stages there are: `count_layers` compares with those.
        (pipeline.table is None and len(pipeline.layers) != pp * virtual) or min(pipeline.layers, default=0) < 1
    ):
        message = f"needs a number of layers, at least 1, for each of pp * virtual_stages = {pp} * {virtual} stages"
        yield "pipeline.layers", message, "null, to cut by cost; or as many numbers"
    if pipeline.table is not None and pipeline.schedule != Pipeline().schedule:
        yield "pipeline.schedule", f"pipeline.table={pipeline.table} is a schedule as well", "leave one of them out"


@rule("parallel.pp", "pipeline.fill_bubbles", "train.validate_every_steps")
def bubbles(recipe: Recipe) -> Findings:
    key = "pipeline.fill_bubbles"
    if recipe.parallel.pp == 1:
        message = "one stage is never idle: there are no bubbles with parallel.pp=1"
        yield from refuse_useless(recipe, key, message, "parallel.pp=2 or more")
    elif recipe.pipeline.fill_bubbles != "none" and recipe.train.validate_every_steps is None:
        message = "there is no validation: train.validate_every_steps=null"
        yield key, message, f"{key}=none; or train.validate_every_steps=100"


@rule(*DEGREES, *COUNTED, "batch", "pipeline.schedule", "pipeline.table")
def microbatches(recipe: Recipe) -> Findings:
    if recipe.pipeline.schedule != "dualpipe_v" or recipe.pipeline.table is not None:
        return
    pp, each = recipe.parallel.pp, count_dp(recipe) * recipe.batch.sequences_per_microbatch
    needed, there = 2 * pp, count_sequences(recipe.batch) // each
    if there < needed:
        message = f"dualpipe_v on {pp} ranks needs {needed} microbatches in a step, and there are {there}"
        fix = f"batch.sequences_per_step={needed * each} or more; or pipeline.schedule=zbv"
        yield "pipeline.schedule", message, fix


# --- memory


@rule(
    *(f"memory.{name}" for name in ("activation_checkpointing", "kept_operations", "budget_gb", "compile")),
    *("parallel.tp", "parallel.sequence", "parallel.overlap"),
)
def checkpointing(recipe: Recipe) -> Findings:
    memory, key = recipe.memory, "memory.activation_checkpointing"
    policy = memory.activation_checkpointing
    chooses = policy in ("selective", "auto")
    if policy == "auto" and memory.budget_gb is None:
        message = "chooses by memory.budget_gb, which is not set: a plan does not know what else a device holds"
        yield key, message, "memory.budget_gb=70; or memory.activation_checkpointing=selective"
    if policy != "auto":
        message = f"is met by memory.activation_checkpointing=auto only, not by {policy}"
        yield from refuse_useless(recipe, "memory.budget_gb", message, f"{key}=auto")
    if not chooses:
        message = f"with {key}={policy} no operation's output is kept by name"
        yield from refuse_useless(recipe, "memory.kept_operations", message, f"{key}=selective")
    if memory.compile == "always" and (obstacle := find_compile_obstacle(recipe)):
        message = (
            f"chooses what is kept within one graph of a compiled layer; with {obstacle} graphs end at tp's regions"
        )
        yield key, message, f"{key}=full; or parallel.overlap=never"


@rule(
    *("memory.offload", "zero.stage", "launch.device"),
    *("precision.moments", "precision.master", "model.router_bias_rate"),
)
def offload(recipe: Recipe) -> Findings:
    offload, stage = recipe.memory.offload, recipe.zero.stage
    if recipe.launch.device == "cpu":
        yield from find_offload_to_device(recipe)
    yield from _disk(recipe)
    if offload.parameters and stage < 3:
        message = (
            f"with zero.stage={stage} whole parameters are resident on the device: there are no shards to fetch in turn"
        )
        fix = "zero.stage=3; or memory.offload.parameters=0 and memory.offload.optimizer=1"
        yield "memory.offload.parameters", message, fix


@rule("memory.offload.activations", "memory.activation_checkpointing", "launch.device")
def activation_offload(recipe: Recipe) -> Findings:
    key, policy = "memory.offload.activations", recipe.memory.activation_checkpointing
    if recipe.memory.offload.activations and policy not in ("none", "full"):
        message = (
            f"memory.activation_checkpointing={policy} keeps tensors of its own for backward, which autograd does not know and"
            " offload does not reach"
        )
        other = "full or none" + (" and ~memory.budget_gb" if policy == "auto" else "")
        yield key, message, f"{key}=0; or memory.activation_checkpointing={other}"
    if recipe.launch.device == "cpu":  # reported by the rule of all offload; a search asks this one first
        yield from (problem for problem in find_offload_to_device(recipe) if problem.key == key)


def _disk(recipe: Recipe) -> Findings:
    offload = recipe.memory.offload
    if offload.home == "host":
        message = "nothing is written there: memory.offload.home is host"
        yield from refuse_useless(recipe, "memory.offload.disk_path", message, "memory.offload.home=disk")
        return
    host = "; or memory.offload.home=host"
    # On a CPU activations have no other home at all: `find_offload_to_device` reports that.
    if offload.activations and recipe.launch.device != "cpu":
        key = "memory.offload.activations"
        message = "memory.offload.home=disk is for masters and moments: activations go to the host's memory only"
        yield key, message, f"{key}=0{host}"
    if offload.disk_path is None:
        message = "home=disk needs a folder for the files of the states"
        yield "memory.offload.disk_path", message, "name a folder on a disk of each node; or home=host"
    if not offload.optimizer:
        message = "no unit's states go to that disk: memory.offload.optimizer is 0"
        yield from refuse_useless(recipe, "memory.offload.home", message, "memory.offload.optimizer=1")
    if recipe.model.router_bias_rate:
        message = "biases of routers are moved in memory, and may be parameters whose masters are on the disk"
        yield "model.router_bias_rate", message, f"model.router_bias_rate=0{host}"
    if recipe.precision.moments != "fp32":
        yield "precision.moments", "moments of few bits are kept and rounded in memory", f"precision.moments=fp32{host}"
    if recipe.precision.master == "none":
        message = "weights without a master are widened and rounded in memory"
        yield "precision.master", message, f"precision.master=fp32{host}"


def find_offload_to_device(recipe: Recipe) -> Iterator[Problem]:
    """Fractions that would go from the host's memory to the host's memory, because ranks compute on CPUs."""
    # A disk is no memory of the host: states there leave its memory on a CPU as well.
    names = ("optimizer", "parameters", "activations")
    for name in names[recipe.memory.offload.home == "disk" :]:
        key = f"memory.offload.{name}"
        if getattr(recipe.memory.offload, name):
            message = (
                "the device is the host (launch.device=cpu): nothing would leave its memory, and copies would be added"
            )
            yield refuse(recipe, key, message, f"{key}=0; or launch.device=cuda")


# --- precision


@rule("precision")
def precision(recipe: Recipe) -> Findings:
    precision, compute = recipe.precision, recipe.precision.compute
    if compute != "fp64" and precision.reduce == "fp64" and precision.master != "fp64":
        message = f"gradients are summed in the dtype of precision.master={precision.master}: a wider one adds nothing"
        yield "precision.reduce", message, "precision.reduce=fp32"
    if precision.master == "none" and compute != "bf16":
        message = NO_MASTER.get(compute, f"weights are in {compute} already: nothing is saved")
        yield "precision.master", message, "precision.master=fp32; or precision.compute=bf16"
        return
    if compute != "fp8":
        message = f"nothing is in fp8 with precision.compute={compute}"
        yield from refuse_useless(recipe, "precision.fp8_scaling", message, "precision.compute=fp8")
    if compute != "fp16":
        message = f"precision.compute={compute} needs no loss scale: only fp16 loses small gradients"
        yield from refuse_useless(recipe, "precision.loss_scale", message, "precision=fp16")
    for name in ("master", "reduce") if compute == "fp64" else ():
        if getattr(precision, name) != "fp64":
            fix = f"precision.{name}=fp64 (precision=fp64 sets all three); or precision.compute=fp32"
            yield f"precision.{name}", "less precise than precision.compute=fp64, which would be lost in it", fix


# Rules that find keys without an effect, beside others.
USELESS_RULES = (experts, zero, quantized, sequence, checkpointing, bubbles, offload)
# In the order in which one mistake hides another.
LAYOUT_RULES = (
    *(context_method, context_length, context_heads, context_attention, experts, node_range),
    Rule((*DEGREES, *COUNTED), find_node_problems),
    Rule((*DEGREES, "parallel.ep", "parallel.expert_tp", *COUNTED), find_world_problems),
    Rule(("batch.sequences_per_step", "batch.tokens_per_step"), find_statement_problems),
    Rule((*DEGREES, *COUNTED, "batch"), find_batch_problems),
    *(zero, quantized, shared_matrices, sequence, checkpointing, stages, bubbles, microbatches),
    *(offload, activation_offload, precision, placement),
)
