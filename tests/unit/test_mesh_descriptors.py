"""Descriptors: what ranks open is counted, and the limit on it is raised or explained before anyone connects."""

import multiprocessing
import resource

import pytest

from framework.comm.connect import allow_descriptors, count_sockets
from framework.errors import RecipeError
from framework.mesh.topology import Topology


def test_a_rank_of_8192_gpus_opens_few_sockets_and_rank_0_two_for_each():
    topology = Topology(pp=8, dp=128, tp=8, shard=128)
    assert count_sockets(topology, 5000, is_lazy=True) == 1 + 1 + 2 * 13
    assert count_sockets(topology, 0, is_lazy=True) == 8192 + 1 + 8191


def test_pairs_that_are_connected_at_once_count_every_group():
    """world 8, pp 2, batch 2 (which is shard), tp 2, a listener with each, and the store."""
    assert count_sockets(Topology(pp=2, dp=2, tp=2, shard=2), 1, is_lazy=False) == 1 + 8 + 2 + 2 + 2


def raise_soft_limit():
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    allow_descriptors(500)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise SystemExit(0 if soft >= min(hard, 756) else 1)


def test_a_soft_limit_is_raised():
    process = multiprocessing.get_context("fork").Process(target=raise_soft_limit)
    process.start()
    process.join(30)
    assert process.exitcode == 0


def test_a_hard_limit_that_is_too_low_is_explained(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    with pytest.raises(RecipeError, match=r"opens 16384 sockets, and this process may have 4096 files open"):
        allow_descriptors(16384)
