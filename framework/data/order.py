"""Sample order: the source and sample at global index g, a pure function of (seed, source names, g); and rows of whole documents.

Identity:  g -> (source s, position p in s) -> epoch e = p // size_s -> sample = permutation[seed, s, e](p % size_s)

Of a stream, whose size is known once its end is reached, each window of so many samples is permuted by itself.

Only one period of the blend is materialised, so any index is reached at once and the whole data state is the
integer g: rank, microbatch size and worker count do not appear. Each source wraps into its next epoch on its own.

Where rows have whole documents (`data.pack=best_fit`), sample i of a source is row i of all its documents, packed at once. A
document of n tokens takes n - 1 places of a row: each token but the last is an input, each but the first a label. Documents are
taken from the longest to the shortest, equal ones in an order that the seed draws, and each goes into the row with the least
space that holds it (best-fit decreasing). So the rows are a function of the seed, the documents' lengths and the context.
`data.pack=alone` gives each document a row, for models that carry a state from one to the next. A conversation that is longer
than a row is left out or cut behind (`data.overlong`); text is cut into pieces of whole rows. Of answers to compare each two
documents side by side are packed as one, and stay apart in their row.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, lcm
from types import MappingProxyType
from typing import Literal

import numpy as np
import xxhash

from framework.data.store import TokenStream
from framework.errors import DataError

# Longest period of a blend: its table takes 2.5 MB and a second. Weights that need a longer one are rounded to it.
MAX_PERIOD = 1 << 18

# A Feistel network of 4 rounds with random round functions is a pseudo-random permutation (Luby and Rackoff, 1988);
# the other four make up for our cheap round function on domains of a few samples.
FEISTEL_ROUNDS = 8

GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which every input bit reaches every output bit (finaliser of SplitMix64).

    x: [n] uint64; overflow is intended.
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(index: np.ndarray, size: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Element by element, the image of `index` under the permutation of [0, size) that `key` chooses.

    A Feistel network permutes the next power of two >= size; an image outside [0, size) is permuted again until it is
    inside ("cycle walking", less than two walks on average), which leaves a permutation of [0, size).
    index: [n] uint64 < size; size: [n] uint64 in [1, 2^53); key: [n] uint64.
    """
    bits = np.frexp((size - np.uint64(1)).astype(np.float64))[1].astype(np.uint64)  # bit length of the largest index
    image = _encrypt(index, bits, key)
    outside = np.flatnonzero(image >= size)
    while outside.size:
        image[outside] = _encrypt(image[outside], bits[outside], key[outside])
        outside = outside[image[outside] >= size[outside]]
    return image


