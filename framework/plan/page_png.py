"""The page as a picture for reports: the same charts one above the other. Drawn without a browser."""

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from framework.errors import RecipeError
from framework.plan.page_html import PNG_MARK, Page, write_html

WIDTH_PX = 900
# Of the picture, so that its words stay sharp in print.
SCALE = 1.5
# Of a PNG: its signature, and the first chunk, IHDR.
HEADER_BYTES = 8 + 25
CONFIG = {
    "font": "DejaVu Sans, Helvetica, Arial, sans-serif",
    "background": "white",
    "view": {"stroke": "transparent"},
    "axis": {"labelFontSize": 12, "titleFontWeight": "normal"},
    "legend": {"labelFontSize": 12, "symbolType": "square", "columns": 7},
    "style": {"over": {"fill": "#b3162a", "fontWeight": "bold"}},
    "title": {"fontSize": 14, "anchor": "start"},
}


def write_pages(page: Page, html: Path | None, png: Path | None) -> Iterator[Path]:
    """Write the files that are wanted. RecipeError where the disk refuses."""
    for path, write in ((html, write_html), (png, write_png)):
        if path is None:
            continue
        try:
            write(path, page)
        except OSError as error:
            raise RecipeError(f"{path}: {error.strerror}") from error
        yield path


def write_png(path: Path, page: Page) -> None:
    """Draw the page's charts into a file."""
    import vl_convert

    from framework.plan.page_charts import VEGA_LITE

    drawn = vl_convert.vegalite_to_png(combine(page), vl_version=VEGA_LITE, scale=SCALE, allowed_base_urls=[])
    path.write_bytes(mark_png(drawn))


def mark_png(drawn: bytes) -> bytes:
    """The picture with a chunk of text that names what drew it (PNG specification, 11.3.3.2), behind its header."""
    size, crc = len(PNG_MARK) - 4, zlib.crc32(PNG_MARK)
    return drawn[:HEADER_BYTES] + struct.pack(">I", size) + PNG_MARK + struct.pack(">I", crc) + drawn[HEADER_BYTES:]


def combine(page: Page) -> dict[str, Any]:
    """The charts as one specification, with what the page says in words above them."""
    facts = [f"{name}: {value}" for name, value in page.facts]  # pictures draw several spaces as one
    lines = [" | ".join(facts[first : first + 5]) for first in range(0, len(facts), 5)]
    titles = {section.id: section.title for section in page.sections}
    charts = [
        {key: value for key, value in spec.items() if key not in ("$schema", "config", "params", "padding")}
        | {"width": WIDTH_PX, "title": titles.get(name, "")}
        for name, spec in page.charts.items()
    ]
    return {
        "$schema": next(iter(page.charts.values()))["$schema"],
        "title": {"text": [page.verdict, page.title], "subtitle": lines, "offset": 18},
        # What menus of the page choose has its first value.
        "params": [param for spec in page.charts.values() for param in spec.get("params", ())],
        "vconcat": charts,
        "resolve": {"scale": {"color": "independent", "opacity": "independent"}},
        "datasets": dict(page.rows),
        "config": CONFIG,
    }
