"""Replicas that drift apart: one flipped bit in any state that ranks hold alike is seen by all of them, with rank and unit; clean
runs of every layout go on."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from framework.comm.connect import connect
from framework.errors import EXIT_FAILED, DriftError
from framework.model.initial import persistent_buffers
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.row_codes import RowCodec
from framework.plan.plan import make_plan
from framework.recipe.schema import Adapter, Model, Parallel, Pipeline, Recipe, Zero
from framework.train import step as step_module
from framework.train.build import build
from framework.train.replicas import check_replicas
from framework.train.stage import RankStage, StepInputs
from framework.train.state import RunState, restore, saved_entries
from framework.train.step import TrainingRun, train_step
from framework.verify.layout import share
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankPool
from tests.saving import save_checkpoint

pytestmark = IN_TURN

WORLD = 4
FLIPPED = 1  # the rank whose memory is faulty
STEPS = 50


def recipe_of(zero: Zero, precision: str = "fp32", model: Model | None = None, **parallel: Any) -> Recipe:
    recipe = small_recipe(precision, WORLD, 1, 12, 0.05, zero, Parallel(**parallel))
    if parallel.get("pp", 1) > 1:
        recipe = replace(recipe, pipeline=Pipeline("1f1b"))
    return replace(recipe, model=model or recipe.model)


def bits_of(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


Find = Callable[[TrainingRun], Tensor]


def first(
    run: TrainingRun, of: Callable[[UnitBuffer], Tensor], fits: Callable[[UnitBuffer], bool] = lambda buffer: True
) -> Tensor:
    """Of the first buffer that others hold, too."""
    shared = (buffer for buffer in run.buffers if any(axis.size > 1 for axis in buffer.plan.axes.replicas))
    return of(next(buffer for buffer in shared if fits(buffer)))


def master(run: TrainingRun) -> Tensor:
    return first(run, lambda buffer: buffer.master)


def norm_master(run: TrainingRun) -> Tensor:
    return first(run, lambda buffer: buffer.master, lambda buffer: "norm" in buffer.slots[0].name)


def moment(run: TrainingRun) -> Tensor:
    name = run.optimizer.state_names[1]
    shared = [each for each in run.shards if any(axis.size > 1 for axis in each.buffer.plan.axes.replicas)]
    state = run.optimizer.state(shared[-1].shard, name)
    assert isinstance(state, Tensor)
    return state


def router_bias(run: TrainingRun) -> Tensor:
    return next(
        tensor.view(-1)
        for stage in run.stages.values()
        for name, tensor in persistent_buffers(stage.model.model).items()
        if "bias" in name
    )


def tied_embedding(run: TrainingRun) -> Tensor:
    return first(
        run, lambda buffer: buffer.master, lambda buffer: "embedding" in {a.name for a in buffer.plan.axes.replicas}
    )


def kv_weight(run: TrainingRun) -> Tensor:
    return first(run, lambda buffer: buffer.master, lambda buffer: "kv" in {a.name for a in buffer.plan.axes.replicas})


def router_weight(run: TrainingRun) -> Tensor:
    def of(buffer: UnitBuffer) -> Tensor:
        slot = next(slot for slot in buffer.slots if ".gate." in slot.name)
        return buffer.held(slot, buffer.master)[1]

    return first(run, of, lambda buffer: any(".gate." in slot.name for slot in buffer.slots))


def last_code(run: TrainingRun) -> Tensor:
    """Of a frozen weight that is kept as codes."""
    return first(run, lambda buffer: buffer.master[-1:], lambda buffer: isinstance(buffer.plan.dtypes.codec, RowCodec))


def parameters(run: TrainingRun) -> Tensor:
    """Of the last unit, as this rank has gathered them: elements that are another rank's."""
    buffer = run.buffers[-1]
    elements = buffer.full[: buffer.plan.numel]
    return elements[-1:] if buffer.plan.part_start == 0 else elements[:1]


