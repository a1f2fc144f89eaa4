"""Joining shards into one file per split: killed or out of disk anywhere, it goes on to equal bytes."""

import errno
import json
import multiprocessing
import os
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from framework.data import join, shard
from framework.data.join import JoinPlan, join_store
from framework.data.prepared import find_prepared
from framework.data.shard import SplitReport, fingerprint_shards, shard_path, sum_splits
from framework.data.store import SPLITS, STORE_VERSION, StoreMeta, open_stream
from framework.errors import DataError
from framework.recipe.schema import Data, Recipe, Source
from tests.grid import IN_TURN
from tests.unit.test_data_prepare import build, make_recipe, make_texts, read_tree, tokenize_only, write_jsonl

pytestmark = IN_TURN

NUM_SHARDS = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """`tokenized` is a root whose store waits to be joined, `whole` the same joined; each of the source's files is a shard."""
    place = tmp_path_factory.mktemp("join")
    for number in range(NUM_SHARDS):
        write_jsonl(place / f"{number}.jsonl", make_texts(40, number))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("framework.data.records.MIN_SHARD_BYTES", 1)
        patch.setattr(join, "BATCH_BYTES", 3000)  # two batches of the training split
        tokenize_only(recipe_of(place, "tokenized"))
        build(recipe_of(place, "whole"))
        yield place


def recipe_of(place: Path, root: str) -> Recipe:
    return make_recipe(place / root, f"{place}/*.jsonl")


def copy_root(place: Path, name: str) -> Path:
    """A copy of `tokenized`; the folder of its store."""
    shutil.rmtree(place / name, ignore_errors=True)
    shutil.copytree(place / "tokenized", place / name)
    return next((place / name).glob("s0-*"))


def test_a_joined_store_is_its_shards_one_after_another(place: Path) -> None:
    folder = copy_root(place, "joined")
    shards = sorted(folder.glob("*.train.tokens"))
    tokens = np.concatenate([np.fromfile(path, np.uint16) for path in shards])
    own_ends = [np.fromfile(path.with_suffix(".ends"), np.int64) for path in shards]
    assert len(own_ends) == NUM_SHARDS
    starts = np.cumsum([0, *(ends[-1] for ends in own_ends)])
    join_store(folder)
    meta = StoreMeta.read(folder)
    assert meta is not None
    stream = open_stream(folder, meta, "train")
    assert stream.read(0, stream.num_tokens).tolist() == tokens.tolist()
    ends = stream.ends_within(0, stream.num_tokens).tolist()
    assert ends == np.concatenate([each + start for each, start in zip(own_ends, starts, strict=False)]).tolist()
    assert stream.num_documents == len(ends)
    assert sorted(path.name for path in folder.iterdir()) == [
        *("checksums", "shards.json", "store.json", "train.ends", "train.tokens"),
        *("validation.counts", "validation.ends", "validation.tokens"),
    ]


# Interrupted


class Faults:
    """Fails at operation number `at` on the file system (writes, syncs, renames, removals); `num_done` counts them."""

    def __init__(self, at: int, fail: Callable[[Path | None], None]) -> None:
        self.at = at
        self.num_done = 0
        self._fail = fail

    def install(self, patch: pytest.MonkeyPatch) -> None:
        write = os.pwrite

        def pwrite(file: int, data: memoryview, offset: int) -> int:
            if self.num_done == self.at:
                write(file, data[: len(data) // 2], offset)  # a write that is cut off has done its half
            self._count()
            return write(file, data, offset)

        patch.setattr(os, "pwrite", pwrite)
        for name in ("fsync", "replace", "unlink"):
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **more: Any) -> Any:
            self._count(args[0] if operation.__name__ == "unlink" else None)
            return operation(*args, **more)

        return counted

    def _count(self, path: Path | None = None) -> None:
        """path: where the system's error would name it."""
        self.num_done += 1
        if self.num_done == self.at + 1:
            self._fail(path)


def join_until(folder: Path, at: int) -> None:
    """Joins and dies like a killed process at operation `at`: nothing is cleared up."""
    with pytest.MonkeyPatch.context() as patch:
        Faults(at, lambda path: os._exit(9)).install(patch)
        join_store(folder)


def in_child(body: Callable[..., None], *args: Any) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=body, args=args)
    process.start()
    process.join(60)
    return process.exitcode


