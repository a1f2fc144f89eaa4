"""Files of JSON objects, one a line: appended to so that a killed process loses nothing, and read without what a crash tore."""

import json
import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any


class Lines:
    """A file to which objects are appended, each by one write that the operating system has at once. A line that was torn, by a
    crash or a full disk, gets its end before the next."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab+", buffering=0)
        end = self._file.seek(0, os.SEEK_END)
        self._file.seek(max(0, end - 1))
        self._is_torn = self._file.read(1) not in (b"", b"\n")

    def append(self, values: Mapping[str, Any]) -> None:
        """Append one object of finite numbers. Raises OSError where the disk takes none of it."""
        line = b"\n" * self._is_torn + f"{json.dumps(values, allow_nan=False)}\n".encode()
        self._is_torn = True
        self._is_torn = self._file.write(line) != len(line)

    def close(self) -> None:
        self._file.close()


def append_line(path: Path, values: Mapping[str, Any]) -> None:
    """Append one object and close the file."""
    with closing(Lines(path)) as lines:
        lines.append(values)


def read_lines(path: Path, last: int | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a file, or of its `last` lines, in order; none where there is no file."""
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            yield from filter(None, map(parse_line, file if last is None else deque(file, last)))


def parse_line(line: str) -> dict[str, Any] | None:
    """The object of a line; None of one that is torn or holds something else."""
    with suppress(json.JSONDecodeError):
        value = json.loads(line)
        return value if isinstance(value, dict) else None
    return None


def say(line: str) -> None:
    """Print a line to the training process, which may be gone: its records are sent all the same."""
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


def in_a_line(error: Exception) -> str:
    """The first line of an error's message, behind its type."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"
