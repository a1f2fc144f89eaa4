"""Offload is a home and not an algorithm: whatever lives on the host, every bit of a training run is the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from framework.comm.connect import connect
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.gradients import GradientSync
from framework.plan.plan import make_plan
from framework.recipe.schema import Offload, Recipe, Zero
from framework.train.build import build
from framework.train.state import RunState, restore, saved_entries
from framework.train.step import TrainingRun, train_step
from framework.train.update import UpdatedTogether
from framework.verify.evidence import make_batches
from framework.verify.layout import run_layout, share
from tests.families import build_config, family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CONTEXT, CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankFailure, RankPool
from tests.ranks.recorded import LAYOUTS, SEQUENCES, describe
from tests.ranks.test_zero_lifetimes import train_steps
from tests.saving import save_checkpoint

pytestmark = IN_TURN

KINDS = ("parameters", "gradients", "master", "optimizer")
STEPS = 3
# What runs each day: replicas that divide the update, all of stage 3. Copies of parameters on two stages: the grid.
FEW = ("zero 3", "hsdp, bf16, updates divided")


def offload(recipe: Recipe, optimizer: float, parameters: float) -> Recipe:
    return replace(recipe, memory=replace(recipe.memory, offload=Offload(optimizer, parameters)))


def variants_of(recipe: Recipe, every: bool) -> dict[str, Recipe]:
    """The recipe, and what of it lives elsewhere: some and all of each; every: more of their pairs."""
    if recipe.zero.stage < 3:
        fractions = [(0.0, 0.0), (0.5, 0.0), (1.0, 0.0)]
    elif every:
        fractions = [(0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (1.0, 1.0)]
    else:
        fractions = [(0.0, 0.0), (0.5, 1.0), (1.0, 0.5)]
    return {f"optimizer {some}, parameters {other}": offload(recipe, some, other) for some, other in fractions}


def train_variants(
    rank: int, world: int, rendezvous: str, names: Sequence[str], every: bool
) -> dict[str, Mapping[str, Any]]:
    """Body: by layout and variant, every bit of a short run."""
    found = {}
    for number, name in enumerate(names):
        layout = LAYOUTS[name]
        if rank >= layout.world:
            continue
        config = build_config(family(layout.model), **layout.changes)
        config.use_cache = False
        mesh = connect(topology_of(layout.recipe, config), CPU, f"{rendezvous}-{number}", rank)
        batches = make_batches(config, STEPS, SEQUENCES, CONTEXT, seed=11)
        found[name] = {
            label: describe(run_layout(make_plan(recipe, config), batches, mesh))
            for label, recipe in variants_of(layout.recipe, every).items()
        }
        mesh.close()
    return found


def assert_homes_change_nothing(pool: RankPool, names: Sequence[str], every: bool = True) -> None:
    found = pool.run(max(LAYOUTS[name].world for name in names), train_variants, names, every, timeout_s=600)[0]
    assert found.keys() == set(names)
    for name, by_variant in found.items():
        first, *others = by_variant.items()
        for label, evidence in others:
            assert evidence == first[1], (name, label)


def test_a_run_with_states_on_the_host_is_the_same_run(pool: RankPool) -> None:
    assert_homes_change_nothing(pool, FEW, every=False)


@pytest.mark.grid
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_any_layout_with_states_on_the_host_is_the_same_run(pool: RankPool, name: str) -> None:
    assert_homes_change_nothing(pool, [name])


def count_by_home(run: TrainingRun) -> dict[str, dict[str, int]]:
    """Bytes of distinct memory by home and kind, between two steps; each object says where it lives."""
    kinds: dict[str, dict[str, list[Tensor]]] = {home: {kind: [] for kind in KINDS} for home in ("device", "host")}
    for buffer in run.buffers:
        homes = buffer.plan.lifetimes.homes
        if buffer.full.untyped_storage().nbytes():
            kinds["device"]["parameters"].append(buffer.full)
        kinds[homes.parameters.value]["parameters"].append(buffer.shard)
        # Else `gradient` is what is left of a turn in the pool's memory.
        kept = [buffer.gradient] if buffer.plan.lifetimes.keeps_gradients else []
        kinds["device"]["gradients"] += [*kept, buffer.summed]
        kinds[homes.master.value]["gradients"].append(buffer.delivered)
        kinds[homes.master.value]["master"].append(buffer.master)
    for each in run.shards:
        home = each.buffer.plan.lifetimes.homes.master.value
        kinds[home]["optimizer"] += [run.optimizer.state(each.shard, name) for name in run.optimizer.state_names]
    seen: set[int] = set()
    totals: dict[str, dict[str, int]] = {}
    for home, by_kind in kinds.items():
        totals[home] = {}
        for kind, tensors in by_kind.items():
            storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
            totals[home][kind] = sum(num_bytes for place, num_bytes in storages.items() if place not in seen)
            seen |= storages.keys()
    return totals


def count_variants(rank: int, world: int, rendezvous: str, recipes: dict[str, Recipe]) -> dict[str, Any]:
    """Body: bytes by home after a step, and what the plan says of them."""
    found = {}
    config = build_config(family("llama"), tie_word_embeddings=False)
    mesh = connect(topology_of(next(iter(recipes.values())), config), CPU, rendezvous, rank)
    batch = make_batches(config, 1, SEQUENCES, CONTEXT, seed=11)[0]
    for label, recipe in recipes.items():
        plan = make_plan(recipe, config)
        run = build(plan, mesh)
        train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
        memory = plan.memory(rank)
        found[label] = count_by_home(run), {"device": memory.held, "host": memory.on_host}
    mesh.close()
    return found


@pytest.mark.parametrize("precision", few_of(["bf16", "fp32"], lambda precision: precision == "bf16"))
def test_each_home_holds_what_is_planned_and_the_device_nothing_of_the_optimizer(
    pool: RankPool, precision: str
) -> None:
    recipes = {}
    for fractions in ((0.0, 0.0), (0.5, 0.0), (1.0, 0.0), (1.0, 1.0)):
        recipe = small_recipe(precision, 2, 1, SEQUENCES, None, Zero(3))
        recipes[str(fractions)] = offload(recipe, *fractions)
    for rank, found in enumerate(pool.run(2, count_variants, recipes)):
        for label, (counted, planned) in found.items():
            for home, by_kind in counted.items():
                # Moments leave out the padding that the last rank holds.
                assert by_kind.pop("optimizer") == pytest.approx(planned[home]["optimizer"], rel=0.02), (rank, label)
                assert by_kind == {kind: planned[home][kind] for kind in by_kind}, (rank, label, home)
        device = {label: planned["device"] for label, (_, planned) in found.items()}
        all_of_it = device["(1.0, 0.0)"]
        assert all_of_it["master"] == all_of_it["optimizer"] == 0 < all_of_it["parameters"]
        assert device["(1.0, 1.0)"]["parameters"] == 0
        half = [device[label]["optimizer"] for label in ("(0.0, 0.0)", "(0.5, 0.0)")]
        assert half[1] == pytest.approx(half[0] / 2, rel=0.25)  # whole units, of which there are five


def save_and_go_on(
    rank: int, world: int, rendezvous: str, roots: Mapping[str, Path], recipes: Mapping[str, Recipe]
) -> Any:
    """Body: losses and norms after a checkpoint, by what saved it and what has read it."""
    case = Case("", family("qwen3_moe"), dict(recipes))
    mesh = connect(topology_of(next(iter(recipes.values())), case.config), CPU, rendezvous, rank)
    found = {}
    for saver, recipe in recipes.items():
        run = build(make_plan(recipe, case.config), mesh)
        train_steps(run, recipe, case.batches()[:1])
        state = RunState("run", "", step=1, num_updates=run.optimizer.num_updates)
        save_checkpoint(roots[saver], 1, saved_entries(run), state.to_json(), mesh.axis("world"), keep=1)
        found[saver, "none"] = train_steps(run, recipe, case.batches(), start=1)
        for reader, other in recipes.items():
            resumed = build(make_plan(other, case.config), mesh, resumes=True)
            restore(resumed, roots[saver])
            found[saver, reader] = train_steps(resumed, other, case.batches(), start=1)
    mesh.close()
    return found


DIVIDED = Zero(3, shard_within=1, optimizer_within="all")


@pytest.mark.grid  # states on a disk go on: faults/test_launch_train.py
@pytest.mark.parametrize("zero", few_of([DIVIDED, Zero(2)], lambda zero: zero.stage == 3))
def test_checkpoints_know_no_home(pool: RankPool, tmp_path: Path, zero: Zero) -> None:
    """Saved with states on the host and resumed without, and the other way round: bit by bit the run that never stopped."""
    there = small_recipe("bf16", 2, 1, SEQUENCES, 0.05, zero)
    recipes = {"there": there, "away": offload(there, 1.0, float(zero.stage == 3))}
    found = pool.run(2, save_and_go_on, {name: tmp_path / name for name in recipes}, recipes)[0]
    assert len(found) == 6
    assert all(each == found["there", "none"] for each in found.values())


def train_one(rank: int, world: int, rendezvous: str, recipe: Recipe, sabotage: str) -> Any:
    """Body: losses of a run, with one rule of offload broken."""
    with SABOTAGES[sabotage]():
        case = Case("", family("llama"), {"": recipe})
        mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
        evidence = run_layout(make_plan(recipe, case.config), case.batches(), mesh)
        mesh.close()
    return describe(evidence)


def update_twice() -> AbstractContextManager[Any]:
    """What lives on the host is updated once more."""
    update = UpdatedTogether.update

    def twice(part: UpdatedTogether, *args: Any) -> None:
        update(part, *args)
        if any(buffer.is_updated_on_host for buffer in part.buffers):
            update(part, *args)

    return patch.object(UpdatedTogether, "update", twice)


def keep_the_last_gradient() -> AbstractContextManager[Any]:
    """A gradient is not sent to the host."""
    return patch.object(UnitBuffer, "start_delivery", lambda buffer: None)


def leave_parameters_as_they_were() -> AbstractContextManager[Any]:
    """Updated masters are not sent to the device."""
    return patch.object(UnitBuffer, "copy_master_to_params", lambda buffer: None)


def send_before_the_sum() -> AbstractContextManager[Any]:
    """A gradient is on its way to the host while replicas are still summed into it."""
    sums = GradientSync._sum_replicas

    def hasty(sync: GradientSync, buffer: UnitBuffer) -> Any:
        buffer.start_delivery()
        yield from sums(sync, buffer)

    with_it = patch.object(GradientSync, "_sum_replicas", hasty)
    without = patch.object(GradientSync, "_sum_next", _sum_without_delivery)
    return _both(with_it, without)


def _sum_without_delivery(sync: GradientSync, sums: Any, bucket: Any) -> None:
    pending = next(sums, None)
    if pending is not None:
        sync._replica_sums.append((pending, sums, bucket))


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


SABOTAGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "update twice": update_twice,
    "keep the last gradient": keep_the_last_gradient,
    "leave parameters as they were": leave_parameters_as_they_were,
}


@pytest.mark.grid
def test_a_broken_rule_of_offload_changes_the_run(pool: RankPool) -> None:
    recipe = offload(small_recipe("fp32", 2, 1, SEQUENCES, 0.05, Zero(0)), 0.5, 0.0)
    found = {name: pool.run(2, train_one, recipe, name)[0] for name in SABOTAGES}
    plain = pool.run(2, train_one, offload(recipe, 0.0, 0.0), "none")[0]
    assert found.pop("none") == plain
    assert [name for name, evidence in found.items() if evidence["losses"] == plain["losses"]] == []


def send_hastily(rank: int, world: int, rendezvous: str, recipe: Recipe) -> None:
    with send_before_the_sum():
        case = Case("", family("llama"), {"": recipe})
        mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
        run_layout(make_plan(recipe, case.config), case.batches(), mesh)


def test_a_gradient_that_is_sent_before_it_is_complete_is_noticed(pool: RankPool) -> None:
    recipe = offload(small_recipe("fp32", 2, 1, SEQUENCES, 0.05, Zero(0)), 1.0, 0.0)
    with pytest.raises(RankFailure, match="was written to while it was on its way to the host"):
        pool.run(2, send_hastily, recipe)
