"""The loss by kernels in Triton, interpreted, where the vocabulary is divided over ranks: equal to torch's of the whole."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from framework.comm.connect import connect
from framework.mesh.layout import part
from framework.mesh.topology import Topology
from framework.model.chunked_loss import ChunkedLoss, LogitMap
from framework.model.loss import IGNORE, TokenLoss
from tests.grid import IN_TURN
from tests.interpreted_triton import fused_kernels, interpreted_triton
from tests.ranks.parity import CPU
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

WORDS, WIDTH, CHUNK = 97, 16, 5


def differentiate(rank: int, world: int, rendezvous: str, in_chunks: bool, is_lost: bool) -> list[Any]:
    """Body: the loss, and how far it and the gradients of x and of the rank's part of the head are from torch's of the whole.

    is_lost: one rank's sum is.
    """
    mesh = connect(Topology(tp=world), CPU, rendezvous, rank)
    torch.manual_seed(3)
    x, weight, labels = torch.randn(2, 9, WIDTH), torch.randn(WORDS, WIDTH), torch.randint(WORDS, (2, 9))
    labels[0, ::3] = IGNORE
    whole_x, whole = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = F.cross_entropy((whole_x @ whole.t()).flatten(0, 1), labels.flatten(), reduction="sum") / 11
    expected.backward()
    start, stop = part(WORDS, rank, world)
    head = nn.Linear(WIDTH, stop - start, bias=False)
    head.weight.data = weight[start:stop].clone()
    x.requires_grad_()
    with interpreted_triton(), fused_kernels():
        axis = mesh.axis("tp")
        loss_of = ChunkedLoss(head, (), LogitMap((), ()), axis, WORDS, CHUNK) if in_chunks else TokenLoss(axis, WORDS)
        if is_lost and rank == 1:
            loss_of.start = 0  # type: ignore[union-attr]
        loss_of.expect(labels)
        loss = loss_of(head(x), labels, torch.tensor(11))
        loss.backward()
    mesh.close()
    assert x.grad is not None
    assert whole_x.grad is not None
    assert whole.grad is not None
    assert head.weight.grad is not None
    # Of x each rank has the part of its words.
    parts = (whole_x @ whole.t()).softmax(-1), F.one_hot(labels.clamp(min=0), WORDS)
    dz = (parts[0] - parts[1]) * (labels != IGNORE)[..., None] / 11
    of_x = dz[..., start:stop] @ weight[start:stop]
    pairs = (loss, expected), (x.grad, of_x), (head.weight.grad, whole.grad[start:stop])
    return [float((one - other).detach().abs().max() / other.detach().abs().max()) for one, other in pairs]


@pytest.mark.parametrize("in_chunks", [False, True])
def test_divided_logits_have_the_loss_and_gradients_of_whole_ones(pool: RankPool, in_chunks: bool) -> None:
    for found in pool.run(2, differentiate, in_chunks, False):
        assert max(found) <= 1e-5, found


def test_a_rank_that_takes_others_words_for_its_own_is_noticed(pool: RankPool) -> None:
    """Sabotage."""
    assert max(max(found) for found in pool.run(2, differentiate, True, True)) > 1e-3
