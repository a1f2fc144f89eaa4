"""The options of `meshwright verify`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from framework.errors import RecipeError


@dataclass(frozen=True)
class Options:
    """model_config: a Hugging Face config.json in place of the recipe's model. dtype: fp64, fp32, bf16, fp16, fp8; None: fp32, or
    under `strict` the recipe's. ranks None: as many as the layout needs. strict: leave nothing of the recipe out."""

    model_config: Path | None = None
    dtype: Literal["fp64", "fp32", "bf16", "fp16", "fp8"] | None = None
    steps: int = 3
    ranks: int | None = None
    device: Literal["cpu", "cuda"] = "cpu"
    strict: bool = False

    def check(self) -> None:
        """Raise RecipeError for options that cannot be met, before any rank starts."""
        if self.steps < 1:
            raise RecipeError(f"--steps {self.steps}: at least one step is needed to compare anything")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise RecipeError("--device cuda: torch sees no GPU here; leave it out to verify on CPU ranks")
        given = {"--model-config": self.model_config, "--dtype": self.dtype, "--ranks": self.ranks}
        contrary = [name for name, value in given.items() if value is not None]
        if self.strict and contrary:
            raise RecipeError(
                f"--strict verifies the recipe as it is, and {', '.join(contrary)} would change it: set the recipe's own keys"
                " instead (model.config, precision.compute, launch.ranks)"
            )
