"""Checkpoints without process groups: every layout loads into every other, and no damage goes unnoticed."""

import json
import tempfile
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.checkpoint.commit import begin, finish, list_checkpoints, newest_checkpoint
from framework.checkpoint.folder import committed_name
from framework.checkpoint.index import DamagedCheckpoint, FileRecord, Manifest, file_name, read_manifest
from framework.checkpoint.load import describe as describe_contents
from framework.checkpoint.load import inspect_command, load_checkpoint, load_newest
from framework.checkpoint.save import CPU, write_file, write_index
from framework.checkpoint.save_plan import (
    WRITES,
    Disagreement,
    describe,
    describe_chosen,
    divide,
    explain_disagreement,
    owned_entries,
    pack_claims,
    plan_index,
)
from framework.checkpoint.staging import Entry, StagedFile, StagingMemory
from framework.comm.communicator import Communicator
from framework.comm.transfer import Moment
from framework.errors import CheckpointError
from framework.lease import Lease
from framework.mesh.layout import Layout, Shard
from framework.mesh.topology import Axis
from framework.optim import disk_ring
from framework.optim.disk_ring import DiskShard, DiskState, DiskStates
from tests.saving import save_checkpoint

ALONE = Communicator(Axis("world", 1, 0))
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


@dataclass(frozen=True)
class Placement:
    """How a world of `tp * zero * replicas` ranks holds one tensor: a shard, an interval of it, alike on replicas."""

    shape: tuple[int, ...]
    tp: int = 1
    dim: int = 0
    segments: tuple[int, ...] = ()
    zero: int = 1
    replicas: int = 1

    def layouts(self) -> list[Layout]:
        """One per rank, tp innermost."""
        return [
            self._layout(tp, zero) for _ in range(self.replicas) for zero in range(self.zero) for tp in range(self.tp)
        ]

    def _layout(self, tp: int, zero: int) -> Layout:
        shards = (Shard("tp", self.dim, tp, self.tp, self.segments),) if self.tp > 1 else ()
        numel = Layout(self.shape, shards).numel_local
        return Layout(self.shape, shards, interval=(zero * numel // self.zero, (zero + 1) * numel // self.zero))


@st.composite
def placements(draw, shape):
    dim = draw(st.integers(0, len(shape) - 1)) if shape else 0
    cuts = sorted(draw(st.lists(st.integers(0, shape[dim]), max_size=2))) if shape else []
    edges = [0, *cuts, shape[dim]] if shape else []
    segments = tuple(b - a for a, b in pairwise(edges)) if cuts else ()
    tp = draw(st.integers(1, 3)) if shape else 1
    return Placement(shape, tp, dim, segments, draw(st.integers(1, 3)), draw(st.integers(1, 2)))


@st.composite
def pairs_of_placements(draw):
    """The same tensors, placed in two ways; worlds may differ."""
    shapes = draw(st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=3))
    return [(draw(placements(shape)), draw(placements(shape))) for shape in shapes]


def content(shape, dtype, salt=0):
    """Distinct values, so that a misplaced element cannot go unnoticed (bf16 counts exactly to 256, then by bits)."""
    values = torch.arange(prod(shape)) + 1 + salt
    if dtype == torch.bfloat16:
        return values.to(torch.int16).view(torch.bfloat16).reshape(shape)
    return values.to(dtype).reshape(shape)


def owned(tensor, layout):
    """The elements of a global tensor that a layout owns, in its order."""
    parts = [tensor[box.slices()].flatten() for box in layout.boxes()]
    return torch.cat(parts) if parts else tensor.new_empty(0)


def save_world(root, step, ranks, state, block_bytes, memory=None):
    """What save_checkpoint does, for all ranks of a world in this process."""
    ranks = [owned_entries(entries) for entries in ranks]
    division = divide([pack_claims(entries) for entries in ranks])
    folder, _ = begin(root, Lease(root.parent), step, state, 0)
    written = []
    for rank, (entries, flags) in enumerate(zip(ranks, division.flags, strict=True)):
        chosen = [entry for entry, flag in zip(entries, flags, strict=True) if flag & WRITES]
        staged = StagedFile(chosen, memory or StagingMemory(CPU, 0), Moment(CPU), block_bytes=block_bytes)
        staged.stage()
        write_file(folder / file_name(rank), staged)
        written.append(FileRecord(staged.num_bytes, block_bytes, staged.root))
    described = [describe_chosen(entries, flags) for entries, flags in zip(ranks, division.flags, strict=True)]
    return finish(
        root,
        Lease(root.parent),
        folder,
        write_index(folder, step, state, plan_index(division, described), written, block_bytes),
    )


def entries_of_world(placed, tensors):
    """Entries of each rank; a world is as large as its largest placement, and a small one is met by replicas."""
    world = max(len(placement.layouts()) for placement in placed)
    return [
        [
            Entry(f"kind/{number}", layout, owned(tensor, layout))
            for number, (placement, tensor) in enumerate(zip(placed, tensors, strict=True))
            for layout in [placement.layouts()[rank % len(placement.layouts())]]
        ]
        for rank in range(world)
    ]


@settings(max_examples=60, deadline=None)
@given(
    pairs=pairs_of_placements(),
    dtype=st.sampled_from(DTYPES),
    block_bytes=st.sampled_from([64, 104, 4096]),
    segment_bytes=st.sampled_from([8, 100, 1 << 12]),
    max_bytes=st.sampled_from([0, 1 << 20]),
)
def test_any_layout_loads_into_any_other(pairs, dtype, block_bytes, segment_bytes, max_bytes):
    tensors = [content(before.shape, dtype, salt=100 * number) for number, (before, _) in enumerate(pairs)]
    with tempfile.TemporaryDirectory() as folder:
        ranks = entries_of_world([before for before, _ in pairs], tensors)
        memory = StagingMemory(CPU, max_bytes, segment_bytes=segment_bytes)
        path = save_world(Path(folder), 7, ranks, {"tokens": 9}, block_bytes, memory)
        for wanted in entries_of_world([after for _, after in pairs], tensors):
            expected = [entry.data.clone() for entry in wanted]
            for entry in wanted:
                entry.data.zero_()
            assert load_checkpoint(path, wanted, ALONE, buffer_bytes=50) == {"tokens": 9}
            for entry, values in zip(wanted, expected, strict=True):
                assert torch.equal(entry.data.view(torch.uint8), values.view(torch.uint8)), entry


def test_replicas_divide_the_bytes_among_themselves():
    entries = [Entry(f"kind/{number}", Layout((100,)), torch.zeros(100)) for number in range(8)]
    division = divide([pack_claims(entries)] * 4)
    assert [np.count_nonzero(flags) for flags in division.flags] == [2, 2, 2, 2]
    assert all(sum(bool(flags[number]) for flags in division.flags) == 1 for number in range(8))
    assert division.bytes_needed >= 3200


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [Entry("kind/w", Layout((4, 2), interval=(0, 3)), torch.zeros(3))],
            r"own 3 elements of kind/w float32\[4, 2\], not 8",
        ),
        (
            [Entry("kind/w", Layout((4,), interval=each), torch.zeros(2)) for each in ((0, 2), (1, 3))],
            "own some elements of kind/w float32\\[4\\] twice",
        ),
        (
            [Entry("kind/w", Layout((4,)), torch.zeros(4)), Entry("kind/w", Layout((2, 2)), torch.zeros(4))],
            r"ranks disagree on kind/w: float32\[4\] and float32\[2, 2\]",
        ),
        (
            [Entry("kind/w", Layout((4,)), torch.zeros(4)), Entry("kind/w", Layout((4,)), torch.zeros(4).double())],
            r"ranks disagree on kind/w: float32\[4\] and float64\[4\]",
        ),
    ],
)
def test_what_does_not_make_whole_entries_is_an_error_when_saving(tmp_path, entries, message):
    """Entries of one name stand for those of several ranks: one rank claims them all."""
    with pytest.raises(Disagreement) as found:
        divide([pack_claims([entry]) for entry in entries])
    known = [{entry.name: describe(entry)} for entry in entries]
    with pytest.raises(CheckpointError, match=message):
        raise explain_disagreement(found.value, known)


