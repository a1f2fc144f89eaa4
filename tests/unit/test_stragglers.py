"""Stragglers: one that costs a sixth of each step is named with its phase, and a thousand clean noisy steps name nobody."""

import numpy as np
import pytest

from framework.monitor import stragglers
from framework.monitor.stragglers import LEAST, WINDOW, Straggler, Stragglers, median_of_others
from tests.grid import few_of

WORLD = 8
STEP_S = 0.1


class Run:
    """Synchronous ranks: all wait for the slowest of each step, so that its own wait is the shortest."""

    def __init__(self, world=WORLD, groups=None, seed=3, noise=0.05):
        self.rng, self.world, self.noise = np.random.default_rng(seed), world, noise
        self.judge = Stragglers(groups or [range(world)])

    def step(self, slow=None, phase="compute", factor=1.0):
        data = 0.001 * self.rng.lognormal(0, 1, self.world)
        own = STEP_S * self.rng.lognormal(0, self.noise, self.world)
        own[self.rng.integers(self.world)] += STEP_S * (
            self.rng.random() < 0.05
        )  # now and then one rank is busy with something else
        sent = np.zeros(self.world)
        if slow is not None:
            {"data": data, "compute": own, "communication": sent}[phase][slow] += (factor - 1) * STEP_S
        step_s = (data + own + sent).max()
        return self.judge.add(step_s, data, own, step_s - data - own)

    def steps(self, count, **how):
        return [found for _ in range(count) for found in self.step(**how)]


@pytest.mark.parametrize("world", few_of([2, 3, 8, 64], lambda world: world == 8))
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.4])
def test_a_thousand_clean_steps_name_nobody(world, noise):
    assert Run(world, seed=world, noise=noise).steps(1000) == []


@pytest.mark.parametrize("phase", ["data", "compute"])
@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_a_slow_rank_is_named_once_with_its_phase(world, phase):
    run = Run(world)
    assert run.steps(100) == []
    (found,) = run.steps(60, slow=1, phase=phase, factor=1.5)
    assert (found.rank, found.phase, found.is_slow) == (1, phase, True)
    assert found.excess_s == pytest.approx(0.05, rel=0.7)
    assert list(run.judge.slow) == [(1, phase)]


def test_a_rank_that_waits_longer_than_its_peers_is_slow_in_communication():
    judge, rng = Stragglers([range(4)]), np.random.default_rng(1)
    found = []
    for _ in range(60):
        waited = 0.02 + 0.001 * rng.random(4)
        waited[2] += 0.03
        found += judge.add(0.1, np.full(4, 0.001), 0.05 + 0.001 * rng.random(4), waited)
    assert [(each.rank, each.phase) for each in found] == [(2, "communication")]


def check_one_that_others_wait_for():
    """Two ranks: the other one waits for the slow one, and is not blamed for that."""
    assert {(each.rank, each.phase) for each in Run(2).steps(100, slow=0, factor=2.0)} == {(0, "compute")}


def test_who_waits_for_a_slow_rank_is_not_slow_in_communication():
    check_one_that_others_wait_for()


def test_sabotaged_who_waits_is_blamed_where_waits_are_judged_always(monkeypatch):
    plain = Stragglers._change
    monkeypatch.setattr(stragglers, "CLEAR", 99.0)  # so that no rank counts as slow enough to be waited for
    monkeypatch.setattr(
        Stragglers, "_change", lambda judge, excess, slow, stays, step: plain(judge, excess, slow, slow, step)
    )
    with pytest.raises(AssertionError):
        check_one_that_others_wait_for()


def test_it_is_said_again_only_after_it_was_over():
    run = Run()
    run.steps(50)
    assert len(run.steps(100, slow=3, factor=1.6)) == 1
    # Between the two bounds: neither slow anew nor over.
    assert run.steps(100, slow=3, factor=1.12) == []
    (over,) = run.steps(100)
    assert over == Straggler(3, "compute", 0.0, 0.0, is_slow=False)
    assert run.judge.slow == {}
    assert len(run.steps(60, slow=3, factor=1.6)) == 1


def test_stages_of_a_pipeline_are_not_compared_with_one_another():
    groups = [range(4), range(4, 8)]
    run = Run(groups=groups)
    assert [
        found for _ in range(100) for found in run.judge.add(0.2, np.zeros(8), [0.1] * 4 + [0.2] * 4, np.zeros(8))
    ] == []
    alone = Stragglers([[0], [1]])
    assert [found for _ in range(300) for found in alone.add(0.2, [0, 0], [0.1, 0.2], [0.1, 0])] == []
    only_one = Stragglers([[0]])
    assert [found for step in range(300) for found in only_one.add(0.2, [0], [0.1 + 0.1 * (step > 100)], [0])] == []


class Pipeline(Run):
    """Stages of one rank each, with other work: each has twice the work of the one before."""

    def __init__(self, stages, seed=3, noise=0.05):
        super().__init__(stages, [[stage] for stage in range(stages)], seed, noise)
        self.work = STEP_S * 2.0 ** -np.arange(stages)[::-1]

    def step(self, slow=None, phase="compute", factor=1.0, all_factor=1.0):
        data = 0.001 * self.rng.lognormal(0, 1, self.world)
        own = all_factor * self.work * self.rng.lognormal(0, self.noise, self.world)
        own[self.rng.integers(self.world)] += STEP_S * (self.rng.random() < 0.05)
        if slow is not None:
            {"data": data, "compute": own}[phase][slow] += (factor - 1) * STEP_S
        step_s = (data + own).max()
        return self.judge.add(step_s, data, own, step_s - data - own)


@pytest.mark.grid
@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("noise", [0.01, 0.1, 0.4])
def test_a_thousand_clean_steps_of_stages_of_one_rank_name_nobody(stages, noise):
    assert Pipeline(stages, seed=stages, noise=noise).steps(1000) == []


@pytest.mark.parametrize("phase", ["data", "compute"])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_rank_alone_in_its_stage_is_named_where_it_becomes_slow(stages, slow, phase):
    run = Pipeline(stages)
    assert run.steps(200) == []
    (found,) = run.steps(60, slow=slow, phase=phase, factor=1.5)
    assert (found.rank, found.phase, found.is_slow) == (slow, phase, True)
    assert found.excess_s == pytest.approx(0.05, rel=0.3)
    (over,) = run.steps(100)
    assert over == Straggler(slow, phase, 0.0, 0.0, is_slow=False)


def test_what_slows_all_stages_alike_or_makes_one_faster_blames_nobody():
    run = Pipeline(2)
    assert run.steps(150) == []
    assert run.steps(150, all_factor=1.6) == []
    assert run.steps(150) == []
    # What was thought usual of the last stage was a busy moment of its host.
    run = Pipeline(2)
    assert run.steps(60, slow=1, factor=2.0) == []
    assert run.steps(200) == []


def test_nobody_is_judged_by_a_few_steps_or_by_milliseconds():
    assert Run().steps(LEAST - 1, slow=1, factor=3.0) == []
    judge = Stragglers([range(2)])
    assert [found for _ in range(WINDOW) for found in judge.add(0.004, [0, 0], [0.001, 0.004], [0, 0])] == []


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_the_median_of_the_others_is_that(n):
    values = np.random.default_rng(n).random((5, n))
    expected = [[np.median(np.delete(row, place)) for place in range(n)] for row in values]
    assert np.allclose(median_of_others(values), expected)
