"""RUN/ranks.json: what each rank does just now, which rank 0 writes (watch.py) and `meshwright status` reads, without torch."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from framework.monitor.hang import Line

RANKS_FILE = "ranks.json"


def write_ranks(folder: Path, lines: list[Line]) -> None:
    """RUN/ranks.json, whole or not at all."""
    path = folder / RANKS_FILE
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps({"unix_s": time.time(), "ranks": [vars(line) for line in lines]}))
    os.replace(partial, path)


def read_ranks(folder: Path) -> tuple[float, list[Line]]:
    """When RUN/ranks.json was written, by the wall clock, and its lines; none where there is no such file."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((folder / RANKS_FILE).read_text())
        return found["unix_s"], [Line(**line) for line in found["ranks"]]
    return 0.0, []
