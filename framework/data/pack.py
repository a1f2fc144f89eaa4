"""Pack documents into sequences: sample i of a token stream as input, labels and positions, and slices for context parallelism.

Identity: a stream of N tokens x has ceil((N - 1) / T) samples; sample i has, for t in [0, T) and n = i T + t,

    input_ids[t] = x[n]        labels[t] = x[n + 1]        so each token but the first is a label exactly once.

The last sample is padded with the end-of-sequence id and labels of -100: no token is dropped, however small the stream.

`concat`: documents follow one another, as GPT is trained. The end-of-sequence id is an ordinary token: it is predicted, and the
first token of the next document is predicted from it. Attention crosses documents; there are no position ids.
`documents`: positions restart at each document, by which the model keeps attention inside it. The label of an end-of-sequence
id would be the first token of an unrelated document, so it is -100. A document that a sample's border cuts restarts at
position 0 in the next sample, since its beginning is not there to attend to.

Context parallelism cuts whole sequences once, after packing (`cut_context`). Labels are shifted and positions counted by then, so
no rank looks beyond its slices for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal

import numpy as np
import torch

from framework.data.store import TokenStream
from framework.mesh.context import ContextSlices
from framework.model.loss import IGNORE
from framework.parallel.attention import Documents

NO_SAMPLE = -1

Mode = Literal["concat", "documents"]


@dataclass(frozen=True)
class Microbatch:
    """The tokens of one forward pass of one rank. All tensors: [b, T] int64 on the CPU, contiguous."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    """labels[:, t] is the target of input t (already shifted); -100: no loss."""
    position_ids: torch.Tensor | None
    """None: 0 to T - 1 in each row."""
    source: int = 0
    """In validation, the number of the source of all rows."""
    documents: Documents | None = None
    """The documents of whole sequences, of which attention keeps inside; None where each sequence is one."""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Microbatch":
        """Apply `change` to every tensor, each [b, T]."""
        positions = None if self.position_ids is None else change(self.position_ids)
        return Microbatch(change(self.input_ids), change(self.labels), positions, self.source, self.documents)

    def select(self, first: int, stop: int) -> "Microbatch":
        """The sequences first .. stop - 1, contiguous views."""
        documents = None if self.documents is None else self.documents.select(first, stop)
        return replace(self.map(itemgetter(slice(first, stop))), documents=documents)


def count_samples(num_tokens: int, context: int) -> int:
    """The number of samples of a stream, ceil((num_tokens - 1) / context); 0 without a token to predict."""
    return max(0, -(-(num_tokens - 1) // context))


@dataclass(frozen=True)
class Packer:
    """Packs samples of several streams.  context: tokens of a sample (T); eos_id: the padding."""

    streams: Sequence[TokenStream]
    context: int
    mode: Mode
    eos_id: int

    def pack(self, source: np.ndarray, sample: np.ndarray) -> Microbatch:
        """Pack sample `sample[k]` of stream `source[k]` into row k, which has no labels if `sample[k]` is NO_SAMPLE.

        source, sample: [n] int64 -> tensors of [n, T].
        """
        shape = (len(sample), self.context)
        input_ids = np.full(shape, self.eos_id, dtype=np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        starts = np.zeros(shape, dtype=np.int64) if self.mode == "documents" else None
        for row, (stream, number) in enumerate(zip(source.tolist(), sample.tolist(), strict=True)):
            if number != NO_SAMPLE:
                self._fill(
                    self.streams[stream], number, input_ids[row], labels[row], None if starts is None else starts[row]
                )
        return Microbatch(torch.from_numpy(input_ids), torch.from_numpy(labels), self._count_positions(starts))

    def _fill(
        self, stream: TokenStream, sample: int, input_ids: np.ndarray, labels: np.ndarray, starts: np.ndarray | None
    ) -> None:
        """Fill one row, [T] each. starts: at the first token of a document its index in the row, else 0."""
        start = sample * self.context
        tokens = stream.read(start, min(start + self.context + 1, stream.num_tokens))
        count = len(tokens) - 1
        input_ids[:count] = tokens[:-1]
        labels[:count] = tokens[1:]
        if starts is not None:
            ends = stream.ends_within(start, start + count)
            labels[ends - 1] = IGNORE
            inside = ends[ends < self.context]
            starts[inside] = inside

    def _count_positions(self, starts: np.ndarray | None) -> torch.Tensor | None:
        if starts is None:
            return None
        return torch.from_numpy(np.arange(self.context) - np.maximum.accumulate(starts, axis=1))


def cut_context(rows: Microbatch, slices: ContextSlices) -> Microbatch:
    """Cut [b, context] into the tokens that a rank of `cp` holds, [b, tokens_local], all of them where it is one, and find where
    documents begin.

    Padding is token 0 without a label. On more ranks position ids are always set: a rank's tokens do not begin at 0 and are not
    neighbours.
    """
    context, given = slices.context, rows.position_ids
    documents = None if given is None else Documents.read(given, slices.padding)
    if slices.ranks == 1:
        return replace(rows, documents=documents)
    assert rows.input_ids.shape[1] == context, f"sequences of {rows.input_ids.shape[1]} tokens, not of {context}"
    row = torch.arange(context + slices.padding).expand(len(rows.input_ids), -1)
    positions = row if given is None else _count_on(given, slices.padding)
    return Microbatch(
        slices.cut(rows.input_ids, 0),
        slices.cut(rows.labels, IGNORE),
        # A table of positions has no row for those beyond the context.
        slices.padded().cut(positions.clamp(max=context - 1), 0),
        rows.source,
        documents,
    )


def _count_on(positions: torch.Tensor, padding: int) -> torch.Tensor:
    """Continue the positions of the last document over the padding.  positions: [b, T] -> [b, T + padding]."""
    return torch.cat([positions, positions[:, -1:] + torch.arange(1, padding + 1)], dim=1)