def test_an_element_that_no_rank_owns_is_an_error_when_saving(tmp_path):
    half = Entry("kind/w", Layout((4, 2), interval=(0, 3)), torch.zeros(3))
    with pytest.raises(CheckpointError, match=r"own 3 elements of kind/w float32\[4, 2\], not 8"):
        save_checkpoint(tmp_path, 1, [half], {}, ALONE, keep=1)
    assert list(tmp_path.iterdir()) == []


def make_entries(salt=0):
    return [
        Entry("weight/w", Layout((5, 3)), content((15,), torch.float32, salt)),
        Entry("exp_avg/w", Layout((5, 3)), content((15,), torch.float32, salt + 50)),
        Entry("weight/scale", Layout(()), content((1,), torch.bfloat16, salt)),
    ]


def save(root, step, keep=10, **state):
    return save_checkpoint(root, step, make_entries(step), {"step": step, **state}, ALONE, keep)


def blank_entries():
    return [Entry(entry.name, entry.layout, torch.zeros_like(entry.data)) for entry in make_entries()]


def assert_loaded(entries, step):
    for entry, expected in zip(entries, make_entries(step), strict=True):
        assert torch.equal(entry.data, expected.data), entry.name


def test_what_is_on_a_disk_is_saved_and_loaded_as_what_is_in_memory(tmp_path, monkeypatch):
    """Byte for byte the same files, through memory for one entry; layouts of the two sides differ."""
    monkeypatch.setattr(disk_ring, "CHUNK_BYTES", 1 << 14)
    shape, numel = (40, 250), 10_000
    kinds = (DiskState("master", torch.float32), DiskState("exp_avg", torch.bfloat16))
    tensors = {kind.name: content((numel,), kind.dtype) for kind in kinds}
    cuts = ((0, 3001), (3001, numel))
    with DiskStates(tmp_path / "run", "rank-0", [DiskShard(numel + 500, kinds)]) as states:

        def entries(home):
            return [
                Entry(f"{name}/{part}", Layout(shape), home[name][part * 500 : part * 500 + numel])
                for name in tensors
                for part in (0, 1)
            ]

        on_disk = {name: states.tensor(0, name) for name in tensors}
        in_memory = {name: torch.cat([values, values[:500]]) for name, values in tensors.items()}
        for name, values in in_memory.items():
            on_disk[name].write(values)
        saved = [
            save_checkpoint(tmp_path / kind, 1, entries(home), {}, ALONE, keep=1)
            for kind, home in (("disk", on_disk), ("memory", in_memory))
        ]
        names = {path.name for path in saved[0].iterdir()}
        assert names == {path.name for path in saved[1].iterdir()}
        assert [(saved[0] / name).read_bytes() for name in names] == [(saved[1] / name).read_bytes() for name in names]

        for name in tensors:
            on_disk[name].write(torch.zeros(numel + 500))
        parts = [
            Entry(f"{name}/1", Layout(shape, interval=cut), on_disk[name][cut[0] : cut[1]])
            for name in tensors
            for cut in cuts
        ]
        load_checkpoint(saved[1], parts, ALONE)
        for name, values in in_memory.items():
            assert torch.equal(on_disk[name].read()[:numel], values[500:])
            assert not on_disk[name].read()[numel:].any()


