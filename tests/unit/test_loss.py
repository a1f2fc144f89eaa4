"""The loss of whole logits: what torch's cross-entropy gives, in less memory."""

import pytest
import torch
import torch.nn.functional as F

from framework.mesh.topology import Topology
from framework.model.loss import CPU_ELEMENTS, IGNORE, TokenLoss, token_loss
from framework.model.objective import LOSSES, Pairs, Statistics
from framework.plan.plan import unconnected
from framework.recipe.method_schema import PROBE, UNWANTED, WANTED
from framework.recipe.schema import LossSettings
from framework.verify.plain import compare_answers, score_answers


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_loss_and_gradient_are_torchs_bitwise_however_many_pieces_the_gradient_is_computed_in(
    dtype: torch.dtype,
) -> None:
    vocabulary = 97
    tokens = 2 * CPU_ELEMENTS // vocabulary + 5  # three pieces, the last one short
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1, tokens, vocabulary, generator=generator).to(dtype)
    labels = torch.randint(vocabulary, (1, tokens), generator=generator)
    labels[:, ::3] = IGNORE
    num_tokens = (labels != IGNORE).sum() + 7  # others have some, too

    stock, ours = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    wide = stock.to(torch.promote_types(dtype, torch.float32))
    expected = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum") / num_tokens
    found = token_loss(ours, labels, num_tokens)
    expected.backward()
    found.backward()

    assert torch.equal(found, expected)
    assert stock.grad is not None
    assert ours.grad is not None
    assert torch.equal(ours.grad, stock.grad)


def test_gradients_of_a_loss_leave_the_logits_as_they_were() -> None:
    # What is behind a cap or a scale of logits reads them in its own backward.
    logits = torch.randn(1, 5, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()
    before = logits.detach().clone()
    token_loss(logits, torch.arange(5)[None], torch.tensor(5)).backward()
    assert torch.equal(logits.detach(), before)


def test_a_document_that_is_not_finite_is_nothing_to_others_of_its_row() -> None:
    axes, places = unconnected(Topology(), 0), torch.tensor([[0, 0, 1, 1, 1]])
    logits, labels = (
        torch.randn(1, 5, 7, generator=torch.Generator().manual_seed(0)),
        torch.tensor([[1, 2, 3, IGNORE, 4]]),
    )

    def score(logits: torch.Tensor) -> torch.Tensor:
        pairs = Pairs(places, torch.ones(1, 2), torch.arange(2)[None])
        return Statistics(TokenLoss(axes["tp"], 7), logits, labels, pairs, axes["cp"]).score_documents()

    expected = score(logits.clone())
    assert torch.allclose(expected[0].sum(), -token_loss(logits.clone(), labels, torch.tensor(1)))
    logits[0, 0] = float("nan")
    found = score(logits)
    assert found[0, 0, 0].isnan()
    assert torch.equal(found[:, 0, 1], expected[:, 0, 1])


@pytest.mark.parametrize("name", [name for name, each in LOSSES.items() if "reward_accuracy" in each.metrics])
@pytest.mark.parametrize("gaps", [(20.0, 1.0), (1.0, 20.0), (20.0, 20.0), (-60.0, 20.0), (20.0, -60.0)])
def test_answers_that_are_certain_or_impossible_have_finite_losses_and_gradients(
    name: str, gaps: tuple[float, float]
) -> None:
    axes, settings = unconnected(Topology(), 0), LossSettings(name, 0.1)  # type: ignore[arg-type]
    # Two answers of two tokens; the label's logit is larger than the six others by the gap, so at 20 p is 1 in fp32.
    logits = torch.zeros(1, 4, 7)
    logits[..., 0] = torch.tensor(gaps).repeat_interleave(2)
    places, labels = torch.tensor([[0, 0, 1, 1]]), torch.zeros(1, 4, dtype=torch.int64)
    kinds = torch.tensor([[WANTED, PROBE if name == "kto" else UNWANTED]])
    pairs = Pairs(places, kinds, torch.arange(2)[None], torch.full((1, 2), -3.0), torch.zeros(1, 1))
    statistics = Statistics(TokenLoss(axes["tp"], 7), logits.requires_grad_() + 0.0, labels, pairs, axes["cp"])
    loss = LOSSES[name].compute(statistics, settings).loss
    loss.backward()
    log_p, lengths = score_answers(logits.detach().view(2, 2, 7), labels.view(2, 2))
    oracle = compare_answers(settings, log_p, lengths, kinds[0], torch.full((2,), -3.0), 0.0)
    assert torch.isfinite(loss)
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()
    torch.testing.assert_close(loss, oracle, rtol=1e-5, atol=1e-5)
