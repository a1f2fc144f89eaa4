"""Units that travel together are the same run as units that travel alone, bit by bit: beside all else that a layout may be."""

from tests.torchao_folder import FOLDER  # noqa: F401  # isort: skip  first: fp8 imports torchao from there

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import PretrainedConfig

from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.mesh.layout import Layout as TensorLayout
from framework.mesh.topology import Axis
from framework.model.load import build_meta
from framework.model.precision import DTYPES
from framework.model.units import Unit, find_units
from framework.parallel.zero import parameters
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.lifetimes import lifetimes_of
from framework.parallel.zero.plan_buffers import plan_buffers, shard_over_batch
from framework.parallel.zero.unit_buckets import find_unit_buckets, largest_shared
from framework.plan.plan import make_plan
from framework.recipe.schema import Offload, Parallel, Pipeline, Recipe, Zero
from framework.verify.evidence import make_batches
from framework.verify.layout import run_layout
from tests.families import build_config, family
from tests.ranks.crossed_model import CROSSED
from tests.ranks.parity import CONTEXT, CPU, small_recipe, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.recorded import LAYOUTS as RECORDED
from tests.ranks.recorded import SEQUENCES, Layout, describe
from tests.ranks.spare_model import SPARE
from tests.ranks.test_fp8 import WIDTHS
from tests.ranks.test_offload import save_and_go_on

STEPS = 3
FIVE = {"num_hidden_layers": 5}
TEN = {"num_hidden_layers": 10}
MODELS = {"crossed": CROSSED, "spare": SPARE}

LAYOUTS = {
    **{name: layout for name, layout in RECORDED.items() if layout.zero.stage},
    "stage 1, bf16, 3 ranks": Layout("gpt2", 3, "bf16", Zero(1), changes={"n_layer": 5}),
    "stage 2, local": Layout("llama", 2, zero=Zero(2, accumulate="local"), accumulation=3, changes=FIVE),
    "one rank": Layout("llama", 1, "bf16", Zero(3), changes=FIVE),
    "uneven shards": Layout("crossed", 3, "fp32", Zero(3), changes={"num_hidden_layers": 7}),
    "two dtypes, parameters read elsewhere": Layout("crossed", 4, "bf16", Zero(3), changes={"num_hidden_layers": 7}),
    "kept, prefetch 3": Layout("gemma2", 2, "bf16", Zero(3, prefetch_units=3, keep_gathered=True), accumulation=3),
    "prefetch 0": Layout("llama", 2, zero=Zero(3, prefetch_units=0), changes=FIVE),
    "prefetch 3, four ranks": Layout("llama", 4, zero=Zero(3, prefetch_units=3), accumulation=3, changes=TEN),
    "a layer on one rank, one on none": Layout("spare", 4, zero=Zero(3, shard_within=2), accumulation=1),
    "hsdp, stage 3, updates divided": Layout("llama", 4, "bf16", Zero(3, 2, optimizer_within="all"), changes=FIVE),
    "hsdp of three replicas": Layout("llama", 3, zero=Zero(3, 1), accumulation=1, changes=FIVE),
    "rounded reductions": Layout("llama", 4, "bf16", Zero(3, 2), rest={"precision": {"reduce": "bf16"}}, changes=FIVE),
    "rounded reductions, stage 1": Layout("llama", 3, zero=Zero(1), rest={"precision": {"reduce": "bf16"}}, changes=FIVE),
    "frozen below": Layout("llama", 2, zero=Zero(3), rest={"model": {"freeze": ["embed", r"layers\.[01]\."]}}, changes=FIVE),
    "frozen between": Layout(
        "llama", 2, zero=Zero(3), changes=FIVE,
        rest={"model": {"freeze": [r"layers\.[13]\.", "norm"]}, "memory": {"activation_checkpointing": "selective"}},
    ),
    "recomputed in groups": Layout(
        "gpt2", 2, zero=Zero(3), changes={"n_layer": 9, "resid_pdrop": 0.2}, rest={"memory": {"activation_checkpointing": "sqrt"}}
    ),
    "recomputed in groups, prefetch 0": Layout(
        "llama", 2, zero=Zero(3, prefetch_units=0), changes=TEN, rest={"memory": {"activation_checkpointing": "sqrt"}}
    ),
    "cp": Layout("llama", 4, zero=Zero(3), parallel=Parallel(cp=2), changes=FIVE),
    "tp, stage 2, updates divided": Layout(
        "gemma2", 4, zero=Zero(2, 1, optimizer_within="all"), parallel=Parallel(tp=2), changes={}
    ),
    "pp, 1f1b, tied": Layout("llama", 4, zero=Zero(3), parallel=Parallel(pp=2), changes=FIVE | {"tie_word_embeddings": True}),
    "interleaved": Layout(
        "llama", 4, zero=Zero(3), parallel=Parallel(pp=2), pipeline=Pipeline("interleaved"), changes=TEN
    ),
    "zb_h1": Layout("llama", 4, "bf16", Zero(3), Parallel(pp=2), Pipeline("zb_h1"), 3, changes=TEN),
    "zbv": Layout("llama", 4, "bf16", Zero(3), Parallel(pp=2), Pipeline("zbv"), 3, changes=TEN),
    "dualpipe_v": Layout("llama", 4, "fp32", Zero(2), Parallel(pp=2), Pipeline("dualpipe_v"), 4, changes=TEN),
    "ep, stage 3": Layout("mixtral", 4, zero=Zero(3), parallel=Parallel(ep=2), accumulation=1, changes=FIVE),
    "ep over all, stage 2, bf16": Layout("mixtral", 4, "bf16", Zero(2), Parallel(ep=4), accumulation=1),
    "ep and tp, hsdp": Layout("qwen3_moe", 4, zero=Zero(3, 1), parallel=Parallel(ep=2, tp=2), accumulation=1, changes=FIVE),
    "moments of few bits": Layout("llama", 2, "bf16", Zero(3), rest={"precision": {"moments": "int8"}}, changes=FIVE),
    "parameters and optimizer on the host": Layout(
        "llama", 2, "bf16", Zero(3), rest={"memory": {"offload": Offload(1.0, 1.0)}}, changes=FIVE
    ),
    "some parameters and optimizer on the host, hsdp": Layout(
        "llama", 4, "bf16", Zero(3, 2, optimizer_within="all"), rest={"memory": {"offload": Offload(0.5, 0.5)}}, changes=FIVE
    ),
    "activations on the host": Layout(
        "llama", 2, zero=Zero(3), rest={"memory": {"offload": Offload(activations=1.0)}}, changes=FIVE
    ),
    "fp8": Layout("llama", 2, "bf16", Zero(3), rest={"precision": {"compute": "fp8"}}, changes=WIDTHS | FIVE),
    "fp8, replicas divide the update": Layout(
        "llama", 4, "bf16", Zero(3, 2, optimizer_within="all"), rest={"precision": {"compute": "fp8"}}, changes=WIDTHS | FIVE
    ),
}  # fmt: skip


