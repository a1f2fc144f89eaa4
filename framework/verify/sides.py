"""Both sides of a verification, layout and oracle, run from one description; and what they leave out of the user's recipe.

Left out is every key that differs, and keys that no step reads. They are found by comparing the recipe and the model's config
with those that are run, key by key, so that nothing that is made small or reset can be forgotten here.
"""

import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from framework.model.loss import Loss
from framework.model.objective import LOSSES, Statistics
from framework.model.precision import DTYPES
from framework.optim.groups import learning_rate
from framework.optim.update_rules import OPTIMIZERS
from framework.parallel.attention.pieces import ONE_RANK
from framework.parallel.tensor.regions import DRAWING_MODULES
from framework.recipe.derive import compiles, derive
from framework.recipe.keys import flatten, plain
from framework.recipe.plugins import added_names
from framework.recipe.problem import show
from framework.recipe.schema import LossSettings, Precision, Recipe
from framework.verify.evidence import IGNORE, Evidence, PluginForms, perturb
from framework.verify.layout import initial_weights, is_followed, make_run_batches, run_rank
from framework.verify.oracle import run_oracle
from framework.verify.pool import RankFailed, RankPool

# Keyed by `--dtype`: compute, master and reduce.
PRECISIONS = {
    "fp64": Precision("fp64", "fp64", "fp64"),
    "fp32": Precision("fp32", "fp32", "fp32"),
    "bf16": Precision("bf16", "fp32", "fp32"),
    "fp8": Precision("fp8", "fp32", "fp32"),
    # Far from an overflow, after which there would be nothing to compare, and enough for gradients of few tokens.
    "fp16": Precision("fp16", "fp32", "fp32", loss_scale=1024.0),
}
# The module that ranks need, imported once for all of them.
PRELOAD = run_rank.__module__


def find_forms(recipe: Recipe) -> PluginForms:
    """The forms of the recipe's optimizer, loss and schedule that plugins have added."""
    optim, forms = recipe.optim, PluginForms()
    if optim.name in added_names("optimizer"):
        forms = replace(forms, optimizer=partial(OPTIMIZERS[optim.name].make, optim))
    if recipe.loss.name in added_names("loss"):
        forms = replace(forms, loss=partial(_sum_losses, recipe.loss))
    if optim.schedule.name in added_names("schedule"):
        steps = recipe.train.steps
        forms = replace(forms, rate=lambda step: learning_rate(step, optim.schedule, optim.lr, steps))
    return forms


def _sum_losses(settings: LossSettings, logits: Tensor, labels: Tensor) -> Tensor:
    statistics = Statistics(cast(Loss, _WholeHead()), logits, labels, None, ONE_RANK)
    return LOSSES[settings.name].compute(statistics, settings).loss


class _WholeHead:
    """A head whose logits are all here, as far as a plugin's loss asks it."""

    def of_tokens(self, logits: Tensor, labels: Tensor) -> Tensor:
        """-log p of each label: [B, T]."""
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")


