"""Parameters that travel as codes, and second copies of shards: the run of one process that rounds alike, exact otherwise."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from framework.comm.codec import BlockCodec
from framework.comm.communicator import read_traffic, subtract_traffic, sum_traffic
from framework.comm.connect import connect
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.parameters import ParameterSync
from framework.plan.forecast_plan import measure_traffic
from framework.plan.plan import Plan, make_plan
from framework.recipe.schema import Memory, Offload, Parallel, Recipe, Zero
from framework.train.build import build
from framework.train.state import saved_entries
from framework.train.step import train_step
from framework.verify.compare import compare
from framework.verify.evidence import Evidence
from framework.verify.layout import run_layout, share
from tests.families import family
from tests.grid import IN_TURN
from tests.laws.sabotage import Sabotage, errors_of
from tests.planned import held_by_buffers
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, Case, assert_equal, expect, small_recipe, topology_of, train_layouts
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

# Matrices of the tiny models have some hundred elements.
SMALL = 64
SEQUENCES = 24


def make(world: int = 4, accumulation: int = 1, precision: str = "fp64", parallel: Any = None, **zero: Any) -> Recipe:
    zero = {"stage": 3} | ({"quantize_min_elements": SMALL} if "quantize_gather" in zero else {}) | zero
    return small_recipe(precision, world, accumulation, SEQUENCES, 0.05, Zero(**zero), Parallel(**(parallel or {})))


# --- parity

OFFLOADED = Memory(compile="never", offload=Offload(optimizer=1.0, parameters=1.0))
FEW = {
    "llama": make(accumulation=3, quantize_gather="int8", secondary_shard=2),
    "mixtral": make(stage=2, quantize_gather="fp8", shard_within=2, optimizer_within="all", parallel={"ep": 2}),
}


def test_few_layouts_equal_one_process_that_rounds_alike(pool: RankPool) -> None:
    assert_equal(pool, 4, [Case(name, family(name), {"": recipe}) for name, recipe in FEW.items()])


STAGES = ({"stage": 2}, {"stage": 3}, {"stage": 3, "secondary_shard": 2})
SHARDS = ({}, {"shard_within": 4}, {"shard_within": 4, "optimizer_within": "all"})
FORMS = ({}, {"quantize_gather": "int8"}, {"quantize_gather": "fp8"})
DEGREES = ({}, {"tp": 2}, {"pp": 2}, {"ep": 2})
COVERING = cover_pairs(
    (STAGES, SHARDS, FORMS, DEGREES, (1, 3)),
    lambda stage, shard, form, degree, _: (
        bool(form or "secondary_shard" in stage) and not (shard and (degree.get("tp") or degree.get("pp")))
    ),
)


# Four ranks are enough for most; a second copy beside tp or pp, and over a part of HSDP's shards, takes eight.
@pytest.mark.grid(part=3)
def test_layouts_of_the_covering_equal_one_process_that_rounds_alike() -> None:
    eight, cases = RankPool(8), []
    for stage, shard, form, degree, accumulation in COVERING:
        recipe = make(8, accumulation, parallel=degree, **stage, **shard, **form)
        label = f"{stage} {shard} {form} {degree} {accumulation}"
        cases.append(Case(label, family("mixtral" if "ep" in degree else "llama"), {"": recipe}))
    assert_equal(eight, 8, cases)
    eight.close()


@pytest.mark.grid
def test_offloaded_units_equal_one_process_that_rounds_alike(pool: RankPool) -> None:
    recipe = replace(make(quantize_gather="int8", secondary_shard=2, accumulation=3), memory=OFFLOADED)
    assert_equal(pool, 4, [Case("gpt2", family("gpt2"), {"": recipe})])


@pytest.mark.grid
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_bf16_of_odd_shapes_equals_one_process_that_rounds_alike(pool: RankPool, form: str) -> None:
    """DeepSpeed#4852: crashes in bf16, and where blocks do not divide a shape. Ours has a vocabulary of 97, and 3 ranks."""
    recipe = make(3, precision="bf16", quantize_gather=form)
    case = Case("llama", family("llama"), {"": recipe}, {"intermediate_size": 39})
    layout = pool.run(3, train_layouts, [case])[0]["llama", ""]
    for row in compare(layout, expect(case, layout)):
        # One rounding to bf16; of gradients and what follows from them, several.
        assert row.error < (2**-8 if row.quantity == "loss" else 2**-4 if "gradient" in row.quantity else 1), row


# --- second copies

PAIRS = {
    "bf16": make(accumulation=3, precision="bf16"),
    "fp32": make(precision="fp32"),
    "int8": make(precision="bf16", quantize_gather="int8"),
}


