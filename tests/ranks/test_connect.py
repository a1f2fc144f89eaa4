"""Connect: ranks that come late are waited for, ranks that differ are named, a connection that fails is made anew on all, what
connecting costs does not grow with the world, and a closed connection is gone."""

import multiprocessing
import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from framework.comm import connect as connecting
from framework.comm import groups
from framework.comm.connect import connect, count_sockets, join_axes
from framework.comm.groups import CONNECT_ATTEMPTS, Backends, GroupPlan, persist
from framework.errors import ConnectionFailed, RanksDiffer
from framework.mesh.topology import Topology
from framework.plan.plan import make_plan
from framework.recipe.schema import Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.layout import share
from tests.families import family
from tests.faults.test_ports import listeners
from tests.grid import few_of
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


def look_at_ports(rank: int, world: int, rendezvous: str) -> tuple[set[str], bytes]:
    """Body: where this rank listens, and the secret of all."""
    mesh = connect(Topology(dp=world), CPU, rendezvous, rank)
    found = {address for _, address, _ in listeners([os.getpid()])}, mesh.axis("world").secret
    mesh.close()
    return found


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


def test_ranks_that_meet_in_a_file_listen_to_one_another_alone_and_share_a_secret(pool: RankPool) -> None:
    found = pool.run(2, look_at_ports)
    assert [addresses for addresses, _ in found] == [{"127.0.0.1"}] * 2
    assert found[0][1] == found[1][1]
    assert len(found[0][1]) == 32


def test_a_connection_that_fails_is_made_anew_on_all_ranks(pool: RankPool) -> None:
    assert pool.run(2, connect_after_failures, 1) == [(1.0, 2), (1.0, 2)]


def test_failure_without_end_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match=f"2 ranks could not be connected in {CONNECT_ATTEMPTS} attempts"):
        pool.run(2, connect_after_failures, CONNECT_ATTEMPTS)


def test_a_rank_that_never_comes_is_an_error_that_counts_the_others(pool: RankPool) -> None:
    with pytest.raises(RankFailure, match="only 2 of 3 ranks have arrived within 1 s"):
        pool.run(2, wait_for_nobody)


class Recorder(dist.Store):
    """A store that notes what it is asked. fail_set: the number of the set, counted from 0, that fails."""

    def __init__(self, inner: dist.Store, fail_set: int | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.asked: list[tuple[str, str]] = []
        self.fail_set = fail_set

    def keys(self, operation: str) -> list[str]:
        return [key for asked, key in self.asked if asked == operation]

    def set(self, key: str, value: str) -> None:
        self.asked.append(("set", key))
        if self.fail_set is not None and len(self.keys("set")) == self.fail_set + 1:
            raise RuntimeError("a network that fails for a moment")
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        self.asked.append(("get", key))
        return self.inner.get(key)

    def add(self, key: str, value: int) -> int:
        self.asked.append(("add", key))
        return self.inner.add(key, value)

    def check(self, keys: list[str]) -> bool:
        self.asked.append(("check", *keys))
        return self.inner.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=30)) -> None:
        self.asked.append(("wait", *keys))
        self.inner.wait(keys, timeout)


def compare_then_say_what_there_is(
    rank: int, world: int, rendezvous: str, changes: dict[int, dict[str, str]]
) -> tuple[str, bool]:
    """Body: ranks of `changes` have another fingerprint; the error, and whether there was a process group by then."""
    fingerprint = {"recipe": "aa", "code": "bb", "torch": "2.13.0", "device": "cuda"} | changes.get(rank, {})
    try:
        mesh = connect(Topology(dp=world), CPU, rendezvous, rank, fingerprint=fingerprint)
    except RanksDiffer as error:
        return str(error), dist.is_initialized()
    mesh.close()
    return "", True


