"""Numbers and lines as pages and screens have them."""

import textwrap

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
