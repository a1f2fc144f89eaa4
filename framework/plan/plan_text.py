"""A plan in words: what a recipe will put where, before any device is touched. Everything stays on meta.

`meshwright plan` prints one screen (the verdict, the model and its layout, memory of the fullest rank, step time), and with
its options what ranks hold and send, layouts, and the schedule.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from framework.errors import RecipeError
from framework.mesh.layout import Layout
from framework.mesh.topology import place
from framework.model.flops import experts_per_token
from framework.model.units import Unit
from framework.output import align, show_bytes, show_exactly, show_hours, show_seconds, wrap
from framework.parallel.pipeline.draw import SIMULATED_UNIT, Panel, describe_bubble, describe_pipeline, save_picture
from framework.parallel.pipeline.pipeline import PipelinePlan
from framework.parallel.pipeline.schedules import write_table
from framework.parallel.pipeline.simulate import peak_live, simulate
from framework.parallel.zero.plan_buffers import BufferPlan
from framework.plan.advice import FittingChange, describe_changes, describe_verdict
from framework.plan.check import MEMORY, bytes_of_copies, bytes_of_fullest_node, bytes_saved
from framework.plan.forecast_memory import MemoryForecast
from framework.plan.forecast_plan import (
    PlanForecast,
    context_costs,
    forwards_of,
    measure_leaving,
    measure_traffic,
    mixtures_of,
    sent_over_hops,
)
from framework.plan.layer_widths import ESTIMATED_VALUES
from framework.plan.operators import DOCUMENT_TOKENS, LONG_CONTEXT
from framework.plan.plan import Plan
from framework.plan.time import TimeForecast
from framework.recipe.derive import compiles, find_compile_obstacle
from framework.recipe.describe import describe_derived
from framework.recipe.method_schema import LossSettings

# Share of a step below which a part is not named.
SMALL = 0.005
PICTURES = (".svg", ".png", ".pdf")
# Layers that hold the same are one line.
LAYER_NUMBER = re.compile(r"\.\d+\.")


def describe_plan(found: PlanForecast, changes: Sequence[FittingChange]) -> Iterator[str]:
    """The screen, in lines of at most WIDTH columns."""
    return (each for line in _describe(found, changes) for each in wrap(line))


def _describe(found: PlanForecast, changes: Sequence[FittingChange]) -> Iterator[str]:
    plan = found.plan
    yield describe_verdict(found.forecast.memory, found.cluster)
    for change in describe_changes(found, changes):
        yield f"  {change}"
    yield ""
    yield from describe_run(plan)
    yield ""
    yield _describe_memory(plan, found.forecast.memory)
    # The newest checkpoints, and the next one while it is written.
    size, keep = plan.memory_model.pipelines.checkpoint_bytes, plan.recipe.checkpoint.keep
    yield f"checkpoint    {show_bytes(size)}; on the disk at most {show_bytes((keep + 1) * size)} (checkpoint.keep={keep})"
    yield from describe_time(found.forecast.time)
    if found.context_methods:
        shown = [f"{name} {show_seconds(step_s)}" for name, step_s in found.context_methods]
        yield f"context       step time by parallel.context, the fastest first: {', '.join(shown)}"
    for caution in found.cautions:
        yield f"caution       {caution}"
    yield ""
    yield "more: --ranks, --layouts, --schedule, --options; as a page: --html FILE"


def describe_run(plan: Plan) -> Iterator[str]:
    """Lines about the run: model, ranks, batch, length, placement, ZeRO, recomputation, pipeline."""
    active = f", {plan.size.active:,} of them active for a token" if plan.size.active != plan.size.total else ""
    scale, unit = (1e9, "GFLOP") if plan.flops_per_token >= 1e8 else (1e6, "MFLOP")
    work = f"{plan.flops_per_token / scale:,.2f} {unit} per token"
    yield f"model         {plan.config.model_type}, {plan.size.total:,} parameters{active}; {work}"
    if plan.recipe.adapter.is_used:
        trained = sum(plan.whole.get_parameter(each.parameter).numel() for each in plan.groups)
        base = plan.recipe.adapter.base
        beside = f" beside linear layers in {base}" * (base != "bf16")
        share = f"{trained:,} parameters are trained ({trained / plan.size.total:.2%})"
        yield f"adapter       {plan.recipe.adapter.kind}{beside}, {share}"
    yield from _describe_reference(plan.recipe.loss)
    yield from describe_derived(plan.derived).splitlines()
    device = f"{plan.device.type}, {plan.recipe.precision.compute}"
    yield f"device        {device}" + (
        f"; {place(plan.derived).describe()}" if plan.recipe.launch.kind == "slurm" else ""
    )
    shards, replicas = plan.topology.size("shard"), plan.topology.size("replica")
    parts = f"{shards} shard{'s' * (shards != 1)}, {replicas} replica{'s' * (replicas != 1)}"
    yield f"zero          stage {plan.recipe.zero.stage}: {parts}{_describe_unshards(plan)}"
    yield from _describe_checkpointing(plan)
    yield from _describe_kernels(plan)
    yield describe_bubble(plan.pipeline, plan.derived.accumulation)


def _describe_reference(loss: LossSettings) -> Iterator[str]:
    """The forwards that a loss of preferences asks for beside training's."""
    words = []
    if loss.reference not in (None, "base"):
        words.append(
            "one forward of the whole data set before training, in this layout and without states of an optimizer, and 8 bytes a"
            " document, kept beside the tokens"
        )
    if loss.extra_forwards:
        words.append(
            f"{loss.extra_forwards} more forward{'s' * (loss.extra_forwards > 1)} of each step, in its time below but not in its"
            " bytes"
        )
    if words:
        yield f"reference     {'; '.join(words)}"


