"""memory.compile: always. Compiled layers train as the oracle does, no step recompiles, one set of graphs serves equal layers.

Parity is asked within the usual tolerances, 1e-9 in fp64 and 1e-5 in fp32 (`verify/compare.py`): inductor reorders sums and
keeps what it fuses in registers, which on CPUs changes fp32 by no more than another layout does (worst of 18 layouts of the three
families with inductor: 1.2e-6; of the same graphs run operator by operator, in other microbatches: 2.2e-6). Kernels of GPUs may
do otherwise; nobody has run them.
"""

import inspect
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn
from torch._dynamo.utils import counters

from framework.comm import collectives, p2p
from framework.comm.algorithms import Pending
from framework.comm.connect import connect
from framework.comm.objects import all_gather_object
from framework.data.pack import Microbatch
from framework.model.experts import find_experts
from framework.parallel.experts.dispatch import ExpertDispatch
from framework.parallel.tensor.borders import AsyncBorder, ShardedBorder
from framework.parallel.tensor.layers import ColumnLinear
from framework.plan.plan import PlannedStage, make_plan
from framework.recipe.schema import Memory, Model, Parallel, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.compare import ErrorRow, compare, render
from framework.verify.evidence import Evidence, TokenBatch, make_batches
from framework.verify.layout import initial_weights, run_layout, share
from tests.evaluation import evaluate
from tests.families import build_config, family
from tests.grid import IN_TURN, few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CONTEXT, CPU, Case, expect, small_recipe, topology_of, worst_error
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

SEQUENCES = 12
# Of every layout: graphs are for one shape, and cases of equal shape find each other's kernels in inductor's cache.
SEQUENCES_PER_MICROBATCH = 2
# More than torch's recompile_limit of 8: a graph of each layer's own would hit it.
NUM_LAYERS = 10
CHECKPOINTED = Memory(activation_checkpointing="full", compile="always")
# What breaks a layer's graph: with overlap our borders and split layers, and the hook that collects a router's logits, all
# disabled by name; and, with overlap, what reads a region's input while it still comes and is no split layer (a router, experts).
EXPECTED_BREAKS = ("torch.compiler.disable", "of class `AsyncGatherTensor`")
# A broken rule must show far beyond the tolerance, not at its edge.
VISIBLE = 1e-3

Backend = str | Callable[..., Any]


@dataclass(frozen=True)
class Compiled:
    """breaks, frames: what dynamo had counted after each step: graph breaks, and frames that it had compiled, again or for the
    first time. operators: in its graphs. reasons: of its breaks; limits: warnings of giving up."""

    evidence: Evidence
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


class _CountedBatches(list[TokenBatch]):
    """Batches that note dynamo's counters after each step."""

    def __init__(self, batches: list[TokenBatch]) -> None:
        super().__init__(batches)
        self.breaks: list[int] = []
        self.frames: list[int] = []

    def __iter__(self) -> Iterator[TokenBatch]:
        for batch in super().__iter__():
            yield batch
            self.breaks.append(sum(counters["graph_break"].values()))
            self.frames.append(counters["frames"]["total"])


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The session's folder for what inductor compiles: cold at its beginning, shared by ranks and cases."""
    return str(tmp_path_factory.mktemp("inductor"))


@contextmanager
def fresh_compiler(backend: Backend, kernels: str) -> Iterator[_Warnings]:
    """No graphs and counts from before. backend: `eager` runs dynamo's graphs as they are: all is counted, little is compiled."""
    torch._dynamo.reset()
    counters.clear()
    found, logger = _Warnings(), logging.getLogger("torch._dynamo")
    logger.addHandler(found)
    try:
        with (
            patch.object(torch, "compile", partial(torch.compile, backend=backend)),
            patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": kernels}),
            # A pool of processes that compile pays only where there is more to compile.
            torch._inductor.config.patch(compile_threads=1),
        ):
            yield found
    finally:
        logger.removeHandler(found)
        torch._dynamo.reset()


