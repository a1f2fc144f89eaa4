"""Token stores in an object store: bitwise the order of a folder, whatever the cache holds, the store does or a kill leaves."""

import errno
import gc
import os
import pickle
import random
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from framework import object_store
from framework.commands.inspect import inspect_store
from framework.data import remote
from framework.data.loader import Loader, validation_batches
from framework.data.pack import Microbatch, Mode
from framework.data.prepare import prepare
from framework.data.prepared import Prepared, find_prepared, open_found
from framework.data.remote import GIB, KEY, NodeCache, RemoteFile, Root
from framework.data.store import BLOCK_BYTES, hash_block
from framework.errors import EXIT_USER, DamagedStore, DataError, StorageError
from scripts.bench import data as bench
from tests.grid import IN_TURN
from tests.unit.test_data_prepare import make_recipe, make_texts, write_jsonl

pytestmark = IN_TURN

URL = "memory://bucket/tokens"
CONTEXT, B = 128, 3
NUM_TOKENS = 1 << 20  # 32 blocks
SMALL_GB = 0.001  # 16 blocks
ONE_BLOCK_GB = 0.0001
STEP = 2 * B  # samples, of two ranks


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This node's TMPDIR, and an empty object store."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(object_store, "PAUSES_S", (0.0,) * 4)
    monkeypatch.setattr("framework.data.loader.SAMPLES_ASKED_AHEAD", 4 * B)
    monkeypatch.setattr("framework.data.loader.STEPS_READ_AT_ONCE", 4)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    return tmp_path


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("store")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "SHARD_TOKENS", NUM_TOKENS)
        return bench.write_store(folder, NUM_TOKENS)


@pytest.fixture
def put(local: Prepared) -> Callable[..., Prepared]:
    """Opens the same store from the object store, as a process of a node does."""
    store = local.sources[0].folder
    for path in store.iterdir():
        MemoryFileSystem().pipe_file(f"/bucket/tokens/{store.name}/{path.name}", path.read_bytes())
    MemoryFileSystem().pipe_file(f"/bucket/tokens/{store.name}/info.json", b'{"files": {}}')

    def open_it(cache_gb: float = 1.0) -> Prepared:
        found = replace(local, root=Root(URL, cache_gb), sources=(replace(local.sources[0], streams={}),))
        return open_found(found)

    return open_it


def make_loader(prepared: Prepared, pack: Mode = "concat", context: int = CONTEXT) -> Loader:
    return Loader(
        prepared,
        seed=3,
        context=context,
        pack=pack,
        sequences_per_microbatch=B,
        num_microbatches=1,
        dp_rank=1,
        dp_size=2,
    )


def assert_equal(found: list[Microbatch], expected: list[Microbatch]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.labels, other.labels)
        assert (one.position_ids is None) == (other.position_ids is None)
        if one.position_ids is not None:
            assert torch.equal(one.position_ids, other.position_ids)  # type: ignore[arg-type]


def cache_files(here: Path) -> list[Path]:
    return sorted(here.rglob("blocks-*"))