def _describe_unshards(plan: Plan) -> str:
    """The forms in which parameters and gradients travel, and are kept a second time; and that one node gains little by it."""
    secondary, kind = plan.topology.size("secondary"), plan.recipe.zero.quantize_gather
    words = f"; large matrices travel as {kind}" * (kind != "none")
    words += f"; a second copy of them over {secondary} ranks" * (secondary > 1)
    codes = plan.recipe.zero.quantize_reduce
    words += f"; their gradients leave a node as {codes}" * (codes != "none")
    return words + ", which saves no bytes between nodes: there is one" * bool(words and plan.derived.nodes == 1)


def _describe_kernels(plan: Plan) -> Iterator[str]:
    """Whether layers are compiled, and whose attention they have: what the step time takes them to have."""
    recipe = plan.recipe
    obstacle = find_compile_obstacle(recipe) if recipe.memory.compile == "auto" and plan.device.type == "cuda" else None
    why = f": {obstacle}, and layers keep outputs by name" if obstacle else f" (memory.compile={recipe.memory.compile})"
    yield f"layers        {'compiled' if compiles(recipe) else 'as they are'}{why}"
    documents = ""
    if recipe.data.isolates:
        is_long = recipe.batch.context > LONG_CONTEXT
        documents = f", to documents, which are taken to have {DOCUMENT_TOKENS:,} tokens in the mean" * (not is_long)
    if plan.stock_attention is None:
        yield f"attention     Meshwright's{documents}"
    else:
        yield f"attention     transformers'{', of all pairs with a mask' * recipe.data.isolates}: {plan.stock_attention}"


def _describe_checkpointing(plan: Plan) -> Iterator[str]:
    """Lines about activation checkpointing, where some layers have it: policies by layer, and what recomputation costs."""
    chosen = [list(plan.policies(rank).items()) for rank in plan.topology.ranks("pp", 0)]
    layers = sorted((each for own in chosen for each in own), key=lambda each: int(each[0].removeprefix("layers.")))
    if all(policy == "none" for _, policy in layers):
        return
    runs = [(policy, [name for name, _ in run]) for policy, run in groupby(layers, key=lambda each: each[1])]
    words = [f"{_name_units(names)} {policy}" for policy, names in runs]
    flops = sum(map(plan.activations.costs.flops, plan.chosen.values()))
    yield f"recomputation {', '.join(words)}: {flops / plan.flops_per_token:.1%} more FLOPs"


