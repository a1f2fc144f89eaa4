"""Tensor, sequence and vocabulary parallelism: a split model's loss and gradients are the whole one's, within 1e-9 in fp64."""

from collections.abc import Sequence

import pytest

from tests.families import FAMILIES, Family
from tests.ranks.pool import RankPool
from tests.ranks.tensor_parity import TensorCase, compare_cases

TOLERANCE = 1e-9
# Stock code that has no fp64: xglm puts fp64's lowest number into an fp32 tensor.
WITHOUT_FP64 = ("xglm",)
# Where the tiny configuration's heads do not divide by 4.
CHANGES = {
    "falcon": {"hidden_size": 32, "num_attention_heads": 8},
    "codegen": {"n_head": 16, "n_embd": 64},
    "diffllama": {"num_attention_heads": 8},
    "qwen3_next": {"linear_num_key_heads": 4},
}
NUM_BATCHES = 6


def errors(pool: RankPool, cases: Sequence[TensorCase]) -> dict[str, float]:
    """The worst error of each case on any rank."""
    worst: dict[str, float] = {}
    for of_rank in pool.run(4, compare_cases, cases, timeout_s=300):
        for name, error in of_rank.items():
            worst[name] = max(error, worst.get(name, 0.0))
    assert len(worst) == len(cases)
    return worst


def assert_equal(pool: RankPool, cases: Sequence[TensorCase]) -> None:
    failed = {name: error for name, error in errors(pool, cases).items() if not error < TOLERANCE}
    assert not failed


@pytest.mark.parametrize("batch", range(NUM_BATCHES))
def test_every_family_split_equals_whole(pool: RankPool, batch: int) -> None:
    families: list[Family] = [each for each in FAMILIES if each.name not in WITHOUT_FP64][batch::NUM_BATCHES]
    assert_equal(
        pool,
        [
            TensorCase(each, tp, sequence, CHANGES.get(each.name, {}))
            for each in families
            for tp, sequence in ((2, False), (4, True))
        ],
    )
