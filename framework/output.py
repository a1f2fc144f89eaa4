"""Standard output and error for as long as a process lives, whoever reads them; and how bytes, seconds and tables are written.

A run's result is its folder, and its exit code says how it ended. So nothing that happens to a stream changes either: a reader
that has gone (`train ... | head`), a full disk behind a log, a terminal that was closed, an encoding without the character.
Such text is dropped, or escaped; the first error is kept, for a command whose result is what it prints.

Control characters of names, data and texts of a model never reach a terminal, which would obey them.
"""

import errno
import io
import os
import re
import select
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from functools import partial

# C0 but for tab and newline, DEL, C1, the line and paragraph separators, and the marks that turn the direction of a text.
# A carriage return is a progress bar's where a text begins or ends with it, and half a line's end in front of a newline.
CONTROLS = re.compile(
    r"[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]|(?<!^)\r(?!\n|\Z)"
)

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def show_controls(text: str) -> str:
    r"""`text` with its control characters as Python writes them, such as \x1b."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def first_line(text: object) -> str:
    """The first line of a text or of an error's, empty where there is none: a bare `assert` has no text."""
    return next(iter(str(text).splitlines()), "")


def in_a_line(text: str) -> str:
    r"""A name or value as a part of one line: `show_controls`, and \n and \r for line ends."""
    return show_controls(text).replace("\r", r"\r").replace("\n", r"\n")


def align(rows: Sequence[Sequence[str]], words: Collection[int] | None = None, widest: int | None = None) -> list[str]:
    """Lines of a table with its columns aligned: numbers to the right, the columns in `words` to the left, and all of them where
    it is None. widest: the most characters by which a column moves the next one."""
    widths = [min(widest or size, size) for size in (max(map(len, column)) for column in zip(*rows, strict=True))]
    is_left = [words is None or column in words for column in range(len(widths))]
    return [
        "  ".join(
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, is_left, strict=True)
        ).rstrip()
        for row in rows
    ]


GIB = 2**30
WIDTH = 100
# Width of the column of names.
MARGIN = 14


def show_bytes(size: int) -> str:
    """In GiB, below one in MiB."""
    return f"{size / 2**30:,.1f} GiB" if abs(size) >= 2**30 else f"{size / 2**20:,.0f} MiB"


def show_exactly(size: int) -> str:
    """With three decimals, in GiB, below an eighth of one in MiB."""
    return f"{size / GIB:.3f} GiB" if size >= 2**27 else f"{size / 2**20:.3f} MiB"


def show_seconds(seconds: float) -> str:
    """Three digits: 12.3 s, 45.6 ms, 789 us."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:,.0f} {name}" if seconds >= 100 * unit else f"{seconds / unit:#.3g} {name}"
    return f"{seconds * 1e6:.0f} us"


def show_hours(hours: float) -> str:
    """Days from two on, hours, minutes below one, or seconds below a minute."""
    if hours >= 48:
        return f"{hours / 24:,.1f} days"
    if hours * 60 < 1:
        return show_seconds(hours * 3600)
    return f"{hours:.1f} hours" if hours >= 1 else f"{hours * 60:.1f} minutes"


def wrap(line: str) -> list[str]:
    """A line of a name and words, in lines of at most WIDTH columns, the later ones below the words."""
    return textwrap.wrap(line, WIDTH, subsequent_indent=" " * MARGIN, break_long_words=False) or [""]


def paint(pieces: Iterable[tuple[str, bool]]) -> None:
    """Print pieces of text, without a line end behind them; those that are marked in green, or in [[ ]] without a terminal."""
    begin, end = (GREEN, PLAIN) if sys.stdout.isatty() else ("[[", "]]")
    for text, is_marked in pieces:
        # Past what escapes control characters: these are ours, and those of the text are escaped.
        write = partial(io.TextIOWrapper.write, sys.stdout) if isinstance(sys.stdout, Output) else sys.stdout.write
        write(f"{begin}{show_controls(text)}{end}" if is_marked else show_controls(text))


class Descriptor(io.FileIO):
    """A file descriptor that takes every write: refused bytes are dropped. failure: the first error."""

    failure: OSError | None = None

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        try:
            while (written := super().write(data)) is None:  # somebody has made it non-blocking, and its reader is slow
                select.select([], [self.fileno()], [])
        except OSError as error:
            self.failure = self.failure or error
            # Nobody will read again: what libraries write past Python goes nowhere as well.
            if error.errno == errno.EPIPE:
                with open(os.devnull, "wb", buffering=0) as null:
                    os.dup2(null.fileno(), self.fileno())
            return memoryview(data).nbytes
        return written


class Output(io.TextIOWrapper):
    """A text stream upon a `Descriptor`. former: the stream that it replaces, with its encoding and buffering; None where the
    process was started without."""

    def __init__(self, number: int, former: io.TextIOWrapper | None) -> None:
        self.descriptor = Descriptor(number)
        super().__init__(
            io.BufferedWriter(self.descriptor),  # type: ignore[type-var]  # its `write` takes fewer types
            encoding=former.encoding if former else "utf-8",
            errors="backslashreplace",
            line_buffering=former is not None and former.line_buffering,
            write_through=former is not None and former.write_through,
        )

    def write(self, text: str) -> int:
        super().write(show_controls(text))
        if self.write_through:  # of PYTHONUNBUFFERED: it ends at the buffer below
            self.flush()
        return len(text)


def keep_streams() -> None:
    """Have stdout and stderr of this process outlive their readers. A stream that a caller has put there stays."""
    open_standard_descriptors()
    if sys.stdout is sys.__stdout__:
        sys.stdout = Output(1, sys.__stdout__)
    if sys.stderr is sys.__stderr__:
        sys.stderr = Output(2, sys.__stderr__)


def open_standard_descriptors() -> None:
    """Give descriptors 0, 1 and 2 to /dev/null where they are closed (`train >&-`): the next file that is opened would get the
    number, and the prints of libraries."""
    for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, mode)  # the lowest that is free, which this is
            os.set_inheritable(null, True)
            assert null == number, f"descriptor {null} instead of {number}"


def find_loss() -> OSError | None:
    """The first error of printing to stdout; None if all went out, or up to where its reader left."""
    if not isinstance(sys.stdout, Output):
        return None
    sys.stdout.flush()
    failure = sys.stdout.descriptor.failure
    return None if failure is None or failure.errno in (errno.EPIPE, errno.ECONNRESET) else failure