def train(
    rank: int, world: int, rendezvous: str, case: Case, backend: Backend, kernels: str
) -> tuple[dict[str, Compiled], dict[str, list[ErrorRow]]]:
    """Body: each layout of the case by its label, and on rank 0 its comparison with the oracle."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        batches = _CountedBatches(case.batches())
        with fresh_compiler(backend, kernels) as warnings:
            mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
            evidence = run_layout(make_plan(recipe, case.config), batches, mesh)
            mesh.close()
            operators, reasons = counters["stats"]["calls_captured"], tuple(counters["graph_break"])
        limits = tuple(text for text in warnings.texts if "recompile_limit" in text)
        found[label] = Compiled(evidence, batches.breaks, batches.frames, operators, reasons, limits)
    expected = expect(case) if rank == 0 else None
    return found, {label: compare(each.evidence, expected) for label, each in found.items() if expected is not None}


def lay_out(
    precision: str = "fp32",
    zero: int = 0,
    parallel: Parallel = Parallel(),  # noqa: B008  a frozen value
    dp: int = 1,
    memory: Memory = Memory(compile="always"),  # noqa: B008
) -> Recipe:
    accumulation = SEQUENCES // SEQUENCES_PER_MICROBATCH // dp
    world = dp * parallel.cp * parallel.tp * parallel.pp
    recipe = small_recipe(precision, world, accumulation, SEQUENCES, 0.05, Zero(stage=zero), parallel)
    return replace(recipe, memory=memory)


def compile_case(pool: RankPool, case: Case, backend: Backend, kernels: str) -> dict[str, Compiled]:
    """Rank 0's layouts, each equal to the oracle, and none that compiled anything after its second step or gave up."""
    (world,) = {recipe.launch.ranks for recipe in case.layouts.values()}
    assert isinstance(world, int)
    of_ranks = pool.run(world, train, case, backend, kernels, timeout_s=600)
    for label, rows in of_ranks[0][1].items():
        assert worst_error(rows) <= case.tolerance, f"{case.name}, {label}\n{render(rows, case.tolerance)}"
    for rank, (found, _) in enumerate(of_ranks):
        for label, each in found.items():
            assert each.frames[1] == each.frames[-1], f"rank {rank}, {label}: recompiled, {each.frames} frames"
            assert not each.limits, each.limits
            others = [reason for reason in each.reasons if not any(known in reason for known in EXPECTED_BREAKS)]
            assert not others, f"rank {rank}, {label}: {others}"
    return of_ranks[0][0]


@pytest.mark.grid
def test_compiled_layouts_equal_the_oracle(pool: RankPool, kernels: str) -> None:
    """With inductor. Whole layers are one graph; weights come and go (stage 3), and each of them is trained."""
    case = Case("llama", family("llama"), {"stage 3": lay_out(zero=3, dp=2, memory=CHECKPOINTED)})
    before = initial_weights(case.config, case.recipe.train.seed)
    for label, found in compile_case(pool, case, "inductor", kernels).items():
        assert found.breaks == [0] * len(found.breaks)
        still = [name for name, weight in found.evidence.weights.items() if torch.equal(weight, before[name])]
        assert not still, f"{label}: not trained: {still}"


def reads_old_weights(graph: Any, example_inputs: Any) -> Callable[..., Any]:
    """A backend whose graphs read weights as they were when they first ran: as if copied out of storages that are resized."""
    kept: dict[int, Tensor] = {}

    def age(x: Any) -> Any:
        return x + (kept.setdefault(id(x), x.detach().clone()) - x).detach() if isinstance(x, nn.Parameter) else x

    return lambda *inputs: graph(*map(age, inputs))


def loses_gradients(graph: Any, example_inputs: Any) -> Callable[..., Any]:
    """A backend whose graphs give weights no gradients."""
    return lambda *inputs: graph(*(x.detach() if isinstance(x, nn.Parameter) else x for x in inputs))


@pytest.mark.grid
@pytest.mark.parametrize("backend", few_of([reads_old_weights, loses_gradients], lambda x: x is reads_old_weights))
def test_the_comparison_sees_a_compiler_that(pool: RankPool, kernels: str, backend: Callable[..., Any]) -> None:
    case = Case("llama", family("llama"), {"stage 3": lay_out(zero=3, dp=2)})
    (_, rows), _ = pool.run(2, train, case, backend, kernels)
    assert worst_error(rows["stage 3"]) > VISIBLE


