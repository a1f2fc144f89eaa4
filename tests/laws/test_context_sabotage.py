"""Sabotage of context parallelism's tokens: what is cut, counted and summed wrongly shows beside one process."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from framework.comm.collectives import Pending
from framework.comm.communicator import Communicator
from framework.data.pack import Microbatch, cut_context
from framework.mesh.token_layout import ContextSlices
from framework.model.loss import IGNORE
from framework.model.routers import RoutedTokens, Routers
from framework.parallel.zero import gradients
from framework.train.stage import RankStage
from framework.verify import layout
from tests.laws.sabotage import Errors, Sabotage, errors_of
from tests.ranks.pool import RankPool
from tests.ranks.test_context import Way

# One day has them all: they share a control and an oracle.
pytestmark = pytest.mark.grid(part=2)

TOLERANCE = 1e-9
# A broken law must show far beyond the tolerance, not at its edge.
VISIBLE = 1e-4
LOSS, GRADIENT = "loss", "gradient, step 1"


def cut_wrongly(
    spoil: Callable[[Microbatch], Microbatch], before: Callable[[Microbatch], Microbatch] = lambda x: x
) -> Any:
    def cut(rows: Microbatch, slices: ContextSlices) -> Microbatch:
        return spoil(cut_context(before(rows), slices))

    return patch.object(layout, "cut_context", cut)


def shift_labels_after_the_cut() -> Any:
    """The last token of a slice never learns what comes next (verl 4250)."""

    def unshift(rows: Microbatch) -> Microbatch:
        first = torch.full_like(rows.labels[:, :1], IGNORE)
        return replace(rows, labels=torch.cat([first, rows.labels[:, :-1]], dim=1))

    def shift(rows: Microbatch) -> Microbatch:
        last = torch.full_like(rows.labels[:, :1], IGNORE)
        return replace(rows, labels=torch.cat([rows.labels[:, 1:], last], dim=1))

    return cut_wrongly(shift, before=unshift)


def count_positions_from_each_slice() -> Any:
    """Rotary embeddings begin anew on every rank."""

    def restart(rows: Microbatch) -> Microbatch:
        return replace(
            rows, position_ids=torch.arange(rows.input_ids.shape[1]).expand(rows.input_ids.shape).contiguous()
        )

    return cut_wrongly(restart)


def forget_documents() -> Any:
    """The second document sees the first, as without packing (TRL 6843)."""
    return cut_wrongly(lambda rows: replace(rows, documents=None))


def begin_documents_on_their_rank() -> Any:
    """A document that spans ranks is cut in two."""

    def cut(rows: Microbatch, slices: ContextSlices) -> Microbatch:
        own = cut_context(rows, slices)
        assert own.documents is not None
        begins = {start for start, _ in slices.intervals}
        starts = tuple(tuple(sorted(begins | {*each})) for each in own.documents.starts)
        return replace(own, documents=replace(own.documents, starts=starts))

    return patch.object(layout, "cut_context", cut)


def predict_padding() -> Any:
    """What fills a slice up has labels."""
    return cut_wrongly(lambda rows: replace(rows, labels=rows.labels.where(rows.labels != IGNORE, 3)))


def keep_the_gradient_of_own_tokens() -> Any:
    """Gradients are not summed over cp, as if its ranks had other sequences of a batch of their own."""
    whole = gradients.start_all_reduce

    def start(x: torch.Tensor, axis: Communicator, **options: Any) -> Pending:
        return Pending() if axis.name == "replica" else whole(x, axis, **options)

    return patch.object(gradients, "start_all_reduce", start)


def balance_each_slice() -> Any:
    """Each rank balances the tokens that it has, not those of the sequences."""
    whole = RoutedTokens.outside
    return patch.object(RoutedTokens, "outside", lambda tokens, axes: _alone(whole(tokens, axes)))


def _alone(tokens: RoutedTokens) -> RoutedTokens:
    return replace(tokens, over=RoutedTokens.of_one_rank().over)


def count_balancing_on_every_rank() -> Any:
    """The routers' loss is added up over ranks that have the same sums: shown cp times."""
    return patch.object(Routers, "compute_loss", lambda self, sums: self.loss.weight * self.loss.compute(sums))


def divide_balancing_by_the_ranks() -> Any:
    """Microbatches are counted over dp x cp: the routers' gradient is 1 / cp of what it should be."""
    whole = RankStage.start_step
    return patch.object(
        RankStage,
        "start_step",
        lambda stage, inputs: whole(stage, replace(inputs, num_microbatches=2 * inputs.num_microbatches)),
    )


CASES = {
    "slices": Way("llama", 2),
    "documents": Way("llama", 2, packs=True, context=16),
    "routers": Way("qwen3_moe", 2),
}
# What is done, where it shows, and the quantity in which it must.
SABOTAGES: tuple[tuple[Sabotage, str, str], ...] = (
    (shift_labels_after_the_cut, "slices", LOSS),
    (count_positions_from_each_slice, "slices", LOSS),
    (predict_padding, "slices", LOSS),
    (keep_the_gradient_of_own_tokens, "slices", GRADIENT),
    (forget_documents, "documents", LOSS),
    (begin_documents_on_their_rank, "documents", LOSS),
    (balance_each_slice, "routers", LOSS),
    (count_balancing_on_every_rank, "routers", LOSS),
    (divide_balancing_by_the_ranks, "routers", GRADIENT),
)


@pytest.fixture(scope="module")
def errors(pool: RankPool) -> dict[str, Errors]:
    """By case, sabotage and quantity."""
    return {
        label: errors_of(pool, [sabotage for sabotage, at, _ in SABOTAGES if at == label], way.case())
        for label, way in CASES.items()
    }


@pytest.mark.parametrize("label", CASES)
def test_whole_code_is_within_the_tolerance(errors: dict[str, Errors], label: str) -> None:
    assert max(errors[label]["whole"].values()) < TOLERANCE


@pytest.mark.parametrize(
    ("sabotage", "label", "quantity"), SABOTAGES, ids=[sabotage.__name__ for sabotage, _, _ in SABOTAGES]
)
def test_a_bug_shows(errors: dict[str, Errors], sabotage: Sabotage, label: str, quantity: str) -> None:
    # Not a number is an error, too.
    assert not errors[label][sabotage.__name__][quantity] < VISIBLE
