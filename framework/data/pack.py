"""Pack documents into sequences: sample i of a token stream as input, labels and positions, and slices for context parallelism.

Identity: a stream of N tokens x has ceil((N - 1) / T) samples; sample i has, for t in [0, T) and n = i T + t,

    input_ids[t] = x[n]        labels[t] = x[n + 1]        so each token but the first is a label exactly once.

The last sample is padded with the end-of-sequence id and labels of -100: no token is dropped, however small the stream.

`concat`: documents follow one another, as GPT is trained. The end-of-sequence id is an ordinary token: it is predicted, and the
first token of the next document is predicted from it. Attention crosses documents; there are no position ids.
`documents`: positions restart at each document, by which the model keeps attention inside it. The label of an end-of-sequence
id would be the first token of an unrelated document, so it is -100. A document that a sample's border cuts restarts at
position 0 in the next sample, since its beginning is not there to attend to.
`best_fit`: rows of whole documents (`order.py`), kept apart as in `documents`; what is left of a row is one more document,
without labels. The default for conversations.
`alone`: one document in each row, filled up without labels.

Of conversations only the tokens that an assistant says are labels, in every mode.

Context parallelism cuts whole sequences once, after packing (`cut_context`). Labels are shifted and positions counted by then, so
no rank looks beyond its slices for them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Literal

import numpy as np
import torch

from framework.data.order import Overlong, Rows
from framework.data.store import TokenStream
from framework.mesh.token_layout import ContextSlices
from framework.model.loss import IGNORE
from framework.model.objective import Pairs
from framework.parallel.attention import Documents

NO_SAMPLE = -1

# Modes whose rows are of whole documents.
WHOLE = ("best_fit", "alone")
Mode = Literal["concat", "documents", "best_fit", "alone"]
Asked = Literal["loss", "answers", "documents"]


@dataclass(frozen=True)
class Microbatch:
    """The tokens of one forward pass of one rank. All tensors but `sources` and those of `pairs`: [b, T] int64 on the CPU,
    contiguous."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    """labels[:, t] is the target of input t (already shifted); -100: no loss."""
    position_ids: torch.Tensor | None
    """None: 0 to T - 1 in each row."""
    source: int = 0
    """In validation, the number of the source of all rows."""
    documents: Documents | None = None
    """The documents of whole sequences, of which attention keeps inside; None where each sequence is one."""
    pairs: Pairs | None = None
    """The documents that are answers to compare, or scored; None where none are."""
    sources: torch.Tensor | None = None
    """[b] int64: the number of each row's source; None where sources are not told apart."""
    asks: Asked = "loss"
    """The result of a forward that does not train: the sum of the losses; [b, S] of `Answers.log_p`; [2, b, S] of
    `Statistics.score_documents`."""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Microbatch":
        """Apply `change` to every tensor, each of b rows."""
        positions = None if self.position_ids is None else change(self.position_ids)
        pairs = None if self.pairs is None else self.pairs.map(change)
        sources = None if self.sources is None else change(self.sources)
        ids, labels = change(self.input_ids), change(self.labels)
        return replace(self, input_ids=ids, labels=labels, position_ids=positions, pairs=pairs, sources=sources)

    def select(self, first: int, stop: int) -> "Microbatch":
        """The sequences first .. stop - 1, contiguous views."""
        documents = None if self.documents is None else self.documents.select(first, stop)
        return replace(self.map(itemgetter(slice(first, stop))), documents=documents)


