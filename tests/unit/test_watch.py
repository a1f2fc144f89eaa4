"""The watchdog of a rank: real threads, a real store, deadlines of a fraction of a second; only the work of ranks is made up."""

import json
import threading
import time

import pytest
import torch.distributed as dist

from framework.comm.communicator import Communicator, Operation
from framework.comm.objects import Board
from framework.mesh.topology import Axis
from framework.monitor import watchdog as watchdog_module
from framework.monitor.hang import RANKS_FILE, TRAINING, RankStatus, read_ranks, write_ranks
from framework.monitor.progress import FIRST_STEPS, Phase, Phases, Progress, Save
from framework.monitor.watchdog import Watchdog
from framework.recipe.machines import Deadlines
from framework.track.jsonl import read_lines
from framework.track.report import HANGS_FILE

pytestmark = pytest.mark.waits

SHORT = Deadlines(step=0.6, first_steps=600.0, start=600.0, save=0.6, validate=600.0)
END_S = 10.0  # from a passed deadline to the end of all ranks


class StoppedStore:
    """A store whose host is stopped: from then on every question waits for ever."""

    def __init__(self, store, is_stopped):
        self._store, self._is_stopped = store, is_stopped

    def __getattr__(self, name):
        while self._is_stopped.is_set():
            time.sleep(0.05)
        return getattr(self._store, name)


class Ranks:
    """So many ranks in this process, each with its watch."""

    def __init__(self, world, tmp_path, deadlines=SHORT, silent=()):
        self.store, self.ended, self.lock = dist.HashStore(), {}, threading.Lock()
        self.is_stopped = threading.Event()
        self.progress = [Progress(Phases()) for _ in range(world)]
        self.watches = [
            Watchdog(each, deadlines, (rank, world), f"dp{rank}", self.open, lambda e, r=rank: self.end(r, e), tmp_path)
            for rank, each in enumerate(self.progress)
        ]
        self.running = [each for rank, each in enumerate(self.watches) if rank not in silent]
        for each in self.progress:
            each.pace._recent.extend([0.01] * FIRST_STEPS)
            each.communicators[TRAINING] = (Communicator(Axis("world", world, 0, tuple(range(world)))),)

    def open(self):
        return StoppedStore(self.store, self.is_stopped), "rank 0 on here"

    def end(self, rank, error):
        with self.lock:
            self.ended.setdefault(rank, str(error))

    def __enter__(self):
        for each in self.running:
            each.__enter__()
        return self

    def __exit__(self, *_):
        for each in self.running:
            each.__exit__(None, None, None)

    def step(self, rank, number, waits=""):
        """The rank is in a step, and waits for the others where `waits` says for what."""
        progress = self.progress[rank]
        progress.phases.begin(Phase.STEP, number)
        progress.is_timed = True
        (world,) = progress.communicators[TRAINING]
        if waits:
            world.traffic.calls["all_reduce"] = number
            world.waits.current = Operation(world.axis, "all_reduce", waits, number)

    def wait_until_ended(self, ranks):
        until = time.monotonic() + END_S
        while self.ended.keys() < set(ranks):
            assert time.monotonic() < until, f"only {sorted(self.ended)} have ended: {self.ended}"
            time.sleep(0.05)


def check_hang(tmp_path):
    with Ranks(3, tmp_path) as ranks:
        for rank in (0, 2):
            ranks.step(rank, 7, waits="sums")
        ranks.step(1, 7)
        ranks.wait_until_ended(range(3))
    assert set(ranks.ended.values()) == {ranks.ended[0]}, "all end with one verdict"
    assert ranks.ended[0].startswith("step 7 hangs: rank 1 [dp1] on ")
    assert "test_watch.py" in ranks.ended[0], "its stack is said"
    assert "ranks 0, 2 wait in all_reduce of sums over world" in ranks.ended[0]
    assert [each["text"] for each in read_lines(tmp_path / HANGS_FILE)] == [ranks.ended[0]], "one rank keeps it"


def test_all_ranks_end_with_a_verdict_that_names_the_one_that_is_behind(tmp_path):
    check_hang(tmp_path)


def test_sabotaged_a_watch_that_judges_nothing_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(Watchdog, "judge", lambda watch, now_s: None)
    monkeypatch.setattr("tests.unit.test_watch.END_S", 2.5)
    with pytest.raises(AssertionError, match="only \\[\\] have ended"):
        check_hang(tmp_path)


def test_a_rank_whose_watch_says_nothing_does_not_answer(tmp_path):
    with Ranks(3, tmp_path, silent=(1,)) as ranks:
        for rank in (0, 2):
            ranks.step(rank, 7, waits="sums")
        ranks.wait_until_ended((0, 2))
    assert "rank 1, does not answer" in ranks.ended[2]


