"""Weights in bf16 without a master: updated in chunks of fp32, rounded right on average, alike in every layout."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from framework.comm.connect import connect
from framework.mesh.layout import Layout, Shard
from framework.optim.optimizers import FlatOptimizer
from framework.optim.states import CHUNK_CPU
from framework.optim.update_rules import FlatShard, ShardGroup
from framework.plan.plan import make_plan
from framework.recipe.schema import Optim, Precision, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from framework.verify.plain_rounding import round_master
from tests.families import build_config, family
from tests.ranks.parity import CONTEXT, small_recipe, topology_of

CPU = torch.device("cpu")
SGD = Optim(name="sgd", momentum=0.0, weight_decay=0.0)
ONE, GO, SKIP = torch.ones((), dtype=torch.float64), torch.tensor(False), torch.tensor(True)


def make_optimizer(optim: Optim, *shards: FlatShard) -> FlatOptimizer:
    return FlatOptimizer(optim.name, optim, [ShardGroup("default", shards, 1.0, optim.weight_decay)], CPU, seed=3)


def make_shard(values: Tensor, gradient: Tensor, layout: Layout | None = None) -> FlatShard:
    """values: bf16 [n]; gradient: fp32 [n]."""
    return FlatShard((layout or Layout(tuple(values.shape)),), values, gradient, ("w",))


def test_updates_far_below_the_spacing_add_up_on_average() -> None:
    """A hundred updates of 1/64 of the spacing at 1, of which rounding to nearest would keep none."""
    count, steps, update = 20_000, 100, 2.0**-7 / 64
    shard = make_shard(torch.ones(count).bfloat16(), torch.empty(count))
    optimizer = make_optimizer(SGD, shard)
    for step in range(steps):
        shard.gradient.fill_(-update)
        optimizer.step(1.0, ONE, GO, step)
    moved = (shard.value.double() - 1.0).mean()
    # Of a rounding the deviation is at most half a spacing.
    assert abs(moved - steps * update) < 4.5 * 0.5 * 2.0**-7 * (steps / count) ** 0.5
    assert torch.equal(torch.ones(4).bfloat16() + update, torch.ones(4).bfloat16())


@pytest.mark.parametrize("optim", [Optim(name="adamw"), Optim(name="lion"), SGD], ids=lambda optim: optim.name)
def test_every_cut_of_a_parameter_is_rounded_alike(optim: Optim) -> None:
    torch.manual_seed(0)
    shape = (40, 2000)
    values, gradients = torch.randn(shape).bfloat16(), torch.randn(3, *shape)
    layouts = [Layout(shape)]
    halves = [Layout(shape, (Shard("tp", 1, rank, 2),)) for rank in range(2)]
    cuts = [replace(halves[0], interval=(0, 777)), replace(halves[0], interval=(777, 40_000)), halves[1]]
    found = []
    for each in (layouts, cuts):
        boxes = [layout.boxes() for layout in each]
        pick = [torch.cat([values[box.slices()].flatten() for box in some]) for some in boxes]
        shards = [make_shard(own, torch.empty(len(own)), layout) for own, layout in zip(pick, each, strict=True)]
        optimizer = make_optimizer(optim, *shards)
        for step, gradient in enumerate(gradients):
            for shard, some in zip(shards, boxes, strict=True):
                shard.gradient.copy_(torch.cat([gradient[box.slices()].flatten() for box in some]))
            optimizer.step(1e-2, ONE, GO, step)
        whole = torch.empty_like(values)
        for shard, some in zip(shards, boxes, strict=True):
            parts = shard.value.split([box.numel for box in some])
            for box, part in zip(some, parts, strict=True):
                whole[box.slices()] = part.view(box.sizes)
        found.append(whole)
    assert torch.equal(*found)
    assert not torch.equal(found[0], values)


def test_a_skipped_step_leaves_every_bit() -> None:
    values = torch.randn(5000).bfloat16()
    shard = make_shard(values.clone(), torch.full((5000,), torch.inf))
    make_optimizer(Optim(), shard).step(1e-2, ONE, SKIP, 0)
    assert torch.equal(shard.value, values)


class LargestResult(TorchDispatchMode):
    """The most elements of a tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.numel = max(self.numel, result.untyped_storage().nbytes() // result.itemsize)
        return result


def test_no_copy_of_all_weights_exists_in_fp32() -> None:
    count = 10 * CHUNK_CPU
    shard = make_shard(torch.ones(count).bfloat16(), torch.ones(count))
    with LargestResult() as building:
        optimizer = make_optimizer(SGD, shard)
    with LargestResult() as stepping:
        optimizer.step(1e-2, ONE, GO, 0)
    assert building.numel == CHUNK_CPU
    assert stepping.numel <= CHUNK_CPU


def test_the_oracle_rounds_as_the_optimizer_does() -> None:
    torch.manual_seed(1)
    values, gradient = torch.randn(50_000).bfloat16(), torch.randn(50_000)
    shard = make_shard(values.clone(), gradient.clone())
    make_optimizer(SGD, shard).step(1e-2, ONE, GO, 7)
    plain = values.float() - 1e-2 * gradient
    round_master(plain, (3, "master", 7, "w"))
    assert (shard.value.float() != plain).float().mean() < 1e-3  # where the fused kernel's sum is another


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_holds_what_the_plan_says_and_no_master(stage: int) -> None:
    recipe = replace(small_recipe("fp32", 1, zero=Zero(stage)), precision=Precision("bf16", "none"))
    config = build_config(family("llama"))
    config.use_cache = False
    plan = make_plan(recipe, config)
    run = build(plan, connect(topology_of(recipe, config), CPU))
    held = plan.memory(0).held
    elements = sum(buffer.plan.numel_padded for buffer in run.buffers)
    assert held["master"] == 0
    assert (held["parameters"], held["gradients"], held["optimizer"]) == (2 * elements, 4 * elements, 8 * elements)
    assert sum(buffer.summed.nbytes for buffer in run.buffers) == 4 * elements
    for buffer in run.buffers:
        assert (buffer.master.dtype, buffer.reduced.dtype) == (torch.bfloat16, torch.float32)
        assert buffer.master.untyped_storage().data_ptr() == buffer.shard.untyped_storage().data_ptr()
    states = [run.optimizer.state(shard, name) for shard in run.optimizer.shards for name in run.optimizer.state_names]
    assert {state.dtype for state in states} == {torch.float32}
    (batch,) = make_batches(config, 1, recipe.batch.sequences_per_step or 0, CONTEXT, seed=11)
    before = [buffer.master.clone() for buffer in run.buffers]
    train_step(run, share(batch, recipe.batch.sequences_per_microbatch, run.mesh), 0, 1e-2)
    assert not any(torch.equal(old, buffer.master) for old, buffer in zip(before, run.buffers, strict=True))
