"""run.json: a run's id and birth, its launches, and what a launch has written into the folder (identity.py).

    {"xxh3": HASH OF ALL ELSE, "id": ..., "created": ..., "birth": ..., "launches": [...], "recipe": {KEY: VALUE},
     "tokenizer": HASH}

Training reads none of it but the birth and what is compared, so a damaged record is no reason to refuse a run: the next launch
makes it anew. What it knew of earlier launches is lost then, and said to be.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from framework.errors import RunError
from framework.files import PRIVATE, write_file

SEAL = "xxh3"


def first_record(run_id: str) -> dict[str, Any]:
    """The record of a run that nobody has launched."""
    return {"id": run_id, "created": now(), "birth": _draw_birth(), "launches": []}


def begin_anew(path: Path) -> dict[str, Any]:
    """The record of a run whose own is gone or damaged, which is said."""
    print(f"{path} was gone or damaged, and is made anew without earlier launches", file=sys.stderr)
    return first_record(path.parent.name)


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write run.json. Its hash shows a changed value as surely as a cut file."""
    text = json.dumps({SEAL: _hash(record), **record}, indent=2)
    write_file(path, f"{text}\n".encode(), PRIVATE)


def read_record(path: Path) -> dict[str, Any]:
    """The values of run.json. RunError where they are not as they were written; those of an earlier version have no hash."""
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        seal = values.pop(SEAL, None)
        is_whole = isinstance(values["launches"], list) and seal in (None, _hash(values))
    except (ValueError, TypeError, KeyError, AttributeError):
        is_whole = False
    if not is_whole:
        raise RunError(
            f"{path} was cut or changed after it was written: who has launched the run, and its jobs, cannot be read. A resume on"
            " this machine makes it anew. Else see that no job of the run waits or runs, and remove the file"
        )
    return values


def now() -> str:
    """The time as people read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S %z")


def _hash(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())


def _draw_birth() -> str:
    """A name of a new run that none before it has had, and that sorts behind theirs: nanoseconds of the clock, and chance."""
    return f"{time.time_ns():016x}-{os.urandom(4).hex()}"
