"""`meshwright plan`: what a recipe will put where, before any device is touched. Everything stays on meta."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from framework.build import group, lay_out, make_topology, plan_stages
from framework.errors import EXIT_DONE, RecipeError
from framework.mesh.axis import Axis
from framework.mesh.placement import place
from framework.mesh.topology import Topology, shards_within_node
from framework.model.balance import find_balance
from framework.model.load import build_meta, load_config
from framework.model.plan import Unit, find_units
from framework.model.precision import DTYPES, compute_dtype
from framework.optim.optimizers import state_names
from framework.parallel.pipeline.describe import describe_pipeline
from framework.parallel.pipeline.draw import save_picture
from framework.parallel.pipeline.pipeline import Pipeline
from framework.parallel.pipeline.simulate import simulate
from framework.parallel.pipeline.table import write_table
from framework.parallel.zero.buffers import UnitBuffer
from framework.recipe.derive import Derived, derive
from framework.recipe.describe import describe_derived
from framework.recipe.schema import Recipe
from framework.track.flops import flops_per_token, measure_model
from framework.verify.activations import activation_bytes_per_layer, bytes_sent_per_layer, layer_widths
from framework.verify.describe_layouts import describe_layouts

PICTURES = (".svg", ".png", ".pdf")
KINDS = ("parameters", "gradients", "master", "optimizer", "gathered")


def plan(recipe: Recipe, schedule_to: Path | None = None) -> int:
    """Print model, batch, units, bytes per rank, traffic and schedule; write the schedule to a file if one is given. Raises what
    the recipe or the model has wrong."""
    derived = derive(recipe)
    if recipe.zero.shard_within == "node":
        batch = derived.dp * derived.cp
        within = shards_within_node(derived.world, batch, derived.tp, derived.ranks_per_node, derived.nodes)
        recipe = replace(recipe, zero=replace(recipe.zero, shard_within=within))
    config = load_config(recipe.model)
    topology = make_topology(recipe, derived, config)
    model = build_meta(config, recipe.model.attention)
    find_balance(model)
    size, units = measure_model(model), find_units(model)
    buffers = plan_rank(recipe, model, topology, rank=0)
    print(f"model         {model.config.model_type}, {size.total:,} parameters, {size.active:,} of them met by a token")
    print(f"compute       {flops_per_token(model, derived.context) / 1e9:,.2f} GFLOP per token, forward and backward")
    print(describe_derived(derived))
    if recipe.launch.kind == "slurm":
        print(f"placement     {place(derived).describe()}")
    print(
        f"zero          stage {recipe.zero.stage}: {topology.size('shard')} shards, {topology.size('replica')} replicas"
    )
    print("\n" + _describe_units(units, buffers))
    if derived.tp > 1:
        print("\nparameters of rank 0, before ZeRO\n" + describe_layouts(buffers))
    print("\n" + _describe_activations(recipe, derived, model))
    print("\nbytes per rank, of rank 0; activations, logits and the framework itself come on top")
    for kind, num_bytes in bytes_per_rank(buffers, state_names(recipe.optim)).items():
        print(f"  {kind:<12} {_gib(num_bytes)}")
    print("\nsent per step by each rank")
    for what, num_bytes in bytes_sent(buffers, derived.accumulation, DTYPES[recipe.precision.reduce]).items():
        print(f"  {what:<22} {_gib(num_bytes)}")
    rows = derived.sequences_per_microbatch * derived.context
    width = config.get_text_config().hidden_size * compute_dtype(recipe.precision, torch.device("cpu")).itemsize
    recomputes = recipe.memory.activation_checkpointing == "full"
    pipeline = plan_stages(recipe, model)
    print("\n" + describe_pipeline(pipeline, derived.accumulation, rows * width, recomputes))
    if schedule_to is not None:
        save_schedule(schedule_to, pipeline, derived.accumulation)
        print(f"\nwrote the schedule to {schedule_to}")
    return EXIT_DONE


def save_schedule(path: Path, pipeline: Pipeline, num_microbatches: int) -> None:
    """As a table that `pipeline.table` reads, or as a picture of the simulated times. Raises RecipeError for other endings."""
    schedule = pipeline.make(num_microbatches)
    if not path.parent.is_dir():
        raise RecipeError(f"--schedule-to {path}: there is no folder {path.parent}, make it first")
    if path.suffix == ".csv":
        write_table(path, schedule)
    elif path.suffix in PICTURES:
        save_picture(path, {schedule.name: simulate(schedule, pipeline.costs)}, schedule.num_ranks)
    else:
        raise RecipeError(
            f"--schedule-to {path}: end the name in .csv for a table, in {', '.join(PICTURES)} for a picture"
        )


def _describe_activations(recipe: Recipe, derived: Derived, model: PreTrainedModel) -> str:
    """A layer's activations by the formulas of `activations`; what it keeps only where there is one."""
    compute, widths = compute_dtype(recipe.precision, torch.device("cpu")), layer_widths(model)
    sent = bytes_sent_per_layer(derived, model.config, compute)
    words = []
    if widths is not None:
        kept = _gib(activation_bytes_per_layer(recipe, widths, compute)).strip()
        words.append(f"keeps {kept} per microbatch for backward")
    if derived.tp > 1:
        words.append(f"sends {_gib(sent).strip()} per microbatch over tp, forward and backward")
        nodes = place(derived).nodes_spanned("tp")
        if nodes > 1:
            a_step = sent * derived.accumulation * model.config.get_text_config().num_hidden_layers // derived.pp
            words.append(f"between {nodes} nodes: {_gib(a_step).strip()} a step over their network")
    return "activations   each layer " + (", ".join(words) or "keeps what no formula here states")


