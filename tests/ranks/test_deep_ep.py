"""Experts whose rows travel by DeepEP train as one process does, on the contract double of its library: there is no GPU here."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from framework.comm import deep_ep
from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.mesh.topology import Axis
from framework.parallel.experts import split
from framework.parallel.experts.deep_rows import SumExchange, refuse_deep_ep
from framework.plan.check import check_machine
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Parallel, Zero
from tests import deep_ep_double
from tests.families import STOCK_EXPERTS, family
from tests.grid import IN_TURN
from tests.ranks.parity import Case, run_cases, small_recipe, worst_error
from tests.ranks.pool import RankPool
from tests.ranks.test_experts import skew_routers

pytestmark = IN_TURN


@contextmanager
def doubled() -> Iterator[None]:
    """The double in the place of the library, and CPUs and fp64 allowed."""
    with (
        patch.dict(sys.modules, deep_ep=deep_ep_double),
        patch.object(deep_ep, "require_deep_ep"),
        patch.object(split, "refuse_deep_ep"),
    ):
        yield


def run_doubled(rank: int, world: int, rendezvous: str, cases: list[Case], bias: tuple[float, ...]) -> Any:
    """Body: `run_cases` by DeepEP, with moved logits of qwen3_moe's routers in layouts and oracle."""
    with doubled(), skew_routers(bias, range(8)):
        found = run_cases(rank, world, rendezvous, cases)
    assert deep_ep_double.Buffer.num_open == 0, "a buffer outlives its mesh"
    return found


def errors_of(
    pool: RankPool, parallels: dict[str, Parallel], bias: tuple[float, ...], **groups: Any
) -> dict[str, float]:
    recipes = {
        label: small_recipe("fp64", 4, 1, 12, zero=Zero(stage=3), parallel=each) for label, each in parallels.items()
    }
    layouts = {label: replace(recipe, **groups) for label, recipe in recipes.items()}
    case = Case("", family("qwen3_moe"), layouts, {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": []})
    found = pool.run(4, run_doubled, [case], bias)
    return {label: worst_error(rows) for of_rank in found for label, rows in of_rank.items()}


EVEN, NONE_ON_ONE = (0.0,) * 8, (0.0,) * 6 + (-9.0,) * 2
BY_RANKS = {
    "ep 4": Parallel(ep=4, expert_backend="deepep"),
    "ep 2, tp 2": Parallel(ep=2, tp=2, expert_backend="deepep"),
    "halves": Parallel(ep=4, expert_overlap=True, expert_backend="deepep"),
}


def test_tokens_that_travel_by_deep_ep_train_as_one_process(pool: RankPool) -> None:
    found = errors_of(pool, {label: BY_RANKS[label] for label in ("ep 4", "halves")}, NONE_ON_ONE)
    assert len(found) == 2
    assert max(found.values()) < 1e-9, found


@pytest.mark.grid
@pytest.mark.parametrize("bias", [EVEN, NONE_ON_ONE], ids=["even", "a rank without a token"])
@pytest.mark.parametrize("policy", ["none", "full"])
def test_every_layout_trains_by_deep_ep_as_one_process(pool: RankPool, bias: tuple[float, ...], policy: Any) -> None:
    found = errors_of(pool, BY_RANKS, bias, memory=Memory(activation_checkpointing=policy, compile="never"))
    assert len(found) == len(BY_RANKS)
    assert max(found.values()) < 1e-9, found


def run_sabotaged(rank: int, world: int, rendezvous: str, cases: list[Case]) -> Any:
    """Body: the gradient of sums goes nowhere, as if what was dispatched again were not waited for."""
    with patch.object(SumExchange, "receive_gradients", lambda self: [0 * each for each in self.receive()]):
        return run_doubled(rank, world, rendezvous, cases, EVEN)


@pytest.mark.grid
def test_a_gradient_that_is_lost_shows(pool: RankPool) -> None:
    recipe = small_recipe("fp64", 2, 1, 12, parallel=Parallel(ep=2, expert_backend="deepep"))
    case = Case("", family("mixtral"), {"": recipe})
    errors = [worst_error(rows) for of_rank in pool.run(2, run_sabotaged, [case]) for rows in of_rank.values()]
    assert not max(errors) < 1e-4


# --- refused before a device is touched


def test_a_cpu_is_refused_by_the_plan() -> None:
    recipe = small_recipe("fp32", 2, 1, 12, parallel=Parallel(ep=2, expert_backend="deepep"))
    config = Case("", family("mixtral"), {"": recipe}).config
    with pytest.raises(ModelError, match=r"expert_backend=deepep: its kernels are for GPUs, and launch\.device is cpu"):
        make_plan(recipe, config).of_rank(0)


@pytest.mark.parametrize(
    ("size", "nodes", "width", "dtype", "message"),
    [
        (8, 1, 64, torch.float32, "precision.compute=bf16"),
        (8, 1, 72, torch.bfloat16, "whole 32 bytes within a node, .* hidden size 72"),
        (8, 1, 8192, torch.bfloat16, "less than 16,384, .* hidden size 8192"),
        (16, 2, 64, torch.bfloat16, "whole 512 bytes between nodes, .* hidden size 64"),
        (3, 1, 64, torch.bfloat16, "parallel.ep=3"),
        (8, 2, 64, torch.bfloat16, "parallel.ep=8 over 2 nodes"),
        (40, 5, 64, torch.bfloat16, "parallel.ep=40"),
    ],
)
def test_what_its_kernels_do_not_take_is_refused(size: int, nodes: int, width: int, dtype: Any, message: str) -> None:
    plan = make_stub(size, nodes, dtype)
    with pytest.raises(ModelError, match=message):
        refuse_deep_ep(plan, width)


def make_stub(size: int, nodes: int, dtype: torch.dtype) -> Any:
    class Stub:
        axes = {"ep": Communicator(Axis("ep", size, 0, on_node=size // nodes))}  # noqa: RUF012
        device, compute_dtype = torch.device("cuda"), dtype

    return Stub()


@pytest.mark.parametrize(("size", "nodes", "width"), [(2, 1, 64), (8, 1, 8176), (16, 2, 256), (64, 8, 7168)])
def test_what_they_take_is_not(size: int, nodes: int, width: int) -> None:
    refuse_deep_ep(make_stub(size, nodes, torch.bfloat16), width)


def test_where_it_is_missing_the_error_says_how_to_install_it() -> None:
    """On the machine of a local run, and in each rank."""
    recipe = small_recipe("fp32", 2, 1, 12, parallel=Parallel(ep=2, expert_backend="deepep"))
    plan = make_plan(recipe, Case("", family("mixtral"), {"": recipe}).config)
    with pytest.raises(ModelError, match=r"github\.com/deepseek-ai/DeepEP"):
        check_machine(plan)


def test_rows_of_several_widths_are_refused() -> None:
    recipe = small_recipe("fp32", 2, 1, 12, parallel=Parallel(ep=2, expert_backend="deepep"))
    config = Case("", STOCK_EXPERTS[1], {"": recipe}).config
    with (
        patch.object(split, "refuse_deep_ep"),
        pytest.raises(
            ModelError, match=r"deepep: rows of model\.layers\.0\..*\(JetMoeParallelExperts\) have other widths"
        ),
    ):
        make_plan(recipe, config).of_rank(0)
