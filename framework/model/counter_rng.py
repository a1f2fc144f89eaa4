"""A counter-based RNG: random numbers as a function of a key and a counter, so any part of a tensor is sampled without the rest.

    number j of stream `key` = F(hash(key, j))        F: uniform or normal

A sequential generator must produce all numbers before the one that is wanted; here each is computed by itself. Only operations
that IEEE 754 rounds in one way are used (integers, one multiplication or addition at a time, table lookups), no logarithm and
no cosine: a number is the same, bit for bit, in any chunk, on any number of threads, on any machine and device.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

# Numbers computed at a time. On a CPU: torch's grain size, above which it would share one operation among threads and wait for
# them each time, and small enough for a core's cache. On a GPU: enough to be worth a kernel, and 64 MiB of scratch a tensor.
CHUNK_CPU = 1 << 15
CHUNK_DEVICE = 1 << 24

BLOCK_BITS = 32  # counters of a hash; a stream's further numbers have another key

# `triple32` of Chris Wellons' search for 32-bit hashes: of those with three multiplications, the one of the least bias.
SHIFTS = (17, 11, 15, 14)
FACTORS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)

# The normal quantile's table: a float32's exponent and this many bits of its mantissa choose the entry, between entries it is a
# line. 8 bits: at most 8e-7 standard deviations beside the true quantile.
MANTISSA_BITS = 23
TABLE_BITS = 8
FRACTION_BITS = MANTISSA_BITS - TABLE_BITS
FRACTION_MASK = (1 << FRACTION_BITS) - 1

Key = tuple[int | str, ...]
Sample = Callable[["CounterRng", Sequence["Rows"]], Tensor]


@dataclass(frozen=True)
class Rows:
    """`count` runs of `length` consecutive counters, the first from `start`, each `stride` after the one before."""

    start: int
    count: int
    stride: int
    length: int

    @property
    def numel(self) -> int:
        return self.count * self.length

    @property
    def last(self) -> int:
        return self.start + (self.count - 1) * self.stride + self.length - 1

    def split(self, size: int) -> "Iterator[Rows]":
        """The same counters in the same order, at most `size` at a time, each part within one block of the hash."""
        at_once = max(1, size // self.length)
        for first in range(0, self.count, at_once):
            some = replace(self, start=self.start + first * self.stride, count=min(at_once, self.count - first))
            if some.numel <= size and some.start >> BLOCK_BITS == some.last >> BLOCK_BITS:
                yield some
            else:
                for row in range(some.count):
                    yield from _split_run(some.start + row * some.stride, some.length, size)


def _split_run(start: int, length: int, size: int) -> Iterator[Rows]:
    """`Rows.split` of a single run of counters."""
    while length:
        count = min(size, length, (1 << BLOCK_BITS) - start % (1 << BLOCK_BITS))
        yield Rows(start, 1, 0, count)
        start, length = start + count, length - count


def batch(rows: Sequence[Rows], size: int) -> Iterator[list[Rows]]:
    """`rows` in order, split and joined so that each list has at most `size` counters of one block of the hash."""
    collected: list[Rows] = []
    room = size
    for each in (piece for whole in rows for piece in whole.split(size)):
        if collected and (each.numel > room or each.start >> BLOCK_BITS != collected[0].start >> BLOCK_BITS):
            yield collected
            collected, room = [], size
        collected.append(each)
        room -= each.numel
    if collected:
        yield collected


class CounterRng:
    """Random numbers on a device, at most `size` at a time, in memory that is allocated once. Each thread has its own.

    The tensors that it returns are this memory: valid until the next call.
    """

    def __init__(self, size: int, device: torch.device):
        self.size = size
        self._arange = torch.arange(size, dtype=torch.int32, device=device)
        self._words, self._bits = torch.empty_like(self._arange), torch.empty_like(self._arange)
        self._numbers, self._slopes = (torch.empty(size, device=device) for _ in range(2))
        self._device = device

    def uniforms(self, key: Key, rows: Sequence[Rows]) -> Tensor:
        """Uniform in [0, 1), 24 bits each: fp32 [number of counters]."""
        words = self.words(key, rows)
        numbers = self._numbers[: len(words)]
        words.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF)
        return numbers.copy_(words).mul_(2.0**-24)

    def normals(self, key: Key, rows: Sequence[Rows]) -> Tensor:
        """Standard normal, up to 6.2 standard deviations: fp32 [number of counters].

        A word is a sign and 31 bits q of a probability; the normal quantile of q / 2^32 is looked up. The lowest bit is set, so
        that q is never 0 and both signs have the same numbers.
        """
        words = self.words(key, rows)
        count = len(words)
        numbers, slopes, bits = self._numbers[:count], self._slopes[:count], self._bits[:count]
        values, differences = _normal_table(self._device)
        signed = numbers.copy_(words.bitwise_or_(1))
        q = words.view(torch.float32)
        torch.abs(signed, out=q)
        torch.bitwise_right_shift(words, FRACTION_BITS, out=bits)
        torch.index_select(differences, 0, bits, out=slopes)
        words.bitwise_and_(FRACTION_MASK)
        fraction = words.view(torch.float32)
        fraction.copy_(words)
        slopes.mul_(fraction)
        torch.index_select(values, 0, bits, out=fraction)
        return torch.copysign(slopes.add_(fraction), signed, out=numbers)

    def words(self, key: Key, rows: Sequence[Rows]) -> Tensor:
        """32 random bits for each counter: int32 [number of counters]."""
        first, *keys = words_of((*key, rows[0].start >> BLOCK_BITS))
        filled = 0
        for each in rows:
            place = self._words[filled : filled + each.numel]
            torch.add(self._arange[: each.length], _signed(each.start + first), out=place[: each.length])
            if each.count > 1:  # strides wrap around as counters do
                starts = self._arange[: each.count, None] * _signed(each.stride)
                torch.add(place[: each.length].clone(), starts, out=place.view(each.count, each.length))
            filled += each.numel
        words, spare = self._words[:filled], self._bits[:filled]
        for shift, factor, word in zip(SHIFTS, FACTORS, (*keys, 0), strict=False):
            _fold(words, shift, spare).mul_(_signed(factor))
            if word:
                words.add_(_signed(word))
        return _fold(words, SHIFTS[-1], spare)


def fill(out: Tensor, rows: Sequence[Rows], sample: Sample) -> None:
    """Fill `out` with the values that `sample` computes for all counters of `rows`, in order, cast to its dtype.

    Computed on the device of `out`, a chunk at a time, on a CPU by as many threads as torch uses. out: [number of counters].
    """
    size = min(CHUNK_CPU if out.device.type == "cpu" else CHUNK_DEVICE, out.numel())
    batches, first = [], 0
    for each in batch(rows, size):
        last = first + sum(run.numel for run in each)
        batches.append((out[first:last], each))
        first = last
    assert first == out.numel(), (first, out.shape)
    num_threads = min(len(batches), torch.get_num_threads() if out.device.type == "cpu" else 1)

    def work(thread: int) -> None:
        rng = CounterRng(size, out.device)
        for place, counters in batches[thread::num_threads]:
            place.copy_(sample(rng, counters))

    if num_threads <= 1:  # no thread is started for a few numbers
        work(0) if batches else None
        return
    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(work, range(num_threads)))


def words_of(key: Key) -> tuple[int, ...]:
    """Three random 32-bit words of a key, equal on every machine.

    With one word, added to the counter, two streams would be the same numbers, shifted.
    """
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=12).digest()
    return tuple(int.from_bytes(digest[at : at + 4], "little") for at in (0, 4, 8))


def _fold(words: Tensor, shift: int, spare: Tensor) -> Tensor:
    """words ^= words >> shift, in place, int32 [n]; the mask turns torch's shift of signed integers into an unsigned one."""
    torch.bitwise_right_shift(words, shift, out=spare)
    return words.bitwise_xor_(spare.bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    """The low 32 bits of a word as a signed integer, which is what torch's int32 takes."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


@cache
def _normal_table(device: torch.device) -> tuple[Tensor, Tensor]:
    """-quantile(q / 2^32) where an entry of q begins, and its slope: fp32, indexed by the upper bits of the float32 q.

    Entries below q = 1 exist and are not used. The quantile is Wichura's algorithm AS 241 in Python's doubles.
    """
    first, last = (int(torch.tensor(q).view(torch.int32)) >> FRACTION_BITS for q in (1.0, 2.0**31))
    starts = (torch.arange(first, last + 1, dtype=torch.int32) << FRACTION_BITS).view(torch.float32)
    quantile = NormalDist().inv_cdf
    entries = torch.tensor([-quantile(q * 2.0**-32) for q in starts.tolist()], dtype=torch.float64)
    values, slopes = torch.zeros(last + 1), torch.zeros(last + 1)
    values[first:] = entries
    slopes[first:-1] = entries.diff() / (1 << FRACTION_BITS)
    return values.to(device), slopes.to(device)
