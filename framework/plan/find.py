"""Searches of a recipe's layouts as commands ask for them: the question, the answer as a table, JSON and the choice of
`parallel.layout=auto`, and the correction of a cluster's rates by layouts that were tried.

Of a tried layout i the forecast's parts p_ik (seconds) were measured to take m_i together. The factors s_k of the four kinds
of parts below minimise

    sum_i ((sum_k s_k p_ik - m_i) / m_i)^2 + PRIOR sum_k (s_k - 1)^2        1/4 <= s_k <= 4

so that factors which the layouts cannot tell apart stay near 1. The rates of kind k are divided by s_k. Waiting in a pipeline
follows from the others, and counts as computation.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from time import process_time
from typing import Any

import numpy as np
import yaml

from framework.errors import MeshwrightError, RecipeError
from framework.model.experts import count_all_experts
from framework.model.load import load_config
from framework.output import GIB, align, show_bytes
from framework.plan.bounds import Engine
from framework.plan.candidate import OFFLOADED, Candidate, recipe_of, resolve_target, values_of
from framework.plan.cluster import ClusterRates
from framework.plan.search import SIZES, By, Ranked, Search, describe, group_rejections
from framework.plan.shape import make_shape
from framework.plan.space import Space, collect_constraints
from framework.plan.time import Forecast, TimeForecast
from framework.recipe.keys import plain, value_of, with_value
from framework.recipe.machines import refuse_crowded_nodes
from framework.recipe.schema import Cluster, ClusterLink, ClusterMatmul, Recipe

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


# Layouts of a page: at most so many that fit, and so many that do not.
MOST_RANKED = 400
MOST_OVER = 200


def explore(question: Question) -> tuple[list[Search], list[Ranked]]:
    """(the search, wider than its table shows, and those on half and twice as many ranks where these are legal; layouts that do
    not fit, the nearest first)."""
    wide = replace(question, best=MOST_RANKED)
    results = [search(wide)]
    for recipe in _resize(question.recipe):
        with suppress(MeshwrightError):  # its batch or its degrees do not divide so many ranks
            results.append(search(replace(wide, recipe=recipe)))
    space, engine = results[0].space, results[0].engine
    near = sorted((each for each in results[0].rejections if each.kind == "memory"), key=lambda each: each.missing)
    asked = Search(space, collect_constraints(space, engine.shape), engine)
    found = dict.fromkeys(asked.choose_layout(each) for each in near[:MOST_OVER])
    over = [Ranked(c, engine.forecast(c)) for c in found if c is not None]
    return results, sorted(over, key=lambda each: each.missing)


def _resize(recipe: Recipe) -> Iterator[Recipe]:
    launch = recipe.launch
    for name, size in (("nodes", launch.nodes), ("ranks", launch.ranks)):
        if isinstance(size, int):
            for other in ([size // 2] if size % 2 == 0 else []) + [2 * size]:
                yield with_value(recipe, f"launch.{name}", other)
            return


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


# --- the answer as a table and as JSON

# Useful parts of a step; the largest of the others is its bottleneck.
USEFUL = ("matmuls", "attention")
SHOWN_REASONS = 8
RANKED_BY = {"time": "seconds of a step", "memory": "bytes of the fullest rank"}


def describe_search(result: Search, cluster: str, pinned: frozenset[str], shown: int) -> Iterator[str]:
    """The printed result, in lines."""
    fixed = f"; fixed: {', '.join(sorted(pinned))}" if pinned else ""
    world = f"{result.space.world:,} rank{'s' * (result.space.world != 1)}"
    yield f"{result.num_layouts:,} layouts of {world} on {cluster}, by {RANKED_BY[result.by]}{fixed}"
    yield ""
    rows = _rows(result.ranked[:shown], result.by)
    yield from align(rows, words=(1, len(rows[0]) - 1))
    yield ""
    yield from _describe_others(result)


def describe_rejections(result: Search) -> Iterator[str]:
    """Each rejection in a line, with the number of layouts that it stands for."""
    for each in result.rejections:
        yield f"{each.count:>9,}  {each.line}"


def _describe_others(result: Search) -> Iterator[str]:
    groups = group_rejections(result.rejections)
    illegal = sum(count for each, count in groups if each.kind not in SIZES)
    large = sum(count for each, count in groups if each.kind in SIZES)
    yield (
        f"{result.num_forecast:,} forecast; {illegal:,} refused by a rule or the model; {large:,} do not fit;"
        f" {result.num_slower:,} not forecast, as a lower bound of theirs is above the best {len(result.ranked)}"
    )
    for each, count in groups[:SHOWN_REASONS]:
        nearest = "the nearest: " if each.kind in SIZES else "such as "
        yield f"  {count:>11,}  {nearest}{each.line}"
    if len(groups) > SHOWN_REASONS:
        yield f"  and {len(groups) - SHOWN_REASONS} more reasons: --rejections lists all"
    yield f"took {result.cpu_s:.2f} s of one core"


def _rows(ranked: Sequence[Ranked], by: By) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("", "layout", "step s", "tokens/s/rank", "MFU", "GiB", "spare", "held up by")]
    if any(each.price for each in ranked):
        rows = [(*rows[0][:-1], "$/10^9 tokens", rows[0][-1])]
    for place, each in enumerate(ranked, start=1):
        time, memory = each.forecast.time, each.forecast.memory
        cells = [
            str(place),
            describe(each.candidate),
            f"{time.step_s:.4g}",
            f"{time.tokens_per_s_and_rank:,.0f}",
            f"{time.mfu:.1%}",
            f"{memory.fullest.reserved / GIB:.1f}",
            f"{memory.spare / GIB:.1f}",
        ]
        if each.price:
            cells.append(f"{each.cost_per_token * 1e9:,.0f}")
        rows.append((*cells, find_bottleneck(each)))
    return rows


def find_bottleneck(ranked: Ranked) -> str:
    """The largest part of the step that is neither matmuls nor attention, with its share."""
    parts = {name: seconds for name, seconds in ranked.forecast.time.parts.items() if name not in USEFUL}
    name = max(parts, key=lambda each: parts[each])
    return f"{name} {parts[name] / ranked.step_s:.0%}"


def to_json(
    result: Search, cluster: str, pinned: frozenset[str], recipes: Sequence[dict[str, Any]], is_full: bool = False
) -> dict[str, Any]:
    """The printed result as JSON. recipes: the keys of a file for each of the best; is_full: every rejection, not one of each
    reason."""
    rejections = [(each, each.count) for each in result.rejections] if is_full else group_rejections(result.rejections)
    return {
        "by": result.by,
        "cluster": cluster,
        "world": result.space.world,
        "fixed": sorted(pinned),
        "layouts": result.num_layouts,
        "forecast": result.num_forecast,
        "not_forecast": result.num_slower,
        "rejected": result.num_rejected,
        "cpu_s": result.cpu_s,
        "best": [_ranked_json(each, values) for each, values in zip(result.ranked, recipes, strict=True)],
        "rejections": [
            {"kind": each.kind, "reason": each.reason, "such_as": each.layout, "layouts": count}
            for each, count in rejections
        ],
    }


def _ranked_json(each: Ranked, values: dict[str, Any]) -> dict[str, Any]:
    time, memory = each.forecast.time, each.forecast.memory
    return {
        "layout": describe(each.candidate),
        "recipe": plain(values),
        "step_s": time.step_s,
        "parts": dict(time.parts),
        "tokens_per_s_and_rank": time.tokens_per_s_and_rank,
        "mfu": time.mfu,
        "bytes": each.bytes,
        "spare_bytes": memory.spare,
        "host_bytes_of_node": memory.node.offloaded + memory.node.copies,
        "cost_per_10e9_tokens": each.cost_per_token * 1e9 if each.price else None,
        "held_up_by": find_bottleneck(each),
    }


def comment_of(ranked: Ranked, cluster: str, recipe: Recipe) -> str:
    """Comment of a written layout: for which model and machine, and its forecast."""
    time, memory = ranked.forecast.time, ranked.forecast.memory
    lines = (
        describe(ranked.candidate),
        f"for {recipe.model.family} on {ranked.candidate.world} ranks of {cluster}, as `meshwright search` predicts:",
        f"{time.step_s:.4g} s a step, {time.tokens_per_s_and_rank:,.0f} tokens/s a rank, MFU {time.mfu:.1%},"
        f" {memory.fullest.reserved / GIB:.1f} GiB with {memory.spare / GIB:.1f} to spare.",
        "Use it: layout=THIS_FILE",
    )
    return "\n".join(lines)


# --- rates corrected by layouts that were tried

# Each kind of parts, and the rates that it is of.
KINDS: Mapping[str, tuple[str, ...]] = {
    "computation": ("matmuls", "attention", "recomputation", "imbalance", "bubble", "references"),
    "memory": ("elementwise", "optimizer"),
    "links": ("tp", "cp", "ep", "ep_outer", "ep_inner", "pp", "gathers", "reductions", "contention"),
    "host": ("offload", "checkpoint", "host"),
}
PRIOR = 0.02
LEAST, MOST = 0.25, 4.0


@dataclass(frozen=True)
class Tried:
    """A layout that ran. forecast: of its step; step_s: measured, the median of its steps."""

    forecast: TimeForecast
    step_s: float


def fit_factors(tried: Sequence[Tried]) -> dict[str, float]:
    """Measured over predicted seconds of each kind of parts."""
    parts = np.array(
        [[sum(each.forecast.parts.get(name, 0.0) for name in names) for names in KINDS.values()] for each in tried]
    )
    measured = np.array([each.step_s for each in tried])
    rows = np.vstack([parts / measured[:, None], np.sqrt(PRIOR) * np.eye(len(KINDS))])
    wanted = np.concatenate([np.ones(len(tried)), np.full(len(KINDS), np.sqrt(PRIOR))])
    found = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return {kind: float(min(max(factor, LEAST), MOST)) for kind, factor in zip(KINDS, found, strict=True)}


def correct(group: Cluster, factors: Mapping[str, float], name: str) -> Cluster:
    """The keys of a cluster's file with all rates divided by the factors, and latencies multiplied."""
    compute, memory, links = (factors[kind] for kind in ("computation", "memory", "links"))
    return replace(
        group,
        name=name,
        matmul={dtype: _slower_matmul(each, compute) for dtype, each in group.matmul.items()},
        attention={
            kernel: [[*row[:2], row[2] / compute, row[3] / compute] for row in rows]
            for kernel, rows in group.attention.items()
        },
        attention_share=min(1.0, group.attention_share / compute),
        attention_backward_share=min(1.0, group.attention_backward_share / compute),
        memory_gb_per_s=group.memory_gb_per_s / memory,
        memory_measured=[[size, rate / memory] for size, rate in group.memory_measured],
        softmax_g_per_s=None if group.softmax_g_per_s is None else group.softmax_g_per_s / memory,
        host_gb_per_s=group.host_gb_per_s / factors["host"],
        links={kind: _slower_link(each, links) for kind, each in group.links.items()},
    )