def test_a_join_killed_at_any_moment_goes_on_to_equal_bytes(place: Path) -> None:
    expected, at = read_tree(place / "whole"), 0
    while True:
        folder = copy_root(place, "killed")
        code = in_child(join_until, folder, at)
        if code == 0:
            break
        assert code == 9
        assert not (folder / "store.json").exists() or read_tree(place / "killed") == expected
        build(recipe_of(place, "killed"))
        assert read_tree(place / "killed") == expected, f"killed at operation {at}"
        at += 1
    assert at > 30


def read_error(recipe: Recipe) -> str | None:
    """What the user reads of a disk that is full; None where it was not."""
    try:
        build(recipe)
    except DataError as error:
        return str(error)
    return None


def test_a_disk_that_fills_up_at_any_moment_is_the_users_error_and_loses_nothing(place: Path) -> None:
    expected, at = read_tree(place / "whole"), 0

    def fail(path: Path | None) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *([str(path)] if path else []))

    while True:
        copy_root(place, "full")
        with pytest.MonkeyPatch.context() as patch:
            Faults(at, fail).install(patch)
            error = read_error(recipe_of(place, "full"))
        if error is None:
            break
        assert re.match(rf"{place}/full/s0\S+: No space left on device. About [\d,]+ more bytes", error)
        build(recipe_of(place, "full"))
        assert read_tree(place / "full") == expected, f"full at operation {at}"
        at += 1
    assert at > 30


def test_a_shard_is_removed_only_when_its_bytes_are_on_the_disk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_root(place, "synced")
    unsynced: set[int] = set()
    removed: list[str] = []
    pwrite, fsync, unlink = os.pwrite, os.fsync, os.unlink

    def watch_write(file: int, data: memoryview, offset: int) -> int:
        unsynced.add(file)
        return pwrite(file, data, offset)

    def watch_sync(file: int) -> None:
        unsynced.discard(file)
        fsync(file)

    def watch_unlink(path: Path) -> None:
        if str(path).endswith((".tokens", ".ends")):
            assert not unsynced, f"{path} goes before what was made of it is on the disk"
            removed.append(path.name)
        unlink(path)

    monkeypatch.setattr(os, "pwrite", watch_write)
    monkeypatch.setattr(os, "fsync", watch_sync)
    monkeypatch.setattr(os, "unlink", watch_unlink)
    join_store(folder)
    assert len(removed) == 4 * NUM_SHARDS


