"""Training runs of families, with recurrent mixers above all, each in a layout."""

from dataclasses import dataclass, replace
from typing import Any

from framework.recipe.schema import Memory, Parallel, Pipeline, Recipe, Zero
from tests.families import FAMILIES, RECURRENT, SPARSE, STATE_SPACES, Family
from tests.ranks.parity import STAGE_0, Case, small_recipe

# Divides into 1, 2 or 4 data-parallel ranks x 1 or 3 microbatches.
SEQUENCES = 12
Method = str | tuple[int, int]
PLAIN = Memory(compile="never")
SELECTS = Memory(activation_checkpointing="selective", compile="never")
RECOMPUTES = Memory(activation_checkpointing="full", compile="never")


def find(name: str) -> Family:
    return next(each for each in (*RECURRENT, *STATE_SPACES, *FAMILIES, SPARSE) if each.name == name)


@dataclass(frozen=True)
class Way:
    """A training run of a family and how it is laid out. method: parallel.context."""

    family: str
    cp: int = 1
    method: Method = "ring"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence: bool = True
    zero: Zero = STAGE_0
    context: int = 13
    packs: bool = False
    count: int = 1
    memory: Memory = PLAIN
    precision: str = "fp64"
    schedule: str = "1f1b"

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def parallel(self) -> Parallel:
        method: Any = self.method if isinstance(self.method, str) else list(self.method)
        return Parallel(tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, sequence=self.sequence, context=method)

    @property
    def recipe(self) -> Recipe:
        recipe = small_recipe(self.precision, self.world, self.count, SEQUENCES, 0.05, self.zero, self.parallel)
        return replace(
            recipe,
            batch=replace(recipe.batch, context=self.context),
            data=replace(recipe.data, pack="documents" if self.packs else "concat"),
            memory=self.memory,
            pipeline=Pipeline(schedule=self.schedule),  # type: ignore[arg-type]
        )

    def case(self, *, clips: bool = True, **changes: Any) -> Case:
        optim = self.recipe.optim if clips else replace(self.recipe.optim, clip_norm=None)
        return Case(str(self), find(self.family), {"": replace(self.recipe, optim=optim)}, changes)