def count_fetches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that are fetched of tokens from now on."""
    plain, fetched = MemoryFileSystem.cat_file, []

    def cat(store: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
        if path.endswith(".tokens"):
            fetched.append(start // BLOCK_BYTES)
        return plain(store, path, start=start, end=end, **more)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat)
    return fetched


@pytest.mark.parametrize("pack", ["concat", "documents", "best_fit"])
def test_order_is_bitwise_that_of_a_folder_and_the_cache_keeps_its_bound(
    local: Prepared, put: Callable[..., Prepared], here: Path, pack: Mode
) -> None:
    with make_loader(local, pack) as expected, make_loader(put(SMALL_GB), pack) as found:
        for cursor in range(0, 40 * STEP, STEP):
            assert_equal(found.batch(cursor), expected.batch(cursor))
    file, index = cache_files(here)
    assert file.stat().st_size + index.stat().st_size <= SMALL_GB * GIB < NUM_TOKENS * 2
    assert file.stat().st_blocks * 512 <= SMALL_GB * GIB


def reopen_at_random_cursors(local: Prepared, put: Callable[..., Prepared], here: Path, times: int) -> None:
    drawn = random.Random(5)
    for _ in range(times):
        cursor = drawn.randrange(20_000)
        with make_loader(local) as expected, make_loader(put(SMALL_GB)) as found:
            for step in range(2):
                assert_equal(found.batch(cursor + step * STEP), expected.batch(cursor + step * STEP))
        for path in cache_files(here):  # as a kill may leave it: some slots and entries half written
            with open(path, "r+b") as file:
                num_bytes = 40 if path.suffix else path.stat().st_size // 8
                for _ in range(4):
                    file.seek(drawn.randrange(path.stat().st_size - num_bytes))
                    file.write(drawn.randbytes(num_bytes))


def test_a_kill_at_any_point_loses_and_repeats_nothing(
    local: Prepared, put: Callable[..., Prepared], here: Path
) -> None:
    reopen_at_random_cursors(local, put, here, 50)


def test_sabotaged_a_cache_that_believes_what_it_holds_is_noticed(
    local: Prepared, put: Callable[..., Prepared], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def believe(cache: NodeCache, hash: int, num_bytes: int) -> bytes | None:
        number, entries = cache._entries(hash)
        ways = np.flatnonzero(entries["hash"] == hash)
        place = (number * len(entries) + int(ways[0])) * BLOCK_BYTES if len(ways) else 0
        return os.pread(cache._file, num_bytes, place) if len(ways) else None

    monkeypatch.setattr(NodeCache, "get", believe)
    with pytest.raises(AssertionError):
        reopen_at_random_cursors(local, put, here, 20)


def test_processes_of_a_node_share_blocks_and_never_bytes_of_another(
    put: Callable[..., Prepared], local: Prepared
) -> None:
    """Several at once on a cache that is too small for them, so that they replace what others read."""
    wrong: list[int] = []
    tokens = local.sources[0].streams["train"].read(0, NUM_TOKENS)

    def read(stream: Any, seed: int) -> None:
        for start in np.random.default_rng(seed).integers(0, NUM_TOKENS - 5000, 150).tolist():
            if not np.array_equal(stream.read(start, start + 5000), tokens[start : start + 5000]):
                wrong.append(start)

    streams = [put(SMALL_GB).sources[0].streams["train"] for _ in range(3)]
    threads = [threading.Thread(target=read, args=(stream, seed)) for seed, stream in enumerate(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_exactly_the_blocks_of_the_next_steps_are_asked_for_and_each_once(
    put: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("framework.data.loader.SAMPLES_ASKED_AHEAD", 5 * B)
    monkeypatch.setattr("framework.data.loader.STEPS_READ_AT_ONCE", 1)
    prepared, fetched = put(), count_fetches(monkeypatch)
    stream, asked = prepared.sources[0].streams["train"], []
    monkeypatch.setattr(
        remote.RemoteFile, "__getitem__", lambda file, index: np.zeros(index.stop - index.start, np.uint16)
    )
    plain = stream.ask
    monkeypatch.setattr(stream, "ask", lambda start, stop: (asked.append(start // CONTEXT), plain(start, stop)))
    with make_loader(prepared) as loader:
        for cursor in range(0, 3 * STEP, STEP):
            loader.batch(cursor)
        loader._thread.submit(lambda: None).result()
        # Read are steps 0 to 3, and steps 4 to 7 are on their way.
        _, sample = loader._order.locate((np.arange(8)[:, None] * STEP + B + np.arange(B)).reshape(-1))
    assert set(asked) == set(sample.tolist())
    touched = {
        each for start in sample.tolist() for each in (start * 256 // BLOCK_BYTES, (start * 256 + 256) // BLOCK_BYTES)
    }
    prepared.sources[0].streams.clear()
    assert sorted(fetched) == sorted(set(fetched))
    assert set(fetched) <= touched


def test_what_is_cached_is_not_fetched_again(put: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch) -> None:
    with make_loader(put()) as loader:
        loader.batch(0)
        loader._thread.submit(lambda: None).result()
        for stream in loader._packer.streams:
            wait(cast(RemoteFile, stream.tokens)._pending.values())  # what was asked for ahead
    fetched = count_fetches(monkeypatch)
    with make_loader(put()) as loader:
        loader.batch(0)
    assert fetched == []


def test_the_least_recently_used_block_makes_room(here: Path) -> None:
    cache = NodeCache(here, 2 * (BLOCK_BYTES + remote.ENTRY.itemsize))
    blocks = [bytes([number]) * BLOCK_BYTES for number in range(3)]
    hashes = [hash_block(np.frombuffer(block, np.uint8)) for block in blocks]
    for number in (0, 1):
        cache.put(hashes[number], blocks[number])
    assert cache.get(hashes[0], BLOCK_BYTES) == blocks[0]
    cache.put(hashes[2], blocks[2])
    assert [cache.get(hash, BLOCK_BYTES) for hash in hashes] == [blocks[0], None, blocks[2]]
    del cache
    NodeCache(here, 3 * (BLOCK_BYTES + remote.ENTRY.itemsize))
    assert [path.name for path in cache_files(here)] == ["blocks-3", "blocks-3.index"]


def test_a_store_that_fails_for_a_while_costs_nothing_and_one_that_stays_so_names_its_key(
    local: Prepared, put: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, left = MemoryFileSystem.cat_file, [3]

    def fail(store: Any, path: str, **more: Any) -> Any:
        if path.endswith(".tokens") and left[0] > 0:
            left[0] -= 1
            raise RuntimeError("503 slow down")
        data = plain(store, path, **more)
        return data[:-1] if left[0] == -1 else data

    prepared = put(ONE_BLOCK_GB)
    monkeypatch.setattr(MemoryFileSystem, "cat_file", fail)
    with make_loader(local) as expected, make_loader(prepared) as found:
        assert_equal(found.batch(0), expected.batch(0))
    left[0] = 10**6
    with make_loader(prepared) as found, pytest.raises(StorageError, match=rf"{KEY}: .*503 slow down"):
        found.batch(9000)
    left[0] = -1
    with (
        make_loader(put(ONE_BLOCK_GB)) as found,
        pytest.raises(DamagedStore, match=r"memory://\S+/train.tokens: bytes"),
    ):
        found.batch(12_000)


def test_a_store_that_hangs_or_has_lost_a_file_is_an_error(
    put: Callable[..., Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared, gate = put(ONE_BLOCK_GB), threading.Event()
    monkeypatch.setattr(remote, "WAIT_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "cat_file", lambda *args, **more: gate.wait())
        with make_loader(prepared) as found, pytest.raises(StorageError, match=rf"{KEY}: .* has not answered for 0 s"):
            found.batch(0)
        gate.set()
    store = prepared.sources[0].folder.name
    del MemoryFileSystem.store[f"/bucket/tokens/{store}/train.tokens"]
    with make_loader(put(ONE_BLOCK_GB)) as found, pytest.raises(DamagedStore, match=r"train.tokens: missing"):
        found.batch(15_000)


def test_validation_reads_the_same_and_no_thread_is_left(put: Callable[..., Prepared], local: Prepared) -> None:
    def read(prepared: Prepared) -> list[Microbatch]:
        words: Any = {"split": "train", "context": 4096, "pack": "concat", "sequences_per_microbatch": 2, "limit": 20}
        return list(validation_batches(prepared, **words))

    before = set(threading.enumerate())
    assert_equal(read(put()), read(local))
    gc.collect()
    left = [thread for thread in threading.enumerate() if thread not in before]
    for thread in left:
        thread.join(1)
    assert not any(thread.is_alive() for thread in left)


def test_a_cache_that_the_disk_has_no_room_for_names_its_key(put: Callable[..., Prepared]) -> None:
    with pytest.raises(DataError, match=r"data.cache_gb: a cache of .* set TMPDIR"):
        put(10**6)


def test_small_files_of_any_size_are_copied_whole(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 has an error for a range behind an object's end, an empty object's first one too."""
    original = object_store.ObjectPath.read_range

    def read_range(self: object_store.ObjectPath, start: int, stop: int) -> bytes:
        if start >= self.read_size():
            raise OSError(errno.EINVAL, "The requested range is not satisfiable")
        return original(self, start, stop)

    monkeypatch.setattr(object_store.ObjectPath, "read_range", read_range)
    monkeypatch.setattr(remote, "COPY_BYTES", 10)
    for size in (0, 9, 10, 20, 21):
        path = object_store.ObjectPath(f"{URL}/{size}")
        path.write_bytes(bytes(range(size)))
        assert remote._download(path, here / "copy")
        assert (here / "copy").read_bytes() == bytes(range(size))
    assert not remote._download(object_store.ObjectPath(f"{URL}/nothing"), here / "copy")


