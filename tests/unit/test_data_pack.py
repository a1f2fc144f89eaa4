"""Packing against a ten-line oracle, and against the model that reads it."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from framework.data.pack import NO_SAMPLE, Microbatch, Packer, count_samples
from framework.data.store import TokenStream

EOS = 0


def make_stream(documents: list[list[int]]) -> TokenStream:
    """Documents (without end-of-sequence ids) as a stream."""
    closed = [[*document, EOS] for document in documents]
    tokens = np.array([token for document in closed for token in document], dtype=np.uint16)
    return TokenStream(tokens, np.cumsum([len(document) for document in closed]))


def pack_all(documents: list[list[int]], context: int, mode: str) -> Microbatch:
    stream = make_stream(documents)
    sample = np.arange(count_samples(stream.num_tokens, context))
    return Packer([stream], context, mode, EOS).pack(np.zeros_like(sample), sample)  # type: ignore[arg-type]


def oracle(documents: list[list[int]], context: int) -> list[tuple[int, int, int, int]]:
    """(input, label in concat, label in documents, position in documents) of each token of the whole stream."""
    flat = [(token, place, n) for n, document in enumerate(documents) for place, token in enumerate([*document, EOS])]
    rows, start = [], 0
    for at, ((token, place, document), (following, _, next_document)) in enumerate(pairwise(flat)):
        start = at if place == 0 or at % context == 0 else start
        rows.append((token, following, following if document == next_document else -100, at - start))
    return rows


DOCUMENTS = st.lists(st.lists(st.integers(1, 9), max_size=9), min_size=1, max_size=8).filter(
    lambda documents: sum(map(len, documents)) + len(documents) > 1
)


@given(documents=DOCUMENTS, context=st.integers(1, 12))
def test_concat_equals_the_oracle(documents: list[list[int]], context: int) -> None:
    packed, expected = pack_all(documents, context, "concat"), oracle(documents, context)
    count = len(expected)
    assert packed.input_ids.flatten()[:count].tolist() == [row[0] for row in expected]
    assert packed.labels.flatten()[:count].tolist() == [row[1] for row in expected]
    assert packed.position_ids is None
    assert packed.labels.flatten()[count:].tolist() == [-100] * (packed.labels.numel() - count)
    assert packed.labels.numel() - count < context


@given(documents=DOCUMENTS, context=st.integers(1, 12))
def test_documents_equal_the_oracle(documents: list[list[int]], context: int) -> None:
    packed, expected = pack_all(documents, context, "documents"), oracle(documents, context)
    count = len(expected)
    assert packed.input_ids.flatten()[:count].tolist() == [row[0] for row in expected]
    assert packed.labels.flatten()[:count].tolist() == [row[2] for row in expected]
    assert packed.position_ids is not None
    assert packed.position_ids.flatten()[:count].tolist() == [row[3] for row in expected]


def test_no_sample_has_no_labels() -> None:
    packed = Packer([make_stream([[1, 2, 3]])], 4, "documents", EOS).pack(np.array([0, 0]), np.array([0, NO_SAMPLE]))
    assert packed.labels.tolist() == [[2, 3, EOS, -100], [-100] * 4]
    assert packed.input_ids[1].tolist() == [EOS] * 4


def test_tensors_are_contiguous_int64() -> None:
    packed = pack_all([[1, 2, 3], [4, 5, 6]], 4, "documents")
    for tensor in (packed.input_ids, packed.labels, packed.position_ids):
        assert tensor is not None
        assert tensor.dtype == torch.int64
        assert tensor.is_contiguous()


def test_a_stream_without_a_token_to_predict_has_no_samples() -> None:
    assert [count_samples(num_tokens, 4) for num_tokens in (0, 1, 2, 5, 6)] == [0, 0, 1, 1, 2]


def test_a_model_attends_within_documents_only() -> None:
    """What `documents` promises, asked of a Hugging Face model: a document's logits are those it has alone."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=10, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    documents = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    packed = pack_all(documents, 12, "documents")
    with torch.no_grad():
        together = model(packed.input_ids, position_ids=packed.position_ids, use_cache=False).logits[0]
        alone = [model(torch.tensor([[*document, EOS]]), use_cache=False).logits[0] for document in documents]
    expected = torch.cat(alone)[:11]  # the stream's last token is a label only
    assert (together[:11] - expected).abs().max() < 1e-12
