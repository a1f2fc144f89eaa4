"""A rank that writes down what it trains on: `python -m tests.slurm.ledger CURSORS framework.train.program RUN`.

In front of the step of each cursor of the list it stops itself (SIGSTOP), once in the life of the run. One line for each step
that it begins, in RUN/ledger: the cursor, and of each sequence its global number and a digest of its tokens as they are handed
to the step. A file's name begins with the time of the rank's start.
"""

import json
import os
import signal
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

Step = dict[int, str]  # global number of a sequence -> digest of its tokens


def record(run: Path, pauses: list[int]) -> None:
    """Have the loader of this process write its lines from now on, and stop it in front of these cursors."""
    from framework.data.loader import Loader

    folder, started, read = run / "ledger", time.time_ns(), Loader.batch
    folder.mkdir(exist_ok=True)
    file = (folder / f"{started}-{os.environ['SLURM_PROCID']}").open("w", buffering=1)

    def pause(cursor: int) -> None:
        paused = folder / f"paused-{cursor}-{os.environ['SLURM_PROCID']}"
        if cursor in pauses and not paused.exists():
            paused.touch()
            os.kill(os.getpid(), signal.SIGSTOP)

    def batch(self: Loader, cursor: int):
        pause(cursor)
        microbatches = read(self, cursor)
        rows = np.concatenate([each.input_ids.numpy() for each in microbatches])
        numbers = [cursor + int(offset) for offset in self._offsets[0]]
        digests = [xxhash.xxh3_64_hexdigest(row.tobytes()) for row in rows]
        file.write(json.dumps([cursor, list(zip(numbers, digests, strict=True))]) + "\n")
        return microbatches

    Loader.batch = batch


def read_starts(run: Path, starts: list[float]) -> list[dict[int, Step]]:
    """For each start of the ranks the steps that it began: cursor -> sequences of all ranks. starts: their times, in seconds."""
    found: list[dict[int, Step]] = [defaultdict(dict) for _ in starts]
    for path in sorted((run / "ledger").glob("[0-9]*")):
        at = int(path.name.split("-")[0]) / 1e9
        number = max(index for index, start in enumerate(starts) if start <= at)
        for line in path.read_text().split("\n")[:-1]:
            cursor, sequences = json.loads(line)
            for sequence, digest in sequences:
                assert sequence not in found[number][cursor], f"two ranks of start {number} read sequence {sequence}"
                found[number][cursor][sequence] = digest
    return found


if __name__ == "__main__":
    from framework.launch.process import run_process
    from framework.train.program import main

    record(Path(sys.argv[-1]), [int(cursor) for cursor in sys.argv[1].split(",")])
    run_process(partial(main, Path(sys.argv[-1])))
