"""Muon in every layout is Muon in one process: whole matrices are gathered to owners, and what they return is each rank's own."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from framework.comm.communicator import read_traffic, subtract_traffic
from framework.comm.connect import connect
from framework.optim import groups as optim_groups
from framework.optim import muon
from framework.optim.groups import GroupAssignment
from framework.optim.matrices import MatrixForm, find_matrices
from framework.optim.muon import MuonOptimizer, orthogonalize
from framework.optim.optimizers import FlatOptimizer
from framework.optim.owners import MatrixPart, OwnerHop
from framework.plan import plan as planning
from framework.plan.forecast_plan import measure_traffic
from framework.plan.plan import make_plan
from framework.recipe.schema import Muon, Optim, Parallel, ParameterGroup, Recipe, Zero
from framework.train.build import build
from framework.train.state import RunState, restore, saved_entries
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.laws.sabotage import errors_of
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, Case, assert_equal, small_recipe, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.test_replicas_read import bits_of
from tests.ranks.test_zero_lifetimes import train_steps
from tests.saving import save_checkpoint

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
# Family, stage of ZeRO, groups, degrees of tp, pp, ep and of expert_tp, microbatches, ranks that share a matrix.
Row = tuple[str, int, str, int, int, int, int, int, int]
FACTORS = [FAMILIES, (0, 1, 2, 3), tuple(REPLICAS), (1, 2), (1, 2), (1, 2), (1, 2), (1, 3), (1, 2)]


def is_legal(
    name: str, zero: int, groups: str, tp: int, pp: int, ep: int, expert_tp: int, accumulation: int, shared: int
) -> bool:
    if shared > 1 and zero == 0 and tp == 1:
        return False
    is_sliced = expert_tp == 2
    shares_experts = (ep == 1 or name in ROUTED) and (not is_sliced or (tp == ep == 2 and pp == 1))
    # ZeRO is to divide something, and 8 ranks are enough.
    is_divided = zero == 0 or tp * pp <= 2
    return shares_experts and is_divided and (groups == "one group" or (zero > 0 and tp * pp * ep <= 4))


def recipe_of(row: Row, heads: bool = False) -> Recipe:
    _, stage, groups, tp, pp, ep, expert_tp, accumulation, shared = row
    dp = 4 if groups != "one group" else 1 if tp * pp == 4 else 2
    parallel = Parallel(tp=tp, pp=pp, ep=ep, expert_tp=expert_tp if expert_tp > 1 else None)
    zero = replace(REPLICAS[groups], stage=stage)
    recipe = small_recipe("fp64", dp * tp * pp, accumulation, 12, zero=zero, parallel=parallel)
    return replace(recipe, optim=replace(OPTIM, muon=replace(OPTIM.muon, heads=heads, ranks_per_matrix=shared)))


ROWS: list[Row] = cover_pairs(FACTORS, is_legal)
SHOWN: list[Row] = [
    ("llama", 3, "one group", 1, 1, 1, 1, 3, 1),
    ("gpt2", 3, "one group", 2, 1, 1, 1, 1, 1),
    ("qwen3_moe", 3, "one group", 2, 1, 2, 2, 1, 1),
    ("phi3", 3, "one group", 2, 1, 1, 1, 1, 4),
]


# Heads one by one: rows and columns, of Conv1D too, packed, interleaved, latent; and heads of keys that several ranks of tp hold,
# alone or beside queries.
BY_HEADS = ("llama", "gpt2", "phi3", "gpt_neox", "deepseek_v3")
HEAD_FACTORS = [
    BY_HEADS,
    (0, 1, 2, 3),
    ("one group", "hsdp, updates divided"),
    (1, 2),
    (1, 2),
    (1,),
    (1,),
    (1, 3),
    (1, 2),
]
HEAD_ROWS: list[Row] = [
    *cover_pairs(HEAD_FACTORS, is_legal),
    ("llama", 2, "one group", 4, 1, 1, 1, 1, 1),
    ("llama", 2, "one group", 4, 1, 1, 1, 1, 2),
    ("falcon_grouped", 3, "one group", 4, 1, 1, 1, 1, 1),
    ("gpt_bigcode", 3, "one group", 2, 1, 1, 1, 1, 1),
    ("codegen", 1, "one group", 1, 1, 1, 1, 1, 1),
]
SHOWN_HEADS: Row = ("gpt2", 3, "one group", 2, 1, 1, 1, 1, 1)


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

    return patch.object(optim_groups, "find_matrices", find)


def leave_momentum_as_it_is() -> AbstractContextManager[Any]:
    """8442: the update is the momentum, which nobody makes orthogonal."""
    return patch.object(muon, "orthogonalize", lambda matrices, *_: matrices)


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


def clip_the_update() -> AbstractContextManager[Any]:
    """8439: the norm divides what is orthogonal, not the gradient."""

    def clipped_late(self: MuonOptimizer, lr: float, divisor: Tensor, skip: Tensor, number: int) -> None:
        FlatOptimizer.step(self, lr, torch.ones_like(divisor), skip, number)
        for each in self._groups:
            each.update(lr / divisor, self._momentum, torch.tensor(lr))

    return patch.object(MuonOptimizer, "step", clipped_late)


def give_all_groups_one_rate() -> AbstractContextManager[Any]:
    """7713: the schedule writes its rate over those of Muon's and of AdamW's groups."""
    found = planning.group_parameters_of

    def find(*args: Any) -> list[GroupAssignment]:
        return [replace(each, lr_ratio=1.0) for each in found(*args)]

    return patch.object(planning, "group_parameters_of", find)


ISSUES = {
    "7807": orthogonalise_parts,
    "8438": leave_matrices_to_adamw,
    "8442": leave_momentum_as_it_is,
    "8443 and 8600": update_in_each_microbatch,
    "8439": clip_the_update,
    "7713": give_all_groups_one_rate,
}


def change_forms(change: Callable[[str, MatrixForm], MatrixForm]) -> AbstractContextManager[Any]:
    """Other matrices in weights than there are, by their names."""

    def find(*args: Any) -> dict[str, MatrixForm]:
        return {name: change(name, form) for name, form in find_matrices(*args).items()}

    return patch.object(optim_groups, "find_matrices", find)


def orthogonalise_slices_of_tp() -> AbstractContextManager[Any]:
    """8437: each of two ranks of tp its rows, or its columns, as if they were the matrix."""
    return change_forms(lambda name, form: MatrixForm(int("o_proj" in name or "down_proj" in name), 1, (1, 1)))


def count_heads_of_the_whole_model() -> AbstractContextManager[Any]:
    """8384: on each of two ranks of tp the number of all heads divides what it has of them, so that a block is half a head."""
    return change_forms(lambda name, form: replace(form, blocks=2 * form.blocks) if form.blocks > 1 else form)


def leave_fused_projections_whole() -> AbstractContextManager[Any]:
    """8580: queries, keys and values in one weight have no number of heads in common, and are taken for one matrix."""
    return change_forms(lambda name, form: MatrixForm() if "query_key_value" in name else form)


def sum_no_products() -> AbstractContextManager[Any]:
    """A rank's slice as if it was the matrix that it shares."""
    return patch.object(muon, "orthogonalize", lambda matrices, steps, _: orthogonalize(matrices, steps))


