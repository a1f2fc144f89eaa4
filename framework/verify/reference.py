"""The reference of `verify --end-to-end`: a whole run, from text files to weights, in plain torch and transformers.

It reads, tokenizes, splits, packs and orders by the rules of docs/data.md, written again here, and trains as the oracle does.
A document's tokens are closed by the end-of-sequence id, a source's documents follow one another, sample i of a source is its
tokens [i T, i T + T], and the order of samples is a function of the seed and the sources.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from pathlib import Path

import torch
import xxhash
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from framework.recipe.schema import Recipe, Source
from framework.verify.evidence import IGNORE, TokenBatch
from framework.verify.oracle import CPU, Oracle
from framework.verify.plain import DTYPES, learning_rate

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
Sample = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class TrainingCurve:
    """The reported values of a run, by step from 1, and its final weights by name."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    rates: tuple[float, ...]
    validations: Mapping[int, float]
    weights: Mapping[str, Tensor]
    # Updates whose sign rounding decided, of a reference with Lion.
    undecided: int = 0


def run_reference(recipe: Recipe, sequences_per_step: int, ends: Sequence[int]) -> TrainingCurve:
    """Train the recipe, whose weights are a folder. ends: the last step of each part of the run, with which its schedule ends."""
    assert recipe.model.weights is not None, "the reference reads its weights"
    data = _Data(recipe)
    config = AutoConfig.from_pretrained(recipe.model.weights, trust_remote_code=False)
    config.use_cache = False
    stock = AutoModelForCausalLM.from_pretrained(recipe.model.weights, dtype=torch.float32, trust_remote_code=False)
    weights = {name: each.detach() for name, each in stock.named_parameters()}
    oracle = Oracle(recipe, config, weights, DTYPES[recipe.precision.compute], CPU, narrows=True)
    held_out, every = data.held_out(), recipe.train.validate_every_steps
    # With a layout to follow Lion measures which signs are rounding's; one that is nowhere leaves all of them as they are.
    nowhere = {name: torch.full_like(each, torch.nan) for name, each in oracle.masters.items()}
    losses, norms, rates, validations = [], [], [], {}
    for step in range(ends[-1]):
        rate = learning_rate(step, recipe.optim.schedule, recipe.optim.lr, next(end for end in ends if step < end))
        batch = data.batch(range(step * sequences_per_step, (step + 1) * sequences_per_step))
        oracle.set_rate(rate)
        losses.append(oracle.find_gradients(batch))
        norms.append(oracle.clip())
        oracle.update(batch, nowhere, step)
        rates.append(rate)
        if every is not None and (step + 1) % every == 0:
            validations[step + 1] = oracle.evaluate(held_out)
    final = {name: weight.detach() for name, weight in oracle.weights().items()}
    return TrainingCurve(
        tuple(losses), tuple(norms), tuple(rates), validations, final, sum(oracle.count_undecided().values())
    )