def count_samples(num_tokens: int, context: int) -> int:
    """The number of samples of a stream, ceil((num_tokens - 1) / context); 0 without a token to predict."""
    return max(0, -(-(num_tokens - 1) // context))


@dataclass(frozen=True)
class Packer:
    """Packs samples of several streams.  context: tokens of a sample (T); eos_id: the padding; keys: of each stream, which draw
    the order of equally long documents."""

    streams: Sequence[TokenStream]
    context: int
    mode: Mode
    eos_id: int
    overlong: Overlong = "skip"
    keys: Sequence[int] = ()
    asks: Asked = "loss"

    @cached_property
    def sizes(self) -> list[int]:
        """The number of samples of each stream."""
        if self.mode in WHOLE:
            return [rows.num_rows for rows in self._rows]
        return [self.count(number) for number in range(len(self.streams))]

    def count(self, number: int) -> int:
        """The number of samples of a stream, whose rows are not of whole documents, as it is now."""
        return count_samples(self.streams[number].num_tokens, self.context)

    @cached_property
    def _rows(self) -> list[Rows]:
        keys = self.keys or [0] * len(self.streams)
        return [
            Rows.of(stream, self.context, self.overlong, key, self.mode == "alone")
            for stream, key in zip(self.streams, keys, strict=True)
        ]

    def pack(self, source: np.ndarray, sample: np.ndarray) -> Microbatch:
        """Pack sample `sample[k]` of stream `source[k]` into row k, which has no labels if `sample[k]` is NO_SAMPLE.

        source, sample: [n] int64 -> tensors of [n, T].
        """
        self.ask(source, sample)
        shape = (len(sample), self.context)
        input_ids = np.full(shape, self.eos_id, dtype=np.int64)
        labels = np.full(shape, IGNORE, dtype=np.int64)
        starts = np.zeros(shape, dtype=np.int64) if self.mode in ("documents", "best_fit") else None
        # In the order of the files: what lies together is looked for, or decoded, once.
        for row in np.lexsort((sample, source)).tolist():
            if sample[row] != NO_SAMPLE:
                begins, stops = self._find_pieces(int(source[row]), int(sample[row]))
                stream, of_documents = self.streams[int(source[row])], None if starts is None else starts[row]
                self._fill(stream, begins, stops, input_ids[row], labels[row], of_documents)
        has_pairs = self.asks != "loss" or any(stream.is_paired for stream in self.streams)
        pairs = self._list_pairs(source, sample) if has_pairs else None
        positions = self._count_positions(starts)
        return Microbatch(torch.from_numpy(input_ids), torch.from_numpy(labels), positions, pairs=pairs, asks=self.asks)

    def ask(self, source: np.ndarray, sample: np.ndarray) -> None:
        """Start to fetch what these samples are packed of, as in `pack`, and do not wait."""
        for number, each in zip(source.tolist(), sample.tolist(), strict=True):
            stream = self.streams[number]
            if each != NO_SAMPLE and not stream.is_mapped:
                for start, stop in zip(*self._find_pieces(number, each), strict=True):
                    stream.ask(int(start), int(stop))

    def _find_pieces(self, source: int, sample: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens [start, stop) of which a sample is packed, behind one another: [pieces] int64 each."""
        if self.mode in WHOLE:
            rows = self._rows[source]
            pieces = slice(int(rows.first[sample]), int(rows.first[sample + 1]))
            return rows.starts[pieces], rows.stops[pieces]
        start = sample * self.context
        return np.array([start]), np.array([min(start + self.context + 1, self.streams[source].num_tokens)])

    @cached_property
    def _most_documents(self) -> int:
        """Documents of the fullest row; at least those of a pair."""
        return max(2, *(int(np.diff(rows.first, prepend=0).max(initial=0)) for rows in self._rows))

    def _list_pairs(self, source: np.ndarray, sample: np.ndarray) -> Pairs:
        """The documents of rows as in `pack`, [n, T] and [n, most documents of a row]."""
        shape = (len(sample), self._most_documents)
        places = np.zeros((len(sample), self.context), dtype=np.int64)
        kinds, numbers, reference = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape)
        for row, (number, sampled) in enumerate(zip(source.tolist(), sample.tolist(), strict=True)):
            if sampled == NO_SAMPLE:
                continue
            stream, (starts, stops) = self.streams[number], self._find_pieces(number, sampled)
            filled = np.repeat(np.arange(len(starts)), stops - starts - 1)
            places[row, : len(filled)] = filled
            for piece, stop in enumerate(stops.tolist()):
                kinds[row, piece : piece + 1] = stream.read_trained(stop - 1, stop)
            numbers[row, : len(starts)] = np.searchsorted(stream.ends, starts, side="right")
            if stream.reference is not None:
                reference[row, : len(starts)] = stream.reference[numbers[row, : len(starts)]]
        is_known = all(stream.reference is not None for stream in self.streams)
        known = torch.from_numpy(reference) if is_known else None
        return Pairs(torch.from_numpy(places), torch.from_numpy(kinds), torch.from_numpy(numbers), known)

    def _fill(
        self,
        stream: TokenStream,
        begins: np.ndarray,
        stops: np.ndarray,
        input_ids: np.ndarray,
        labels: np.ndarray,
        starts: np.ndarray | None,
    ) -> None:
        """Fill one row with pieces of a stream, [T] each. starts: at a document's first token its index in the row, else 0."""
        place = 0
        for start, stop in zip(begins.tolist(), stops.tolist(), strict=True):
            end = place + stop - start - 1
            tokens, trained = stream.read(start, stop), stream.read_trained(start, stop)
            following = tokens[1:].astype(np.int64)
            input_ids[place:end] = tokens[:-1]
            labels[place:end] = following if trained is None else np.where(trained[1:], following, IGNORE)
            if starts is not None and self.mode in WHOLE:
                starts[place] = place
            elif starts is not None:
                ends = stream.ends_within(start, stop - 1)
                labels[ends - 1] = IGNORE
                inside = ends[ends < self.context]
                starts[inside] = inside
            place = end
        if starts is not None and self.mode in WHOLE and place < self.context:
            starts[place] = place  # what is left is one more

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
    beyond = torch.arange(1, slices.padding + 1)  # the last document counts on over the padding
    positions = row if given is None else torch.cat([given, given[:, -1:] + beyond], dim=1)
    return replace(
        rows,
        input_ids=slices.cut(rows.input_ids, 0),
        labels=slices.cut(rows.labels, IGNORE),
        # A table of positions has no row for those beyond the context.
        position_ids=slices.padded().cut(positions.clamp(max=context - 1), 0),
        documents=documents,
        pairs=None if rows.pairs is None else replace(rows.pairs, places=slices.cut(rows.pairs.places, 0)),
    )
