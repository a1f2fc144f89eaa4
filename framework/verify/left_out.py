"""The parts of a user's recipe that a verification leaves out: every key that differs, and keys that no step reads.

They are found by comparing the recipe and the model's config with those that are run, key by key, so that nothing that is made
small or reset can be forgotten here.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import nn
from transformers import PretrainedConfig

from framework.parallel.tensor.regions import DRAWING_MODULES
from framework.recipe.derive import compiles, derive
from framework.recipe.keys import flatten, plain
from framework.recipe.problem import show
from framework.recipe.schema import Recipe

# Never run, whatever they say: a verification trains a few steps on random tokens.
NOT_RUN = (
    "data.* but data.pack (random tokens instead)",
    "train.validate_every_steps, train.validation_sequences, train.sample and pipeline.fill_bubbles (nothing is validated)",
    "checkpoint.*, track.*, launch.*, run.* (nothing is saved, reported or submitted)",
)
# The keys that NOT_RUN names, as a pattern, and train.steps, of which --steps are compared.
NO_PART_OF_A_STEP = (
    r"data\.(?!pack$).*|(checkpoint|track|launch|run)\..*|train\.(steps|valid.*|sample)|pipeline\.fill_bubbles"
)
# Keys of a Hugging Face config that are no property of the model, or that `precision` decides.
NO_PART_OF_A_MODEL = ("dtype", "transformers_version", "architectures", "_name_or_path", "id2label", "label2id")
# Reported with a reason, so that a dropout that is off does not hide among thirty sizes.
DROPOUT = r".*(dropout|pdrop|layerdrop|jitter_noise).*"
# Dtypes for which no fixed tolerance fits all models, the least precise first.
NARROW = ("fp8", "bf16", "fp16")
WIDTH = 118


@dataclass(frozen=True)
class ChangedValue:
    """One key of the recipe, or of model.config, that is run with another value. reason: "" for a size."""

    key: str
    before: Any
    after: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.key} {_brief(self.before)} -> {_brief(self.after)}" + (f": {self.reason}" if self.reason else "")


def find_changes(recipe: Recipe, run: Recipe, reasons: Mapping[str, str]) -> list[ChangedValue]:
    """Keys of the recipe that have another value in `run`, leaving out those that no step reads."""
    changes = []
    for change in _compare(*(asdict(_resolve(each)) for each in (recipe, run))):
        if not re.fullmatch(NO_PART_OF_A_STEP, change.key):
            found = (word for word in reasons if f"{change.key}.".startswith(f"{word}."))
            changes.append(replace(change, reason=reasons.get(next(found, ""), "")))
    return changes


def find_config_changes(original: PretrainedConfig, run: PretrainedConfig) -> list[ChangedValue]:
    """Keys of the Hugging Face config that have another value in `run`."""
    return [
        replace(
            change,
            key=f"model.config.{change.key}",
            reason="drawn per microbatch" if _is_dropout(change.key) else "",
        )
        for change in _compare(original.to_dict(), run.to_dict())
        if change.key.partition(".")[0] not in NO_PART_OF_A_MODEL
    ]


def _compare(original: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[ChangedValue]:
    """Leaves of two trees that differ, by dotted key."""
    before, after = flatten(plain(original)), flatten(plain(run))
    for key in (*before, *(after.keys() - before.keys())):
        if before.get(key) != after.get(key):
            yield ChangedValue(key, before.get(key), after.get(key), "")


def find_dropout(config: PretrainedConfig) -> list[ChangedValue]:
    """Dropout and noise that are switched on: the oracle cannot repeat the layout's random numbers."""
    reason = "drawn per microbatch, which the oracle cannot repeat"
    return [
        ChangedValue(f"model.config.{key}", value, 0.0, reason)
        for key, value in flatten(plain(config.to_dict())).items()
        if _is_dropout(key) and isinstance(value, float) and value > 0
    ]


def find_lots(model: nn.Module, dtype: str) -> list[str]:
    """Reasons why a model cannot be verified in `dtype`: its routers draw lots among equal scores. Empty where it can.

    In fp32 and fp64 a token's scores are hardly ever equal, and a single highest one is what is drawn. In 16 bits some are: then
    another expert gets the token, and a router that has no gradient without equal scores has one. Another layout has equal
    scores at other tokens, because it rounds otherwise; so equal random numbers on both sides would not make them agree.
    """
    drawing = sorted({type(module).__name__ for module in model.modules()} & {*DRAWING_MODULES})
    if not drawing or dtype not in NARROW:
        return []
    return [
        f"precision.compute={dtype}: {', '.join(drawing)} draws lots among experts of equal scores, which {dtype} makes of scores"
        " that differ by its rounding: two right runs part. Verify it in fp32 or fp64"
    ]


def describe(changes: list[ChangedValue], steps: int) -> str:
    """Changes as text: sizes in one paragraph, then each change that has a reason, then what is never run."""
    sizes = [change for change in changes if not change.reason]
    config = ", ".join(str(change).removeprefix("model.config.") for change in sizes if change.key.startswith("model."))
    others = ", ".join(str(change) for change in sizes if not change.key.startswith("model."))
    paragraphs = [f"sizes: {others}"] if others else []
    paragraphs += [f"sizes of model.config: {config}"] if config else []
    paragraphs += [str(change) for change in changes if change.reason]
    paragraphs += [f"all but {steps} step{'s' if steps > 1 else ''}; {'; '.join(NOT_RUN)}"]
    return "\n".join(
        textwrap.fill(each, WIDTH, initial_indent=f"{'left out' if number == 0 else '':14}", subsequent_indent=" " * 16)
        for number, each in enumerate(paragraphs)
    )


def _resolve(recipe: Recipe) -> Recipe:
    """The recipe with one form for keys that can state the same in two ways."""
    derived = derive(recipe)
    compile_: Literal["always", "never"] = "always" if compiles(recipe) else "never"
    return replace(
        recipe,
        parallel=replace(recipe.parallel, dp=derived.dp),
        batch=replace(recipe.batch, sequences_per_step=derived.sequences_per_step, tokens_per_step=None),
        memory=replace(recipe.memory, compile=compile_),
    )


def _is_dropout(key: str) -> bool:
    return re.fullmatch(DROPOUT, key.rpartition(".")[2]) is not None


def _brief(value: Any) -> str:
    if isinstance(value, list) and len(value) > 4:
        return f"[{len(value)} values]"
    return "nothing" if value is None else show(value)
