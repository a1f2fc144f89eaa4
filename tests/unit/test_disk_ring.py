"""States on a disk: what the ring leaves is what the same updates leave in memory, and whatever ends it leaves no thread."""

import errno
import os
import threading
import time

import pytest
import torch

from framework.errors import OffloadError, StorageError
from framework.optim import disk_ring
from framework.optim.disk_file import PAGE_BYTES
from framework.optim.disk_ring import (
    NUM_BUFFERS,
    DiskShard,
    DiskState,
    DiskStates,
    file_bytes,
    place_chunks,
    ring_bytes,
)

FP32 = tuple(DiskState(name, torch.float32) for name in ("master", "exp_avg", "exp_avg_sq"))
# Moments of fewer bits.
MIXED = (
    DiskState("master", torch.float64),
    DiskState("exp_avg", torch.bfloat16),
    DiskState("exp_avg_sq", torch.int8),
)
# Of a chunk of FP32, once chunks are small.
CHUNK_NUMEL = 4096


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(disk_ring, "CHUNK_BYTES", 12 * CHUNK_NUMEL)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    before = threading.enumerate()
    yield
    assert threading.enumerate() == before


@pytest.fixture
def open_states(tmp_path):
    """Make states of shards of the given sizes; the files are gone afterwards."""
    opened = []

    def make(*numels, kinds=FP32):
        opened.append(DiskStates(tmp_path / "run-001", "rank-0", [DiskShard(each, kinds) for each in numels]))
        return opened[-1]

    yield make
    for each in opened:
        each.close()
    assert not list(tmp_path.iterdir())


def double(shard, where, states):
    states["master"].mul_(2)


def filled(states):
    """The states, with the numbers 1, 2, ... as masters."""
    for index, shard in enumerate(states.shards):
        states.tensor(index, "master").write(torch.arange(1.0, shard.numel + 1))
    return states


