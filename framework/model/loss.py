"""Next-token loss as a local sum over a global count, so that every split of a batch adds up to the same number.

loss = (1 / N) * sum_i sum_{t in rank i} -log softmax(logits_t)[label_t],  N = loss tokens of the whole batch.

Nothing is averaged later: not over microbatches, not over ranks, however uneven their masks are.

Where the vocabulary is sharded over an axis, each rank has the logits z_r of its part, and no logits are sent:

    log sum_v exp z_v = m + log sum_r exp(m_r - m) s_r,    m_r = max z_r,  s_r = sum exp(z_r - m_r),  m = max_r m_r

needs two numbers for each token from every rank, and the label's logit a third. The gradient, softmax(z) - onehot, is local.

Shapes: B sequences of T tokens, N = B T; V the vocabulary size, V/tp a rank's part of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.mesh.layout import part

IGNORE = -100
# Tokens whose fp32 logits exist at a time in the chunked form: 0.5 GB for a vocabulary size of 128 k.
CHUNK_TOKENS = 1024


def count_loss_tokens(labels: Tensor) -> Tensor:
    """Number of labels [B, T] that count in the loss, as an int64 scalar on their device."""
    return (labels != IGNORE).sum()


def token_loss(logits: Tensor, labels: Tensor, num_tokens: Tensor) -> Tensor:
    """Cross-entropy of this microbatch, divided by the token count of the whole batch: a scalar in at least fp32.

    logits: [B, T, V]; labels: [B, T] int64, already shifted (labels[:, t] is the target of input t), -100 = no loss;
    num_tokens: scalar, loss tokens of the whole batch over all microbatches and ranks. Communicates nothing.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / num_tokens.clamp(min=1)


@dataclass(frozen=True)
class TokenLoss:
    """`token_loss` where logits are sharded over `axis` along a vocabulary of size `vocabulary`.

    The result is the same on all ranks of `axis`, over which forward all-reduces 3 numbers for each token; backward communicates
    nothing. chunk_tokens: logits in fp32 exist for so many tokens at a time; None: for all. Backward overwrites the logits with
    their gradient.
    """

    axis: Communicator
    vocabulary: int
    chunk_tokens: int | None = None

    def __call__(self, logits: Tensor, labels: Tensor, num_tokens: Tensor) -> Tensor:
        """The loss, a scalar in at least fp32. logits: [B, T, V/tp] in compute dtype; labels, num_tokens: as in `token_loss`."""
        if self.axis.size == 1 and self.chunk_tokens is None:
            return token_loss(logits, labels, num_tokens)
        start, stop = part(self.vocabulary, self.axis.rank, self.axis.size)
        assert logits.shape[-1] == stop - start, f"{logits.shape[-1]} logits for the vocabulary's [{start}, {stop})"
        chunk = self.chunk_tokens or labels.numel()
        total = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), start, self.axis, chunk)
        return total / num_tokens.clamp(min=1)


class _CrossEntropy(torch.autograd.Function):
    """The summed loss of N tokens, a scalar. logits: [N, V/tp]; labels: [N] int64, of the whole vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int, axis: Communicator, chunk: int) -> Tensor:
        wide_dtype = torch.promote_types(logits.dtype, torch.float32)
        places, is_mine = _places(labels, start, logits.shape[-1])
        maxima, sums, targets = logits.new_empty(3, len(labels), dtype=wide_dtype)
        for rows in _chunks(len(labels), chunk):
            wide = logits[rows].to(wide_dtype)
            maxima[rows] = wide.amax(-1)
            sums[rows] = (wide - maxima[rows, None]).exp_().sum(-1)
            targets[rows] = wide.gather(-1, places[rows, None]).squeeze(-1)
        # A collective of its own before the sum: each rank's part is rescaled to the maximum of all ranks, or exp would overflow.
        maximum = maxima.clone()
        all_reduce(maximum, axis, "max")
        both = torch.stack([sums * (maxima - maximum).exp(), targets * is_mine])
        all_reduce(both, axis)
        log_sum = maximum + both[0].log()
        ctx.start, ctx.chunk = start, chunk
        ctx.save_for_backward(logits, labels, log_sum)
        return ((log_sum - both[1]) * (labels != IGNORE)).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, labels, log_sum = ctx.saved_tensors
        places, is_mine = _places(labels, ctx.start, logits.shape[-1])
        weight = gradient * (labels != IGNORE)
        # In place: a second tensor of [N, V/tp] would be the largest of the whole step.
        for rows in _chunks(len(labels), ctx.chunk):
            probability = (logits[rows].to(log_sum.dtype) - log_sum[rows, None]).exp_()
            probability.scatter_add_(-1, places[rows, None], -is_mine[rows, None].to(log_sum.dtype))
            logits[rows] = probability.mul_(weight[rows, None]).to(logits.dtype)
        return logits, None, None, None, None


def _places(labels: Tensor, start: int, vocabulary_local: int) -> tuple[Tensor, Tensor]:
    """The index of each label in this rank's part of the vocabulary, 0 if it is in another's; and whether it is in this part."""
    is_mine = (labels >= start) & (labels < start + vocabulary_local)
    return (labels - start).where(is_mine, 0), is_mine


def _chunks(num_tokens: int, chunk: int) -> Iterator[slice]:
    for first in range(0, num_tokens, max(chunk, 1)):
        yield slice(first, first + chunk)
