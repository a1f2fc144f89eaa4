"""What a reader of a checkpoint costs, and what it makes of a file system that fails: nothing is condemned that can be whole."""

import errno
import gc
import os
import pickle
import resource
import tracemalloc
import weakref
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from framework import object_store
from framework.checkpoint import blocks, load
from framework.checkpoint.blocks import BlockCache, BlockFile, BlockHashes
from framework.checkpoint.index import INDEX_BLOCK_BYTES, DamagedCheckpoint, narrow
from framework.checkpoint.load import Reader, inspect_command, load_checkpoint, load_newest
from framework.checkpoint.staging import Entry
from framework.errors import EXIT_FAILED, StorageError
from framework.mesh.layout import Layout, Shard, part
from tests.unit.test_checkpoint import (
    ALONE,
    assert_loaded,
    blank_entries,
    owned,
    save,
    save_world,
)

# --- memory


@pytest.mark.parametrize(("buffer_blocks", "most_blocks"), [(0.25, 1), (4, 4)])
def test_memory_of_a_reader_is_bounded_over_all_files_together(tmp_path, buffer_blocks, most_blocks):
    """48 files of four blocks each: before, each file kept its last read."""
    block_bytes, world = 64 << 10, 48
    shape = (world * 4 * block_bytes // 4,)
    layouts = [Layout(shape, interval=part(shape[0], rank, world)) for rank in range(world)]
    values = torch.arange(shape[0], dtype=torch.float32)
    ranks = [[Entry("weight/w", each, values[slice(*each.interval)])] for each in layouts]
    path = save_world(tmp_path, 1, ranks, {}, block_bytes)
    whole = Entry("weight/w", Layout(shape), torch.zeros(shape))
    others = len(os.listdir("/proc/self/fd"))
    tracemalloc.start()
    reader = Reader(path, int(buffer_blocks * block_bytes))
    reader.fill([whole])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(whole.data, values)
    assert reader.cache.most_bytes <= most_blocks * block_bytes
    # Beside the blocks: the manifest, and rows that lie in two blocks.
    assert peak < (most_blocks + 1) * block_bytes + (512 << 10)
    assert len(os.listdir("/proc/self/fd")) - others < 8


def test_an_entry_of_many_boxes_is_looked_up_and_read_in_bounded_parts(tmp_path, monkeypatch):
    shape = (50, 8)
    values = torch.arange(400, dtype=torch.float32)
    path = save_world(tmp_path, 1, [[Entry("weight/w", Layout(shape), values)]], {}, 64)
    # Two runs of columns: 100 boxes.
    layout = Layout(shape, (Shard("tp", 1, 1, 2, (4, 4)),))
    mine = Entry("weight/w", layout, torch.zeros(layout.numel_owned))
    reader, at_once = Reader(path), []
    plain = reader._read
    monkeypatch.setattr(load, "MAX_NEEDS", 30)
    monkeypatch.setattr(reader, "_read", lambda needs: (at_once.append(len(needs)), plain(needs)))
    reader.fill([mine])
    assert at_once == [30, 30, 30, 10]
    assert torch.equal(mine.data.view(50, 4), values.view(shape)[:, [2, 3, 6, 7]])


def test_memory_of_a_reader_that_met_damage_is_free_before_the_next_one_reads(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        path = save(tmp_path, step)
    for step in (2, 3):
        file = path.with_name(f"step-{step:08d}") / "rank-00000.bin"
        file.write_bytes(b"!" + file.read_bytes()[1:])
    caches, held = [], []

    class Watched(BlockCache):
        def __init__(self, max_bytes):
            super().__init__(max_bytes)
            gc.collect()
            held.append(sum(cache() is not None for cache in caches))
            caches.append(weakref.ref(self))

    monkeypatch.setattr(load, "BlockCache", Watched)
    assert load_newest(tmp_path, blank_entries(), ALONE) == {"step": 1}
    assert held == [0, 0, 0]


# --- what one rank reads of thousands of ranks' checkpoint


def reads_of_one_rank(root, world, monkeypatch):
    """Bytes that the middle one of `world` ranks reads, by file, when it loads its own part of 10 tensors."""
    shape = (world * 40, 4)
    numel = world * 160
    ranks = [
        [
            Entry(f"weight/{n}", layout, torch.full((layout.numel_owned,), float(rank)))
            for n in range(10)
            for layout in [Layout(shape, interval=part(numel, rank, world))]
        ]
        for rank in range(world)
    ]
    monkeypatch.setattr(os, "fsync", lambda number: None)
    path = save_world(root / str(world), 1, ranks, {}, INDEX_BLOCK_BYTES)
    monkeypatch.undo()
    reader, read = Reader(path), {}
    plain = reader.cache.files.read

    def counted(path, into, start, afresh=False):
        read[path.name] = read.get(path.name, 0) + len(into)
        plain(path, into, start, afresh=afresh)

    monkeypatch.setattr(reader.cache.files, "read", counted)
    mine = [Entry(entry.name, entry.layout, torch.zeros_like(entry.data)) for entry in ranks[world // 2]]
    reader.fill(mine)
    assert all(torch.equal(a.data, b.data) for a, b in zip(mine, ranks[world // 2], strict=True))
    return read


def test_a_rank_reads_no_more_of_a_larger_world_than_a_few_blocks_of_the_index(tmp_path, monkeypatch):
    few, many = (reads_of_one_rank(tmp_path, world, monkeypatch) for world in (32, 512))
    for world, read in ((32, few), (512, many)):
        assert set(read) == {"index.bin", f"rank-{world // 2:05d}.bin"}
    assert few[f"rank-{16:05d}.bin"] == many[f"rank-{256:05d}.bin"]
    # Of 10 entries with 512 pieces of 32 bytes each: mostly one block an entry, at most two, and the hashes above them.
    assert many["index.bin"] <= (10 * 2 + 3) * INDEX_BLOCK_BYTES < 10 * 512 * 32


# --- bytes read, and where they land

BLOCK = 4 << 10
SHAPE = (256, 192)
ROWS, COLUMNS = (Shard("tp", dim, 0, 2) for dim in (0, 1))


def shards(shard=None, divided=False):
    """The layouts of two ranks: by a shard, or each half of the elements, or all of them."""
    if shard is not None:
        return [Layout(SHAPE, (replace(shard, index=rank),)) for rank in range(2)]
    numel = SHAPE[0] * SHAPE[1]
    return [Layout(SHAPE, interval=part(numel, rank, 2) if divided else None) for rank in range(2)]


def sizes_read(reader, monkeypatch):
    """Of all that the reader reads from now on, the index included."""
    sizes, plain = [], reader.cache.files.read

    def read(path, into, start, **how):
        sizes.append(len(into))
        plain(path, into, start, **how)

    monkeypatch.setattr(reader.cache.files, "read", read)
    return sizes


WHOLE = [Layout(SHAPE)]
RESHARDED = {
    "2 to 1": (shards(divided=True), WHOLE),
    "1 to 2": (WHOLE, shards(divided=True)),
    "rows of tp 2 to pp 2": (shards(ROWS), WHOLE),
    "columns of tp 2 to pp 2": (shards(COLUMNS), WHOLE),
    "1 to rows of tp 2": (WHOLE, shards(ROWS)),
    "zero 3 to 0, whose replicas divide the reading": (shards(divided=True), shards(divided=True)),
}


@pytest.mark.parametrize("case", RESHARDED)
def test_a_rank_reads_at_most_a_tenth_more_than_it_asks_for(tmp_path, monkeypatch, case):
    saved, wanted = RESHARDED[case]
    values = {f"weight/{n}": torch.randn(SHAPE, generator=torch.Generator().manual_seed(n)) for n in range(4)}
    ranks = [[Entry(name, each, owned(tensor, each)) for name, tensor in values.items()] for each in saved]
    path = save_world(tmp_path, 1, ranks, {}, BLOCK)
    for layout in wanted:
        mine = [Entry(name, layout, torch.zeros(layout.numel_owned)) for name in values]
        reader = Reader(path)
        read = sizes_read(reader, monkeypatch)
        reader.fill(mine)
        assert all(torch.equal(entry.data, owned(values[entry.name], layout)) for entry in mine)
        assert sum(read) <= 1.1 * sum(entry.data.nbytes for entry in mine)


@pytest.mark.parametrize("case", RESHARDED)
def test_the_disk_is_asked_ahead_for_what_is_read_and_for_nothing_else(tmp_path, monkeypatch, case):
    saved, wanted = RESHARDED[case]
    values = {f"weight/{n}": torch.randn(SHAPE) for n in range(4)}
    ranks = [[Entry(name, each, owned(tensor, each)) for name, tensor in values.items()] for each in saved]
    path = save_world(tmp_path, 1, ranks, {}, BLOCK)
    asked, plain = [], os.posix_fadvise
    monkeypatch.setattr(blocks, "ADVISED_BYTES", 2 * BLOCK)
    monkeypatch.setattr(blocks, "AHEAD_BYTES", 8 * BLOCK)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *rest: asked.append(rest) or plain(fd, *rest))
    for layout in wanted:
        asked.clear()
        mine = [Entry(name, layout, torch.zeros(layout.numel_owned)) for name in values]
        reader = Reader(path)
        read = sizes_read(reader, monkeypatch)
        reader.fill(mine)
        assert all(advice == os.POSIX_FADV_WILLNEED for _, _, advice in asked)
        assert max(size for _, size, _ in asked) <= 2 * BLOCK
        # All of it, but for the index and rest of blocks.
        assert 0.9 * sum(entry.data.nbytes for entry in mine) <= sum(size for _, size, _ in asked) <= sum(read)
        assert not any(reader.cache.files._expected.values())


def test_what_lies_alike_in_file_and_tensor_is_read_in_place(tmp_path):
    """Only what is cut inside a block, as columns are, goes through the cache."""
    ranks = [[Entry("weight/w", Layout(SHAPE), torch.arange(float(SHAPE[0] * SHAPE[1])))]]
    path = save_world(tmp_path, 1, ranks, {}, BLOCK)
    held = []
    for layout in (*WHOLE, *shards(ROWS), *shards(divided=True), *shards(COLUMNS)):
        reader = Reader(path)
        reader.fill([Entry("weight/w", layout, torch.zeros(layout.numel_owned))])
        blocks = {key: len(block) for key, block in reader.cache._blocks.items()}
        held.append(sum(size for (file, level, _), size in blocks.items() if file.name != "index.bin" and level == 0))
    assert held[:5] == [0] * 5
    assert min(held[5:]) > 10 * BLOCK


def test_damage_that_is_met_in_place_names_its_block_and_is_read_twice(tmp_path):
    ranks = [[Entry("weight/w", Layout(SHAPE), torch.arange(float(SHAPE[0] * SHAPE[1])))]]
    path = save_world(tmp_path, 1, ranks, {}, BLOCK)
    file = path / "rank-00000.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[: 7 * BLOCK + 5] + b"!" + whole[7 * BLOCK + 6 :])
    reader = Reader(path)
    with pytest.raises(DamagedCheckpoint) as met:
        reader.fill([Entry("weight/w", Layout(SHAPE), torch.zeros(SHAPE[0] * SHAPE[1]))])
    assert met.value.block == (file, 0, 7)
    with pytest.raises(DamagedCheckpoint):
        Reader(path).confirm(met.value)
    file.write_bytes(whole)
    with pytest.raises(StorageError, match="rank 0 reads what was saved"):
        Reader(path).confirm(met.value)


@pytest.mark.parametrize("hint", [-5, 0, 3, 49, 50, 51, 99, 1000])
@pytest.mark.parametrize("answer", [0, 1, 50, 99, 100])
def test_search_is_right_wherever_the_hint_points_and_short_where_it_is_near(hint, answer):
    asked = []

    def is_late(number):
        asked.append(number)
        return number >= answer

    low, high = narrow(0, 100, hint, is_late)
    assert low <= answer <= high
    distance = abs(min(max(hint, 0), 99) - answer)
    assert high - low <= max(1, distance)
    assert len(asked) <= 2 + max(1, distance).bit_length()


# --- errors of the file system


@pytest.fixture
def impatient(monkeypatch):
    """No pauses between attempts."""
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0,) * len(object_store.PAUSES_S))


@contextmanager
def no_descriptors():
    """This process may open no further file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def failing(monkeypatch, owner, name, number, times, only=""):
    """Have a function of the system raise `number` so many times, for paths with `only` in them; the list of its calls."""
    plain, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        if only in str(args[0]):
            calls.append(args)
            if len(calls) <= times:
                raise OSError(number, os.strerror(number))
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, call)
    return calls


OPERATIONS = [(Path, "read_bytes", "manifest"), (Path, "stat", ".bin"), (os, "open", ".bin"), (os, "preadv", "")]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize(("owner", "name", "only"), OPERATIONS)
def test_an_error_that_passes_costs_nothing_but_a_pause(tmp_path, monkeypatch, impatient, owner, name, only, number):
    save(tmp_path, 1)
    entries = blank_entries()
    calls = failing(monkeypatch, owner, name, number, 2, only)
    assert load_newest(tmp_path, entries, ALONE) == {"step": 1}
    assert len(calls) > 2
    assert_loaded(entries, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(("owner", "name", "only"), OPERATIONS)
def test_an_error_that_stays_ends_the_rank_and_condemns_nothing(tmp_path, monkeypatch, impatient, owner, name, only):
    save(tmp_path, 1)
    save(tmp_path, 2)
    failing(monkeypatch, owner, name, errno.EIO, 10**6, only)
    with pytest.raises(StorageError, match=r"cannot read .*EIO, Input/output error") as caught:
        load_newest(tmp_path, blank_entries(), ALONE)
    monkeypatch.undo()
    assert caught.value.exit_code == EXIT_FAILED
    assert str(tmp_path / "step-00000002") in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_full_table_of_descriptors_condemns_nothing(tmp_path, impatient):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    with no_descriptors(), pytest.raises(StorageError, match="EMFILE, Too many open files"):
        load_checkpoint(path, blank_entries(), ALONE)
    entries = blank_entries()
    assert load_newest(tmp_path, entries, ALONE) == {"step": 2}
    assert_loaded(entries, 2)


def test_a_stale_handle_is_opened_again(tmp_path, monkeypatch, impatient):
    path = save(tmp_path, 1)
    opened = failing(monkeypatch, os, "open", 0, 0, ".bin")
    failing(monkeypatch, os, "preadv", errno.ESTALE, 1)
    load_checkpoint(path, blank_entries(), ALONE)
    assert [Path(args[0]).name for args in opened][:2] == ["index.bin", "index.bin"]


@pytest.mark.parametrize("spoilt", [1, 2])
def test_bytes_that_are_wrong_once_are_read_again(tmp_path, monkeypatch, spoilt):
    """Spoilt on the way is not damaged; wrong twice is."""
    path = save(tmp_path, 1)
    reader, plain, reads = Reader(path), os.preadv, []

    def spoil(number, into, start):
        count = plain(number, into, start)
        reads.append(start)
        if len(reads) <= spoilt:
            into[0][0] ^= 1
        return count

    monkeypatch.setattr(os, "preadv", spoil)
    entries = blank_entries()
    if spoilt == 1:
        reader.fill(entries)
        assert_loaded(entries, 1)
    else:
        with pytest.raises(DamagedCheckpoint, match="changed after it was saved"):
            reader.fill(entries)


def test_a_manifest_that_is_wrong_once_is_read_again(tmp_path, monkeypatch):
    path = save(tmp_path, 1)
    texts = [b"spoilt on the way", (path / "manifest.json").read_bytes()]
    monkeypatch.setattr(Path, "read_bytes", lambda self: texts.pop(0))
    assert load_checkpoint(path, blank_entries(), ALONE) == {"step": 1}


@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_file_that_was_seen_whole_and_is_not_there_for_a_reader_is_no_damage(tmp_path, impatient, how):
    """As of a node whose NFS client has an older view than the rank that opened the checkpoint."""
    reader = Reader(save(tmp_path, 1))
    file = reader.path / "rank-00000.bin"
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(StorageError, match="has seen the file whole"):
        reader.fill(blank_entries())


def test_a_block_that_failed_its_hash_is_not_kept(tmp_path):
    hashes = BlockHashes(64)
    hashes.add(memoryview(bytes(200)))
    tree, root = hashes.finish()
    (tmp_path / "file").write_bytes(b"x" + bytes(199) + tree)
    file = BlockFile(tmp_path / "file", 200, 64, root, BlockCache(1 << 20))
    for _ in range(2):
        with pytest.raises(DamagedCheckpoint, match=r"in bytes \[0, 64\)"):
            file.read(0, 8)
    assert not file.read(64, 200).any()
    assert file.size == (tmp_path / "file").stat().st_size


def test_few_files_are_open_at_once(tmp_path):
    cache = BlockCache(1 << 20)
    for number in range(50):
        (tmp_path / str(number)).write_bytes(bytes(8))
        BlockFile(tmp_path / str(number), 8, 64, xxhash.xxh3_64_intdigest(bytes(8)), cache).read(0, 8)
    held = [
        os.readlink(f"/proc/self/fd/{each}")
        for each in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{each}")
    ]
    assert sum(str(tmp_path) in each for each in held) == blocks.MAX_DESCRIPTORS


def test_damage_that_one_rank_meets_is_confirmed_by_another(tmp_path):
    """A node that reads other bytes than were saved, while they lie whole on the disk, condemns no checkpoint."""
    path = save(tmp_path, 1)
    file = path / "rank-00000.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"!")
    with pytest.raises(DamagedCheckpoint) as caught:
        Reader(path).fill(blank_entries())
    damage = pickle.loads(pickle.dumps(caught.value))
    with pytest.raises(DamagedCheckpoint, match="was changed"):
        Reader(path).confirm(damage)
    file.write_bytes(whole)
    with pytest.raises(StorageError, match="The checkpoint is whole"):
        Reader(path).confirm(damage)


@pytest.mark.parametrize("name", ["index.bin", "rank-00000.bin"])
def test_inspect_finds_a_changed_byte_of_every_file_once(tmp_path, capsys, name):
    file = save(tmp_path, 1) / name
    file.write_bytes(b"!" + file.read_bytes()[1:])
    assert inspect_command(file.parent) == 86
    assert capsys.readouterr().out.count("DAMAGED") == 1