def test_joining_needs_little_more_disk_than_the_shards_had(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_root(place, "peak")
    monkeypatch.setattr(join, "BATCH_BYTES", 1)
    plan = JoinPlan.read(folder)
    assert plan is not None
    sizes, before = [], measure_tokens(folder)
    largest = max(path.stat().st_size for path in folder.glob("*.tokens"))
    pwrite = os.pwrite

    def watch_write(file: int, data: memoryview, offset: int) -> int:
        written = pwrite(file, data, offset)
        sizes.append(measure_tokens(folder))
        return written

    monkeypatch.setattr(os, "pwrite", watch_write)
    join_store(folder)
    assert measure_tokens(folder) == before < max(sizes) <= before + largest


def measure_tokens(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.tokens"))


@pytest.mark.parametrize("damage", ["lost", "cut", "changed"])
def test_a_shard_that_is_not_what_was_written_is_damage(place: Path, damage: str) -> None:
    path = shard_path(copy_root(place, "damaged"), 1, "train.tokens")
    if damage == "lost":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, 10)
    else:
        path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(DataError, match=r"train.tokens: bytes [1-9].*delete the folder .*meshwright prepare"):
        build(recipe_of(place, "damaged"))


# Of any size


def write_shards(folder: Path, num_shards: int) -> JoinPlan:
    """A tokenized store of tiny shards, as `prepare` leaves it to be joined; every file of a shard is there."""
    shards: list[dict[str, SplitReport]] = []
    tokens = np.arange(20, dtype=np.uint16).tobytes()
    ends = np.array([5, 20], dtype=np.int64).tobytes()
    report = SplitReport(2, 20, xxhash.xxh3_128_hexdigest(tokens + ends))
    folder.mkdir()
    for number in range(num_shards):
        for split in SPLITS:
            shard_path(folder, number, f"{split}.tokens").write_bytes(tokens)
            shard_path(folder, number, f"{split}.ends").write_bytes(ends)
        shards.append(dict.fromkeys(SPLITS, report))
    fingerprint = fingerprint_shards(shards, "")
    meta = StoreMeta(STORE_VERSION, {}, 1, "", "", 20, 0, "uint16", 1, sum_splits(shards), 0, 0, fingerprint)
    plan = JoinPlan(meta, [["a.jsonl", 1, 1]], shards)
    plan.write(folder)
    return plan


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.grid
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="counts maps through /proc")
def test_a_store_of_thousands_of_shards_has_six_descriptors_and_maps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, num_shards = tmp_path / "store", 2000
    plan = write_shards(folder, num_shards)
    at_once, pwrite, before = [], os.pwrite, count_descriptors()

    def watch_write(file: int, data: memoryview, offset: int) -> int:
        at_once.append(count_descriptors())
        return pwrite(file, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", watch_write)
        patch.setattr(os, "fsync", lambda file: None)
        join_store(folder)
    assert max(at_once) <= before + 3
    meta = StoreMeta.read(folder)
    assert meta is not None
    assert meta == plan.meta
    assert (folder / "store.json").stat().st_size < 2000, "every rank is told this"
    before = count_descriptors()
    streams = {split: open_stream(folder, meta, split) for split in SPLITS}
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    assert count_descriptors() - before <= 6
    assert len(maps) <= 6
    for stream in streams.values():
        assert (stream.num_tokens, stream.num_documents) == (20 * num_shards, 2 * num_shards)
        assert stream.ends_within(20 * 1999 - 1, 20 * num_shards).tolist() == [1, 6, 21]
        assert stream.count_ids(20).tolist() == [num_shards] * 20


def test_ids_are_counted_with_bounded_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("framework.data.store.TOKENS_COUNTED_AT_ONCE", 7)
    plan = write_shards(tmp_path / "store", 3)
    join_store(tmp_path / "store")
    counted: list[int] = []
    bincount = np.bincount
    monkeypatch.setattr(
        np, "bincount", lambda ids, minlength: (counted.append(len(ids)), bincount(ids, minlength=minlength))[1]
    )
    counts = open_stream(tmp_path / "store", plan.meta, "train").count_ids(20)
    assert counts.tolist() == [3] * 20
    assert max(counted) == 7


def test_workers_are_as_many_as_the_limit_of_open_files_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, expected in ((256, 96), (1024, 480), (10, 1)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert shard.most_workers() == expected
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert shard.most_workers() > 1 << 20


def test_names_and_fingerprints_are_those_of_version_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values are what the last commit of version 1 gave."""
    monkeypatch.chdir(tmp_path)
    source = write_jsonl(Path("a.jsonl"), make_texts(50))
    os.utime(source, ns=(0, 1))
    data = Data(sources={"s0": Source("a.jsonl")}, root="tokens", bpe_vocab=300, validation=0.1)
    folder = build(Recipe(data=data)).sources[0].folder
    assert folder.name == "s0-79291e8d1a-9ce8ddc90b"
    shards = [
        {"train": SplitReport(2, 20, "a"), "validation": SplitReport(1, 5, "b")},
        {"train": SplitReport(3, 30, "c")},
    ]
    assert fingerprint_shards(shards, "tokenizer") == "d7834e6047164defc20074ca81a8abce"


def test_a_store_of_a_later_version_is_refused(place: Path) -> None:
    recipe = recipe_of(place, "later")
    shutil.copytree(place / "whole", place / "later")
    path = find_prepared(recipe).sources[0].folder / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": STORE_VERSION + 1, "more": 1}))
    with pytest.raises(DataError, match=r"of version 3, and this Meshwright reads version 2"):
        find_prepared(recipe)
