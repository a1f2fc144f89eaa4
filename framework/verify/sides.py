"""The two sides of a verification, run from one description."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from transformers import PretrainedConfig

from framework.errors import ModelError
from framework.model.precision import DTYPES
from framework.recipe.schema import Recipe
from framework.verify.evidence import Evidence, initial_weights, perturb
from framework.verify.layout import is_followed
from framework.verify.oracle import run_oracle
from framework.verify.rank import Ranks, make_run_batches, running_ranks
from framework.verify.small import PRECISIONS


@dataclass(frozen=True)
class Sides:
    """The description of a run that the layout and the oracle train alike.

    recipe: with all of its precision's words explicit. num_steps: how many of its train.steps are run.
    """

    recipe: Recipe
    config: PretrainedConfig
    num_steps: int

    @property
    def dtype(self) -> str:
        return self.recipe.precision.compute

    def in_dtype(self, dtype: str) -> "Sides":
        """The same run in another precision. There is no grouped matmul in fp64."""
        experts = "auto" if self.recipe.model.experts == "grouped_mm" and dtype == "fp64" else self.recipe.model.experts
        model = replace(self.recipe.model, experts=experts)
        return replace(self, recipe=replace(self.recipe, precision=PRECISIONS[dtype], model=model))

    def run(self) -> tuple[Evidence, Evidence]:
        """(evidence of the layout, of the oracle), run side by side unless the oracle follows the layout.

        Raises RankFailed, or the MeshwrightError that a rank raised.
        """
        with (
            tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder,
            running_ranks(self.recipe, self.config, self.num_steps, Path(folder)) as ranks,
        ):
            return self._follow(ranks) if is_followed(self.recipe) else self._run_beside(ranks)

    def run_oracle(self, layout: Evidence | None, seed: int | None = None) -> Evidence:
        """Evidence of the oracle. seed: perturbs its initial weights. layout: evidence of the layout that it follows."""
        weights = initial_weights(self.config, self.recipe.train.seed)
        dtype = DTYPES[self.dtype]
        if seed is not None:
            wide = torch.promote_types(dtype, torch.float32)
            weights = {name: perturb(weight.to(wide), dtype, seed) for name, weight in weights.items()}
        batches = make_run_batches(self.recipe, self.config, self.num_steps)
        by_step = () if layout is None else layout.by_step
        try:
            return run_oracle(self.recipe, self.config, weights, batches, dtype, self.device, by_step)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ModelError(
                f"there is nothing to compare with: stock transformers {transformers.__version__} does not train the"
                f" {self.config.model_type} in {self.dtype}: {error}"
            ) from error

    @property
    def device(self) -> torch.device:
        """The oracle's device."""
        return torch.device("cuda", 0) if self.recipe.launch.device == "cuda" else torch.device("cpu")

    def _follow(self, ranks: Ranks) -> tuple[Evidence, Evidence]:
        found = ranks.wait()
        return found, self.run_oracle(found)

    def _run_beside(self, ranks: Ranks) -> tuple[Evidence, Evidence]:
        expected = self.run_oracle(None)
        return ranks.wait(), expected
