"""The table of keys in docs/recipes.md is the schema's: `python -m tests.unit.test_docs_keys` writes it anew."""

from collections.abc import Iterator
from dataclasses import MISSING
from pathlib import Path

from framework.recipe.keys import list_keys, plain
from framework.recipe.problem import show

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
FIRST, LAST = "<!-- keys -->", "<!-- end of keys -->"


def write_table() -> Iterator[str]:
    yield "| key | type and range | default | meaning |"
    yield "|---|---|---|---|"
    for key in list_keys():
        default = "must be given" if key.default is MISSING else f"`{show(plain(key.default))}`"
        yield f"| `{key.path}` | {key.legal} | {default} | {key.doc} |"


def with_table(page: str) -> str:
    before, after = page.split(FIRST)[0], page.split(LAST)[1]
    return before + "\n".join([FIRST, *write_table(), LAST]) + after


def test_the_table_of_keys_is_the_schemas() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text()), "python -m tests.unit.test_docs_keys"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
