"""A sweep on this machine: a folder that `meshwright status` reads, `runs/NAME-sweep-001`, and beside it those of its runs."""

from collections.abc import Sequence
from pathlib import Path

from framework.launch.directory import RunDirectory
from framework.recipe.schema import Recipe


def begin_sweep(recipes: Sequence[Recipe]) -> list[RunDirectory]:
    """The runs, `NAME-sweep-001-0` and so on where the recipes give no id. Their folders are made, so that they are
    told from mistyped ones, and are named in the sweep's run.json."""
    root, name = Path(recipes[0].run.root), f"{recipes[0].run.name}-sweep"
    sweep = RunDirectory.create(root, None, name)
    ids = [recipe.run.id or f"{sweep.id}-{index}" for index, recipe in enumerate(recipes)]
    runs = [
        RunDirectory.create(Path(recipe.run.root), run_id, name) for recipe, run_id in zip(recipes, ids, strict=True)
    ]
    sweep.note_launch([], {}, runs=[run.id for run in runs])
    print(f"sweep    {sweep.path}, {len(runs)} runs; how they stand: meshwright status {sweep.path}", flush=True)
    return runs
