"""A change of structure leaves every bit as it was: 20 steps of 24 layouts against what was recorded before the change."""

import json

import pytest

from tests.ranks.pool import RankPool
from tests.ranks.recorded import LAYOUTS, PATH, describe_machine, train

RECORD = json.loads(PATH.read_text())
# On another processor, or with another torch, kernels add in another order: 20 steps of bf16 differ by about 1e-3.
ROUNDING = 1e-2


@pytest.mark.grid
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_it_was_recorded(pool: RankPool, name: str) -> None:
    found = pool.run(LAYOUTS[name].world, train, [name])[0][name]
    recorded = RECORD["layouts"][name]
    losses = [[float.fromhex(each) for each in run["losses"]] for run in (recorded, found)]
    assert losses[0] == pytest.approx(losses[1], rel=ROUNDING)
    if RECORD["machine"] == describe_machine():
        assert found == recorded