def test_ranks_that_differ_are_named_on_every_rank_before_any_group_is_made(pool: RankPool) -> None:
    found = pool.run(4, compare_then_say_what_there_is, {2: {"torch": "2.12.0", "device": "cpu"}})
    assert set(found) == {found[0]}
    error, is_connected = found[0]
    assert "1 of 4 ranks differ from rank 0\n  rank 2 on " in error
    assert ": torch 2.12.0 (rank 0: 2.13.0), device cpu (rank 0: cuda)\n" in error
    assert not is_connected


def test_alike_ranks_connect_and_a_rank_0_that_differs_is_told_by_all_others(pool: RankPool) -> None:
    assert pool.run(3, compare_then_say_what_there_is, {}) == [("", True)] * 3
    error, _ = pool.run(3, compare_then_say_what_there_is, {0: {"code": "xx"}})[0]
    assert "2 of 3 ranks differ from rank 0" in error
    assert error.count("code bb (rank 0: xx)") == 2
    assert error.endswith(
        "-> ranks import different copies of Meshwright: one installation, or one image, on all nodes"
    )


def find_timeouts(rank: int, world: int, rendezvous: str) -> list[float]:
    """Body: the timeout of every group of a rank, that for reduce-scatters too; gloo stands in for NCCL."""
    store = dist.FileStore(rendezvous.removeprefix("file://"), world)
    backends = Backends(world="gloo", axes="gloo", scatter="gloo", is_lazy=True)
    axes = join_axes(Topology(dp=2, tp=2, shard=2), rank, backends, store, timedelta(seconds=1234))
    groups = {id(group): group for axis in axes.values() for group in axis.groups}
    assert axes["shard"].scatter_group is not axes["shard"].group
    found = [group._get_backend(CPU).options._timeout.total_seconds() for group in groups.values()]
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_every_group_has_the_runs_timeout_the_one_for_reduce_scatters_too(pool: RankPool) -> None:
    assert pool.run(4, find_timeouts) == [[1234.0] * 4] * 4  # world, batch which is shard, tp, scatter


def compare_groups(rank: int, world: int, rendezvous: str, scatter: str | None) -> list[bool]:
    """Body: whether tokens on their way to experts have a group of their own, by axis; and what travels over it arrives."""
    store = dist.FileStore(rendezvous.removeprefix("file://"), world)
    backends = Backends(world="gloo", axes="gloo", scatter=scatter, is_lazy=True)
    axes = join_axes(Topology(dp=2, ep=2, shard=2), rank, backends, store, timedelta(seconds=30))
    assert axes["ep"].ranks == axes["batch"].ranks
    x = torch.tensor(float(rank))
    dist.all_reduce(x, group=axes["ep"].group)
    assert x.item() == 1.0
    dist.barrier()
    dist.destroy_process_group()
    return [axes[name].group is not axes["batch"].group for name in ("ep", "ep_inner")]


def test_tokens_do_not_queue_behind_weights_where_groups_run_in_turn(pool: RankPool) -> None:
    assert pool.run(2, compare_groups, "gloo") == [[True, True]] * 2
    assert pool.run(2, compare_groups, None) == [[False, False]] * 2


def reconnect_a_subgroup(rank: int, world: int, rendezvous: str) -> tuple[list[str], float]:
    """Body: rank 1 fails once to say where it listens, in a subgroup; the keys that each rank has set, and a sum."""
    groups.CONNECT_S, former = 1.0, groups.CONNECT_S
    file = dist.FileStore(rendezvous.removeprefix("file://"), world)
    # Rank 1 sets its address in the world's group first, then that in the first subgroup. Meetings are set by the last to come.
    store = AddressRecorder(file, fail_set=1 if rank == 1 else None)
    try:
        backends = Backends(world="gloo", axes="gloo")
        axes = join_axes(Topology(dp=2, tp=2), rank, backends, store, timedelta(seconds=30))
        x = torch.tensor(float(rank))
        dist.all_reduce(x, group=axes["batch"].group)
        dist.barrier()
        dist.destroy_process_group()
    finally:
        groups.CONNECT_S = former
    return store.keys("set"), x.item()


