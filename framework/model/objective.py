"""Losses as entries of one table: statistics of a microbatch, labels and weights in, local sums out, which the framework divides
by global counts.

    loss of a step = (sum over microbatches and ranks of `Terms.loss`) / (sum over them of `Objective.count`)

The counts are known before any backward, so an entry never averages, and sees nothing of ranks but through `Statistics`.

Losses of preferences compare the two answers of a pair, y_w and y_l to one prompt x, by their log-probabilities

    p(y) = sum_t log pi(y_t | x, y_<t)      of which ranks of `cp` have some terms each, summed before anything else is done
    r(y) = beta (p(y) - p_ref(y))           the reward; p_ref of a model that stays as it is, |y| the number of tokens

    dpo     -log sigma(r(y_w) - r(y_l))                                                      Rafailov et al. 2023
    ipo     ((p - p_ref)(y_w) / |y_w| - (p - p_ref)(y_l) / |y_l| - 1 / (2 beta))^2           Azar et al. 2023
    simpo   -log sigma(beta p(y_w) / |y_w| - beta p(y_l) / |y_l| - margin)                   Meng et al. 2024
    orpo    -m_w - beta log sigma(odds(m_w) - odds(m_l)), m = p / |y|, odds(m) = m - log(1 - e^m)  Hong et al. 2024
    kto     1 - sigma(+-(r(y) - beta z)), + for an answer that is wanted                     Ethayarajh et al. 2024

z is the mean of p - p_ref, at least 0, over all of a step's answers to other prompts than their own (`PROBE`), without gradient.

Shapes: B rows, T tokens of them on this rank, S places for documents in a row, P = S / 2 pairs.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm.communicator import Communicator
from framework.comm.duals import copy_to, reduce_from
from framework.model.loss import IGNORE, Loss
from framework.recipe.method_schema import NONE, PROBE, UNWANTED, WANTED, LossSettings

# Documents of a row that are added up together: their mask has so many elements for each token.
PLACES_AT_ONCE = 64


@dataclass(frozen=True)
class Pairs:
    """The documents of rows in which each two side by side are a pair: chosen and rejected, or of kto answer and probe."""

    places: Tensor
    """[B, T] int64: of each token, the place of its document among those of its row."""
    kinds: Tensor
    """[B, S] int64."""
    numbers: Tensor
    """[B, S] int64: of documents in their stream; 0 where there is none."""
    reference: Tensor | None = None
    """[B, S]: p_ref; None before it is known."""
    divergence: Tensor | None = None
    """[B, 1]: z of kto, likewise."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Pairs":
        """Apply `change` to every tensor, each of B rows."""
        found = (getattr(self, each.name) for each in fields(self))
        return Pairs(*(None if each is None else change(each) for each in found))  # type: ignore[arg-type]

    def count(self) -> Tensor:
        """The number of pairs of each row: [B] int64."""
        return (self.kinds[:, ::2] != NONE).sum(1)


@dataclass(frozen=True)
class Statistics:
    """All that a loss may ask of a microbatch, computed when it does. cp: ranks with other tokens of its rows. z_loss: the weight
    that the head was told. by_row: whether the losses of rows are asked for, which `sum_losses` then gives."""

    head: Loss
    logits: Tensor
    labels: Tensor
    pairs: Pairs | None
    cp: Communicator
    z_loss: float = 0.0
    by_row: bool = False

    def sum_losses(self) -> Tensor:
        """-log p of all labels, and their z-loss, summed: a scalar, or [B] by row."""
        if self.by_row:
            return self.head.of_tokens(self.logits, self.labels, self.z_loss).sum(1)
        return self.head(self.logits, self.labels, self.labels.new_ones(()), self.z_loss)

    def of_tokens(self) -> Tensor:
        """-log p of each label, 0 without one: [B, T] in at least fp32."""
        return self.head.of_tokens(self.logits, self.labels)

    @cached_property
    def answers(self) -> "Answers":
        """The answers of all pairs. All-reduces 2 B S numbers over `cp`, and as many in backward."""
        assert self.pairs is not None, "rows of pairs"
        log_p = -self.of_tokens()
        # Each rank has its own copy of the loss of these sums: so backward sums as well.
        sums = copy_to(self._sum_documents(log_p, self.labels != IGNORE), self.cp).unflatten(-1, (-1, 2))
        return Answers(sums[0], sums[1].detach().clamp(min=1), self.pairs)

    def score_documents(self) -> Tensor:
        """[2, B, S]: the log-probability of each document's labels, and how many of them are not the likeliest token. All-reduces
        as many numbers over `cp`."""
        log_p = -self.of_tokens()
        return self._sum_documents(log_p, (self.labels != IGNORE) & (self.head.likeliest(self.logits) != self.labels))

    def _sum_documents(self, *of_tokens: Tensor) -> Tensor:
        """The sums over the tokens of each document, of which each rank of `cp` has a part: [n, B, S] of n x [B, T]."""
        assert self.pairs is not None, "rows of documents"
        values = torch.stack([each.to(of_tokens[0].dtype) for each in of_tokens])[:, :, None]
        places = torch.arange(self.pairs.kinds.shape[1], device=values.device)
        # A mask and a sum, whose order is fixed: a scatter would add in any order on a GPU. Chosen, not multiplied: what is not
        # finite in one document is nothing to the others. Some places at a time, for rows of thousands of documents.
        sums = [
            values.where(self.pairs.places[:, None] == some[:, None], 0.0).sum(-1)
            for some in places.split(PLACES_AT_ONCE)
        ]
        return reduce_from(torch.cat(sums, -1), self.cp)


