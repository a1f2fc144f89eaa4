"""Stochastic rounding to bf16: up with the probability of the distance, so that sums of many small steps stay right on average.

    round(x) = the bf16 number below x, or with probability (x - below) / (above - below) the one above    (in magnitude)

Rounding to nearest leaves a bf16 number where it is while each step adds less than half of its spacing, 1/512 to 1/256 of it.

The random bits of an element are a hash of (key, number of the element in its parameter), wherever the element lies, so that
every layout rounds alike. The hash is integer arithmetic, equal bit for bit in any chunk, on any machine and device.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import prod

import torch
from torch import Tensor

from framework.mesh.layout import Box

# Random bits that a rounding takes, and the bits of fp32 that bf16 does not have.
ROUNDING_BITS = 16

# `triple32` of Chris Wellons' search for 32-bit hashes: of those with three multiplications, the one of the least bias.
SHIFTS = (17, 11, 15, 14)
FACTORS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
WORD_BITS = 32  # of an element's number that are hashed; its higher bits are a part of the key

Key = tuple[int | str, ...]


def is_needed(retained: float, mantissa_bits: int, is_signed: bool) -> bool:
    """Whether a moment is right on average only with stochastic rounding. retained: the share of it that a step retains, beta.

    To nearest, a number stays where it is while a step changes it by less than half a spacing: 2^-(mantissa_bits + 1) of it at
    most. A first moment whose steps are larger is closer to the truth if rounded to nearest. A second one would still be too
    large: it falls by 1 - beta at most, and rises by more.
    """
    return not is_signed or 1 - retained < 2.0 ** -(mantissa_bits + 1)


def round_to_bf16(values: Tensor, bits: Tensor) -> Tensor:
    """`values` rounded by the lowest 16 of `bits`. values: fp32 [n], finite; bits: int32 [n]. Returns bf16 [n].

    Numbers that bf16 has stay as they are, whatever the bits.
    """
    words = values.view(torch.int32) + (bits & 0xFFFF)  # sign and magnitude: a carry goes up in magnitude
    return (words >> ROUNDING_BITS).to(torch.int16).view(torch.bfloat16)


def draw_bits(key: Key, boxes: Sequence[Box], shape: Sequence[int], out: Tensor) -> None:
    """Fill `out`, int32 [n], with the random words of the elements of `boxes`, one box after the other, each row-major.

    shape: of the whole parameter, in which elements are numbered row-major. 32 bits each are enough for two roundings.
    """
    strides, start = find_strides(shape), 0
    for words, group in hash_boxes(key, boxes, strides):
        first = start
        for box in group:
            _write_numbers(box, strides, out[start : start + box.numel])
            start += box.numel
        _hash(out[first:start], words)
    assert start == len(out), (start, len(out))


def find_strides(shape: Sequence[int]) -> list[int]:
    """Steps of an element's number along each dim."""
    return [prod(shape[dim + 1 :]) for dim in range(len(shape))]


def hash_boxes(key: Key, boxes: Sequence[Box], strides: Sequence[int]) -> Iterator[tuple[tuple[int, ...], list[Box]]]:
    """The same elements in the same order, in boxes whose elements' numbers differ in their low words only; in front of those
    that share a high word the words of a key with it (`hash_key`)."""
    for high, group in groupby(_split_at_words(boxes, strides), lambda box: first_number(box, strides) >> WORD_BITS):
        yield hash_key((*key, high)), list(group)


def hash_key(key: Key) -> tuple[int, ...]:
    """Three random 32-bit words of a key, equal on every machine.

    With one word, added to the element's number, two streams would be the same bits, shifted.
    """
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=12).digest()
    return tuple(int.from_bytes(digest[at : at + 4], "little") for at in (0, 4, 8))


def first_number(box: Box, strides: Sequence[int]) -> int:
    """The number of a box's first element."""
    return sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True))


def _split_at_words(boxes: Iterable[Box], strides: Sequence[int]) -> Iterator[Box]:
    """The same elements in the same order, in boxes whose elements' numbers have equal high bits."""
    for box in boxes:
        first = first_number(box, strides)
        last = first + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
        if not box.numel or first >> WORD_BITS == last >> WORD_BITS:
            yield box
            continue
        dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
        half = box.sizes[dim] // 2
        for offset, size in ((0, half), (half, box.sizes[dim] - half)):
            offsets, sizes = list(box.offsets), list(box.sizes)
            offsets[dim], sizes[dim] = offsets[dim] + offset, size
            yield from _split_at_words([Box(tuple(offsets), tuple(sizes))], strides)


def _write_numbers(box: Box, strides: Sequence[int], out: Tensor) -> None:
    """Fill `out`, int32 [n], with the low words of the numbers of the box's elements."""
    numbers = out.view(box.sizes)
    numbers.fill_(signed(first_number(box, strides)))
    for dim, (size, stride) in enumerate(zip(box.sizes, strides, strict=True)):
        if size > 1:  # sums and products wrap around, as the words do
            steps = torch.arange(size, dtype=torch.int32, device=out.device).mul_(signed(stride))
            numbers.add_(steps.view(size, *[1] * (len(strides) - dim - 1)))


def _hash(words: Tensor, of_key: Sequence[int]) -> None:
    """Hash the low words of elements' numbers, int32 [n], in place."""
    first, *added = of_key
    spare = torch.empty_like(words)
    words.add_(signed(first))
    for shift, factor, word in zip(SHIFTS, FACTORS, (*added, 0), strict=False):
        _fold(words, shift, spare).mul_(signed(factor)).add_(signed(word))
    _fold(words, SHIFTS[-1], spare)


def _fold(words: Tensor, shift: int, spare: Tensor) -> Tensor:
    """words ^= words >> shift, in place, int32 [n]; the mask turns torch's shift of signed integers into an unsigned one."""
    torch.bitwise_right_shift(words, shift, out=spare)
    return words.bitwise_xor_(spare.bitwise_and_((1 << (WORD_BITS - shift)) - 1))


def signed(word: int) -> int:
    """The low 32 bits of a word as a signed integer, which is what torch's int32 takes."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
