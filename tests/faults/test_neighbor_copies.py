"""Copies in neighbours' memory: ranks killed at every point, nodes lost, copies damaged, stale, partial or absent."""

import signal

import pytest

from framework.checkpoint import held, neighbors
from framework.checkpoint.commit import list_checkpoints
from framework.checkpoint.held import RunLineage
from framework.checkpoint.index import INDEX
from framework.checkpoint.neighbors import COPY_POINTS, HELD_POINTS
from tests.faults.copying_ranks import Ranks, copy_place, cut_power, held_on, run, spoil_disk
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

KILLED = (1, "copy begun", 10)  # rank 1, as the copy of step 10 begins: held is step 8, saved is step 6


def check_goes_on(place, step, ranks=None, is_held=True):
    """A start goes on from the step, right in every bit, and to the end."""
    codes, found = run(place, ranks or Ranks())
    assert codes == [0] * len(codes)
    assert found == [(step, is_held, True)] * len(codes)


@pytest.fixture(scope="module")
def lose(tmp_path_factory):
    """A function: a run of these nodes that was killed once step 8 was held and step 6 saved. Killed once, and copied."""
    lost = {}

    def lose_in(place, nodes=("a", "b"), copies=1):
        if (nodes, copies) not in lost:
            lost[nodes, copies] = tmp_path_factory.mktemp("lost")
            codes, _ = run(lost[nodes, copies], Ranks(nodes, copies, death=KILLED))
            assert codes[1] == -signal.SIGKILL
            saved = list_checkpoints(lost[nodes, copies] / "run" / "checkpoints")
            assert [path.name for path in saved] == ["step-00000006"]
        copy_place(lost[nodes, copies], place)

    return lose_in


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


HARM = {"flip": flip, "empty": lambda path: path.write_bytes(b""), "remove": lambda path: path.unlink()}


@pytest.mark.parametrize(
    ("rank", "point"),
    few_of(
        ((rank, point) for rank in range(2) for point in COPY_POINTS),
        lambda rank, point: (rank, point) in ((0, "copy announced"), (1, "copy named")),
    ),
)
def test_a_rank_that_is_killed_while_it_copies_loses_one_interval_and_no_disk_is_read(tmp_path, rank, point):
    codes, _ = run(tmp_path, Ranks(death=(rank, point, 8)))
    assert codes[rank] == -signal.SIGKILL
    assert codes[1 - rank] not in (0, None, -signal.SIGKILL)
    spoil_disk(tmp_path / "run")
    codes, found = run(tmp_path, Ranks())
    assert codes == [0, 0]
    [began] = {step for step, _, _ in found}
    assert all(was_held and is_right for _, was_held, is_right in found)
    if point in HELD_POINTS:
        assert began == 8
    elif point == "copy complete":  # a node may have given it its name
        assert began in (6, 8)
    else:
        assert began == 6


def test_a_node_that_loses_its_power_is_replaced_from_its_neighbour(tmp_path, lose):
    lose(tmp_path, ("a", "b", "c"))
    cut_power(tmp_path, "b")
    spoil_disk(tmp_path / "run")
    check_goes_on(tmp_path, 8, Ranks(("a", "d", "c")))


@pytest.mark.parametrize(
    "nodes",
    few_of(
        (("".join(nodes),) for nodes in ("ba", "a", "abc", "aabb")),
        lambda nodes: nodes == "aabb",
    ),
)
def test_any_layout_on_the_nodes_goes_on_from_what_another_has_left_there(tmp_path, nodes, lose):
    lose(tmp_path)
    spoil_disk(tmp_path / "run")
    check_goes_on(tmp_path, 8, Ranks(tuple(nodes)))


@pytest.mark.grid
def test_ranks_of_a_node_share_what_it_holds(tmp_path, lose):
    lose(tmp_path, ("a", "a", "b", "b"))
    assert [len(list(folder.glob("rank-*"))) for node in "ab" for folder in held_on(tmp_path, node)] == [4, 4]
    cut_power(tmp_path, "a")
    spoil_disk(tmp_path / "run")
    check_goes_on(tmp_path, 8, Ranks(("c", "c", "b", "b")))


@pytest.mark.grid
def test_two_copies_survive_two_nodes(tmp_path, lose):
    lose(tmp_path, ("a", "b", "c"), copies=2)
    cut_power(tmp_path, "a", "b")
    spoil_disk(tmp_path / "run")
    check_goes_on(tmp_path, 8, Ranks(("d", "e", "c")))


