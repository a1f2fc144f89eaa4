"""The ledger of samples (`track.sample_ledger`): the samples that each step consumed, with a hash of their tokens.

Each data-parallel rank writes RUN/samples/dp-N.jsonl, whatever the layout: at each start of the ranks, and at each rewind, a line
with its number and the cursor from which it goes on, then for each step a line with the samples and a hash of each one's tokens.
Samples that a start has read behind the cursor of a later one were lost with its weights; the rest is the final lineage, in which
every sample must be once: behind the cursor with which a branch begins, and in each stage of a run by itself, for samples of two
stages may be others of the same number. With parallel.cp a hash is of the tokens that the first rank of `cp` holds.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from framework.data.order import Skipped, index_samples
from framework.data.pack import Microbatch
from framework.track.jsonl import Lines, read_lines

FOLDER = "samples"
# The number of wrong samples that a message names, of perhaps millions.
SHOWN = 5


@dataclass(frozen=True)
class SampleLineage:
    """The samples that the weights have seen in a stage. tokens: (sample, hash of its tokens), in the order of the samples,
    repeated ones too. cursors: of each start, by its number: one that is lower than the one before marks a rewind."""

    tokens: tuple[tuple[int, str], ...]
    cursors: tuple[int, ...]


class SampleLedger:
    """Writes the samples of one data-parallel rank, a line for each step.

    dp_rank: None on a rank whose samples another rank writes. stage: steps done before the stage of the run begins.
    """

    def __init__(self, run_dir: Path, dp_rank: int | None, stage: int = 0) -> None:
        self._run_dir, self._dp_rank, self._stage = run_dir, dp_rank, stage
        self._file: Lines | None = None
        self._start = 0

    def begin(self, start: int, cursor: int) -> None:
        """Note that a start of the ranks, or a rewind, reads from `cursor` on. start: its number, from `next_start`."""
        if self._dp_rank is None:
            return
        if self._file is None:
            (self._run_dir / FOLDER).mkdir(exist_ok=True)
            self._file = Lines(self._run_dir / FOLDER / f"dp-{self._dp_rank}.jsonl")
        self._start = start
        self._file.append({"start": start, "cursor": cursor, "stage": self._stage})

    def note(self, cursor: int, samples: np.ndarray, microbatches: Sequence[Microbatch]) -> None:
        """Note the samples of the step at `cursor`: [n], in the order of the microbatches' rows."""
        if self._file is not None:
            rows = [hash_tokens(each, row) for each in microbatches for row in range(len(each.input_ids))]
            self._file.append({"start": self._start, "at": cursor, "samples": samples.tolist(), "tokens": rows})


def hash_tokens(microbatch: Microbatch, row: int) -> str:
    """A hash of a row's tokens, labels and positions, in 16 hex digits."""
    digest = xxhash.xxh3_64(microbatch.input_ids[row].numpy().tobytes())
    digest.update(microbatch.labels[row].numpy().tobytes())
    if microbatch.position_ids is not None:
        digest.update(microbatch.position_ids[row].numpy().tobytes())
    return digest.hexdigest()


def next_start(run_dir: Path) -> int:
    """The number of the next start of the ranks, from 0 on."""
    return 1 + max((record["start"] for record in _read_records(run_dir)), default=-1)


def read_lineage(run_dir: Path, stage: int | None = None) -> SampleLineage:
    """The final lineage of a run with a ledger. stage: steps done before a stage of the run begins; None: of the last start's."""
    records = list(_read_records(run_dir))
    begun = {record["start"]: (record.get("stage", 0), record["cursor"]) for record in records if "cursor" in record}
    if stage is None:
        stage = begun[max(begun)][0] if begun else 0
    cursors = tuple(begun[start][1] for start in sorted(begun) if begun[start][0] == stage)
    # A start's samples count as far as every later start: all of them if that is of a later stage, none if of an earlier one.
    ends = {start: min((begun[later] for later in begun if later > start), default=None) for start in begun}
    tokens = [
        (sample, tokens)
        for record in records
        if "samples" in record
        for sample, tokens in zip(record["samples"], record["tokens"], strict=True)
        if begun[record["start"]][0] == stage
        if (end := ends[record["start"]]) is None or (stage, record["at"]) < end
    ]
    return SampleLineage(tuple(sorted(tokens)), cursors)


def find_ledger_problems(
    lineage: SampleLineage, num_samples: int, undisturbed: SampleLineage | None = None, skipped: Skipped = ()
) -> list[str]:
    """The errors of a lineage, in words: samples that are lost, read more than once or not to be read, of the first `num_samples`
    of the stage that are not `skipped`; and tokens that differ from those of an undisturbed run."""
    counts = Counter(sample for sample, _ in lineage.tokens)
    first = min(lineage.cursors, default=0)
    expected = dict.fromkeys(index_samples(np.arange(first, num_samples), skipped).tolist())
    found = {
        "lost": [sample for sample in expected if not counts[sample]],
        "read more than once": [sample for sample, count in counts.items() if count > 1],
        "not of these steps": [sample for sample in counts if sample not in expected],
    }
    if undisturbed is not None:
        theirs = dict(undisturbed.tokens)
        found["of other tokens"] = [sample for sample, tokens in lineage.tokens if theirs.get(sample, tokens) != tokens]
    return [
        f"{len(samples):,} samples are {what}: {', '.join(map(str, samples[:SHOWN]))}{' ...' if len(samples) > SHOWN else ''}"
        for what, samples in found.items()
        if samples
    ]


def _read_records(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The records of all ranks."""
    return chain.from_iterable(map(read_lines, sorted((run_dir / FOLDER).glob("dp-*.jsonl"))))
