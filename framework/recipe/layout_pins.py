"""What of a layout the user has fixed: a search chooses the rest.

Fixed is what the command line sets: keys (parallel.tp=8), recipes of the groups that make a layout (zero=stage_1), files of
layouts. What an experiment says is its author's guess for other machines, and free.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path

from framework.errors import RecipeError
from framework.recipe.clusters import count_devices_of_node
from framework.recipe.compose import Composition, compose
from framework.recipe.convert import MANDATORY
from framework.recipe.derive import count_ranks
from framework.recipe.files import search_path
from framework.recipe.layout_keys import LAYOUT_KEYS
from framework.recipe.overrides import parse_overrides
from framework.recipe.problem import COMMAND_LINE, label_of
from framework.recipe.suggest import nearest

GROUPS = ("parallel", "pipeline", "zero", "memory")
# Left to the search, whatever the recipe says of the layout.
OPEN = "parallel.layout=auto"


def compose_open(overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> Composition:
    """The recipe of a search: its layout need not be legal."""
    return compose_for_nodes([*overrides, OPEN], recipe_dirs)


def compose_for_nodes(overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> Composition:
    """Compose for a forecast: a local launch has one machine, so nodes that the command line names, and ranks that one node has
    no devices for, are SLURM's. Its ranks per node are the cluster's devices, where nothing says how many. Whatever must be given
    (where the text lies, say) and is not is text that no forecast reads."""
    composition = compose(overrides, recipe_dirs)
    if composition.problems and all(problem.value == MANDATORY for problem in composition.problems):
        overrides = [*overrides, *(f"{problem.key}=not-given" for problem in composition.problems)]
        composition = compose(overrides, recipe_dirs)
    draft, origins = composition.draft, composition.origins
    if draft.launch.kind != "local" or origins.get("launch.kind") == COMMAND_LINE:
        return composition
    devices = count_devices_of_node(draft)
    if origins.get("launch.nodes") != COMMAND_LINE and (devices is None or count_ranks(draft) <= devices):
        return composition
    more = ["launch.kind=slurm"]
    if devices is not None and origins.get("launch.ranks_per_node") != COMMAND_LINE:
        more.append(f"launch.ranks_per_node={devices}")
    return compose([*overrides, *more], recipe_dirs)


def find_pins(composition: Composition, overrides: Iterable[str], recipe_dirs: Sequence[Path]) -> frozenset[str]:
    """The keys of the layout that the command line sets; parallel.dp=null, which follows, fixes nothing."""
    command = parse_overrides(overrides, search_path(recipe_dirs))
    groups = {choice.key_or_group for choice in command.choices} & set(GROUPS)
    files = {label_of(file) for file in command.layouts}
    found = {key for key in LAYOUT_KEYS if _is_typed(composition.origins.get(key, ""), groups, files)}
    recipe = composition.draft
    for key, value in (("parallel.dp", recipe.parallel.dp), ("zero.shard_within", recipe.zero.shard_within)):
        if value is None:
            found -= {key}
    if recipe.pipeline.virtual_stages is None:
        found -= {"pipeline.virtual_stages"}
    return frozenset(found)


def change_pins(pins: frozenset[str], free: Sequence[str], keep: Sequence[str]) -> frozenset[str]:
    """pins without the keys of `free` and with those of `keep`: keys or groups. RecipeError for what is no key of a layout."""
    return frozenset((pins | _expand("--keep", keep)) - _expand("--free", free))


def _expand(option: str, names: Sequence[str]) -> frozenset[str]:
    found: set[str] = set()
    for name in names:
        keys = {key for key in LAYOUT_KEYS if key == name or key.startswith(f"{name}.")}
        if not keys:
            guess = nearest(name, LAYOUT_KEYS)
            hint = f"did you mean {guess[0]}? " if guess else ""
            raise RecipeError(f"{option} {name}: {hint}a search chooses {', '.join(LAYOUT_KEYS)}, and groups of these")
        found |= keys
    return frozenset(found)


def _is_typed(origin: str, groups: set[str], files: set[str]) -> bool:
    file, _, line = origin.rpartition(":")
    return origin == COMMAND_LINE or (line.isdigit() and (file in files or Path(file).parent.name in groups))