def train_with_and_without(rank: int, world: int, rendezvous: str) -> list[tuple[Evidence, Evidence]]:
    """Body: each pair's evidence, without a second copy and with one."""
    found = []
    for number, recipe in enumerate(PAIRS.values()):
        both = []
        for copied in (None, 2):
            each = replace(recipe, zero=replace(recipe.zero, secondary_shard=copied))
            case = Case("", family("llama"), {"": each})
            mesh = connect(topology_of(each, case.config), CPU, f"{rendezvous}-{number}-{copied}", rank)
            both.append(run_layout(make_plan(each, case.config), case.batches(), mesh))
            mesh.close()
        found.append((both[0], both[1]))
    return found


@pytest.mark.grid
def test_a_second_copy_changes_not_one_bit(pool: RankPool) -> None:
    """DeepSpeed#4851, #6926: with hpZ the loss stood still, or stayed at that of old weights."""
    for alone, copied in pool.run(4, train_with_and_without)[0]:
        assert copied.losses == alone.losses
        assert copied.losses[2] < copied.losses[0]
        assert copied.norms == alone.norms
        assert all(torch.equal(copied.weights[name], weight) for name, weight in alone.weights.items())


# --- bytes

MEASURED = {
    "int8": make(accumulation=3, precision="bf16", quantize_gather="int8"),
    "int8, stage 2, divided": make(
        precision="bf16", stage=2, quantize_gather="int8", shard_within=2, optimizer_within="all"
    ),
    "fp8 and copied": make(accumulation=3, precision="bf16", quantize_gather="fp8", secondary_shard=2),
    "copied": make(precision="fp32", secondary_shard=2),
}
AXES = ("shard", "replica", "secondary")


