"""Recipes to one checked Recipe: Hydra composes the files, our own code judges the result.

Hydra's compose API has no side effects (no output folder, no logging, no change of directory). It composes untyped; then
come the command line's values, interpolations, the strict conversion to dataclasses and the cross-field rules, and the
mistakes of all of them are one list.

Some keys state one thing in two ways. A statement is the stronger the nearer its file is to the user: config.yaml, then recipes
of groups, then an experiment, then the command line. Of two alternatives the stronger stands, and the other follows from it;
`check_recipe` reports two of equal strength.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from framework.errors import RecipeError
from framework.output import first_line
from framework.recipe.check import LAYOUT_KEYS, check_recipe
from framework.recipe.convert import LAYOUT, MANDATORY, apply_part, load_recipe, read_base, save_recipe, to_recipe
from framework.recipe.derive import count_dp, count_ranks, find_world_problems
from framework.recipe.environment import keep_references
from framework.recipe.files import (
    compose_files,
    find_file,
    list_defaults,
    origin_of,
    remove_origin,
    search_path,
    trace_file,
)
from framework.recipe.keys import default_of, flatten, join, nearest, value_of, with_value
from framework.recipe.machines import count_devices_of_node
from framework.recipe.overrides import PLUGINS, apply_values, expand_sweep, parse_overrides
from framework.recipe.plugins import import_plugins, is_path
from framework.recipe.problem import COMMAND_LINE, DEFAULT, Problem, label_of, render_problems
from framework.recipe.schema import Recipe
from framework.recipe.stages import UNTIL

__all__ = ["Composition", "compose", "expand_sweep", "load_recipe", "save_recipe"]

# Resolvers whose value is another one at every composition, so that a run could not be composed again.
_VOLATILE = re.compile(r"\$\{\s*(now|hydra)\s*[:.]")
# Groups of recipes that make a layout.
LAYOUT_GROUPS = ("parallel", "pipeline", "zero", "memory")
# Left to the search, whatever the recipe says of the layout.
OPEN = "parallel.layout=auto"


@dataclass(frozen=True)
class Composition:
    """The recipe of all files and the command line, or the problems in it.

    `recipe` is None if there are problems. `draft` is always there, with the schema's default where a value is wrong; it is
    for messages and for looking up the run's folder, never for running. `origins`: each dotted key to
    `recipes/optim/adamw.yaml:3`, `command line` or `default`. `notes`: lines on choices that had less effect than they seem to.
    """

    recipe: Recipe | None
    draft: Recipe
    problems: list[Problem]
    origins: dict[str, str]
    notes: tuple[str, ...] = ()

    def require(self) -> Recipe:
        """The recipe; RecipeError with all problems where there are any."""
        if self.recipe is None:
            raise RecipeError(render_problems(self.problems))
        return self.recipe


def compose(overrides: Iterable[str], recipe_dirs: Sequence[Path] = (), base: Path | None = None) -> Composition:
    """Compose `config.yaml` with the command line's overrides and checks the result.

    recipe_dirs: users' own recipes; they are searched before the shipped ones and may extend those (`defaults: [adamw]`).
    base: a saved recipe that takes the place of config.yaml. Only value overrides apply to it, group choices do not: what
    they chose is in the saved recipe already. To compare the two, compose again without `base`.
    """
    folders = search_path(recipe_dirs)
    command = parse_overrides(overrides, folders)
    tree, origins, unread = compose_files(folders, command.choices) if base is None else read_base(base)
    misplaced = [problem for part, file in command.parts for problem in apply_part(tree, part, file, origins)]
    misplaced += apply_values(tree, command.values, origins)
    if base is None:
        drop_unchosen_model(tree, origins, folders, [choice.key_or_group for choice in command.choices])
    plain, unresolved = resolve(tree, origins)
    is_own = base is not None and origin_of(origins, PLUGINS).startswith(label_of(base))
    unwanted = settle_plugins(plain, command.plugins, origins, may_have_paths=is_own)
    ambiguous = let_statements_win(plain, origins)
    recipe, wrong = to_recipe(plain, origins)
    failed = {problem.key for problem in unresolved}
    # A key is not missing if its interpolation failed, nor if the files could not be read and it may well be in them.
    wrong = [problem for problem in wrong if not (problem.missing and (unread or problem.key in failed))]
    problems = [*command.problems, *unread, *misplaced, *unresolved, *unwanted, *wrong, *ambiguous]
    if not (command.problems or unread):  # a rule that fails while a recipe is left out would blame the wrong key
        if not problems:
            recipe = let_microbatch_follow(recipe, origins)
        problems += check_recipe(recipe, origins, broken=[problem.key for problem in problems])
    is_read = base is None and not problems  # else a file that was chosen may be none
    notes = tuple(_find_overruled(command.choices, origins, folders)) if is_read else ()
    origins = {key: origin_of(origins, key) for key in flatten(asdict(recipe))}
    return Composition(None if problems else recipe, recipe, problems, origins, notes)


def _find_overruled(choices: Sequence[Override], origins: Mapping[str, str], folders: Sequence[Path]) -> Iterator[str]:
    """Lines on recipes that the command line chooses and of which an experiment has changed keys."""
    for choice in choices:
        group, option, own = choice.key_or_group, choice.value(), dict[str, str]()
        file = find_file(f"{group}/{option}", folders)
        if file is None or group == "experiment":
            continue
        trace_file(own, file, group.replace("/", "."), label_of(file))
        if kept := [key for key in own if strength_of(origins.get(key, DEFAULT)) == EXPERIMENT]:
            yield f"note     {group}={option}, but for keys that the experiment states and that count more: {', '.join(kept)}"


def with_choices(
    recipe: Recipe, draft: Recipe, overrides: Iterable[str], recipe_dirs: Sequence[Path] = ()
) -> tuple[Recipe, list[str]]:
    """A saved recipe with the groups that `overrides` choose, and the keys that these have. draft: composed without the saved
    recipe. RecipeError for an experiment, a whole recipe."""
    folders = search_path(recipe_dirs)
    chosen = [choice.key_or_group.replace("/", ".") for choice in parse_overrides(overrides, folders).choices]
    if "experiment" in chosen:
        raise RecipeError("experiment: a saved run has a recipe. Change single keys or groups of it")
    # A group within a group, such as optim/schedule, is chosen by itself.
    keys = [
        f"{group}.{name}"
        for group in chosen
        for name in vars(value_of(draft, group))
        if not any((folder / group.replace(".", "/") / name).is_dir() for folder in folders)
    ]
    for key in keys:
        recipe = with_value(recipe, key, value_of(draft, key))
    return recipe, keys


def settle_plugins(
    plain: dict[str, Any], typed: Sequence[Any], origins: dict[str, str], may_have_paths: bool
) -> list[Problem]:
    """Add the command line's plugins to those of the files, and import all; a problem where one may or can not be.
    may_have_paths: the files' are of a run's recipe, whose paths a command line has given."""
    stated = plain.get(PLUGINS) or []
    added = [each for each in typed if each is not None]
    if not (stated or added) or not all(isinstance(each, str) for each in [*stated, *added]):
        return []  # converting the recipe explains other values
    found = plain[PLUGINS] = list(dict.fromkeys([*stated, *added]))
    if added:
        origins[PLUGINS] = COMMAND_LINE
    origin, paths = origin_of(origins, PLUGINS), [each for each in stated if is_path(each) and not may_have_paths]
    if None in typed:
        return [
            Problem(PLUGINS, found, "none may be imported: --no-plugins", "leave the key out, or the option", origin)
        ]
    if paths:
        message = f"{paths[0]} is no package's name, and recipes do not say where code lies"
        return [Problem(PLUGINS, found, message, f"leave it out of the file, and add --plugins {paths[0]}", origin)]
    try:
        import_plugins(found)
    except RecipeError as error:
        return [Problem(PLUGINS, found, str(error), "mend the plugin, or leave it out", origin)]
    return []


def resolve(tree: DictConfig, origins: Mapping[str, str]) -> tuple[dict[str, Any], list[Problem]]:
    """The tree as plain dicts and lists with all interpolations resolved, but for references to the environment in
    launch.environment. A key whose interpolation fails is left out and reported."""
    problems: list[Problem] = []
    written = cast(dict[str, Any], OmegaConf.to_container(tree, resolve=False))
    return _resolve_group(tree, written, "", origins, problems), problems


def _resolve_group(
    tree: DictConfig, written: Mapping[str, Any], path: str, origins: Mapping[str, str], problems: list[Problem]
) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for name, value in written.items():
        where = join(path, name)
        if isinstance(value, Mapping):
            plain[name] = _resolve_group(tree[name], value, where, origins, problems)
            continue
        try:
            if path == "launch.environment" and isinstance(value, str):
                tree[name] = value = keep_references(value)
            if _VOLATILE.search(str(value)):
                raise OmegaConfBaseException("its value would differ at every composition; give it outright")
            found = tree[name] if "${" in str(value) else value
            plain[name] = OmegaConf.to_container(found, resolve=True) if OmegaConf.is_config(found) else found
        except (OmegaConfBaseException, ValueError) as error:
            problems.append(Problem(where, value, first_line(error), "", origin_of(origins, where)))
    return plain


def compose_open(overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> Composition:
    """Compose the recipe of a search, whose layout need not be legal."""
    return compose_for_nodes([*overrides, OPEN], recipe_dirs)


def compose_for_nodes(overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> Composition:
    """Compose the recipe of a forecast. A local launch has one machine, so it becomes a SLURM launch where the command line
    names nodes, or where there are more ranks than devices; its ranks per node are then the cluster's devices, unless stated.
    Keys that must be given (such as the path of the text) get a placeholder, since no forecast reads them."""
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
    """Keys of the layout that the user has fixed on the command line: keys (parallel.tp=8), recipes of groups that make a
    layout (zero=stage_1), files of layouts. An experiment's values are its author's guess for other machines, and free; null,
    which follows, fixes nothing."""
    command = parse_overrides(overrides, search_path(recipe_dirs))
    groups = {choice.key_or_group for choice in command.choices} & set(LAYOUT_GROUPS)
    files = {label_of(file) for part, file in command.parts if part == LAYOUT}
    found = {key for key in LAYOUT_KEYS if _is_typed(composition.origins.get(key, ""), groups, files)}
    recipe = composition.draft
    for key, value in (("parallel.dp", recipe.parallel.dp), ("zero.shard_within", recipe.zero.shard_within)):
        if value is None:
            found -= {key}
    if recipe.pipeline.virtual_stages is None:
        found -= {"pipeline.virtual_stages"}
    return frozenset(found)


def change_pins(pins: frozenset[str], free: Sequence[str], keep: Sequence[str]) -> frozenset[str]:
    """Remove the keys of `free` from the pins, and add those of `keep`: keys or groups. RecipeError for others."""
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


# --- keys that state one thing in two ways

# (the key that is stated, keys that it replaces, its effect on the first where values alone do not tell that both were meant).
ALTERNATIVES = (
    ("batch.tokens_per_step", ("batch.sequences_per_step",), ""),
    ("batch.sequences_per_step", ("batch.tokens_per_step",), ""),
    ("launch.ranks", ("launch.nodes",), ""),
    # With SLURM only: an experiment for one node becomes one for two by `launch=slurm launch.nodes=2`.
    ("launch.nodes", ("launch.ranks",), ""),
    ("train.steps", ("train.epochs",), "sets the number of steps too"),
    ("checkpoint.every_minutes", ("checkpoint.interval", "checkpoint.mtbf_hours"), "says how often too"),
    ("data.bpe_vocab", ("model.tokenizer",), ""),
    ("model.tokenizer", ("data.bpe_vocab",), ""),
)
# Strength of an experiment's statements.
EXPERIMENT = 2
# Keys that state the model: then nothing remains of a model's recipe that nobody has chosen.
MODEL_STATED = ("model.weights", "model.config_file")
# Keys on which the division of a step into microbatches depends.
DIVISION = (
    *("launch.ranks", "launch.nodes", "launch.ranks_per_node", "batch.sequences_per_step", "batch.tokens_per_step"),
    *(f"parallel.{name}" for name in ("dp", "tp", "pp", "cp")),
)


def strength_of(origin: str) -> int:
    """Rank of an origin: the nearer the user a value was written, the higher."""
    if origin == COMMAND_LINE:
        return 3
    file = origin.rpartition(":")[0]
    if not file or origin == DEFAULT:
        return -1
    if Path(file).parent.name == "experiment":
        return EXPERIMENT
    return 0 if Path(file).stem == "config" else 1


def let_statements_win(plain: dict[str, Any], origins: dict[str, str]) -> list[Problem]:
    """Set alternatives of what is stated nearer to the user to null. Returns the problems of alternatives that are both on the
    command line, where one would silently override the other."""
    problems = []
    _let_borders_win(plain, origins)
    for stated, others, effect in ALTERNATIVES:
        own, value = strength_of(origins.get(stated, DEFAULT)), _value_of(plain, stated)
        if own < 1 or value is None or (stated == "launch.nodes" and _value_of(plain, "launch.kind") != "slurm"):
            continue
        for other in others:
            if _value_of(plain, other) is not None and strength_of(origins.get(other, DEFAULT)) < own:
                group, _, name = other.rpartition(".")
                plain.setdefault(group, {})[name] = None
                origins[other] = f"follows from {stated}"
        is_typed = origins.get(stated) == origins.get(others[0]) == COMMAND_LINE
        if effect and is_typed and (beside := _value_of(plain, others[0])) is not None:
            message = f"{others[0]}={beside} {effect}"
            problems.append(Problem(stated, value, message, f"give {stated} or {others[0]}", COMMAND_LINE))
    return problems


def _let_borders_win(plain: dict[str, Any], origins: dict[str, str]) -> None:
    """Set ways to state the end of a stage to null where another is stated nearer to the user."""
    stages = plain.get("train", {}).get("stages", {})
    for name, stage in stages.items() if isinstance(stages, dict) else ():
        stated = [way for way in UNTIL if isinstance(stage, dict) and stage.get(way) is not None]
        strengths = {way: strength_of(origin_of(origins, f"train.stages.{name}.{way}")) for way in stated}
        for way in stated:
            if strengths[way] < max(strengths.values()):
                stage[way] = None


def drop_unchosen_model(
    tree: DictConfig, origins: dict[str, str], folders: Sequence[Path], chosen: Sequence[str]
) -> None:
    """Remove the keys of config.yaml's own model where other keys of the user's state the model. chosen: groups of which the
    command line chooses a recipe."""
    # Unresolved: a reference to what is not there is reported later, with all others.
    written = OmegaConf.to_container(tree, resolve=False)
    model = written.get("model") if isinstance(written, dict) else None
    stated = [key for key in MODEL_STATED if isinstance(model, dict) and model.get(key.partition(".")[2]) is not None]
    if not stated or "model" in chosen:
        return
    file = find_file(f"model/{list_defaults(folders).get('model')}", folders)
    label = label_of(file) if file is not None else None
    for key in [key for key, origin in origins.items() if origin.rpartition(":")[0] == label]:
        # A config has no tokenizer beside it.
        if stated == ["model.config_file"] and not key.startswith("model."):
            continue
        _delete(tree, key)
        remove_origin(origins, key)


def let_microbatch_follow(recipe: Recipe, origins: dict[str, str]) -> Recipe:
    """The recipe with the largest microbatch, up to its own, that divides a rank's share of a step, where ranks or batch are
    stated nearer to the user. How a step is divided changes nothing that is learnt."""
    key, batch, parallel = "batch.sequences_per_microbatch", recipe.batch, recipe.parallel
    own = strength_of(origin_of(origins, key))
    if own >= max(strength_of(origins.get(each, DEFAULT)) for each in DIVISION) or parallel.layout == "auto":
        return recipe
    if any(find_world_problems(recipe)):
        return recipe
    sequences, rest = batch.sequences_per_step or 0, 0
    if batch.tokens_per_step is not None:
        sequences, rest = divmod(batch.tokens_per_step, batch.context)
    share, uneven = divmod(sequences, count_dp(recipe))
    if rest or uneven or not share or share % batch.sequences_per_microbatch == 0:
        return recipe
    fitting = max(each for each in range(1, batch.sequences_per_microbatch + 1) if share % each == 0)
    origins[key] = "follows from the batch and the ranks"
    return replace(recipe, batch=replace(batch, sequences_per_microbatch=fitting))


def _delete(tree: DictConfig, key: str) -> None:
    """Remove a key, and its group if that is empty then."""
    group, _, name = key.rpartition(".")
    parent = OmegaConf.select(tree, group)
    if isinstance(parent, DictConfig) and name in parent:
        del parent[name]
        if not parent and "." in group:
            _delete(tree, group)


def _value_of(plain: Mapping[str, Any], key: str) -> Any:
    """The value of a key, of the schema where none is written."""
    group, _, name = key.rpartition(".")
    values = plain.get(group, {})
    return values.get(name, default_of(key)) if isinstance(values, dict) else None
