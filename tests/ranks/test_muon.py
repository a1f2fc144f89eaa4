"""Muon in every layout is Muon in one process: whole matrices are gathered to owners, and what they return is each rank's own."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from framework.comm import ledger
from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.plan.traffic import measure_traffic
from framework.recipe.schema import Muon, Optim, Parallel, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import family
from tests.grid import few_of
from tests.ranks.parity import CPU, Case, assert_equal, small_recipe, topology_of
from tests.ranks.pool import RankPool

# In the gradient's dtype: iterations in bf16 would turn a difference of 1e-16 into one of 2^-9 wherever it changes a rounding.
OPTIM = Optim(name="muon", lr=1e-2, momentum=0.9, clip_norm=0.05, muon=Muon(dtype="master"))
TP = Parallel(tp=2)
LAYOUTS: Mapping[str, tuple[int, Parallel, Zero]] = {
    "zero 0": (2, Parallel(), Zero(stage=0)),
    "zero 1": (2, Parallel(), Zero(stage=1)),
    "zero 3": (3, Parallel(), Zero(stage=3)),
    "hsdp": (4, Parallel(), Zero(stage=3, shard_within=2)),
    "hsdp, updates divided": (4, Parallel(), Zero(stage=2, shard_within=2, optimizer_within="all")),
    "tp": (2, TP, Zero(stage=0)),
    "tp, zero 3": (4, TP, Zero(stage=3)),
    "pp, zero 1": (4, Parallel(pp=2), Zero(stage=1)),
    "ep, zero 2": (4, Parallel(ep=2), Zero(stage=2)),
    "ep, experts sliced": (4, Parallel(tp=2, ep=2, expert_tp=2), Zero(stage=3)),
}
FAST = {("llama", "zero 3", 3), ("gpt2", "tp, zero 3", 1), ("qwen3_moe", "ep, experts sliced", 1)}
CASES = [
    (name, label, accumulation)
    for name in ("llama", "gpt2", "qwen3_moe", "deepseek_v3", "phi3", "gpt_oss", "gpt_neox")
    for label in LAYOUTS
    for accumulation in (1, 3)
    if "ep" not in label.split(", ")[0] or name in ("qwen3_moe", "deepseek_v3", "gpt_oss")
]


def muon_recipe(label: str, accumulation: int) -> Recipe:
    world, parallel, zero = LAYOUTS[label]
    return replace(small_recipe("fp64", world, accumulation, 12, zero=zero, parallel=parallel), optim=OPTIM)


@pytest.mark.parametrize(("name", "label", "accumulation"), few_of(CASES, lambda *row: row in FAST))
def test_layouts_equal_one_process(pool: RankPool, name: str, label: str, accumulation: int) -> None:
    case = Case(name, family(name), {label: muon_recipe(label, accumulation)})
    assert_equal(pool, LAYOUTS[label][0], [case])


def measure_sent(rank: int, world: int, rendezvous: str, case: Case) -> tuple[int, int]:
    """Body: bytes that this rank has sent in the all-to-alls of a step, and those of theory."""
    recipe, plan = case.recipe, make_plan(case.recipe, case.config)
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    before = ledger.snapshot(mesh)
    train_step(build(plan, mesh), share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
    sent = ledger.difference(ledger.snapshot(mesh), before)
    mesh.close()
    bytes_sent = sum(kinds["all_to_all"][1] for kinds in sent.values() if "all_to_all" in kinds)
    return bytes_sent, measure_traffic(plan, rank)["matrices"]


def test_bytes_sent_are_theory(pool: RankPool) -> None:
    case = Case("gpt2", family("gpt2"), {"": muon_recipe("tp, zero 3", 1)}, by_microbatch=True)
    assert all(sent == theory > 0 for sent, theory in pool.run(4, measure_sent, case))
