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
from framework.comm.connect import connect
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Topology
from framework.model import load_balancing
from framework.model.load_balancing import Routers, find_load_balancing_loss, find_routers
from framework.model.routed_tokens import RoutedTokens
from tests.families import build_config, family
from tests.ranks.pool import RankPool

CPU = torch.device("cpu")
SEQUENCES, CONTEXT, WIDTH = 3, 9, 32
# Parts of 3: the last rank has nothing but padding.
TP = 4
CASE = ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.3})

Sabotage = Callable[[], AbstractContextManager[Any]]


def balance(hidden: list[Tensor], tokens: RoutedTokens | None, tp: Communicator | None = None) -> list[Tensor]:
    """The loss, and the gradient of each router's weight and input, summed over tp. hidden: [sequences * rows, width] for each
    router."""
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
    for gradient in gradients if tp else ():
        assert tp is not None
        all_reduce(gradient, tp)
    return [found.detach(), *gradients]


def balance_divided(rank: int, world: int, rendezvous: str, sabotage: Sabotage) -> float:
    """Body: the largest relative difference between what ranks find of their tokens and one process of all."""
    generator = torch.Generator().manual_seed(5)
    hidden = [torch.randn(SEQUENCES, CONTEXT, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]
    mesh = connect(Topology(tp=world), CPU, rendezvous, rank)
    tp = mesh.axis("tp")
    layout = TokenLayout(SEQUENCES, CONTEXT, tp.axis, is_sharded=True)
    own = slice(rank * layout.tokens_local, (rank + 1) * layout.tokens_local)
    parts = [F.pad(x, (0, 0, 0, layout.padding), value=1.0)[:, own].flatten(0, 1) for x in hidden]
    expected = balance([x.flatten(0, 1) for x in hidden], None)
    with sabotage():
        found = balance(parts, RoutedTokens.divided(layout, tp), tp)
    mesh.close()
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


def count_padding() -> AbstractContextManager[Any]:
    return patch.object(RoutedTokens, "cut", lambda tokens, x: x)


def keep_own_sums() -> AbstractContextManager[Any]:
    return patch.object(load_balancing, "reduce_from", lambda x, axis: x)


def test_the_loss_of_divided_tokens_is_that_of_all(pool: RankPool) -> None:
    assert max(pool.run(TP, balance_divided, nullcontext)) < 1e-12


@pytest.mark.parametrize("sabotage", [count_padding, keep_own_sums])
def test_padding_and_other_ranks_tokens_show(pool: RankPool, sabotage: Sabotage) -> None:
    assert max(pool.run(TP, balance_divided, sabotage)) > 1e-3
