"""Bytes that a rank holds are those of the table in docs/zero.md, and what comes and goes stays under its stated peak."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.errors import LayoutError
from framework.mesh.layout import Layout
from framework.mesh.topology import Axis
from framework.model.load import build_meta
from framework.model.units import Unit, find_units
from framework.optim.optimizers import FlatOptimizer, state_names
from framework.optim.update_rules import FlatShard, ShardGroup
from framework.parallel.zero.buffer_plan import Home, Homes, lifetimes_of
from framework.parallel.zero.buffers import UnitBuffer, make_buffers
from framework.parallel.zero.gradients import REDUCTIONS_IN_FLIGHT
from framework.parallel.zero.plan_buffers import plan_buffers, shard_over_batch
from framework.plan.plan import make_plan
from framework.recipe.schema import Optim, Recipe, Zero
from framework.train.build import build
from framework.train.step import TrainingRun, train_step
from framework.verify.layout import share
from tests.families import build_config, family
from tests.grid import IN_TURN, few_of
from tests.planned import held_by_buffers
from tests.ranks.parity import CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Held:
    """Bytes of one rank between two steps. Where master and parameters are the same memory, it is parameters'."""

    parameters: int
    gradients: int
    master: int
    optimizer: int


def count_bytes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of the tensors' storages, by address."""
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}


def measure_held(buffers: list[UnitBuffer]) -> Held:
    parameters = count_bytes(each for buffer in buffers for each in (buffer.full, buffer.shard))
    gradients = count_bytes(each for buffer in buffers for each in (buffer.gradient, buffer.reduced))
    master = count_bytes(buffer.master for buffer in buffers)
    slices = [
        (buffer, slice(span.start - buffer.plan.start, span.stop - buffer.plan.start))
        for buffer in buffers
        for span in buffer.plan.spans
    ]
    shards = tuple(FlatShard((), buffer.master[where], buffer.reduced[where]) for buffer, where in slices)
    optimizer = FlatOptimizer("adamw", Optim(name="adamw"), [ShardGroup("default", shards, 1.0, 0.0)], CPU)
    states = count_bytes(
        optimizer.state(each, name) for each, name in product(shards, state_names(Optim(name="adamw")))
    )
    return Held(
        sum(parameters.values()),
        sum(gradients.values()),
        sum(num_bytes for address, num_bytes in master.items() if address not in parameters),
        sum(states.values()),
    )


def expect_held(num_parameters: int, compute: str, zero: Zero, n: int) -> Held:
    """The table: c bytes of a parameter in the compute dtype, 4 of its gradient, of its master and of each Adam moment."""
    c = {"fp32": 4, "bf16": 2}[compute]
    of_shard = num_parameters / n
    keeps_gradients = zero.stage == 1 or zero.accumulate == "local"
    return Held(
        round(c * (of_shard if zero.stage == 3 else num_parameters)),
        round(4 * (num_parameters if keeps_gradients else of_shard)),
        0 if compute == "fp32" else round(4 * of_shard),
        round(8 * of_shard),
    )


def tables_model() -> tuple[int, dict[str, Layout], list[Unit]]:
    """Number of parameters, their layouts and units."""
    model = build_meta(build_config(family("llama"), hidden_size=64, intermediate_size=160))
    units = find_units(model)
    layouts = {name: Layout(tuple(model.get_parameter(name).shape)) for unit in units for name in unit.parameters}
    return sum(layout.numel_local for layout in layouts.values()), layouts, units


