"""Slices of microbatches: what the ranks of cp hold is the whole microbatch, with labels and positions of the whole sequence."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework.data.loader import validation_batches
from framework.data.pack import Microbatch, cut_context
from framework.mesh.token_layout import ContextSlices
from framework.model.loss import IGNORE
from framework.model.objective import count_tokens
from tests.unit.test_data_loader import CONTEXT, make_loader, make_prepared
from tests.unit.test_data_pack import DOCUMENTS, pack_all

degrees = st.tuples(st.integers(1, 3), st.integers(1, 3)).filter(lambda of: of != (1, 1))


def all_ranks(context: int, of: tuple[int, int]) -> list[ContextSlices]:
    return [ContextSlices(context, *of, rank) for rank in range(of[0] * of[1])]


def join(slices: ContextSlices, parts: list[torch.Tensor]) -> torch.Tensor:
    return slices.join(torch.stack(parts))


@given(documents=DOCUMENTS, context=st.integers(1, 17), of=degrees, mode=st.sampled_from(["concat", "documents"]))
def test_ranks_together_have_the_microbatch_and_padding_is_in_no_loss(
    documents: list[list[int]], context: int, of: tuple[int, int], mode: str
) -> None:
    whole = pack_all(documents, context, mode)
    everyone = all_ranks(context, of)
    cut = [cut_context(whole, slices) for slices in everyone]
    for name in ("input_ids", "labels"):
        assert torch.equal(join(everyone[0], [getattr(each, name) for each in cut]), getattr(whole, name))
    positions = torch.arange(context).expand_as(whole.input_ids) if whole.position_ids is None else whole.position_ids
    found = [each.position_ids for each in cut if each.position_ids is not None]
    assert torch.equal(join(everyone[0], found), positions)
    counts = [count_tokens(each.labels, None) for each in cut]
    assert torch.equal(torch.stack(counts).sum(0), count_tokens(whole.labels, None))
    for slices, each in zip(everyone, cut, strict=True):
        assert (each.labels[:, slices.valid_local :] == IGNORE).all()
        assert all(x.is_contiguous() for x in (each.input_ids, each.labels, each.position_ids) if x is not None)
        assert each.position_ids is not None
        assert int(each.position_ids.max()) < context
        assert mode == "documents" or each.documents is None


@given(documents=DOCUMENTS, context=st.integers(1, 17), of=degrees)
def test_every_rank_knows_where_documents_begin(documents: list[list[int]], context: int, of: tuple[int, int]) -> None:
    whole = pack_all(documents, context, "documents")
    assert whole.position_ids is not None
    starts = (whole.position_ids == 0) * torch.arange(context)
    everyone = all_ranks(context, of)
    expected = starts.cummax(dim=1).values
    for slices in everyone:
        documents = cut_context(whole, slices).documents
        if documents is None:
            assert not expected.any()
            continue
        first = documents.first_rows(torch.device("cpu"))
        assert torch.equal(first[:, :context], expected)
        assert (first[:, context:] == expected[:, -1:]).all(), "padding goes on with the last document"


def test_one_rank_reads_what_it_always_did() -> None:
    rows = Microbatch(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64), None)
    assert cut_context(rows, ContextSlices(4)) == rows


def test_the_loader_and_the_validation_give_each_rank_its_slices() -> None:
    prepared = make_prepared([5, 4])
    everyone = all_ranks(CONTEXT, (1, 2))
    options = {"context": CONTEXT, "pack": "documents", "sequences_per_microbatch": 2}
    whole = list(validation_batches(prepared, **options))  # type: ignore[arg-type]
    parts = [list(validation_batches(prepared, slices=each, **options)) for each in everyone]  # type: ignore[arg-type]
    with make_loader(prepared, b=2, microbatches=2) as loader:
        whole += loader.batch(3)
    for own, slices in zip(parts, everyone, strict=True):
        with make_loader(prepared, b=2, microbatches=2, slices=slices) as loader:
            own += loader.batch(3)
    for of_all, *of_ranks in zip(whole, *parts, strict=True):
        assert {each.source for each in of_ranks} == {of_all.source}
        assert torch.equal(join(everyone[0], [each.labels for each in of_ranks]), of_all.labels)
        assert torch.equal(join(everyone[0], [each.input_ids for each in of_ranks]), of_all.input_ids)
    assert np.shape(parts[0][-1].input_ids) == (2, CONTEXT // 2)
