"""The learning rate is a pure function of the step: shapes, ends and bounds of each schedule."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framework.optim.groups import learning_rate, wsd_decay_start
from framework.recipe.schema import LearningRateSchedule

PEAK = 3e-4


@st.composite
def schedules_and_steps(draw, names=("constant", "linear", "cosine", "wsd")):
    total_steps = draw(st.integers(1, 400))
    schedule = LearningRateSchedule(
        name=draw(st.sampled_from(names)),
        warmup_steps=draw(st.integers(0, 450)),
        decay_steps=draw(st.none() | st.integers(1, 450)),
        final_ratio=draw(st.floats(0, 1)),
    )
    return schedule, total_steps


def rates(schedule: LearningRateSchedule, total_steps: int) -> list[float]:
    return [learning_rate(step, schedule, PEAK, total_steps) for step in range(total_steps)]


@given(schedules_and_steps())
def test_rate_stays_positive_below_the_peak_and_above_the_final_rate_after_warmup(case):
    schedule, total_steps = case
    for step, rate in enumerate(rates(schedule, total_steps)):
        assert 0 < rate <= PEAK * (1 + 1e-12)
        if step >= schedule.warmup_steps:
            assert rate >= PEAK * schedule.final_ratio * (1 - 1e-12)


@given(schedules_and_steps())
def test_warmup_rises_by_equal_amounts_and_reaches_the_peak_at_index_warmup_steps(case):
    schedule, total_steps = case
    total_steps += schedule.warmup_steps
    values = [0.0] + [learning_rate(step, schedule, PEAK, total_steps) for step in range(schedule.warmup_steps + 1)]
    assert values[-1] == pytest.approx(PEAK, rel=1e-12)
    for before, after in pairwise(values):
        assert after - before == pytest.approx(PEAK / (schedule.warmup_steps + 1), rel=1e-6)


@given(schedules_and_steps(names=("linear", "cosine", "wsd")))
def test_decay_never_rises_and_ends_at_the_final_rate(case):
    schedule, total_steps = case
    after_warmup = rates(schedule, total_steps)[schedule.warmup_steps :]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(after_warmup))
    if schedule.warmup_steps <= total_steps:
        for step in (total_steps, total_steps + 1000):
            assert learning_rate(step, schedule, PEAK, total_steps) == pytest.approx(PEAK * schedule.final_ratio)


@pytest.mark.parametrize(("name", "half_way"), [("linear", 0.55), ("cosine", 0.55), ("constant", 1.0)])
def test_half_way_after_the_warmup_the_rate_is_the_middle_of_peak_and_final(name, half_way):
    schedule = LearningRateSchedule(name=name, warmup_steps=10, final_ratio=0.1)
    assert learning_rate(60, schedule, 1.0, 110) == pytest.approx(half_way)


def test_cosine_is_at_the_known_value_a_quarter_of_the_way():
    schedule = LearningRateSchedule(name="cosine", warmup_steps=0, final_ratio=0.0)
    assert learning_rate(25, schedule, 1.0, 100) == pytest.approx(0.8535533905932737)  # (1 + cos 45 degrees) / 2


def test_wsd_holds_the_peak_until_the_last_decay_steps_and_then_falls_in_a_line():
    schedule = LearningRateSchedule(name="wsd", warmup_steps=5, decay_steps=20, final_ratio=0.0)
    values = rates(schedule, 100)
    assert values[5:81] == [PEAK] * 76
    assert values[90] == pytest.approx(PEAK / 2)
    assert values[99] == pytest.approx(PEAK / 20)


def test_wsd_without_decay_steps_decays_over_a_tenth_of_the_run_and_never_into_the_warmup():
    assert wsd_decay_start(LearningRateSchedule(name="wsd"), 1000) == 900
    assert wsd_decay_start(LearningRateSchedule(name="wsd", warmup_steps=950), 1000) == 950


def test_the_first_step_after_no_warmup_uses_the_peak():
    for name in ("constant", "linear", "cosine", "wsd"):
        assert learning_rate(0, LearningRateSchedule(name=name, warmup_steps=0), PEAK, 50) == PEAK
