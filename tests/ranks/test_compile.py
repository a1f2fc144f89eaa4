"""memory.compile: always. One set of graphs serves all layers, no step recompiles, and values stay what they were."""

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from framework.build import build
from framework.comm import collectives, p2p
from framework.comm.algorithms import Pending
from framework.comm.connect import connect
from framework.parallel.tensor.borders import AsyncBorder, ShardedBorder
from framework.parallel.tensor.layers import ColumnLinear
from framework.plan.plan import make_plan
from framework.plan.stage import PlannedStage
from framework.recipe.schema import Memory, Parallel, Recipe, Zero
from framework.train.step import train_step
from framework.verify.compare import TOLERANCES
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from tests.families import build_config, family
from tests.ranks.parity import CONTEXT, CPU, small_recipe, topology_of
from tests.ranks.pool import RankPool

STEPS = 3
# More than torch's recompile_limit of 8: a graph of each layer's own would hit it.
NUM_LAYERS = 10


@dataclass(frozen=True)
class Trained:
    """values: loss and norm of each step. breaks, frames: what dynamo had counted after each: graph breaks, and frames that it
    had compiled, again or for the first time. operators: in its graphs. reasons: of its breaks; limits: warnings of giving up."""

    values: list[list[float]]
    breaks: list[int]
    frames: list[int]
    operators: int
    reasons: tuple[str, ...]
    limits: tuple[str, ...]


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def fresh_compiler(backend: str) -> Iterator[_Warnings]:
    """No graphs and counts from before. backend: `eager` runs dynamo's graphs as they are: all is counted, little is compiled."""
    torch._dynamo.reset()
    counters.clear()
    found, logger = _Warnings(), logging.getLogger("torch._dynamo")
    logger.addHandler(found)
    try:
        with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
            yield found
    finally:
        logger.removeHandler(found)
        torch._dynamo.reset()


def train(rank: int, world: int, rendezvous: str, recipe: Recipe, name: str, layers: int, backend: str) -> Trained:
    """Body."""
    config = build_config(family(name), num_hidden_layers=layers)
    config.use_cache = False
    values: list[list[float]] = []
    breaks: list[int] = []
    frames: list[int] = []
    with fresh_compiler(backend) as warnings:
        mesh = connect(topology_of(recipe, config), CPU, rendezvous, rank)
        run = build(make_plan(recipe, config), mesh)
        assert recipe.batch.sequences_per_step is not None
        batches = make_batches(config, STEPS, recipe.batch.sequences_per_step, CONTEXT, seed=11)
        for step, batch in enumerate(batches):
            microbatches = share(batch, recipe.batch.sequences_per_microbatch, mesh)
            values.append(train_step(run, microbatches, step, 1e-2).sums.vector.tolist())
            breaks.append(sum(counters["graph_break"].values()))
            frames.append(counters["frames"]["total"])
        mesh.close()
        operators, reasons = counters["stats"]["calls_captured"], tuple(counters["graph_break"])
    limits = tuple(text for text in warnings.texts if "recompile_limit" in text)
    return Trained(values, breaks, frames, operators, reasons, limits)


def train_both(pool: RankPool, recipe: Recipe, name: str, layers: int, backend: str) -> tuple[Trained, Trained]:
    """Rank 0 without and with compilation."""
    never, always = (replace(recipe, memory=replace(recipe.memory, compile=word)) for word in ("never", "always"))
    world = recipe.launch.ranks
    assert isinstance(world, int)
    eager = pool.run(world, train, never, name, layers, backend)[0]
    return eager, pool.run(world, train, always, name, layers, backend, timeout_s=300)[0]


TENSOR = small_recipe("fp32", 2, parallel=Parallel(tp=2))
CHECKPOINTED = Memory(activation_checkpointing="full")
WHOLE = {
    "stage 0": small_recipe("fp32", 1),
    "stage 3": small_recipe("fp32", 2, zero=Zero(stage=3)),
    "activation checkpointing": replace(small_recipe("fp32", 1), memory=CHECKPOINTED),
}
# Those of a layer of Llama in two regions: three projections and one back, two and one back, and two ways in.
BORDERS = 10
BROKEN = {
    "tp": TENSOR,
    "tp, activation checkpointing": replace(TENSOR, memory=CHECKPOINTED),
    "tp, overlap": replace(TENSOR, parallel=Parallel(tp=2, overlap="always")),
}