def test_a_layer_is_one_graph_that_serves_all_layers(pool: RankPool, kernels: str) -> None:
    case = Case("llama", family("llama"), {"": lay_out()}, {"num_hidden_layers": NUM_LAYERS})
    found = compile_case(pool, case, "eager", kernels)[""]
    assert found.frames == [1] * len(found.frames)
    assert found.operators > 50  # a layer's, where a break at each of them left 2


@pytest.mark.grid
def test_layers_that_differ_in_a_number_are_all_compiled(pool: RankPool, kernels: str) -> None:
    """diffllama's lambda_init: torch would give up after eight."""
    case = Case("diffllama", family("diffllama"), {"": lay_out()}, {"num_hidden_layers": NUM_LAYERS})
    assert compile_case(pool, case, "eager", kernels)[""].frames[0] == NUM_LAYERS


@pytest.mark.grid  # as those that dispatch
def test_experts_in_a_loop_are_one_operator(pool: RankPool, kernels: str) -> None:
    """Each number of tokens that an expert is given would be a graph of its own, until torch gives up. Checkpointed: what
    restores a router's choice elsewhere would have torch compile nothing in recomputation."""
    recipe = replace(lay_out("fp64", memory=CHECKPOINTED), model=Model(experts="eager"))
    found = compile_case(pool, Case("qwen3_moe", family("qwen3_moe"), {"": recipe}), "aot_eager", kernels)[""]
    assert found.breaks[-1] == 0


def find_expert_views(rank: int, world: int, rendezvous: str, recipe: Recipe) -> list[bool]:
    """Body: of each mixture, whether its experts' gradients go straight into their views."""
    config = build_config(family("qwen3_moe"))
    mesh = connect(topology_of(recipe, config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, config), mesh)
    found = [
        isinstance(experts.dispatch, ExpertDispatch) and experts.dispatch.local.first.grad_view is not None
        for _, experts, _ in find_experts(run.stages[0].model.model)
    ]
    mesh.close()
    return found


# Dense and with experts, or with a window and without.
KINDS_OF_LAYERS = {
    "llama": 1,
    "qwen3": 1,
    "qwen3_moe": 2,
    "gemma2": 2,
    "gemma3_text": 2,
    "gpt_oss": 2,
    "deepseek_v3": 2,
}
SPLITS: Mapping[str, Parallel] = {
    "tp": Parallel(tp=2),
    "tp, replicated": Parallel(tp=2, sequence=False),
    "ulysses": Parallel(cp=2, context="ulysses"),
    "ring": Parallel(cp=2, context="ring"),
    "ep": Parallel(ep=2),
    "ep, padded": Parallel(ep=2, expert_padding=2.0),
    "tp, ep": Parallel(tp=2, ep=2),
}
MIXTURES = ("qwen3_moe", "gpt_oss", "deepseek_v3")
# (family, layout, checkpointing, what is kept of a region's input): any two values meet.
WHOLE = cover_pairs(
    (tuple(KINDS_OF_LAYERS), tuple(SPLITS), ("none", "selective", "full"), ("keep", "regather")),
    lambda name, split, checkpointing, inputs: (
        ("ep" not in split or name in MIXTURES) and (inputs == "keep" or split in ("tp", "tp, ep"))
    ),
)
SHOWN = (("llama", "tp", "selective", "regather"), ("qwen3_moe", "ep", "selective", "keep"))


@pytest.mark.parametrize(
    ("name", "split", "checkpointing", "inputs"),
    few_of(dict.fromkeys([*SHOWN, *WHOLE]), lambda *case: case == SHOWN[0]),
)
def test_layers_that_communicate_are_one_graph(
    pool: RankPool, kernels: str, name: str, split: str, checkpointing: Any, inputs: Any
) -> None:
    """No graph ends at a border of tp, at an exchange of cp or ep; graphs serve all layers that are alike."""
    memory = Memory(activation_checkpointing=checkpointing, compile="always", gathered_inputs=inputs)
    recipe = lay_out("fp64", 0, SPLITS[split], dp=2 if split.startswith("ep") else 1, memory=memory)
    found = compile_case(pool, Case(name, family(name), {split: recipe}), "aot_eager", kernels)[split]
    assert found.breaks == [0] * len(found.breaks)
    assert found.frames == [KINDS_OF_LAYERS[name]] * len(found.frames)