def test_prepare_puts_a_store_that_another_node_trains_on_without_the_sources(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in front of each object, it goes on to equal bytes."""
    source = write_jsonl(here / "a.jsonl", make_texts(200))
    folder, url = make_recipe(here / "folder", source), make_recipe(URL, source)
    expected, plain, sent, deaths = prepare(folder, 1, progress=False), remote._upload, list[str](), 0

    def die(path: Path, to: Any) -> None:
        if len(sent) == deaths:
            raise KeyboardInterrupt
        plain(path, to)
        sent.append(path.name)

    monkeypatch.setattr(remote, "_upload", die)
    while deaths < 20:
        sent.clear()
        try:
            found = prepare(url, 1, progress=False)
            break
        except KeyboardInterrupt:
            deaths += 1
            names = {name.rpartition("/")[2] for name in MemoryFileSystem.store}
            assert "store.json" not in names
            assert "info.json" not in names or {"tokenizer.json", "tokenizer_config.json"} <= names
    assert (found.fingerprint, len(sent)) == (expected.fingerprint, deaths)
    assert not list(here.joinpath(f"meshwright-{os.getuid()}").rglob("*.tokens"))
    names = {name.rpartition("/")[2] for name in MemoryFileSystem.store}
    assert {"store.json", "train.tokens", "train.ends", "checksums", "info.json", "tokenizer.json"} <= names
    told = pickle.dumps(find_prepared(url))
    (third := here / "third").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(third))
    assert open_found(pickle.loads(told)).sources[0].folder.is_relative_to(third)
    (other := here / "other").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(other))
    source.unlink()
    elsewhere = open_found(find_prepared(url))
    assert elsewhere.tokenizer.is_relative_to(other)
    with make_loader(expected, "documents", 16) as one, make_loader(elsewhere, "documents", 16) as two:
        for cursor in range(0, 20 * STEP, STEP):
            assert_equal(two.batch(cursor), one.batch(cursor))


def test_a_place_that_cannot_be_written_to_names_its_key(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make_recipe(URL, write_jsonl(here / "a.jsonl", make_texts(50)))
    refuse = lambda *args, **more: (_ for _ in ()).throw(PermissionError("Access Denied"))  # noqa: E731
    monkeypatch.setattr(MemoryFileSystem, "_open", refuse)
    with pytest.raises(DataError, match=r"data.root=memory://bucket/tokens: tokens cannot be put there.*Access Denied"):
        prepare(recipe, 1, progress=False)


def test_caches_of_two_sizes_stand_beside_each_other_while_both_are_used(here: Path) -> None:
    small, large = NodeCache(here, 3 * BLOCK_BYTES + 100), NodeCache(here, 9 * BLOCK_BYTES + 300)
    data = bytes(range(256)) * (BLOCK_BYTES // 256)
    hash = hash_block(np.frombuffer(data, np.uint8))
    for cache in (small, large):
        cache.put(hash, data)
        assert cache.get(hash, BLOCK_BYTES) == data
    assert len(cache_files(here)) == 4
    del small, cache
    gc.collect()
    NodeCache(here, 9 * BLOCK_BYTES + 300)
    assert len(cache_files(here)) == 2


def test_a_store_is_inspected_where_it_lies(put: Callable[..., Prepared], capsys: pytest.CaptureFixture[str]) -> None:
    folder = put().sources[0].folder
    url = f"{URL}/{folder.name}"
    assert inspect_store(object_store.open_place(url)) == 0
    assert "every checksum fits" in capsys.readouterr().out
    for name, data in MemoryFileSystem.store.items():
        if name.endswith("train.tokens"):
            data.seek(BLOCK_BYTES + 5)
            data.write(b"xx")
    assert inspect_store(object_store.open_place(url)) == EXIT_USER
    said = capsys.readouterr().out
    assert f"DAMAGED       {url}/train.tokens" in said and "block 1)" in said  # noqa: PT018
