"""Hooks of mkdocs (mkdocs.yml), by which docs/*.md are pages of GitHub's and of the site.

README.md is a page of the site, as if it lay in docs/. A link to another file of the repository leads nowhere on the site: its
words stay. Pages that no section of `nav` lists stand in the last one.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[1]
README = "readme.md"
LINK = re.compile(r"\[([^\]\n]+)\]\(\.\./([^)#\s]+)[^)\s]*\)")


def on_files(files: Files, config: Any) -> Files:
    """Add README.md, and list what is not listed."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, README, content=text.replace("](docs/", "](")))
    listed = set(_pages_of(config["nav"]))
    section = next(iter(config["nav"][-1].values())) if isinstance(config["nav"][-1], dict) else config["nav"]
    section += sorted(page.src_uri for page in files.documentation_pages() if page.src_uri not in listed)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Take links out that lead to files of the repository beside docs/, where there are such files."""
    folder = (REPOSITORY / "docs" / page.file.src_uri).parent

    def keep_words(link: re.Match[str]) -> str:
        target = (folder / ".." / link[2]).resolve()
        is_outside = target.is_relative_to(REPOSITORY) and not target.is_relative_to(REPOSITORY / "docs")
        return link[1] if is_outside and target.exists() else link[0]

    return LINK.sub(keep_words, markdown)


def _pages_of(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in _pages_of(part)]