@pytest.mark.grid
def test_frozen_layers_in_regions_compile(pool: RankPool, kernels: str) -> None:
    recipe = lay_out("fp64", parallel=Parallel(tp=2))
    recipe = replace(recipe, model=replace(recipe.model, freeze=["q_proj", "down_proj"]))
    compile_case(pool, Case("llama", family("llama"), {"": recipe}), "aot_eager", kernels)


def loses_slots(*_: Any) -> None:
    """`write_weight_gradient` of column layers whose gradients do not arrive."""


@pytest.mark.grid
def test_the_comparison_sees_weight_gradients_that_a_border_loses(pool: RankPool, kernels: str) -> None:
    case = Case("llama", family("llama"), {"": lay_out("fp64", parallel=Parallel(tp=2))})
    (_, rows), _ = pool.run(2, train_with_lost_slots, case, "aot_eager", kernels)
    assert worst_error(rows[""]) > VISIBLE


def train_with_lost_slots(rank: int, world: int, rendezvous: str, *case: Any) -> Any:
    """Body: `train` with the planted bug."""
    with patch("framework.parallel.tensor.borders.write_weight_gradient", loses_slots):
        return train(rank, world, rendezvous, *case)


@pytest.mark.grid
def test_gradients_of_experts_that_dispatch_go_into_their_views(pool: RankPool) -> None:
    assert pool.run(2, find_expert_views, lay_out("fp64", 0, Parallel(ep=2), dp=2)) == [[True, True]] * 2


@pytest.mark.grid
def test_compiled_layers_leave_gradients_of_weights_for_bubbles(pool: RankPool, kernels: str) -> None:
    """With inductor, which writes its next tensors where factors were that its graph has no more use for."""
    recipe = lay_out(parallel=Parallel(pp=2))
    recipe = replace(recipe, pipeline=replace(recipe.pipeline, schedule="zb_h1"))
    compile_case(pool, Case("llama", family("llama"), {"zb_h1": recipe}), "inductor", kernels)


@pytest.mark.grid
def test_layers_with_messages_under_matmuls_break_at_their_regions_only(pool: RankPool, kernels: str) -> None:
    layouts = {"": lay_out(parallel=Parallel(tp=2, overlap="always"))}
    found = compile_case(pool, Case("llama", family("llama"), layouts), "eager", kernels)[""]
    # The same in each step: pieces serve all layers.
    assert found.breaks[0] > 0
    assert len(set(found.breaks)) == len(set(found.frames)) == 1


@pytest.mark.grid
def test_a_router_that_is_listened_to_does_not_recompile(pool: RankPool, kernels: str) -> None:
    def count(layers: int) -> list[int]:
        changes = {"num_hidden_layers": layers, "output_router_logits": True}
        case = Case("mixtral", family("mixtral"), {"": recipe}, changes, by_microbatch=True)
        return compile_case(pool, case, "eager", kernels)[""].frames

    recipe = lay_out()
    assert count(2) == count(4)


def alternate(rank: int, world: int, rendezvous: str, recipe: Recipe, kernels: str) -> tuple[list[float], list[int]]:
    """Body: steps and validations in turn, rows of two documents and of one: what was found, and the frames after each."""
    config = build_config(family("llama"))
    values: list[float] = []
    frames: list[int] = []
    with fresh_compiler("eager", kernels):
        mesh = connect(topology_of(recipe, config), CPU, rendezvous, rank)
        run = build(make_plan(recipe, config), mesh)
        for step, batch in enumerate(make_batches(config, 4, SEQUENCES, CONTEXT, seed=11)):
            microbatches = [_pack(each, step % 2 == 0) for each in share(batch, SEQUENCES_PER_MICROBATCH, mesh)]
            values += [evaluate(run, microbatches), train_step(run, microbatches, step, 1e-2).read().loss]
            frames.append(counters["frames"]["total"])
        mesh.close()
    return values, frames


def _pack(microbatch: Microbatch, is_packed: bool) -> Microbatch:
    positions = torch.arange(CONTEXT).expand(microbatch.input_ids.shape)
    return replace(microbatch, position_ids=positions % 5 if is_packed else positions)