@dataclass(frozen=True)
class Answers:
    """p and |y| of the answers of all pairs, [B, P, 2] each."""

    log_p: Tensor
    lengths: Tensor
    pairs: Pairs

    @cached_property
    def kinds(self) -> Tensor:
        """[B, P, 2]"""
        return self.pairs.kinds.unflatten(-1, (-1, 2))

    @cached_property
    def log_ratio(self) -> Tensor:
        """p - p_ref: [B, P, 2]."""
        assert self.pairs.reference is not None, "the reference's log-probabilities"
        return self.log_p - self.pairs.reference.to(self.log_p.dtype).unflatten(-1, (-1, 2))

    @cached_property
    def mean(self) -> Tensor:
        """p / |y|, [B, P, 2]; -1 where there is no pair, of which all losses and their gradients are finite."""
        return torch.where(self.kinds != NONE, self.log_p / self.lengths, -1.0)


@dataclass(frozen=True)
class Terms:
    """A loss's local sum of a microbatch, a scalar or by row [B]; and of each metric a sum and a count, whose quotient over all
    is reported."""

    loss: Tensor
    metrics: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """An entry of LOSSES. count: this rank's units of each row of a microbatch, from labels and pairs: [B] int64."""

    compute: Callable[[Statistics, LossSettings], Terms]
    count: Callable[[Tensor, Pairs | None], Tensor]
    metrics: tuple[str, ...] = ()


def _next_token(statistics: Statistics, settings: LossSettings) -> Terms:
    return Terms(statistics.sum_losses())


def count_tokens(labels: Tensor, pairs: Pairs | None) -> Tensor:
    return (labels != IGNORE).sum(1)


def _count_pairs(labels: Tensor, pairs: Pairs | None) -> Tensor:
    assert pairs is not None, "rows of pairs"
    return pairs.count()


# (answers, settings) -> losses of pairs [B, P], and the rewards [B, P, 2] that they compare.
Comparison = Callable[[Answers, LossSettings], tuple[Tensor, Tensor]]


def _dpo(answers: Answers, settings: LossSettings) -> tuple[Tensor, Tensor]:
    rewards = settings.beta * answers.log_ratio
    return -F.logsigmoid(_margin(rewards)), rewards


def _ipo(answers: Answers, settings: LossSettings) -> tuple[Tensor, Tensor]:
    mean = answers.log_ratio / answers.lengths
    return (_margin(mean) - 1 / (2 * settings.beta)).square(), settings.beta * mean


def _simpo(answers: Answers, settings: LossSettings) -> tuple[Tensor, Tensor]:
    rewards = settings.beta * answers.mean
    return -F.logsigmoid(_margin(rewards) - settings.margin), rewards


def _orpo(answers: Answers, settings: LossSettings) -> tuple[Tensor, Tensor]:
    # A short answer of which the model is certain has p = 1 in fp32, whose odds are not finite, and no gradient.
    mean = answers.mean.clamp(max=-torch.finfo(answers.mean.dtype).eps)
    odds = mean - torch.log(-torch.expm1(mean))
    return -answers.mean[..., 0] - settings.beta * F.logsigmoid(_margin(odds)), settings.beta * answers.mean


def _kto(answers: Answers, settings: LossSettings) -> tuple[Tensor, Tensor]:
    divergence, rewards = answers.pairs.divergence, settings.beta * answers.log_ratio
    assert divergence is not None, "kto's divergence"
    sign = torch.where(answers.kinds[..., 0] == WANTED, 1.0, -1.0)
    return 1 - torch.sigmoid(sign * (rewards[..., 0] - settings.beta * divergence.to(rewards.dtype))), rewards


def _margin(rewards: Tensor) -> Tensor:
    return rewards[..., 0] - rewards[..., 1]


def _compare(comparison: Comparison, statistics: Statistics, settings: LossSettings) -> Terms:
    answers = statistics.answers
    losses, rewards = comparison(answers, settings)
    kinds, rewards = answers.kinds, rewards.detach()
    wanted, unwanted, is_pair = kinds == WANTED, kinds == UNWANTED, kinds[..., 0] != NONE
    if settings.name == "kto":
        assert answers.pairs.divergence is not None, "kto's divergence"
        is_right = (rewards[..., 0] > settings.beta * answers.pairs.divergence) == wanted[..., 0]
    else:
        is_right = _margin(rewards) > 0
    found = {
        "reward_chosen": _total(rewards, wanted),
        "reward_rejected": _total(rewards, unwanted),
        "reward_accuracy": _total(is_right, is_pair),
    }
    if settings.needs_reference:
        found["kl"] = _total(answers.log_ratio.detach(), kinds == PROBE if settings.name == "kto" else kinds != NONE)
    return Terms(losses.where(is_pair, 0.0).sum(1), found)


def _total(values: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the values that are counted, and their number."""
    return values.where(counted, torch.zeros_like(values)).sum(), counted.sum()


def _preference(comparison: Comparison, *more: str) -> Objective:
    def compute(statistics: Statistics, settings: LossSettings) -> Terms:
        return _compare(comparison, statistics, settings)

    return Objective(compute, _count_pairs, ("reward_chosen", "reward_rejected", "reward_accuracy", *more))


LOSSES: dict[str, Objective] = {
    "next_token": Objective(_next_token, count_tokens),
    "dpo": _preference(_dpo, "kl"),
    "ipo": _preference(_ipo, "kl"),
    "simpo": _preference(_simpo),
    "orpo": _preference(_orpo),
    "kto": _preference(_kto, "kl"),
}
