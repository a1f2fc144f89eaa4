"""Checkpoints written by several ranks at once, and errors that all of them see."""

import errno
import os
from pathlib import Path

import pytest
import torch

from framework import object_store
from framework.checkpoint.load import Reader, load_checkpoint, load_newest
from framework.checkpoint.staging import Entry
from framework.comm.connect import connect
from framework.errors import EXIT_FAILED, CheckpointError, MeshwrightError
from framework.mesh.layout import Layout, Shard
from framework.mesh.topology import Topology
from tests.saving import save_checkpoint

SHAPE = (7, 5)


def full(salt):
    return torch.arange(35, dtype=torch.float32).view(SHAPE) + salt


def entries(mesh, salt, how):
    """`replicated`: every rank owns all. `interval`: ZeRO. `sharded`: columns over the ranks."""
    rank, world = mesh.rank, mesh.topology.world
    layouts = {
        "replicated": Layout(SHAPE),
        "interval": Layout(SHAPE, interval=(rank * 35 // world, (rank + 1) * 35 // world)),
        "sharded": Layout(SHAPE, (Shard("tp", 1, rank, world),)),
    }
    layout = layouts[how]
    for number in range(3):
        parts = [(full(salt + 100 * number))[box.slices()].flatten() for box in layout.boxes()]
        yield Entry(f"weight/{number}", layout, torch.cat(parts) if parts else torch.empty(0))


def connect_world(rank, world, rendezvous):
    return connect(Topology(dp=world), torch.device("cpu"), rendezvous, rank, timeout_s=60)


def save_body(rank, world, rendezvous, root, step, how):
    mesh = connect_world(rank, world, rendezvous)
    path = save_checkpoint(root, step, entries(mesh, step, how), {"step": step}, mesh.axis("world"), keep=2)
    mesh.close()
    return path


def load_body(rank, world, rendezvous, root, step, how):
    mesh = connect_world(rank, world, rendezvous)
    wanted = list(entries(mesh, step, how))
    filled = [Entry(entry.name, entry.layout, torch.zeros_like(entry.data)) for entry in wanted]
    state = load_newest(root, filled, mesh.axis("world"))
    mesh.close()
    return state, all(torch.equal(a.data, b.data) for a, b in zip(wanted, filled, strict=True))


def load_damaged_body(rank, world, rendezvous, path):
    """Only the second rank's share lies in the damaged file."""
    mesh = connect_world(rank, world, rendezvous)
    try:
        load_checkpoint(path, list(entries(mesh, 1, "interval")), mesh.axis("world"))
    except CheckpointError as error:
        return f"{type(error).__name__} {error}"
    finally:
        mesh.close()


def failing_body(rank, world, rendezvous, root, how):
    """The second rank's file system fails, or spoils what it reads; the first rank's does not."""
    mesh = connect_world(rank, world, rendezvous)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store, "PAUSES_S", (0.0,) * 4)
        plain = os.preadv

        def read(number, into, start):
            if how == "EIO":
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            count = plain(number, into, start)
            into[0][0] ^= 1
            return count

        if rank == 1:
            patch.setattr(os, "preadv", read)
        try:
            load_newest(root, list(entries(mesh, 1, "interval")), mesh.axis("world"))
        except MeshwrightError as error:
            return type(error).__name__, error.exit_code
        finally:
            mesh.close()


def noting(touched, name, plain):
    def call(*args, **kwargs):
        touched.append((name, Path(args[0]).name))
        return plain(*args, **kwargs)

    return call


def counting_body(rank, world, rendezvous, root):
    """Which files this rank opens and looks at in a save and in a load; and the bytes that it sends in the save."""
    mesh = connect_world(rank, world, rendezvous)
    axis, touched = mesh.axis("world"), []
    with pytest.MonkeyPatch.context() as patch:
        path = save_checkpoint(root, 5, entries(mesh, 5, "interval"), {}, axis, keep=2)
        sent = sum(axis.traffic.bytes.values())
        for owner, name in ((Path, "read_bytes"), (Path, "stat"), (os, "open")):
            patch.setattr(owner, name, noting(touched, name, getattr(owner, name)))
        load_checkpoint(path, list(entries(mesh, 5, "interval")), axis)
    mesh.close()
    return sorted(set(touched)), sent


def full_disk_body(rank, world, rendezvous, root):
    """The last rank's file cannot be written; the others' can."""
    mesh = connect_world(rank, world, rendezvous)

    def fail_on_last_rank(point):
        if point == "writing" and rank == world - 1:
            raise OSError(28, "No space left on device")

    try:
        save_checkpoint(root, 2, entries(mesh, 2, "interval"), {}, mesh.axis("world"), 2, fault=fail_on_last_rank)
    except CheckpointError as error:
        return str(error)
    finally:
        mesh.close()


@pytest.mark.parametrize(
    ("saved", "saving_world", "loaded", "loading_world"),
    [("replicated", 2, "interval", 3), ("interval", 3, "sharded", 2), ("sharded", 4, "replicated", 1)],
)
def test_checkpoint_of_one_world_loads_in_another(pool, tmp_path, saved, saving_world, loaded, loading_world):
    paths = pool.run(saving_world, save_body, tmp_path, 5, saved)
    assert set(paths) == {tmp_path / "step-00000005"}
    assert pool.run(loading_world, load_body, tmp_path, 5, loaded) == [({"step": 5}, True)] * loading_world


def test_replicated_ranks_write_each_byte_once(pool, tmp_path):
    path = pool.run(3, save_body, tmp_path, 1, "replicated")[0]
    assert [Reader(path).file(rank).size for rank in range(3)] == [140, 140, 140]
    names = [f"rank-0000{rank}.bin" for rank in range(3)]
    assert sorted(os.listdir(path)) == ["index.bin", "manifest.json", *names]


def test_damage_that_one_rank_meets_is_an_error_on_all(pool, tmp_path):
    path = pool.run(2, save_body, tmp_path, 1, "interval")[0]
    file = path / "rank-00001.bin"
    file.write_bytes(bytes(len(file.read_bytes())))
    messages = pool.run(2, load_damaged_body, path)
    assert messages[0] == messages[1]
    assert messages[0].startswith(f"DamagedCheckpoint {file} was changed")


def test_damaged_newest_falls_back_on_all_ranks(pool, tmp_path):
    for step in (1, 2):
        path = pool.run(2, save_body, tmp_path, step, "interval")[0]
    file = path / "rank-00001.bin"
    file.write_bytes(bytes(len(file.read_bytes())))
    assert pool.run(2, load_body, tmp_path, 1, "interval") == [({"step": 1}, True)] * 2


@pytest.mark.parametrize("how", ["EIO", "spoilt"])
def test_trouble_of_one_node_ends_all_ranks_and_condemns_no_checkpoint(pool, tmp_path, how):
    for step in (1, 2):
        pool.run(2, save_body, tmp_path, step, "interval")
    assert pool.run(2, failing_body, tmp_path, how) == [("StorageError", EXIT_FAILED)] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_only_the_first_rank_looks_at_all_files_and_no_rank_hears_of_the_others_tensors(pool, tmp_path):
    first, *others = pool.run(4, counting_body, tmp_path / "of4")
    names = [f"rank-{rank:05d}.bin" for rank in range(4)]
    assert {name for kind, name in first[0] if kind == "stat"} == {"index.bin", *names}
    for rank, (touched, _) in enumerate(others, 1):
        assert touched == [("open", "index.bin"), ("open", names[rank])]
    [_, (_, sent_in_pair)] = pool.run(2, counting_body, tmp_path / "of2")
    for _, sent in others:
        assert sent == pytest.approx(sent_in_pair, rel=0.1)


def test_full_disk_of_one_rank_is_an_error_on_all_and_leaves_nothing(pool, tmp_path):
    pool.run(2, save_body, tmp_path, 1, "interval")
    messages = pool.run(2, full_disk_body, tmp_path)
    assert messages[0] == messages[1]
    assert "no room for a checkpoint" in messages[0]
    assert os.listdir(tmp_path) == ["step-00000001"]
