"""One file that a browser shows without a server: charts, their rows, what draws them, and sliders over the layouts of a search.

Vega, Vega-Lite and vega-embed stand in it as text (0.9 MB), so nothing is loaded from elsewhere; the file's own policy has the
browser refuse it. Names from recipes are escaped: jinja escapes what it writes, and rows hold no `<`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from framework.errors import RecipeError

MOST_BYTES = 2_000_000
# Identifies a file as one of ours, within its first bytes: those of page.html.
HTML_MARK = b'<meta name="generator" content="meshwright">'
MARKED_BYTES = 1024


@dataclass(frozen=True)
class Section:
    """A chart with a heading and a sentence. id: of its chart."""

    id: str
    title: str
    words: str


@dataclass(frozen=True)
class Table:
    """Rows of words under a heading."""

    title: str
    words: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Page:
    """The contents of a page."""

    title: str
    verdict: str
    """One line, red where `is_over`."""
    is_over: bool
    facts: tuple[tuple[str, str], ...]
    """(name, value)."""
    sections: tuple[Section, ...]
    charts: dict[str, dict[str, Any]]
    """Specifications by the id of their place; `rows`: their data, by name."""
    rows: Mapping[str, Sequence[Mapping[str, Any]]]
    footer: str
    changes: tuple[str, ...] = ()
    """Changes of the recipe with which the run would fit."""
    tables: tuple[Table, ...] = ()
    layouts: dict[str, Any] | None = None
    """Layouts of a search, with the values of sliders; None on other pages."""
    layouts_words: str = ""
    refresh_s: int | None = None
    """Seconds after which a browser reads the file again, which is then another one."""
    links: tuple[str, ...] = ()
    """Names of files beside the page."""
    in_columns: bool = False
    """Whether sections stand side by side on a wide screen."""


def write_html(path: Path, page: Page) -> None:
    """Write the page to a file. RecipeError where the disk refuses."""
    try:
        path.write_text(render_html(page), encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"{path}: {error.strerror}") from error


def render_html(page: Page) -> str:
    """The text of the file."""
    import jinja2

    data = {"charts": page.charts, "rows": page.rows, "layouts": page.layouts, "refresh_s": page.refresh_s}
    template = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_asset("page.html"))
    return template.render(
        page=page, data=escape_json(data), library=_bundle(), style=_asset("page.css"), script=_asset("page.js")
    )


@cache
def _bundle() -> str:
    """Vega and its like as text, of the version for which altair writes charts; seconds to make."""
    import altair
    import vl_convert

    version = ".".join(altair.VEGALITE_VERSION.split(".")[:2])
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", version))


def escape_json(value: Any) -> str:
    """JSON that no HTML parser takes for markup, whatever names are in it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def require_page(path: Path, overwrite: bool = False) -> None:
    """Raise RecipeError where the page cannot be written, before anything is computed, or where another file would be lost.

    overwrite: replace files that no plan or search has written."""
    missing = [
        name for name, module in (("altair", "altair"), ("vl-convert-python", "vl_convert")) if not find_spec(module)
    ]
    if missing:
        raise RecipeError(
            f"--html draws with {' and '.join(missing)}, which is not installed: pip install 'meshwright[page]'"
        )
    if path.suffix.lower() != ".html":
        raise RecipeError(f"--html {path}: end the name in .html")
    if not path.parent.is_dir():
        raise RecipeError(f"--html {path}: there is no folder {path.parent}, make it first")
    if overwrite or not path.exists():
        return
    try:
        with path.open("rb") as file:
            is_ours = HTML_MARK in file.read(MARKED_BYTES)
    except OSError as error:  # a folder, or a file that is not ours to read
        raise RecipeError(f"{path}: {error.strerror}") from error
    if not is_ours:
        raise RecipeError(
            f"--html {path}: exists and was not written by plan or search: choose another name, or --overwrite"
        )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
