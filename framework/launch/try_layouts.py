"""`meshwright search --try N`: the best layouts of N meshes are trained for some steps, the cluster's rates corrected by what was
measured, and all layouts ranked again.

Each is a run as any other, from the recipe with `layout=FILE`: here a sweep, one run after another; under SLURM a job array,
whose measurements `--tried FOLDER` reads once it is through. The folder has the layouts' files, the runs, and the corrected
cluster.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from framework.errors import EXIT_DONE, RunError
from framework.launch.directory import RunDirectory
from framework.launch.search import Asked, find, print_table, show, write_best
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
    """Rank, train the best of as many meshes as are wanted, correct and rank again; under SLURM queue them, for `--tried`."""
    result, options = find(asked), asked.options
    is_queued = asked.recipe.launch.kind == "slurm"
    with _to_stderr() if options.json else nullcontext():
        if not options.json:
            print_table(asked, result, _cluster_name(asked))
        folder = RunDirectory.create(Path(asked.recipe.run.root), None, f"{asked.recipe.run.name}-tried").path
        chosen = choose_tried(result, wanted=options.try_best)
        overrides = [
            *_without_layout(asked.overrides),
            *_short_run(asked, folder),
            _write_layouts(asked, folder, chosen),
        ]
        # Layouts of one mesh are near-duplicates: their steps would tell one another's rates, and little else.
        print(
            f"\ntrying   {len(chosen)} layouts, the best of each mesh (dp, tp, pp, cp, ep), for {options.try_steps} steps"
            f" each, in {folder}",
            flush=True,
        )
        if is_queued:
            recipes, combinations = compose_sweep(overrides, asked.recipe_dirs)
            submit_sweep(recipes, combinations, dry_run=False)
            print(f"then     meshwright search --tried {folder} and the same overrides")
        else:
            train_sweep(overrides, asked.recipe_dirs)
    if not is_queued:
        return _rank_again(asked, folder)
    if options.json:
        show(asked, result, more={"tried": {"folder": str(folder), "queued": len(chosen)}})
    return EXIT_DONE


def choose_tried(result: Any, wanted: int) -> list[Any]:
    """The best layout of each of so many meshes; where there are fewer meshes, then the best of the others."""
    chosen = list(result.of_meshes[:wanted])
    return [*chosen, *(each for each in result.ranked if each not in chosen)][:wanted]


def _write_layouts(asked: Asked, folder: Path, chosen: Sequence[Any]) -> str:
    """A file for each; returns the override that sweeps over them."""
    from framework.plan.find import values_for
    from framework.plan.search_text import comment_of

    (folder / LAYOUTS).mkdir()
    files = [folder / LAYOUTS / f"{place}.yaml" for place in range(1, len(chosen) + 1)]
    for file, each in zip(files, chosen, strict=True):
        write_best(file, values_for(each, asked.recipe, asked.pinned), comment_of(each, "the cluster", asked.recipe))
    return f"layout={','.join(map(str, files))}"


def read_tried(asked: Asked) -> int:
    """Correct by what an array has measured, and rank again."""
    return _rank_again(asked, folder=asked.options.tried)


@contextmanager
def _to_stderr() -> Iterator[None]:
    """What is printed meanwhile, by runs of other processes too, goes to stderr: stdout is for one JSON object."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _cluster_name(asked: Asked) -> str:
    from framework.plan.find import cluster_name

    return cluster_name(asked.recipe)


def _rank_again(asked: Asked, folder: Path) -> int:
    from framework.plan.cluster import Cluster
    from framework.plan.correction import Tried, correct, describe_factors, fit_factors, write_text
    from framework.plan.find import foretell, resolved
    from framework.plan.rejections import describe
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
    if not asked.options.json:
        lines = [*_compare(tried, list(measured)), describe_factors(factors), f"cluster={folder / CORRECTED}"]
        print("\n".join(["", *lines, ""]))
    cluster = Cluster.from_recipe(replace(recipe, cluster=group))
    layouts = [
        {"layout": describe(layout), "foretold_s": each.forecast.step_s, "measured_s": each.step_s}
        for each, layout in zip(tried, measured, strict=True)
    ]
    found = {"folder": str(folder), "cluster": str(folder / CORRECTED), "factors": factors, "layouts": layouts}
    show(asked, find(asked, cluster), cluster, {"tried": found})
    return EXIT_DONE


def _compare(tried: Sequence[Any], layouts: Sequence[Any]) -> Iterator[str]:
    from framework.plan.rejections import describe

    yield f"{'foretold s':>10}  {'measured s':>10}  layout"
    for each, candidate in zip(tried, layouts, strict=True):
        yield f"{each.forecast.step_s:>10.4g}  {each.step_s:>10.4g}  {describe(candidate)}"


def _read_measured(folder: Path) -> Iterator[tuple[Any, float]]:
    """(layout, median seconds of a step) of each run below a folder that has trained long enough."""
    from framework.plan.layouts import candidate_of

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
