"""Tensor-parallel layouts of the whole training step: with ZeRO, data parallelism, accumulation and clipping they are the run
of stock Hugging Face and torch in one process: losses, norms, gradients, weights."""

from itertools import product

import pytest

from framework.recipe.schema import Parallel, Recipe, Zero
from tests.families import family
from tests.ranks.parity import Case, assert_equal, small_recipe
from tests.ranks.pool import RankPool

SEQUENCES = 4


def layouts(precision: str, tps: tuple[int, ...]) -> dict[str, Recipe]:
    """Every degree with and without sequence parallelism, on one and two data-parallel ranks where four suffice, at stages 0,
    1 and 3."""
    ways = [
        (tp, sequence, dp, stage)
        for tp, sequence, dp, stage in product(tps, (True, False), (1, 2), (0, 1, 3))
        if tp * dp <= 4 and (dp > 1 or stage != 1)
    ]
    return {
        f"tp {tp}, dp {dp}, sequence {sequence}, stage {stage}": small_recipe(
            precision, tp * dp, 2, SEQUENCES, 0.05, Zero(stage=stage), Parallel(tp=tp, sequence=sequence)
        )
        for tp, sequence, dp, stage in ways
    }


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_tensor_parallel_training_equals_one_process(pool: RankPool, name: str) -> None:
    cases = [
        Case(f"{name} {tied}", family(name), layouts("fp64", (2,)), {"tie_word_embeddings": tied})
        for tied in (True, False)
    ]
    assert_equal(pool, 4, cases)
