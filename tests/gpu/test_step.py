"""A training step on a GPU: what it computes, and that the host does not wait for it."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.comm.transfer import upload, upload_values
from framework.recipe.schema import Memory, Model, Offload, Parallel, Recipe, Zero
from framework.train.step import train_step
from framework.train.sums import Flags, StepValues
from tests.gpu.training import LR, start, train, train_rank
from tests.ranks.parity import CPU, small_recipe
from tests.ranks.pool import RankPool

# Of losses and norms in three steps, against the CPU's in the same dtype, or in fp32 for bf16, which has eight bits.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 5e-2}
# What torch says in its debug mode.
WAITS = "called a synchronizing CUDA operation"
# Kernels that do the same arithmetic on both devices.
EAGER = Model(attention="eager")
OFFLOADED = Memory(offload=Offload(activations=1.0))
LAYOUTS = {
    "stage 0": small_recipe("fp32", 1, accumulation=3, clip_norm=0.5),
    "stage 3": small_recipe("fp32", 1, accumulation=3, zero=Zero(stage=3)),
    "activation checkpointing, chunked loss": replace(
        small_recipe("fp32", 1), memory=Memory(activation_checkpointing="full", chunked_loss=True)
    ),
    "bf16": small_recipe("bf16", 1),
    "activation offload": replace(small_recipe("fp32", 1, accumulation=3), memory=OFFLOADED),
}
SHARED = {
    "stage 3": small_recipe("fp32", 2, zero=Zero(stage=3)),
    "tp, overlap": small_recipe("fp32", 2, parallel=Parallel(tp=2, overlap="always")),
    "pp": small_recipe("fp32", 2, accumulation=3, parallel=Parallel(pp=2)),
}


@pytest.mark.parametrize("precision", TOLERANCES)
def test_steps_equal_the_cpus(device: torch.device, precision: str) -> None:
    recipe = replace(small_recipe(precision, 1, clip_norm=0.5), model=EAGER)
    expected = recipe if precision != "bf16" else replace(small_recipe("fp32", 1, clip_norm=0.5), model=EAGER)
    assert train(recipe, device) == pytest.approx(train(expected, CPU), rel=TOLERANCES[precision])


@pytest.mark.parametrize("policy", ["none", "full"])
def test_activations_on_the_host_change_no_bit(device: torch.device, policy: Any) -> None:
    recipe = replace(
        small_recipe("fp32", 1, accumulation=3), model=EAGER, memory=Memory(activation_checkpointing=policy)
    )
    offloaded = replace(recipe, memory=replace(OFFLOADED, activation_checkpointing=policy))
    assert train(offloaded, device) == train(recipe, device)


def test_a_model_learns_in_bf16(device: torch.device) -> None:
    training = start(small_recipe("bf16", 1), device, num_batches=1)
    losses = [train_step(training.run, training.batches[0], step, LR).read().loss for step in range(30)]
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_of_ours_waits_for_the_device(device: torch.device, layout: str) -> None:
    """transformers does: masking_utils asks whether positions restart."""
    training = start(LAYOUTS[layout], device, num_batches=1)
    (microbatches,) = training.batches
    for step in range(2):  # what only first steps do
        train_step(training.run, microbatches, step, LR, Flags(stop=True))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = train_step(training.run, microbatches, 2, LR, Flags(stop=True)).copy_to_host()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if WAITS in str(each.message)]
    assert [f"{each.filename}:{each.lineno}" for each in waits if "/transformers/" not in each.filename] == []
    assert StepValues.unpack(result.values()).flags == Flags(stop=True)


def test_the_debug_mode_sees_a_wait(device: torch.device) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            torch.ones((), device=device).item()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert any(WAITS in str(each.message) for each in caught)


def test_uploads_under_way_keep_their_values(device: torch.device) -> None:
    """The device is busy while the host goes on and its memory is asked for again."""
    torch.cuda._sleep(50_000_000)
    sent = [upload_values([float(number)] * 1000, torch.float64, device) for number in range(100)]
    sent += [upload(torch.full((1000,), float(number), dtype=torch.float64), device) for number in range(100, 200)]
    assert [each.unique().tolist() for each in sent] == [[float(number)] for number in range(200)]


def test_a_compiled_layer_trains_as_it_does_uncompiled(device: torch.device) -> None:
    recipe: Recipe = small_recipe("fp32", 1)
    compiled = replace(recipe, memory=Memory(compile="always"))
    assert train(compiled, device) == pytest.approx(train(recipe, device), rel=1e-4)


@pytest.mark.parametrize("layout", SHARED)
def test_ranks_over_nccl_equal_the_cpu(pool: RankPool, two_gpus: int, layout: str, tmp_path: Path) -> None:
    """Gathers are started ahead and reductions under backward, on streams of their own: memory that is not protected by a wait
    gives other numbers."""
    recipe = replace(SHARED[layout], model=EAGER)
    alone = replace(small_recipe("fp32", 1), model=EAGER)
    for found in pool.run(two_gpus, train_rank, recipe):
        assert found == pytest.approx(train(alone, CPU), rel=TOLERANCES["fp32"])