class Adam:
    """torch's fused AdamW over tensors that are handed in: as a whole, or in chunks."""

    def __init__(self, num_steps):
        self.num_steps = num_steps

    def __call__(self, states, gradient):
        torch._fused_adamw_(
            [states["master"]], [gradient], [states["exp_avg"]], [states["exp_avg_sq"]], [], [torch.tensor(self.num_steps)],
            lr=1e-2, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip


# One element; less than a page; one chunk exactly; one more and one less; several chunks and an odd rest; nothing.
SIZES = (1, 1000, CHUNK_NUMEL, CHUNK_NUMEL + 1, 2 * CHUNK_NUMEL - 1, 5 * CHUNK_NUMEL + 77, 0)


def test_updates_on_disk_are_bitwise_those_in_memory(open_states):
    states = open_states(*SIZES)
    in_memory = [{kind.name: torch.zeros(numel) for kind in FP32} for numel in SIZES]
    for index, expected in enumerate(in_memory):
        expected["master"].normal_()
        states.tensor(index, "master").write(expected["master"])
    for step in range(1, 8):
        gradients = [torch.randn(numel) for numel in SIZES]
        update = Adam(float(step))
        states.update(range(len(SIZES)), lambda shard, where, found: update(found, gradients[shard][where]))  # noqa: B023
        for expected, gradient in zip(in_memory, gradients, strict=True):
            update(expected, gradient)
    for index, expected in enumerate(in_memory):
        for name, values in expected.items():
            assert torch.equal(states.tensor(index, name).read(), values), (index, name)


def test_chunks_come_in_order_and_cover_every_element_once(open_states):
    states, seen = open_states(*SIZES), []
    states.update([5, 0, 6, 4], lambda shard, where, found: seen.append((shard, where.start, where.stop)))
    expected = [(5, at, min(at + CHUNK_NUMEL, SIZES[5])) for at in range(0, SIZES[5], CHUNK_NUMEL)]
    assert seen == [*expected, (0, 0, 1), (4, 0, CHUNK_NUMEL), (4, CHUNK_NUMEL, SIZES[4])]


def test_states_of_several_dtypes(open_states):
    numel = 3 * CHUNK_NUMEL + 300
    states = open_states(numel, kinds=MIXED)

    def update(shard, where, found):
        count = where.stop - where.start
        assert [len(found[state.name]) for state in MIXED] == [count] * 3
        for state in MIXED:
            found[state.name] += torch.arange(where.start, where.stop).to(state.dtype)

    for _ in range(3):
        states.update([0], update)
    for state in MIXED:
        expected = sum(torch.arange(numel).to(state.dtype) for _ in range(3))
        assert torch.equal(states.tensor(0, state.name).read(), expected), state


def test_intervals_are_read_and_written_as_those_of_a_tensor(open_states):
    numel = 3 * CHUNK_NUMEL + 300
    states, expected = open_states(numel, kinds=MIXED), torch.zeros(numel, dtype=torch.bfloat16)
    rng = torch.Generator().manual_seed(3)
    for _ in range(40):
        start, stop = sorted(torch.randint(numel + 1, (2,), generator=rng).tolist())
        values = torch.randn(stop - start, generator=rng).bfloat16()
        expected[start:stop] = values
        states.tensor(0, "exp_avg")[start:stop].write(values)
        assert torch.equal(
            states.tensor(0, "exp_avg")[start // 2 : stop][: stop - start // 2].read(), expected[start // 2 : stop]
        )
    # Neighbours in the same chunks are as they were.
    assert not states.tensor(0, "master").read().any()
    assert not states.tensor(0, "exp_avg_sq").read().any()


def test_memory_and_disk_are_what_a_plan_counts(open_states):
    """The ring and a page, for shards of any size; updates and pieces allocate nothing but numbers."""
    shards = [DiskShard(numel, FP32) for numel in SIZES]
    chunks = place_chunks(shards)
    assert ring_bytes(chunks) == NUM_BUFFERS * (12 * CHUNK_NUMEL + PAGE_BYTES) + PAGE_BYTES
    assert ring_bytes(place_chunks([DiskShard(100 * CHUNK_NUMEL, FP32)])) == ring_bytes(chunks)
    states = open_states(*SIZES)
    assert states.host_bytes == ring_bytes(chunks) == sum(map(len, states._buffers)) + len(states._page)
    assert os.stat(states.file.path).st_size == os.stat(states.file.path).st_blocks * 512 == file_bytes(chunks)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        states.update(range(len(SIZES)), double)
        for _ in states.tensor(5, "master").pieces():
            pass
    assert sum(event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage > 0) < 1000
    assert any("mul_" in event.name for event in profile.events())


def test_while_a_chunk_is_computed_the_next_is_read_and_the_last_is_written(open_states, monkeypatch):
    """Each computation waits until the next chunk's read has begun; the next read waits for nothing but its buffer."""
    states = filled(open_states(8 * CHUNK_NUMEL))
    num_reads, num_writes = counted(monkeypatch, "preadv"), counted(monkeypatch, "pwritev")
    offsets = {chunk.start: chunk.number for chunk in states.chunks[0]}

    def update(shard, where, found):
        number = offsets[where.start]
        wait_for(lambda: len(num_reads) >= min(number + 2, 8) and len(num_writes) >= number)

    states.update([0], update)
    assert (len(num_reads), len(num_writes)) == (8, 8)


@pytest.mark.parametrize("slow", ["preadv", "pwritev"])
def test_a_slow_disk_changes_nothing(slow, open_states, monkeypatch):
    states = filled(open_states(6 * CHUNK_NUMEL + 5))
    call, delays = getattr(os, slow), iter([0.0, 0.03, 0.0, 0.0, 0.02] * 4)

    def slowly(*args):
        time.sleep(next(delays))
        return call(*args)

    monkeypatch.setattr(os, slow, slowly)
    for _ in range(2):
        states.update([0], double)
    monkeypatch.undo()
    assert torch.equal(states.tensor(0, "master").read(), 4 * torch.arange(1.0, states.shards[0].numel + 1))


@pytest.mark.parametrize("short", ["preadv", "pwritev"])
def test_reads_and_writes_that_come_out_short_are_continued(short, open_states, monkeypatch):
    states = filled(open_states(3 * CHUNK_NUMEL))
    call = getattr(os, short)
    monkeypatch.setattr(os, short, lambda fd, views, offset: call(fd, [views[0][:PAGE_BYTES]], offset))
    states.update([0], double)
    monkeypatch.undo()
    assert torch.equal(states.tensor(0, "master").read(), 2 * torch.arange(1.0, 3 * CHUNK_NUMEL + 1))


@pytest.mark.parametrize(
    ("call", "number", "kind"),
    [
        ("preadv", errno.EIO, StorageError),
        ("pwritev", errno.EIO, StorageError),
        ("pwritev", errno.ENOSPC, OffloadError),
        ("pwritev", errno.EDQUOT, OffloadError),
        ("preadv", errno.ESTALE, StorageError),
    ],
)
@pytest.mark.parametrize("after", [0, 5, 7])
def test_an_error_of_the_disk_ends_the_update_and_says_where(call, number, kind, after, open_states, monkeypatch):
    """At the first chunk, in the middle, at the last: the error comes out, and the half updated states are never used."""
    states = filled(open_states(8 * CHUNK_NUMEL))
    fail_after(monkeypatch, call, after, OSError(number, os.strerror(number)))
    with pytest.raises(kind, match=errno.errorcode[number] if kind is StorageError else "no room") as raised:
        states.update([0], double)
    assert "memory.offload.disk_path" in str(raised.value)
    assert str(states.file.path.parent) in str(raised.value)
    monkeypatch.undo()
    refuses_all_use(states)


@pytest.mark.parametrize("error", [MemoryError("none left"), SystemExit(3)])
@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_the_death_of_a_thread_is_heard(call, error, open_states, monkeypatch):
    states = filled(open_states(8 * CHUNK_NUMEL))
    fail_after(monkeypatch, call, 4, error)
    with pytest.raises(type(error)):
        states.update([0], double)
    monkeypatch.undo()
    refuses_all_use(states)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("of the run")])
