"""The rank pool itself: results in order, and failures that name their ranks without spoiling the next body."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from framework.comm.connect import connect
from framework.errors import ModelError
from framework.mesh.topology import Topology
from framework.verify.pool import RankPool as AnyRankPool
from tests.ranks.pool import RankFailure


def connect_world(rank, world, rendezvous):
    return connect(Topology(dp=world), torch.device("cpu"), rendezvous, rank, timeout_s=60)


def sum_ranks(rank, world, rendezvous, factor):
    mesh = connect_world(rank, world, rendezvous)
    x = torch.tensor([rank * factor])
    if world > 1:
        dist.all_reduce(x)
    mesh.close()
    return rank, os.getpid(), x


def raise_on_rank_1_while_others_wait(rank, world, rendezvous):
    connect_world(rank, world, rendezvous)
    if rank == 1:
        raise ValueError("the odd one")
    dist.barrier()


def refuse_on_rank_1_while_others_wait(rank, world, rendezvous):
    connect_world(rank, world, rendezvous)
    if rank == 1:
        raise ModelError("no such model")
    dist.barrier()


def refuse_beside_a_crash_on_rank_0(rank, world, rendezvous):
    mesh = connect_world(rank, world, rendezvous)
    dist.barrier()
    mesh.close()
    raise ValueError("a bug") if rank == 0 else ModelError("no such model")


def die_on_last_rank(rank, world, rendezvous):
    mesh = connect_world(rank, world, rendezvous)
    if rank == world - 1:
        os._exit(7)
    dist.barrier()
    mesh.close()


def sleep_on_rank_0(rank, world, rendezvous):
    if rank == 0:
        time.sleep(60)


def report_threads(rank, world, rendezvous):
    return torch.get_num_threads(), os.environ["HF_HUB_OFFLINE"]


def test_a_rank_that_dies_while_it_starts_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second try finds no half of the first."""
    (tmp_path / "dies_on_import.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    ranks = AnyRankPool(2, "dies_on_import", spawned=2)
    for _ in range(2):
        with pytest.raises(RankFailure, match="a rank died while it was starting"):
            ranks.run(2, sum_ranks, 1)
    ranks.close()


# A process whose ranks, one of each kind, tell that they have begun and then take long. Nothing here needs torch.
LEFT_ALONE = """
import os
import time
from framework.verify.pool import RankPool

def begin(rank, world, rendezvous):
    os.write(1, f"{rendezvous}\\n".encode())  # in one piece, beside the other rank's
    time.sleep(90)

if __name__ == "__main__":
    RankPool(2, "framework.comm.connect", spawned=1).run(2, begin)
"""


def test_results_come_in_rank_order_and_processes_stay(pool):
    pids = set()
    for world in (1, 2, 3, 4, 2):
        results = pool.run(world, sum_ranks, 10)
        assert [rank for rank, _, _ in results] == list(range(world))
        assert all(x.item() == 10 * sum(range(world)) for _, _, x in results)
        pids |= {pid for _, pid, _ in results}
    assert len(pids) == 4


def test_ranks_have_one_thread_and_no_network(pool):
    assert pool.run(2, report_threads) == [(1, "1"), (1, "1")]


def test_an_exception_names_its_rank_and_ends_the_others(pool):
    before = [pid for _, pid, _ in pool.run(4, sum_ranks, 1)]
    start = time.monotonic()
    with pytest.raises(RankFailure, match="the odd one") as failure:
        pool.run(3, raise_on_rank_1_while_others_wait)
    assert "--- rank 1 raised" in str(failure.value)
    assert "raise_on_rank_1_while_others_wait" in str(failure.value)
    assert time.monotonic() - start < 9, "peers of a rank that raised must not wait out the grace time"
    assert [pid for _, pid, _ in pool.run(4, sum_ranks, 1)] == before


def test_a_typed_error_explains_ranks_that_lost_the_one_that_raised_it(pool):
    with pytest.raises(RankFailure) as failure:
        pool.run(3, refuse_on_rank_1_while_others_wait)
    assert str(failure.value.explanation) == "no such model"
    assert "--- rank 2 raised" in str(failure.value)


def test_a_typed_error_does_not_explain_a_crash_of_another_rank(pool):
    with pytest.raises(RankFailure, match="a bug") as failure:
        pool.run(3, refuse_beside_a_crash_on_rank_0)
    assert failure.value.explanation is None


@pytest.fixture
def forked():
    """Ranks that are all forked: another set of them costs no imports."""
    ranks = AnyRankPool(4, "tests.ranks.preload")
    yield ranks
    ranks.close()


def test_a_death_is_reported_and_the_pool_replaced(forked):
    with pytest.raises(RankFailure, match="rank 2 died with exit code 7"):
        forked.run(3, die_on_last_rank)
    assert len(forked.run(4, sum_ranks, 1)) == 4


def test_a_hang_names_the_rank_and_where_it_waits(forked):
    forked.run(2, report_threads)  # imports this file, which is not to count
    with pytest.raises(RankFailure, match=r"rank 0 hung: not ended after 1 s") as failure:
        forked.run(2, sleep_on_rank_0, timeout_s=1)
    assert "in sleep_on_rank_0" in str(failure.value)
    assert "rank 1" not in str(failure.value)
    assert len(forked.run(4, sum_ranks, 1)) == 4


def test_ranks_end_with_the_process_that_made_them(tmp_path: Path) -> None:
    """All processes have its standard output, the fork server too: it ends with the last of them."""
    script = tmp_path / "left_alone.py"
    script.write_text(LEFT_ALONE)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    begun = [parent.stdout.readline() for _ in range(2)]
    folder = Path(begun[0].strip().removeprefix("file://")).parent
    assert folder.is_dir()
    parent.kill()
    parent.communicate(timeout=15)
    assert not folder.exists()
