"""run.json: a run's id and birth, its launches with the software of each, and what a launch has written into the folder
(identity.py).

    {"xxh3": HASH OF ALL ELSE, "id": ..., "created": ..., "birth": ..., "launches": [...], "recipe": {KEY: VALUE},
     "tokenizer": HASH}

Training reads only the birth and the values that are compared, so a run with a damaged record may go on: the next launch makes
it anew. The launches before are lost then, which is printed.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import xxhash

import framework
from framework.errors import RunError
from framework.files import PRIVATE, write_file

SEAL = "xxh3"


def first_record(run_id: str) -> dict[str, Any]:
    """The record of a run that nobody has launched. birth: a name that no run before it has had and that sorts behind theirs:
    nanoseconds of the clock, and chance."""
    birth = f"{time.time_ns():016x}-{os.urandom(4).hex()}"
    return {"id": run_id, "created": now(), "birth": birth, "launches": []}


def begin_anew(path: Path) -> dict[str, Any]:
    """The record of a run whose own is gone or damaged; a note says so."""
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


def describe_software() -> dict[str, Any]:
    """Software of a launch: `describe_commit`, and the versions of Python and of the libraries that compute."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return describe_commit() | {"versions": {"python": platform.python_version(), **libraries}}


def describe_commit() -> dict[str, Any]:
    """{commit, edited}: the commit of the package's repository, and whether files differ from it. Empty outside of git."""
    folder = Path(framework.__file__ or "").parent
    commit, edits = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--", ".")
    return {} if commit is None else {"commit": commit, "edited": bool(edits)}


def _git(folder: Path, *words: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *words], check=False, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _hash(values: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(values, sort_keys=True).encode())