# By family, degree of tp, heads one by one, ranks that share a matrix.
MORE_ISSUES: list[tuple[Callable[[], AbstractContextManager[Any]], str, int, bool, int]] = [
    (orthogonalise_slices_of_tp, "llama", 2, False, 1),
    (count_heads_of_the_whole_model, "llama", 2, True, 1),
    (leave_fused_projections_whole, "falcon_grouped", 2, True, 1),
    (sum_no_products, "llama", 2, False, 2),
]


def orthogonalise_all_heads_together() -> AbstractContextManager[Any]:
    """Heads as if they had not been asked for."""

    def find(*args: Any) -> dict[str, MatrixForm]:
        return find_matrices(*args[:3], OPTIM)

    return patch.object(optim_groups, "find_matrices", find)


def begin_rows_with_what_is_owned() -> AbstractContextManager[Any]:
    """Columns of a head as if a rank's elements began with a row."""
    return patch.object(MatrixPart, "margin", 0)


@pytest.mark.grid
def test_the_comparison_finds_heads_that_are_cut_wrongly(pool: RankPool) -> None:
    # Whose second rank's elements begin within a row of `dense`.
    recipe = recipe_of(("gpt_neox", 3, "one group", 1, 1, 1, 1, 3, 1), heads=True)
    planted = [orthogonalise_all_heads_together, begin_rows_with_what_is_owned]
    errors = errors_of(pool, planted, Case("gpt_neox", family("gpt_neox"), {"": recipe}))
    assert max(errors["whole"].values()) < 1e-9
    for each in planted:
        assert max(errors[each.__name__].values()) > 1e-5, each.__name__


