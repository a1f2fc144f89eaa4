"""Identity of a run: the values of the recipe that shaped its weights, and its tokenizer.

Both are recorded in the state of each checkpoint, which is hashed, so that rot and edits of the run's folder do not reach them.
run.json records the whole recipe, of which a part may change from launch to launch.

A recipe.yaml that differs was edited: it is refused, with the recorded values. A tokenizer that is not the recorded one is
copied anew from the token stores, where those have it, and refused where an export would carry it.
"""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from framework.checkpoint.commit import find_newest
from framework.checkpoint.folder import report
from framework.checkpoint.storage import KEY
from framework.data.tokenize import INFO_FILE, hash_file, read_info
from framework.errors import CheckpointError, DamagedStore, RunError
from framework.files import sync_tree
from framework.launch.directory import RunDirectory
from framework.launch.places import explain_errors
from framework.lease import Lease
from framework.recipe.compose import load_recipe
from framework.recipe.convert import to_recipe
from framework.recipe.keys import NAME, flatten, list_keys, matches, nest, plain
from framework.recipe.problem import render_problems, show
from framework.recipe.schema import Recipe
from framework.recipe.stages import stage_of

# Patterns of the keys that a resume may change, each with the reason why the run stays the same run.
MAY_CHANGE = (
    ("train.steps", "more steps; a schedule that ends with the run stretches with it"),
    ("train.epochs", "the same, in passes over the text"),
    ("train.stages.*.memory*", "the same values in other memory"),
    ("train.stages.*.batch.sequences_per_microbatch", "sums in another grouping"),
    ("train.validat*", "looks at the weights, does not change them"),
    ("train.sample", "reads the finished weights"),
    ("train.on_spike", "how spikes are met from here on"),
    ("train.max_rewinds", "the same"),
    ("train.divergence_check_steps", "looks at the weights, does not change them"),
    ("batch.sequences_per_microbatch", "sums in another grouping"),
    ("parallel.*", "every layout is the same training run"),
    ("pipeline.*", "every cut and every schedule is the same training run"),
    ("zero.*", "every layout is the same training run"),
    ("memory.*", "the same values in other memory"),
    ("launch.*", "where it runs"),
    ("cluster.*", "the machine of its forecasts"),
    ("checkpoint.*", "how often it saves; not checkpoint.root: that is noted in the run's folder"),
    ("eval.*", "looks at the weights, does not change them"),
    ("track.*", "who watches"),
    ("data.root", "where the token stores lie; their fingerprints say what is in them"),
    ("plugins", "where their code lies; run.json has the version of each at each launch"),
    ("data.cache_gb", "how much of them a node keeps"),
    ("run.*", "the directory, which names itself"),
)
ABSENT = "(not set)"
# Keys that are not recorded: the place of the folder, and values that may be secret.
UNRECORDED = ("run.*", "launch.environment", "launch.environment.*")

Values = Mapping[str, Any]


def may_change(key: str) -> bool:
    """Whether a resume may set another value of a key."""
    return key != KEY and any(matches(key, pattern) for pattern, _ in MAY_CHANGE)


def values_of(recipe: Recipe) -> dict[str, Any]:
    """Values of a recipe by key, in the form in which they are recorded."""
    values = flatten(plain(asdict(recipe)))
    return {key: each for key, each in values.items() if not any(matches(key, pattern) for pattern in UNRECORDED)}


def fixed(values: Values) -> dict[str, Any]:
    """Values of keys that cannot change within a run."""
    return {key: value for key, value in values.items() if not may_change(key) and key != KEY}


def hash_tokenizer(folder: Path) -> str:
    """A hash of the info.json of a kept tokenizer, which has those of its other files; empty where there is none."""
    info = folder / INFO_FILE
    return hash_file(info) if info.is_file() else ""


def describe_identity(run: RunDirectory, recipe: Recipe) -> dict[str, Any]:
    """The record for run.json of a launch that has written recipe.yaml and the tokenizer."""
    return {"recipe": values_of(recipe), "tokenizer": hash_tokenizer(run.tokenizer)}


def read_recorded(run: RunDirectory, state: Values | None = None) -> dict[str, Any]:
    """{recipe, tokenizer} as recorded in run.json and in the state of a checkpoint, which wins. state None: the newest whole
    checkpoint's, if there is one. Raises StorageError."""
    if state is None:
        state = {}
        with suppress(CheckpointError):  # `saved_step` says so
            manifest = find_newest(run.checkpoints).manifest
            state = {} if manifest is None else manifest.state
    record = run.find_record()
    return {
        "recipe": record.get("recipe", {}) | state.get("recipe", {}),
        "tokenizer": state.get("tokenizer") or record.get("tokenizer", ""),
    }


