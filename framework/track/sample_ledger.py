"""The ledger of samples (`track.sample_ledger`): which samples each step consumed, and what their tokens were.

Each data-parallel rank writes RUN/samples/dp-N.jsonl, whatever the layout: at each start of the ranks, and at each rewind, a line
with its number and the cursor from which it goes on, then for each step a line with the samples and a hash of each one's tokens.
What a start has read behind the cursor of a later one was lost with its weights; the rest is the final lineage, in which every
sample must be once. With parallel.cp a hash is of the tokens that the first rank of `cp` holds.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import xxhash

from framework.comm.connect import Mesh
from framework.comm.objects import broadcast_object
from framework.data.order import Skipped, index_samples
from framework.data.pack import Microbatch

FOLDER = "samples"
# So many wrong samples are named, of perhaps millions.
SHOWN = 5


@dataclass(frozen=True)
class Lineage:
    """What the weights have seen. tokens: (sample, hash of its tokens), in the order of the samples, repeated ones too. cursors:
    that of each start, by its number: a start from a lower one than the one before has read further has rewound the run."""

    tokens: tuple[tuple[int, str], ...]
    cursors: tuple[int, ...]


class SampleLedger:
    """Writes the samples of one data-parallel rank, flushed for each step: a killed process loses nothing."""

    def __init__(self, run_dir: Path, dp_rank: int, start: int, cursor: int) -> None:
        """start: the number of this start of the ranks, from `next_start`; cursor: the first sample that it reads."""
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        path = folder / f"dp-{dp_rank}.jsonl"
        is_torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file: TextIO = path.open("a")
        # A line that a power loss tore must not spoil the one behind it.
        self.begin(start, cursor, before="\n" if is_torn else "")

    def begin(self, start: int, cursor: int, before: str = "") -> None:
        """Another start, or a rewind, reads from `cursor` on."""
        self._start = start
        self._write({"start": start, "cursor": cursor}, before)

    def note(self, cursor: int, samples: np.ndarray, microbatches: Sequence[Microbatch]) -> None:
        """The step at `cursor` reads samples [n], in the order of the microbatches' rows."""
        rows = [hash_tokens(each, row) for each in microbatches for row in range(len(each.input_ids))]
        self._write({"start": self._start, "at": cursor, "samples": samples.tolist(), "tokens": rows})

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any], before: str = "") -> None:
        self._file.write(f"{before}{json.dumps(record)}\n")
        self._file.flush()


class LedgerOfRank:
    """The ledger of a rank that may have none: of those that read the same samples one writes."""

    def __init__(self, is_kept: bool, mesh: Mesh, run_dir: Path) -> None:
        self._is_kept, self._mesh, self._run_dir = is_kept, mesh, run_dir
        self._writes = is_kept and all(mesh.axis(name).rank == 0 for name in ("pp", "cp", "tp"))
        self._ledger: SampleLedger | None = None

    def begin(self, cursor: int) -> None:
        """A start of the ranks, or a rewind, reads from `cursor` on. Collective over the world: all note one number."""
        if not self._is_kept:
            return
        start = broadcast_object(partial(next_start, self._run_dir), self._mesh.axis("world"))
        if self._ledger is not None:
            self._ledger.begin(start, cursor)
        elif self._writes:
            self._ledger = SampleLedger(self._run_dir, self._mesh.axis("dp").rank, start, cursor)

    def note(self, cursor: int, samples: np.ndarray, microbatches: Sequence[Microbatch]) -> None:
        """As `SampleLedger.note`."""
        if self._ledger is not None:
            self._ledger.note(cursor, samples, microbatches)


def hash_tokens(microbatch: Microbatch, row: int) -> str:
    """16 hex digits of a row's tokens, labels and positions."""
    digest = xxhash.xxh3_64(microbatch.input_ids[row].numpy().tobytes())
    digest.update(microbatch.labels[row].numpy().tobytes())
    if microbatch.position_ids is not None:
        digest.update(microbatch.position_ids[row].numpy().tobytes())
    return digest.hexdigest()


def next_start(run_dir: Path) -> int:
    """The number of the next start of the ranks, from 0 on."""
    return 1 + max((record["start"] for record in _read_records(run_dir)), default=-1)


def read_lineage(run_dir: Path) -> Lineage:
    """The final lineage of a run with a ledger."""
    records = list(_read_records(run_dir))
    begun = {record["start"]: record["cursor"] for record in records if "cursor" in record}
    cursors = tuple(begun[start] for start in sorted(begun))
    # Of a start counts what lies before the cursor of every later one.
    ends = {start: min((begun[later] for later in begun if later > start), default=None) for start in begun}
    tokens = [
        (sample, tokens)
        for record in records
        if "samples" in record
        for sample, tokens in zip(record["samples"], record["tokens"], strict=True)
        if (end := ends[record["start"]]) is None or record["at"] < end
    ]
    return Lineage(tuple(sorted(tokens)), cursors)


def find_ledger_problems(
    lineage: Lineage, num_samples: int, undisturbed: Lineage | None = None, skipped: Skipped = ()
) -> list[str]:
    """What is wrong: samples that are lost, read more than once or not to be read, of the first `num_samples` that are not
    `skipped`; and other tokens than those of an undisturbed run. Nothing is: an empty list."""
    counts = Counter(sample for sample, _ in lineage.tokens)
    expected = dict.fromkeys(index_samples(np.arange(num_samples), skipped).tolist())
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
    """Of all ranks; lines that a crash tore are left out."""
    for path in sorted((run_dir / FOLDER).glob("dp-*.jsonl")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
