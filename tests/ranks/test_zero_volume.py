"""Bytes that a rank sends in a step are those of theory, to the byte: docs/zero.md has the forms.

n ranks share a unit of P padded elements, of c bytes in the compute dtype and r in the reduce dtype. One unshard sends
(n-1)/n c P, one reduce-scatter (n-1)/n r P, and the all-reduce among m replicas 2 (m-1)/m r P/n; where replicas divide the
update, a reduce-scatter (m-1)/m r P/n and an all-gather (m-1)/m c P/n among them. What differs is how often.
"""

from dataclasses import replace
from itertools import product
from math import prod

import pytest

from framework.comm.communicator import TrafficReading, read_traffic, subtract_traffic
from framework.comm.connect import connect
from framework.mesh.topology import Topology
from framework.model.load import build_meta
from framework.model.units import Unit, find_units
from framework.plan.forecast_plan import measure_traffic
from framework.plan.plan import make_plan
from framework.recipe.derive import derive
from framework.recipe.schema import Model, Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import family
from tests.grid import IN_TURN
from tests.ranks.parity import CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

SEQUENCES = 12
ITEM_BYTES = {"fp32": (4, 4), "bf16": (2, 4)}  # compute, reduce


def measure_volume(rank: int, world: int, rendezvous: str, case: Case) -> dict[str, TrafficReading]:
    """Body: for each layout what each of two steps has sent over the axes of ZeRO."""
    found = {}
    batches = case.batches()[:2]
    by_topology: dict[Topology, list[tuple[str, Recipe]]] = {}
    for label, recipe in case.layouts.items():
        by_topology.setdefault(topology_of(recipe, case.config), []).append((label, recipe))
    for number, (topology, layouts) in enumerate(by_topology.items()):
        if rank < topology.world:
            mesh = connect(topology, CPU, f"{rendezvous}-{number}", rank)
            for label, recipe in layouts:
                run = build(make_plan(recipe, case.config), mesh)
                for step, batch in enumerate(batches):
                    before = read_traffic(mesh.axes)
                    train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), step, 1e-3)
                    sent = subtract_traffic(read_traffic(mesh.axes), before)
                    found[f"{label}, step {step}"] = {axis: sent.get(axis, {}) for axis in ("shard", "replica")}
            mesh.close()
    return found


def count_unshards(unit: Unit, zero: Zero, microbatches: int, frozen: bool) -> int:
    """Of one unit in one step. Layers are read in forward and in backward; the head in one stretch; an embedding in forward
    only, or, tied to the head, from forward to backward."""
    if zero.stage == 0:
        return 0
    if zero.stage < 3 or zero.keep_gathered:
        return 1
    return microbatches * (2 if unit.is_layer and not frozen else 1)


def count_reductions(zero: Zero, microbatches: int, frozen: bool) -> int:
    if frozen:
        return 0
    return microbatches if zero.stage > 1 and zero.accumulate == "sharded" else 1


