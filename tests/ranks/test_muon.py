"""Muon in every layout is Muon in one process: whole matrices are gathered to owners, and what they return is each rank's own."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from framework.comm.communicator import read_traffic, subtract_traffic
from framework.comm.connect import connect
from framework.optim import muon
from framework.optim.held_matrices import MatrixPart
from framework.optim.matrices import MatrixForm, find_matrices
from framework.optim.muon import MuonOptimizer, OwnerHop
from framework.optim.optimizers import FlatOptimizer
from framework.plan import shape
from framework.plan.forecast_plan import measure_traffic
from framework.plan.plan import make_plan
from framework.recipe.schema import Muon, Optim, Parallel, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.laws.sabotage import errors_of
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, Case, assert_equal, small_recipe, topology_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

# In the gradient's dtype: iterations in bf16 would turn a difference of 1e-16 into one of 2^-9 wherever it changes a rounding.
OPTIM = Optim(name="muon", lr=1e-2, momentum=0.9, clip_norm=0.05, muon=Muon(dtype="master"))
FAMILIES = ("llama", "gpt2", "qwen3_moe", "deepseek_v3", "phi3", "gpt_oss", "gpt_neox")
ROUTED = ("qwen3_moe", "deepseek_v3", "gpt_oss")
# Groups of two replicas of two ranks, each with the whole update or with its half.
REPLICAS: Mapping[str, Zero] = {
    "one group": Zero(),
    "hsdp": Zero(shard_within=2),
    "hsdp, updates divided": Zero(shard_within=2, optimizer_within="all"),
}
# Family, stage of ZeRO, groups, degrees of tp, pp, ep and of expert_tp, microbatches.
Row = tuple[str, int, str, int, int, int, int, int]
FACTORS = [FAMILIES, (0, 1, 2, 3), tuple(REPLICAS), (1, 2), (1, 2), (1, 2), (1, 2), (1, 3)]


def is_legal(name: str, zero: int, groups: str, tp: int, pp: int, ep: int, expert_tp: int, accumulation: int) -> bool:
    is_sliced = expert_tp == 2
    shares_experts = (ep == 1 or name in ROUTED) and (not is_sliced or (tp == ep == 2 and pp == 1))
    # ZeRO is to divide something, and 8 ranks are enough.
    is_divided = zero == 0 or tp * pp <= 2
    return shares_experts and is_divided and (groups == "one group" or (zero > 0 and tp * pp * ep <= 4))


def recipe_of(row: Row, heads: bool = False) -> Recipe:
    _, stage, groups, tp, pp, ep, expert_tp, accumulation = row
    dp = 4 if groups != "one group" else 1 if tp * pp == 4 else 2
    parallel = Parallel(tp=tp, pp=pp, ep=ep, expert_tp=expert_tp if expert_tp > 1 else None)
    zero = replace(REPLICAS[groups], stage=stage)
    recipe = small_recipe("fp64", dp * tp * pp, accumulation, 12, zero=zero, parallel=parallel)
    return replace(recipe, optim=replace(OPTIM, muon=replace(OPTIM.muon, heads=heads)))


ROWS: list[Row] = cover_pairs(FACTORS, is_legal)
SHOWN: list[Row] = [
    ("llama", 3, "one group", 1, 1, 1, 1, 3),
    ("gpt2", 3, "one group", 2, 1, 1, 1, 1),
    ("qwen3_moe", 3, "one group", 2, 1, 2, 2, 1),
]


# Heads one by one: rows and columns, of Conv1D too, packed, interleaved, latent; and heads of keys that several ranks of tp hold,
# alone or beside queries.
BY_HEADS = ("llama", "gpt2", "phi3", "gpt_neox", "deepseek_v3")
HEAD_FACTORS = [BY_HEADS, (0, 1, 2, 3), ("one group", "hsdp, updates divided"), (1, 2), (1, 2), (1,), (1,), (1, 3)]
HEAD_ROWS: list[Row] = [
    *cover_pairs(HEAD_FACTORS, is_legal),
    ("llama", 2, "one group", 4, 1, 1, 1, 1),
    ("falcon_grouped", 3, "one group", 4, 1, 1, 1, 1),
    ("gpt_bigcode", 3, "one group", 2, 1, 1, 1, 1),
    ("codegen", 1, "one group", 1, 1, 1, 1, 1),
]
SHOWN_HEADS: Row = ("gpt2", 3, "one group", 2, 1, 1, 1, 1)


@pytest.fixture(scope="module")
def eight() -> Iterator[RankPool]:
    ranks = RankPool(8)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("row", "heads"),
    few_of(
        [
            *((each, False) for each in [*SHOWN, *ROWS]),
            *((each, True) for each in dict.fromkeys([SHOWN_HEADS, *HEAD_ROWS])),
        ],
        lambda row, heads: row == SHOWN_HEADS if heads else row in SHOWN,
    ),
)
def test_layouts_equal_one_process(pool: RankPool, eight: RankPool, row: Row, heads: bool) -> None:
    recipe = recipe_of(row, heads)
    world = recipe.launch.ranks or 1
    assert_equal(pool if world <= 4 else eight, world, [Case(row[0], family(row[0]), {"muon": recipe})])


# Muon as DeepSpeed had it, by its issue: each is caught by the comparison with one process.


def orthogonalise_parts() -> AbstractContextManager[Any]:
    """7807: each rank of the shard axis the part that it holds, as if it was the matrix."""

    def alone(hop: OwnerHop, parts: Sequence[Tensor], empty: Tensor) -> list[list[Tensor]]:
        own = [parts[index] for index in hop.own]
        sizes = [hop.to_owner[index] for index in hop.own]
        return [
            [part[:size] if rank == hop.axis.rank else part.new_zeros(size) for rank, size in enumerate(of_ranks)]
            for part, of_ranks in zip(own, sizes, strict=True)
        ]

    return patch.object(OwnerHop, "collect", alone)


def leave_matrices_to_adamw() -> AbstractContextManager[Any]:
    """8438: parameters that are gathered when they are needed look like vectors, and none is Muon's."""

    def find(*args: Any) -> dict[str, MatrixForm]:
        return {}

    return patch.object(shape, "find_matrices", find)