def _name_units(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1].removeprefix('layers.')}"


def _describe_memory(plan: Plan, memory: MemoryForecast) -> str:
    """The kinds of bytes of the fullest rank, the largest first."""
    fullest = memory.fullest
    rank = plan.topology.ranks("pp", 0)[memory.stages.index(fullest)]
    kinds = _largest_first(fullest.kinds, show_bytes)
    host = f"; on the host {show_bytes(fullest.host)}, of a node {show_bytes(memory.node.offloaded)}" * (
        fullest.host > 0
    )
    return f"memory        {show_bytes(fullest.reserved)} on rank {rank}: {kinds}{host}"


def describe_time(time: TimeForecast) -> Iterator[str]:
    """The step's parts, what communication is hidden, and what follows of the step."""
    small = SMALL * time.step_s
    rest = sum(seconds for seconds in time.parts.values() if seconds < small)
    shown = {name: seconds for name, seconds in time.parts.items() if seconds >= small} | {"others": rest}
    yield f"step time     {show_seconds(time.step_s)}: {_largest_first(shown, lambda seconds: f'{seconds / time.step_s:.1%}')}"
    if time.parts.get("bubble"):
        yield "              of the rank that takes longest; its bubble is in seconds, that of the pipeline by FLOPs of all ranks"
    if any(time.hidden.values()):
        yield f"hidden        {_largest_first(time.hidden, show_seconds)} of communication behind computation"
    speed = f"{time.tokens_per_s:,.0f} tokens/s, {time.tokens_per_s_and_rank:,.0f} of a rank, MFU {time.mfu:.1%}"
    yield f"throughput    {speed}"
    cost = f", ${time.cost:,.0f}" if time.cost else ""
    failures = f", {1 - time.goodput:.1%} of it for failures" if time.goodput < 0.999 else ""
    yield f"whole run     {show_hours(time.hours)}{cost}{failures}"
    if time.estimated:
        yield f"estimated     {time.estimated:.0%} of the layers' FLOPs: there are no formulas for their form"


def _largest_first(sizes: Mapping[str, Any], show: Callable[[Any], str]) -> str:
    whole = sum(sizes.values())
    found = sorted(((size, name) for name, size in sizes.items() if size * 10_000 > whole), reverse=True)
    return ", ".join(f"{name} {show(size)}" for size, name in found)


def describe_ranks(plan: Plan) -> Iterator[str]:
    """Lines about the bytes that each rank of a pipeline holds, sends and leaves to its host."""
    ranks = plan.topology.ranks("pp", 0)
    for lines in (_describe_context(plan), _describe_experts(plan)):
        if found := list(lines):
            yield from found
            yield ""
    yield _describe_activations(plan)
    yield ""
    yield from _describe_bytes(plan, ranks)
    yield from _describe_host(plan, ranks)
    if copies := plan.recipe.checkpoint.neighbor_copies:
        yield ""
        yield (
            f"a node holds at most {show_exactly(bytes_of_copies(plan))} in {MEMORY}: two steps of its own ranks and of {copies}"
            f" other node{'s' * (copies > 1)} (checkpoint.neighbor_copies)"
        )


def describe_layouts(plan: Plan) -> Iterator[str]:
    """Units and parameters as a rank has them, in lines: of ranks that differ in other coordinates than `pp` the first."""
    by_rank = [plan.of_rank(rank).buffers for rank in plan.topology.ranks("pp", 0)]
    yield _describe_units(plan.units, by_rank)
    yield ""
    yield "parameters of one rank, before ZeRO"
    yield _describe_parameters([buffer for buffers in by_rank for buffer in buffers])


