"""Each part of the stability kit (docs/optimizers.md) in every layout is its plain form in one process."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.schema import (
    LearningRateSchedule,
    Memory,
    Model,
    Muon,
    Offload,
    Optim,
    Parallel,
    Recipe,
    Train,
    Zero,
)
from framework.train.build import build
from framework.train.step import run_alone, train_step, validate_average
from framework.train.validation import Validation
from framework.verify.layout import share
from tests.families import family
from tests.grid import EVERY_DAY, few_of
from tests.ranks.parity import CPU, STEPS, Case, assert_equal, small_recipe, topology_of
from tests.ranks.pool import RankPool

pytestmark = EVERY_DAY

LAYOUTS: Mapping[str, tuple[int, Parallel, Zero, int]] = {
    "zero 0": (2, Parallel(), Zero(stage=0), 1),
    "zero 1, accumulation": (2, Parallel(), Zero(stage=1), 3),
    "zero 3": (3, Parallel(), Zero(stage=3), 1),
    "hsdp": (4, Parallel(), Zero(stage=3, shard_within=2), 1),
    "tp": (2, Parallel(tp=2), Zero(stage=1), 3),
    "pp": (2, Parallel(pp=2), Zero(stage=0), 3),
    "cp, zero 3": (4, Parallel(cp=2), Zero(stage=3), 1),
    "ep": (2, Parallel(ep=2), Zero(stage=2), 1),
    "ep, tp": (4, Parallel(ep=2, tp=2), Zero(stage=1), 1),
    "tp, pp": (4, Parallel(tp=2, pp=2), Zero(stage=1), 3),
}


def lay_out(label: str, **parts: object) -> Recipe:
    world, parallel, zero, accumulation = LAYOUTS[label]
    return replace(small_recipe("fp64", world, accumulation, 12, zero=zero, parallel=parallel), **parts)


def check(pool: RankPool, name: str, label: str, changes: Mapping[str, object] | None = None, **parts: object) -> None:
    """A family in a layout equals the oracle."""
    case = Case(name, family(name), {label: lay_out(label, **parts)}, changes or {}, by_microbatch=True)
    assert_equal(pool, LAYOUTS[label][0], [case])


Z_LOSS = Train(steps=STEPS, seed=5, z_loss=0.3, router_z_loss=0.2)
Z_CASES = [
    (name, label, chunked)
    for name in ("llama", "qwen3_moe", "deepseek_v3", "gemma2")
    for label in LAYOUTS
    for chunked in (False, True)
    if "ep" not in label or name in ("qwen3_moe", "deepseek_v3")
]
Z_FAST = {("qwen3_moe", "ep, tp", True), ("deepseek_v3", "pp", False)}


@pytest.mark.parametrize(("name", "label", "chunked"), few_of(Z_CASES, lambda *row: row in Z_FAST))
def test_z_losses(pool: RankPool, name: str, label: str, chunked: bool) -> None:
    has_routers = name in ("qwen3_moe", "deepseek_v3")
    changes = {"output_router_logits": True, "router_aux_loss_coef": 0.05} if name == "qwen3_moe" else {}
    train = Z_LOSS if has_routers else replace(Z_LOSS, router_z_loss=0.0)
    check(pool, name, label, changes, train=train, memory=Memory(compile="never", chunked_loss=chunked))


AVERAGES = Train(steps=STEPS, seed=5, ema=0.7)


@pytest.mark.parametrize("label", few_of(LAYOUTS, lambda label: label == "ep, tp"))
@pytest.mark.parametrize("optim", few_of(("adamw", "muon"), lambda name: name == "adamw"))
def test_averages(pool: RankPool, label: str, optim: str) -> None:
    name = "qwen3_moe" if "ep" in label else "gpt2"
    settings = Optim(name=optim, lr=1e-2, clip_norm=0.05, muon=Muon(dtype="master"))
    check(pool, name, label, train=AVERAGES, optim=settings)


@pytest.mark.parametrize("offload", [Offload(), Offload(optimizer=1.0)])
def test_an_average_is_validated_in_place_of_the_weights_which_stay(offload: Offload) -> None:
    recipe = small_recipe("bf16", 1, 2, 12, zero=Zero(stage=3), parallel=Parallel())
    recipe = replace(recipe, train=AVERAGES, memory=Memory(compile="never", offload=offload), optim=Optim(lr=0.1))
    case = Case("llama", family("llama"), {"": recipe})
    mesh = connect(topology_of(recipe, case.config), CPU)
    run = build(make_plan(recipe, case.config), mesh)
    averages, size = run.optimizer.averages, recipe.batch.sequences_per_microbatch
    assert averages is not None
    batches = [share(each, size, mesh) for each in case.batches()]
    train_step(run, batches[0], 0, 0.1)
    weights = [each.value.clone() for each in run.optimizer.shards]
    found = validate_average(run, Validation(batches[1], 1)).mean
    assert all(map(torch.equal, weights, [each.value for each in run.optimizer.shards]))
    of_weights, expected = Validation(batches[1], 1), Validation(batches[1], 1)
    run_alone(run, of_weights)
    for each in run.optimizer.shards:
        each.value.copy_(averages.of(each))
    for buffer in run.buffers:
        buffer.copy_master_to_params()
    for stage in run.stages.values():
        stage.parameters.invalidate()
    run_alone(run, expected)
    assert found == expected.means(mesh).mean != of_weights.means(mesh).mean
    run.close()
    mesh.close()


@pytest.mark.parametrize("label", few_of(LAYOUTS, lambda label: label == "ep, tp"))
@pytest.mark.parametrize("optim", few_of(("adamw", "muon", "sgd", "lion"), lambda name: name == "muon"))
def test_clipped_updates_and_decay_by_the_peak(pool: RankPool, label: str, optim: str) -> None:
    name = "qwen3_moe" if "ep" in label else "gpt2"
    settings = Optim(
        name=optim,
        lr=1e-2,
        clip_norm=0.05,
        momentum=0.9,
        muon=Muon(dtype="master"),
        weight_decay=0.3,
        clip_update=0.001 if optim == "sgd" else 0.15,
        decay_follows="schedule" if optim == "sgd" else "peak",
        schedule=LearningRateSchedule(warmup_steps=1),
    )
    check(pool, name, label, optim=settings)


CLIPPED = ("llama", "gpt2", "deepseek_v3", "phi3", "gpt_neox", "gemma2")


@pytest.mark.parametrize(
    ("name", "label"),
    few_of(
        [(name, label) for name in CLIPPED for label in LAYOUTS if "ep" not in label or name == "deepseek_v3"],
        lambda *row: row in {("llama", "cp, zero 3"), ("deepseek_v3", "ep, tp")},
    ),
)
def test_clipped_logits(pool: RankPool, name: str, label: str) -> None:
    check(pool, name, label, optim=Optim(lr=1e-2, clip_norm=0.05, qk_clip=1e-4))


NARROW = {"hidden_size": 16, "intermediate_size": 28, "num_attention_heads": 2, "num_key_value_heads": 1}
# By family: values of a narrower base model.
BASES: Mapping[str, Mapping[str, object]] = {
    "llama": NARROW,
    "qwen3_moe": {**NARROW, "moe_intermediate_size": 12},
    "gpt2": {"n_embd": 16, "n_head": 2},
}


@pytest.mark.parametrize(
    ("name", "label"),
    few_of(
        [(name, label) for name in BASES for label in LAYOUTS if "ep" not in label or name == "qwen3_moe"],
        lambda *row: row == ("qwen3_moe", "ep, tp"),
    ),
)
def test_widths(pool: RankPool, name: str, label: str) -> None:
    check(pool, name, label, {"tie_word_embeddings": False}, model=Model(mup_base=dict(BASES[name])))