def _slower_matmul(matmul: ClusterMatmul, factor: float) -> ClusterMatmul:
    # Both by the same factor: what was measured says how far single shapes are from the rate.
    share = matmul.share / factor
    peak = matmul.peak_tflops * max(1.0, share)  # a share is at most 1: faster than its data sheet
    measured, gradient = ([[*row[:3], row[3] / factor] for row in rows] for rows in (matmul.measured, matmul.gradient))
    attention = [[*row[:2], row[2] / factor, row[3] / factor] for row in matmul.attention]
    return ClusterMatmul(peak, min(1.0, share), measured, gradient, attention)


def _slower_link(link: ClusterLink, factor: float) -> ClusterLink:
    return replace(
        link,
        gb_per_s=[rate / factor for rate in link.gb_per_s],
        hop_us=[hop * factor for hop in link.hop_us],
        start_us=link.start_us * factor,
        measured=[[size, micros * factor] for size, micros in link.measured],
    )


def describe_factors(factors: Mapping[str, float]) -> str:
    """The factors in a line."""
    words = [f"{kind} x{factor:.2f}" for kind, factor in factors.items()]
    return f"measured over predicted seconds: {', '.join(words)}"


def write_text(group: Cluster, comment: str) -> str:
    """The text of a cluster's file."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.safe_dump(plain(asdict(group)), sort_keys=False, width=120)
