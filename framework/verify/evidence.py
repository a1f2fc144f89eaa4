"""Evidence of a training run (losses, norms, first gradients, last weights), and what both sides of a verification share: their
batches of random tokens, pairs of answers among them, perturbed values, and fp64 models that stay in fp64."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig

from framework.errors import ModelError
from framework.recipe.schema import LossSettings

# Tokens of a document on average, where documents are packed: several in a row of a dozen tokens.
DOCUMENT_LENGTH = 4
NEXT_TOKEN = LossSettings()
IGNORE = -100  # a label without loss, which is cross_entropy's default


class NothingToCompare(ModelError):
    """Stock transformers does not train the model, so there is nothing to compare a layout with."""


@dataclass(frozen=True)
class Evidence:
    """Losses and norms by step; whole tensors by parameter name."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    # Clipped gradients of step 1.
    gradients: dict[str, Tensor]
    # After the last step.
    weights: dict[str, Tensor]
    # Weights after each step of a layout that the oracle follows (`PlainLion`).
    by_step: tuple[dict[str, Tensor], ...] = ()
    # Number of elements, by weight, whose update's sign rounding decided, in an oracle that has followed.
    undecided: dict[str, int] = field(default_factory=dict)
    # First element of each element's block of int8 moments (`PlainMoments`).
    blocks: dict[str, Tensor] = field(default_factory=dict)
    # The weights with the averages of trained ones in their place (`train.ema`), or nothing.
    averages: dict[str, Tensor] = field(default_factory=dict)
    # Number of each element's block of codes, as which it is unsharded; -1: it is not (`PlainCodes`).
    gathered: dict[str, Tensor] = field(default_factory=dict)
    # The same of its gradient's block, as which that leaves a node (`PlainReduction`).
    reduced: dict[str, Tensor] = field(default_factory=dict)


WANTED, UNWANTED, PROBE = 1, 2, 3


@dataclass(frozen=True)
class AnswerBatch:
    """The answers of a batch whose documents are packed: kinds [sequences, S] int64, 0 behind a row's last answer, and the
    reference's log-probabilities, alike. Each two are a pair."""

    kinds: Tensor
    reference: Tensor


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one optimizer step: input_ids and shifted labels, both int64 [sequences, context]. position_ids: alike,
    where documents are packed; None: 0 to context - 1 in each row. answers: of packed documents that are compared."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None
    answers: AnswerBatch | None = None


def make_batches(
    config: PretrainedConfig,
    num_steps: int,
    sequences: int,
    context: int,
    seed: int,
    packs_documents: bool = False,
    loss: LossSettings = NEXT_TOKEN,
) -> list[TokenBatch]:
    """Random tokens with uneven loss masks: each sequence keeps a different share of its labels, one keeps none.

    loss: of preferences, rows are pairs of answers.
    packs_documents: rows are documents of random lengths, whose positions restart and whose last tokens have no label.
    """
    # Averages over microbatches or ranks, which this project never takes, differ from the global mean only where masks do.
    generator = torch.Generator().manual_seed(_seed_for(seed, "verify"))
    vocabulary = config.get_text_config().vocab_size
    batches = []
    for _ in range(num_steps):
        tokens = torch.randint(0, vocabulary, (sequences, context + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        if loss.is_paired:
            drawn = draw_answers(labels, loss.name, generator)
            batches.append(TokenBatch(tokens[:, :-1].clone(), *drawn))
            continue
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


@dataclass(frozen=True)
class PluginForms:
    """The plain forms of names that plugins have added, None of all others: only the plugin knows them, so both sides ask it. The
    oracle does so for whole parameters and all of a microbatch's logits."""

    optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None
    # (logits [B, T, V], labels [B, T]) -> the sum of the losses.
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    # The learning rate of a step, counted from 0.
    rate: Callable[[int], float] | None = None


CASTS = (Tensor.to, Tensor.type, Tensor.type_as)


def keep_double(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """A context in which casts from fp64 to fp32 do nothing, for a model of dtype fp64; else a context without effect.

    Hugging Face's models widen bf16 to fp32 where it matters: `.float()`, `.to(torch.float32)`, `dtype=torch.float32` in norms,
    softmax and routers. In an fp64 model the same lines narrow, and a difference of 1e-16 between two orders of summation becomes
    one of 6e-8 wherever it lies across a rounding border. Comparing to 1e-9 needs a model that stays in fp64.
    """
    return _KeepDouble() if dtype == torch.float64 else nullcontext()


class _KeepDouble(TorchFunctionMode):
    """Intercept every call of torch that Python makes in this thread, which is where models cast.

    A mode below autograd would see backward's operations as well, and take longer than they do. torch disables function modes
    inside `Tensor.backward`; where layers are recomputed there, call `torch.autograd.backward`, as `train/stage.py` does.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if len(args) == 1 and not kwargs and func is not Tensor.float:  # most calls: somebody reads a shape
            return func(*args)
        if args and isinstance(args[0], Tensor) and args[0].dtype is torch.float64:
            if func is Tensor.float or (func in CASTS and len(args) > 1 and _dtype_of(args[1]) is torch.float32):
                return args[0]
            if kwargs.get("dtype") is torch.float32:
                kwargs = kwargs | {"dtype": torch.float64}
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if func is Tensor.matmul:  # whose factor was integers (positions): they became fp32
                args = tuple(each.double() for each in args)
        if func is torch.full and "dtype" not in kwargs and isinstance(args[1], float):
            kwargs = kwargs | {"dtype": torch.float64}  # xglm's least score, which fp32 does not have
        return func(*args, **kwargs)


def _dtype_of(word: Any) -> Any:
    """The dtype of a cast's argument, if it is a tensor whose dtype the cast takes over."""
    return word.dtype if isinstance(word, Tensor) else None


def separate(input_ids: Tensor, labels: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each packed document as a row of its own, padded on the right: inputs, labels, and which tokens are real.

    Given are [rows, T], whose positions begin at 0 with each document; returned are [documents, length of the longest].
    """
    begins = (positions.flatten() == 0).nonzero().flatten()[1:]
    documents = list(torch.tensor_split(input_ids.flatten(), begins))
    lengths = torch.tensor([len(each) for each in documents])
    targets = list(torch.tensor_split(labels.flatten(), begins))
    padded = pad_sequence(targets, batch_first=True, padding_value=IGNORE)
    return pad_sequence(documents, batch_first=True), padded, torch.arange(padded.shape[1]) < lengths[:, None]
