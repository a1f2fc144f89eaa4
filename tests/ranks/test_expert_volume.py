"""Bytes that expert parallelism sends in a step are those of theory, to the byte.

n ranks of `ep`, T tokens on this one in a microbatch, k experts per token, H features of c bytes, E experts, and rows that are
chosen evenly. A layer sends T k H c (n-1)/n to the experts and, where all ranks have as many tokens, as much back, in forward
and, as gradients, in backward: four times; with activation checkpointing the recomputed forward's two once more. In front of each
forward go the numbers of rows, 8 bytes for each expert of another rank. Under sequence parallelism T are this rank's tokens,
without padding.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from framework.comm.communicator import read_traffic, subtract_traffic
from framework.comm.connect import connect
from framework.model.routers import RoutedTokens
from framework.plan.forecast_plan import measure_leaving, sent_over_hops
from framework.plan.plan import make_plan
from framework.recipe.derive import derive
from framework.recipe.schema import Memory, Parallel, Recipe
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CONTEXT, CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankPool
from tests.ranks.quantized import on_nodes

pytestmark = IN_TURN

SEQUENCES = 16
NUM_EXPERTS, TOP_K, HIDDEN = 4, 2, 32
LAYERS = 3
ITEM_BYTES = {"fp32": 4, "bf16": 2}
RECOMPUTES = Memory(activation_checkpointing="full", compile="never")
CHANGES = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": TOP_K, "mlp_only_layers": []}


def route_evenly() -> AbstractContextManager[Any]:
    """Routers of qwen3_moe give tokens to experts in turn; weights are theirs."""

    def forward(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
        index = torch.arange(len(logits) * router.top_k).view(-1, router.top_k) % router.num_experts
        return logits, logits.softmax(-1).gather(1, index), index

    return patch.object(Qwen3MoeTopKRouter, "forward", forward)


def measure_volume(
    rank: int, world: int, rendezvous: str, case: Case, sabotage: Callable[[], AbstractContextManager[Any]]
) -> dict[str, tuple[int, int]]:
    """Body: for each layout the calls and bytes of this rank's all-to-alls in one step."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        topology = topology_of(recipe, case.config)
        if rank >= topology.world:
            continue
        mesh = connect(topology, CPU, f"{rendezvous}-{number}", rank)
        with route_evenly(), sabotage():
            run = build(make_plan(recipe, case.config), mesh)
            before = read_traffic(mesh.axes)
            train_step(run, share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
            found[label] = subtract_traffic(read_traffic(mesh.axes), before)["ep"]["all_to_all"]
        mesh.close()
    return found


def count_tokens(recipe: Recipe, rank: int) -> int:
    """The tokens of a microbatch that a rank dispatches."""
    parallel, sequences = recipe.parallel, recipe.batch.sequences_per_microbatch
    assert sequences is not None
    tp = parallel.tp if parallel.expert_tp in (None, 1) else 1
    groups, length = (sequences, CONTEXT) if parallel.sequence else (1, sequences * CONTEXT)
    longest = -(-length // tp)
    return groups * min(longest, max(length - rank % tp * longest, 0))


def expect_volume(recipe: Recipe, rank: int) -> tuple[int, int]:
    """Calls and bytes of a rank in one step. What it sends back is of others' tokens."""
    n, accumulation = recipe.parallel.ep, derive(recipe).accumulation
    axis = next(ranks for ranks in groups_of(recipe) if rank in ranks)
    there = count_tokens(recipe, rank) * TOP_K * (n - 1) // n
    back = sum(count_tokens(recipe, other) for other in axis if other != rank) * TOP_K // n
    forwards = 2 if recipe.memory.activation_checkpointing == "full" else 1
    row_bytes = HIDDEN * ITEM_BYTES[recipe.precision.compute]
    num_bytes = (forwards + 1) * (there + back) * row_bytes + forwards * 8 * NUM_EXPERTS * (n - 1) // n
    return LAYERS * accumulation * (3 * forwards + 2), LAYERS * accumulation * num_bytes


def groups_of(recipe: Recipe) -> list[tuple[int, ...]]:
    """The ranks of each axis `ep`: neighbours, or every second where two slice an expert."""
    world, stride = derive(recipe).world, recipe.parallel.expert_tp or 1
    size = recipe.parallel.ep * stride
    return [tuple(range(first + at, first + size, stride)) for first in range(0, world, size) for at in range(stride)]


def layout(precision: str, dp: int, count: int, parallel: Parallel, recomputes: bool = False) -> Recipe:
    recipe = small_recipe(precision, dp * parallel.tp, count, SEQUENCES, None, parallel=parallel)
    return replace(recipe, memory=RECOMPUTES) if recomputes else recipe


LAYOUTS = {
    "ep 2, 2 microbatches": layout("fp32", 2, 2, Parallel(ep=2)),
    "ep 4 in bf16": layout("bf16", 4, 1, Parallel(ep=4)),
    "ep 2 twice, recomputed": layout("fp32", 4, 1, Parallel(ep=2), recomputes=True),
    "from shards of tokens": layout("fp32", 2, 1, Parallel(tp=2, ep=4)),
    "from shards of tokens, recomputed": layout("bf16", 2, 2, Parallel(tp=2, ep=2), recomputes=True),
    "from replicated tokens": layout("fp32", 2, 1, Parallel(tp=2, ep=4, sequence=False)),
    "sliced experts": layout("fp32", 2, 1, Parallel(tp=2, ep=2, expert_tp=2)),
}


# The others say the same of fewer ranks or of two things at once.
SHOWN = ("ep 4 in bf16", "ep 2 twice, recomputed", "from shards of tokens", "from replicated tokens")


@pytest.mark.parametrize("labels", few_of([(SHOWN,), (tuple(LAYOUTS),)], lambda labels: labels == SHOWN))
def test_bytes_of_an_even_step_are_those_of_theory(pool: RankPool, labels: tuple[str, ...]) -> None:
    layouts = {label: LAYOUTS[label] for label in labels}
    by_rank = pool.run(4, measure_volume, Case("", family("qwen3_moe"), layouts, CHANGES), nullcontext)
    for label, recipe in layouts.items():
        found = {rank: by_rank[rank][label] for rank in range(derive(recipe).world)}
        assert found == {rank: expect_volume(recipe, rank) for rank in found}, label


# --- two hops


def route_by_each_choice() -> AbstractContextManager[Any]:
    """Routers of qwen3_moe give tokens every choice of experts in turn; weights are theirs."""

    def forward(router: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = F.linear(hidden_states.reshape(-1, router.hidden_dim), router.weight)
        choices = torch.combinations(torch.arange(router.num_experts), router.top_k)
        index = choices[torch.arange(len(logits)) % len(choices)]
        return logits, logits.softmax(-1).gather(1, index), index

    return patch.object(Qwen3MoeTopKRouter, "forward", forward)


def measure_hops(rank: int, world: int, rendezvous: str, case: Case) -> dict[str, list[int]]:
    """Body: for each layout the bytes over the outer and the inner hop in one step, and those that left the node."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        with route_by_each_choice():
            run = build(make_plan(recipe, case.config), mesh)
            train_step(run, share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
        traffic = [mesh.axis(name).traffic for name in ("ep_outer", "ep_inner")]
        leaving = sum(each.bytes_leaving["all_to_all"] for each in traffic)
        found[label] = [*(each.bytes["all_to_all"] for each in traffic), leaving]
        mesh.close()
    return found


# Two nodes of two ranks, each with two of four experts: of the six choices of two experts five have one on the other node.
HOPS = {
    "fp32, recomputed": layout("fp32", 4, 1, Parallel(ep=4), recomputes=True),
    "bf16, in halves": layout("bf16", 4, 1, Parallel(ep=4, expert_overlap=True)),
    "codes": layout("bf16", 4, 1, Parallel(ep=4, expert_dispatch="fp8")),
    "padded": layout("fp32", 4, 1, Parallel(ep=4, expert_padding=1.1)),
}


def expect_crossing(recipe: Recipe) -> int:
    """Bytes of a rank between nodes in one step."""
    forwards = 2 if recipe.memory.activation_checkpointing == "full" else 1
    parts = 2 if recipe.parallel.expert_overlap else 1
    row = HIDDEN * ITEM_BYTES[recipe.precision.compute]
    # A scale, the codes, and what fills them up to 8 bytes. Beside each row weights in fp32 and numbers of experts, in backward
    # the gradient of weights.
    there = 4 + HIDDEN + 4 if recipe.parallel.expert_dispatch == "fp8" else row
    gradient = 4 + HIDDEN if recipe.parallel.expert_dispatch == "fp8" else row  # alone in its message
    legs = forwards * (there + 16 + row) + gradient + row + 8
    rows = 36 * 5 // 6 if recipe.parallel.expert_padding is None else 33
    return LAYERS * (rows * legs + forwards * parts * 8 * (1 + 2))


def test_bytes_between_nodes_are_those_of_theory_and_of_the_plan(pool: RankPool) -> None:
    layouts = {label: on_nodes(recipe, 2) for label, recipe in HOPS.items()}
    case = Case("", family("qwen3_moe"), layouts, CHANGES)
    by_rank = pool.run(4, measure_hops, case)
    for label, recipe in layouts.items():
        plan = make_plan(recipe, case.config)
        crossing = expect_crossing(recipe)
        planned = [LAYERS * each for each in sent_over_hops(plan, plan.mixtures[0])]
        assert planned[0] == crossing == measure_leaving(plan, 0)["ep"], label
        assert [found[label] for found in by_rank] == [[*planned, crossing]] * 4, label


# --- sabotage


def route_padding() -> AbstractContextManager[Any]:
    """Rows that are no tokens are sent to experts: nobody reads what comes back, so only bytes and loads tell."""
    return patch.object(RoutedTokens, "is_padding", lambda given, rows: torch.zeros(len(rows), 1, dtype=torch.bool))


@pytest.mark.grid
def test_routed_padding_shows(pool: RankPool) -> None:
    label = "from shards of tokens"
    case = Case("", family("qwen3_moe"), {label: LAYOUTS[label]}, CHANGES)
    by_rank = pool.run(4, measure_volume, case, route_padding)
    # Every rank sends back what came of others' padding.
    assert all(by_rank[rank][label][1] > expect_volume(LAYOUTS[label], rank)[1] for rank in range(4))
