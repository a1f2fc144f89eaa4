"""A tied embedding is one parameter, on whichever ranks a table of one's own puts the first and the last stage."""

from dataclasses import replace
from pathlib import Path

import pytest

from framework.recipe.schema import Parallel, Pipeline, Recipe, Zero
from tests.families import family
from tests.ranks.parity import Case, assert_equal, small_recipe
from tests.ranks.pool import RankPool

# One microbatch; the line is the rank. First and last stage on ranks 1 and 2; on 2 and 0; both on 1, of two stages each.
TABLES = {
    "on ranks 1 and 2": "1F0,1B0\n0F0,0B0\n2F0,2B0\n",
    "on ranks 2 and 0": "2F0,2B0\n1F0,1B0\n0F0,0B0\n",
    "both on rank 1": "1F0,4F0,4B0,1B0\n0F0,5F0,5B0,0B0\n2F0,3F0,3B0,2B0\n",
}


def recipe_of(table: Path) -> Recipe:
    recipe = small_recipe("fp64", 3, 1, 6, 0.05, Zero(stage=1), Parallel(pp=3))
    return replace(recipe, pipeline=Pipeline(table=str(table)))


@pytest.mark.parametrize("name", TABLES)
def test_a_table_may_put_the_ends_of_a_tied_model_anywhere(pool: RankPool, tmp_path: Path, name: str) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(TABLES[name])
    changes = {"num_hidden_layers": 6, "tie_word_embeddings": True}
    assert_equal(pool, 3, [Case(name, family("llama"), {name: recipe_of(table)}, changes)])