class AddressRecorder(Recorder):
    """Notes the addresses of gloo only."""

    def set(self, key: str, value: str) -> None:
        super().set(key, value) if "cpu/" in key else self.inner.set(key, value)


def test_an_attempt_to_connect_a_subgroup_does_not_see_what_a_failed_one_left(pool: RankPool) -> None:
    results = pool.run(4, reconnect_a_subgroup)
    assert [total for _, total in results] == [2.0, 4.0, 2.0, 4.0]
    addresses = [key for keys, _ in results for key in keys]
    assert len(results[1][0]) == 4  # world, batch twice, tp
    assert len(addresses) == len(set(addresses)), "an attempt writes where another one has written"


def connect_after_a_failure_of_one(rank: int, world: int, rendezvous: str) -> tuple[int, float]:
    """Body: in the first attempt rank 1 fails inside of `init_process_group`, when rank 0 has come out of it."""
    file = dist.FileStore(rendezvous.removeprefix("file://"), world)
    store = AddressRecorder(file, fail_set=0 if rank == 1 else None)
    attempts = []

    def create(attempt: dist.Store) -> dist.ProcessGroup:
        attempts.append(attempt)
        with connecting._gloo_connects_lazily(rank == 0 and len(attempts) == 1):
            return connecting._create_group(GroupPlan("world", (0, 1), "gloo"), rank, timedelta(seconds=1), attempt)

    persist(create, store, world, timedelta(seconds=20), connect_s=1.0)
    x = torch.tensor(float(rank))
    dist.all_reduce(x)
    dist.destroy_process_group()
    return len(attempts), x.item()


def test_ranks_find_each_other_again_where_not_all_failed_at_the_same_place(pool: RankPool) -> None:
    assert pool.run(2, connect_after_a_failure_of_one) == [(2, 1.0)] * 2


def meet_or_give_up(rank: int, world: int, rendezvous: str) -> str:
    """Body: rank 1 comes when rank 0 has stopped to wait for it."""
    store = dist.FileStore(rendezvous.removeprefix("file://"), world)
    while rank == 1 and not store.check(["there"]):
        time.sleep(0.01)
    try:
        groups.meet(store, "there", world, timedelta(seconds=0.2 if rank == 0 else 60))
    except ConnectionFailed as error:
        return str(error)
    return "met"


def test_a_rank_that_comes_after_another_gave_up_does_not_go_on_without_it(pool: RankPool) -> None:
    error = "only 1 of 2 ranks have there within 0 s: see the logs of the others"
    assert pool.run(2, meet_or_give_up, timeout_s=20) == [error, error]


