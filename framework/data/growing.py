"""A stream's store as a run reads it: shards that come one after another, until all of them are there.

The shards of a stream are numbered in the order in which they are read (jobs.py), so what is there is the beginning of one
sequence of tokens, and a sample is where it will always be. Whoever needs tokens that are not there yet waits for them, and says
so; a tokenizer that has ended without them is an error with its reason (beside.py).
"""

import threading
import time
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path

import numpy as np

from framework.data.shard import ShardReport, hash_shard, shard_path
from framework.data.store import ENDS_DTYPE, TRAINED_DTYPE, Split, StoreMeta, TokenStream, explain_damage, map_file
from framework.errors import DamagedStore, DataError

# Tokens of a window of samples that are shuffled among themselves: some seconds of tokenizing on a few cores.
WINDOW_TOKENS = 1 << 21
LOOK_EVERY_S, SAY_AFTER_S, SAY_EVERY_S = 0.2, 5.0, 60.0

Say = Callable[[str], None]


def count_window(context: int) -> int:
    """Samples of a window, in rows of `context` tokens."""
    return max(1, WINDOW_TOKENS // context)


def find_next_window(samples: int, was: int, now: int) -> int:
    """Samples of `now` tokens up to the first window that has none of the tokens of so many samples of `was` tokens: within a
    window the two orders are of different permutations, so it is not gone on with."""
    window_was, window_now = count_window(was), count_window(now)
    tokens = -(-samples // window_was) * window_was * was
    return -(-tokens // (window_now * now)) * window_now


class ShardTokens:
    """The elements of shards, one behind the other. A slice is a copy: [n] of `dtype`. starts: of each shard, and the end."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype, self.parts, self.starts = dtype, list[np.ndarray](), [0]

    def add(self, part: np.ndarray) -> None:
        self.parts.append(part)
        self.starts.append(self.starts[-1] + len(part))

    def find(self, start: int, stop: int) -> range:
        """The shards that have elements [start, stop)."""
        return range(bisect_right(self.starts, start) - 1, bisect_right(self.starts, stop - 1))

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        shards = self.find(start, stop) if start < stop else ()
        parts = [self.parts[each][max(0, start - self.starts[each]) : stop - self.starts[each]] for each in shards]
        return np.concatenate([np.empty(0, self.dtype), *parts])


class GrowingStream(TokenStream):
    """A split of the first `num_shards` shards of a store. It has document ends by shard alone (`ends_within`). failed: the file
    of the store that says why this run's tokenizer has ended."""

    def __init__(
        self, name: str, folder: Path, meta: StoreMeta, split: Split, num_shards: int, failed: str = "failed"
    ) -> None:
        self.tokens: ShardTokens
        self.trained: ShardTokens | None
        trained = ShardTokens(TRAINED_DTYPE) if meta.is_masked else None
        super().__init__(ShardTokens(np.dtype(meta.dtype)), np.empty(0, ENDS_DTYPE), trained=trained)
        self.num_shards, self._num_open = num_shards, 0
        self._name, self._folder, self._split, self._failed = name, folder, split, folder / failed
        self._ends: list[np.ndarray] = []  # of shards that have documents, from their starts
        self._unverified: dict[int, tuple[Path, str]] = {}  # path and checksum of those that were not read yet
        self.reason: str | None = None  # why the tokenizer has ended, where this process has started it
        self._grow()

    @property
    def num_documents(self) -> int:
        return sum(map(len, self._ends))

    def ends_within(self, start: int, stop: int) -> np.ndarray:
        """The document ends e with start < e <= stop, relative to `start`: int64, ascending."""
        self._verify("ends", start, stop)
        parts = [np.empty(0, ENDS_DTYPE)]
        for shard in self.tokens.find(start, stop):
            first, ends = self.tokens.starts[shard], self._ends[shard]
            low, high = np.searchsorted(ends, (start - first, stop - first), side="right")
            parts.append(ends[low:high] + (first - start))
        return np.concatenate(parts)

    def verify(self) -> None:
        """Raise DamagedStore unless all that is there is as it was written."""
        self._verify("tokens", 0, self.num_tokens)

    def _verify(self, kind: str, start: int, stop: int) -> None:
        """Verify the shards that have these tokens, all files of each, when it is first read: a run that goes on has terabytes
        behind it that it reads no more."""
        for shard in self.tokens.find(start, stop) if start < stop else ():
            if shard in self._unverified:
                path, checksum = self._unverified[shard]
                trained = None if self.trained is None else self.trained.parts[shard]
                if hash_shard(self.tokens.parts[shard], self._ends[shard], trained) != checksum:
                    raise DamagedStore(explain_damage(f"{path}.*: this shard's files are not as they were written"))
                del self._unverified[shard]

    @property
    def is_whole(self) -> bool:
        return self._num_open == self.num_shards

    def wait_for(self, num_tokens: int, is_over: threading.Event, say: Say | None) -> None:
        """Wait until so many tokens are there, or all of them; or until `is_over`. say: prints a line. DataError where the
        tokenizer has ended before."""
        started = told = time.monotonic()
        while not self._has(num_tokens) and not is_over.wait(LOOK_EVERY_S):
            now = time.monotonic()
            if say is not None and now - started > SAY_AFTER_S and (told == started or now - told > SAY_EVERY_S):
                told = now
                say(
                    f"waiting for tokens of data.sources.{self._name}: {self._num_open:,} of {self.num_shards:,} shards are"
                    f" there, tokenized beside the run (data.mode=stream)"
                )

    def _has(self, num_tokens: int) -> bool:
        if self.num_tokens < num_tokens and not self.is_whole:
            # Before `_grow`: what it has written until then counts.
            reason = self.reason or (self._failed.read_text() if self._failed.is_file() else None)
            self._grow()
            if reason is not None and self.num_tokens < num_tokens and not self.is_whole:
                raise DataError(
                    f"the tokenizer beside the run has ended, with {self._num_open:,} of {self.num_shards:,} shards of"
                    f" data.sources.{self._name}: {reason}. The next start goes on with the others"
                )
        return self.num_tokens >= num_tokens or self.is_whole

    def _grow(self) -> None:
        """Open the next shards that are there."""
        while not self.is_whole and (report := ShardReport.read(shard_path(self._folder, self._num_open, "json"))):
            if split := report.splits.get(self._split):
                path = shard_path(self._folder, self._num_open, self._split)
                files = {"tokens": (self.tokens.dtype, split.num_tokens), "ends": (ENDS_DTYPE, split.num_documents)}
                if self.trained is not None:
                    files["trained"] = TRAINED_DTYPE, split.num_tokens
                found = {kind: map_file(path.with_name(f"{path.name}.{kind}"), *file) for kind, file in files.items()}
                self._unverified[len(self._ends)] = path, split.checksum
                self.tokens.add(found["tokens"])
                if self.trained is not None:
                    self.trained.add(found["trained"])
                self._ends.append(found["ends"])
            self._num_open += 1
