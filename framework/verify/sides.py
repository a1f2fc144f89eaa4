"""Both sides of a verification, layout and oracle, run from one description."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PretrainedConfig

from framework.model.loss import Loss
from framework.model.objective import LOSSES, Statistics
from framework.model.precision import DTYPES
from framework.optim.groups import learning_rate
from framework.optim.update_rules import OPTIMIZERS
from framework.parallel.attention.pieces import ONE_RANK
from framework.recipe.derive import derive
from framework.recipe.plugins import added_names
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