@pytest.mark.parametrize("layout", WHOLE)
def test_a_layer_is_one_graph_that_serves_all_layers(pool: RankPool, layout: str) -> None:
    eager, compiled = train_both(pool, WHOLE[layout], "llama", NUM_LAYERS, "eager")
    assert compiled.values == eager.values
    assert compiled.frames == [1] * STEPS
    assert compiled.breaks == [0] * STEPS
    assert compiled.operators > 50  # a layer's, where a break at each of them left 2
    assert not compiled.limits


@pytest.mark.parametrize("layout", BROKEN)
def test_tensor_parallel_layers_break_at_their_borders_only_and_do_not_recompile(pool: RankPool, layout: str) -> None:
    eager, compiled = train_both(pool, BROKEN[layout], "llama", NUM_LAYERS, "eager")
    assert compiled.values == eager.values
    assert len(set(compiled.frames)) == 1, f"recompiled: {compiled.frames} frames after each step"
    assert compiled.breaks == [BORDERS] * STEPS
    assert all("torch.compiler.disable" in reason for reason in compiled.reasons), compiled.reasons
    assert not compiled.limits


def test_a_router_that_is_listened_to_does_not_recompile(pool: RankPool) -> None:
    recipe = small_recipe("fp32", 1)
    few, many = (train_both(pool, recipe, "mixtral", layers, "eager") for layers in (2, 4))
    for eager, compiled in (few, many):
        assert compiled.values == eager.values
        assert not compiled.limits
    assert many[1].frames == few[1].frames


@pytest.mark.grid
@pytest.mark.parametrize("layout", [*WHOLE, *BROKEN])
def test_what_inductor_makes_of_layers_trains_as_they_do(pool: RankPool, layout: str) -> None:
    eager, compiled = train_both(pool, (WHOLE | BROKEN)[layout], "llama", 3, "inductor")
    assert len(set(compiled.frames)) == 1
    for found, expected in zip(compiled.values, eager.values, strict=True):
        assert found == pytest.approx(expected, rel=TOLERANCES["fp32"])


def test_whatever_communicates_is_outside_the_compiler() -> None:
    """The doors are the `start_` forms; the blocking ones go through them."""
    functions = [
        function
        for room in (collectives, p2p)
        for name, function in inspect.getmembers(room, inspect.isfunction)
        if function.__module__ == room.__name__ and not name.startswith("_")
    ]
    through = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "start_send", "start_receive"}
    doors = [function for function in functions if function.__name__ not in through]
    assert {"start_all_reduce", "exchange", "gather_objects"} <= {door.__name__ for door in doors}
    traced = [door.__name__ for door in (*doors, Pending.advance) if not getattr(door, "_torchdynamo_disable", False)]
    assert not traced


def plan_on_gpus(recipe: Recipe) -> PlannedStage:
    """Rank 0's stage: plans need no GPU."""
    on_gpus = replace(recipe, launch=replace(recipe.launch, device="cuda"))
    return make_plan(on_gpus, build_config(family("llama"))).of_rank(0).stages[0]


@pytest.mark.parametrize("word", ["auto", "never", "always"])
def test_only_always_compiles_even_on_gpus(word: str) -> None:
    recipe = replace(small_recipe("fp32", 1), memory=Memory(compile=word))  # type: ignore[arg-type]
    stage = plan_on_gpus(recipe)
    layers = [stage.model.model.get_submodule(unit.root) for unit in stage.units if unit.is_layer]
    are_compiled = ["forward" in vars(layer) or layer._compiled_call_impl is not None for layer in layers]
    assert are_compiled == [word == "always"] * len(layers)


@pytest.mark.parametrize("word", ["auto", "never", "always"])
def test_only_always_communicates_under_products_even_on_gpus(word: str) -> None:
    recipe = small_recipe("fp32", 2, parallel=Parallel(tp=2, overlap=word))  # type: ignore[arg-type]
    model = plan_on_gpus(recipe).model.model
    layer = model.get_submodule("model.layers.0")  # the head's border never does
    borders = {type(module.region.border) for module in layer.modules() if isinstance(module, ColumnLinear)}
    assert borders == {AsyncBorder if word == "always" else ShardedBorder}
