"""`precision.reduce: bf16` sends gradients in half the bytes of fp32 and changes them by the rounding of bf16, no more; ranks
that hold the same hold it bitwise.

A bf16 number has 8 significant bits, so one rounding errs by 2^-9 of what is rounded at most. Every rank's part of a sum is
rounded once on the way to a shard, once more on the way to replicas, and where replicas sum by all-reduce, the sum too.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from framework.comm.communicator import read_traffic
from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.schema import Precision, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.compare import compare
from framework.verify.layout import share
from tests.families import family
from tests.grid import IN_TURN
from tests.ranks.parity import CPU, Case, small_recipe, topology_of, train_layouts, worst_error
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

WORLD = 4
ZEROS = (
    *(Zero(stage=stage) for stage in range(4)),
    Zero(stage=1, shard_within=2),
    Zero(stage=2, shard_within=2, accumulate="local"),
    Zero(stage=3, shard_within=2),
    Zero(stage=2, shard_within=2, optimizer_within="all"),
)
# No shards, replicas that sum.
FEW = (ZEROS[0], ZEROS[6])
# At most three roundings, each of terms that are no more than twice as large as their sum.
ROUNDING = 3 * 2 * 2**-9
WAYS = [pytest.param(ZEROS[6:7], id="few"), pytest.param(ZEROS, marks=pytest.mark.grid, id="all")]


def recipes(compute: str, reduce: str, accumulation: int, zeros: tuple[Zero, ...] = ZEROS) -> dict[str, Recipe]:
    precision = Precision(compute, "fp32", reduce)  # type: ignore[arg-type]
    return {
        f"{reduce}, {zero}": replace(small_recipe(compute, WORLD, accumulation, 16, 0.05, zero), precision=precision)
        for zero in zeros
    }


@pytest.mark.parametrize(
    ("name", "zeros"),
    [
        pytest.param("llama", FEW, id="few"),
        *(pytest.param(name, ZEROS, marks=pytest.mark.grid, id=name) for name in ("llama", "gpt2")),
    ],
)
def test_a_bf16_wire_agrees_with_an_fp32_wire_within_rounding(
    pool: RankPool, name: str, zeros: tuple[Zero, ...]
) -> None:
    layouts = recipes("fp32", "bf16", 2, zeros) | recipes("fp32", "fp32", 2, zeros)
    found = {
        label: each for (_, label), each in pool.run(WORLD, train_layouts, [Case("", family(name), layouts)])[0].items()
    }
    for zero in zeros:
        rounded, exact = found[f"bf16, {zero}"], found[f"fp32, {zero}"]
        errors = {row.quantity: row.error for row in compare(rounded, exact)}
        assert 1e-4 < errors["gradient, step 1"] < ROUNDING, (zero, errors)
        assert errors["loss"] < ROUNDING**2, (zero, errors)
        assert worst_error(compare(exact, found[f"fp32, {ZEROS[0]}"])) < 1e-5


def hold(rank: int, world: int, rendezvous: str, case: Case) -> dict[str, list[tuple[str, int, Tensor, Tensor]]]:
    """Body: for each layout after two steps what this rank holds: unit, first element, gradient, master."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, case.config), mesh)
        for step, batch in enumerate(case.batches()[:2]):
            train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), step, 1e-2)
        found[label] = [(each.unit, each.plan.start, each.reduced.clone(), each.master.clone()) for each in run.buffers]
        mesh.close()
    return found


@pytest.mark.parametrize("zeros", WAYS)
def test_replicas_hold_bitwise_equal_gradients_and_weights(pool: RankPool, zeros: tuple[Zero, ...]) -> None:
    by_rank = pool.run(WORLD, hold, Case("", family("llama"), recipes("bf16", "bf16", 2, zeros)))
    for zero in zeros:
        first: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        for held in by_rank:
            for unit, start, reduced, master in held[f"bf16, {zero}"]:
                expected = first.setdefault((unit, start), (reduced, master))
                assert torch.equal(reduced, expected[0]), (zero, unit)
                assert torch.equal(master, expected[1]), (zero, unit)


def count_bytes(rank: int, world: int, rendezvous: str, case: Case) -> dict[str, dict[str, int]]:
    """Body: for each layout the bytes of a step by operation over the axes of ZeRO."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, case.config), mesh)
        train_step(run, share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-2)
        sent = read_traffic(mesh.axes)
        found[label] = {
            f"{axis} {name}": num_bytes for axis in ("shard", "replica") for name, (_, num_bytes) in sent[axis].items()
        }
        mesh.close()
    return found


@pytest.mark.parametrize("zeros", WAYS)
def test_a_bf16_wire_sends_half_the_bytes_of_gradients(pool: RankPool, zeros: tuple[Zero, ...]) -> None:
    layouts = recipes("fp32", "bf16", 2, zeros) | recipes("fp32", "fp32", 2, zeros)
    for found in pool.run(WORLD, count_bytes, Case("", family("llama"), layouts)):
        for zero in zeros:
            wide = found[f"fp32, {zero}"]
            half = {name: num if "gather" in name else num // 2 for name, num in wide.items()}
            assert found[f"bf16, {zero}"] == half, zero