def test_training_and_validation_have_their_graphs_with_a_mask_and_without(pool: RankPool, kernels: str) -> None:
    recipe = lay_out()
    never = replace(recipe, memory=Memory(compile="never"))
    (found, frames), (expected, _) = (pool.run(1, alternate, each, kernels)[0] for each in (recipe, never))
    assert found == expected
    assert frames == [2, 4, 4, 4]


LAYOUTS: Mapping[str, Parallel] = {
    "dp": Parallel(),
    "tp": Parallel(tp=2, sequence=False),
    "tp, sequence": Parallel(tp=2),
    "tp, overlap": Parallel(tp=2, overlap="always"),
    "pp": Parallel(pp=2),
}
# (family, precision, stage of ZeRO, layout, memory): any two values meet.
CROSSED = cover_pairs(
    (
        ("llama", "qwen3_moe", "gemma2"),
        ("fp32", "fp64"),
        (0, 1, 2, 3),
        tuple(LAYOUTS),
        ("none", "selective", "full"),
    ),
    # What is kept is chosen within one graph: with overlap there are several. The mode in which casts to fp32 do nothing in fp64
    # does not reach into a graph's checkpoint.
    lambda name, precision, stage, layout, checkpointing: (
        checkpointing != "selective" or ("overlap" not in layout and precision == "fp32")
    ),
)


@pytest.mark.grid
@pytest.mark.parametrize(("name", "precision", "stage", "layout", "checkpointing"), CROSSED)
def test_what_inductor_makes_of_layers_equals_the_oracle(
    pool: RankPool, kernels: str, name: str, precision: str, stage: int, layout: str, checkpointing: Any
) -> None:
    memory = Memory(activation_checkpointing=checkpointing, compile="always")
    recipe = lay_out(precision, stage, LAYOUTS[layout], dp=2, memory=memory)
    compile_case(pool, Case(name, family(name), {layout: recipe}), "inductor", kernels)


def test_whatever_communicates_is_outside_the_compiler() -> None:
    """The doors are the `start_` forms; the blocking ones go through them."""
    functions = [
        function
        for room in (collectives, p2p)
        for name, function in inspect.getmembers(room, inspect.isfunction)
        if function.__module__ == room.__name__ and not name.startswith("_")
    ]
    through = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "start_send", "start_receive"}
    doors = [*(function for function in functions if function.__name__ not in through), all_gather_object]
    assert {"start_all_reduce", "exchange"} <= {door.__name__ for door in doors}
    traced = [door.__name__ for door in (*doors, Pending.advance) if not getattr(door, "_torchdynamo_disable", False)]
    assert not traced


def plan_on_gpus(recipe: Recipe) -> PlannedStage:
    """Rank 0's stage: plans need no GPU."""
    on_gpus = replace(recipe, launch=replace(recipe.launch, device="cuda"))
    return make_plan(on_gpus, build_config(family("llama"))).of_rank(0).stages[0]


@pytest.mark.parametrize(
    ("word", "policy", "overlap", "are_compiled"),
    [
        *(("auto", "none", "auto", True), ("auto", "selective", "auto", True), ("auto", "none", "always", True)),
        # What is kept is chosen within one graph, and with messages under matmuls there are several.
        *(("auto", "selective", "always", False), ("never", "none", "auto", False), ("always", "none", "auto", True)),
    ],
)
def test_layers_that_are_compiled_on_gpus(word: Any, policy: Any, overlap: Any, are_compiled: bool) -> None:
    memory = Memory(compile=word, activation_checkpointing=policy)
    stage = plan_on_gpus(replace(small_recipe("fp32", 2, parallel=Parallel(tp=2, overlap=overlap)), memory=memory))
    layers = [stage.model.model.get_submodule(unit.root) for unit in stage.units if unit.is_layer]
    assert ["forward" in vars(layer) for layer in layers] == [are_compiled] * len(layers)


@pytest.mark.parametrize("word", ["auto", "never", "always"])
def test_only_always_communicates_under_products_even_on_gpus(word: str) -> None:
    recipe = small_recipe("fp32", 2, parallel=Parallel(tp=2, overlap=word))  # type: ignore[arg-type]
    model = plan_on_gpus(recipe).model.model
    layer = model.get_submodule("model.layers.0")  # the head's border never does
    borders = {type(module.region.border) for module in layer.modules() if isinstance(module, ColumnLinear)}
    assert borders == {AsyncBorder if word == "always" else ShardedBorder}
