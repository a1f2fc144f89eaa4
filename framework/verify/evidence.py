"""Evidence of a training run, for comparison: losses, norms, first gradients, last weights."""

import hashlib
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PretrainedConfig

from framework.errors import ModelError

# Tokens of a document on average, where documents are packed: several in a row of a dozen tokens.
DOCUMENT_LENGTH = 4
IGNORE = -100  # a label without loss, which is cross_entropy's default


class NothingToCompare(ModelError):
    """Stock transformers does not train the model, so that nothing can be said of a layout."""


@dataclass(frozen=True)
class Evidence:
    """Losses and norms by step; clipped gradients of step 1 and weights after the last step, both whole, by parameter name.

    by_step: weights after each step, of a layout that the oracle follows (see `lion.py`). blocks: of its moments in int8 (see
    `plain_rounding.py`). undecided: by weight, the number of elements whose update's sign was decided by rounding, of an oracle
    that has followed.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    by_step: tuple[dict[str, Tensor], ...] = ()
    undecided: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one optimizer step: input_ids and shifted labels, both int64 [sequences, context]. position_ids: alike,
    where documents are packed; None: 0 to context - 1 in each row."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None


def make_batches(
    config: PretrainedConfig, num_steps: int, sequences: int, context: int, seed: int, packs_documents: bool = False
) -> list[TokenBatch]:
    """Random tokens with uneven loss masks: each sequence keeps a different share of its labels, one keeps none.

    packs_documents: rows are documents of random lengths, whose positions restart and whose last tokens have no label.
    """
    # Averages over microbatches or ranks, which this project never takes, differ from the global mean only where masks do.
    generator = torch.Generator().manual_seed(_seed_for(seed, "verify"))
    vocabulary = config.get_text_config().vocab_size
    batches = []
    for _ in range(num_steps):
        tokens = torch.randint(0, vocabulary, (sequences, context + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        kept = torch.linspace(0.0, 1.0, sequences)[torch.randperm(sequences, generator=generator)]
        if sequences > 1:
            labels[torch.rand(labels.shape, generator=generator) >= kept[:, None]] = IGNORE
        positions = None
        if packs_documents:
            begins = torch.rand(labels.shape, generator=generator) < 1 / DOCUMENT_LENGTH
            positions = _count_positions(begins)
            labels[:, :-1][begins[:, 1:]] = IGNORE
        batches.append(TokenBatch(tokens[:, :-1].clone(), labels, positions))
    return batches


def _count_positions(begins: Tensor) -> Tensor:
    """Positions that restart where documents begin. begins: bool [sequences, context]; a row's first token always begins one."""
    index = torch.arange(begins.shape[1]).expand(begins.shape)
    return index - (index * begins).cummax(dim=1).values


def perturb(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor like `values`, rounded differently: elements change by a random share of up to eps / 2 of `dtype`, so that they
    may round either way, and by plus or minus eps where `values` are of that dtype already."""
    generator = torch.Generator().manual_seed(_seed_for(seed, "perturb", values.numel()))
    u = 2 * torch.rand(values.shape, generator=generator, dtype=torch.float64) - 1
    u = u.sign() if values.dtype == dtype else u / 2
    return (values.double().cpu() * (1 + u * torch.finfo(dtype).eps)).to(values)


def _seed_for(*parts: int | str) -> int:
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
