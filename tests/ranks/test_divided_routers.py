"""Routers that see a part of every sequence's tokens, padding among them, give the load-balancing loss of all tokens."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.comm.connect import Mesh, connect
from framework.mesh.token_layout import ContextSlices, TokenLayout
from framework.mesh.topology import Topology
from framework.model import routers
from framework.model.probe import find_load_balancing_loss
from framework.model.routers import RoutedTokens, Routers, find_routers
from tests.families import build_config, family
from tests.grid import few_of
from tests.ranks.pool import RankPool

CPU = torch.device("cpu")
SEQUENCES, CONTEXT, WIDTH = 3, 9, 32
# With tp=4 parts of 3: the last rank has nothing but padding. Zig-zag slices of 4 ranks are of 4 rows, of which two ranks have 2.
LAYOUTS = (
    Topology(tp=4),
    Topology(cp=4),
    Topology(cp=4, ulysses=4),
    Topology(cp=4, ulysses=2),
    Topology(cp=2, tp=2),
    Topology(cp=2, tp=2, ulysses=2),
)
# All of cp, ulysses and tp.
SHOWN = (LAYOUTS[3], LAYOUTS[4])
CASE = ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.3})

Sabotage = Callable[[], AbstractContextManager[Any]]


def balance(hidden: list[Tensor], tokens: RoutedTokens | None, axis: Communicator | None = None) -> list[Tensor]:
    """The loss, and the gradient of each router's weight, summed over an axis, and input. hidden: [sequences * rows, width] for
    each router."""
    config = build_config(family(CASE[0]), **CASE[1])
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    loss = find_load_balancing_loss(model)
    assert loss is not None
    routers = Routers(model, loss, torch.float64, CPU, tokens)
    routers.start()
    modules = [router for router, _ in find_routers(model)]
    for router, x in zip(modules, hidden, strict=True):
        router(x)
    found = loss.compute(routers.end())
    found.backward()
    gradients = [router.weight.grad for router in modules]
    for gradient in gradients if axis else ():
        assert axis is not None
        all_reduce(gradient, axis)
    return [found.detach(), *gradients]


def lay_out(mesh: Mesh) -> TokenLayout:
    sizes = [mesh.axis(name).size for name in ("ulysses", "ring")]
    slices = ContextSlices(CONTEXT, *sizes, mesh.axis("cp").rank)
    return TokenLayout(SEQUENCES, slices.tokens_local, mesh.axis("tp").axis, is_sharded=True, slices=slices)


def divide(x: Tensor, layout: TokenLayout, padding: float) -> Tensor:
    """A rank's rows of x: [SEQUENCES, CONTEXT, n], cut as sequence parallelism cuts what the loader has cut."""
    assert layout.slices is not None
    own = F.pad(layout.slices.cut(x, padding), (0, 0, 0, layout.padding), value=padding)
    return own.split(layout.tokens_local, dim=1)[layout.tp.rank].flatten(0, 1)


def join_divided(rank: int, world: int, rendezvous: str, topology: Topology) -> None:
    """Body: rows of all ranks are joined in the order of the sequence, and cut as they were."""
    x = torch.arange(SEQUENCES * CONTEXT * 2).view(SEQUENCES, CONTEXT, 2) + 1
    mesh = connect(topology, CPU, rendezvous, rank)
    layout = lay_out(mesh)
    tokens, own = RoutedTokens.divided(layout, mesh.axes), divide(x, layout, 0)
    assert torch.equal(tokens.join(own), x)
    assert torch.equal(tokens.own(x), own)
    assert torch.equal(tokens.is_padding(own), (own == 0).all(-1, keepdim=True))
    mesh.close()


@pytest.mark.parametrize("topology", few_of(LAYOUTS, SHOWN.__contains__), ids=str)
def test_rows_of_all_ranks_are_joined_in_the_order_of_the_sequence(pool: RankPool, topology: Topology) -> None:
    pool.run(4, join_divided, topology)


def balance_divided(rank: int, world: int, rendezvous: str, sabotage: Sabotage, topology: Topology) -> float:
    """Body: the largest relative difference between what ranks find of their tokens and one process of all."""
    generator = torch.Generator().manual_seed(5)
    hidden = [torch.randn(SEQUENCES, CONTEXT, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]
    mesh = connect(topology, CPU, rendezvous, rank)
    layout = lay_out(mesh)
    parts = [divide(x, layout, 1.0) for x in hidden]
    expected = balance([x.flatten(0, 1) for x in hidden], None)
    with sabotage():
        found = balance(parts, RoutedTokens.divided(layout, mesh.axes), mesh.axis("context_tp"))
    mesh.close()
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def count_padding() -> AbstractContextManager[Any]:
    return patch.object(RoutedTokens, "cut", lambda tokens, x: x)


def keep_own_sums() -> AbstractContextManager[Any]:
    return patch.object(routers, "reduce_from", lambda x, axis: x)


@pytest.mark.parametrize("topology", few_of(LAYOUTS, SHOWN.__contains__), ids=str)
def test_the_loss_of_divided_tokens_is_that_of_all(pool: RankPool, topology: Topology) -> None:
    assert max(pool.run(4, balance_divided, nullcontext, topology)) < 1e-12


@pytest.mark.grid
@pytest.mark.parametrize("topology", [LAYOUTS[0], LAYOUTS[-2]], ids=str)
@pytest.mark.parametrize("sabotage", [count_padding, keep_own_sums])
def test_padding_and_other_ranks_tokens_show(pool: RankPool, sabotage: Sabotage, topology: Topology) -> None:
    assert max(pool.run(4, balance_divided, sabotage, topology)) > 1e-3
