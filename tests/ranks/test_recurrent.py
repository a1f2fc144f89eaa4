"""Recurrent mixers whose sequences ranks divide, or whose heads: the training run of stock transformers in one process."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from framework.recipe.schema import Memory, Parallel, Zero
from tests.families import RECURRENT, Family
from tests.ranks.parity import STAGE_0, Case, assert_equal, small_recipe
from tests.ranks.pool import RankPool

SEQUENCES = 12


def find(name: str) -> Family:
    return next(each for each in RECURRENT if each.name == name)


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
    def case(self) -> Case:
        parallel = Parallel(tp=self.tp, pp=self.pp, cp=self.cp, ep=self.ep, sequence=self.sequence, context=self.method)
        recipe = small_recipe("fp64", self.world, self.count, SEQUENCES, 0.05, self.zero, parallel)
        recipe = replace(
            recipe,
            batch=replace(recipe.batch, context=self.context),
            data=replace(recipe.data, pack="documents" if self.packs else "concat"),
            memory=Memory(compile="never", activation_checkpointing=self.checkpointing),  # type: ignore[arg-type]
        )
        return Case(str(self), find(self.family), {"": recipe})


# Each mechanism once: pieces on two ranks and on four, by either method, documents that span them, recomputation.
SHOWN = (
    Way("qwen3_5_text", 2, packs=True),
    Way("lfm2", 2, "ulysses", packs=True, checkpointing="full"),
)
MORE = (
    *(Way(each.name, 2) for each in RECURRENT),
    Way("kimi_linear", 4, [2, 2], packs=True, context=16),
    Way("olmo_hybrid", 4, context=10),  # pieces shorter than a window
    Way("qwen3_next", 1, dp=2, packs=True),
)


@pytest.mark.parametrize("ways", [SHOWN, pytest.param(MORE, marks=pytest.mark.grid)], ids=["few", "more"])
def test_mixers_of_divided_sequences_equal_one_process(pool: RankPool, ways: tuple[Way, ...]) -> None:
    assert_equal(pool, max(way.world for way in ways), [way.case for way in ways])
