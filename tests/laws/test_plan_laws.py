"""The set-up path is walked once, and nothing on it before `materialize` owns memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from framework.comm.connect import connect
from framework.data.prepare import prepare
from framework.errors import EXIT_DONE
from framework.model.units import Unit, find_units
from framework.parallel import parallelize
from framework.parallel.attention import find_stock_attention
from framework.plan import plan as plan_module
from framework.plan import shape as shape_module
from framework.plan.forecast_plan import measure_traffic
from framework.plan.plan import make_plan
from framework.plan.space import FIELDS_OF_KEYS
from framework.recipe import derive as derive_module
from framework.recipe.check import FOLLOWING_KEYS, LAYOUT_KEYS
from framework.recipe.compose import compose
from framework.recipe.schema import Memory, Parallel, Pipeline, Recipe, Zero
from framework.track.report import Observers
from framework.train import rank as train
from framework.train.build import build
from tests import tiny_run
from tests.families import build_config, family
from tests.ranks.parity import small_recipe
from tests.ranks.pool import RankPool

CPU = torch.device("cpu")
# What find_layer_outputs and find_load_balancing_loss run: a shrunken copy of the model, whatever the model's size is.
PROBE_BYTES = 2**18


class Calls:
    """How often functions were called, by name, while they are watched."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def watch(self, module: Any, name: str) -> Any:
        whole = getattr(module, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.counts[name] = self.counts.get(name, 0) + 1
            return whole(*args, **kwargs)

        return patch.object(module, name, counted)


@contextmanager
def counting_meta_builds() -> Iterator[list[str]]:
    """Model types that Hugging Face builds on meta meanwhile."""
    built: list[str] = []
    whole = AutoModelForCausalLM.from_config

    def from_config(config: Any, **kwargs: Any) -> Any:
        model = whole(config, **kwargs)
        if all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):  # not one of buffers alone
            built.append(config.model_type)
        return model

    with patch.object(AutoModelForCausalLM, "from_config", from_config):
        yield built


def test_a_rank_builds_its_model_on_meta_once_and_makes_one_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the saved recipe to the end of training: one plan, one model on meta, each stage laid out once, numbers
    derived once."""
    tiny_run.write_corpus(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    words = [*tiny_run.RECIPE, "train.steps=2", "batch.sequences_per_step=2", "batch.sequences_per_microbatch=1"]
    recipe = compose([*words, "launch.device=cpu"]).require()
    prepare(recipe, progress=False)
    calls = Calls()
    with (
        counting_meta_builds() as built,
        calls.watch(train, "make_plan"),
        calls.watch(derive_module, "_compute"),
        calls.watch(plan_module, "find_units"),
        calls.watch(plan_module, "plan_pipeline"),
        calls.watch(plan_module, "lay_out_stage"),
        calls.watch(shape_module, "plan_buffers"),
        patch.object(train, "open_observers", lambda *words: Observers()),
    ):
        assert train.train_rank(recipe, tmp_path / "run") == EXIT_DONE
    assert built == ["llama"]
    assert calls.counts == dict.fromkeys(calls.counts, 1)
    assert len(calls.counts) == 6


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_stages_are_copies_of_the_one_model_on_meta(schedule: str) -> None:
    """Also of a rank with two stages, and of all ranks: asking for another rank builds nothing anew."""
    recipe = replace(
        small_recipe("fp32", 2, 4, 12, parallel=Parallel(pp=2)),
        pipeline=Pipeline(schedule),  # type: ignore[arg-type]
    )
    config = build_config(family("llama"), num_hidden_layers=5)
    with counting_meta_builds() as built:
        plan = make_plan(recipe, config)
        stages = [stage for rank in (0, 1, 0) for stage in plan.of_rank(rank).stages]
    assert len({id(stage) for stage in stages}) == plan.pipeline.make(4).num_stages
    assert built == ["llama"]


class AllocatedBytes(TorchDispatchMode):
    """Bytes of all tensors with memory that operations return, and of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor) and not each.is_meta]
        sizes = [each.untyped_storage().nbytes() for each in tensors]
        self.num_bytes, self.largest = self.num_bytes + sum(sizes), max(self.largest, *sizes, 0)
        return result


def recipe_of(world: int, zero: int, parallel: Parallel, memory: Memory | None = None) -> Recipe:
    recipe = small_recipe("bf16", world, 2, 24, zero=Zero(zero), parallel=parallel)
    return replace(recipe, memory=memory or recipe.memory)


@pytest.mark.parametrize(
    ("name", "recipe", "most"),
    [
        ("llama", recipe_of(4, 0, Parallel()), 0),
        ("gpt2", recipe_of(4, 3, Parallel(tp=2)), 0),
        ("qwen3_moe", recipe_of(4, 3, Parallel(tp=2, sequence=False), Memory("full", compile="always")), 0),
        ("gemma2", recipe_of(4, 1, Parallel(tp=2, pp=2)), PROBE_BYTES),
    ],
)
def test_nothing_before_materialize_allocates(name: str, recipe: Recipe, most: int) -> None:
    """Law 8: a plan, of all ranks, with memory and traffic. A pipeline runs a shrunken copy to see how layers are called; the one
    that attention runs is run once for all plans of the family, before this one."""
    config = build_config(family(name))
    find_stock_attention(config, recipe)
    with AllocatedBytes() as allocated:
        plan = make_plan(recipe, config)
        for rank in range(plan.topology.world):
            assert plan.memory(rank).reserved > 0
            assert measure_traffic(plan, rank)
    assert allocated.largest <= most
    assert all(parameter.is_meta for parameter in plan.whole.parameters())