def find_edits(recorded: Values, now: Values) -> dict[str, tuple[Any, Any]]:
    """(value now, recorded value) of the keys in which they differ; nothing where nothing was recorded. A key without a record
    belongs to a later version, if it has its default."""
    kinds = {may_change(key) for key in recorded}  # a checkpoint records one of the two
    added = [key for key in now if key not in recorded and may_change(key) in kinds and not _is_default(key, now[key])]
    keys = [*recorded, *added]
    pairs = {key: (now.get(key, ABSENT), recorded.get(key, ABSENT)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def refuse_edits(run: RunDirectory, edits: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises RunError, with the recorded values, where there are edits."""
    if not edits:
        return
    table = [
        f"  {key}: it has {show(found)}, the run has trained with {show(true)}" for key, (found, true) in edits.items()
    ]
    fix = " ".join(f"{key}={show(true)}" for key, (_, true) in edits.items() if true != ABSENT)
    raise RunError(
        "\n".join(
            [
                f"{run.recipe} was edited or damaged since a launch has written it, or {run.record.name}, which records it:",
                *table,
                f"restore these values in the file, or give them to the resume: {fix}",
                "what may change within a run is changed on the command line of a resume",
            ]
        )
    )


def load_own_recipe(run: RunDirectory) -> Recipe:
    """The recipe of a run as its launches wrote it. Raises RunError where it was edited since."""
    recipe = load_recipe(run.recipe)
    refuse_edits(run, find_edits(run.find_record().get("recipe", {}), values_of(recipe)))
    return recipe


def read_trained(state: Values) -> Recipe:
    """The recipe that has trained a checkpoint with this state, as far as it is recorded: that of its stage. Keys that may change
    within a run have their defaults. Raises RunError where the record is of another version of the schema."""
    # Plugins are not recorded: names that they have added are taken as they are.
    recipe, problems = to_recipe(nest(state["recipe"]) | {"plugins": ["unrecorded"]}, {})
    if problems:
        raise RunError(f"the recipe that step {state['step']:,} records cannot be read:\n{render_problems(problems)}")
    return stage_of(recipe, state["step"]).recipe


def verify_identity(run: RunDirectory, recipe: Recipe, state: Values) -> None:
    """Raises RunError or DamagedStore where the recipe or the tokenizer is not that of a checkpoint with this state. For
    readers of a run, such as an export."""
    recorded = read_recorded(run, state)
    refuse_edits(run, find_edits(fixed(recorded["recipe"]), fixed(values_of(recipe))))
    refuse_other_tokenizer(run, recorded["tokenizer"])


def refuse_other_tokenizer(run: RunDirectory, recorded: str) -> None:
    """Raises DamagedStore where the run's tokenizer has changed since it was copied, by the record or, without one, by itself."""
    if (read_info(run.tokenizer) is None and recorded) or (recorded and hash_tokenizer(run.tokenizer) != recorded):
        raise DamagedStore(
            f"{run.tokenizer / INFO_FILE} is missing, or is not that of the tokenizer which the run has trained with: put that"
            " one back from data.root; a resume does so where data.root has it"
        )


def settle_identity(run: RunDirectory, lease: Lease, recipe: Recipe, state: Values, source: Path) -> dict[str, Any]:
    """Record of a start in its checkpoints; called on rank 0. state: the state of the checkpoint from which it goes on, or
    empty. source: the tokenizer of the token stores. Raises RunError where recipe.yaml was edited. A damaged tokenizer is
    copied anew, or refused."""
    recorded = read_recorded(run, state)
    if run.recipe.is_file():
        refuse_edits(run, find_edits(recorded["recipe"], values_of(load_recipe(run.recipe))))
    try:
        refuse_other_tokenizer(run, recorded["tokenizer"])
    except DamagedStore as damage:
        if hash_tokenizer(source) != recorded["tokenizer"]:
            raise
        keep_tokenizer(run, lease, source)
        report(f"copied anew from {source}, as it was damaged: {damage}")
    return {"recipe": fixed(values_of(recipe)), "tokenizer": hash_tokenizer(run.tokenizer)}


def keep_tokenizer(run: RunDirectory, lease: Lease, tokenizer: Path) -> None:
    """Copy the tokenizer into the run's folder, in place of one that never trained."""
    with explain_errors(run.path), lease.replacing(run.tokenizer) as made:
        shutil.copytree(tokenizer, made)
        sync_tree(made)


def _is_default(key: str, value: Any) -> bool:
    is_known = (matches(key, each.path.replace(NAME, "*")) and plain(each.default) == value for each in list_keys())
    return value == {} or any(is_known)
