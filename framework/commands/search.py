"""`meshwright search`: rank all layouts of a recipe on its ranks by forecast; write the best as a file; train several of them.

`--try N` trains the best layouts of N meshes for some steps each, each as a run from the recipe with `layout=FILE`. Here
they run one after another; then the rates of the cluster are corrected by the measured steps (plan/find.py), and all are
ranked again. Under SLURM they are a job array. One folder has the layouts' files, the runs, and the corrected cluster.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from framework.commands.arguments import at_least
from framework.commands.measure import check_measured
from framework.errors import EXIT_DONE, RecipeError, RunError
from framework.imports import loading_libraries
from framework.recipe.check import LAYOUT_KEYS
from framework.recipe.compose import change_pins, compose_open, find_pins, load_recipe
from framework.recipe.convert import write_layout
from framework.recipe.schema import Recipe
from framework.track.jsonl import METRICS_FILE, read_records

if TYPE_CHECKING:
    from framework.plan.find import Question
    from framework.plan.search import Search

LAYOUTS = "layouts"
CORRECTED = "cluster.yaml"
# The first steps of a run warm up: memory is allocated, kernels are chosen.
WARM_UP = 2
# Overrides of a trial run: each step is reported, nothing is saved on the way, nothing is mirrored elsewhere.
TRIAL = {
    "train.epochs": "null",
    "train.validate_every_steps": "null",
    "train.sample": "null",
    "optim.schedule.name": "constant",
    "optim.schedule.warmup_steps": 0,
    "optim.schedule.decay_steps": "null",
    "checkpoint.every_steps": "null",
    "checkpoint.every_minutes": "null",
    "checkpoint.interval": "null",
    "checkpoint.mtbf_hours": "null",
    "checkpoint.keep_best": "false",
    "eval.tasks": "[]",
    "checkpoint.export_every_steps": "null",
    "track.every_steps": 1,
    "track.wandb.mode": "disabled",
    "run.name": "trial",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command. Keys of a layout that the command line sets are fixed, so that needs no option."""
    parser.add_argument("--by", choices=["time", "memory"], default="time", help="rank by step time or by memory")
    parser.add_argument(
        "--best", type=at_least(1), default=10, metavar="N", help="show the best N layouts (default: 10)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, every layout with its keys")
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="write the best layout's keys; layout=FILE then sets them"
    )
    parser.add_argument("--rejections", action="store_true", help="also print why each layout is refused, a line each")
    parser.add_argument(
        "--free",
        action="append",
        default=[],
        metavar="KEY",
        help="search over a key that the command line sets too, such as zero.stage or zero; repeatable",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="KEY",
        help="keep what the recipe says of a key, such as memory or parallel.cp; repeatable",
    )
    parser.add_argument(
        "--try",
        dest="try_best",
        type=at_least(1),
        metavar="N",
        help="train the best layouts of N meshes for some steps each; here: then correct the cluster's rates by the"
        " measured steps and rank again; under SLURM: as a job array",
    )
    parser.add_argument(
        "--try-steps", type=at_least(WARM_UP + 1), default=10, metavar="S", help="steps of each of them (default: 10)"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page for a browser, in one file; takes some seconds more"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that no search or plan has written (--write, --html)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    recipe, pinned = compose_search(arguments)
    check_measured(recipe)
    with loading_libraries():
        from framework.plan.find import Question

    meshes = arguments.try_best or 0
    question = Question(recipe, pinned, by=arguments.by, best=max(arguments.best, meshes), meshes=meshes)
    if meshes:
        return try_layouts(question, arguments)
    show(question, find(question), arguments)
    return EXIT_DONE


def compose_search(options: argparse.Namespace) -> tuple[Recipe, frozenset[str]]:
    """The recipe, and the keys of its layout that stay. Checks the options as well, before anything is searched: RecipeError."""
    if options.write is not None:
        _refuse_file(options.write, overwrite=options.overwrite)
    if options.html is not None:
        from framework.plan.page_html import require_page

        require_page(options.html, overwrite=options.overwrite)
    composition = compose_open(options.overrides, options.recipes)
    pinned = find_pins(composition, options.overrides, options.recipes)
    return composition.require(), change_pins(pinned, free=options.free, keep=options.keep)


def find(question: "Question") -> "Search":
    """Search. RecipeError where no layout can be trained."""
    from framework.plan.find import best_of, search

    result = search(question)
    best_of(result)
    return result


def show(
    question: "Question",
    result: "Search",
    options: argparse.Namespace,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Print a result and write the requested files. more: extra fields of the JSON object."""
    from framework.plan.find import comment_of, to_json, values_for

    recipe, pinned, name = question.recipe, question.pinned, _name_cluster(question)
    if options.json:
        values = [values_for(each, recipe, pinned) for each in result.ranked]
        print(json.dumps({**to_json(result, name, pinned, values, is_full=options.rejections), **more}))
    else:
        print_table(question, result, options)
    if options.write is not None:
        best = result.ranked[0]
        write_best(options.write, values_for(best, recipe, pinned), comment_of(best, name, recipe))
        if not options.json:
            print(f"\nwrote {options.write}: meshwright plan layout={options.write} ...")
    if options.html is not None:
        from framework.plan.find import explore
        from framework.plan.page_html import write_html
        from framework.plan.pages import make_search_page

        write_html(options.html, make_search_page(*explore(replace(question, meshes=0))))
        print(f"wrote {options.html}", file=sys.stderr if options.json else sys.stdout)


def print_table(question: "Question", result: "Search", options: argparse.Namespace) -> None:
    """Print the best layouts as a table, and why the others are not in it."""
    from framework.plan.find import describe_rejections, describe_search

    print("\n".join(describe_search(result, _name_cluster(question), question.pinned, shown=options.best)))
    if options.rejections:
        print("\n".join(["", *describe_rejections(result)]))


def _name_cluster(question: "Question") -> str:
    from framework.plan.find import cluster_name

    return question.cluster.name if question.cluster else cluster_name(question.recipe)


def _refuse_file(file: Path, *, overwrite: bool) -> None:
    """Raise RecipeError where a layout cannot be written, or a file that no search wrote would be lost."""
    if not file.parent.is_dir():
        raise RecipeError(f"--write {file}: there is no folder {file.parent}, make it first")
    if file.suffix not in (".yaml", ".yml"):
        raise RecipeError(f"--write {file}: end the name in .yaml, so that layout={file} reads it")
    if overwrite or not file.exists():
        return
    if "layout=THIS_FILE" not in file.read_text(encoding="utf-8", errors="replace"):
        raise RecipeError(
            f"--write {file}: exists and was not written by a search: choose another name, or --overwrite"
        )


def write_best(file: Path, values: dict[str, Any], comment: str) -> None:
    """Write a layout. RecipeError where that fails."""
    try:
        write_layout(file, values, comment)
    except OSError as error:
        raise RecipeError(f"--write {file}: {error.strerror}") from error


# --- --try


def try_layouts(question: "Question", options: argparse.Namespace) -> int:
    """Rank, train the best of as many meshes as are wanted, correct and rank again; under SLURM queue the runs."""
    from framework.commands.submit import submit_sweep
    from framework.commands.train import compose_sweep, train_sweep
    from framework.launch.directory import RunDirectory

    result, recipe = find(question), question.recipe
    with _to_stderr() if options.json else nullcontext():
        if not options.json:
            print_table(question, result, options)
        folder = RunDirectory.create(Path(recipe.run.root), None, f"{recipe.run.name}-tried").path
        chosen = choose_tried(result, wanted=options.try_best)
        steps = options.try_steps
        trial = TRIAL | {
            "train.steps": steps,
            "track.timeline_step": steps,
            "launch.kind": recipe.launch.kind,
            "run.root": folder,
        }
        overrides = [
            *_without_layout(options.overrides),
            *(f"{key}={value}" for key, value in trial.items()),
            _write_layouts(question, folder, chosen),
        ]
        # Layouts of one mesh are near-duplicates: their steps would tell one another's rates, and little else.
        print(
            f"\ntrying   {len(chosen)} layouts, the best of each mesh (dp, tp, pp, cp, ep), for {options.try_steps} steps"
            f" each, in {folder}",
            flush=True,
        )
        if recipe.launch.kind == "slurm":
            submit_sweep(*compose_sweep(overrides, options.recipes), dry_run=False)
        else:
            train_sweep(overrides, options.recipes)
    if recipe.launch.kind != "slurm":
        return _rank_again(question, options, folder)
    if options.json:
        show(question, result, options, {"tried": {"folder": str(folder), "queued": len(chosen)}})
    return EXIT_DONE


def choose_tried(result: "Search", wanted: int) -> list[Any]:
    """The best layout of each of so many meshes; where there are fewer meshes, then the best of the others."""
    chosen = list(result.of_meshes[:wanted])
    return [*chosen, *(each for each in result.ranked if each not in chosen)][:wanted]


def _write_layouts(question: "Question", folder: Path, chosen: Sequence[Any]) -> str:
    """Write a file for each layout; returns the override that sweeps over them."""
    from framework.plan.find import comment_of, values_for

    (folder / LAYOUTS).mkdir()
    files = [folder / LAYOUTS / f"{place}.yaml" for place in range(1, len(chosen) + 1)]
    for file, each in zip(files, chosen, strict=True):
        values = values_for(each, question.recipe, question.pinned)
        write_best(file, values, comment_of(each, "the cluster", question.recipe))
    return f"layout={','.join(map(str, files))}"


@contextmanager
def _to_stderr() -> Iterator[None]:
    """Send what is printed meanwhile, by runs in other processes too, to stderr: stdout is for one JSON object."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _rank_again(question: "Question", options: argparse.Namespace, folder: Path) -> int:
    from framework.plan.cluster import ClusterRates
    from framework.plan.find import Tried, correct, describe_factors, fit_factors, forecast_layout, resolved, write_text
    from framework.plan.search import describe
    from framework.recipe.convert import write_cluster_file
    from framework.recipe.machines import find_cluster

    measured = dict(_read_measured(folder))
    if not measured:
        raise RunError(f"{folder}: no run there has trained more than {WARM_UP} steps: see their logs below {folder}")
    tried = [Tried(forecast_layout(layout, question.recipe).time, step_s) for layout, step_s in measured.items()]
    factors, file, recipe = fit_factors(tried), folder / CORRECTED, resolved(question.recipe)
    group = correct(find_cluster(recipe)[0], factors, folder.name)
    write_cluster_file(file, write_text(group, f"corrected by {len(tried)} layouts tried in {folder}"))
    layouts = [
        {"layout": describe(layout), "predicted_s": each.forecast.step_s, "measured_s": each.step_s}
        for each, layout in zip(tried, measured, strict=True)
    ]
    if not options.json:
        print(f"\n{'predicted s':>11}  {'measured s':>10}  layout")
        for each in layouts:
            print(f"{each['predicted_s']:>11.4g}  {each['measured_s']:>10.4g}  {each['layout']}")
        print("\n".join([f"{describe_factors(factors)}\ncluster={file}", *_describe_splits(folder), ""]))
    again = replace(question, cluster=ClusterRates.from_recipe(replace(recipe, cluster=group)))
    found = {"folder": str(folder), "cluster": str(file), "factors": factors, "layouts": layouts}
    show(again, find(again), options, {"tried": found})
    return EXIT_DONE


def _describe_splits(folder: Path) -> Iterator[str]:
    """A line for each tried pipeline: its split by the times of its units, and what that would gain."""
    from framework.model.load import load_config
    from framework.parallel.pipeline.pipeline import UNITS_FILE
    from framework.plan.plan import make_plan

    for measured in sorted(folder.glob(f"*/{UNITS_FILE}")):
        recipe = load_recipe(measured.parent / "recipe.yaml")
        if recipe.parallel.pp > 1:
            recipe = replace(recipe, pipeline=replace(recipe.pipeline, layers=str(measured.parent)))
            yield f"pipeline.layers={measured.parent}: {make_plan(recipe, load_config(recipe.model)).pipeline.gain}"


def _read_measured(folder: Path) -> Iterator[tuple[Any, float]]:
    """(layout, median seconds of a step) of each run below a folder that has trained long enough."""
    from framework.plan.candidate import candidate_of

    for saved in sorted(folder.glob("*/recipe.yaml")):
        records = read_records(saved.parent / METRICS_FILE)
        seconds = [record["step_s"] for record in records if record["step"] > WARM_UP and not record.get("filled")]
        if seconds:
            yield candidate_of(load_recipe(saved)), median(seconds)


def _without_layout(overrides: Sequence[str]) -> list[str]:
    """Overrides that set no key of a layout: the files do."""
    return [
        text for text in overrides if text.lstrip("+~").partition("=")[0] not in (*LAYOUT_KEYS, "layout", "parallel")
    ]
