"""TRL as a second opinion on losses of preferences: its own functions on the same logits, in fp64. pip install meshwright[trl].

TRL's functions get log-probabilities that its models would have computed; gradients go back to the logits by both ways.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm.communicator import Communicator
from framework.mesh.topology import Axis
from framework.model.loss import IGNORE, TokenLoss
from framework.model.objective import LOSSES, Pairs, Statistics
from framework.recipe.method_schema import PROBE, UNWANTED, WANTED
from framework.recipe.schema import LossSettings

pytest.importorskip("trl", reason="pip install meshwright[trl]")

ONE = Communicator(Axis("cp", 1, 0, (0,)))
VOCABULARY, LENGTHS = 17, ((4, 7, 3, 5), (6, 2))  # of the documents in two rows; each two are a pair
SETTINGS = [
    LossSettings("dpo", 0.3, reference="R"),
    LossSettings("ipo", 0.2, reference="R"),
    LossSettings("simpo", 2.0, 0.7),
    LossSettings("orpo", 0.4),
    LossSettings("kto", 0.2, reference="R"),
]


def draw_pairs(name: str) -> tuple[Tensor, Tensor, Pairs]:
    """Logits [2, T, V], labels [2, T] of which each document's first have none, and the documents."""
    generator = torch.Generator().manual_seed(1)
    context = max(map(sum, LENGTHS))
    labels, places = torch.full((2, context), IGNORE), torch.zeros(2, context, dtype=torch.int64)
    kinds, numbers = torch.zeros(2, 2, 4, dtype=torch.int64)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for place, length in enumerate(lengths):
            labels[row, start + length // 2 : start + length] = place + row
            places[row, start : start + length] = place
            of_kto = PROBE if place % 2 else WANTED if place + row else UNWANTED
            kinds[row, place] = of_kto if name == "kto" else UNWANTED if place % 2 else WANTED
            start += length
        places[row, start:] = 3
    logits = torch.randn(2, context, VOCABULARY, generator=generator, dtype=torch.float64)
    reference = -10 - 20 * torch.rand(2, 4, generator=generator, dtype=torch.float64)
    return logits, labels, Pairs(places, kinds, numbers, reference)


def score_rows(logits: Tensor, labels: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """log p of the tokens of each document in a row of its own, [6, T], the leading ones of all pairs first; and which count."""
    log_p = -F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
    rows = [
        (
            torch.where(pairs.places[row] == place, log_p[row], 0.0),
            (pairs.places[row] == place) & (labels[row] != IGNORE),
        )
        for side in (0, 1)
        for row, lengths in enumerate(LENGTHS)
        for place in range(side, len(lengths), 2)
    ]
    return torch.stack([each for each, _ in rows]), torch.stack([each for _, each in rows])


def ask_trl(settings: LossSettings, log_p: Tensor, counted: Tensor, reference: Tensor, wanted: Tensor) -> Any:
    """(TRL's loss, its metrics).  log_p, counted: [6, T]; reference: [6]; wanted: [3], of kto."""

    def gather(x: Tensor) -> Tensor:
        return x

    accelerator = SimpleNamespace(device="cpu", gather=gather, gather_for_metrics=gather)
    state: dict[str, Any] = {"accelerator": accelerator, "beta": settings.beta, "aux_loss_enabled": False}
    state |= {
        "model": SimpleNamespace(training=True),
        "_metrics": {"train": _Lists()},
        "_tp_size": 1,
        "_total_train_tokens": 0,
    }
    mean = log_p.sum(1) / counted.sum(1)
    pair = {"concatenated_forward": lambda *_: (mean[:3], mean[3:], mean[:3], mean[3:], -mean[:3].mean())}
    if settings.name == "orpo":
        from trl.experimental.orpo import ORPOTrainer

        state |= pair | {"odds_ratio_loss": lambda *each: ORPOTrainer.odds_ratio_loss(SimpleNamespace(**state), *each)}
        return ORPOTrainer.get_batch_loss_metrics(SimpleNamespace(**state), None, {})
    if settings.name == "simpo":
        from trl.experimental.cpo import CPOTrainer

        state |= {
            "alpha": 0.0,
            "cpo_alpha": 0.0,
            "loss_type": "simpo",
            "simpo_gamma": settings.margin,
            "label_smoothing": 0.0,
        }
        state |= pair | {"cpo_loss": lambda *each: CPOTrainer.cpo_loss(SimpleNamespace(**state), *each)}
        return CPOTrainer.get_batch_loss_metrics(SimpleNamespace(**state), None, {})
    ids = F.pad(counted.long(), (1, 0))  # TRL's labels are not shifted
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": ids}

    def forward(rows: slice) -> Any:
        flat = torch.zeros_like(log_p[rows])
        return lambda **_: SimpleNamespace(log_probs=log_p[rows], entropy=flat, mean_logits=flat, is_top1=flat.bool())

    if settings.name == "kto":
        from trl import KTOTrainer

        inputs = {key: each[:3] for key, each in inputs.items()}
        inputs |= {"label": wanted, "ref_logps": reference[:3], "ref_KL_logps": reference[3:]}
        state |= {"calculate_KL": True, "precompute_ref_logps": True, "loss_type": "kto", "_tp_size": 1}
        state |= {
            "desirable_weight": 1.0,
            "undesirable_weight": 1.0,
            "_compute_kl_logps": lambda *_: log_p[3:].sum(1).detach(),
        }
        loss = KTOTrainer._compute_loss(SimpleNamespace(**state), forward(slice(3)), inputs, False)
    else:
        from trl import DPOTrainer

        inputs |= {"ref_chosen_logps": reference[:3], "ref_rejected_logps": reference[3:]}
        state |= {
            "ld_alpha": None,
            "precompute_ref_logps": True,
            "f_divergence_type": "reverse_kl",
            "loss_weights": [1.0],
        }
        state |= {"loss_types": ["sigmoid" if settings.name == "dpo" else "ipo"], "use_weighting": False}
        loss = DPOTrainer._compute_loss(SimpleNamespace(**state), forward(slice(None)), inputs, False)
    return loss, {key: each[-1] for key, each in state["_metrics"]["train"].items()}


class _Lists(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda each: each.name)
def test_losses_gradients_and_metrics_are_trls(settings: LossSettings) -> None:
    logits, labels, pairs = draw_pairs(settings.name)
    theirs = logits.clone().requires_grad_()
    log_p, counted = score_rows(theirs, labels, pairs)
    assert pairs.reference is not None
    reference, kinds = (
        torch.stack(
            [each[row, place] for side in (0, 1) for row, n in enumerate(LENGTHS) for place in range(side, len(n), 2)]
        )
        for each in (pairs.reference, pairs.kinds)
    )
    expected, metrics = ask_trl(settings, log_p, counted, reference, kinds[:3] == WANTED)
    expected.backward()
    if settings.name == "kto":
        divergence = (log_p.detach()[3:].sum(1) - reference[3:]).mean().clamp(min=0)
        assert float(divergence) > 0
        pairs = replace(pairs, divergence=divergence.expand(2, 1))
    ours = logits.clone().requires_grad_()
    objective = LOSSES[settings.name]
    terms = objective.compute(Statistics(TokenLoss(ONE, VOCABULARY), ours + 0.0, labels, pairs, ONE), settings)
    loss = terms.loss / objective.count(labels, pairs)
    loss.backward()
    # TRL rounds the odds of ORPO to fp32.
    tolerance = 1e-6 if settings.name == "orpo" else 1e-12
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    found = {name: float(total / count) for name, (total, count) in terms.metrics.items()}
    names = {
        "reward_chosen": "rewards/chosen",
        "reward_rejected": "rewards/rejected",
        "reward_accuracy": "rewards/accuracies",
    }
    names |= {"kl": "kl"} if settings.name == "kto" else {}
    # IPO's rewards are of means over tokens here, of sums in TRL; KTO has no accuracy there.
    shared = {name: key for name, key in names.items() if key in metrics and settings.name != "ipo"}
    assert len(shared) >= (settings.name != "ipo") * 3
    for name, key in shared.items():
        assert found[name] == pytest.approx(float(metrics[key]), rel=tolerance), name
