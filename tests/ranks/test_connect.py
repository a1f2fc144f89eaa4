"""Connect: ranks that come late are waited for, a connection that fails is made anew on all, and a closed one is gone."""

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from framework.build import build
from framework.mesh.connect import CONNECT_ATTEMPTS, connect, persist
from framework.mesh.topology import Topology
from framework.recipe.schema import Parallel, Pipeline, Recipe, Zero
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import family
from tests.ranks.parity import CPU, Case, small_recipe, topology_of
from tests.ranks.pool import RankFailure, RankPool


def sum_over_shard_and_world(rank: int, world: int, rendezvous: str, delay_s: float) -> tuple[float, float]:
    """Body: rank 1 comes late; then both groups work."""
    time.sleep(delay_s if rank == 1 else 0.0)
    mesh = connect(Topology(dp=world, shard=2), CPU, rendezvous, rank)
    sums = []
    for name in ("shard", "world"):
        x = torch.tensor(float(rank))
        dist.all_reduce(x, group=mesh.axis(name).group)
        sums.append(x.item())
    mesh.close()
    return sums[0], sums[1]


def connect_after_failures(rank: int, world: int, rendezvous: str, num_failures: int) -> tuple[float, int]:
    """Body: in the first attempts rank 1 looks for the others in the wrong place."""
    store = dist.FileStore(rendezvous.removeprefix("file://"), world)
    attempts = []

    def create(attempt: dist.Store) -> dist.ProcessGroup:
        attempts.append(attempt)
        if rank == 1 and len(attempts) <= num_failures:
            attempt = dist.PrefixStore("elsewhere", attempt)
        timeout = timedelta(seconds=1)
        dist.init_process_group("gloo", store=attempt, rank=rank, world_size=world, timeout=timeout)
        return dist.group.WORLD

    persist(create, store, world, timedelta(seconds=20), connect_s=1.0)
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    dist.barrier()
    dist.destroy_process_group()
    return x.item(), len(attempts)


def wait_for_nobody(rank: int, world: int, rendezvous: str) -> None:
    connect(Topology(dp=world + 1), CPU, rendezvous, rank, timeout_s=1.0)


def test_a_late_rank_is_waited_for(pool: RankPool) -> None:
    assert pool.run(4, sum_over_shard_and_world, 0.5) == [(1.0, 6.0), (1.0, 6.0), (5.0, 6.0), (5.0, 6.0)]


def test_a_connection_that_fails_is_made_anew_on_all_ranks(pool: RankPool) -> None:
    assert pool.run(2, connect_after_failures, 1) == [(1.0, 2), (1.0, 2)]


def test_failure_without_end_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=f"2 ranks could not be connected in {CONNECT_ATTEMPTS} attempts"):
        pool.run(2, connect_after_failures, CONNECT_ATTEMPTS)


def test_a_rank_that_never_comes_is_an_error_that_counts_the_others(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="only 2 of 3 ranks have arrived within 1 s"):
        pool.run(2, wait_for_nobody)


def train_once(rank: int, world: int, rendezvous: str, recipe: Recipe) -> None:
    """Body: a run of one step, closed."""
    case = Case("", family("llama"), {"": recipe}, {"num_hidden_layers": 4})
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(recipe, case.config, mesh)
    train_step(run, share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3, ())
    mesh.close()


def count_threads(rank: int, world: int, rendezvous: str) -> int:
    """Body: threads of this process, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


LAYOUTS = {
    "zero 3": small_recipe("fp32", 2, zero=Zero(stage=3)),
    "tp": small_recipe("fp32", 2, parallel=Parallel(tp=2)),
    "pp": replace(small_recipe("fp32", 2, 4, parallel=Parallel(pp=2)), pipeline=Pipeline(schedule="zbv")),
}


@pytest.mark.parametrize("recipe", LAYOUTS.values(), ids=LAYOUTS)
def test_a_closed_run_leaves_no_thread_behind(pool: RankPool, recipe: Recipe) -> None:
    """Each process group has some, which live until nothing refers to the group any more."""
    pool.run(2, train_once, recipe)  # what a first step starts may stay: autograd's threads
    before = pool.run(2, count_threads)
    for _ in range(2):
        pool.run(2, train_once, recipe)
    assert pool.run(2, count_threads) == before
