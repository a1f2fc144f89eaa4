"""Who keeps whose files, which steps are of a run's past, and what is done in a node's memory."""

import os
import stat
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.checkpoint.held import LINEAGE_FILE, Generation, RunLineage, begin_generation, read_lineage, was_rewound
from framework.checkpoint.neighbors import Neighbours
from framework.checkpoint.node_memory import HeldName, NodeMemory, make_file, map_file, memory_of
from framework.errors import CheckpointError
from framework.launch.directory import RunDirectory
from framework.lease import Lease
from framework.recipe.schema import Checkpoint
from framework.train.saves import Saves
from tests.unit.test_checkpoint import ALONE


@given(st.lists(st.sampled_from("abcde"), min_size=1, max_size=12), st.integers(0, 4))
def test_every_rank_has_its_copies_on_other_nodes_and_keepers_know_it(names, copies):
    neighbours = Neighbours(tuple(names), copies)
    nodes = len(set(names))
    for rank, node in enumerate(names):
        keepers = neighbours.keepers(rank)
        on = {names[keeper] for keeper in keepers}
        assert len(on) == len(keepers) == min(copies, nodes - 1)
        assert node not in on
        assert all(rank in neighbours.kept(keeper) for keeper in keepers)
        assert all(rank in neighbours.keepers(other) for other in neighbours.kept(rank))
    assert sum(neighbours.is_first(rank) for rank in range(len(names))) == nodes


def test_ranks_of_equal_number_keep_for_one_another():
    neighbours = Neighbours(("a", "a", "b", "b", "c", "c"), 1)
    assert [neighbours.keepers(rank) for rank in range(6)] == [[2], [3], [4], [5], [0], [1]]
    assert Neighbours(("a", "a", "b"), 2).kept(2) == [0, 1]


def test_a_start_ends_what_was_trained_beyond_it():
    lineage = RunLineage().begin(0, "a", 0, 0).begin(50, "b", 50, 50)
    assert lineage.generations == (Generation("a", 0, 50), Generation("b", 50))
    assert lineage.has_trained(HeldName(50, "a"))
    assert lineage.has_trained(HeldName(60, "b"))
    assert not lineage.has_trained(HeldName(70, "a"))
    assert not lineage.has_trained(HeldName(60, "c"))
    back = lineage.begin(20, "c", 20, 60)
    assert back.generations == (Generation("a", 0, 20), Generation("c", 20))


def test_a_start_that_trained_nothing_leaves_no_trace():
    lineage = RunLineage().begin(0, "a", 0, 0).begin(70, "b", 50, 50).begin(70, "c", 50, 50)
    assert lineage.generations == (Generation("a", 0, 70), Generation("c", 70))
    many = lineage
    for step in range(71, 200):
        many = many.begin(step, f"g{step}", 50, 50)
    assert len(many.generations) == 32