@dataclass(frozen=True)
class Sides:
    """One training run, to be done by the layout and by the oracle."""

    # Its precision has no `auto`.
    recipe: Recipe
    config: PretrainedConfig
    # The number of train.steps that are run.
    num_steps: int
    # Ranks that run the layout; None: processes of its own.
    pool: RankPool | None = None
    # Time after which ranks count as hung.
    timeout_s: float | None = None

    @property
    def dtype(self) -> str:
        return self.recipe.precision.compute

    def in_dtype(self, dtype: str) -> "Sides":
        """The same run in another precision. There is no grouped matmul in fp64."""
        experts = "auto" if self.recipe.model.experts == "grouped_mm" and dtype == "fp64" else self.recipe.model.experts
        model = replace(self.recipe.model, experts=experts)
        own = self.recipe.precision
        precision = replace(PRECISIONS[dtype], fp8_scaling=own.fp8_scaling, moments=own.moments)
        return replace(self, recipe=replace(self.recipe, precision=precision, model=model))

    def has_steps_of(self, other: "Sides") -> bool:
        """Whether no step of the two differs."""
        return self.config.to_dict() == other.config.to_dict() and not find_changes(self.recipe, other.recipe, {})

    def run(self) -> tuple[Evidence, Evidence]:
        """(evidence of the layout, of the oracle), run side by side unless the oracle follows the layout.

        Raises RankFailed, or the MeshwrightError of a rank if that explains why each rank failed that did.
        """
        with self._running_ranks() as pool:
            if is_followed(self.recipe):
                try:
                    found = self._collect(pool)
                except RankFailed:
                    # A model that stock transformers does not train either is no fault of the layout: this raises
                    # NothingToCompare.
                    self.run_oracle(None)
                    raise
                return found, self.run_oracle(found)
            expected = self.run_oracle(None)
            return self._collect(pool), expected

    def run_oracle(self, layout: Evidence | None, seed: int | None = None) -> Evidence:
        """Evidence of the oracle. seed: perturbs its initial weights. layout: evidence of the layout that it follows."""
        weights = initial_weights(self.config, self.recipe.train.seed, self.device, self.recipe.adapter)
        dtype = DTYPES[self.dtype]
        if seed is not None:
            wide = torch.promote_types(dtype, torch.float32)
            weights = {name: perturb(weight.to(wide), dtype, seed) for name, weight in weights.items()}
        batches = make_run_batches(self.recipe, self.config, self.num_steps)
        return run_oracle(
            self.recipe, self.config, weights, batches, dtype, self.device, layout, find_forms(self.recipe)
        )

    @property
    def device(self) -> torch.device:
        """The oracle's device."""
        return torch.device("cuda", 0) if self.recipe.launch.device == "cuda" else torch.device("cpu")

    @contextmanager
    def _running_ranks(self) -> Iterator[RankPool]:
        """Ranks that run the layout while this context lives; leaving it ends what still runs."""
        world = derive(self.recipe).world
        pool = self.pool or RankPool(world, PRELOAD)
        try:
            pool.start(world, run_rank, self.recipe, self.config, self.num_steps)
            yield pool
        finally:
            if self.pool is None:
                pool.close()
            else:
                pool.drop()

    def _collect(self, pool: RankPool) -> Evidence:
        try:
            return pool.collect(self.timeout_s)[0]
        except RankFailed as error:
            if error.explanation is not None:
                raise error.explanation from None
            raise


# --- what is left out

# Never run, whatever they say: a verification trains a few steps on random tokens.
NOT_RUN = (
    "data.* but data.pack, model.tokenizer, model.revision, and the answers of a loss.reference but base (random ones instead)",
    "train.validate_every_steps, train.validation_sequences, train.sample, pipeline.fill_bubbles and eval.* (nothing is"
    " validated or scored)",
    "train.on_spike, train.max_rewinds and train.divergence_check_steps (no step is judged by those before)",
    "checkpoint.*, track.*, launch.*, cluster.*, run.* (nothing is saved, reported, planned or submitted)",
)
# The keys that NOT_RUN names, as a pattern, and the length of a run, of which --steps are compared.
NO_PART_OF_A_STEP = (
    r"data\.(?!pack$).*|(eval|checkpoint|track|launch|cluster|run)\..*|model\.(tokenizer|revision)|pipeline\.fill_bubbles"
    r"|train\.(steps|epochs|valid.*|sample|on_spike|max_rewinds|divergence_check_steps)"
)
# Keys of a Hugging Face config that are no property of the model, or that `precision` decides.
NO_PART_OF_A_MODEL = ("dtype", "transformers_version", "architectures", "_name_or_path", "id2label", "label2id")
# Reported with a reason, so that a dropout that is off does not hide among thirty sizes.
DROPOUT = r".*(dropout|pdrop|layerdrop|jitter_noise).*"
DRAWN = "drawn per microbatch, which the oracle cannot repeat"
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
    return [
        ChangedValue(f"model.config.{key}", value, 0.0, DRAWN)
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


def describe_changes(changes: list[ChangedValue], steps: int) -> str:
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
