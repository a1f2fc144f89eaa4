"""Numbers in 8 bits: how far off, right on average, the same again, and never a zero that was none."""

import pytest
import torch
from torch import Tensor

from framework.optim.low_bit import BLOCK, SIGNED, UNSIGNED, CodeRange, decode, encode

KINDS = pytest.mark.parametrize("kind", [SIGNED, UNSIGNED], ids=["signed", "unsigned"])
NEAREST = 1 << 15
OCTAVES = 16


def draw_values(kind: CodeRange, octaves: float, blocks: int = 40) -> Tensor:
    """Blocks of numbers over so many octaves, some of them 0, the blocks themselves 60 octaves apart."""
    generator = torch.Generator().manual_seed(3)
    exponents = -octaves * torch.rand(blocks, BLOCK, generator=generator) + torch.linspace(-60, 0, blocks)[:, None]
    values = torch.exp2(exponents) * (torch.rand(blocks, BLOCK, generator=generator) < 0.95)
    signs = torch.rand(blocks, BLOCK, generator=generator) < 0.5
    return (torch.where(signs, -values, values) if kind is SIGNED else values).flatten()


def code(values: Tensor, bits: Tensor | int, kind: CodeRange) -> tuple[Tensor, Tensor]:
    words = torch.full(values.shape, bits, dtype=torch.int32) if isinstance(bits, int) else bits
    codes = torch.empty(len(values), dtype=kind.dtype)
    exponents = torch.empty(len(values) // BLOCK, dtype=torch.uint8)
    encode(values, words, codes, exponents, kind)
    return codes, exponents


def round_trip(values: Tensor, bits: Tensor | int, kind: CodeRange) -> Tensor:
    return decode(*code(values, bits, kind), kind)


def random_bits(values: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(1 << 31), 1 << 31, values.shape, dtype=torch.int64, generator=generator).int()


@KINDS
def test_an_error_is_a_spacing_at_most_and_to_nearest_a_half(kind: CodeRange) -> None:
    values = draw_values(kind, OCTAVES - 1.2)
    spacing = 2.0**-kind.mantissa_bits
    for bits, bound in ((random_bits(values, 1), spacing), (NEAREST, spacing / 2)):
        assert ((round_trip(values, bits, kind) - values).abs() <= bound * values.abs()).all()


@KINDS
def test_what_was_decoded_gets_its_codes_again(kind: CodeRange) -> None:
    values = draw_values(kind, 2.0 * OCTAVES)
    codes, exponents = code(values, random_bits(values, 1), kind)
    for bits in (random_bits(values, 2), 0, -1, NEAREST):
        again = code(decode(codes, exponents, kind), bits, kind)
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], exponents)


@KINDS
def test_numbers_are_those_of_bf16(kind: CodeRange) -> None:
    numbers = round_trip(draw_values(kind, 40.0), 0, kind)
    assert torch.equal(numbers.bfloat16().float(), numbers)


def test_the_mean_of_many_is_the_value_below_the_smallest_number_too() -> None:
    values, rounds = draw_values(SIGNED, 20.0, blocks=4), 3000
    largest = values.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).flatten()
    total = torch.zeros(len(values), dtype=torch.float64)
    for seed in range(rounds):
        total += round_trip(values, random_bits(values, seed), SIGNED)
    # One rounding is off by no more than the distance of two numbers, which is at least that of 0 and the smallest.
    distance = torch.maximum(values.abs() / 8, largest * 2.0**-15)
    assert ((total / rounds - values).abs() < 5 * 0.5 / rounds**0.5 * distance).all()


def test_a_second_moment_is_never_rounded_to_zero() -> None:
    values = draw_values(UNSIGNED, 60.0)
    for bits in (0, -1):
        assert torch.equal(round_trip(values, bits, UNSIGNED) > 0, values > 0)


@KINDS
def test_blocks_that_are_cut_differently_agree_above_the_smallest_numbers(kind: CodeRange) -> None:
    values = draw_values(kind, OCTAVES + 4.0)
    bits = random_bits(values, 1)
    half = BLOCK // 2
    shifted = round_trip(values[half:-half].contiguous(), bits[half:-half].contiguous(), kind)
    same = shifted == round_trip(values, bits, kind)[half:-half]
    blocks = values.view(-1, BLOCK // 2).abs().amax(1)
    # The largest of the blocks, old and new, in which an element lies.
    pairs = torch.stack([blocks[:-2], blocks[1:-1], blocks[2:]]).amax(0)
    largest = pairs.repeat_interleave(half)
    is_inside = values[half:-half].abs() > largest * 2.0 ** -(OCTAVES - 2)
    assert same[is_inside].all()
    assert not same.all(), "nothing was below"