def test_the_record_is_read_as_it_was_written_and_a_spoilt_one_says_nothing(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    assert read_lineage(tmp_path) == RunLineage()
    first = begin_generation(Lease(tmp_path), 0)
    (checkpoints / "step-00000040").mkdir(parents=True)
    second = begin_generation(Lease(tmp_path), 40)
    assert read_lineage(tmp_path) == RunLineage((Generation(first, 0, 40), Generation(second, 40)), 40, 0)
    (tmp_path / LINEAGE_FILE).write_text("{")
    assert read_lineage(tmp_path) == RunLineage()


def test_a_checkpoint_that_was_taken_away_is_told_from_one_that_was_set_aside(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    for step in (20, 40):
        (checkpoints / f"step-{step:08d}").mkdir(parents=True)
    (tmp_path / "checkpoints.json").write_text('{"committed_step": 40}')
    lineage = RunLineage((), saved_step=40, noted_step=40)
    assert not was_rewound(lineage, checkpoints)
    (checkpoints / "step-00000040").rename(checkpoints / "step-00000040.bad")
    assert was_rewound(lineage, checkpoints)
    # The start that set it aside knows of no newer one, and the note says what it said.
    lineage = RunLineage((), saved_step=20, noted_step=40)
    assert not was_rewound(lineage, checkpoints)
    (tmp_path / "checkpoints.json").write_text('{"committed_step": 30}')
    assert was_rewound(lineage, checkpoints)


def test_a_folder_that_another_user_has_made_is_neither_read_nor_written(tmp_path, monkeypatch):
    memory = memory_of(tmp_path / "run", "n1", tmp_path)
    memory.make(memory.folder(HeldName(7, "a")))
    assert memory.list() == {HeldName(7, "a"): frozenset()}
    assert stat.S_IMODE(memory.top.stat().st_mode) == 0o700
    for harm, mend in ((0o777, 0o700), (0o750, 0o700)):
        memory.top.chmod(harm)
        assert memory.list() == {}
        with pytest.raises(CheckpointError, match="was made by another user"):
            memory.make(memory.folder(HeldName(8, "a")))
        memory.top.chmod(mend)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    assert memory.list() == {}
    memory.clear()
    assert memory.path.is_dir()


def test_without_a_tmpfs_it_is_said_with_the_key(tmp_path):
    memory = memory_of(tmp_path / "run", "n1", tmp_path / "nowhere")
    assert memory.list() == {}
    memory.clear()
    with pytest.raises(CheckpointError, match=r"checkpoint\.neighbor_copies=0"):
        memory.make(memory.path)


def test_clearing_leaves_one_step_or_nothing_and_other_runs_alone(tmp_path):
    memory, other = (memory_of(tmp_path / name, "n1/odd name", tmp_path) for name in ("run", "other"))
    for each in (memory, other):
        for step in (2, 4):
            each.make(each.folder(HeldName(step, "a")))
        each.make(each.unfinished(HeldName(6, "a")))
    memory.clear(HeldName(4, "a"))
    assert [path.name for path in memory.place.iterdir()] == ["step-00000004-a"]
    memory.leave()
    assert not memory.path.parent.exists()
    assert len(list(other.place.iterdir())) == 3


def test_a_start_takes_over_what_the_last_one_held_and_nothing_of_a_newer_one(tmp_path):
    starts = {epoch: memory_of(tmp_path / "run", "n1", tmp_path, epoch) for epoch in (3, 5, 6, 9)}
    for epoch in (3, 5):
        starts[epoch].make(starts[epoch].folder(HeldName(epoch, "a")))
    starts[6].enter()
    assert starts[6].list() == {HeldName(5, "a"): frozenset()}
    assert [path.name for path in starts[6].home.iterdir()] == ["epoch-6"]
    starts[5].make(starts[5].folder(HeldName(7, "a")))  # which was frozen
    starts[6].clear()
    starts[6].make(starts[6].folder(HeldName(8, "b")))  # as after a rewind: its folder is still its own
    for stale in (starts[3], starts[5]):
        stale.enter()
        stale.leave()
    assert starts[6].list() == {HeldName(8, "b"): frozenset()}
    starts[9].enter()
    assert starts[9].list() == {HeldName(8, "b"): frozenset()}
    starts[9].leave()
    assert not starts[9].path.parent.exists()


def check_births(tmp_path):
    """A run folder was removed, and begun anew under the same name: its epochs begin anew, too."""

    def memory(birth, epoch):
        return memory_of(tmp_path / "run", "n1", tmp_path, epoch, birth)

    old, new = memory("0001-a", 12), memory("0002-b", 1)
    old.make(old.folder(HeldName(70, "a")))
    new.enter()
    assert new.list() == {}
    assert not old.home.exists()
    new.make(new.folder(HeldName(3, "b")))
    old.enter()  # which was frozen
    old.make(old.folder(HeldName(71, "a")))
    memory("0001-a", 13).enter()
    old.leave()
    later = memory("0002-b", 12)
    later.enter()
    assert later.list() == {HeldName(3, "b"): frozenset()}
    later.leave()
    assert not later.path.parent.exists()


def test_what_nodes_hold_of_a_former_run_at_the_same_path_is_not_taken_and_goes(tmp_path):
    check_births(tmp_path)


def test_sabotaged_copies_that_do_not_say_whose_they_are_are_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(NodeMemory, "home", property(lambda memory: memory.path))
    with pytest.raises(AssertionError):
        check_births(tmp_path)


def test_copies_are_of_the_run_that_the_record_of_the_folder_names(tmp_path):
    run, mesh = RunDirectory.create(tmp_path, "x", "demo"), SimpleNamespace(axis=lambda name: ALONE)
    for lease, birth in ((Lease(run.path), run.read_record()["birth"]), (Lease(tmp_path), "0")):
        saves = Saves(Checkpoint(), mesh, lease, SimpleNamespace(), lambda: None)
        assert saves.copies.memory.home.name == birth


def test_two_runs_of_one_name_have_folders_of_their_own(tmp_path):
    assert memory_of(tmp_path / "a" / "run", "n1").path != memory_of(tmp_path / "b" / "run", "n1").path


def test_a_mapped_file_is_its_memory(tmp_path):
    data = make_file(tmp_path / "file", 5)
    data.fill_(7)
    assert (tmp_path / "file").read_bytes() == bytes([7] * 5)
    assert map_file(tmp_path / "file", 5).tolist() == [7] * 5
    assert make_file(tmp_path / "file", 0).numel() == 0
    assert (tmp_path / "file").read_bytes() == b""