def describe_schedule(plan: Plan) -> Iterator[str]:
    """The pipeline's stages, its actions, and all schedules compared."""
    yield describe_pipeline(plan.pipeline, plan.derived.accumulation)


def save_schedule(path: Path, pipeline: PipelinePlan, num_microbatches: int, title: str) -> None:
    """Write a table that `pipeline.table` reads, or a picture of the simulated times. Raises RecipeError for other endings."""
    schedule = pipeline.make(num_microbatches)
    if not path.parent.is_dir():
        raise RecipeError(f"--schedule-to {path}: there is no folder {path.parent}, make it first")
    if path.suffix == ".csv":
        write_table(path, schedule)
    elif path.suffix in PICTURES:
        panel = Panel(schedule.name, simulate(schedule, pipeline.costs), SIMULATED_UNIT)
        save_picture(path, title, [panel], schedule.num_ranks)
    else:
        raise RecipeError(
            f"--schedule-to {path}: end the name in .csv for a table, in {', '.join(PICTURES)} for a picture"
        )


def _describe_activations(plan: Plan) -> str:
    """A layer's activations by the formulas of `activations`."""
    if plan.activations.layer is None:
        words = [
            f"is taken to keep {ESTIMATED_VALUES} hidden values of each token for backward: no formula for its form"
        ]
    else:
        ranks = plan.topology.ranks("pp", 0)
        used = dict.fromkeys(policy for rank in ranks for policy in plan.policies(rank).values())
        costs = plan.activations.costs.by_policy
        kept = [f"{show_exactly(costs[policy].kept)} per microbatch for backward" for policy in used]
        named = [f"{size} ({policy})" for size, policy in zip(kept, used, strict=True)]
        words = [f"keeps {' or '.join(named if len(used) > 1 else kept)}"]
    if plan.derived.cp > 1:
        words.append(f"of {plan.context_slices(0).tokens_local:,} of the {plan.derived.context:,} tokens of a sequence")
    if plan.derived.tp > 1:
        sent = plan.tensor_bytes
        least, most = min(sent), max(sent)
        each = show_exactly(most) if least == most else f"{show_exactly(least)} to {show_exactly(most)}"
        words.append(f"sends {each} per microbatch over tp, forward and backward")
        nodes = place(plan.derived).nodes_spanned("tp")
        if nodes > 1:
            a_step = sum(sent) * plan.derived.accumulation // plan.derived.pp
            words.append(f"between {nodes} nodes: {show_exactly(a_step)} a step over their network")
    offloaded = [plan.activations.offloaded_bytes(stage) for stage in plan.pipeline.stages]
    if any(offloaded):
        on_the_way = max(map(plan.activations.transfer_bytes, plan.pipeline.stages))
        words.append(
            f"{show_exactly(sum(offloaded))} of all layers lie on the host between forward and backward, and of them at most"
            f" {show_exactly(on_the_way)} on the device at once"
        )
    return "activations   each layer " + ", ".join(words)


def _describe_bytes(plan: Plan, ranks: Sequence[int]) -> Iterator[str]:
    """Two tables, one line per run of equal ranks of the pipeline."""
    yield "bytes of a rank of the pipeline at the moment of a step that needs most"
    yield "  live: microbatches of its stages between forward and the end of backward, of which it keeps activations"
    memories, live = [plan.memory(rank) for rank in ranks], peak_live(plan.pipeline.make(plan.derived.accumulation))
    kinds = [kind for kind in memories[0].kinds if any(each.kinds[kind] for each in memories)]
    yield from _table(
        [
            _sizes({kind: each.kinds[kind] for kind in kinds} | {"all": each.reserved}) | {"live": str(count)}
            for each, count in zip(memories, live, strict=True)
        ]
    )
    yield ""
    yield "bytes that it sends in a step: parameters, gradients, hidden states over tp, pp and ep, keys and values over cp"
    yield from _table([_sizes(measure_traffic(plan, rank)) for rank in ranks])
    if plan.derived.nodes > 1:
        yield ""
        yield "bytes of parameters, gradients and tokens on their way to experts that leave its node in a step"
        yield from _table([_sizes(measure_leaving(plan, rank)) for rank in ranks])


