"""Fixtures of all tests."""

import gc
from collections.abc import Iterator

import pytest
import torch
import transformers  # noqa: F401  most tests need it, and what it makes is frozen here
from hypothesis import settings

from tests.ranks.pool import RankPool

# A property must hold, not be fast: a busy machine is no counter-example.
settings.register_profile("meshwright", deadline=None)
settings.load_profile("meshwright")

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
