"""Training runs of families, with recurrent mixers above all, each in a layout."""

from dataclasses import dataclass, replace
from typing import Any

from framework.recipe.schema import Memory, Parallel, Recipe, Zero
from tests.families import FAMILIES, RECURRENT, STATE_SPACES, Family
from tests.ranks.parity import STAGE_0, Case, small_recipe

SEQUENCES = 12


def find(name: str) -> Family:
    return next(each for each in (*RECURRENT, *STATE_SPACES, *FAMILIES) if each.name == name)


@dataclass(frozen=True)
class Way:
    """A training run of a family and how it is laid out."""

    family: str
    cp: int = 1
    method: Any = "ring"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence: bool = True
    zero: Zero = STAGE_0
    context: int = 13
    packs: bool = False
    count: int = 1
    checkpointing: str = "none"

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def recipe(self) -> Recipe:
        parallel = Parallel(tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, sequence=self.sequence, context=self.method)
        recipe = small_recipe("fp64", self.world, self.count, SEQUENCES, 0.05, self.zero, parallel)
        return replace(
            recipe,
            batch=replace(recipe.batch, context=self.context),
            data=replace(recipe.data, pack="documents" if self.packs else "concat"),
            memory=Memory(compile="never", activation_checkpointing=self.checkpointing),  # type: ignore[arg-type]
        )

    def case(self, *, clips: bool = True) -> Case:
        optim = self.recipe.optim if clips else replace(self.recipe.optim, clip_norm=None)
        return Case(str(self), find(self.family), {"": replace(self.recipe, optim=optim)})
