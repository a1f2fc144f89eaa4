"""Layouts with expert parallelism are the training run of stock Hugging Face and torch in one process: losses with the routers'
term, every gradient, norms, weights, wherever the experts are and however unevenly tokens choose them.

The product of families, meshes, ZeRO, accumulation and the rest is too large: in the grid any two of their values meet.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from framework.recipe.schema import Memory, Parallel, Pipeline, Recipe, Zero
from framework.verify.compare import ErrorRow, render
from tests.families import family
from tests.grid import few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import STAGE_0, Case, assert_equal, run_cases, small_recipe, worst_error
from tests.ranks.pool import RankPool

# Divides into 1, 2 or 4 data-parallel ranks x 1 or 3 microbatches.
SEQUENCES = 12
EIGHT = {"num_experts": 8}
EIGHT_LOCAL = {"num_local_experts": 8}
# Experts that four ranks divide.
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2_moe": EIGHT, "qwen3_moe": EIGHT, "qwen3_next": EIGHT, "olmoe": EIGHT,
    "gpt_oss": EIGHT_LOCAL, "granitemoe": EIGHT_LOCAL, "minimax_m2": EIGHT_LOCAL,
}  # fmt: skip
FOUR_LAYERS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "llama4_text": {"no_rope_layers": [1, 0, 1, 0], "moe_layers": [0, 2, 3]},
}
# Routers for whose loss these families' models have no code.
WITHOUT_AUX = ("deepseek_v3", "glm4_moe", "llama4_text")
NAMES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe", "llama4_text",
    "granitemoe", "minimax_m2", "phimoe", "ernie4_5_moe",
)  # fmt: skip


@dataclass(frozen=True)
class Way:
    """A training run of a family and how it is laid out. aux: with the routers' load-balancing loss."""

    family: str
    dp: int
    parallel: Parallel
    zero: Zero = STAGE_0
    count: int = 1
    schedule: str = "1f1b"
    recomputes: bool = False
    aux: bool = False
    precision: str = "fp64"
    clip: float | None = 0.05

    @property
    def world(self) -> int:
        return self.dp * self.parallel.tp * self.parallel.pp

    @property
    def recipe(self) -> Recipe:
        recipe = small_recipe(self.precision, self.world, self.count, SEQUENCES, self.clip, self.zero, self.parallel)
        memory = Memory(activation_checkpointing="full" if self.recomputes else "none", compile="never")
        return replace(recipe, memory=memory, pipeline=Pipeline(schedule=self.schedule))  # type: ignore[arg-type]

    @property
    def case(self) -> Case:
        changes = dict(CHANGES.get(self.family, {}))
        if self.parallel.pp > 1:
            changes |= {"num_hidden_layers": 4, **FOUR_LAYERS.get(self.family, {})}
        if self.aux:
            changes |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
        # By microbatch: the term is no sum over tokens.
        return Case(str(self), family(self.family), {"": self.recipe}, changes, by_microbatch=self.aux)


HSDP = Zero(stage=3, shard_within=2)
DIVIDED = Zero(stage=2, shard_within=2, optimizer_within="all")
# Each mechanism once: experts over dp, over tp and over both, whole and sliced, stacked in each form, beside shared experts.
SHOWN = (
    Way("deepseek_v3", 2, Parallel(tp=2, ep=2, expert_tp=2), Zero(stage=1), recomputes=True),
    Way("qwen2_moe", 4, Parallel(ep=2), DIVIDED, aux=True),
    Way("llama4_text", 1, Parallel(tp=4, ep=4)),
)
MORE = (
    Way("mixtral", 4, Parallel(ep=4), Zero(stage=3), count=3, aux=True),
    Way("gpt_oss", 2, Parallel(tp=2, ep=2, expert_tp=2), Zero(stage=2), recomputes=True),
    Way("qwen3_moe", 1, Parallel(tp=2, pp=2, ep=2, sequence=False), Zero(stage=3), 3, "zbv", True, True),
    Way("granitemoe", 2, Parallel(tp=2, ep=2, sequence=False), HSDP, precision="fp32"),
)


