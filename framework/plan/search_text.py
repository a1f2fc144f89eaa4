"""Text and JSON of `meshwright search`: the best layouts as a table, and why the others are not in it."""

from collections.abc import Iterator, Sequence
from typing import Any

from framework.output import GIB, align
from framework.plan.rejections import SIZES, describe, group_rejections
from framework.plan.search import By, Ranked, Search
from framework.recipe.keys import plain
from framework.recipe.schema import Recipe

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
