"""Frozen parameters equal one process where their gradients would have started communication, or have asked for other weights.

Beside one process, over gloo; `tests/nccl` has the same freezes on more layouts.
"""

from dataclasses import replace

import pytest

from framework.recipe.schema import Memory, Model, Parallel, Recipe, Zero
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import Case, assert_equal, small_recipe
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

SEQUENCES = 12
Z3 = Zero(stage=3)
REGATHER = Memory(compile="never", gathered_inputs="regather", chunked_loss=False)
SPLIT, STAGES = Parallel(tp=2, sequence=True), Parallel(pp=2)


def recipe(parallel: Parallel, *freeze: str, world: int = 2) -> Recipe:
    found = small_recipe("fp64", world, 2, SEQUENCES, zero=Z3, parallel=parallel)
    return replace(found, memory=REGATHER, model=Model(freeze=list(freeze)))


# Each was a hang, or a process that died of a read in memory that was given back.
LAYOUTS = {
    "a tied head asks nobody for its input": ("embed_tokens", SPLIT, True),
    "backward ends above the layers": ("^(?!lm_head)", SPLIT, False),
    "backward ends in a layer": (r"embed_tokens|layers\.[01]\.", SPLIT, False),
    "the last stage is frozen": (r"layers\.2\.|norm\.weight|lm_head", STAGES, False),
    "the first stage is frozen": (r"embed_tokens|layers\.[01]\.", STAGES, False),
    "all but one norm of the first stage is frozen": (r"^(?!.*layers\.0\.input_layernorm)", STAGES, False),
}


@pytest.mark.parametrize(
    "name", few_of(LAYOUTS, lambda name: "tied" in name or "above" in name or "last stage" in name)
)
def test_a_frozen_layout_equals_one_process(pool: RankPool, name: str) -> None:
    freeze, parallel, tied = LAYOUTS[name]
    # On two replicas, else nothing is sharded.
    layout = recipe(parallel, freeze, world=4)
    assert_equal(pool, 4, [Case(name, family("llama"), {"": layout}, {"tie_word_embeddings": tied})])