def _describe_host(plan: Plan, ranks: Sequence[int]) -> Iterator[str]:
    """Lines about what has its home on the host, where anything has."""
    rows = [plan.memory(rank).on_host for rank in ranks]
    if not any(map(any, (row.values() for row in rows))):
        return
    yield ""
    yield "bytes of the host's memory that it takes for them (memory.offload), and what its device holds less"
    saved = [bytes_saved(plan, rank) for rank in ranks]
    yield from _table(
        [_sizes({**row, "all": sum(row.values()), "saved": less}) for row, less in zip(rows, saved, strict=True)]
    )
    files = [plan.memory(rank).disk for rank in ranks]
    if any(files):
        yield f"  memory.offload.disk_path: files of {show_exactly(min(files))} to {show_exactly(max(files))} a rank"
    node, threads = show_exactly(bytes_of_fullest_node(plan)), plan.recipe.launch.threads_per_rank
    yield f"  a node of {plan.derived.ranks_per_node} ranks: at most {node}; updates there run on " + (
        f"launch.threads_per_rank={threads} threads" if threads else "the node's cores divided by its ranks"
    )


def _sizes(num_bytes: Mapping[str, int]) -> dict[str, str]:
    # A fixed width, so that all tables align.
    return {what: show_exactly(number).rjust(14) for what, number in num_bytes.items()}