def allocated(
    units: list[Unit], layouts: dict[str, Layout], compute: str, zero: Zero, axes: dict[str, Communicator]
) -> list[UnitBuffer]:
    dtypes, groups = dict.fromkeys(layouts, DTYPES[compute]), dict.fromkeys(layouts, "all")
    plans = plan_buffers(units, shard_over_batch(layouts), groups, dtypes, torch.float32, lifetimes_of(zero), axes)
    buffers = make_buffers(plans)
    for buffer in buffers:
        buffer.allocate(CPU)
    return buffers


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("accumulate", ["sharded", "local"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_bytes_per_rank_are_the_tables(compute: str, stage: int, accumulate: str, n: int) -> None:
    """The axis has no process group: planning and allocating need none, of however many ranks."""
    zero = Zero(stage=stage, accumulate=accumulate)  # type: ignore[arg-type]
    num_parameters, layouts, units = tables_model()
    for rank in (0, n - 1):
        axes = {
            "shard": Communicator(Axis("shard", n, rank, tuple(range(n)))),
            "replica": Communicator(Axis("replica", 1, 0)),
        }
        found = measure_held(allocated(units, layouts, compute, zero, axes))
        expected = expect_held(num_parameters, compute, zero, n)
        for quantity in ("parameters", "gradients", "master", "optimizer"):
            assert getattr(found, quantity) == pytest.approx(getattr(expected, quantity), rel=0.02), (rank, quantity)


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_that_divide_the_update_divide_master_and_optimizer_state(stage: int, replicas: int) -> None:
    n = 2
    zero = Zero(stage=stage, shard_within=n, optimizer_within="all")
    num_parameters, layouts, units = tables_model()
    for rank in range(replicas):
        replica = Communicator(Axis("replica", replicas, rank, tuple(range(0, n * replicas, n))))
        axes = {"shard": Communicator(Axis("shard", n, n - 1, tuple(range(n)))), "replica": replica}
        found = measure_held(allocated(units, layouts, "bf16", zero, axes))
        expected = expect_held(num_parameters, "bf16", zero, n)
        assert found.parameters == pytest.approx(expected.parameters, rel=0.02)
        assert found.gradients == pytest.approx(expected.gradients, rel=0.02)
        assert found.master == pytest.approx(expected.master / replicas, rel=0.02)
        assert found.optimizer == pytest.approx(expected.optimizer / replicas, rel=0.02)


def test_a_home_is_counted_where_it_is() -> None:
    _, layouts, units = tables_model()
    axes = {"shard": Communicator(Axis("shard", 2, 0, (0, 1))), "replica": Communicator(Axis("replica", 1, 0))}
    dtypes, groups = dict.fromkeys(layouts, torch.bfloat16), dict.fromkeys(layouts, "all")
    lifetimes = replace(lifetimes_of(Zero(stage=3)), homes=Homes(parameters=Home.HOST, master=Home.DISK))
    plan = plan_buffers(units, shard_over_batch(layouts), groups, dtypes, torch.float32, lifetimes, axes)[0]
    held = {
        home: {state: num for state, num in plan.held_bytes(2 * plan.numel_owned, home).items() if num} for home in Home
    }
    owned = plan.numel_owned
    assert held[Home.HOST] == {"parameters": 2 * owned}
    assert held[Home.DISK] == {"master": 4 * owned, "moments": 8 * owned}
    assert held[Home.DEVICE] == {"gradients": 4 * owned}


def test_parameters_with_zero_axes_of_their_own_get_a_buffer_of_their_own() -> None:
    axes = {
        name: Communicator(Axis(name, size, 0, tuple(range(size)))) for name, size in (("shard", 4), ("replica", 1))
    }
    axes |= {name: Communicator(Axis(name, 2, 0, (0, 1))) for name in ("expert_shard", "expert_replica")}
    expert = Layout((6,), shard_axis="expert_shard", replica_axis="expert_replica")
    layouts = shard_over_batch({"norm": Layout((6,)), "experts": expert})
    units = [Unit("layers.0", ("layers.0",), tuple(layouts))]
    dtypes, groups = dict.fromkeys(layouts, torch.float32), dict.fromkeys(layouts, "all")
    for zero, replicas in ((Zero(stage=2), ["expert_replica"]), (Zero(stage=2, optimizer_within="all"), [])):
        dense, experts = plan_buffers(units, layouts, groups, dtypes, torch.float32, lifetimes_of(zero), axes)
        assert [dense.axes.shard.name, experts.axes.shard.name] == ["shard", "expert_shard"]
        assert [axis.name for axis in experts.axes.replicas] == replicas
        assert [dense.numel_part, experts.numel_part] == [2, 3 if replicas else 4]
    with pytest.raises(LayoutError, match="names no shard and replica axis"):
        plan_buffers(
            units, {**layouts, "norm": Layout((6,))}, groups, dtypes, torch.float32, lifetimes_of(Zero()), axes
        )


def measure_peaks(rank: int, world: int, rendezvous: str, case: Case) -> dict[str, tuple[int, int]]:
    """Body: for each layout the most bytes of unsharded parameters that a step ever has, and of full gradients."""
    found = {}
    mesh = connect(topology_of(next(iter(case.layouts.values())), case.config), CPU, rendezvous, rank)
    for label, recipe in case.layouts.items():
        run = build(make_plan(recipe, case.config), mesh)
        found[label] = watch_peaks(run, recipe, case)
    mesh.close()
    return found


def watch_peaks(run: TrainingRun, recipe: Recipe, case: Case) -> tuple[int, int]:
    """Unsharding alone adds to full parameters, and opening a unit's gradient to those: what is under way still has memory."""
    peak, most_gradients, sync = 0, 0, run.stages[0].gradients
    start_unshard = run.stages[0].parameters.start_unshard
    come_and_go = [buffer for buffer in sync.buffers if not buffer.plan.lifetimes.keeps_gradients]

    def watched(index: int) -> None:
        nonlocal peak
        start_unshard(index)
        peak = max(peak, sum(buffer.full.untyped_storage().nbytes() for buffer in run.buffers))

    def opened(open_gradient: Callable[[], None]) -> None:
        nonlocal most_gradients
        open_gradient()
        under_way = [each.full for each in sync._reductions if each.buffer in come_and_go]
        open_now = [buffer.gradient for buffer in come_and_go]
        most_gradients = max(most_gradients, sum(x.nbytes for x in (*under_way, *open_now)))

    run.stages[0].parameters.start_unshard = watched  # type: ignore[method-assign]
    for buffer in come_and_go:
        buffer.open_gradient = partial(opened, buffer.open_gradient)  # type: ignore[method-assign]
    for step, batch in enumerate(case.batches()):
        train_step(run, share(batch, recipe.batch.sequences_per_microbatch, run.mesh), step, 1e-3)
    return peak, most_gradients


@pytest.mark.parametrize("tied", few_of([True, False], bool))
def test_unsharded_parameters_and_full_gradients_stay_under_their_peaks(pool: RankPool, tied: bool) -> None:
    """Unsharded at stage 3: the layer in use, one ahead and the larger of embedding and head. Full gradients from stage 2 on:
    the layer that backward fills, those under way, and of embedding and head both if they are one."""
    world = 2
    layouts = {
        f"stage {stage}, {count} microbatches": small_recipe("fp32", world, count, 12, None, Zero(stage=stage))
        for stage, count in product((2, 3), (1, 3))
    }
    case = Case("", family("llama"), layouts, {"num_hidden_layers": 6, "tie_word_embeddings": tied})
    model = build_meta(case.config)
    sizes = {
        unit.name: 4 * (sum(model.get_parameter(name).numel() for name in unit.parameters) + world - 1)
        for unit in find_units(model)
    }
    layer, ends = sizes["layers.0"], (sizes["embedding"], sizes["head"])
    for found in pool.run(world, measure_peaks, case):
        for label, (parameters, gradients) in found.items():
            full = (1 + REDUCTIONS_IN_FLIGHT) * layer + (sum(ends) if tied else max(ends))
            assert 0 < gradients <= full, label
            if "stage 3" in label:
                assert layer < parameters <= 2 * layer + max(ends), label


WAYS = {
    "stage 1": Zero(1),
    "stage 2": Zero(2),
    "stage 2, local": Zero(2, accumulate="local"),
    "stage 3": Zero(3),
    "stage 3, local": Zero(3, accumulate="local"),
    "stage 3, prefetch 3": Zero(3, prefetch_units=3),
    "stage 3, kept": Zero(3, keep_gathered=True),
}


@pytest.mark.grid
@pytest.mark.parametrize(
    "changes", [{}, {"vocab_size": 1000, "tie_word_embeddings": True}, {"vocab_size": 1000}], ids=str
)
def test_what_comes_and_goes_stays_under_the_plan(pool: RankPool, changes: dict[str, object]) -> None:
    """Full parameters and full gradients are at most what the plan says is gathered."""
    case = Case("", family("llama"), {}, {"num_hidden_layers": 9} | changes)
    layouts = {
        f"{label}, {count} microbatches": small_recipe("fp32", 2, count, 12, None, zero)
        for (label, zero), count in product(WAYS.items(), (1, 3))
    }
    planned = {
        label: held_by_buffers(make_plan(recipe, case.config), 0)["gathered"] for label, recipe in layouts.items()
    }
    for found in pool.run(2, measure_peaks, replace(case, layouts=layouts), timeout_s=120):
        for label, (parameters, gradients) in found.items():
            gathered = parameters if "stage 3" in label else 0
            assert gathered + gradients <= planned[label], (label, parameters, gradients, planned[label])