def test_neighbours_that_are_lost_together_leave_the_disk_and_it_is_said(tmp_path, capfd, lose):
    lose(tmp_path, ("a", "b", "c"))
    cut_power(tmp_path, "b", "c")
    check_goes_on(tmp_path, 6, Ranks(("a", "b", "c")), is_held=False)
    assert (
        "passing over the copy of step 8 in the nodes' memory: rank-00001.bin is whole on no node"
        in capfd.readouterr().err
    )


@pytest.mark.grid
def test_the_index_is_held_by_two_nodes_as_well(tmp_path, capfd, lose):
    lose(tmp_path, ("a", "b", "c", "d"))
    cut_power(tmp_path, "a", "b")
    check_goes_on(tmp_path, 6, Ranks(("a", "b", "c", "d")), is_held=False)
    assert "its index is lost with the nodes that held it" in capfd.readouterr().err


@pytest.mark.grid
def test_without_copies_and_without_a_checkpoint_a_run_begins_at_its_beginning(tmp_path):
    codes, _ = run(tmp_path, Ranks(death=(1, "copy begun", 4)))
    assert codes[1] == -signal.SIGKILL
    cut_power(tmp_path, "a", "b")
    check_goes_on(tmp_path, 0, is_held=False)


@pytest.mark.grid
def test_nodes_alone_are_enough_before_the_first_checkpoint(tmp_path):
    run(tmp_path, Ranks(death=(1, "copy begun", 6)))
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")
    check_goes_on(tmp_path, 4)


@pytest.mark.grid
def test_a_checkpoint_that_is_newer_is_taken(tmp_path):
    run(tmp_path, Ranks(stop=7))
    assert [folder.name[:13] for folder in held_on(tmp_path, "a")] == ["step-00000006"]
    [folder] = held_on(tmp_path, "a")
    for node in "ab":
        [folder] = held_on(tmp_path, node)
        folder.rename(folder.with_name(folder.name.replace("6", "4", 1)))
    check_goes_on(tmp_path, 6, is_held=False)


@pytest.mark.grid
def test_a_run_that_ends_leaves_nothing_in_memory(tmp_path):
    codes, _ = run(tmp_path, Ranks(ends=True))
    assert codes == [0, 0]
    assert not list((tmp_path / "shm").glob("*/*"))


@pytest.mark.grid
def test_where_memory_is_short_tensors_are_staged_in_turns_for_nodes_and_disk(tmp_path):
    codes, _ = run(tmp_path, Ranks(is_whole=False, death=KILLED))
    assert codes[1] == -signal.SIGKILL
    spoil_disk(tmp_path / "run")
    check_goes_on(tmp_path, 8, Ranks(is_whole=False))
    check_goes_on(tmp_path, 12, Ranks(("a", "b", "c")))


# --- damage


def test_a_copy_that_has_changed_in_one_nodes_memory_is_taken_from_another(tmp_path, capfd, lose):
    lose(tmp_path)
    flip(held_on(tmp_path, "a")[0] / "rank-00000.bin")
    flip(held_on(tmp_path, "a")[0] / INDEX)
    spoil_disk(tmp_path / "run")
    check_goes_on(tmp_path, 8)
    assert "a copy in the memory of node a is not used" in capfd.readouterr().err


@pytest.mark.parametrize("harm", few_of(("flip", "empty", "remove"), lambda harm: harm == "flip"))
def test_a_file_that_is_whole_nowhere_leaves_the_disk(tmp_path, harm, lose):
    lose(tmp_path)
    for node in "ab":
        HARM[harm](held_on(tmp_path, node)[0] / "rank-00001.bin")
    check_goes_on(tmp_path, 6, is_held=False)


@pytest.mark.grid
def test_damage_that_is_met_while_loading_leaves_the_disk_and_no_copy(tmp_path, capfd, lose):
    lose(tmp_path)
    for node in "ab":
        flip(held_on(tmp_path, node)[0] / "rank-00001.bin")
    check_goes_on(tmp_path, 6, Ranks(patches={(held, "verify_file"): lambda file: None}), is_held=False)
    assert "was changed after it was saved" in capfd.readouterr().err


def test_sabotaged_copies_that_are_not_verified_are_noticed(tmp_path, lose):
    """What the flipped bit of one node costs, if nobody asks whether its neighbour has it whole."""
    lose(tmp_path)
    flip(held_on(tmp_path, "a")[0] / "rank-00000.bin")
    with pytest.raises(AssertionError):
        check_goes_on(tmp_path, 8, Ranks(patches={(held, "verify_file"): lambda file: None}))


