"""`meshwright search --try N`: the best layouts are trained for some steps, the cluster's rates corrected by what was measured,
and all layouts ranked again.

Each is a run as any other, from the recipe with `layout=FILE`: here a sweep, one run after another; under SLURM a job array,
whose measurements `--tried FOLDER` reads once it is through. The folder has the layouts' files, the runs, and the corrected
cluster.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from framework.errors import EXIT_DONE, RunError
from framework.launch.directory import RunDirectory
from framework.launch.runs import Runs
from framework.launch.search import Asked, show, write_best
from framework.launch.submit import submit_sweep
from framework.launch.sweep import compose_sweep, train_sweep
from framework.recipe.compose import load_recipe
from framework.recipe.layout_keys import LAYOUT_KEYS
from framework.track.jsonl import METRICS_FILE, read_records

LAYOUTS = "layouts"
CORRECTED = "cluster.yaml"
# Of a run's steps the first ones warm up: memory is allocated, kernels are chosen.
WARM_UP = 2


def try_layouts(asked: Asked) -> int:
    """Rank, train the best, correct and rank again; under SLURM queue them, for `--tried`."""
    from framework.foresight.find import values_for
    from framework.foresight.search_text import comment_of

    result = show(asked)
    folder = RunDirectory.create(Runs.of(asked.recipe.run).folder, None, f"{asked.recipe.run.name}-tried").path
    files = []
    (folder / LAYOUTS).mkdir()
    for place, each in enumerate(result.ranked[: asked.options.try_best], start=1):
        files.append(folder / LAYOUTS / f"{place}.yaml")
        write_best(
            files[-1], values_for(each, asked.recipe, asked.pinned), comment_of(each, "the cluster", asked.recipe)
        )
    overrides = [*_without_layout(asked.overrides), *_short_run(asked, folder), f"layout={','.join(map(str, files))}"]
    print(f"\ntrying   {len(files)} layouts for {asked.options.try_steps} steps each, in {folder}", flush=True)
    if asked.recipe.launch.kind == "slurm":
        recipes, combinations = compose_sweep(overrides, asked.recipe_dirs)
        submit_sweep(recipes, combinations, dry_run=False)
        print(f"then     meshwright search --tried {folder} and the same overrides")
        return EXIT_DONE
    train_sweep(overrides, asked.recipe_dirs)
    return _rank_again(asked, folder)


def read_tried(asked: Asked) -> int:
    """Correct by what an array has measured, and rank again."""
    return _rank_again(asked, asked.options.tried)


def _rank_again(asked: Asked, folder: Path) -> int:
    from framework.foresight.correction import Tried, correct, describe_factors, fit_factors, write_text
    from framework.foresight.find import foretell, resolved
    from framework.plan.cluster import Cluster
    from framework.recipe.cluster_file import write_cluster_file
    from framework.recipe.clusters import find_cluster

    measured = dict(_read_measured(folder))
    if not measured:
        raise RunError(f"{folder}: no run there has trained more than {WARM_UP} steps: see their logs below {folder}")
    tried = [Tried(foretell(layout, asked.recipe).time, step_s) for layout, step_s in measured.items()]
    factors = fit_factors(tried)
    recipe = resolved(asked.recipe)
    group = correct(find_cluster(recipe)[0], factors, folder.name)
    write_cluster_file(folder / CORRECTED, write_text(group, f"corrected by {len(tried)} layouts tried in {folder}"))
    print(
        "\n".join(
            ["", *_compare(tried, list(measured)), describe_factors(factors), f"cluster={folder / CORRECTED}", ""]
        )
    )
    show(asked, Cluster.from_recipe(replace(recipe, cluster=group)))
    return EXIT_DONE


def _compare(tried: Sequence[Any], layouts: Sequence[Any]) -> Iterator[str]:
    from framework.foresight.rejections import describe

    yield f"{'foretold s':>10}  {'measured s':>10}  layout"
    for each, candidate in zip(tried, layouts, strict=True):
        yield f"{each.forecast.step_s:>10.4g}  {each.step_s:>10.4g}  {describe(candidate)}"


def _read_measured(folder: Path) -> Iterator[tuple[Any, float]]:
    """(layout, median seconds of a step) of each run below a folder that has trained long enough."""
    from framework.foresight.layouts import candidate_of

    if not folder.is_dir():
        raise RunError(f"--tried {folder}: there is no such folder; `meshwright search --try N` names it")
    for saved in sorted(folder.glob("*/recipe.yaml")):
        metrics = saved.parent / METRICS_FILE
        records = read_records(metrics) if metrics.is_file() else []
        seconds = [record["step_s"] for record in records if record["step"] > WARM_UP]
        if seconds:
            yield candidate_of(load_recipe(saved)), median(seconds)


def _without_layout(overrides: Sequence[str]) -> list[str]:
    """Overrides that set no key of a layout: the files do."""
    return [
        text for text in overrides if text.lstrip("+~").partition("=")[0] not in (*LAYOUT_KEYS, "layout", "parallel")
    ]


def _short_run(asked: Asked, folder: Path) -> list[str]:
    """What makes a run a trial: few steps, each reported, nothing saved on the way, nobody told."""
    steps, kind = asked.options.try_steps, asked.recipe.launch.kind
    values = {
        "train.steps": steps,
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
        "checkpoint.export_every_steps": "null",
        "track.every_steps": 1,
        "track.wandb.mode": "disabled",
        "launch.kind": kind,
        "run.root": folder,
        "run.name": "trial",
    }
    return [f"{key}={value}" for key, value in values.items()]