def test_state_comes_back_as_it_was_saved(tmp_path):
    state = {"step": 3, "rate": 0.1, "names": ["a", "é"], "none": None}
    path = save_checkpoint(tmp_path / "checkpoints", 3, make_entries(), state, ALONE, keep=1)
    assert path == tmp_path / "checkpoints" / "step-00000003"
    assert read_manifest(path).state == state
    assert load_checkpoint(path, blank_entries(), ALONE) == state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("saved"), 1)


@given(place=st.integers(0, 10**6), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_is_noticed_when_loading(saved, place, bit):
    files = sorted(saved.iterdir())
    target = files[place % len(files)]
    whole = target.read_bytes()
    data = bytearray(whole)
    data[place % len(data)] ^= 1 << bit
    target.write_bytes(data)
    with pytest.raises(DamagedCheckpoint, match="changed after it was"):
        load_checkpoint(saved, blank_entries(), ALONE)
    target.write_bytes(whole)


@pytest.mark.parametrize("name", ["manifest.json", "index.bin", "rank-00000.bin"])
@pytest.mark.parametrize("damage", ["cut", "empty", "missing"])
def test_damaged_newest_is_passed_over_and_said(tmp_path, capsys, name, damage):
    old, new = save(tmp_path, 1), save(tmp_path, 2)
    file = new / name
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1] if damage == "cut" else b"")
    assert newest_checkpoint(tmp_path) == old
    assert str(file.parent) in capsys.readouterr().err
    entries = blank_entries()
    assert load_newest(tmp_path, entries, ALONE) == {"step": 1}
    assert_loaded(entries, 1)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step-00000001", "step-00000002.bad"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (Entry("weight/v", Layout((5, 3)), torch.zeros(15)), "has no weight/v; nearest: weight/w"),
        (Entry("weight/w", Layout((3, 5)), torch.zeros(15)), r"float32\[3, 5\] here, but float32\[5, 3\]"),
        (Entry("weight/w", Layout((5, 3)), torch.zeros(15).double()), "float64.* here, but float32"),
    ],
)
def test_another_name_shape_or_dtype_is_a_mistake_and_not_damage(tmp_path, entry, message):
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_newest(tmp_path, [entry], ALONE)
    assert not isinstance(caught.value, DamagedCheckpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_piece_that_the_index_lacks_is_an_error_that_counts(tmp_path):
    path = save(tmp_path, 1)
    manifest = read_manifest(path)
    record = manifest.entries["weight/w"]
    holed = replace(manifest, step=2, state={}, entries={"weight/w": replace(record, count=0)})
    folder, _ = begin(tmp_path, Lease(tmp_path.parent), 2, {}, 0)
    for name in ("rank-00000.bin", "index.bin"):
        (folder / name).write_bytes((path / name).read_bytes())
    with pytest.raises(CheckpointError, match="lacks 15 of the 15 elements of weight/w"):
        load_checkpoint(finish(tmp_path, Lease(tmp_path.parent), folder, holed), blank_entries()[:1], ALONE)


def test_newest_keep_checkpoints_stay(tmp_path):
    for step in (5, 10, 100, 15):
        save(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000100", "step-00000015"]


def test_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    save(tmp_path, 1)
    (save(tmp_path, 2) / "rank-00000.bin").unlink()
    save(tmp_path, 3, keep=2)
    assert [path.name[-1] for path in list_checkpoints(tmp_path)] == ["3", "2", "1"]


def test_committed_step_is_not_written_again(tmp_path):
    path = save(tmp_path, 4)
    before = (path / "manifest.json").stat().st_ino
    assert save(tmp_path, 4) == path
    assert (path / "manifest.json").stat().st_ino == before


def test_committed_step_is_never_overwritten_by_another_state(tmp_path):
    path = save(tmp_path, 4)
    before = (path / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="exists already, with another state"):
        save(tmp_path, 4, tokens=1)
    assert (path / "manifest.json").read_bytes() == before


def test_damaged_checkpoint_of_the_step_makes_way(tmp_path, capsys):
    (save(tmp_path, 4) / "rank-00000.bin").unlink()
    entries = blank_entries()
    load_checkpoint(save(tmp_path, 4), entries, ALONE)
    assert_loaded(entries, 4)
    assert "step-00000004.bad" in capsys.readouterr().err


def test_too_small_a_disk_is_an_error_before_anything_is_written(tmp_path):
    with pytest.raises(CheckpointError, match=r"needs 1,000,000,000,001,048,576 bytes, [\d,]+ are free"):
        begin(tmp_path, Lease(tmp_path.parent), 1, {}, 10**18)
    assert list(tmp_path.iterdir()) == []


def test_manifest_of_another_format_is_not_damage(tmp_path, monkeypatch):
    monkeypatch.setattr("framework.checkpoint.index.FORMAT", 99)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="has format 99, this version reads format 2") as caught:
        load_checkpoint(path, blank_entries(), ALONE)
    assert not isinstance(caught.value, DamagedCheckpoint)


def test_manifest_is_plain_json(tmp_path):
    document = json.loads((save(tmp_path, 1) / "manifest.json").read_text())
    assert document["manifest"]["entries"]["weight/w"]["shape"] == [5, 3]


def test_inspect_prints_what_is_there_and_finds_damage(tmp_path, capsys):
    path = save(tmp_path / "checkpoints", 12, tokens=3456)
    assert inspect_command(tmp_path) == 0
    printed = capsys.readouterr().out
    for words in (
        "step          12",
        "tokens        3456",
        "saved by 1 rank,",
        "weight ",
        "exp_avg ",
        "float32",
        "bfloat16",
    ):
        assert words in printed
    file = path / "rank-00000.bin"
    file.write_bytes(bytes(len(file.read_bytes())))
    assert inspect_command(path) == 86
    assert "DAMAGED" in capsys.readouterr().out


def test_inspect_tells_long_values_by_the_number_of_their_entries():
    seen = [[step, 5.7 + step, 0.6] for step in range(60)]
    manifest = Manifest(1, 1, {"spikes": {"seen": seen, "count": 0}}, {}, FileRecord(0, 1, 0))
    (line,) = [each for each in describe_contents(Path("x"), manifest) if each.startswith("spikes")]
    assert line == "spikes        seen: 60 entries, count: 0"


def test_inspect_of_something_else_is_an_error(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither a checkpoint.*nor a token store"):
        inspect_command(tmp_path)


def test_committed_name_sorts_by_step(tmp_path):
    assert committed_name(tmp_path, 9).name < committed_name(tmp_path, 10).name
