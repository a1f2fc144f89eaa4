"""Each part of the stability kit (docs/optimizers.md) in every layout is its plain form in one process."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

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
    Train,
    Zero,
)
from framework.train.build import build
from framework.train.step import run_alone, train_step, validate_average
from framework.train.validation import Validation
from framework.verify.layout import share
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, STEPS, Case, assert_equal, small_recipe, topology_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

Parts = Mapping[str, object]
ADAMW = Optim(lr=1e-2, clip_norm=0.05)
MUON = replace(ADAMW, name="muon", momentum=0.9, muon=Muon(dtype="master"))
LION, SGD = replace(ADAMW, name="lion"), replace(ADAMW, name="sgd", momentum=0.9)
Z_LOSS = Train(steps=STEPS, seed=5, z_loss=0.3)
AVERAGES = Train(steps=STEPS, seed=5, ema=0.7)
CHUNKED = Memory(compile="never", chunked_loss=True)
WARM = LearningRateSchedule(warmup_steps=1)


def clip(optim: Optim, clip_update: float = 0.15) -> Optim:
    """With clipped updates, and with decay by the peak rate but for sgd, which has no decay of its own."""
    follows: Literal["schedule", "peak"] = "schedule" if optim.name == "sgd" else "peak"
    return replace(optim, weight_decay=0.3, clip_update=clip_update, decay_follows=follows, schedule=WARM)


# Parts of the kit, some by optimizer, as parts of a recipe; and all that go together.
KIT: Mapping[str, Parts] = {
    "z-losses": {"train": Z_LOSS},
    "z-losses, chunked head": {"train": Z_LOSS, "memory": CHUNKED},
    "averages": {"train": AVERAGES, "optim": ADAMW},
    "averages of muon": {"train": AVERAGES, "optim": MUON},
    "clipped updates": {"optim": clip(ADAMW)},
    "clipped updates of muon": {"optim": clip(MUON)},
    "clipped updates of sgd": {"optim": clip(SGD, 0.001)},
    "clipped updates of lion": {"optim": clip(LION)},
    "clipped logits": {"optim": replace(ADAMW, qk_clip=1e-4)},
    "clipped logits of muon": {"optim": replace(MUON, qk_clip=1e-4)},
    "widths": {"optim": ADAMW},
    "widths of lion": {"optim": replace(LION, lr=1e-3)},
    "all": {"train": replace(Z_LOSS, ema=0.7), "optim": replace(clip(MUON), qk_clip=1e-4), "memory": CHUNKED},
}
NARROW = {"hidden_size": 16, "intermediate_size": 28, "num_attention_heads": 2, "num_key_value_heads": 1}
# By family: values of a narrower base model.
BASES: Mapping[str, Mapping[str, object]] = {
    "llama": NARROW,
    "qwen3_moe": {**NARROW, "moe_intermediate_size": 12},
    "gpt2": {"n_embd": 16, "n_head": 2},
}
ROUTED = ("qwen3_moe", "deepseek_v3")
# gemma2 caps logits, of attention and of the head.
FAMILIES = ("llama", "gpt2", "gemma2", "phi3", "gpt_neox", *ROUTED)
# Kind, family, stage of ZeRO, degrees of tp, pp, ep and cp, microbatches.
Row = tuple[str, str, int, int, int, int, int, int]


def is_legal(kind: str, name: str, zero: int, tp: int, pp: int, ep: int, cp: int, accumulation: int) -> bool:
    is_one_of = (
        (kind.startswith("widths") <= (name in BASES))
        # qwen3 normalises queries and keys, which bounds logits.
        and (("logits" in kind or kind == "all") <= (name != "qwen3_moe"))
        # Biases of keys have gradients of rounding alone, whose sign decides Lion's update.
        and ((kind == "clipped updates of lion") <= (name not in ("gpt2", "gpt_neox")))
        and (ep == 1 or name in ROUTED)
    )
    # At most two axes beside ZeRO's, which is to divide something.
    return is_one_of and tp * pp * cp <= 4 and (zero == 0 or _dp(tp, pp, cp) * cp > 1)


def _dp(tp: int, pp: int, cp: int) -> int:
    return 1 if tp * pp * cp == 4 else 2


ROWS: list[Row] = cover_pairs([tuple(KIT), FAMILIES, (0, 1, 2, 3), (1, 2), (1, 2), (1, 2), (1, 2), (1, 3)], is_legal)
SHOWN: list[Row] = [
    ("all", "deepseek_v3", 1, 2, 1, 2, 1, 1),
    ("z-losses", "deepseek_v3", 0, 1, 2, 1, 1, 3),
    ("clipped logits", "llama", 3, 1, 1, 1, 2, 1),
    ("widths", "qwen3_moe", 1, 2, 1, 2, 1, 1),
]


@pytest.mark.parametrize("row", few_of([(each,) for each in [*SHOWN, *ROWS]], lambda row: row in SHOWN))
def test_layouts_equal_one_process(pool: RankPool, row: Row) -> None:
    kind, name, stage, tp, pp, ep, cp, accumulation = row
    world, parts = _dp(tp, pp, cp) * tp * pp * cp, dict(KIT[kind])
    changes: dict[str, object] = {"tie_word_embeddings": False} if kind.startswith("widths") else {}
    if isinstance(train := parts.get("train"), Train) and train.z_loss and name in ROUTED:
        parts["train"] = replace(train, router_z_loss=0.2)
        changes |= {"output_router_logits": True, "router_aux_loss_coef": 0.05} if name == "qwen3_moe" else {}
    if kind.startswith("widths"):
        parts["model"] = Model(mup_base=dict(BASES[name]))
    recipe = small_recipe(
        "fp64", world, accumulation, 12, zero=Zero(stage=stage), parallel=Parallel(tp=tp, pp=pp, ep=ep, cp=cp)
    )
    case = Case(name, family(name), {kind: replace(recipe, **parts)}, changes, by_microbatch=True)
    assert_equal(pool, world, [case])


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