def plan_rank(recipe: Recipe, whole: PreTrainedModel, topology: Topology, rank: int) -> list[UnitBuffer]:
    """The unit buffers of any rank, without memory and without a process group."""
    axes = {name: Axis(name, len(ranks), ranks.index(rank), ranks) for name, ranks in topology.groups(rank).items()}
    assignments = group(recipe, whole, find_units(whole))
    pipeline = plan_stages(recipe, whole)
    stages = lay_out(recipe, whole.config, pipeline, assignments, torch.device("cpu"), axes)
    return [buffer for stage in stages for buffer in stage.buffers]


def bytes_per_rank(buffers: Sequence[UnitBuffer], states: Sequence[str]) -> dict[str, int]:
    """What lives for the whole run, by kind, and the most that gathered parameters and unreduced gradients add to it.

    The table of `parallel/zero/lifetimes.py` in bytes, padding included.
    """
    total = dict.fromkeys(KINDS, 0)
    for buffer in buffers:
        lifetimes, compute, master = buffer.lifetimes, buffer.compute_dtype.itemsize, buffer.master_dtype.itemsize
        resident = buffer.numel_padded if lifetimes.resident_parameters else buffer.numel_part
        total["parameters"] += resident * compute
        if buffer.is_trained:
            kept = buffer.numel_padded if lifetimes.keeps_gradients else buffer.numel_part
            total["gradients"] += kept * master
            total["master"] += buffer.numel_owned * master if buffer.compute_dtype != buffer.master_dtype else 0
            total["optimizer"] += buffer.numel_owned * master * len(states)
    total["gathered"] = _largest_gathered(buffers)
    return total


def bytes_sent(buffers: Sequence[UnitBuffer], accumulation: int, wire: torch.dtype) -> dict[str, int]:
    """Bytes that a rank sends in a step for parameters and gradients, by the forms that docs/zero.md states.

    With P bytes of a unit, n shards and k microbatches: gathers (n-1)/n P for each time that a released unit is used again,
    reductions (n-1)/n P for each time that a gradient is reduced, and 2 (r-1)/r P/n once for each partial axis of r ranks.
    Where replicas divide the update, one half of that is a reduction and the other a gather of updated parameters.
    wire: the dtype of gradients on their way.
    """
    gathers = reductions = replicas = 0
    for buffer in buffers:
        n, lifetimes = buffer.shard_axis.size, buffer.lifetimes
        uses = 1 if lifetimes.keeps_parameters else accumulation * (2 if buffer.unit.startswith("layers.") else 1)
        gathers += (n - 1) * buffer.numel_part * buffer.compute_dtype.itemsize * uses
        if buffer.is_trained:
            times = 1 if lifetimes.keeps_gradients else accumulation
            reductions += (n - 1) * buffer.numel_part * wire.itemsize * times
            gathers += (buffer.update_axis.size - 1) * buffer.numel_owned * buffer.compute_dtype.itemsize
            replicas += (buffer.update_axis.size - 1) * buffer.numel_owned * wire.itemsize
            for axis in buffer.partial_axes:
                replicas += 2 * (axis.size - 1) * buffer.numel_owned * wire.itemsize // axis.size
    return {"gather of parameters": gathers, "reduction to shards": reductions, "reduction of replicas": replicas}


def _largest_gathered(buffers: Sequence[UnitBuffer]) -> int:
    """Two units' full parameters beside the larger of embedding and head, and three units' full gradients, where these come
    and go: one in use, one ahead; one being written, two under way."""
    parameters: dict[str, int] = {}
    gradients: dict[str, int] = {}
    for buffer in buffers:
        if not buffer.lifetimes.resident_parameters:
            full = buffer.numel_padded * buffer.compute_dtype.itemsize
            parameters[buffer.unit] = parameters.get(buffer.unit, 0) + full
        if buffer.is_trained and not buffer.lifetimes.keeps_gradients:
            full = buffer.numel_padded * buffer.master_dtype.itemsize
            gradients[buffer.unit] = gradients.get(buffer.unit, 0) + full
    layers = sorted((num for unit, num in parameters.items() if unit.startswith("layers.")), reverse=True)
    ends = [num for unit, num in parameters.items() if not unit.startswith("layers.")]
    return sum(layers[:2]) + max(ends, default=0) + sum(sorted(gradients.values(), reverse=True)[:3])


def _describe_units(units: Sequence[Unit], buffers: Sequence[UnitBuffer]) -> str:
    """One line per run of equal units: parameters, and what of them is trained in which dtype."""
    rows: list[tuple[str, int, str]] = []
    for unit in units:
        own = [buffer for buffer in buffers if buffer.unit == unit.name]
        kinds = ", ".join(
            f"{buffer.numel:,} {str(buffer.compute_dtype).removeprefix('torch.')}{'' if buffer.is_trained else ' frozen'}"
            for buffer in own
        )
        rows.append((unit.name, sum(buffer.numel for buffer in own), kinds or "none"))
    lines = [f"{'unit':<22} {'parameters':>16}  by dtype"]
    first = 0
    for index in range(1, len(rows) + 1):
        if index == len(rows) or rows[index][1:] != rows[first][1:]:
            last = rows[index - 1][0]
            name = rows[first][0] if index - first == 1 else f"{rows[first][0]} to {last.removeprefix('layers.')}"
            lines.append(f"{name:<22} {rows[first][1]:>16,}  {rows[first][2]}")
            first = index
    return "\n".join(lines)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:10.3f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:10.3f} MiB"
