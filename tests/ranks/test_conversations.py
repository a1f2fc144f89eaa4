"""Conversations packed by best fit are the training run of one conversation in each row, in every layout, whatever is trained.

The oracle puts every document into a row of its own, with stock masks and no packing, so its gradients are those of unpacked
conversations. Masks are uneven, and one rank, or one microbatch where there is one rank, has no trained token at all.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from framework.comm.connect import connect
from framework.data.pack import Packer
from framework.data.store import TokenStream
from framework.mesh.topology import Topology
from framework.model.loss import IGNORE
from framework.plan.plan import make_plan
from framework.recipe.derive import derive
from framework.recipe.schema import Parallel, Recipe, Zero
from framework.verify.compare import compare
from framework.verify.evidence import TokenBatch
from framework.verify.layout import run_layout
from tests.families import VOCABULARY, family
from tests.grid import few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, STEPS, Case, assert_equal, expect, small_recipe, worst_error
from tests.ranks.pool import RankPool

SEQUENCES = 12
CONTEXT = 16


@cache
def draw_stream() -> TokenStream:
    """Conversations of 2 to 14 tokens, of which a run inside, the end or nothing is trained."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(2, 15, size=200)
    trained = np.concatenate([(np.arange(length) >= rng.integers(1, length + 1)) for length in lengths])
    tokens = rng.integers(0, VOCABULARY, size=lengths.sum())
    return TokenStream(tokens.astype(np.uint16), np.cumsum(lengths), trained=trained.astype(np.uint8))


@dataclass(frozen=True)
class PackedCase(Case):
    """A case whose batches are packed conversations."""

    def batches(self) -> list[TokenBatch]:
        rows = np.arange(STEPS * SEQUENCES)
        packed = Packer([draw_stream()], CONTEXT, "best_fit", eos_id=0).pack(np.zeros_like(rows), rows)
        assert packed.position_ids is not None
        batches = []
        for step in range(STEPS):
            batch = packed.select(step * SEQUENCES, (step + 1) * SEQUENCES)
            labels = batch.labels.clone()
            for recipe in self.layouts.values():
                derived = derive(recipe)
                b, dp = derived.sequences_per_microbatch, derived.dp
                silent = labels.view(-1, b, CONTEXT)
                (silent[::dp] if dp > 1 else silent[:1]).fill_(IGNORE)
            batches.append(TokenBatch(batch.input_ids.clone(), labels, batch.position_ids[: len(labels)].clone()))
        return batches


def recipe_of(
    name: str, zero: int, tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, dp: int = 1, count: int = 2
) -> Recipe:
    parallel = Parallel(tp=tp, pp=pp, cp=cp, ep=ep)
    recipe = small_recipe("fp64", dp * tp * pp * cp, count, SEQUENCES, None, Zero(stage=zero), parallel)
    return replace(recipe, batch=replace(recipe.batch, context=CONTEXT), data=replace(recipe.data, pack="best_fit"))


def is_legal(name: str, zero: int, tp: int, pp: int, cp: int, ep: int, dp: int) -> bool:
    """Up to four ranks; experts divided among those outside tp."""
    return tp * pp * cp * dp <= 4 and (ep == 1 or (name in ("qwen3_moe", "qwen3_next") and dp * cp % ep == 0))


FAMILIES = ["llama", "gemma3_text", "qwen3_moe", "qwen3_next"]
FACTORS: list[list[Any]] = [FAMILIES, [0, 3], [1, 2], [1, 2], [1, 2], [1, 2], [1, 2]]
ROWS = cover_pairs(FACTORS, is_legal)


@pytest.mark.parametrize("dp", few_of([1, 2], lambda dp: dp == 2))
def test_packed_conversations_train_as_one_in_each_row(pool: RankPool, dp: int) -> None:
    assert_equal(
        pool, dp, [PackedCase("packed", family("llama"), {"": recipe_of("llama", zero=3 if dp > 1 else 0, dp=dp)})]
    )


@pytest.mark.grid
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_any_layout_trains_as_one_in_each_row(pool: RankPool, row: tuple[Any, ...]) -> None:
    recipe = recipe_of(*row)
    assert_equal(pool, recipe.launch.ranks, [PackedCase("packed", family(row[0]), {"": recipe})])


def test_conversations_that_see_each_other_show() -> None:
    """TRL 3728, 6843; axolotl 3453."""
    case = PackedCase("packed", family("llama"), {"": recipe_of("llama", zero=0)})
    mesh = connect(Topology(), CPU)
    plan = make_plan(case.recipe, case.config)
    seen = run_layout(plan, [replace(each, position_ids=None) for each in case.batches()], mesh)
    mesh.close()
    assert worst_error(compare(seen, expect(case))) > 1e-3
