"""Search a recipe's layouts: the model and the cluster are read once, then all layouts; `parallel.layout=auto`."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import process_time

from framework.errors import RecipeError
from framework.model.experts import count_all_experts
from framework.model.load import load_config
from framework.output import show_bytes
from framework.plan.auto import resolve_target
from framework.plan.candidate import OFFLOADED, Candidate, recipe_of, values_of
from framework.plan.cluster import ClusterRates
from framework.plan.forecast import Forecast
from framework.plan.rejections import SIZES, collect_constraints, describe, group_rejections
from framework.plan.search import By, Engine, Ranked, Search
from framework.plan.shape import make_shape
from framework.plan.space import Space
from framework.recipe.check import value_of
from framework.recipe.clusters import refuse_crowded_nodes
from framework.recipe.schema import Recipe

# Layouts within this share of a step's seconds count as equally fast: forecasts are off by far more (docs/foresight.md).
AS_FAST = 0.02


@dataclass(frozen=True)
class Question:
    """A search to run. recipe: its layout but for `pinned` is open; best, meshes, within: as in `Search`; cluster: None for the
    recipe's."""

    recipe: Recipe
    pinned: frozenset[str] = frozenset()
    by: By = "time"
    best: int = 20
    cluster: ClusterRates | None = None
    meshes: int = 0
    within: float = 0.0


def search(question: Question) -> Search:
    """Search all layouts of a recipe. Raises RecipeError for pinned values that a search does not compare, and what the
    model's config raises."""
    began = process_time()
    refuse_partial(question.recipe, question.pinned)
    recipe = resolved(question.recipe)
    refuse_crowded_nodes(recipe)
    config, cluster = load_config(recipe.model), question.cluster or ClusterRates.from_recipe(recipe)
    shape = make_shape(config, recipe)
    num_experts = max(count_all_experts(shape.whole).values(), default=0)
    space = Space(recipe, question.pinned, shape.num_layers, num_experts)
    found = Search(
        space,
        collect_constraints(space, shape),
        Engine(shape, recipe, cluster),
        by=question.by,
        best=question.best,
        price=cluster.price_per_hour,
        meshes=question.meshes,
        within=question.within,
    )
    with _without_collector():
        found.run()
    found.cpu_s = process_time() - began
    return found


@contextmanager
def _without_collector() -> Iterator[None]:
    """A search makes hundreds of thousands of small objects and keeps most of them. Python's collector of cycles would go through
    all of these, and through torch's and transformers' own, again and again: an eighth of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def forecast_layout(candidate: Candidate, recipe: Recipe, cluster: ClusterRates | None = None) -> Forecast:
    """Forecast one layout of a recipe."""
    recipe = resolved(recipe)
    shape = make_shape(load_config(recipe.model), recipe)
    return Engine(shape, recipe, cluster or ClusterRates.from_recipe(recipe)).forecast(candidate)


def best_of(result: Search) -> Ranked:
    """The best layout. RecipeError where none fits, with the reasons that most layouts are refused for."""
    if result.ranked:
        return result.ranked[0]
    reasons = [f"  {count:,}: {each.line}" for each, count in group_rejections(result.rejections)[:8]]
    near = [each for each in result.rejections if each.kind in SIZES]
    hint = "ask for more nodes, or fix less" if near else "fix less, or change the batch"
    raise RecipeError(
        "\n".join(
            [f"none of {result.num_layouts:,} layouts of {result.space.world} ranks can be trained: {hint}", *reasons]
        )
    )


def choose_layout(recipe: Recipe, pinned: frozenset[str]) -> tuple[Recipe, str]:
    """Choose for parallel.layout=auto: (the recipe with the chosen layout, a line that names it and says why)."""
    result = search(Question(recipe, pinned, best=1, within=AS_FAST))
    fastest = best_of(result)
    chosen = least_of_fastest(result)
    time, memory = chosen.forecast.time, chosen.forecast.memory
    reason = "the fastest"
    if chosen is not fastest:
        reason = (
            f"least memory of what is within {AS_FAST:.0%} of the fastest ({fastest.step_s:.3g} s,"
            f" {fastest.bytes / 2**30:.1f} GiB)"
        )
    line = (
        f"layout   {describe(chosen.candidate)}: {reason} of {result.num_layouts:,} by forecast on {cluster_name(recipe)},"
        f" {time.step_s:.3g} s a step, {time.tokens_per_s_and_rank:,.0f} tokens/s a rank,"
        f" {memory.fullest.reserved / 2**30:.1f} GiB with {memory.spare / 2**30:.1f} to spare"
    )
    if memory.node.offloaded:
        line += f", {show_bytes(memory.node.offloaded)} of a node's {show_bytes(memory.node.there)} of host memory"
    return recipe_of(chosen.candidate, recipe, pinned), line


def least_of_fastest(result: Search) -> Ranked:
    """The layout with least memory among those within AS_FAST of the fastest: no forecast tells them apart by time, and room is
    needed for a longer context, or a fragmented allocator."""
    most_s = best_of(result).step_s * (1 + AS_FAST)
    as_fast = [each for each in (*result.ranked, *result.others) if each.step_s <= most_s]
    # The first of equal bytes is the fastest.
    return min(as_fast, key=lambda each: each.bytes)


def values_for(ranked: Ranked, recipe: Recipe, pinned: frozenset[str]) -> dict[str, object]:
    """The keys of a layout's file that give the recipe this layout."""
    return values_of(recipe_of(ranked.candidate, recipe, pinned), recipe)


def cluster_name(recipe: Recipe) -> str:
    """Name of the cluster that forecasts are for."""
    cluster = ClusterRates.from_recipe(resolved(recipe))
    return f"{cluster.name}{' (assumed)' if cluster.is_assumed else ''}"


def refuse_partial(recipe: Recipe, pinned: frozenset[str]) -> None:
    """Raises RecipeError for fixed values that no candidate has."""
    for name in OFFLOADED:
        key = f"memory.offload.{name}"
        if key in pinned and value_of(recipe, key) not in (0.0, 1.0):
            raise RecipeError(f"{key}={value_of(recipe, key)}: a search compares all or none: 0, 1, or --free {key}")
    key = "memory.activation_checkpointing"
    if key in pinned and value_of(recipe, key) == "auto":
        raise RecipeError(
            f"{key}=auto chooses by layer once a layout is known, and a search compares none, selective, full and sqrt:"
            f" leave it out, or --free {key}"
        )


def resolved(recipe: Recipe) -> Recipe:
    """The recipe with the device and the dtype of where it will run, whatever its layout is."""
    return resolve_target(replace(recipe, parallel=replace(recipe.parallel, layout="stated")))
