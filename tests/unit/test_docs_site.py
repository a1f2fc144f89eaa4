"""The site of docs/ builds without a broken link, shows what GitHub shows, and asks nothing of the network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
# Where a page loads something from, and where a reader may go to: only the first must be here.
LOADING = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}


class Page(HTMLParser):
    """Files that a page loads, and the text of its paragraphs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.paragraphs: list[str] = []
        self._is_inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value for name, value in attrs if (tag, name) in LOADING and value]
        if tag == "p":
            self._is_inside = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = self._is_inside and tag != "p"

    def handle_data(self, data: str) -> None:
        if self._is_inside:
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Page]:
    """Pages of a strict build, by their paths."""
    if not find_spec("material"):
        pytest.skip("mkdocs-material is not installed: pip install 'meshwright[docs]'")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return {path: Page(path.read_text(encoding="utf-8")) for path in folder.rglob("*.html")}


def test_every_page_is_built(site):
    pages = {path.stem for path in site}
    assert pages >= {path.stem for path in (REPOSITORY / "docs").rglob("*.md")} | {"readme"}


def test_nothing_is_loaded_from_elsewhere(site):
    for path, page in site.items():
        for url in page.loads:
            assert "//" not in url, f"{path.name} loads {url}"
            file = url.partition("#")[0].partition("?")[0]
            # 404.html is for servers, at whose root the site stands.
            assert file.startswith("/") or not file or (path.parent / file).is_file(), (
                f"{path.name} loads {url}, which is not there"
            )


def test_lists_and_tables_are_what_they_are_on_github(site):
    """Python-Markdown wants an empty line in front of them, GitHub does not."""
    for path, page in site.items():
        for text in page.paragraphs:
            assert not re.search(r"(?m)^\s*([-*] |\d+\. |\|.*\|$|```)", text), f"{path.name}: {text}"
