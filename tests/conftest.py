"""Fixtures of all tests."""

from collections.abc import Iterator

import pytest

from tests.ranks.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks that live as long as the session; nothing starts before the first body."""
    ranks = RankPool(4)
    yield ranks
    ranks.close()
