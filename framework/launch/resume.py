"""Resume: the saved recipe goes on, with what the command line may change and nothing else.

Every value of a run's recipe has shaped its weights, so a run whose recipe changes is another run. What may change is what
does not touch the training run itself (layouts, places, rhythms), or what only adds to it (more steps).
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from framework.checkpoint.commit import newest_checkpoint, step_of
from framework.errors import RunError
from framework.launch.directory import RunDirectory, list_runs
from framework.launch.identity import ABSENT, MAY_CHANGE, find_edits, may_change, read_recorded, refuse_edits, values_of
from framework.launch.settle import keep_settled
from framework.plan.auto import require_layout
from framework.recipe.compose import compose, load_recipe
from framework.recipe.environment import HIDDEN, is_secret
from framework.recipe.files import search_path
from framework.recipe.keys import flatten
from framework.recipe.layout_keys import with_layout_of
from framework.recipe.overrides import parse_overrides, write_resume
from framework.recipe.problem import show
from framework.recipe.schema import Recipe, Run
from framework.recipe.suggest import nearest

SHOWN_RUNS = 10
# Where the run lies, which its folder says.
OWN_KEYS = ("run.root", "run.id", "run.name")


@dataclass(frozen=True)
class Change:
    """A key whose value differs from the saved recipe's."""

    key: str
    was: Any
    now: Any

    @property
    def is_allowed(self) -> bool:
        return may_change(self.key)


def resume_recipe(run: RunDirectory, overrides: list[str], recipe_dirs: list[Path]) -> tuple[Recipe, list[Change]]:
    """The recipe that the run goes on with, and what it changes. Raises RunError for a change that makes another run.

    Values of the command line are set in the saved recipe. Its group choices (`experiment=quickstart`) were made when the
    run began: they must still say the same of all that cannot change; of the rest the saved values stay. A run that has not
    trained a step may change in anything: its recipe may be the mistake that ended it.
    """
    saved, chooses = load_recipe(run.recipe), bool(parse_overrides(overrides, search_path(recipe_dirs)).choices)
    resumed = _compose_settled(saved, overrides, recipe_dirs, run.recipe)
    composed = _compose_settled(saved, overrides, recipe_dirs) if chooses else resumed
    is_open = (
        composed.parallel.layout == "auto"
    )  # by a choice of recipes, parallel=auto, which the beginning has followed
    if is_open:
        composed = with_layout_of(composed, saved)
    recorded = read_recorded(run)["recipe"]
    edits = find_edits(recorded, values_of(saved))
    restored = edits.keys() - find_edits(recorded, values_of(resumed)).keys()
    if not run.has_trained:  # what is typed takes the place of all that was recorded
        restored |= {change.key for change in find_changes(saved, resumed)}
    refuse_edits(run, {key: values for key, values in edits.items() if key not in restored})
    changes = find_changes(saved, resumed)
    refused = {change.key: change for change in changes if not change.is_allowed and change.key not in restored}
    others = [each for each in find_changes(saved, composed) if not each.is_allowed and each.key not in restored]
    refused |= {change.key: change for change in others if change.key not in refused}
    if refused and run.has_trained:
        raise RunError(explain_refusal(run, list(refused.values()), saved.launch.kind))
    if refused:  # nothing was trained under the saved recipe, so this one takes its place as a whole
        if is_open:
            composed = require_layout(compose(overrides, recipe_dirs), overrides, recipe_dirs)
            composed = keep_settled(saved, composed)
        resumed, changes = composed, find_changes(saved, composed)
    resumed = replace(resumed, run=name_run(run.path, resumed.run))
    return resumed, [change for change in changes if change.key not in OWN_KEYS]


def _compose_settled(saved: Recipe, overrides: list[str], dirs: list[Path], base: Path | None = None) -> Recipe:
    composition = compose(overrides, dirs, base)
    # parallel.layout=auto that is typed chooses anew, for the ranks that the run goes on with.
    recipe = composition.require() if base is None else require_layout(composition, overrides, dirs)
    return keep_settled(saved, recipe, composition.origins)


def name_run(path: Path, saved: Run) -> Run:
    """`run.*` of the run in a folder, which may be a copy of the one that the recipe was saved in: its id is the folder's name.
    run.root stays as it is written where it is the folder's."""
    keys = RunDirectory(path).keys
    is_own = Path(saved.root).absolute() == Path(keys.root).absolute()
    return replace(saved, id=keys.id, root=saved.root if is_own else keys.root)


def resume_command(run: RunDirectory, recipe: Recipe, *more: str) -> str:
    """What a user types to go on with the run."""
    return write_resume(recipe.launch.kind, run.keys, *more)


def saved_step(run: RunDirectory) -> int:
    """The step from which the run goes on: that of its newest whole checkpoint, 0 if it has never saved.

    Raises CheckpointError when it has and no checkpoint is whole, StorageError when that cannot be found out now.
    """
    newest = newest_checkpoint(run.checkpoints)
    return step_of(newest) if newest else 0


def refuse_missing(run: Run) -> NoReturn:
    """Raises RunError for a command line that can only mean a resume and names a run that is not there, or has not begun."""
    folder = Path(run.root, str(run.id))
    if (folder / "run.json").is_file():
        raise RunError(
            f"{folder}/recipe.yaml is gone, so the run cannot go on: put it back, from a copy or by hand; run.json has its values"
            " under `recipe`"
        )
    there = [each.id for each in list_runs(Path(run.root))]
    near = nearest(str(run.id), there)
    shown = ", ".join(there[-SHOWN_RUNS:]) + (f" and {len(there) - SHOWN_RUNS} more" if len(there) > SHOWN_RUNS else "")
    raise RunError(
        f"there is no run {run.root}/{run.id} to go on with"
        + (f"; did you mean run.id={near[0]}?" if near else ".")
        + f" Runs there: {shown or 'none'}. For a new run of this name say what it trains, such as experiment=quickstart"
    )


def find_changes(saved: Recipe, other: Recipe) -> list[Change]:
    """All keys whose values differ, ABSENT where one of the two has no such key."""
    was, now = flatten(asdict(saved)), flatten(asdict(other))
    keys = [*was, *(key for key in now if key not in was)]
    pairs = [(key, was.get(key, ABSENT), now.get(key, ABSENT)) for key in keys]
    return [Change(key, _shown(key, one), _shown(key, other)) for key, one, other in pairs if one != other]


def _shown(key: str, value: Any) -> Any:
    """A change is printed and kept in run.json: a secret of a run from before they were refused is in neither."""
    return HIDDEN if is_secret(key.rpartition(".")[2], value) and key.startswith("launch.environment") else value


def explain_refusal(run: RunDirectory, refused: list[Change], kind: str) -> str:
    """The difference as a table, and the ways out."""
    rows = [("key", "was", "now"), *((change.key, show(change.was), show(change.now)) for change in refused)]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "\n".join(
        [
            f"{run.path} was begun with another recipe, and these keys cannot change within a run:",
            *table,
            f"to go on with the saved recipe:  {write_resume(kind, run.keys)}",
            "for a run of the new recipe:     leave run.id out, or give one that is not taken",
            f"what may change on resume:       {', '.join(pattern for pattern, _ in MAY_CHANGE)}",
        ]
    )
