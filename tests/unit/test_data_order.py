"""The sample order: a permutation per epoch, a blend that is never a whole sample off, and nothing but the index."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from framework.data.order import MAX_PERIOD, SampleOrder, add_skipped, count_shares, index_samples, interleave, permute

WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=12)


def permutation(size: int, key: int) -> np.ndarray:
    index = np.arange(size, dtype=np.uint64)
    return permute(index, np.full_like(index, size), np.full_like(index, key))


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permutation(size, key).tolist()) == list(range(size))


@given(size=st.integers(1, 10**12), index=st.integers(0, 10**12), key=st.integers(0, 2**64 - 1))
def test_permute_reaches_any_index_of_a_huge_domain(size: int, index: int, key: int) -> None:
    one = np.array([index % size], dtype=np.uint64)
    assert permute(one, np.array([size], dtype=np.uint64), np.array([key], dtype=np.uint64))[0] < size


def test_permute_puts_every_index_everywhere_equally_often() -> None:
    size, num_keys = 7, 7000
    keys = np.arange(num_keys, dtype=np.uint64)
    for start in range(size):
        images = permute(np.full(num_keys, start, np.uint64), np.full(num_keys, size, np.uint64), keys)
        counts = np.bincount(images.astype(int), minlength=size)
        chi_square = ((counts - num_keys / size) ** 2 / (num_keys / size)).sum()
        assert chi_square < 27.9  # 6 degrees of freedom: exceeded once in 10,000 draws


def test_neighbours_do_not_stay_neighbours() -> None:
    image = permutation(10_000, key=5).astype(np.int64)
    assert np.mean(np.abs(np.diff(image)) == 1) < 0.002


@given(weights=WEIGHTS)
@example(weights=[1, 1, 1, 20, 20, 20, 1])  # giving each slot to the source that lags most is 1.19 off here
def test_blend_is_less_than_one_sample_off_at_every_prefix(weights: list[int]) -> None:
    shares = count_shares(weights)
    source, rank = interleave(shares)
    counts = np.cumsum(source[:, None] == np.arange(len(shares)), axis=0)  # [prefix - 1, source]
    ideal = np.arange(1, len(source) + 1)[:, None] * [float(Fraction(w, sum(weights))) for w in weights]
    assert np.abs(counts - ideal).max() < 1
    assert counts[-1].tolist() == list(shares)  # so the error is 0 after each period and never grows
    assert rank.tolist() == (counts[np.arange(len(source)), source] - 1).tolist()


def test_shares_take_weights_as_written() -> None:
    assert count_shares([0.7, 0.2, 0.1]) == (7, 2, 1)
    assert count_shares([3, 1.5]) == (2, 1)
    assert count_shares([1e-3, 0.999]) == (1, 999)


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=9))
def test_shares_of_any_weights_are_near_them(weights: list[float]) -> None:
    shares = count_shares(weights)
    assert min(shares) >= 1
    assert sum(shares) <= MAX_PERIOD
    relative = np.array(weights) / sum(weights)
    assert np.abs(np.array(shares) / sum(shares) - relative).max() <= len(weights) / MAX_PERIOD


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32),
    sources=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 30)), min_size=1, max_size=4),
)
def test_every_sample_of_every_epoch_exactly_once(seed: int, sources: list[tuple[int, int]]) -> None:
    order = SampleOrder.of(seed, {f"source{n}": source for n, source in enumerate(sources)})
    source, sample = order.locate(np.arange(400))
    for number, (_, size) in enumerate(sources):
        visited = sample[source == number]
        for epoch in range(len(visited) // size):
            assert sorted(visited[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))


def test_epochs_and_seeds_and_sources_have_different_orders() -> None:
    def visit(seed: int, name: str, epoch: int) -> list[int]:
        return SampleOrder.of(seed, {name: (1.0, 50)}).locate(np.arange(50) + epoch * 50)[1].tolist()

    orders = [visit(1, "a", 0), visit(1, "a", 1), visit(2, "a", 0), visit(1, "b", 0)]
    assert len({tuple(order) for order in orders}) == 4


def test_a_sources_order_does_not_depend_on_the_others() -> None:
    alone = SampleOrder.of(3, {"a": (1.0, 50)}).locate(np.arange(120))[1]
    source, sample = SampleOrder.of(3, {"b": (2.0, 7), "a": (1.0, 50)}).locate(np.arange(360))
    assert sample[source == 1].tolist() == alone.tolist()


@given(index=st.lists(st.integers(0, 10**15), min_size=1, max_size=20))
def test_order_is_random_access(index: list[int]) -> None:
    order = SampleOrder.of(9, {"a": (0.7, 1001), "b": (0.3, 17)})
    together = np.stack(order.locate(np.array(index)), axis=1).tolist()
    one_by_one = [[int(part[0]) for part in order.locate(np.array([one]))] for one in index]
    assert together == one_by_one


@given(bounds=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=5))
def test_a_run_that_leaves_samples_out_meets_all_others_in_order(bounds: list[tuple[int, int]]) -> None:
    skipped: list[list[int]] = []
    for low, high in bounds:
        skipped = add_skipped(skipped, min(low, high), max(low, high))
    left_out = {index for low, high in bounds for index in range(min(low, high), max(low, high))}
    assert index_samples(np.arange(80), skipped).tolist() == [g for g in range(160) if g not in left_out][:80]
    assert all(first < stop for first, stop in skipped)
    assert all(stop < first for (_, stop), (first, _) in pairwise(skipped))


def test_an_order_with_other_weights_goes_on_where_one_has_stopped():
    sizes = {"a": 50, "b": 30}
    first = SampleOrder.of(3, {"a": (1.0, 50), "b": (1.0, 30)})
    read = dict(zip(sizes, map(int, first.count(33)), strict=True))
    assert sum(read.values()) == 33
    second = SampleOrder.of(3, {"a": (3.0, 50), "b": (1.0, 30)}, read)
    for number, name in enumerate(sizes):
        alone = SampleOrder.of(3, {name: (1.0, sizes[name])}).locate(np.arange(200))[1]
        samples = np.concatenate(
            [sample[source == number] for source, sample in (first.locate(np.arange(33)), second.locate(np.arange(40)))]
        )
        assert samples.tolist() == alone[: len(samples)].tolist(), name
