"""`meshwright plan`: what a recipe will put where, before any device is touched. Everything stays on meta."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import torch
from transformers import PreTrainedModel

from framework.build import group, lay_out, make_topology, plan_stages
from framework.errors import EXIT_DONE, RecipeError
from framework.mesh.axis import Axis
from framework.mesh.placement import place
from framework.mesh.topology import Topology, shards_within_node
from framework.model.flops import flops_per_token, measure_model
from framework.model.load import build_meta, load_config
from framework.model.load_balancing import find_load_balancing_loss
from framework.model.precision import compute_dtype
from framework.model.units import Unit, find_units
from framework.parallel.pipeline.describe_pipeline import describe_pipeline
from framework.parallel.pipeline.draw import save_picture
from framework.parallel.pipeline.pipeline import Pipeline
from framework.parallel.pipeline.simulate import simulate
from framework.parallel.pipeline.table import write_table
from framework.parallel.zero.buffers import UnitBuffer
from framework.recipe.derive import Derived, derive
from framework.recipe.describe import describe_derived
from framework.recipe.schema import Recipe
from framework.verify.activations import (
    ESTIMATED_VALUES,
    activation_bytes_per_layer,
    bytes_sent_per_layer,
    layer_widths,
)
from framework.verify.budget import Budget, make_budgets
from framework.verify.describe_layouts import describe_layouts

PICTURES = (".svg", ".png", ".pdf")


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
    find_load_balancing_loss(model)
    size, units = measure_model(model), find_units(model)
    pipeline = plan_stages(recipe, model)
    by_rank = [plan_rank(recipe, model, topology, rank) for rank in topology.groups(0)["pp"]]
    print(f"model         {model.config.model_type}, {size.total:,} parameters, {size.active:,} of them met by a token")
    print(f"compute       {flops_per_token(model, derived.context) / 1e9:,.2f} GFLOP per token, forward and backward")
    print(describe_derived(derived))
    if recipe.launch.kind == "slurm":
        print(f"placement     {place(derived).describe()}")
    print(
        f"zero          stage {recipe.zero.stage}: {topology.size('shard')} shards, {topology.size('replica')} replicas"
    )
    print("\n" + _describe_units(units, by_rank))
    if derived.tp > 1:
        everything = [buffer for buffers in by_rank for buffer in buffers]
        print("\nparameters of one rank of tp, before ZeRO\n" + describe_layouts(everything))
    print("\n" + _describe_activations(recipe, derived, model))
    print("\n" + "\n".join(_describe_budgets(make_budgets(recipe, model, pipeline, by_rank))))
    print("\n" + describe_pipeline(pipeline, derived.accumulation))
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
    """A layer's activations by the formulas of `activations`."""
    compute, widths = compute_dtype(recipe.precision, torch.device("cpu")), layer_widths(model)
    sent = bytes_sent_per_layer(derived, model.config, compute)
    if widths is None:
        words = [
            f"is taken to keep {ESTIMATED_VALUES} hidden values of each token for backward: no formula for its form"
        ]
    else:
        kept = _gib(activation_bytes_per_layer(recipe, widths, compute)).strip()
        words = [f"keeps {kept} per microbatch for backward"]
    if derived.tp > 1:
        words.append(f"sends {_gib(sent).strip()} per microbatch over tp, forward and backward")
        nodes = place(derived).nodes_spanned("tp")
        if nodes > 1:
            a_step = sent * derived.accumulation * model.config.get_text_config().num_hidden_layers // derived.pp
            words.append(f"between {nodes} nodes: {_gib(a_step).strip()} a step over their network")
    return "activations   each layer " + ", ".join(words)


def plan_rank(recipe: Recipe, whole: PreTrainedModel, topology: Topology, rank: int) -> list[UnitBuffer]:
    """The unit buffers of any rank, without memory and without a process group."""
    axes = {name: Axis(name, len(ranks), ranks.index(rank), ranks) for name, ranks in topology.groups(rank).items()}
    assignments = group(recipe, whole, find_units(whole))
    pipeline = plan_stages(recipe, whole)
    stages = lay_out(recipe, whole.config, pipeline, assignments, torch.device("cpu"), axes)
    return [buffer for stage in stages for buffer in stage.buffers]


def _describe_budgets(budgets: Sequence[Budget]) -> Iterator[str]:
    """Two tables, one line per run of equal ranks of the pipeline."""
    yield "bytes of a rank of the pipeline at the most; what kernels and the framework itself use comes on top"
    yield "  live: microbatches of its stages between forward and the end of backward, of which it keeps activations"
    rows = [{**each.held, "all": sum(each.held.values())} for each in budgets]
    yield from _table([{**_sizes(row), "live": str(each.live)} for row, each in zip(rows, budgets, strict=True)])
    yield ""
    yield "bytes that it sends in a step: parameters, gradients, and hidden states over tp and pp"
    yield from _table([_sizes(each.sent) for each in budgets])


def _sizes(num_bytes: Mapping[str, int]) -> dict[str, str]:
    return {what: _gib(number) for what, number in num_bytes.items()}


def _table(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """One line per run of equal rows, which are numbered."""
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) for title in rows[0]}
    yield f"  {'rank':<8}" + "  ".join(title.rjust(width) for title, width in widths.items())
    for row, run in groupby(enumerate(rows), key=lambda each: each[1]):
        ranks = [rank for rank, _ in run]
        numbers = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
        yield f"  {numbers:<8}" + "  ".join(row[title].rjust(width) for title, width in widths.items())


def _describe_units(units: Sequence[Unit], by_rank: Sequence[Sequence[UnitBuffer]]) -> str:
    """One line per run of equal units: a rank's parameters, and what of them is trained in which dtype."""
    rows: list[tuple[str, int, str]] = []
    for unit in units:
        found = ([buffer for buffer in buffers if buffer.unit == unit.name] for buffers in by_rank)
        own = next(filter(None, found), [])
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
