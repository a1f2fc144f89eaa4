"""The oracle's losses of preferences, from the papers' words, and random answers to verify them on.

DPO (arXiv 2305.18290, eq. 7), IPO (2310.12036, eq. 17, of means over tokens), KTO (2402.01306, eq. 8 with both weights 1), ORPO
(2403.07691, eq. 6 and 7) and SimPO (2405.14734, eq. 6).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.recipe.schema import LossSettings

WANTED, UNWANTED, PROBE = 1, 2, 3
IGNORE = -100


@dataclass(frozen=True)
class AnswerBatch:
    """The answers of a batch whose documents are packed: kinds [sequences, S] int64, 0 behind a row's last answer, and the
    reference's log-probabilities, alike. Each two are a pair."""

    kinds: Tensor
    reference: Tensor


def score_answers(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and numbers of tokens of rows that have labels, [n] each.  logits: [rows, T, V]; labels: [rows, T]."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
    lengths = (labels != IGNORE).sum(1)
    return -losses[lengths > 0].sum(1), lengths[lengths > 0]


def compare_answers(
    loss: LossSettings, log_p: Tensor, lengths: Tensor, kinds: Tensor, reference: Tensor, divergence: float
) -> Tensor:
    """The losses of pairs, [n / 2], from the numbers of their answers, [n] each. divergence: kto's, of the whole batch."""
    beta, ratio, mean = loss.beta, log_p - reference, log_p / lengths
    match loss.name:
        case "dpo":
            return -torch.log(torch.sigmoid(beta * (ratio[::2] - ratio[1::2])))
        case "ipo":
            of_token = ratio / lengths
            return (of_token[::2] - of_token[1::2] - 1 / (2 * beta)) ** 2
        case "simpo":
            return -torch.log(torch.sigmoid(beta * mean[::2] - beta * mean[1::2] - loss.margin))
        case "orpo":
            odds = mean.exp() / (1 - mean.exp())
            return -mean[::2] - beta * torch.log(torch.sigmoid(torch.log(odds[::2] / odds[1::2])))
        case "kto":
            surplus = ratio[::2] - divergence
            return 1 - torch.sigmoid(beta * torch.where(kinds[::2] == WANTED, surplus, -surplus))
    raise AssertionError(f"{loss.name} compares no answers")


def draw_answers(labels: Tensor, name: str, generator: torch.Generator) -> tuple[Tensor, Tensor, AnswerBatch]:
    """Rows of random pairs: labels [sequences, context] of which prompts have lost theirs, positions, and the answers. One row
    has none."""
    labels, positions = labels.clone(), torch.zeros_like(labels)
    rows = [list(_draw_lengths(labels.shape[1], generator)) if row else [] for row in range(len(labels))]
    kinds = torch.zeros(len(rows), max(2, *map(len, rows)), dtype=torch.int64)
    for row, lengths in enumerate(rows):
        start = 0
        for place, length in enumerate(lengths):
            asked = int(torch.randint(0, length, (), generator=generator))
            labels[row, start : start + asked] = IGNORE
            positions[row, start : start + length] = torch.arange(length)
            is_wanted = place % 2 == 0 if name != "kto" else bool(torch.rand((), generator=generator) < 0.5)
            kinds[row, place] = PROBE if name == "kto" and place % 2 else WANTED if is_wanted else UNWANTED
            start += length
        labels[row, start:] = IGNORE
        positions[row, start:] = torch.arange(labels.shape[1] - start)
    return labels, positions, AnswerBatch(kinds, -10 * torch.rand(kinds.shape, generator=generator).double())


def _draw_lengths(context: int, generator: torch.Generator) -> Iterator[int]:
    """Lengths of an even number of documents, all of one to five tokens, that fit into a row."""
    while context >= 10:
        for length in torch.randint(1, 6, (2,), generator=generator).tolist():
            context -= length
            yield length