def _encrypt(x: np.ndarray, bits: np.ndarray, key: np.ndarray) -> np.ndarray:
    """A permutation of [0, 2^bits), [n] uint64 each: each half in turn is changed by a function of the other half and the key."""
    low_bits = bits >> np.uint64(1)
    low_mask = (np.uint64(1) << low_bits) - np.uint64(1)
    high_mask = (np.uint64(1) << (bits - low_bits)) - np.uint64(1)
    high, low = x >> low_bits, x & low_mask
    for _ in range(FEISTEL_ROUNDS // 2):
        key = key + GOLDEN
        low = low ^ (mix(high ^ key) & low_mask)
        key = key + GOLDEN
        high = high ^ (mix(low ^ key) & high_mask)
    return (high << low_bits) | low


def count_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest integers in the proportion of `weights`: the number of samples of each source in one period.

    Weights count as the decimal numbers they are written as (0.7, 0.2, 0.1 -> 7, 2, 1). Where the period would exceed
    MAX_PERIOD they are rounded to shares of MAX_PERIOD, at least one each: off by < 4 samples in a million.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    total = sum(exact)
    relative = [weight / total for weight in exact]
    period = lcm(*(share.denominator for share in relative))
    if period <= MAX_PERIOD:
        return tuple(int(share * period) for share in relative)
    shares = [max(1, floor(share * MAX_PERIOD)) for share in relative]
    by_remainder = sorted(range(len(shares)), key=lambda k: shares[k] - relative[k] * MAX_PERIOD)
    missing = MAX_PERIOD - sum(shares)
    for k in by_remainder[: max(0, missing)]:
        shares[k] += 1
    shares[int(np.argmax(shares))] += min(0, missing)  # the at-least-one rule may have given away too many
    return tuple(shares)


def interleave(shares: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """One period of the blend: the source in each slot, and how many slots of that source come before it.

    |count_s(n) - n share_s / period| < 1 for every source s and every prefix n. Sample j of a source may stand in slots
    floor(j / w) to ceil((j + 1) / w) - 1, w = share / period, and of the sources that may take a slot the one with the
    earliest deadline does: on one processor that always succeeds (Pfair: Baruah, Cohen, Plaxton, Varvel 1996), whereas
    giving the slot to the source that lags most can fall behind by more than one with many sources.
    Returns source: [period] uint16, rank: [period] int64.
    """
    period = sum(shares)
    source = np.empty(period, dtype=np.uint16)
    rank = np.empty(period, dtype=np.int64)
    waiting = [(0, s, 0) for s in range(len(shares))]  # (first slot allowed, source, j)
    ready: list[tuple[int, int, int]] = []  # (deadline, source, j)
    for slot in range(period):
        while waiting and waiting[0][0] <= slot:
            _, s, j = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(j + 1) * period // shares[s]), s, j))
        _, s, j = heapq.heappop(ready)
        source[slot], rank[slot] = s, j
        if j + 1 < shares[s]:
            heapq.heappush(waiting, ((j + 1) * period // shares[s], s, j + 1))
    return source, rank


NOTHING_READ: Mapping[str, int] = MappingProxyType({})

# Samples [first, stop) that a run leaves out, apart from one another and in order.
Skipped = Sequence[Sequence[int]]


def index_samples(cursor: np.ndarray, skipped: Skipped) -> np.ndarray:
    """The global index of the sample at each cursor of a run that leaves `skipped` out: the cursor-th of the samples that remain.

    cursor: [n] int64 >= 0 -> [n] int64.
    """
    index = np.array(cursor, dtype=np.int64)
    for first, stop in skipped:
        index[index >= first] += stop - first
    return index


def add_skipped(skipped: Skipped, first: int, stop: int) -> list[list[int]]:
    """`skipped` and [first, stop), with intervals that overlap or touch joined."""
    joined: list[list[int]] = []
    for low, high in sorted([*map(list, skipped), [first, stop]]):
        if joined and low <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], high)
        elif low < high:
            joined.append([low, high])
    return joined


def key_of(name: str, seed: int) -> int:
    """The key of a source, 64 bits, from which all that is drawn for it follows."""
    return xxhash.xxh64_intdigest(name.encode(), seed=seed % 2**64)


@dataclass(frozen=True)
class SampleOrder:
    """The order of all samples of all epochs, built by `SampleOrder.of`."""

    sizes: np.ndarray
    """[sources] int64: samples per epoch."""
    keys: np.ndarray
    """[sources] uint64: of the sources' permutations."""
    shares: np.ndarray
    """[sources] int64: samples in one period of the blend."""
    slot_source: np.ndarray
    """[period] uint16: the source in each slot."""
    slot_rank: np.ndarray
    """[period] int64: the number of earlier slots of the same source."""
    starts: np.ndarray
    """[sources] int64: samples that were read of each source before this order begins."""
    windows: np.ndarray
    """[sources] int64: samples that are permuted among themselves."""

    @classmethod
    def of(
        cls,
        seed: int,
        sources: Mapping[str, tuple[float, int]],
        starts: Mapping[str, int] = NOTHING_READ,
        windows: Mapping[str, int] = NOTHING_READ,
    ) -> "SampleOrder":
        """Build the order. sources: name -> (weight > 0, samples per epoch >= 1). A source's order does not depend on others.
        starts: samples of a source that were read before, in another order of the same sources. windows: of streams; of others
        all of an epoch."""
        shares = count_shares([weight for weight, _ in sources.values()])
        slot_source, slot_rank = interleave(shares)
        return cls(
            sizes=np.array([size for _, size in sources.values()], dtype=np.int64),
            keys=np.array([key_of(name, seed) for name in sources], dtype=np.uint64),
            shares=np.array(shares, dtype=np.int64),
            slot_source=slot_source,
            slot_rank=slot_rank,
            starts=np.array([starts.get(name, 0) for name in sources], dtype=np.int64),
            windows=np.array([windows.get(name, size) for name, (_, size) in sources.items()], dtype=np.int64),
        )

    def count(self, num_samples: int) -> np.ndarray:
        """Samples of each source among the first `num_samples`: [sources] int64."""
        periods, rest = divmod(num_samples, len(self.slot_source))
        return periods * self.shares + np.bincount(self.slot_source[:rest], minlength=len(self.shares))

    def place(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, position among all samples that are read of it) at each global index: [n] int64 -> two of [n] int64."""
        period, slot = np.divmod(index, len(self.slot_source))
        source = self.slot_source[slot].astype(np.int64)
        return source, self.starts[source] + period * self.shares[source] + self.slot_rank[slot]

    def locate(self, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, sample in that source) at each global index.  index: [n] int64 -> two of [n] int64."""
        source, position = self.place(index)
        size, window = self.sizes[source], self.windows[source]
        epoch, place = np.divmod(position, size)
        number, within = np.divmod(place, window)
        first = number * window
        key = mix(self.keys[source] + mix(epoch.astype(np.uint64) + GOLDEN)) + number.astype(np.uint64)
        count = np.minimum(window, size - first)
        return source, first + permute(within.astype(np.uint64), count.astype(np.uint64), key).astype(np.int64)


Overlong = Literal["skip", "truncate", "refuse"]


@dataclass(frozen=True)
class Rows:
    """The documents, or pieces, of each row: tokens [starts[k], stops[k]) for k in [first[row], first[row + 1])."""

    starts: np.ndarray
    """[pieces] int64, in the order of the rows."""
    stops: np.ndarray
    first: np.ndarray
    """[rows + 1] int64."""
    context: int

    @property
    def num_rows(self) -> int:
        return len(self.first) - 1

    @property
    def fill(self) -> float:
        """The share of places that have a token; 0 without rows."""
        return float((self.stops - self.starts - 1).sum()) / max(1, self.num_rows * self.context)

    @classmethod
    def of(cls, stream: TokenStream, context: int, overlong: Overlong, key: int = 0, is_alone: bool = False) -> "Rows":
        """The rows of a stream. key: draws the order of equally long documents; is_alone: a row for each. DataError where
        `overlong` refuses one."""
        starts, stops = _list_pieces(stream, context, overlong)
        together = 1 + stream.is_paired  # documents that are packed as one
        lengths = _count_places(starts, stops, together)
        index = np.arange(len(lengths), dtype=np.uint64)
        drawn = permute(index, np.full_like(index, len(lengths)), np.full_like(index, key)).astype(np.int64)
        by_length = drawn[np.argsort(-lengths[drawn], kind="stable")]
        row_of = np.arange(len(lengths)) if is_alone else _fit(lengths[by_length], context)
        in_rows = by_length[np.argsort(row_of, kind="stable")]
        in_rows = (in_rows[:, None] * together + np.arange(together)).reshape(-1)
        counts = np.bincount(row_of) * together if len(row_of) else np.zeros(0, np.int64)
        return cls(starts[in_rows], stops[in_rows], np.concatenate([[0], np.cumsum(counts)]), context)


def refuse_no_rows(source: str, stream: TokenStream, num_rows: int, context: int) -> None:
    """Raises DataError where a source of this name has no row to train on."""
    if num_rows == 0:
        cut = "" if stream.is_paired else ", or set data.overlong=truncate"
        raise DataError(
            f"data.sources.{source}: each of its {stream.noun} is longer than batch.context={context}. Raise batch.context{cut}"
        )


def count_overlong(stream: TokenStream, context: int) -> int:
    """The number of conversations, or pairs, that are longer than a row; 0 for text, which is cut."""
    ends = stream.read_ends()
    starts = np.concatenate([[0], ends[:-1]])
    return 0 if stream.trained is None else int((_count_places(starts, ends, 1 + stream.is_paired) > context).sum())


def _count_places(starts: np.ndarray, stops: np.ndarray, together: int) -> np.ndarray:
    """The places of a row that each document takes, or so many together: [n] int64."""
    return (stops - starts - 1).reshape(-1, together).sum(axis=1)


def _list_pieces(stream: TokenStream, context: int, overlong: Overlong) -> tuple[np.ndarray, np.ndarray]:
    """(first token, behind the last) of each document or piece that fits into a row and has a label: [n] int64 each."""
    together, stops = 1 + stream.is_paired, stream.read_ends()
    starts = np.concatenate([[0], stops[:-1]]).astype(np.int64)
    if stream.trained is None:
        counts = np.maximum(1, -(-(stops - starts - 1) // context))
        number = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        starts, stops = np.repeat(starts, counts) + number * context, np.repeat(stops, counts)
    elif overlong == "refuse" and (count := count_overlong(stream, context)):
        raise DataError(
            f"{count:,} of {len(stops) // together:,} {stream.noun}, longer than batch.context={context}: refused"
            " (data.overlong=refuse). Raise batch.context, or set data.overlong to skip or truncate"
        )
    fits = np.repeat(_count_places(starts, stops, together) <= context, together)
    fits |= (stream.trained is None) | (overlong == "truncate")
    stops = np.minimum(stops, starts + context + 1)
    kept = fits & ((stops - starts > 1) | stream.is_paired)
    return starts[kept], stops[kept]


def _fit(lengths: np.ndarray, context: int) -> np.ndarray:
    """The row of each piece, in order of falling length: [n] int64."""
    rows = np.empty(len(lengths), dtype=np.int64)
    open_rows: list[list[int]] = [[] for _ in range(context + 1)]  # by the space that is left
    spaces, num_rows = 0, 0  # bit k of `spaces`: some row has k places left
    for index, length in enumerate(lengths.tolist()):
        roomy = spaces >> length
        if roomy:
            space = length + (roomy & -roomy).bit_length() - 1
            row = open_rows[space].pop()
            if not open_rows[space]:
                spaces ^= 1 << space
        else:
            row, space, num_rows = num_rows, context, num_rows + 1
        rows[index] = row
        if space > length:
            open_rows[space - length].append(row)
            spaces |= 1 << (space - length)
    return rows