@pytest.mark.grid
def test_the_comparison_finds_what_others_had_wrong(pool: RankPool) -> None:
    recipe = recipe_of(("llama", 3, "one group", 1, 1, 1, 1, 3, 1))
    groups = {"rest": ParameterGroup("norm|embed|head", lr_ratio=0.3)}
    recipe = replace(recipe, optim=replace(recipe.optim, groups=groups))
    errors = errors_of(pool, [*ISSUES.values()], Case("llama", family("llama"), {"": recipe}))
    assert max(errors["whole"].values()) < 1e-9
    for issue, planted in ISSUES.items():
        assert max(errors[planted.__name__].values()) > 1e-5, issue


@pytest.mark.grid
@pytest.mark.parametrize(("planted", "name", "tp", "heads", "shared"), MORE_ISSUES)
def test_the_comparison_finds_matrices_that_are_cut_by_tp(
    pool: RankPool, planted: Callable[[], AbstractContextManager[Any]], name: str, tp: int, heads: bool, shared: int
) -> None:
    recipe = recipe_of((name, 1, "one group", tp, 1, 1, 1, 1, shared), heads)
    errors = errors_of(pool, [planted], Case(name, family(name), {"": recipe}))
    assert max(errors["whole"].values()) < 1e-9
    assert max(errors[planted.__name__].values()) > 1e-5


def resume_in_the_middle(
    rank: int, world: int, rendezvous: str, case: Case, root: Path
) -> tuple[set[torch.dtype], bool, bool]:
    """Body: dtypes of momentum; whether a third step is the same after a checkpoint of the second one; and the same with momentum
    that was rounded in between, as DeepSpeed's 7746 and 8433 had it."""
    (recipe,) = case.layouts.values()
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    unbroken = build(make_plan(recipe, case.config), mesh)
    train_steps(unbroken, recipe, case.batches()[:2])
    state = RunState("run", "", step=2, num_updates=unbroken.optimizer.num_updates)
    save_checkpoint(root, 2, saved_entries(unbroken), state.to_json(), mesh.axis("world"), keep=1)
    train_steps(unbroken, recipe, case.batches(), 2)
    expected, same, dtypes = bits_of(unbroken), [], set()
    for is_planted in (False, True):
        run = build(make_plan(recipe, case.config), mesh, resumes=True)
        assert restore(run, root) == state
        moving = [each for each in run.optimizer.shards if run.optimizer.has_state(each, "momentum_buffer")]
        for each in (run.optimizer.state(each, "momentum_buffer") for each in moving):
            dtypes.add(each.dtype)
            each.copy_(each.bfloat16() if is_planted else each)
        train_steps(run, recipe, case.batches(), 2)
        same.append(all(torch.equal(mine, theirs) for mine, theirs in zip(bits_of(run), expected, strict=True)))
    mesh.close()
    return dtypes, same[0], same[1]


def test_a_resume_in_bf16_is_no_resume(pool: RankPool, tmp_path: Path) -> None:
    recipe = small_recipe("bf16", 2, 1, 12, zero=Zero(stage=2))
    recipe = replace(recipe, optim=replace(OPTIM, muon=Muon(ranks_per_matrix=2)))
    for dtypes, is_same, is_same_rounded in pool.run(
        2, resume_in_the_middle, Case("", family("llama"), {"": recipe}), tmp_path
    ):
        assert dtypes == {torch.float32}
        assert (is_same, is_same_rounded) == (True, False)


def measure_sent(rank: int, world: int, rendezvous: str, case: Case) -> tuple[int, int]:
    """Body: bytes that this rank has sent in the all-to-alls of a step, and those of theory."""
    recipe, plan = case.recipe, make_plan(case.recipe, case.config)
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    before = read_traffic(mesh.axes)
    train_step(build(plan, mesh), share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
    sent = subtract_traffic(read_traffic(mesh.axes), before)
    mesh.close()
    bytes_sent = sum(kinds["all_to_all"][1] for kinds in sent.values() if "all_to_all" in kinds)
    rows = sent.get("matrix", {}).get("all_gather", (0, 0))[1]
    return bytes_sent + rows, measure_traffic(plan, rank)["matrices"]


def test_bytes_sent_are_theory(pool: RankPool) -> None:
    for row, heads in ((SHOWN[1], False), (SHOWN[1], True), (SHOWN[3], False)):
        case = Case(row[0], family(row[0]), {"": recipe_of(row, heads)}, by_microbatch=True)
        assert all(sent == theory > 0 for sent, theory in pool.run(4, measure_sent, case))
