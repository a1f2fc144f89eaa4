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
from framework.verify.rank import Ranks, draw_batches, running_ranks
from framework.verify.small import PRECISIONS


@dataclass(frozen=True)
class Sides:
    """recipe: the one that is run, all of its precision's words explicit; num_steps: of its train.steps, from the first."""

    recipe: Recipe
    config: PretrainedConfig
    num_steps: int

    @property
    def dtype(self) -> str:
        return self.recipe.precision.compute

    def in_dtype(self, dtype: str) -> "Sides":
        """The same run in another precision. Grouped products do not exist in fp64."""
        experts = "auto" if self.recipe.model.experts == "grouped_mm" and dtype == "fp64" else self.recipe.model.experts
        model = replace(self.recipe.model, experts=experts)
        return replace(self, recipe=replace(self.recipe, precision=PRECISIONS[dtype], model=model))

    def run(self) -> tuple[Evidence, Evidence]:
        """(the layout's evidence, the oracle's), side by side unless the oracle follows the layout. RankFailed, or the
        MeshwrightError that a rank raised."""
        with (
            tempfile.TemporaryDirectory(prefix="meshwright-verify-") as folder,
            running_ranks(self.recipe, self.config, self.num_steps, Path(folder)) as ranks,
        ):
            return self._follow(ranks) if is_followed(self.recipe) else self._run_beside(ranks)

    def run_oracle(self, layout: Evidence | None, seed: int | None = None) -> Evidence:
        """The oracle, from weights that are rounded otherwise if there is a seed. layout: to be followed."""
        weights = initial_weights(self.config, self.recipe.train.seed)
        dtype = DTYPES[self.dtype]
        if seed is not None:
            wide = torch.promote_types(dtype, torch.float32)
            weights = {name: perturb(weight.to(wide), dtype, seed) for name, weight in weights.items()}
        batches = draw_batches(self.recipe, self.config, self.num_steps)
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
        """The oracle's."""
        return torch.device("cuda", 0) if self.recipe.launch.device == "cuda" else torch.device("cpu")

    def _follow(self, ranks: Ranks) -> tuple[Evidence, Evidence]:
        found = ranks.wait()
        return found, self.run_oracle(found)

    def _run_beside(self, ranks: Ranks) -> tuple[Evidence, Evidence]:
        expected = self.run_oracle(None)
        return ranks.wait(), expected
