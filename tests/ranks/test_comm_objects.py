"""What rank 0 looks up reaches all ranks, errors included, and nobody else looks it up."""

import pytest

from framework.comm.objects import gather_to_first, share_errors, tell
from framework.errors import DataError, MeshwrightError
from tests.ranks.test_comm_collectives import connect_world


def exchange(rank, world, rendezvous):
    axis = (mesh := connect_world(rank, world, rendezvous)).axis("world")
    asked = []

    def look_up():
        asked.append(rank)
        return {"answer": 42}

    told = tell(look_up, axis)
    gathered = gather_to_first({"rank": rank}, axis)
    own = share_errors(lambda: rank * 10, axis)
    mesh.close()
    return told, asked, gathered, own


def fail_on(rank, world, rendezvous, failing):
    """The words of the errors that this rank hears, from `tell` and from `share_errors`."""
    axis = (mesh := connect_world(rank, world, rendezvous)).axis("world")

    def work():
        if rank in failing:
            raise DataError(f"rank {rank} cannot read")
        return rank

    heard = []
    for attempt in (lambda: tell(work, axis), lambda: share_errors(work, axis)):
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
    # `tell` asks rank 0 alone, so only the second call fails, by the lowest rank's error.
    assert pool.run(3, fail_on, {1, 2}) == [[0, ("DataError", "rank 1 cannot read")]] * 3
