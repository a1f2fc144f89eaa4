"""The page of a search: layouts as points and rows, sliders that pick among those that were forecast, and what was rejected."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from framework.errors import MeshwrightError
from framework.output import GIB, show_bytes, show_seconds
from framework.plan.find import Question, search
from framework.plan.forecast import OUTSIDE, SLACK
from framework.plan.page_charts import layouts_charts
from framework.plan.page_html import Page, Table
from framework.plan.rejections import Rejection, collect_constraints, describe, group_rejections
from framework.plan.search import Ranked, Search
from framework.recipe.check import with_value
from framework.recipe.schema import Recipe

# Bytes of a page's rows; Vega takes 0.9 MB of the 2 that a page may have.
MOST_ROW_BYTES = 900_000
MOST_REASONS = 60
# Rows that the page fills in as the reader chooses.
FILLED = ("layouts", "picked", "memory", "totals", "parts")
# Layouts of a page: at most so many that fit, and so many that do not.
MOST_RANKED = 400
MOST_OVER = 200
# Sliders: field of a row, its name for readers.
CHOICES = (
    ("gpus", "GPUs"),
    ("dp", "dp"),
    ("tp", "tp"),
    ("pp", "pp"),
    ("cp", "cp"),
    ("ep", "ep"),
    ("zero", "ZeRO stage"),
    ("microbatch", "sequences of a microbatch"),
)
# Columns of the table: field, title, is it text, is it said of the picked layout.
COLUMNS = (
    ("number", "#", False, False),
    ("gpus", "GPUs", False, False),
    ("layout", "layout", True, False),
    ("step", "step", False, True),
    ("speed", "tokens/s a GPU", False, True),
    ("mfu", "MFU", False, True),
    ("memory_words", "memory", False, True),
    ("verdict", "", False, True),
    ("hours", "hours", False, True),
    ("cost", "cost", False, True),
)


def missing_bytes(layout: Ranked) -> int:
    """Bytes that do not fit."""
    return max(0, -layout.forecast.memory.spare)


def choice_of(layout: Ranked) -> tuple[int, ...]:
    """The layout's values of the sliders."""
    c = layout.candidate
    return (c.world, c.dp, c.tp, c.pp, c.cp, c.ep, c.zero, c.sequences)


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
    return results, sorted(over, key=missing_bytes)


