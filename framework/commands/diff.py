"""`meshwright diff`: two runs beside one another: recipe, code, environment, curves."""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from framework.errors import EXIT_DONE
from framework.launch.directory import RunDirectory, find_run
from framework.launch.identity import load_own_recipe
from framework.output import align
from framework.recipe.environment import HIDDEN, hide_in, is_private
from framework.recipe.keys import flatten, plain
from framework.recipe.problem import show
from framework.track.jsonl import METRICS_FILE, read_records

# Lines of the curves' table: enough to see where two runs part.
CURVE_ROWS = 12
# Keys that say where a run lies.
OWN_KEYS = ("run.id",)

Row = tuple[str, str, str]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("first", metavar="RUN", help="a run's id or folder")
    parser.add_argument("second", metavar="RUN", help="the other run's id or folder")


def run(arguments: argparse.Namespace) -> int:
    """Print the differences. Raises RunError where one of the two is no run."""
    runs = [RunDirectory.open(find_run(name)) for name in (arguments.first, arguments.second)]
    print("\n".join(describe_difference(*runs)))
    return EXIT_DONE


def describe_difference(first: RunDirectory, second: RunDirectory) -> Iterator[str]:
    """The lines of the page; one word on a section that is equal."""
    yield f"runs: {first.path} and {second.path}"
    launches = [each.last_launch for each in (first, second)]
    read: dict[str, list[dict[str, Any]]] = {
        "recipe": [_read_recipe(each) for each in (first, second)],
        "code": [{name: each[name] for name in ("commit", "edited") if name in each} for each in launches],
        "environment": [{"host": each.get("host"), **each.get("versions", {})} for each in launches],
    }
    for name, values in read.items():
        yield from _section(name, list(find_differences(*values)), "equal" if any(values) else "was not recorded")
    yield from _section("curves", list(_compare_curves(first, second)), "no step that both have")


def find_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Row]:
    """(name, value of the first, value of the second) of what differs; `-` where one has no such name."""
    for name in dict.fromkeys([*first, *second]):
        if first.get(name) != second.get(name):
            left, right = (show(values[name]) if name in values else "-" for values in (first, second))
            yield name, left, right


def _read_recipe(run: RunDirectory) -> dict[str, Any]:
    values = flatten(plain(asdict(load_own_recipe(run))))
    return {
        key: HIDDEN if is_private(key, value) else hide_in(value)
        for key, value in values.items()
        if key not in OWN_KEYS
    }


def _compare_curves(first: RunDirectory, second: RunDirectory) -> Iterator[tuple[str, ...]]:
    """Loss and validation loss at steps that both have, spread over them, and the last of all; the last scores on tasks; then
    tokens/s."""
    curves = [_read_curve(run) for run in (first, second)]
    common = sorted(curves[0].keys() & curves[1].keys())
    if not common:
        return
    validated = [step for step in common if all(curve[step]["validation_loss"] is not None for curve in curves)]
    yield "step", "loss", "loss", "difference"
    for step in spread(common, CURVE_ROWS):
        yield f"{step:,}", *_numbers(*(curve[step].get("loss", float("nan")) for curve in curves))
    for step in spread(validated, CURVE_ROWS // 2):
        yield f"{step:,} validation", *_numbers(*(curve[step]["validation_loss"] for curve in curves))
    scored = [step for step in common if all(curve[step].get("scores") for curve in curves)]
    for step in scored[-1:]:
        first_scores, second_scores = (curve[step]["scores"] for curve in curves)
        for name in (name for name in first_scores if name in second_scores):
            yield f"{step:,} {name}", *_numbers(first_scores[name], second_scores[name])
    known = [
        [each["tokens_per_s"] for each in curve.values() if not math.isnan(each["tokens_per_s"])] for curve in curves
    ]
    if all(known):
        paces = [sorted(each)[len(each) // 2] for each in known]
        yield "tokens/s, median", *(f"{pace:,.0f}" for pace in paces), f"x {paces[1] / paces[0]:.2f}"


def _read_curve(run: RunDirectory) -> dict[int, dict[str, Any]]:
    """Records by step."""
    return {record["step"]: record for record in read_records(run.path / METRICS_FILE)}


def spread(steps: Sequence[int], most: int) -> list[int]:
    """At most so many of the steps, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]


def _numbers(first: float, second: float) -> tuple[str, str, str]:
    """Both, and their difference: `equal` to the last bit is more than 0.0000."""
    same = first == second or (math.isnan(first) and math.isnan(second))
    return f"{first:.4f}", f"{second:.4f}", "equal" if same else f"{second - first:+.4f}"


def _section(name: str, rows: Sequence[tuple[str, ...]], otherwise: str) -> Iterator[str]:
    """A heading and aligned columns; one line where there are none."""
    if not rows:
        yield f"{name}: {otherwise}"
        return
    yield f"{name}:"
    yield from (f"  {line}" for line in align(rows, widest=48))