class _Data:
    """The tokens of all sources, and which sample of which of them stands where."""

    def __init__(self, recipe: Recipe):
        self._seed, self._context, self._packs = (
            recipe.train.seed,
            recipe.batch.context,
            recipe.data.isolates,
        )
        tokenizer = AutoTokenizer.from_pretrained(
            recipe.model.tokenizer or recipe.model.weights, trust_remote_code=False
        )
        self._eos = tokenizer.eos_token_id
        self._names = list(recipe.data.sources)
        self._train: list[list[list[int]]] = []
        self._held_out: list[list[list[int]]] = []
        for source in recipe.data.sources.values():
            texts = _read(source)
            hashes = [xxhash.xxh3_64_intdigest(text.encode()) for text in texts]
            # Two different documents or more are never all on one side.
            threshold = min(max(int(recipe.data.validation * 2**64), min(hashes) + 1), max(hashes))
            is_held_out = [each < threshold for each in hashes]
            assert all(len(tokenizer(text)["input_ids"]) for text in texts), "the tokenizer makes no tokens of a text"
            ids = [[*tokenizer(text)["input_ids"], self._eos] for text in texts]
            self._train.append([each for each, held in zip(ids, is_held_out, strict=True) if not held])
            self._held_out.append([each for each, held in zip(ids, is_held_out, strict=True) if held])
        tokens = (sum(map(len, each)) for each in self._train)
        self._period = _blend(list(recipe.data.weigh(dict(zip(self._names, tokens, strict=True))).values()))

    def batch(self, places: Sequence[int]) -> TokenBatch:
        """The samples at these places of the run."""
        return self._stack([self._locate(place) for place in places], self._train)

    def held_out(self) -> TokenBatch:
        """Every sample of the validation split."""
        return self._stack(
            [(at, sample) for at, each in enumerate(self._held_out) for sample in range(self._count(each))],
            self._held_out,
        )

    def _count(self, documents: list[list[int]]) -> int:
        return max(0, -(-(sum(map(len, documents)) - 1) // self._context))

    def _locate(self, place: int) -> tuple[int, int]:
        """(source, sample in it) of a place: the sources in the period's order, each in the order of its epoch."""
        period, slot = divmod(place, len(self._period))
        source = self._period[slot]
        position = period * self._period.count(source) + self._period[:slot].count(source)
        size = self._count(self._train[source])
        epoch, index = divmod(position, size)
        name = xxhash.xxh64_intdigest(self._names[source].encode(), seed=self._seed)
        return source, _permute(index, size, _mix((name + _mix((epoch + GOLDEN) & WORD)) & WORD))

    def _stack(self, samples: Sequence[tuple[int, int]], split: Sequence[list[list[int]]]) -> TokenBatch:
        ids, labels, positions = zip(*(self._pack(split[source], sample) for source, sample in samples), strict=True)
        return TokenBatch(torch.stack(ids), torch.stack(labels), torch.stack(positions) if self._packs else None)

    def _pack(self, documents: list[list[int]], sample: int) -> Sample:
        """Inputs, labels and positions of one sample; a document that it cuts begins again at position 0."""
        tokens = [token for document in documents for token in document]
        places = [place for document in documents for place in range(len(document))]
        first = sample * self._context
        inputs, targets = tokens[first : first + self._context], tokens[first + 1 : first + self._context + 1]
        inputs = inputs[: len(targets)]
        counted = [min(place, at) for at, place in enumerate(places[first : first + len(inputs)])]
        if self._packs:
            following = places[first + 1 : first + len(targets) + 1]
            targets = [IGNORE if place == 0 else target for place, target in zip(following, targets, strict=True)]
        missing = self._context - len(inputs)
        counted += range(counted[-1] + 1, counted[-1] + 1 + missing)
        return tuple(map(torch.tensor, (inputs + [self._eos] * missing, targets + [IGNORE] * missing, counted)))  # type: ignore[return-value]


def _read(source: Source) -> list[str]:
    """The documents of a file of JSON lines, or of the text files that a pattern matches."""
    path = Path(source.path)
    if path.suffix == ".jsonl":
        return [json.loads(line)[source.field] for line in path.read_text().splitlines()]
    return [each.read_text() for each in sorted(path.parent.glob(path.name))]


def _blend(weights: Sequence[float]) -> list[int]:
    """One period of the blend: the source in each slot. Of the samples that may stand there, the one that is due first.

    Sample j of a source with s of p slots may stand in slots floor(j p / s) to ceil((j + 1) p / s) - 1.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [each / sum(exact) for each in exact]
    period = lcm(*(each.denominator for each in shares))
    counts, taken, slots = [int(each * period) for each in shares], [0] * len(shares), []
    for slot in range(period):
        free = [at for at, n in enumerate(counts) if taken[at] < n and taken[at] * period // n <= slot]
        source = min(free, key=lambda at: (-(-(taken[at] + 1) * period // counts[at]), at))
        taken[source] += 1
        slots.append(source)
    return slots


def _mix(x: int) -> int:
    """SplitMix64's finaliser."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def _permute(index: int, size: int, key: int) -> int:
    """The image of `index` in a permutation of [0, size): a Feistel network of 8 rounds, walked until it is inside."""
    bits = (size - 1).bit_length()
    low_bits = bits // 2
    while True:
        high, low, k = index >> low_bits, index & ((1 << low_bits) - 1), key
        for _ in range(4):
            k = (k + GOLDEN) & WORD
            low ^= _mix(high ^ k) & ((1 << low_bits) - 1)
            k = (k + GOLDEN) & WORD
            high ^= _mix(low ^ k) & ((1 << (bits - low_bits)) - 1)
        index = high << low_bits | low
        if index < size:
            return index
