"""Next-token loss as a local sum over a global count, so that every split of a batch adds up to the same number.

loss = (1 / N) * sum_i sum_{t in rank i} -log softmax(logits_t)[label_t],  N = loss tokens of the whole batch.

Nothing is averaged later: not over microbatches, not over ranks, however uneven their masks are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def count_loss_tokens(labels: Tensor) -> Tensor:
    """Labels that count, as an int64 scalar."""
    return (labels != IGNORE).sum()


def token_loss(logits: Tensor, labels: Tensor, num_tokens: Tensor) -> Tensor:
    """Cross-entropy of this microbatch over the batch's token count, in at least fp32.

    logits: [B, T, V]; labels: [B, T] int64, already shifted (labels[:, t] is the target of input t), -100 = no loss;
    num_tokens: scalar, loss tokens of the whole batch over all microbatches and ranks.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / num_tokens.clamp(min=1)
