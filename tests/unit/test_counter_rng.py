"""Numbers by key and counter: the same in any split, on any machine, and as random as they should be."""

import math
from collections.abc import Iterator
from statistics import NormalDist

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from framework.model.counter_rng import CHUNK_CPU, FACTORS, SHIFTS, CounterRng, Key, Rows, batch, fill, words_of

CPU = torch.device("cpu")
KEY: Key = (1234, "model.layers.0.mlp.up_proj.weight", 1)
# The seeds are fixed, so a bound at so many standard deviations either holds always or never.
SIGMAS = 4.5


def normals(rows: Rows, key: Key = KEY) -> Tensor:
    out = torch.empty(rows.numel)
    fill(out, [rows], lambda rng, part: rng.normals(key, part))
    return out


def uniforms(rows: Rows, key: Key = KEY) -> Tensor:
    out = torch.empty(rows.numel)
    fill(out, [rows], lambda rng, part: rng.uniforms(key, part))
    return out


def run(numel: int, start: int = 0) -> Rows:
    return Rows(start, 1, 0, numel)


@pytest.fixture(scope="module")
def many() -> Tensor:
    """A million normal numbers, fp64."""
    return normals(run(1 << 20)).double()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def plain_word(counter: int, key: Key) -> int:
    """The hash in Python's integers."""
    first, second, third = words_of((*key, 0))
    x = (counter + first) % 2**32
    for shift, factor, added in zip(SHIFTS, FACTORS, (second, third, 0), strict=False):
        x = ((x ^ x >> shift) * factor + added) % 2**32
    return x ^ x >> SHIFTS[-1]


def test_numbers_are_the_quantiles_of_the_hash() -> None:
    values, parts = normals(run(300)), uniforms(run(300))
    for counter in range(300):
        word = plain_word(counter, KEY)
        assert parts[counter] == (word >> 8) / 2**24
        signed = (word | 1) - (2**32 if word >> 31 else 0)
        size = -NormalDist().inv_cdf(abs(signed) / 2**32)
        assert abs(values[counter] - math.copysign(size, signed)) < 2e-6


def test_numbers_are_these_on_every_machine() -> None:
    """Replicas on unlike processors must begin with equal bits."""
    assert words_of((1, "a")) == (2836544885, 3621969906, 392458141)
    expected = [0.009934812784194946, -0.49185171723365784, 0.2481393665075302, 1.2459626197814941]
    assert normals(run(4)).tolist() == expected
    assert uniforms(run(2)).tolist() == [0.4960365891456604, 0.6885877847671509]


@settings(max_examples=60, deadline=None)
@given(
    start=st.integers(0, 5000), count=st.integers(1, 40), gap=st.integers(0, 50), length=st.integers(1, 90),
    size=st.integers(1, 300),
)  # fmt: skip
def test_any_split_draws_the_same(start: int, count: int, gap: int, length: int, size: int) -> None:
    rows = Rows(start, count, length + gap, length)
    whole = normals(run(rows.last + 1))
    rng = CounterRng(size, CPU)
    parts = [rng.normals(KEY, each).clone() for each in batch([rows, run(7)], size)]
    expected = [whole[start + row * rows.stride :][:length] for row in range(count)]
    assert torch.equal(torch.cat(parts), torch.cat([*expected, normals(run(7))]))


def test_threads_draw_the_same(two_threads: None) -> None:
    numel = 5 * CHUNK_CPU + 3
    torch.set_num_threads(1)
    alone = normals(run(numel, 11))
    torch.set_num_threads(2)
    assert torch.equal(normals(run(numel, 11)), alone)


def test_counters_beyond_32_bits_are_new() -> None:
    """A stacked weight of experts may have more elements than a word has values."""
    border = 1 << 32
    across = normals(run(20, border - 10))
    assert torch.equal(across[:10], normals(run(10, border - 10)))
    assert torch.equal(across[10:], normals(run(10, border)))
    assert not torch.equal(across[10:], normals(run(10)))
    assert torch.equal(normals(Rows(border - 10, 2, 10, 5)), torch.cat([across[:5], across[10:15]]))


def test_normals_have_the_moments_of_the_normal_distribution(many: Tensor) -> None:
    root = len(many) ** 0.5
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs((many**power).mean() - moment) < SIGMAS * variance**0.5 / root


def test_normals_follow_the_normal_distribution(many: Tensor) -> None:
    """Kolmogorov and Smirnov: 1.95 is exceeded by chance once in a thousand."""
    ranked, count = torch.special.ndtr(many).sort().values, len(many)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum((steps[1:] - ranked).max(), (ranked - steps[:-1]).max())
    assert distance * count**0.5 < 1.95


def test_tails_are_as_heavy_as_they_should_be() -> None:
    values = normals(run(1 << 23)).abs()
    for limit in (3.0, 4.0, 4.5, 5.0):
        expected = float(2 * torch.special.ndtr(torch.tensor(-limit, dtype=torch.float64))) * len(values)
        assert abs(int((values > limit).sum()) - expected) < SIGMAS * expected**0.5
    assert values.max() < 6.3


def test_each_bit_and_byte_is_fair() -> None:
    rng = CounterRng(1 << 20, CPU)
    words = rng.words(KEY, [run(1 << 20)])
    ones = torch.stack([(words >> bit & 1).sum() for bit in range(32)]).double()
    assert (ones - len(words) / 2).abs().max() < SIGMAS * len(words) ** 0.5 / 2
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((words >> shift & 255).long(), minlength=256).double()
        expected = len(words) / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < SIGMAS * (2 * 255) ** 0.5


def test_a_flipped_bit_of_the_counter_flips_half_of_the_word() -> None:
    rng = CounterRng(4096, CPU)
    words = rng.words(KEY, [run(4096)]).clone()
    for bit in range(12):
        flipped = words ^ words[torch.arange(4096) ^ (1 << bit)]
        share = torch.stack([(flipped >> each & 1).double().mean() for each in range(32)])
        assert (share - 0.5).abs().max() < SIGMAS * 0.5 / 2048**0.5  # pairs are counted twice


@pytest.mark.parametrize(
    "other",
    [(1235, KEY[1], 1), (1234, "model.layers.1.mlp.up_proj.weight", 1), (1234, KEY[1], 2), KEY],
    ids=("seed", "parameter", "draw", "itself"),
)
def test_streams_are_uncorrelated_at_every_distance(other: Key) -> None:
    """All distances at once, by Fourier transform: with itself but for distance 0."""
    numel = 1 << 20
    one, two = normals(run(numel)).double(), normals(run(numel), other).double()
    correlations = torch.fft.irfft(torch.fft.rfft(one).conj() * torch.fft.rfft(two), n=numel) / numel
    if other == KEY:
        assert abs(correlations[0] - 1) < 0.01
        correlations = correlations[1:]
    # The largest of a million normal numbers is beyond 6.2 standard deviations once in a thousand.
    assert correlations.abs().max() < 6.2 / numel**0.5