def _resize(recipe: Recipe) -> Iterator[Recipe]:
    launch = recipe.launch
    for name, size in (("nodes", launch.nodes), ("ranks", launch.ranks)):
        if isinstance(size, int):
            for other in ([size // 2] if size % 2 == 0 else []) + [2 * size]:
                yield with_value(recipe, f"launch.{name}", other)
            return


def make_search_page(results: Sequence[Search], over: Sequence[Ranked] = ()) -> Page:
    """Make the page of searches on one or several numbers of GPUs, the wanted one first. over: layouts that do not fit.

    Layouts are numbered in the order of the first search's ranking. Where they are too many for a page it has the best of each
    setting of the sliders, then the best of all."""
    found = [each for result in results for each in (*result.ranked, *result.others)]
    ordered = sorted(found, key=lambda each: each.step_s)
    fields, values = choose_rows([*ordered, *over])
    first, shape = results[0], results[0].engine.shape
    best, world = first.ranked[0] if first.ranked else None, first.space.world
    batch = f"{first.space.sequences_per_step:,} sequences of {first.space.base.batch.context:,} tokens a step"
    verdict = f"none of {first.num_layouts:,} layouts fits on {world} GPUs"
    if best is not None:
        verdict = f"best by {first.by}: {describe(best.candidate)}, {show_seconds(best.step_s)} a step"
    names = _names([*ordered, *over])
    return Page(
        title=f"{shape.config.model_type}, {shape.size.total:,} parameters; {batch}; {world} x {first.engine.cluster.name}",
        verdict=verdict,
        is_over=best is None,
        facts=tuple(_list_facts(results[0])),
        sections=(),
        charts={name: chart.to_dict() for name, chart in layouts_charts(names["kinds"]).items()},
        rows={name: [] for name in FILLED},
        footer=f"meshwright search; machine {results[0].engine.cluster.name}. All numbers are predicted, none is measured.",
        tables=(_reject(results[0].rejections),),
        layouts={
            "fields": fields,
            "values": values,
            "wanted": results[0].space.world,
            "choices": [
                {"key": key, "name": name, "values": sorted({row[fields.index(key)] for row in values})}
                for key, name in CHOICES
            ],
            "columns": [dict(zip(("key", "name", "isText", "isFact"), each, strict=True)) for each in COLUMNS],
            **names,
        },
        layouts_words=_describe_shown(results, len(values), len(found) + len(over)),
    )


def choose_rows(layouts: Sequence[Ranked], most_bytes: int = MOST_ROW_BYTES) -> tuple[list[str], list[list[Any]]]:
    """(fields, values of each layout) of as many as a page holds, in the given order."""
    firsts: dict[tuple[int, ...], int] = {}
    for number, each in enumerate(layouts):
        firsts.setdefault(choice_of(each), number)
    chosen = set(firsts.values())
    order = [*firsts.values(), *(number for number in range(len(layouts)) if number not in chosen)]
    names, room = _names(layouts), most_bytes
    fields: list[str] = []
    kept: dict[int, list[Any]] = {}
    for number in order:
        row = _row(number + 1, layouts[number], names)
        room -= len(json.dumps(list(row.values())))
        if room < 0:
            break
        fields, kept[number] = list(row), list(row.values())
    return fields, [kept[number] for number in sorted(kept)]


def _names(layouts: Iterable[Ranked]) -> Mapping[str, list[str]]:
    """Kinds of bytes and parts of a step that any of them has, in the order of the numbers in its row."""
    kinds: dict[str, None] = {}
    parts: dict[str, None] = {}
    for each in layouts:
        fullest = each.forecast.memory.fullest
        kinds |= dict.fromkeys(kind for kind, size in fullest.held.items() if size)
        parts |= dict.fromkeys(part for part, seconds in each.forecast.time.parts.items() if seconds)
    return {"kinds": [*kinds, OUTSIDE, SLACK], "parts": list(parts)}


def _row(number: int, layout: Ranked, names: Mapping[str, list[str]]) -> dict[str, Any]:
    c, memory, time = layout.candidate, layout.forecast.memory, layout.forecast.time
    fullest = memory.fullest
    held = fullest.kinds
    missing = missing_bytes(layout)
    over = f"{missing / GIB:,.1f} GiB over"
    return {
        "number": number,
        **dict(zip((key for key, _ in CHOICES), choice_of(layout), strict=True)),
        "layout": describe(c),
        "step_s": _round(time.step_s),
        "gb": _round(fullest.reserved / GIB),
        "limit": _round(memory.limit / GIB),
        "over": _round(missing / GIB),
        "over_words": over if missing else "",
        "step": show_seconds(time.step_s),
        "speed": f"{time.tokens_per_s_and_rank:,.0f}",
        "mfu": f"{time.mfu:.1%}",
        "memory_words": show_bytes(fullest.reserved),
        "verdict": over if missing else f"{memory.spare / GIB:,.1f} GiB to spare",
        "hours": f"{time.hours:,.1f}",
        "cost": f"${time.cost:,.0f}" if time.cost else "-",
        "memory": [_round(held.get(kind, 0) / GIB) for kind in names["kinds"]],
        "parts": [_round(time.parts.get(part, 0.0)) for part in names["parts"]],
    }


def _round(number: float) -> float:
    """Five digits: what a chart shows, and a third of the characters."""
    return float(f"{number:.5g}")


def _list_facts(result: Search) -> Iterator[tuple[str, str]]:
    yield "layouts", f"{result.num_layouts:,}"
    yield "forecast", f"{result.num_forecast:,}"
    yield "excluded by bounds", f"{result.num_slower:,}"
    yield "rejected", f"{result.num_rejected:,}"
    if result.ranked:
        time, memory = result.ranked[0].forecast.time, result.ranked[0].forecast.memory
        yield "best step", show_seconds(time.step_s)
        yield "tokens/s of a GPU", f"{time.tokens_per_s_and_rank:,.0f}"
        yield "MFU", f"{time.mfu:.1%}"
        yield "to spare", show_bytes(memory.spare)


def _describe_shown(results: Sequence[Search], shown: int, forecast: int) -> str:
    worlds = ", ".join(str(result.space.world) for result in results)
    left_out = forecast - shown
    words = f"{shown:,} layouts on {worlds} GPUs, each computed in full: sliders pick the fastest that matches, a click another."
    if left_out:
        words += f" {left_out:,} more were computed and have no room on this page: each setting of the sliders keeps its best."
    slower = sum(result.num_slower for result in results)
    if slower:
        words += f" {slower:,} are slower than these by a lower bound and were not computed."
    return words


def _reject(rejections: Sequence[Rejection]) -> Table:
    grouped = group_rejections(rejections)
    rows = tuple((f"{count:,}", each.layout, each.reason) for each, count in grouped[:MOST_REASONS])
    more = f" {len(grouped) - MOST_REASONS} rarer reasons are left out." if len(grouped) > MOST_REASONS else ""
    words = f"Layouts that no recipe may have, or that do not fit: how many, an example, why.{more}"
    return Table("Rejected", words, ("layouts", "such as", "reason"), rows)