@pytest.mark.parametrize("ways", [SHOWN, pytest.param(MORE, marks=pytest.mark.grid)], ids=["few", "more"])
def test_experts_divided_in_each_way_equal_one_process(pool: RankPool, ways: tuple[Way, ...]) -> None:
    assert_equal(pool, 4, [way.case for way in ways])


# Data-parallel ranks, what else there is, and the schedule of a pipeline.
MESHES: tuple[tuple[int, Parallel, str], ...] = (
    (2, Parallel(ep=2), "1f1b"),
    (4, Parallel(ep=2), "1f1b"),
    (4, Parallel(ep=4), "1f1b"),
    (1, Parallel(tp=2, ep=2), "1f1b"),
    (1, Parallel(tp=2, expert_tp=1), "1f1b"),
    (2, Parallel(tp=2, ep=2), "1f1b"),
    (2, Parallel(tp=2, ep=2, sequence=False), "1f1b"),
    (2, Parallel(tp=2, ep=4), "1f1b"),
    (2, Parallel(tp=2, ep=4, sequence=False), "1f1b"),
    (2, Parallel(tp=2, ep=2, expert_tp=2), "1f1b"),
    (2, Parallel(tp=2, ep=2, expert_tp=2, sequence=False), "1f1b"),
    (2, Parallel(pp=2, ep=2), "1f1b"),
    (2, Parallel(pp=2, ep=2), "zb_h1"),
    (1, Parallel(tp=2, pp=2, ep=2), "zbv"),
    (1, Parallel(tp=2, pp=2, ep=2, sequence=False), "1f1b"),
)
ZEROS = (
    Zero(stage=0), Zero(stage=1), Zero(stage=2), Zero(stage=3), Zero(stage=2, accumulate="local"), Zero(stage=1, shard_within=2),
    HSDP, DIVIDED, replace(HSDP, optimizer_within="all"),
)  # fmt: skip
PRECISIONS = (("fp64", 0.05), ("fp64", None), ("fp32", 0.05))


def can_run(
    name: str,
    mesh: tuple[int, Parallel, str],
    zero: Zero,
    count: int,
    recomputes: bool,
    aux: bool,
    precision: tuple[str, float | None],
) -> bool:
    dp, parallel, _ = mesh
    has_replicas = zero.optimizer_within != "all" or dp == 4
    is_split = zero.shard_within is None or dp % zero.shard_within == 0
    return has_replicas and is_split and (parallel.pp == 1 or count > 1) and not (aux and name in WITHOUT_AUX)


@cache
def cover() -> tuple[Way, ...]:
    rows = cover_pairs((NAMES, MESHES, ZEROS, (1, 3), (False, True), (False, True), PRECISIONS), can_run)
    return tuple(
        Way(name, dp, parallel, zero, count, schedule, recomputes, aux, precision, clip)
        for name, (dp, parallel, schedule), zero, count, recomputes, aux, (precision, clip) in rows
    )


@pytest.mark.grid
@pytest.mark.parametrize("name", NAMES)
def test_any_two_of_family_mesh_zero_and_options_equal_one_process(pool: RankPool, name: str) -> None:
    assert_equal(pool, 4, [way.case for way in cover() if way.family == name])


EIGHT_RANKS = (
    Way("qwen3_moe", 4, Parallel(tp=2, ep=4), Zero(stage=3, shard_within=2), aux=True),
    Way("deepseek_v3", 4, Parallel(tp=2, ep=8), Zero(stage=1), count=3),
    Way("gpt_oss", 2, Parallel(tp=2, pp=2, ep=2), DIVIDED, 3, "zb_h1"),
    Way("ernie4_5_moe", 2, Parallel(tp=2, pp=2, ep=4, sequence=False), Zero(stage=2), 3, aux=True),
    Way("llama4_text", 4, Parallel(tp=2, ep=4, expert_tp=2), Zero(stage=3)),
)


