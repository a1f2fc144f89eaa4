"""Hooks of mkdocs (mkdocs.yml): README.md is a page of the site, whose links lead from its place among docs/*.md."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    """Add the page."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "readme.md", content=text.replace("](docs/", "](")))
    return files
