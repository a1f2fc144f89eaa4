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

from framework.recipe.derive import count_ranks, find_world_problems
from framework.recipe.origins import find_file, origin_of, remove_origin
from framework.recipe.problem import COMMAND_LINE, DEFAULT, Problem, label_of
from framework.recipe.schema import Recipe

# (the key that is stated, the keys that it replaces).
ALTERNATIVES = (
    ("batch.tokens_per_step", ("batch.sequences_per_step",)),
    ("batch.sequences_per_step", ("batch.tokens_per_step",)),
    ("launch.ranks", ("launch.nodes",)),
    ("train.steps", ("train.epochs",)),
    ("checkpoint.every_minutes", ("checkpoint.interval", "checkpoint.mtbf_hours")),
    ("data.bpe_vocab", ("model.tokenizer",)),
    ("model.tokenizer", ("data.bpe_vocab",)),
)
# (a key, another that replaces it, its effect), where values alone do not tell that both were meant.
TWICE = (
    ("train.steps", "train.epochs", "sets the number of steps too"),
    ("checkpoint.every_minutes", "checkpoint.interval", "says how often too"),
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
    _let_ranks_follow(plain.get("launch"), origins)
    for stated, others in ALTERNATIVES:
        own = strength_of(origins.get(stated, DEFAULT))
        if own < 1 or _value_of(plain, stated) is None:
            continue
        for other in others:
            if _value_of(plain, other) is not None and strength_of(origins.get(other, DEFAULT)) < own:
                group, _, name = other.rpartition(".")
                plain[group][name] = None
                origins[other] = f"follows from {stated}"
    problems = []
    for key, other, does in TWICE:
        value, others = _value_of(plain, key), _value_of(plain, other)
        if origins.get(key) == origins.get(other) == COMMAND_LINE and None not in (value, others):
            problems.append(Problem(key, value, f"{other}={others} {does}", f"give {key} or {other}", COMMAND_LINE))
    return problems


def drop_unchosen_model(
    tree: DictConfig, origins: dict[str, str], folders: Sequence[Path], chosen: Sequence[str]
) -> None:
    """Remove the keys of config.yaml's own model where other keys of the user's state the model. chosen: groups of which the
    command line chooses a recipe."""
    # Unresolved: a reference to what is not there is reported later, with all others.
    written = OmegaConf.to_container(tree, resolve=False)
    model = written.get("model") if isinstance(written, dict) else None
    stated = [key for key in MODEL_STATED if isinstance(model, dict) and model.get(key.partition(".")[2]) is not None]
    if not stated or "model" in chosen or (file := _default_model(folders)) is None:
        return
    label = label_of(file)
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
    dp = parallel.dp or count_ranks(recipe) // (parallel.tp * parallel.pp * parallel.cp)
    share, uneven = divmod(sequences, dp)
    if rest or uneven or not share or share % batch.sequences_per_microbatch == 0:
        return recipe
    fitting = max(each for each in range(1, batch.sequences_per_microbatch + 1) if share % each == 0)
    origins[key] = "follows from the batch and the ranks"
    return replace(recipe, batch=replace(batch, sequences_per_microbatch=fitting))


def _let_ranks_follow(launch: Any, origins: dict[str, str]) -> None:
    """Let `launch.nodes` of the command line override a file's `launch.ranks`, which makes an experiment for one node one for
    two: `experiment=pretrain_gpt2 launch=slurm launch.nodes=2`. Other keys on the command line still have to agree."""
    typed = {key for key in ("launch.nodes", "launch.ranks") if origins.get(key) == COMMAND_LINE}
    if typed == {"launch.nodes"} and isinstance(launch, dict) and launch.get("kind") == "slurm" and launch.get("nodes"):
        launch["ranks"] = None
        origins["launch.ranks"] = "follows from launch.nodes"


def _delete(tree: DictConfig, key: str) -> None:
    """Remove a key, and its group if that is empty then."""
    group, _, name = key.rpartition(".")
    parent = OmegaConf.select(tree, group)
    if isinstance(parent, DictConfig) and name in parent:
        del parent[name]
        if not parent and "." in group:
            _delete(tree, group)


def _default_model(folders: Sequence[Path]) -> Path | None:
    """The file of the model that config.yaml's defaults choose."""
    config = find_file("config", folders)
    tree = OmegaConf.load(config) if config is not None else None
    defaults = tree.get("defaults", []) if isinstance(tree, DictConfig) else []
    names = [entry["model"] for entry in defaults if isinstance(entry, DictConfig) and "model" in entry]
    return find_file(f"model/{names[0]}", folders) if names and names[0] else None


def _value_of(plain: Mapping[str, Any], key: str) -> Any:
    group, _, name = key.rpartition(".")
    values = plain.get(group)
    return values.get(name) if isinstance(values, dict) else None