@pytest.mark.grid
def test_experts_of_eight_ranks_equal_one_process() -> None:
    eight = RankPool(8)
    try:
        assert_equal(eight, 8, [way.case for way in EIGHT_RANKS])
    finally:
        eight.close()


# --- skewed routers

ABOVE, BELOW = 8.0, -8.0
# What is added to the four experts' logits, the experts per token, and the experts that then get tokens.
SKEWS: dict[str, tuple[tuple[float, ...], int, tuple[int, ...]]] = {
    "all tokens to one expert": ((0.0, 0.0, ABOVE, 0.0), 1, (2,)),
    "an expert without a token": ((0.0, BELOW, 0.0, 0.0), 2, (0, 2, 3)),
    "a rank without a token, one whose tokens stay": ((ABOVE, ABOVE, 0.0, 0.0), 2, (0, 1)),
}
SKEWED_LAYOUTS = {
    "ep 2 in 3 microbatches": (2, Parallel(ep=2), Zero(stage=0), 3),
    "ep 4, stage 3": (4, Parallel(ep=4), Zero(stage=3), 1),
    # Parts of 3 of 9 tokens: the last rank has nothing but padding.
    "ep 4 over tp": (1, Parallel(tp=4, ep=4), Zero(stage=2), 1),
    "ep 4 over dp and tp, replicated tokens": (2, Parallel(tp=2, ep=4, sequence=False), Zero(stage=1), 1),
    "sliced experts": (2, Parallel(tp=2, ep=2, expert_tp=2), Zero(stage=0), 1),
}


def skew_routers(bias: tuple[float, ...], chosen: Collection[int]) -> AbstractContextManager[Any]:
    """Logits of qwen3_moe's routers are moved so far that only the chosen experts are chosen."""

    def forward(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
        logits = logits + torch.tensor(bias, dtype=logits.dtype)
        values, index = logits.softmax(-1, dtype=torch.float).topk(router.top_k)
        assert set(index.unique().tolist()) <= set(chosen)
        return logits, values.to(logits.dtype), index

    return patch.object(Qwen3MoeTopKRouter, "forward", forward)


def run_skewed(
    rank: int, world: int, rendezvous: str, skew: Callable[[], AbstractContextManager[Any]], case: Case
) -> dict[str, list[ErrorRow]]:
    """Body: `run_cases` with routers that are skewed in the layout and in the oracle alike."""
    with skew():
        return run_cases(rank, world, rendezvous, [case])


def skewed_case(name: str, labels: Iterable[str]) -> Case:
    layouts = {}
    for label in labels:
        dp, parallel, zero, count = SKEWED_LAYOUTS[label]
        layouts[label] = small_recipe("fp64", dp * parallel.tp, count, SEQUENCES, 0.05, zero, parallel)
    changes = {"num_experts": 4, "num_experts_per_tok": SKEWS[name][1], "mlp_only_layers": []}
    return Case(name, family("qwen3_moe"), layouts, changes)


def assert_skewed_equal(pool: RankPool, name: str, labels: Iterable[str]) -> None:
    bias, _, chosen = SKEWS[name]
    case = skewed_case(name, labels)
    rows: dict[str, list[ErrorRow]] = {}
    for of_rank in pool.run(4, run_skewed, partial(skew_routers, bias, chosen), case):
        rows |= of_rank
    assert len(rows) == len(case.layouts)
    failed = {label: each for label, each in rows.items() if worst_error(each) > case.tolerance}
    assert not failed, "\n\n".join(f"{label}\n{render(each, case.tolerance)}" for label, each in failed.items())


@pytest.mark.parametrize("name", few_of(SKEWS, lambda name: "rank without" in name))
def test_skewed_routers_equal_one_process(pool: RankPool, name: str) -> None:
    assert_skewed_equal(pool, name, ["ep 4 over tp"])


@pytest.mark.grid
@pytest.mark.parametrize("name", SKEWS)
def test_skewed_routers_in_more_layouts_equal_one_process(pool: RankPool, name: str) -> None:
    assert_skewed_equal(pool, name, SKEWED_LAYOUTS)
