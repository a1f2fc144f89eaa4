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
# In a stream's folder, the reason why its tokenizer has ended.
FAILED_FILE = "failed"

Say = Callable[[str], None]


class ShardTokens:
    """The elements of shards, one behind the other. A slice is a copy: [n] of `dtype`."""

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype, self._parts, self._starts = dtype, list[np.ndarray](), [0]

    def add(self, part: np.ndarray) -> None:
        self._parts.append(part)
        self._starts.append(self._starts[-1] + len(part))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        first, last = bisect_right(self._starts, start) - 1, bisect_right(self._starts, stop - 1)
        shards = range(first, last) if start < stop else ()
        parts = [self._parts[each][max(0, start - self._starts[each]) : stop - self._starts[each]] for each in shards]
        return np.concatenate([np.empty(0, self.dtype), *parts])


class GrowingStream(TokenStream):
    """A split of the first `num_shards` shards of a store."""

    def __init__(self, name: str, folder: Path, meta: StoreMeta, split: Split, num_shards: int) -> None:
        self.tokens: ShardTokens
        self.trained: ShardTokens | None
        trained = ShardTokens(TRAINED_DTYPE) if meta.is_masked else None
        super().__init__(ShardTokens(np.dtype(meta.dtype)), np.empty(0, ENDS_DTYPE), trained=trained)
        self.num_shards, self._num_open = num_shards, 0
        self._name, self._folder, self._split = name, folder, split
        self._grow()

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
            failed = self._folder / FAILED_FILE
            reason = failed.read_text() if failed.exists() else None  # before: what it has written until then counts
            self._grow()
            if reason is not None and self.num_tokens < num_tokens and not self.is_whole:
                raise DataError(
                    f"the tokenizer beside the run has ended, with {self._num_open:,} of {self.num_shards:,} shards of"
                    f" data.sources.{self._name}: {reason}. The next start goes on with the others"
                )
        return self.num_tokens >= num_tokens or self.is_whole

    def _grow(self) -> None:
        """Open the next shards that are there."""
        ends, count = [self.ends], self.num_tokens
        while not self.is_whole and (report := ShardReport.read(shard_path(self._folder, self._num_open, "json"))):
            if split := report.splits.get(self._split):
                sizes = {"tokens": self.tokens.dtype, "ends": ENDS_DTYPE, "trained": TRAINED_DTYPE}
                lengths = {"tokens": split.num_tokens, "ends": split.num_documents, "trained": split.num_tokens}
                found = {
                    kind: map_file(
                        shard_path(self._folder, self._num_open, f"{self._split}.{kind}"), dtype, lengths[kind]
                    )
                    for kind, dtype in sizes.items()
                    if kind != "trained" or self.trained is not None
                }
                if hash_shard(found["tokens"], found["ends"], found.get("trained")) != split.checksum:
                    path = shard_path(self._folder, self._num_open, self._split)
                    raise DamagedStore(
                        explain_damage(f"{path}.*: the files of this shard are not as they were written")
                    )
                self.tokens.add(found["tokens"])
                if self.trained is not None:
                    self.trained.add(found["trained"])
                ends.append(found["ends"] + count)
                count += split.num_tokens
            self._num_open += 1
        self.ends = np.concatenate(ends)