def test_another_rank_judges_where_rank_0_does_not_answer(tmp_path):
    with Ranks(3, tmp_path, silent=(0,)) as ranks:
        for rank in (1, 2):
            ranks.step(rank, 7, waits="sums")
        ranks.wait_until_ended((1, 2))
    assert ranks.ended[1] == ranks.ended[2]
    assert "rank 0, does not answer" in ranks.ended[1]


def test_a_rank_ends_by_itself_where_the_host_of_the_store_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog_module, "SILENT_S", 2.0)
    with Ranks(2, tmp_path, silent=(0,)) as ranks:
        Board(ranks.store, 0, 2).write(RankStatus(0, "n0", 5, "dp0", "step", 6, 0.1).to_json())
        wait_until(lambda: 0 in ranks.progress[1].hosts)
        ranks.is_stopped.set()
        ranks.step(1, 7, waits="sums")
        ranks.wait_until_ended([1])
        ranks.is_stopped.clear()
    assert ranks.ended[1].startswith("step 7 hangs: rank 0 [dp0] on n0, pid 5, does not answer")
    assert "Last seen in step 6" in ranks.ended[1]
    assert "in all_reduce of sums over world" in ranks.ended[1]


def wait_until(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.05)


def test_a_save_that_hangs_behind_training_ends_the_run(tmp_path):
    with Ranks(2, tmp_path) as ranks:
        is_over = threading.Event()
        thread = threading.Thread(target=is_over.wait, args=(30,), name="save_0")
        thread.start()
        ranks.progress[1].saves.append(Save(20))
        for number in range(200):
            for rank in (0, 1):
                ranks.step(rank, number)
            time.sleep(0.05)
            if ranks.ended:
                break
        ranks.wait_until_ended((0, 1))
        is_over.set()
        thread.join()
    assert ranks.ended[0].startswith("the save of step 20 hangs: rank 1 [dp1]")
    assert "threading.py" in ranks.ended[0], "the stack of the saves' thread"


def test_a_run_whose_ranks_work_is_left_alone(tmp_path):
    """Steps of 0.1 s, one of them five times as long, saves and a validation: nothing passes its deadline."""
    with Ranks(2, tmp_path) as ranks:
        for number in range(40):
            for rank in (0, 1):
                ranks.step(rank, number, waits="sums")
                if number % 10 == 0:
                    ranks.progress[rank].saves.append(Save(number))
                if number % 10 == 3:
                    ranks.progress[rank].saves.popleft()
                if number == 30:
                    ranks.progress[rank].phases.begin(Phase.VALIDATE)
            time.sleep(0.5 if number == 20 else 0.9 if number == 30 else 0.05)
        assert not ranks.ended
        found = read_ranks(tmp_path)[1]
    assert [line.rank for line in found] == [0, 1]
    assert {line.phase for line in found} <= set(map(str, Phase))


class CountingStore:
    def __init__(self, store):
        self.store, self.asked = store, 0

    def __getattr__(self, name):
        self.asked += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("world", [8, 1024])
def test_a_beat_asks_the_store_no_more_in_a_large_world(world):
    store = dist.HashStore()
    for rank in range(world):
        Board(store, rank, world).write(RankStatus(rank, "n", 1, "", "step", 1, 0.0).to_json())
    counting = CountingStore(store)
    board = Board(counting, 0, world)
    board.read(range(world))
    counting.asked = 0
    board.write("line")
    assert board.find_alarm() is None
    assert len(board.read(range(world))) == world
    assert counting.asked == 3


def test_a_board_without_some_ranks_is_read_all_the_same():
    store = dist.HashStore()
    Board(store, 2, 4).write("here")
    board = Board(store, 0, 4)
    assert board.read(range(4)) == [None, None, "here", None]
    assert board.find_verdict() is None
    assert [board.claim(), Board(store, 1, 4).claim()] == [True, False]
    board.sound_alarm("first")
    Board(store, 1, 4).sound_alarm("second")
    assert board.find_alarm() == "first"


def test_what_ranks_do_is_written_whole_or_not_at_all(tmp_path):
    lines = [RankStatus(rank, "n", 1, "dp0", "step", 4, 0.5) for rank in range(3)]
    write_ranks(tmp_path, lines)
    written_s, found = read_ranks(tmp_path)
    assert found == lines
    assert abs(time.time() - written_s) < 60
    (tmp_path / RANKS_FILE).write_text(json.dumps({"unix_s": 1})[:-4])
    assert read_ranks(tmp_path) == (0.0, [])
    assert read_ranks(tmp_path / "absent") == (0.0, [])