def hear_of_a_failure(rank: int, world: int, rendezvous: str) -> int:
    """Body: rank 1 fails in its first attempt, when rank 0 has its group; rank 0 would wait for an hour."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  the backend `fake`, whose barrier waits for nobody

    store = dist.FileStore(rendezvous.removeprefix("file://"), world)
    attempts = []

    def create(attempt: dist.Store) -> dist.ProcessGroup:
        attempts.append(attempt)
        if rank == 1 and len(attempts) == 1:
            raise RuntimeError("no such network")
        dist.init_process_group("fake", store=attempt, rank=rank, world_size=world)
        return dist.group.WORLD

    persist(create, store, world, timedelta(hours=1), connect_s=3600)
    dist.destroy_process_group()
    return len(attempts)


def test_ranks_hear_at_once_of_one_that_could_not_connect(pool: RankPool) -> None:
    assert pool.run(2, hear_of_a_failure, timeout_s=30) == [2, 2]


def count_open_sockets() -> int:
    """Of this process. The folder is listed through a descriptor, which is gone when it is looked at."""
    paths = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sum(os.readlink(path).startswith("socket:") for path in paths if os.path.lexists(path))


def join_and_count(rank: int, world: int, path: str, is_lazy: bool, found: Any) -> None:
    """A rank of the world that GPU ranks join: gloo for words, and groups of the axes that have no gloo."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  the backend `fake`

    recorder = Recorder(dist.FileStore(path, world))
    before = count_open_sockets()
    backends = Backends(world="gloo", axes="fake", scatter="fake", is_lazy=is_lazy)
    topology = Topology(dp=world // 4, tp=2, pp=2, shard=world // 4)
    axes = join_axes(topology, rank, backends, recorder, timedelta(seconds=60))
    num_opened = count_open_sockets() - before
    num_groups = len({id(group) for axis in axes.values() for group in axis.groups})
    asked = {operation: len(recorder.keys(operation)) for operation in ("set", "add", "get", "wait")}
    found.put((rank, num_opened, num_groups, asked, count_sockets(topology, rank, is_lazy)))
    found.close()
    found.join_thread()  # which sends what was put
    dist.barrier()
    os._exit(0)


def count_joining(world: int, is_lazy: bool, folder: Path) -> list[tuple]:
    context = multiprocessing.get_context("fork")
    found = context.Queue()
    path = str(folder / f"store-{world}-{is_lazy}")
    ranks = [context.Process(target=join_and_count, args=(rank, world, path, is_lazy, found)) for rank in range(world)]
    for process in ranks:
        process.start()
    results = sorted(found.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join(60)
    return results


@pytest.mark.grid
def test_what_a_rank_of_a_gpu_run_asks_the_store_and_opens_does_not_grow_with_the_world(tmp_path: Path) -> None:
    """Where every pair is connected at once a rank reads every other's address: world^2 keys, and as many descriptors."""
    of_8, of_16 = count_joining(8, True, tmp_path), count_joining(16, True, tmp_path)
    for results, log_world in ((of_8, 3), (of_16, 4)):
        for _, num_opened, num_groups, asked, num_sockets in results:
            assert num_opened <= 1 + 2 * log_world < num_sockets
            assert num_groups == 5
            assert asked["get"] - 2 * num_groups <= 2 * log_world
            assert asked["set"] <= 1 + 2 * num_groups
            assert 2 * num_groups <= asked["add"] <= 4 * num_groups  # the last to come decides, which is one more
    eager = count_joining(8, False, tmp_path)
    assert {asked["get"] - 2 * num_groups for _, _, num_groups, asked, _ in eager} == {8}
    assert all(num_opened >= 8 for _, num_opened, *_ in eager)


def train_once(rank: int, world: int, rendezvous: str, recipe: Recipe) -> None:
    """Body: a run of one step, closed."""
    case = Case("", family("llama"), {"": recipe}, {"num_hidden_layers": 4})
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    train_step(run, share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 1e-3)
    mesh.close()


def count_threads(rank: int, world: int, rendezvous: str) -> int:
    """Body: threads of this process, those of libraries included."""
    return len(list(Path("/proc/self/task").iterdir()))


LAYOUTS = {
    "zero 3": small_recipe("fp32", 2, zero=Zero(stage=3)),
    "tp": small_recipe("fp32", 2, parallel=Parallel(tp=2)),
    "pp": replace(small_recipe("fp32", 2, 4, parallel=Parallel(pp=2)), pipeline=Pipeline(schedule="zbv")),
}


@pytest.mark.parametrize("name", few_of(LAYOUTS, lambda name: name == "pp"))
def test_a_closed_run_leaves_no_thread_behind(pool: RankPool, name: str) -> None:
    """Each process group has some, which live until nothing refers to the group any more."""
    pool.run(2, train_once, LAYOUTS[name])  # what a first step starts may stay: autograd's threads
    before = pool.run(2, count_threads)
    for _ in range(2):
        pool.run(2, train_once, LAYOUTS[name])
    assert pool.run(2, count_threads) == before
