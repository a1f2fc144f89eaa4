"""Rows of whole documents: each once, full to the brim, the same for every split of a step; long ones by the stated policy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.data.loader import Loader, open_packer, validation_batches
from framework.data.order import Rows, SampleOrder, count_overlong, key_of
from framework.data.pack import Packer, cut_context
from framework.data.prepared import Prepared, PreparedSource
from framework.data.store import TokenStream
from framework.errors import DataError
from framework.mesh.token_layout import ContextSlices
from framework.model.loss import IGNORE

CONTEXT = 8
EOS = 9999


def make_stream(lengths: list[int], is_text: bool = False) -> TokenStream:
    """Ascending tokens; of conversations those with an odd number are trained."""
    tokens = np.arange(sum(lengths), dtype=np.uint32)
    trained = None if is_text else (tokens % 2).astype(np.uint8)
    return TokenStream(tokens, np.cumsum(lengths, dtype=np.int64), trained=trained)


def open_prepared(*streams: TokenStream) -> Prepared:
    meta: Any = None
    sources = [
        PreparedSource(f"s{number}", 1.0, Path(), meta, {"train": each, "validation": each})
        for number, each in enumerate(streams)
    ]
    return Prepared(tuple(sources), Path(), vocab_size=10_000, eos_id=EOS, fingerprint="", unigram_entropy=None)


LENGTHS = st.lists(st.integers(1, 14), min_size=1, max_size=30)


@given(lengths=LENGTHS, key=st.integers(0, 2**64 - 1))
def test_each_document_that_fits_is_in_one_row(lengths: list[int], key: int) -> None:
    stream = make_stream(lengths)
    rows = Rows.of(stream, CONTEXT, "skip", key)
    ends = np.cumsum(lengths).tolist()
    fitting = [(end - length, end) for length, end in zip(lengths, ends, strict=True) if 1 < length <= CONTEXT + 1]
    assert sorted(zip(rows.starts.tolist(), rows.stops.tolist(), strict=True)) == fitting
    used = [sum(rows.stops[a:b] - rows.starts[a:b] - 1) for a, b in zip(rows.first[:-1], rows.first[1:], strict=True)]
    assert all(0 < each <= CONTEXT for each in used)
    assert count_overlong(stream, CONTEXT) == sum(length > CONTEXT + 1 for length in lengths)


@given(lengths=LENGTHS)
def test_every_token_of_a_long_text_but_its_first_is_a_label_once(lengths: list[int]) -> None:
    stream = make_stream(lengths, is_text=True)
    packer = Packer([stream], CONTEXT, "best_fit", EOS)
    rows = np.arange(packer.sizes[0])
    labels = packer.pack(np.zeros_like(rows), rows).labels.flatten()
    firsts = {0, *np.cumsum(lengths)[:-1].tolist()}
    assert sorted(labels[labels != IGNORE].tolist()) == [n for n in range(sum(lengths)) if n not in firsts]
    assert count_overlong(stream, CONTEXT) == 0


@given(lengths=LENGTHS, mode=st.sampled_from(["best_fit", "alone", "documents"]))
def test_only_trained_tokens_are_labels_and_of_the_token_before_them(lengths: list[int], mode: Any) -> None:
    packer = Packer([make_stream(lengths)], CONTEXT, mode, EOS)
    rows = np.arange(packer.sizes[0])
    packed = packer.pack(np.zeros_like(rows), rows)
    real = packed.labels != IGNORE
    assert (packed.labels[real] % 2 == 1).all()
    assert (packed.labels[real] == packed.input_ids[real] + 1).all()
    if mode != "documents":
        assert int(real.sum()) == sum(
            int((np.arange(end - length + 1, end) % 2).sum())
            for length, end in zip(lengths, np.cumsum(lengths), strict=True)
            if length <= CONTEXT + 1
        )
    if mode == "alone":
        assert packed.position_ids is None


def test_documents_of_a_row_are_isolated_and_so_is_its_end() -> None:
    packed = cut_context(pack_all(make_stream([4, 3]), "best_fit"), ContextSlices(CONTEXT))
    assert packed.input_ids.tolist() == [[0, 1, 2, 4, 5, EOS, EOS, EOS]]
    assert packed.position_ids is not None
    assert packed.documents is not None
    assert packed.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert packed.documents.starts == ((0, 3, 5),)
    assert packed.labels.tolist() == [[1, IGNORE, 3, 5, IGNORE, IGNORE, IGNORE, IGNORE]]


def pack_all(stream: TokenStream, mode: Any) -> Any:
    packer = Packer([stream], CONTEXT, mode, EOS)
    rows = np.arange(packer.sizes[0])
    return packer.pack(np.zeros_like(rows), rows)


@pytest.mark.parametrize("context", [2048, 4096])
def test_rows_of_a_real_mixture_are_full(context: int) -> None:
    """Lengths as of chats: a lognormal body of some 300 tokens, a long tail."""
    lengths = np.clip(np.random.default_rng(1).lognormal(5.7, 1.0, 4000).astype(int), 8, context + 1)
    rows = Rows.of(make_stream(lengths.tolist()), context, "skip")
    assert rows.fill >= 0.98


def test_rows_follow_from_the_seed_and_lengths_alone() -> None:
    stream = make_stream([3, 4, 3, 4, 5, 3, 2, 2] * 8)
    first, again, other = (Rows.of(stream, CONTEXT, "skip", key_of("s0", seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.starts, again.starts)
    assert first.starts.tolist() != other.starts.tolist()
    assert first.num_rows == other.num_rows


def test_every_split_of_a_step_reads_equal_rows() -> None:
    prepared = open_prepared(make_stream([3, 4, 6, 2, 5] * 12), make_stream([7, 7, 3] * 9))

    def read(cursor: int, b: int, microbatches: int, dp: int) -> list[list[int]]:
        rows: dict[int, list[int]] = {}
        for rank in range(dp):
            options: Any = {"pack": "best_fit", "sequences_per_microbatch": b, "num_microbatches": microbatches}
            with Loader(prepared, seed=7, context=CONTEXT, dp_rank=rank, dp_size=dp, **options) as loader:
                for m, batch in enumerate(loader.batch(cursor)):
                    for j in range(b):
                        rows[(m * dp + rank) * b + j] = batch.input_ids[j].tolist()
        return [rows[each] for each in sorted(rows)]

    whole = read(24, 12, 1, 1)
    assert read(24, 2, 3, 2) == whole
    assert read(24, 1, 4, 3) == whole
    assert read(18, 12, 1, 1)[6:] == whole[:6]
    packer = open_packer(prepared, "train", CONTEXT, "best_fit", seed=7)
    sizes = {source.name: (1.0, size) for source, size in zip(prepared.sources, packer.sizes, strict=True)}
    source, sample = SampleOrder.of(7, sizes).locate(np.arange(24, 36))
    assert packer.pack(source, sample).input_ids.tolist() == whole


def test_validation_reads_each_row_once() -> None:
    prepared = open_prepared(make_stream([3, 4, 6, 2, 5] * 3))
    options: Any = {"context": CONTEXT, "pack": "best_fit", "sequences_per_microbatch": 2, "dp_size": 2}
    parts = [each for rank in (0, 1) for each in validation_batches(prepared, dp_rank=rank, **options)]
    read = sorted(int(label) for part in parts for label in part.labels.flatten() if label != IGNORE)
    assert read == sorted(
        int(each) for each in pack_all(make_stream([3, 4, 6, 2, 5] * 3), "best_fit").labels.flatten() if each != IGNORE
    )


def test_long_conversations_are_left_out_cut_or_refused() -> None:
    stream = make_stream([4, 20, 3])
    skipped, cut = (Packer([stream], CONTEXT, "best_fit", EOS, overlong) for overlong in ("skip", "truncate"))
    assert skipped.sizes == [1]
    assert cut.sizes == [2]
    rows = cut.pack(np.array([0, 0]), np.array([0, 1])).input_ids
    assert rows[0].tolist() == list(range(4, 12))
    with pytest.raises(
        DataError, match=r"1 of 3 conversations, longer than batch.context=8: refused .data.overlong=refuse.. Raise"
    ):
        _ = Packer([stream], CONTEXT, "best_fit", EOS, "refuse").sizes
    prepared = open_prepared(make_stream([20, 30]))
    with pytest.raises(
        DataError, match=r"data.sources.s0: each of its conversations is longer.*data.overlong=truncate"
    ):
        open_packer(prepared, "train", CONTEXT, "best_fit")
    assert open_packer(prepared, "validation", CONTEXT, "best_fit").sizes == [0]
    assert open_packer(replace(prepared), "train", CONTEXT, "best_fit", "truncate").sizes == [2]