def round_owned(numel: int, count: int) -> int:
    """Elements of a unit that each of `count` ranks owns: large ones end at a multiple of 64, for NCCL's wide loads."""
    owned = -(-numel // count)
    return owned if count == 1 or owned < 8192 else -(-owned // 64) * 64


def expect_volume(case: Case, recipe: Recipe, frozen_units: tuple[str, ...] = ()) -> dict[str, dict[str, int]]:
    """Bytes by axis and operation."""
    model, microbatches = build_meta(case.config), derive(recipe).accumulation
    zero, world = recipe.zero, recipe.launch.ranks
    n = 1 if zero.stage == 0 else zero.shard_within or world
    m = world // n
    divides = zero.optimizer_within == "all"
    compute_bytes, reduce_bytes = ITEM_BYTES[recipe.precision.compute]
    shard = {"all_gather": 0, "reduce_scatter": 0}
    replica, summed = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}, 0
    for unit in find_units(model):
        numel = sum(prod(model.get_parameter(name).shape) for name in unit.parameters)
        frozen = unit.name in frozen_units
        pieces = m if divides and not frozen else 1
        owned = round_owned(numel, n * pieces)
        part = owned * pieces
        shard["all_gather"] += count_unshards(unit, zero, microbatches, frozen) * (n - 1) * part * compute_bytes
        shard["reduce_scatter"] += count_reductions(zero, microbatches, frozen) * (n - 1) * part * reduce_bytes
        if divides and not frozen:
            replica["reduce_scatter"] += (m - 1) * owned * reduce_bytes
            replica["all_gather"] += (m - 1) * owned * compute_bytes
        elif not frozen:
            summed += part * reduce_bytes
    replica["all_reduce"] = 2 * (m - 1) * summed // m
    return {"shard": shard, "replica": replica}


def ways(world: int) -> list[Zero]:
    within = (None, 2) if world == 4 else (None,)
    all_ways = [Zero(stage=0)]
    for stage, degree, accumulate, keeps in product((1, 2, 3), within, ("sharded", "local"), (False, True)):
        if (stage > 1 or accumulate == "sharded") and (stage == 3 or not keeps):
            all_ways.append(Zero(stage, degree, accumulate, keeps))  # type: ignore[arg-type]
            if degree and not keeps:
                all_ways.append(replace(all_ways[-1], optimizer_within="all"))
    return all_ways


def assert_volumes(pool: RankPool, case: Case, frozen_units: tuple[str, ...] = ()) -> list[dict[str, TrafficReading]]:
    by_rank: list[dict[str, TrafficReading]] = pool.run(4, measure_volume, case)
    for label, recipe in case.layouts.items():
        expected = expect_volume(case, recipe, frozen_units)
        for rank, step in product(range(recipe.launch.ranks), range(2)):
            found = by_rank[rank][f"{label}, step {step}"]
            for axis, operations in expected.items():
                sent = {name: num_bytes for name, (_, num_bytes) in found[axis].items()}
                # Of units that are summed together the bytes are rounded down once for each message.
                missing = operations.get("all_reduce", 0) - sent.get("all_reduce", 0)
                assert 0 <= missing <= found[axis].get("all_reduce", (0, 0))[0], f"{label} {axis}"
                exactly = sent | ({"all_reduce": operations["all_reduce"]} if "all_reduce" in sent else {})
                assert exactly == {name: num_bytes for name, num_bytes in operations.items() if num_bytes}, (
                    f"{label} {axis}"
                )
    return by_rank


# Every stage that sends parts, over all and over some; each way to accumulate and to update.
FEW = [Zero(1, 2, optimizer_within="all"), Zero(2, None, "local"), Zero(3, 2)]


@pytest.mark.parametrize(
    ("name", "tied", "precision", "shapes", "zeros"),
    [
        pytest.param("llama", False, "fp32", [(4, 3)], FEW, id="llama, few"),
        *(
            pytest.param(name, tied, precision, [shape], None, marks=pytest.mark.grid, id=f"{name}, all of {shape}")
            for name, tied, precision, shapes in (
                ("llama", False, "fp32", [(4, 3), (2, 1), (3, 3)]),
                ("gpt2", True, "bf16", [(2, 3), (4, 1)]),
            )
            for shape in shapes
        ),
    ],
)
def test_bytes_per_step_are_those_of_theory(
    pool: RankPool, name: str, tied: bool, precision: str, shapes: list[tuple[int, int]], zeros: list[Zero] | None
) -> None:
    """shapes: ranks and microbatches. zeros: None for all that there are."""
    layouts = {
        f"{world} ranks, {count} microbatches, {zero}": small_recipe(precision, world, count, SEQUENCES, None, zero)
        for world, count in shapes
        for zero in zeros or ways(world)
    }
    assert_volumes(pool, Case("", family(name), layouts, {"tie_word_embeddings": tied}))


@pytest.mark.parametrize(
    "zeros", [[Zero(2), Zero(3)], pytest.param(ways(2), marks=pytest.mark.grid)], ids=["few", "all"]
)
def test_frozen_units_are_gathered_and_not_reduced(pool: RankPool, zeros: list[Zero]) -> None:
    """Frozen units at the bottom are read in forward only."""
    model = Model(freeze=["embed_tokens", r"layers\.0\."])
    layouts = {str(zero): replace(small_recipe("fp32", 2, 3, SEQUENCES, None, zero), model=model) for zero in zeros}
    case = Case("", family("llama"), layouts)
    by_rank = assert_volumes(pool, case, frozen_units=("embedding", "layers.0"))
    for rank, (label, recipe) in product(range(2), layouts.items()):
        assert_planned(case, recipe, rank, by_rank[rank][f"{label}, step 1"])


def test_a_head_whose_backward_comes_later_is_gathered_twice(pool: RankPool) -> None:
    """In gpipe, where all forwards come first. Both pipelines have one microbatch after another in 1f1b."""
    parallel = {name: (Parallel(pp=2), Pipeline(schedule=name)) for name in ("gpipe", "1f1b")}
    layouts = {
        name: replace(small_recipe("fp32", 4, 3, SEQUENCES, None, Zero(3)), parallel=each, pipeline=pipeline)
        for name, (each, pipeline) in parallel.items()
    }
    case = Case("", family("llama"), layouts, {"tie_word_embeddings": False})
    for rank, found in enumerate(pool.run(4, measure_volume, case)):
        for name, recipe in layouts.items():
            assert_planned(case, recipe, rank, found[f"{name}, step 1"])


def assert_planned(case: Case, recipe: Recipe, rank: int, found: TrafficReading) -> None:
    planned = measure_traffic(make_plan(recipe, case.config), rank)
    sent = sum(num_bytes for operations in found.values() for _, num_bytes in operations.values())
    assert sent == sum(planned[kind] for kind in ("gathers", "reductions to shards", "to replicas"))
