"""Fixtures of all tests."""

import gc
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import settings

from framework import extend
from framework.recipe import plugins
from tests.grid import NUM_PARTS, is_in_part, part_of_day
from tests.ranks.pool import RankPool

# A property must hold, not be fast: a busy machine is no counter-example. Each run draws other examples, so a week of them draws
# more than a hundred of each.
settings.register_profile("meshwright", deadline=None, max_examples=20)
settings.load_profile("meshwright")


def pytest_configure(config: pytest.Config) -> None:
    """What most tests need, imported once; not where xdist's workers run the tests, and each imports for itself."""
    if getattr(config.option, "numprocesses", None):
        return
    import torch
    import transformers  # noqa: F401

    # Small tensors, often beside the ranks of the pool: a second thread would wait for a core more than it helps.
    torch.set_num_threads(1)

    # What libraries have made stays: collections need not look through it again and again.
    gc.freeze()


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks that live as long as the session; nothing starts before the first body."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module", autouse=True)
def without_plugins() -> Iterator[None]:
    """Names that plugins of a file's tests add to registries, and their modules, are gone behind them."""
    added: list[tuple[str, dict[str, Any], str]] = []

    def note(kind: str, registry: dict[str, Any], name: str, value: Any) -> None:
        if name not in registry:
            added.append((kind, registry, name))
        plugins.add(kind, registry, name, value)

    with patch.object(extend, "add", note):
        yield
    owners = {plugins.ADDED[kind].pop(name, "") for kind, registry, name in added if registry.pop(name, None)}
    for name in [name for owner in filter(None, owners) for name in plugins.modules_of(owner)]:
        sys.modules.pop(name, None)


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "of the tests marked `grid`, only those of this part: 0 to 27, or `today`"
    parser.addoption("--grid-part", metavar="N", help=words)


def pytest_report_header(config: pytest.Config) -> str | None:
    part = _chosen_part(config)
    return (
        None if part is None else f"grid part {part} of {NUM_PARTS}: `make test-grid PART={part}` repeats these cases"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Workers take files in this order. A file that sleeps would leave two cores idle at the end; at the start lint and
    # types fill them.
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)
    part = _chosen_part(config)
    if part is None:
        return
    others = [item for item in items if not is_in_part(item, part)]
    config.hook.pytest_deselected(items=others)
    dropped = set(others)
    items[:] = [item for item in items if item not in dropped]


def _chosen_part(config: pytest.Config) -> int | None:
    word = config.getoption("--grid-part")
    if word is None:
        return None
    part = part_of_day() if word == "today" else int(word)
    if not 0 <= part < NUM_PARTS:
        raise pytest.UsageError(f"--grid-part {word}: the parts are 0 to {NUM_PARTS - 1}, or `today`")
    return part