def pass_and_change(*args):
    """A network that changes a bit of the file that comes to rank 0 with step 8."""
    plain_pass(*args)
    for data, _ in args[1]:
        if len(data) > 1000 and args[2].rank == 0:
            changed.append(data)
            if len(changed) == 4:
                data[500] ^= 1


plain_pass, changed = neighbors.pass_bytes, []


def check_changed_on_the_way(place, capfd, **patches):
    changing = {(neighbors, "pass_bytes"): pass_and_change}
    patches = {(neighbors, name): replacement for name, replacement in patches.items()}
    run(place, Ranks(stop=9, patches=changing | patches))
    assert (
        "no copy of step 8 is held; training goes on, and the next copy is tried: rank-00001.bin"
        in capfd.readouterr().err
    )
    cut_power(place, "b")
    spoil_disk(place / "run")
    check_goes_on(place, 6, Ranks(("a", "c")))


def test_a_copy_that_changes_on_its_way_is_not_held_and_the_one_before_stays(tmp_path, capfd):
    check_changed_on_the_way(tmp_path, capfd)


def test_sabotaged_copies_that_nobody_hashes_on_their_way_are_noticed(tmp_path, capfd):
    with pytest.raises(AssertionError):
        check_changed_on_the_way(tmp_path, capfd, _verify_received=lambda files, announced: None)


def no_memory(path, num_bytes):
    raise OSError(28, "No space left on device", str(path))


def test_a_node_without_memory_holds_nothing_and_the_run_goes_on(tmp_path, capfd):
    codes, found = run(tmp_path, Ranks(patches={(neighbors, "make_file"): no_memory}))
    assert codes == [0, 0]
    assert all(is_right for *_, is_right in found)
    assert "No space left on device in" in (said := capfd.readouterr().err)
    assert "lower checkpoint.neighbor_copies" in said
    assert not [path for path in (tmp_path / "shm").rglob("*") if path.is_file()]


@pytest.mark.grid
def test_memory_that_would_be_taken_from_training_is_not_taken(tmp_path, capfd):
    run(tmp_path, Ranks(stop=3, patches={(neighbors, "free_bytes"): lambda: 40_000}))
    assert "bytes of a node's memory are needed, 40,000 are free" in capfd.readouterr().err
    assert not [path for path in (tmp_path / "shm").rglob("*") if path.is_file()]


# --- steps of another past


@pytest.fixture
def branched(tmp_path, lose):
    """Step 8 is held on nodes that come back when the run has gone on elsewhere, from step 6."""
    lose(tmp_path)
    codes, found = run(tmp_path, Ranks(("c", "d"), stop=7))
    assert codes == [0, 0]
    assert found == [(6, False, True)] * 2
    return tmp_path


def test_a_step_of_a_branch_that_was_left_is_not_taken(branched, capfd):
    check_goes_on(branched, 6, is_held=False)
    assert (
        "passing over the copy of step 8 in the nodes' memory: it is of a branch that this run has left"
        in capfd.readouterr().err
    )


def test_sabotaged_a_lineage_that_nobody_asks_is_noticed(branched):
    with pytest.raises(AssertionError):
        check_goes_on(branched, 6, Ranks(patches={(RunLineage, "has_trained"): lambda *_: True}), is_held=False)


@pytest.mark.grid
def test_a_start_that_dies_before_it_holds_anything_leaves_what_is_held(tmp_path, lose):
    lose(tmp_path)
    spoil_disk(tmp_path / "run")
    for _ in range(2):
        codes, _ = run(tmp_path, Ranks(death=(0, "copy written", 10)))
        assert codes[0] == -signal.SIGKILL
    check_goes_on(tmp_path, 8)


@pytest.mark.grid
def test_a_user_who_takes_a_checkpoint_away_goes_back(tmp_path, capfd):
    run(tmp_path, Ranks(stop=16, death=(1, "copy begun", 16)))
    newest, *_ = list_checkpoints(tmp_path / "run" / "checkpoints")
    newest.rename(newest.with_name("elsewhere"))
    check_goes_on(tmp_path, 6, is_held=False)
    assert "a newer checkpoint than those there are was taken away" in capfd.readouterr().err


@pytest.mark.grid
def test_checkpoints_that_are_all_damaged_do_not_matter_to_a_run_that_is_held(tmp_path, lose):
    lose(tmp_path)
    spoil_disk(tmp_path / "run")
    for node in "ab":  # an older step than the damaged one
        [folder] = held_on(tmp_path, node)
        folder.rename(folder.with_name(folder.name.replace("8", "5", 1)))
    check_goes_on(tmp_path, 8)