def layer_bytes(config: PretrainedConfig, precision: str) -> int:
    """Of the largest layer in the compute dtype, as buckets count it."""
    model = build_meta(config)
    layers = [unit for unit in find_units(model) if unit.is_layer]
    numel = max(sum(model.get_parameter(name).numel() for name in layer.parameters) for layer in layers)
    return numel * DTYPES["bf16" if precision == "fp8" else precision].itemsize


def recipes_of(recipe: Recipe, config: PretrainedConfig) -> dict[str, Recipe]:
    """With layers that travel alone, in pairs or so, and all together."""
    sizes = {"alone": 0, "pairs": 5 * layer_bytes(config, recipe.precision.compute) // 2, "all": 2**30}
    return {name: replace(recipe, zero=replace(recipe.zero, bucket_bytes=size)) for name, size in sizes.items()}


def train_buckets(
    rank: int, world: int, rendezvous: str, layouts: Mapping[str, Layout]
) -> tuple[dict[str, Any], dict[str, Counter[str]]]:
    """Body: by layout and bucket every bit of a short run, and how often each collective of `shard` was called in it."""
    found: dict[str, Any] = {}
    calls: dict[str, Counter[str]] = {}
    for number, (name, layout) in enumerate(layouts.items()):
        if rank >= layout.world:
            continue
        config = build_config(MODELS.get(layout.model) or family(layout.model), **layout.changes)
        config.use_cache = False
        mesh = connect(topology_of(layout.recipe, config), CPU, f"{rendezvous}-{number}", rank)
        batches = make_batches(config, STEPS, SEQUENCES, CONTEXT, seed=11)
        if layout.model == "spare":
            config.open_tokens = [int(batch.input_ids[3, 0]) for batch in batches]
        for label, recipe in recipes_of(layout.recipe, config).items():
            before = Counter(mesh.axes["shard"].traffic.calls)
            found[f"{name}, {label}"] = describe(run_layout(make_plan(recipe, config), batches, mesh))
            calls[f"{name}, {label}"] = Counter(mesh.axes["shard"].traffic.calls) - before
        mesh.close()
    return found, calls


def train_bucket(name: str, pool: RankPool, body: Callable[..., Any] = train_buckets) -> list[Any]:
    return pool.run(LAYOUTS[name].world, body, {name: LAYOUTS[name]}, timeout_s=120)


# Where `shard` is one rank, nothing is sent over it.
UNSHARDED = ("one rank", "hsdp of three replicas", "tp, stage 2, updates divided", "ep and tp, hsdp")


@pytest.mark.grid
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_is_bitwise_the_same_with_unit_buckets(pool: RankPool, name: str) -> None:
    for found, calls in train_bucket(name, pool):
        alone, *others = found.values()
        assert others == [alone] * len(others)
        fewer = [each["reduce_scatter"] for each in calls.values()]
        assert name in UNSHARDED or fewer[0] > fewer[1] >= fewer[2], calls


def copy_to_neighbours(buffers: Sequence[UnitBuffer], arriving: Tensor) -> None:
    """What has come for each of a bucket's layers goes to another of them."""
    layers = [buffer for buffer in buffers if buffer.unit.startswith("layers.")]
    turned = dict(zip(layers, [*layers[1:], *layers[:1]], strict=True))
    copy_apart([turned.get(buffer, buffer) for buffer in buffers], arriving)


def pack_neighbours(sync: GradientSync, message: Sequence[UnitBuffer]) -> Tensor:
    """A message of gradients is packed in another order than its sums are taken from it."""
    return pack(sync, message if len(message) < 2 else [*message[1:-1], message[0], message[-1]])


def reduce_early(sync: GradientSync, buffer: UnitBuffer) -> None:
    """A bucket is reduced before backward has left the last of its units."""
    message = sync._message_of[buffer]
    if len(message) > 1 and buffer is message[-1]:
        return
    sync._complete[message[0]] += len(message) > 1 and buffer is message[-2]
    reduce(sync, buffer)


copy_apart, pack, reduce = parameters._copy_apart, GradientSync._pack, GradientSync._reduce
SABOTAGES: dict[str, tuple[str, tuple[Any, str, Any]]] = {
    "copied to neighbours": ("prefetch 0", (parameters, "_copy_apart", copy_to_neighbours)),
    "packed in another order": ("prefetch 0", (GradientSync, "_pack", pack_neighbours)),
    "reduced early": ("stage 2, local", (GradientSync, "_reduce", reduce_early)),
}


def train_sabotaged(rank: int, world: int, rendezvous: str, layouts: Mapping[str, Layout], sabotage: str) -> Any:
    with patch.object(*SABOTAGES[sabotage][1]):
        return train_buckets(rank, world, rendezvous, layouts)


@pytest.mark.grid
@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_a_part_in_a_neighbours_place_changes_the_run(pool: RankPool, sabotage: str) -> None:
    name = SABOTAGES[sabotage][0]
    found, _ = pool.run(2, train_sabotaged, {name: LAYOUTS[name]}, sabotage, timeout_s=120)[0]
    alone, *others = found.values()
    assert all(each != alone for each in others)


@pytest.mark.grid
def test_checkpoints_know_no_buckets(pool: RankPool, tmp_path: Path) -> None:
    """Saved and resumed with units alone, some together and all together: bit by bit the run that never stopped."""
    zero = Zero(3, shard_within=2, optimizer_within="all")
    recipes = {
        str(size): small_recipe("bf16", 4, 1, SEQUENCES, 0.05, replace(zero, bucket_bytes=size))
        for size in (0, 100_000, 2**30)
    }
    found = pool.run(4, save_and_go_on, {name: tmp_path / name for name in recipes}, recipes, timeout_s=120)[0]
    assert len(found) == 12
    assert all(each == found["0", "none"] for each in found.values())


def test_buckets_are_consecutive_units_of_at_most_so_many_bytes() -> None:
    axes = {name: Communicator(Axis(name, size, 0)) for name, size in (("shard", 3), ("replica", 1))}
    units = [Unit(f"layers.{index}", ("",), (f"{index}",)) for index in range(6)]
    layouts = shard_over_batch({f"{index}": TensorLayout((size,)) for index, size in enumerate((10, 20, 11, 40, 5, 5))})

    def find(zero: Zero, alone: Collection[int] = ()) -> list[tuple[int, ...]]:
        dtypes, groups = dict.fromkeys(layouts, torch.float32), dict.fromkeys(layouts, "all")
        plans = plan_buffers(units, layouts, groups, dtypes, torch.float32, lifetimes_of(zero), axes)
        return find_unit_buckets([[plan] for plan in plans], alone)

    one_by_one = [(index,) for index in range(6)]
    assert find(Zero(3, bucket_bytes=0)) == find(Zero(0, bucket_bytes=2**20)) == one_by_one
    assert find(Zero(3, bucket_bytes=120)) == [(0, 1), (2,), (3,), (4, 5)]
    assert find(Zero(2, bucket_bytes=124)) == [(0, 1), (2,), (3,), (4, 5)]
    assert find(Zero(2, bucket_bytes=164)) == [(0, 1, 2), (3,), (4, 5)]
    assert find(Zero(1, bucket_bytes=2**20), alone={2}) == [(0, 1), (2,), (3, 4, 5)]
    # What is more than 256 KiB, or an eighth of larger buckets, gains nothing.
    assert [largest_shared(size) for size in (0, 120, 2**20, 2**21, 2**25)] == [0, 120, 2**18, 2**18, 2**22]
    layouts |= shard_over_batch({"1": TensorLayout((2**16 + 1,))})
    assert find(Zero(1, bucket_bytes=2**20)) == [(0,), (1,), (2, 3, 4, 5)]
    layouts |= shard_over_batch({"1": TensorLayout((2**16,))})
    assert find(Zero(1, bucket_bytes=2**20)) == [(0, 1, 2, 3, 4, 5)]