def _table(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """One line per run of equal rows, which are numbered."""
    lines = [("rank".ljust(6), *rows[0])]
    for row, run in groupby(enumerate(rows), key=lambda each: each[1]):
        ranks = [rank for rank, _ in run]
        numbers = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        lines.append((numbers, *row.values()))
    for line in align(lines, words=(0,)):
        yield f"  {line}"


def _describe_units(units: Sequence[Unit], by_rank: Sequence[Sequence[BufferPlan]]) -> str:
    """One line per run of equal units: a rank's parameters, and what of them is trained in which dtype."""
    rows: list[tuple[str, int, str]] = []
    for unit in units:
        found = ([buffer for buffer in buffers if buffer.unit == unit.name] for buffers in by_rank)
        own = next(filter(None, found), [])
        kinds = ", ".join(
            f"{buffer.numel:,} {str(buffer.dtypes.compute).removeprefix('torch.')}{'' if buffer.is_trained else ' frozen'}"
            for buffer in own
        )
        rows.append((unit.name, sum(buffer.numel for buffer in own), kinds or "none"))
    lines = [f"{'unit':<22} {'parameters':>16}  by dtype"]
    for (numel, dtypes), run in groupby(rows, key=lambda row: row[1:]):
        lines.append(f"{_name_units([row[0] for row in run]):<22} {numel:>16,}  {dtypes}")
    return "\n".join(lines)


def _describe_context(plan: Plan) -> Iterator[str]:
    """Bytes that context parallelism sends for a layer and microbatch, of a layer with the longest reach."""
    costs = [cost for cost in context_costs(plan, 0) if cost is not None]
    if not costs or plan.derived.cp == 1:
        return
    cost = max(costs, key=lambda each: each.shape.reach)
    heads, kv_heads = cost.shape.heads, cost.shape.kv_heads
    copies = f", beyond {kv_heads} with copies of key-value heads" if kv_heads < heads else ""
    rows = []
    if cost.c.ulysses > 1:
        rows.append(("exchange of heads", cost.exchanged_bytes))
    if cost.c.is_gather:
        rows.append(("gather of K and V", cost.travelling_bytes))
    elif cost.num_steps:
        rows.append((f"{cost.num_steps} step{'s' * (cost.num_steps > 1)} of the ring, each", cost.step_bytes))
    for number, (name, (forward, backward)) in enumerate(rows):
        sent = f"{show_bytes(forward)} in forward, {show_bytes(backward)} in backward"
        yield f"{'' if number else 'context':13} {name}: {sent}"
    yield f"{'':13} Ulysses divides the {heads} heads of a rank over at most {heads} ranks{copies}"


def _describe_parameters(buffers: Sequence[BufferPlan]) -> str:
    """One line per kind of parameter: name with * for the layer's number, global and local shape, and how it is held."""
    rows: dict[str, tuple[str, str, str]] = {}
    for slot in (slot for buffer in buffers for slot in buffer.slots):
        name = LAYER_NUMBER.sub(".*.", slot.name)
        rows.setdefault(
            name, (_shape(slot.layout.shape), _shape(slot.layout.shape_local), _describe_layout(slot.layout))
        )
    name_width, shape_width, local_width = (
        max(map(len, column)) for column in zip(*[(name, *row[:2]) for name, row in rows.items()], strict=True)
    )
    return "\n".join(
        f"  {name:<{name_width}}  {shape:>{shape_width}} -> {local:<{local_width}} {how}"
        for name, (shape, local, how) in sorted(rows.items())
    )


def _describe_layout(layout: Layout) -> str:
    """A layout in words, such as `sharded over tp along dim 0, in 3 segments`, before ZeRO, which shards all alike."""
    words = []
    for shard in layout.shards:
        segments = f", in {len(shard.segments)} segments" if shard.segments else ""
        words.append(f"sharded over {shard.axis} along dim {shard.dim}{segments}")
    if layout.replicated:
        words.append(f"replicated over {', '.join(layout.replicated)}")
    if layout.partial:
        words.append(f"gradient partial over {', '.join(layout.partial)}")
    return "; ".join(words) or "whole"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _expert_bytes(plan: Plan, rank: int) -> int:
    """Bytes of a rank's experts in the compute dtype, before ZeRO."""
    prefixes = tuple(f"{mixture.experts}." for mixture in mixtures_of(plan, rank))
    return sum(
        slot.layout.numel_local * buffer.dtypes.compute.itemsize
        for buffer in plan.of_rank(rank).buffers
        for slot in buffer.slots
        if slot.name.startswith(prefixes)
    )


def _describe_experts(plan: Plan) -> Iterator[str]:
    """Lines of `meshwright plan --ranks`: which experts a rank has and what is sent to them; none for a dense model."""
    if not plan.mixtures:
        return
    ranks = plan.topology.ranks("pp", 0)
    ep, expert_tp = plan.topology.size("ep"), plan.topology.size("expert_tp")
    num_experts = max(mixture.num_experts for mixture in plan.mixtures)
    top_k = experts_per_token(plan.config.get_text_config())
    where = f"ep {ep} x {plan.topology.size('expert_batch')} copies" if ep > 1 else "all on each rank"
    form = "whole" if expert_tp == 1 else f"each sliced over {expert_tp} ranks of tp"
    layers = f"{len(plan.mixtures)} layer{'s' if len(plan.mixtures) != 1 else ''}"
    chosen = f", {top_k} for a token" if top_k else ""
    yield f"experts       {num_experts} in each of {layers}{chosen}; {num_experts // ep} on a rank, {where}, {form}"
    most = max(_expert_bytes(plan, rank) for rank in ranks)
    yield f"              their parameters take at most {show_bytes(most)} of a rank before ZeRO"
    if ep > 1:
        mixtures = max((mixtures_of(plan, rank) for rank in ranks), key=len)
        sent = max(sum(sent_over_hops(plan, mixture)) for mixture in mixtures)
        forwards = max(forwards_of(plan, each) for each in plan.mixtures)
        passes = ("forward", "forward twice", "forward three times")[forwards - 1]
        a_step = show_bytes(sent * len(mixtures) * plan.derived.accumulation)
        yield (
            f"              with equally many tokens for each, a rank sends {show_bytes(sent)} per layer and microbatch, there"
            f" and back in {passes} and backward: {a_step} a step"
        )
        if advice := place(plan.derived).advise_experts():
            yield f"              {advice}"