@pytest.mark.parametrize("after", [0, 3, 7])
def test_what_the_update_raises_ends_it_and_its_threads(error, after, open_states):
    states, calls = filled(open_states(8 * CHUNK_NUMEL)), []

    def update(*args):
        if len(calls) == after:
            raise error
        calls.append(args)

    with pytest.raises(type(error)):
        states.update([0], update)
    refuses_all_use(states)


@pytest.mark.parametrize("size", [0, 5 * CHUNK_NUMEL, 95 * CHUNK_NUMEL])
def test_a_truncated_file_is_noticed(size, open_states):
    states = filled(open_states(8 * CHUNK_NUMEL))
    os.truncate(states.file.path, size)
    with pytest.raises(StorageError, match=r"changed from outside.*checkpoints are untouched"):
        states.update([0], double)
    refuses_all_use(states)


def test_a_hole_that_a_write_has_covered_is_noticed(open_states):
    """Truncated while it is updated, the file gets its length back by the next write: what lies before reads as zeros."""
    states = filled(open_states(8 * CHUNK_NUMEL))

    def cut(shard, where, found):
        if where.stop == states.shards[0].numel:
            os.truncate(states.file.path, 0)

    states.update([0], cut)
    assert os.stat(states.file.path).st_size == states.file.num_bytes
    with pytest.raises(StorageError, match="stamp"):
        states.update([0], double)


def test_a_file_that_is_set_back_is_noticed(open_states):
    """Also an update that is lost, or done twice, on the disk alone."""
    states = filled(open_states(2 * CHUNK_NUMEL))
    before = states.file.path.read_bytes()
    states.update([0], double)
    with open(states.file.path, "r+b") as file:
        file.write(before)
    with pytest.raises(StorageError, match="stamp"):
        list(states.tensor(0, "exp_avg").pieces())


def test_a_removed_file_goes_on_until_it_is_closed(open_states):
    """Its name is gone, the open file is not: no step is lost for that."""
    states = filled(open_states(3 * CHUNK_NUMEL))
    states.file.path.unlink()
    states.update([0], double)
    assert torch.equal(states.tensor(0, "master").read(), 2 * torch.arange(1.0, 3 * CHUNK_NUMEL + 1))


def refuses_all_use(states):
    for use in (lambda: states.update([0], double), lambda: states.tensor(0, "master").read()):
        with pytest.raises(StorageError, match="of no step"):
            use()


def counted(monkeypatch, name):
    """The offsets with which `os.name` is called from now on."""
    call, offsets = getattr(os, name), []

    def counting(fd, views, offset):
        offsets.append(offset)
        return call(fd, views, offset)

    monkeypatch.setattr(os, name, counting)
    return offsets


def fail_after(monkeypatch, name, num_calls, error):
    call, calls = getattr(os, name), []

    def failing(*args):
        calls.append(args)
        if len(calls) > num_calls:
            raise error
        return call(*args)

    monkeypatch.setattr(os, name, failing)


def wait_for(is_true, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.001)
