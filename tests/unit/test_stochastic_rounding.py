"""Stochastic rounding: right on average, exact where bf16 is, and a function of the element alone."""

import pytest
import torch
from torch import Tensor

from framework.mesh.layout import Box, Layout, Shard
from framework.optim.stochastic_rounding import FACTORS, SHIFTS, Key, draw_bits, hash_key, round_to_bf16

KEY: Key = (7, "moments", 3, "w")
# The seeds are fixed, so a bound at so many standard deviations either holds always or never.
SIGMAS = 4.5


def bits_of(layout: Layout) -> Tensor:
    out = torch.empty(layout.numel_owned, dtype=torch.int32)
    draw_bits(KEY, layout.boxes(), layout.shape, out)
    return out


def test_the_mean_of_many_roundings_is_the_value() -> None:
    values = torch.randn(50) * torch.logspace(-30, 3, 50)
    rounds = 4096
    bits = bits_of(Layout((rounds, 50))).view(rounds, 50)
    rounded = torch.stack([round_to_bf16(values, each) for each in bits]).double()
    spacing = (values.bfloat16().abs().double() * 2.0**-7).clamp(min=1e-300)
    # A rounding is off by at most one spacing, with a standard deviation of at most half of it.
    assert ((rounded - values.double()).abs() <= spacing).all()
    assert ((rounded.mean(0) - values.double()).abs() < 4.5 * 0.5 / rounds**0.5 * spacing).all()
    assert (rounded != values.bfloat16()).any(), "to nearest, it would not be right on average"


def test_what_bf16_has_stays() -> None:
    values = torch.cat([torch.randn(100).bfloat16().float(), torch.tensor([0.0, -0.0, 2.0**-133])])
    for each in (0, -1, 0xFFFF):
        assert torch.equal(round_to_bf16(values, torch.full((103,), each, dtype=torch.int32)).float(), values)


def test_bits_belong_to_the_element() -> None:
    whole = bits_of(Layout((6, 10))).view(6, 10)
    for dim, index in ((0, 1), (1, 0), (1, 1)):
        layout = Layout((6, 10), (Shard("tp", dim, index, 2),), interval=(3, 27))
        expected = torch.cat([whole[box.slices()].flatten() for box in layout.boxes()])
        assert torch.equal(bits_of(layout), expected)


def words_of(numel: int, start: int = 0, key: Key = KEY) -> Tensor:
    """The words of elements from `start` on of a long vector."""
    out = torch.empty(numel, dtype=torch.int32)
    draw_bits(key, [Box((start,), (numel,))], (1 << 40,), out)
    return out


def test_words_are_the_hash_in_integers_and_equal_on_every_machine() -> None:
    first, second, third = hash_key((*KEY, 0))
    for number, word in enumerate(words_of(300).tolist()):
        x = (number + first) % 2**32
        for shift, factor, added in zip(SHIFTS, FACTORS, (second, third, 0), strict=False):
            x = ((x ^ x >> shift) * factor + added) % 2**32
        assert word % 2**32 == x ^ x >> SHIFTS[-1]
    assert hash_key((1, "a")) == (2836544885, 3621969906, 392458141)


def test_numbers_beyond_32_bits_have_words_of_their_own() -> None:
    """A stacked weight of experts may have more elements than a word has values."""
    border = 1 << 32
    across = words_of(20, border - 10)
    assert torch.equal(across, torch.cat([words_of(10, border - 10), words_of(10, border)]))
    assert not torch.equal(across[10:], words_of(10))
    shape, out = (70_000, 70_000), torch.empty(120_000, dtype=torch.int32)
    draw_bits(KEY, [Box((border // 70_000 - 1, 5), (3, 40_000))], shape, out)
    rows = [words_of(40_000, (border // 70_000 + row) * 70_000 + 5) for row in (-1, 0, 1)]
    assert torch.equal(out, torch.cat(rows))


def test_each_bit_and_byte_is_fair() -> None:
    words = words_of(1 << 20)
    ones = torch.stack([(words >> bit & 1).sum() for bit in range(32)]).double()
    assert (ones - len(words) / 2).abs().max() < SIGMAS * len(words) ** 0.5 / 2
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((words >> shift & 255).long(), minlength=256).double()
        expected = len(words) / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < SIGMAS * (2 * 255) ** 0.5


def test_a_flipped_bit_of_the_number_flips_half_of_the_word() -> None:
    words = words_of(4096)
    for bit in range(12):
        flipped = words ^ words[torch.arange(4096) ^ (1 << bit)]
        share = torch.stack([(flipped >> each & 1).double().mean() for each in range(32)])
        assert (share - 0.5).abs().max() < SIGMAS * 0.5 / 2048**0.5  # pairs are counted twice


@pytest.mark.parametrize(
    "other",
    [(8, *KEY[1:]), (7, "moments", 4, "w"), (7, "moments", 3, "v"), KEY],
    ids=("seed", "step", "parameter", "itself"),
)
def test_streams_are_uncorrelated_at_every_distance(other: Key) -> None:
    """All distances at once, by Fourier transform: with itself but for distance 0."""
    numel = 1 << 20
    one, two = (words_of(numel, key=key).double() / (2**31 / 3**0.5) for key in (KEY, other))
    correlations = torch.fft.irfft(torch.fft.rfft(one).conj() * torch.fft.rfft(two), n=numel) / numel
    if other == KEY:
        assert abs(correlations[0] - 1) < 0.01
        correlations = correlations[1:]
    # The largest of a million normal numbers is beyond 6.2 standard deviations once in a thousand.
    assert correlations.abs().max() < 6.2 / numel**0.5