# By layout: the family, the recipe, and each state in which a bit is flipped with what the message calls it.
LAYOUTS: Mapping[str, tuple[str, Recipe, Mapping[str, tuple[Find, str, bool]]]] = {
    "zero 0": (
        "llama",
        recipe_of(Zero(0)),
        {"master": (master, "master of embedding", True), "moments": (moment, "moments of ", True)},
    ),
    "zero 1, bf16": (
        "llama",
        recipe_of(Zero(1), "bf16"),
        {"gathered": (parameters, "parameters of ", True)},
    ),
    "frozen codes": (
        "llama",
        replace(recipe_of(Zero(0)), adapter=Adapter("lora", 2, 2.0, base="fp8")),
        {"code": (last_code, "master of layers.0", True)},
    ),
    "hsdp, zero 3": (
        "llama",
        recipe_of(Zero(3, shard_within=2)),
        {"master": (master, "master of ", False), "moments": (moment, "moments of ", False)},
    ),
    "tp": (
        "llama",
        recipe_of(Zero(1), tp=2),
        {"norm": (norm_master, "master of ", False)},
    ),
    "pp, tied": (
        "gpt2",
        recipe_of(Zero(0), pp=2),
        {"tie": (tied_embedding, "master of ", True)},
    ),
    "kv heads": (
        "llama",
        recipe_of(Zero(1), tp=4),
        {"kv": (kv_weight, "master of layers.0", False)},
    ),
    "ep, router bias": (
        "deepseek_v3",
        recipe_of(Zero(0), model=Model(router_bias_rate=0.05), ep=2),
        {"bias": (router_bias, "buffer of ", True), "router": (router_weight, "master of layers.1", True)},
    ),
}


