"""Keys that state one thing in two ways: a statement of the user's overrides a default that it contradicts.

A statement is the stronger the nearer its file is to the user: config.yaml, then recipes of groups, then an experiment, then
the command line. Of two alternatives the stronger stands, and the other follows from it; `check_recipe` reports two of equal
strength.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from framework.recipe.derive import count_dp, find_world_problems
from framework.recipe.keys import default_of
from framework.recipe.origins import find_file, origin_of, remove_origin
from framework.recipe.overrides import list_defaults
from framework.recipe.problem import COMMAND_LINE, DEFAULT, Problem, label_of
from framework.recipe.schema import Recipe
from framework.recipe.stages import UNTIL

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
        return 2
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