def measure(rank: int, world: int, rendezvous: str, case: Case) -> dict[str, tuple[dict[str, int], dict[str, int]]]:
    """Body: of each layout what a step sends by axis, and the bytes of parameters and masters after it."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, case.config), mesh)
        before = read_traffic(mesh.axes)
        train_step(run, share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
        sent = sum_traffic(subtract_traffic(read_traffic(mesh.axes), before))
        kinds = {
            "parameters": [each for buffer in run.buffers for each in (buffer.full, buffer.shard, buffer.secondary)],
            "master": [buffer.master for buffer in run.buffers],
        }
        seen: set[int] = set()
        held = {}
        for kind, tensors in kinds.items():
            storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
            held[kind] = sum(size for place, size in storages.items() if place not in seen)
            seen |= storages.keys()
        # Nothing that was rounded is saved: entries are the masters' own memory, in their dtype.
        masters = {buffer.master.untyped_storage().data_ptr() for buffer in run.buffers}
        weights = [each for each in saved_entries(run) if each.name.startswith("weight/")]
        assert {each.data.untyped_storage().data_ptr() for each in weights if each.data.numel()} <= masters
        assert {each.data.dtype for each in weights} == {torch.float32}
        found[label] = {axis: sent.get(axis, {"bytes": 0})["bytes"] for axis in AXES}, held
        mesh.close()
    return found


def expect_gathers(plan: Plan, num_codes: int) -> tuple[int, int]:
    """Bytes that a rank of 4 sends in a step's unshards over the shard axis, and over that of the second copy, of 2 ranks."""
    zero, k = plan.recipe.zero, plan.derived.accumulation
    shards = copies = 0
    for buffer in plan.of_rank(0).buffers:
        numel = sum(slot.layout.numel_local for slot in buffer.slots)
        owned = -(-numel // 4)
        is_coded = all(len(slot.layout.shape) == 2 for slot in buffer.slots) and zero.quantize_gather != "none"
        itemsize = {"fp32": 4, "bf16": 2}[plan.recipe.precision.compute]
        # A byte for each code, up to a multiple of 4, and an fp32 scale for each block of 256.
        each = 4 * -(-owned // 4) + 4 * -(-owned // 256) if is_coded else owned * itemsize
        num_codes += is_coded
        uses = k * (2 if buffer.unit.startswith("layers.") else 1)
        shards += 3 * each * (1 if zero.secondary_shard else uses)
        copies += 2 * each * (uses - 1) * (zero.secondary_shard is not None)
    assert (num_codes > 0) == (zero.quantize_gather != "none")
    return shards, copies


def test_bytes_sent_and_held_are_those_of_theory_and_of_the_plan(pool: RankPool) -> None:
    case = Case("", family("llama"), MEASURED)
    for rank, measured in enumerate(pool.run(4, measure, case)):
        for label, recipe in MEASURED.items():
            plan, (sent, held) = make_plan(recipe, case.config), measured[label]
            planned = measure_traffic(plan, rank)
            assert sum(sent.values()) == sum(planned.values()), label
            assert held == {kind: held_by_buffers(plan, rank)[kind] for kind in held}, label
            if "divided" not in label:
                shards, copies = expect_gathers(plan, 0)
                assert (planned["gathers"], planned["gathers of copies"]) == (shards, copies), label
                assert (sent["secondary"], sent["shard"]) == (copies, shards + planned["reductions to shards"]), label


# --- sabotage


def leave_scales_behind() -> AbstractContextManager[Any]:
    """Codes travel, and are multiplied by the scales of the first rank."""
    decode = BlockCodec.decode

    def with_first(codec: BlockCodec, message: Tensor, out: Tensor) -> None:
        message = message.clone()
        scale_bytes = 4 * -(-out.shape[-1] // codec.block)
        message[..., :scale_bytes] = message[..., :1, :scale_bytes]
        decode(codec, message, out)

    return patch.object(BlockCodec, "decode", with_first)


def keep_an_old_copy() -> AbstractContextManager[Any]:
    """The second copy is taken for new after an update."""
    invalidate = ParameterSync.invalidate

    def forgetful(sync: ParameterSync) -> None:
        fresh = {buffer for unit in sync.units for buffer in unit if buffer.has_secondary}
        invalidate(sync)
        for buffer in fresh:
            buffer.has_secondary = True

    return patch.object(ParameterSync, "invalidate", forgetful)


def keep_the_copy_of_another_rank() -> AbstractContextManager[Any]:
    """A rank keeps the share of all parts that its neighbour should keep."""
    write = ParameterSync.__init__.__globals__["_keep_secondary"]

    def of_neighbour(buffer: UnitBuffer, arrived: Tensor) -> None:
        size = buffer.plan.axes.secondary.size
        write(buffer, arrived.view(size, -1).flip(0).reshape(-1) if size > 1 else arrived)

    return patch("framework.parallel.zero.parameters._keep_secondary", of_neighbour)


def round_what_was_rounded() -> AbstractContextManager[Any]:
    """An update begins with what others have been sent, not with the exact master."""
    send = UnitBuffer.copy_master_to_params

    def rounding(buffer: UnitBuffer) -> None:
        send(buffer)
        codec = buffer.plan.dtypes.codec
        if codec is not None:
            codec.decode(buffer.owned(buffer.shard), buffer.master)

    return patch.object(UnitBuffer, "copy_master_to_params", rounding)


SABOTAGES: tuple[tuple[Sabotage, str], ...] = (
    (leave_scales_behind, "loss"),
    (keep_an_old_copy, "loss"),
    (keep_the_copy_of_another_rank, "gradient, step 1"),
    (round_what_was_rounded, "weight, step 3"),
)


@pytest.mark.grid
def test_a_dropped_rule_shows(pool: RankPool) -> None:
    case = Case("", family("llama"), {"": make(quantize_gather="int8", secondary_shard=2, accumulation=3)})
    found = errors_of(pool, [sabotage for sabotage, _ in SABOTAGES], case)
    assert max(found["whole"].values()) < 1e-9
    for sabotage, quantity in SABOTAGES:
        assert found[sabotage.__name__][quantity] > 1e-5, sabotage.__name__


def exact_buffers(name: str, changes: dict[str, Any], recipe: Recipe) -> Callable[[str], bool]:
    """Whether a parameter travels exactly, by the plan of rank 0."""
    plan = make_plan(recipe, replace(Case("", family(name), {"": recipe}), changes=changes).config)
    codecs = {slot.name: buffer.dtypes.codec for buffer in plan.of_rank(0).buffers for slot in buffer.slots}
    return lambda part: all(codec is None for name, codec in codecs.items() if part in name)


def test_vectors_small_and_tied_matrices_routers_and_frozen_weights_stay_exact() -> None:
    recipe = make(quantize_gather="int8")
    is_exact = exact_buffers("mixtral", {"tie_word_embeddings": False}, recipe)
    assert is_exact("norm") and is_exact("mlp.gate.weight")  # noqa: PT018
    assert not is_exact("experts") and not is_exact("q_proj") and not is_exact("embed_tokens")  # noqa: PT018
    assert exact_buffers("llama", {"tie_word_embeddings": True}, recipe)("embed_tokens")
    frozen = replace(recipe, model=replace(recipe.model, freeze=["q_proj"]))
    assert exact_buffers("llama", {}, frozen)("q_proj")
    large = replace(recipe, zero=replace(recipe.zero, quantize_min_elements=1500))
    is_exact = exact_buffers("llama", {}, large)
    assert is_exact("q_proj") and not is_exact("up_proj")  # noqa: PT018  1,024 elements, and 1,792