def flipped(find: Find, run: TrainingRun) -> Callable[[], None]:
    """Flips a bit of this rank, one in the middle of a number; called again, it is as it was."""

    def flip() -> None:
        bits = bits_of(find(run))
        bits[len(bits) // 2] ^= 4

    return flip


def with_faulty_memory(flip: Callable[[], None]) -> AbstractContextManager[Any]:
    """A bit flips while a step is under way, behind its backward."""
    whole = step_module._sum

    def sum_later(*args: Any) -> Any:
        flip()
        return whole(*args)

    return patch.object(step_module, "_sum", sum_later)


def train(rank: int, world: int, rendezvous: str, name: str, steps: int) -> dict[str, str]:
    """Body: the error behind each flip, by the state's name; the run is compared behind each of its steps before."""
    model, recipe, flips = LAYOUTS[name]
    case = Case(name, family(model), {"": recipe}, {"num_key_value_heads": 2} if name == "kv heads" else {})
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    batches = case.batches()
    found: dict[str, str] = {}

    def take(step: int) -> Any:
        batch = share(batches[step % len(batches)], recipe.batch.sequences_per_microbatch, mesh)
        return train_step(run, batch, step, 1e-2, is_compared=True).hashed

    for step in range(steps):
        check_replicas(run, step + 1, take(step))
    for state, (find, _, _) in flips.items():
        flip, hashed = flipped(find, run) if rank == FLIPPED else (lambda: None), ()
        if state == "gathered":
            with with_faulty_memory(flip):
                hashed = take(steps)
        else:
            flip()
        try:
            check_replicas(run, steps + 1, hashed)
        except DriftError as error:
            found[state] = f"{error.exit_code == EXIT_FAILED}: {error}"
        if state != "gathered":
            flip()
    check_replicas(run, steps + 1)
    mesh.close()
    return found


def check(pool: RankPool, name: str, steps: int) -> None:
    first_rank, *others = pool.run(WORLD, train, name, steps, timeout_s=300)
    assert all(each == first_rank for each in others)
    _, _, flips = LAYOUTS[name]
    assert first_rank.keys() == flips.keys()
    assert all(message.startswith("True: after step") for message in first_rank.values())
    for state, (_, words, has_majority) in flips.items():
        (line,) = [line for line in first_rank[state].splitlines() if line.startswith("  ")]
        assert words in line
        assert f"rank {FLIPPED} [" in line
        assert ("differs from" in line) == has_majority, line


@pytest.mark.parametrize("name", few_of(LAYOUTS, lambda name: name in ("zero 0", "zero 1, bf16")))
def test_one_flipped_bit_is_seen_by_all_with_rank_and_unit(pool: RankPool, name: str) -> None:
    check(pool, name, 2)


@pytest.mark.grid
@pytest.mark.parametrize("name", LAYOUTS)
def test_50_clean_steps_differ_nowhere(pool: RankPool, name: str) -> None:
    check(pool, name, STEPS)


# --- a drift that goes through a restart


def find_drift(run: TrainingRun, step: int) -> str:
    """What the comparison says, `` where all replicas are equal."""
    try:
        check_replicas(run, step)
    except DriftError as error:
        return str(error)
    return ""


def restart_with_a_flip(
    rank: int, world: int, rendezvous: str, name: str, flips_on: Sequence[int], place: Path
) -> list[str]:
    """Body: bits flip while nobody compares, and are saved; another start loads them, and there one flips again. What comparisons
    say before the save, behind the load, behind a step, and behind the second flip."""
    model, recipe, flips = LAYOUTS[name]
    case = Case(name, family(model), {"": recipe})
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    plan, batches = make_plan(recipe, case.config), case.batches()
    run, finds = build(plan, mesh), [find for find, _, _ in flips.values()]

    def take(run: TrainingRun, step: int) -> None:
        train_step(run, share(batches[step], recipe.batch.sequences_per_microbatch, mesh), step, 1e-2)

    take(run, 0)
    if rank in flips_on:
        for find in finds:
            flipped(find, run)()
    said = [find_drift(run, 1)]
    state = RunState("run", "data", step=1, num_updates=run.optimizer.num_updates)
    entries, world_axis = list(saved_entries(run)), mesh.axis("world")
    save_checkpoint(place / "checkpoints", 1, entries, state.to_json(), world_axis, keep=1)
    again = build(plan, mesh, resumes=True)
    restore(again, place / "checkpoints")
    said.append(find_drift(again, 1))
    take(again, 1)
    said.append(find_drift(again, 2))
    if rank == FLIPPED:
        flipped(finds[0], again)()
    said.append(find_drift(again, 2))
    mesh.close()
    return said


RESTARTED = ("zero 0", "hsdp, zero 3", "ep, router bias")


@pytest.mark.parametrize("name", few_of(RESTARTED, lambda name: name == "zero 0"))
@pytest.mark.parametrize("flips_on", few_of([((FLIPPED,),), ((0, 2, 3),)], lambda ranks: ranks == (FLIPPED,)))
def test_a_drift_that_was_saved_is_none_behind_the_restart_and_the_next_one_is_found(
    pool: RankPool, tmp_path: Path, name: str, flips_on: tuple[int, ...]
) -> None:
    """Of each element one replica writes, and all read what it wrote: a restart makes replicas equal, in the clean bits or in the
    flipped ones. So the comparison must come before the save, as it does, and finds what flips after the restart."""
    for before, loaded, trained, behind in pool.run(WORLD, restart_with_a_flip, name, flips_on, tmp_path):
        assert "after step 1" in before
        assert (loaded, trained) == ("", "")
        assert "after step 2" in behind
        assert f"rank {FLIPPED} [" in behind


# --- NaN on one rank


def nan_here(stage: RankStage, inputs: StepInputs) -> None:
    """This rank's backward, and no other's, begins from NaN."""
    START(stage, replace(inputs, loss_scale=torch.full_like(inputs.loss_scale, torch.nan)))


START = RankStage.start_step


def train_with_a_nan(rank: int, world: int, rendezvous: str, name: str) -> list[tuple[bool, bool]]:
    """Body: of each step whether it was finite, and whether this rank's masters have moved. The second has the NaN."""
    model, recipe, _ = LAYOUTS[name]
    case = Case(name, family(model), {"": recipe})
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    found = []
    for step, batch in enumerate(case.batches()):
        is_faulty = step == 1 and rank == world - 1
        before = [buffer.master.clone() for buffer in run.buffers]
        with patch.object(RankStage, "start_step", nan_here if is_faulty else START):
            microbatches = share(batch, recipe.batch.sequences_per_microbatch, mesh)
            values = train_step(run, microbatches, step, 1e-2).read()
        moved = any(not torch.equal(old, each.master) for old, each in zip(before, run.buffers, strict=True))
        found.append((values.is_finite, moved))
    check_replicas(run, len(found))
    mesh.close()
    return found


NAN_LAYOUTS = ("zero 0", "hsdp, zero 3", "tp", "pp, tied", "ep, router bias")


@pytest.mark.parametrize("name", few_of(NAN_LAYOUTS, lambda name: name == "pp, tied"))
def test_a_nan_on_one_rank_skips_the_step_on_all(pool: RankPool, name: str) -> None:
    assert pool.run(WORLD, train_with_a_nan, name) == [[(True, True), (False, False), (True, True)]] * WORLD
