"""What rank 0 looks up reaches all ranks, errors included, and nobody else looks it up."""

import pytest

from framework.comm.objects import broadcast_object, gather_numbers, gather_object, scatter_object, share_errors
from framework.errors import DataError, MeshwrightError, StorageError
from tests.ranks.test_comm_collectives import connect_world


def exchange(rank, world, rendezvous):
    axis = (mesh := connect_world(rank, world, rendezvous)).axis("world")
    asked = []

    def look_up():
        asked.append(rank)
        return {"answer": 42}

    told = broadcast_object(look_up, axis)
    gathered = gather_object({"rank": rank}, axis)
    own = share_errors(lambda: rank * 10, axis)
    mesh.close()
    return told, asked, gathered, own


def fail_on(rank, world, rendezvous, failing, another=DataError, otherwise=()):
    """The messages of the errors that this rank gets from `broadcast_object` and from `share_errors`. otherwise: who fails by
    `another`."""
    axis = (mesh := connect_world(rank, world, rendezvous)).axis("world")

    def work():
        if rank in failing:
            raise (another if rank in otherwise else DataError)(f"rank {rank} cannot read")
        return rank

    heard = []
    for attempt in (lambda: broadcast_object(work, axis), lambda: share_errors(work, axis)):
        try:
            heard.append(attempt())
        except MeshwrightError as error:
            heard.append((type(error).__name__, str(error)))
    mesh.close()
    return heard


@pytest.mark.parametrize("world", [1, 2, 3])
def test_only_the_first_rank_looks_up_and_all_know(pool, world):
    for rank, (told, asked, gathered, own) in enumerate(pool.run(world, exchange)):
        assert told == {"answer": 42}
        assert asked == ([0] if rank == 0 else [])
        assert gathered == ([{"rank": r} for r in range(world)] if rank == 0 else [])
        assert own == 10 * rank


def test_an_error_on_any_rank_is_raised_on_all(pool):
    first = ("DataError", "rank 0 cannot read")
    assert pool.run(3, fail_on, {0}) == [[first, first]] * 3
    # Of several errors the user's is heard, which another start would meet again.
    assert pool.run(3, fail_on, {1, 2}, StorageError, {1}) == [[0, ("DataError", "rank 2 cannot read")]] * 3
    # `broadcast_object` asks rank 0 alone, so only the second call fails, by the lowest rank's error.
    assert pool.run(3, fail_on, {1, 2}) == [[0, ("DataError", "rank 1 cannot read")]] * 3


def gather_and_deal_unequal(rank, world, rendezvous):
    """Objects of very different sizes, and what this rank has sent to move them."""
    axis = (mesh := connect_world(rank, world, rendezvous)).axis("world")
    gathered = gather_object("x" * 10**rank, axis)
    dealt = scatter_object(lambda: ["y" * 10**each for each in range(world)], axis)
    sent = dict(axis.traffic.bytes)
    mesh.close()
    return [len(each) for each in gathered], len(dealt), sent


def gather_two_numbers(rank, world, rendezvous):
    axis = (mesh := connect_world(rank, world, rendezvous)).axis("world")
    gathered, sent = gather_numbers([rank, rank / 3], axis), dict(axis.traffic.bytes)
    mesh.close()
    return gathered, sent


@pytest.mark.parametrize("world", [1, 3])
def test_numbers_of_every_rank_come_to_the_first_in_full_precision(pool, world):
    for rank, (gathered, sent) in enumerate(pool.run(world, gather_two_numbers)):
        assert gathered == ([[each, each / 3] for each in range(world)] if rank == 0 else [])
        assert sent == ({"gather_numbers": 16 if rank else 0} if world > 1 else {})


def fail_to_scatter(rank, world, rendezvous):
    axis = (mesh := connect_world(rank, world, rendezvous)).axis("world")

    def work():
        raise DataError(f"rank {rank} has nothing to scatter")

    try:
        return scatter_object(work, axis)
    except DataError as error:
        return str(error)
    finally:
        mesh.close()


@pytest.mark.parametrize("world", [1, 4])
def test_no_rank_sends_or_receives_more_than_its_own_object(pool, world):
    for rank, (gathered, dealt, sent) in enumerate(pool.run(world, gather_and_deal_unequal)):
        assert gathered == ([10**each for each in range(world)] if rank == 0 else [])
        assert dealt == 10**rank
        if world > 1:
            assert sent["gather_object"] == (0 if rank == 0 else pytest.approx(10**rank, abs=60))
            assert sent["scatter_object"] == (pytest.approx(1110, abs=200) if rank == 0 else 0)


def test_an_error_while_dealing_is_raised_on_all(pool):
    assert pool.run(3, fail_to_scatter) == ["rank 0 has nothing to scatter"] * 3