def leave_momentum_as_it_is() -> AbstractContextManager[Any]:
    """8442: the update is the momentum, which nobody makes orthogonal."""
    return patch.object(muon, "orthogonalize", lambda matrices, steps: matrices)


def update_in_each_microbatch() -> AbstractContextManager[Any]:
    """8443, 8600: momentum moves once for each of three microbatches."""
    step = FlatOptimizer.step

    def three_times(self: FlatOptimizer, lr: float, divisor: Tensor, skip: Tensor, number: int) -> None:
        if isinstance(self, MuonOptimizer):
            for shard in self.shards:
                shard.gradient.div_(divisor)
            for _ in range(2):
                step(self, lr, torch.ones_like(divisor), skip, number)
            divisor = torch.ones_like(divisor)
        step(self, lr, divisor, skip, number)

    return patch.object(FlatOptimizer, "step", three_times)


ISSUES = {
    "7807": orthogonalise_parts,
    "8438": leave_matrices_to_adamw,
    "8442": leave_momentum_as_it_is,
    "8443 and 8600": update_in_each_microbatch,
}


def orthogonalise_all_heads_together() -> AbstractContextManager[Any]:
    """Heads as if they had not been asked for."""

    def find(*args: Any) -> dict[str, MatrixForm]:
        return find_matrices(*args[:3], OPTIM)

    return patch.object(shape, "find_matrices", find)


def begin_rows_with_what_is_owned() -> AbstractContextManager[Any]:
    """Columns of a head as if a rank's elements began with a row."""
    return patch.object(MatrixPart, "margin", 0)


@pytest.mark.grid
def test_the_comparison_finds_heads_that_are_cut_wrongly(pool: RankPool) -> None:
    # Whose second rank's elements begin within a row of `dense`.
    recipe = recipe_of(("gpt_neox", 3, "one group", 1, 1, 1, 1, 3), heads=True)
    planted = [orthogonalise_all_heads_together, begin_rows_with_what_is_owned]
    errors = errors_of(pool, planted, Case("gpt_neox", family("gpt_neox"), {"": recipe}))
    assert max(errors["whole"].values()) < 1e-9
    for each in planted:
        assert max(errors[each.__name__].values()) > 1e-5, each.__name__


@pytest.mark.grid
def test_the_comparison_finds_what_others_had_wrong(pool: RankPool) -> None:
    recipe = recipe_of(("llama", 3, "one group", 1, 1, 1, 1, 3))
    errors = errors_of(pool, [*ISSUES.values()], Case("llama", family("llama"), {"": recipe}))
    assert max(errors["whole"].values()) < 1e-9
    for issue, planted in ISSUES.items():
        assert max(errors[planted.__name__].values()) > 1e-5, issue


def measure_sent(rank: int, world: int, rendezvous: str, case: Case) -> tuple[int, int]:
    """Body: bytes that this rank has sent in the all-to-alls of a step, and those of theory."""
    recipe, plan = case.recipe, make_plan(case.recipe, case.config)
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    before = read_traffic(mesh.axes)
    train_step(build(plan, mesh), share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
    sent = subtract_traffic(read_traffic(mesh.axes), before)
    mesh.close()
    bytes_sent = sum(kinds["all_to_all"][1] for kinds in sent.values() if "all_to_all" in kinds)
    return bytes_sent, measure_traffic(plan, rank)["matrices"]


def test_bytes_sent_are_theory(pool: RankPool) -> None:
    for heads in (False, True):
        case = Case("gpt2", family("gpt2"), {"": recipe_of(SHOWN[1], heads)}, by_microbatch=True)
        assert all(sent == theory > 0 for sent, theory in pool.run(4, measure_sent, case))