def test_what_counts_allocations_counts_them() -> None:
    """Sabotage: a transform that makes a table of its own is seen, and so is materialize."""
    recipe, config = recipe_of(1, 0, Parallel()), build_config(family("llama"))
    find_stock_attention(config, recipe)

    def with_a_table(model: Any, layouts: Any, plan: Any) -> Any:
        model.table = torch.zeros(5)
        return layouts

    with (
        patch.object(parallelize, "TRANSFORMS", (*parallelize.TRANSFORMS, with_a_table)),
        AllocatedBytes() as allocated,
    ):
        make_plan(recipe, config).of_rank(0)
    assert allocated.num_bytes == 5 * 4
    plan = make_plan(recipe, config)
    with AllocatedBytes() as allocated:
        build(plan, connect(plan.topology, CPU))
    assert allocated.num_bytes > 2 * plan.size.total


def plan_facts(rank: int, world: int, rendezvous: str, recipe: Recipe, family_name: str) -> tuple[int, list[str]]:
    """Body: a number that differs between processes, and what a process says of a plan: in the order in which it says it."""
    with patch.dict(os.environ, {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}):
        plan = make_plan(recipe, build_config(family(family_name)))
        facts = [repr((plan.topology, plan.units, plan.ties, plan.groups, plan.pipeline.stages))]
        for each in map(plan.of_rank, range(plan.topology.world)):
            facts += [
                repr((buffer.unit, buffer.slots, buffer.dtypes, buffer.held, buffer.counted)) for buffer in each.buffers
            ]
            facts += [repr((each.tokens, plan.memory(each.rank), measure_traffic(plan, each.rank)))]
        return hash("meshwright"), facts


PRODUCT = recipe_of(8, 3, Parallel(tp=2, pp=2))


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_a_plan_is_equal_on_every_rank(pool: RankPool, name: str) -> None:
    """Two processes of one run must not come to different plans, nor to one plan in two orders: a buffer is one collective."""
    (first_hash, first), (second_hash, second) = pool.run(2, plan_facts, PRODUCT, name)
    assert first_hash != second_hash, "both processes have the same hashes, so sets have one order in them"
    assert first == second


def plan_facts_in_the_order_of_a_set(rank: int, world: int, rendezvous: str, *args: Any) -> tuple[int, list[str]]:
    """Body: `plan_facts` where parameters of a unit come in an order that each process makes up."""

    def shuffled(whole: Any) -> list[Unit]:
        return [replace(unit, parameters=tuple(set(unit.parameters))) for unit in find_units(whole)]

    with patch.object(plan_module, "find_units", shuffled):
        return plan_facts(rank, world, rendezvous, *args)


def test_another_order_in_another_process_is_seen(pool: RankPool) -> None:
    """Sabotage: the order of a set."""
    (_, first), (_, second) = pool.run(2, plan_facts_in_the_order_of_a_set, PRODUCT, "llama")
    assert first != second
    assert first[-1] == second[-1]  # the bytes are equal


def test_two_runs_of_one_plan_share_no_memory() -> None:
    """A plan stays on meta, whatever is built of it."""
    plan = make_plan(recipe_of(1, 0, Parallel()), build_config(family("llama")))
    runs = [build(plan, connect(plan.topology, CPU)) for _ in range(2)]
    assert all(tensor.is_meta for tensor in (*plan.whole.parameters(), *plan.whole.buffers()))
    models = [run.stages[0].model.model for run in runs]
    addresses = [{tensor.data_ptr() for tensor in (*each.parameters(), *each.buffers())} for each in models]
    assert addresses[0]
    assert not addresses[0] & addresses[1]


def test_a_plan_is_for_the_device_of_its_run() -> None:
    """Whoever makes it: `auto` is resolved for the cluster's GPUs, not for a login node without any."""
    words = ["model=tiny_llama", "launch=slurm", "launch.ranks=2", "launch.ranks_per_node=2", "precision=auto"]
    recipe = compose([*words, "batch.sequences_per_step=2", "batch.sequences_per_microbatch=1"]).require()
    plan = make_plan(recipe, build_config(family("llama")))
    assert (plan.device.type, plan.compute_dtype) == ("cuda", torch.bfloat16)
    assert {buffer.dtypes.compute for buffer in plan.of_rank(1).buffers} == {torch.bfloat16}
    assert (plan.recipe.launch.device, plan.recipe.precision.compute) == ("cuda", "bf16")
    without = make_plan(replace(recipe, launch=replace(recipe.launch, gres=None)), build_config(family("llama")))
    assert (without.device.type, without.compute_dtype) == ("cpu", torch.float32)


def test_a_search_knows_what_each_key_of_a_layout_depends_on() -> None:
    assert set(FIELDS_OF_KEYS) == {*LAYOUT_KEYS, *FOLLOWING_KEYS}
