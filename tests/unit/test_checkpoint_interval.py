"""The interval between saves is the one that loses least: by simulation, and by the clock of the loop."""

import math
import random
from dataclasses import replace

import pytest

from framework.checkpoint.save import ASSUMED_COST_S, SPARED, Goal, daly_interval_s, find_interval_s
from framework.recipe.schema import Checkpoint
from framework.train.loop import Loop
from framework.train.sums import Flags
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
        loop.policy.rules = rules
        return loop.policy.find_interval_s()

    assert interval_s(Checkpoint()) == math.inf
    assert interval_s(Checkpoint(every_minutes=2.0)) == 120
    by_cost = Checkpoint(every_minutes=2.0, interval="young_daly", mtbf_hours=8.0)
    assert interval_s(by_cost) == daly_interval_s(ASSUMED_COST_S, 8 * 3600.0)
    loop.policy.saver.started, loop.policy.saver.disk_stalled_s = 2, 8.0
    assert interval_s(by_cost) == daly_interval_s(4.0, 8 * 3600.0)


def goals(loop: Loop, steps: range, busy_at: tuple[int, ...] = ()) -> dict[int, Goal]:
    """Where the loop saves each step; busy_at: steps at whose beginning a save was under way on some rank."""
    found = {}
    for step in steps:
        loop.state.step = step
        loop._flags = Flags(is_saving=step - 1 in busy_at)  # sums are read one step late
        goal = loop.find_goal()
        if goal:
            loop.end_save(goal)
            found[step] = goal
    return found


def test_copies_are_put_off_while_a_save_is_under_way_and_never_left_out() -> None:
    loop = start_loop(1, [])
    rules = Checkpoint(every_steps=8, neighbor_copies=1, neighbor_every_steps=4)
    loop.policy.rules, loop.policy.num_steps = rules, 20
    both = Goal.DISK | Goal.MEMORY
    assert goals(loop, range(1, 17)) == {4: Goal.MEMORY, 8: both, 12: Goal.MEMORY, 16: both}
    assert goals(loop, range(3, 7)) == {4: Goal.MEMORY}, "after going back to an older step"
    # A save that lasts from step 8 to 13.
    loop.policy.go_back()
    assert goals(loop, range(1, 17), busy_at=(3, 9, 10, 11, 12, 13)) == {
        5: Goal.MEMORY,
        8: both,
        15: Goal.MEMORY,
        16: Goal.DISK,
    }
    assert goals(loop, range(18, 21)) == {18: Goal.MEMORY, 20: Goal.DISK}, "the end needs no copy"


def test_the_next_step_is_too_early_for_all_to_know_that_a_save_has_ended() -> None:
    loop = start_loop(1, [])
    loop.policy.num_steps = 20
    loop.policy.rules = rules = Checkpoint(neighbor_copies=1, neighbor_every_steps=1)
    assert list(goals(loop, range(1, 8))) == [1, 3, 5, 7]
    loop.policy.rules = replace(rules, mode="sync")
    assert list(goals(loop, range(1, 5))) == [1, 2, 3, 4]
