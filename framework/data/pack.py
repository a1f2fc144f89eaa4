"""Packing: sample i of a token stream as input, labels and positions.

Identity: a stream of N tokens x has ceil((N - 1) / T) samples; sample i has, for t in [0, T) and n = i T + t,

    input_ids[t] = x[n]        labels[t] = x[n + 1]        so each token but the first is a label exactly once.

The last sample is filled up with the end-of-sequence id and labels of -100: no token is dropped, however small the stream.

`concat`: documents just follow one another, as GPT is trained: the end-of-sequence id is an ordinary token, it is predicted,
and from it the first token of the next document. Attention crosses documents; there are no position ids.
`documents`: positions restart at each document, by which the model keeps attention inside it; the label of an end-of-sequence
id would be the first token of a document that it knows nothing of, and is -100. A document that a sample's border cuts goes
on at position 0 in the next sample, for its beginning is not there to attend to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from framework.data.store import TokenStream
from framework.model.loss import IGNORE

NO_SAMPLE = -1

Mode = Literal["concat", "documents"]


@dataclass(frozen=True)
class Microbatch:
    """The tokens of one forward pass of one rank: [b, T] int64 on the CPU, contiguous.

    labels[:, t] is the target of input t (already shifted); -100: no loss. position_ids None: 0 to T - 1 in each row. source: of
    validation, the number of the source that all rows are of. first_rows: where the tokens are slices of sequences with packed
    documents (`cut_context`), the row of the whole sequence at which each token's document begins.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None
    source: int = 0
    first_rows: torch.Tensor | None = None

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Microbatch":
        """The same with every tensor changed, [b, T] each."""
        positions, first = self.position_ids, self.first_rows
        return Microbatch(
            change(self.input_ids),
            change(self.labels),
            None if positions is None else change(positions),
            self.source,
            None if first is None else change(first),
        )


def count_samples(num_tokens: int, context: int) -> int:
    """ceil((num_tokens - 1) / context): the samples of a stream; 0 without a token to predict."""
    return max(0, -(-(num_tokens - 1) // context))


@dataclass(frozen=True)
class Packer:
    """Packs samples of several streams.  context: tokens of a sample (T); eos_id fills up."""

    streams: Sequence[TokenStream]
    context: int
    mode: Mode
    eos_id: int

    def pack(self, source: np.ndarray, sample: np.ndarray) -> Microbatch:
        """Row k is sample `sample[k]` of stream `source[k]`, or has no labels where `sample[k]` is NO_SAMPLE.

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
        """Fills one row [T]. starts: at the first token of a document its index in the row, else 0."""
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
