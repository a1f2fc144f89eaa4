"""The start-up probe on real ranks: silent where all is well, and the same error on all where a node is bad."""

import contextlib
import io
import time
from pathlib import Path

import pytest

from framework.errors import MeshwrightError
from framework.lease import Lease
from framework.plan.plan import make_plan
from framework.recipe.schema import Parallel
from framework.train import probe
from tests.families import build_config, family
from tests.ranks.parity import small_recipe
from tests.ranks.test_comm_collectives import connect_world


def look(rank, world, rendezvous, folder, harm=""):
    """(the error that this rank hears, what it says, seconds, what is left in the run's folder)."""
    mesh = connect_world(rank, world, rendezvous)
    recipe = small_recipe("fp32", world, 2, 12, parallel=Parallel())
    plan = make_plan(recipe, build_config(family("llama"), num_hidden_layers=2))
    run = Path(folder) / ("elsewhere" if harm == "other disk" and rank == 1 else "run")
    run.mkdir(exist_ok=True)
    heard, said = "", io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(said):
        patch.setenv("SLURMD_NODENAME", f"n{rank}")
        patch.setattr(probe, "SHARED_WITHIN_S", 0.3)
        if harm == "wrong bit" and rank == 1:
            plain = probe.hadamard
            patch.setattr(probe, "hadamard", lambda rows: plain(rows) * 1.0000002)
        if harm == "clock" and rank == 1:
            now = time.time
            patch.setattr(probe.time, "time", lambda: now() + 3600)
        began_s = time.monotonic()
        try:
            probe.probe(plan, mesh, Lease(run))
        except MeshwrightError as error:
            heard = f"{type(error).__name__}: {error}"
        took_s = time.monotonic() - began_s
    mesh.close()
    return heard, said.getvalue(), took_s, sorted(path.name for path in run.iterdir())


@pytest.mark.parametrize("world", [1, 4])
def test_ranks_that_are_well_hear_nothing_and_leave_nothing(pool, tmp_path, world):
    for heard, said, took_s, left in pool.run(world, look, str(tmp_path)):
        assert (heard, said, left) == ("", "", [])
        assert took_s < 10, "some 0.02 s on a machine of its own"


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        ("other disk", "NodeError: n1 does not see what rank 0 wrote into the run's folder"),
        ("wrong bit", "NodeError: the device of rank 1 on n1 computes wrongly: "),
    ],
)
def test_a_bad_node_is_named_on_all_ranks(pool, tmp_path, harm, text):
    for heard, said, _, left in pool.run(2, look, str(tmp_path), harm):
        assert heard.startswith(text)
        assert (said, left) == ("", [])


def test_a_clock_that_is_wrong_is_said_once_and_stops_nobody(pool, tmp_path):
    (first, said, *_), (second, nothing, *_) = pool.run(2, look, str(tmp_path), "clock")
    assert (first, second, nothing) == ("", "", "")
    assert said.startswith("probe: the clock of n1 is 3600.0 s ahead of that of rank 0's node")
