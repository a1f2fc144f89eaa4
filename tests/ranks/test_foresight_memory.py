"""What is foretold of memory is what ranks of this machine hold: `scripts/bench/foresight_memory.py` on a few layouts."""

import pytest

from framework.recipe.schema import Batch, Launch, Memory, Model, Parallel, Pipeline, Precision, Recipe, Zero
from scripts.bench.foresight_memory import WIDTHS, count_layouts, draw_recipe
from tests.grid import IN_TURN, few_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN


def recipe_of(compute: str, policy: str, schedule: str, parallel: Parallel) -> Recipe:
    return Recipe(
        batch=Batch(sequences_per_step=8, sequences_per_microbatch=2, context=128),
        model=Model(family="llama", config=WIDTHS | {"num_hidden_layers": 4, "tie_word_embeddings": False}),
        precision=Precision(compute=compute),  # type: ignore[arg-type]
        memory=Memory(policy, chunked_loss=False, compile="never"),  # type: ignore[arg-type]
        parallel=parallel,
        pipeline=Pipeline(schedule=schedule),  # type: ignore[arg-type]
        zero=Zero(stage=1),
        launch=Launch(ranks=parallel.tp * parallel.pp, device="cpu", threads_per_rank=1),
    )


LAYOUTS = {
    "tp": recipe_of("bf16", "selective", "1f1b", Parallel(tp=2)),
    "pp": recipe_of("fp32", "none", "zb_h1", Parallel(pp=2)),
}


@pytest.mark.parametrize("name", few_of(LAYOUTS, lambda name: name == "tp"))
def test_states_are_equal_and_activations_within_three_percent(pool: RankPool, name: str) -> None:
    for found in count_layouts([LAYOUTS[name]], pool):
        assert found.are_states_equal, found
        assert found.ratio == pytest.approx(1, abs=0.03), found


@pytest.mark.grid
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("first", range(0, 40, 5))
def test_random_layouts_hold_what_is_foretold(pool: RankPool, first: int, seed: int) -> None:
    recipes = [draw_recipe(seed, number) for number in range(first, first + 5)]
    for found in count_layouts(recipes, pool):
        assert found.are_states_equal, found
        assert found.ratio == pytest.approx(1, abs=0.03), found
