"""The interval between saves is the one that loses least: by simulation, and by the clock of the loop."""

import math
import random
from dataclasses import replace

import pytest

from framework.checkpoint.interval import ASSUMED_COST_S, SPARED, daly_interval_s, find_interval_s
from framework.recipe.schema import Checkpoint
from tests.unit.test_loss_scale import start_loop


def share_lost(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Time that a run of many failures loses, over the work that it does: it repeats what was not saved."""
    draw, work, lost = random.Random(7), 0.0, 0.0
    for _ in range(4000):
        until = draw.expovariate(1 / mtbf_s)
        saved = int(until / (interval_s + cost_s)) * interval_s
        work, lost = work + saved, lost + until - saved
    return lost / work


@pytest.mark.parametrize(("cost_s", "mtbf_s"), [(10.0, 1000.0), (100.0, 1000.0), (1.0, 5000.0)])
def test_saving_more_or_less_often_loses_more(cost_s: float, mtbf_s: float) -> None:
    best = daly_interval_s(cost_s, mtbf_s)
    least = share_lost(best, cost_s, mtbf_s)
    assert least < share_lost(best / 2, cost_s, mtbf_s)
    assert least < share_lost(best * 2, cost_s, mtbf_s)


def test_a_save_that_takes_longer_than_runs_last_is_made_once_in_each() -> None:
    assert daly_interval_s(300.0, 100.0) == 100.0


def test_the_interval_follows_what_saves_were_measured_to_cost() -> None:
    hours = 8 * 3600.0
    assert find_interval_s(hours, 0, 0.0, 0.0) == daly_interval_s(ASSUMED_COST_S, hours)
    assert find_interval_s(hours, 2, 8.0, 5.0) == daly_interval_s(4.0, hours) == pytest.approx(478, abs=2)
    assert find_interval_s(hours, 2, 0.0, 60.0) == SPARED * 60


def test_the_loop_saves_by_the_interval_that_the_recipe_asks_for() -> None:
    loop = start_loop(1, [])

    def interval_s(rules: Checkpoint) -> float:
        loop.recipe = replace(loop.recipe, checkpoint=rules)
        return loop._find_interval_s()

    assert interval_s(Checkpoint()) == math.inf
    assert interval_s(Checkpoint(every_minutes=2.0)) == 120
    by_cost = Checkpoint(every_minutes=2.0, interval="young_daly", mtbf_hours=8.0)
    assert interval_s(by_cost) == daly_interval_s(ASSUMED_COST_S, 8 * 3600.0)
    loop._saver.started, loop._saver.disk_stalled_s = 2, 8.0
    assert interval_s(by_cost) == daly_interval_s(4.0, 8 * 3600.0)
