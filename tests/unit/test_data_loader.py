"""The loader: rank, microbatch and accumulation do not change what is read, and the cursor is all its state."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.data.loader import Loader, validation_batches
from framework.data.order import SampleOrder
from framework.data.prepared import Prepared, PreparedSource
from framework.data.store import TokenStream

CONTEXT = 4


def make_stream(first: int, num_samples: int) -> TokenStream:
    """Ascending tokens, so that the first token of a sample tells which one it is."""
    tokens = np.arange(first, first + num_samples * CONTEXT + 1, dtype=np.uint32)
    return (
        TokenStream(tokens, np.array([len(tokens)])) if num_samples else TokenStream(tokens[:0], np.empty(0, np.int64))
    )


def make_prepared(sizes: list[int], weights: list[float] | None = None) -> Prepared:
    """Source n holds sizes[n] samples of both splits; its tokens start at 1000 n."""
    sources = []
    for number, size in enumerate(sizes):
        stream = make_stream(1000 * number, size)
        weight = weights[number] if weights else 1.0
        meta: Any = None
        sources.append(PreparedSource(f"s{number}", weight, Path(), meta, {"train": stream, "validation": stream}))
    return Prepared(tuple(sources), Path(), vocab_size=10_000, eos_id=9999, fingerprint="", unigram_entropy=None)


def make_loader(
    prepared: Prepared, b: int = 1, microbatches: int = 1, rank: int = 0, dp: int = 1, **more: Any
) -> Loader:
    return Loader(
        prepared,
        seed=7,
        context=CONTEXT,
        pack="concat",
        sequences_per_microbatch=b,
        num_microbatches=microbatches,
        dp_rank=rank,
        dp_size=dp,
        **more,
    )


def identify(microbatch: Any) -> list[tuple[int, int]]:
    """(source, sample) of each row."""
    first = microbatch.input_ids[:, 0].tolist()
    return [(token // 1000, token % 1000 // CONTEXT) for token in first]


def read_step(prepared: Prepared, cursor: int, b: int, microbatches: int, dp: int) -> list[tuple[int, int]]:
    """The samples of one step in their global order, put together from all ranks as the contract says."""
    found: dict[int, tuple[int, int]] = {}
    for rank in range(dp):
        with make_loader(prepared, b, microbatches, rank, dp) as loader:
            for m, microbatch in enumerate(loader.batch(cursor)):
                for j, sample in enumerate(identify(microbatch)):
                    found[cursor + (m * dp + rank) * b + j] = sample
    return [found[index] for index in sorted(found)]


@settings(deadline=None, max_examples=30)
@given(
    cursor=st.integers(0, 500),
    split=st.sampled_from([(1, 1, 12), (1, 12, 1), (12, 1, 1), (2, 3, 2), (3, 2, 2), (2, 2, 3), (1, 4, 3), (4, 3, 1)]),
)
def test_every_split_of_a_step_reads_equal_samples(cursor: int, split: tuple[int, int, int]) -> None:
    prepared = make_prepared([17, 5], [0.8, 0.2])
    b, microbatches, dp = split
    order = SampleOrder.of(7, {"s0": (0.8, 17), "s1": (0.2, 5)})
    source, sample = order.locate(np.arange(cursor, cursor + 12))
    expected = list(zip(source.tolist(), sample.tolist(), strict=True))
    assert read_step(prepared, cursor, b, microbatches, dp) == expected


@settings(deadline=None, max_examples=20)
@given(size=st.integers(1, 40), b=st.integers(1, 4), microbatches=st.integers(1, 3), dp=st.integers(1, 4))
def test_every_sample_of_an_epoch_exactly_once(size: int, b: int, microbatches: int, dp: int) -> None:
    prepared = make_prepared([size])
    step = b * microbatches * dp
    read: list[tuple[int, int]] = []
    for cursor in range(0, 3 * size + step, step):
        read += read_step(prepared, cursor, b, microbatches, dp)
    for epoch in range(3):
        assert sorted(read[epoch * size : (epoch + 1) * size]) == [(0, sample) for sample in range(size)]


def test_a_layout_change_between_steps_neither_repeats_nor_skips() -> None:
    prepared = make_prepared([48])
    read, cursor = [], 0
    for b, microbatches, dp in [(1, 2, 2), (4, 1, 3), (2, 4, 1), (1, 3, 4), (3, 2, 2)]:
        read += read_step(prepared, cursor, b, microbatches, dp)
        cursor += b * microbatches * dp
    assert cursor == 48
    assert sorted(read) == [(0, sample) for sample in range(48)]


def test_a_jump_reads_what_a_fresh_loader_reads() -> None:
    prepared = make_prepared([50])
    with make_loader(prepared, b=2, microbatches=2) as loader:
        jumped = [[identify(m) for m in loader.batch(cursor)] for cursor in (0, 4, 80, 4, 4, 8)]
    for cursor, found in zip((0, 4, 80, 4, 4, 8), jumped, strict=True):
        with make_loader(prepared, b=2, microbatches=2) as fresh:
            assert found == [identify(m) for m in fresh.batch(cursor)]


class WatchedStream(TokenStream):
    reads: int = 0

    def read(self, start: int, stop: int) -> np.ndarray:
        self.reads += 1
        return super().read(start, stop)


@pytest.mark.parametrize(("b", "steps_read_at_once"), [(3, 10), (40, 1)])
def test_the_following_steps_are_read_in_the_background_and_once(
    monkeypatch: pytest.MonkeyPatch, b: int, steps_read_at_once: int
) -> None:
    monkeypatch.setattr("framework.data.loader.TOKENS_READ_AT_ONCE", 10 * 3 * CONTEXT)
    prepared = make_prepared([50])
    watched = WatchedStream(np.arange(201, dtype=np.uint16), np.array([201]))
    prepared.sources[0].streams["train"] = watched
    with make_loader(prepared, b=b) as loader:
        for step in range(2 * steps_read_at_once):
            loader.batch(step * b)
            loader._thread.submit(lambda: None).result()  # behind the read that goes on in the background
            blocks = 2 + step // steps_read_at_once
            assert watched.reads == blocks * steps_read_at_once * b


def test_data_wait_is_the_time_spent_in_batch() -> None:
    ticks = iter([10.0, 10.5, 20.0, 20.25])
    with make_loader(make_prepared([50]), clock=lambda: next(ticks)) as loader:
        loader.batch(0)
        loader.batch(1)
    assert loader.data_wait_s == 0.75


def test_an_error_while_reading_reaches_the_caller() -> None:
    prepared = make_prepared([50])
    prepared.sources[0].streams["train"].read = lambda start, stop: np.empty(3)  # type: ignore[method-assign]
    with make_loader(prepared) as loader, pytest.raises(ValueError, match="broadcast"):
        loader.batch(0)


def read_validation(sizes: list[int], b: int, dp: int, limit: int | None) -> list[list[list[tuple[int, int] | None]]]:
    """[rank][microbatch][row]: (source, sample), None for a row without labels."""
    prepared, ranks = make_prepared(sizes), []
    for rank in range(dp):
        batches = validation_batches(
            prepared, context=CONTEXT, pack="concat", sequences_per_microbatch=b, dp_rank=rank, dp_size=dp, limit=limit
        )
        ranks.append(
            [
                [s if (labels != -100).any() else None for s, labels in zip(identify(m), m.labels, strict=True)]
                for m in batches
            ]
        )
    return ranks


@settings(deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    b=st.integers(1, 4),
    dp=st.integers(1, 5),
    limit=st.none() | st.integers(1, 40),
)
def test_validation_reads_every_sequence_once_in_equally_many_microbatches(
    sizes: list[int], b: int, dp: int, limit: int | None
) -> None:
    ranks = read_validation(sizes, b, dp, limit)
    assert len({len(microbatches) for microbatches in ranks}) == 1
    read = [row for rank in ranks for microbatch in rank for row in microbatch if row]
    every = {(source, sample) for source, size in enumerate(sizes) for sample in range(size)}
    assert len(read) == len(set(read)) == min(len(every), limit or len(every))
    assert set(read) <= every


def test_limited_validation_is_one_choice_for_every_layout_from_all_sources() -> None:
    choices = [
        {row for rank in read_validation([40, 40], b, dp, 20) for m in rank for row in m if row}
        for b, dp in [(1, 1), (3, 2), (2, 5)]
    ]
    assert choices[0] == choices[1] == choices[2]
    assert {source for source, _ in choices[0]} == {0, 1}


def test_a_microbatch_of_validation_is_of_one_source_the_same_on_all_ranks() -> None:
    """So the loss of a source is a sum over microbatches, and ranks need not say of what each of theirs was."""
    prepared, ranks = make_prepared([7, 1, 4]), []
    for rank in range(2):
        batches = list(
            validation_batches(
                prepared, context=CONTEXT, pack="concat", sequences_per_microbatch=2, dp_rank=rank, dp_size=2
            )
        )
        for each in batches:
            assert all(source == each.source or source == 9 for source, _ in identify(each))  # 9999 fills up
        ranks.append([each.source for each in batches])
    assert ranks[0] == ranks[1] == [0, 0, 1, 2]


@pytest.mark.parametrize("split", [(1, 1, 12), (2, 3, 2), (12, 1, 1)])
def test_a_loader_that_skips_reads_what_is_left_whatever_it_had_read_ahead(split: tuple[int, int, int]) -> None:
    prepared, skipped = make_prepared([200, 90], [0.8, 0.2]), [[5, 17], [40, 41]]
    b, microbatches, dp = split
    left = [g for g in range(100) if not (5 <= g < 17 or g == 40)]
    order = SampleOrder.of(7, {"s0": (0.8, 200), "s1": (0.2, 90)})
    found: dict[int, tuple[int, int]] = {}
    for rank in range(dp):
        with make_loader(prepared, b, microbatches, rank, dp) as loader:
            before = loader.batch(0)
            loader.skip(skipped)
            for cursor in (0, 12, 24):
                for m, microbatch in enumerate(loader.batch(cursor)):
                    for j, sample in enumerate(identify(microbatch)):
                        found[cursor + (m * dp + rank) * b + j] = sample
            loader.skip(())
            assert [identify(each) for each in loader.batch(0)] == [identify(each) for each in before]
    source, sample = order.locate(np.array(left[:36]))
    assert [found[place] for place in range(36)] == list(zip(source.tolist(), sample.tolist(), strict=True))
