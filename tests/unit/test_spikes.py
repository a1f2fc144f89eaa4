"""The spike detector: silent over clean curves, heard within the step of a spike, and equal whatever was interrupted."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import inf, nan

import numpy as np
import pytest

from framework.train.sums import (
    LAG,
    LEVEL_STEPS,
    NO_LIMITS,
    PERSISTENT_SPIKES,
    PERSISTENT_WITHIN,
    SpikeState,
)
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

STEPS = 1000
Curve = list[tuple[float, float]]


def clean_curve(seed: int, noise: float, spread: float) -> Curve:
    """Losses and norms: a steep fall and a slow one, norms that grow during the rate's warm-up and shrink, noise with tails."""
    rng, step = np.random.default_rng(seed), np.arange(STEPS)
    losses = 2.0 + 8.0 * np.exp(-step / 60) + 1.5 * np.exp(-step / 500) + noise * rng.standard_t(8, STEPS)
    level = (0.4 + 6.0 * np.exp(-step / 150)) * np.minimum(1.0, 0.2 + step / 100)
    norms = level * np.exp(spread * rng.standard_t(6, STEPS))
    return list(zip(losses.tolist(), norms.tolist(), strict=True))


def follow(curve: Sequence[tuple[float, float]], state: SpikeState | None = None, first: int = 1) -> list[int]:
    """The steps that are spikes."""
    state = state or SpikeState()
    return [step for step, values in enumerate(curve, first) if state.add(step, *values, limits=state.limits(step))]


@pytest.mark.parametrize(
    ("noise", "spread"), few_of([(0.003, 0.1), (0.02, 0.3), (0.1, 0.4)], lambda noise, _: noise == 0.02)
)
def test_a_clean_run_of_1000_steps_has_no_spike(noise: float, spread: float) -> None:
    assert [follow(clean_curve(seed, noise, spread)) for seed in range(4)] == [[]] * 4


@pytest.mark.parametrize("at", [LEVEL_STEPS + LAG, 100, 999])
@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_spike_is_one_within_its_step(at: int, what: str) -> None:
    curve = clean_curve(1, 0.02, 0.3)
    loss, norm = curve[at - 1]
    curve[at - 1] = (loss + 3.0, norm) if what == "loss" else (loss, 60 * norm)
    assert follow(curve) == [at]


def test_what_falls_is_no_spike() -> None:
    curve = clean_curve(2, 0.02, 0.1)
    curve[500:520] = [(0.1, 0.001)] * 20
    assert not [step for step in follow(curve) if step <= 520]


def test_a_level_that_stays_becomes_the_new_one() -> None:
    curve = [(loss + 4.0 * (step >= 600), norm) for step, (loss, norm) in enumerate(clean_curve(3, 0.02, 0.1))]
    fired = follow(curve)
    assert fired == list(range(601, 601 + len(fired)))
    assert LEVEL_STEPS // 2 <= len(fired) <= LEVEL_STEPS // 2 + LAG


def test_limits_do_not_depend_on_newer_steps_that_a_save_has_made_known() -> None:
    """Uninterrupted, the step before is still on the device when limits are sent; behind a save it is known."""
    curve = clean_curve(4, 0.02, 0.3)
    behind, ahead = SpikeState(), SpikeState()
    ahead.add(1, *curve[0], limits=NO_LIMITS)
    for step in range(2, STEPS):
        limits = behind.limits(step)  # knows the steps up to step - 2
        assert ahead.limits(step) == limits
        behind.add(step - 1, *curve[step - 2], limits=behind.limits(step - 1))
        ahead.add(step, *curve[step - 1], limits=limits)


@pytest.mark.parametrize("at", [5, 33, 34, 700])
def test_a_resume_decides_as_the_uninterrupted_run(at: int) -> None:
    curve = clean_curve(5, 0.02, 0.3)
    for step in (40, 702, 704, 705):
        curve[step] = 50.0, curve[step][1]
    whole, first = SpikeState(), SpikeState()
    fired = follow(curve, whole)
    head = follow(curve[:at], first)
    resumed = SpikeState(**json.loads(json.dumps(asdict(first))))
    assert head + follow(curve[at:], resumed, at + 1) == fired != []
    assert resumed == whole


def test_spikes_persist_from_the_first_of_three_within_eight_steps() -> None:
    limits = NO_LIMITS._replace(loss=2.0, gradient_norm=2.0)
    assert (PERSISTENT_SPIKES, PERSISTENT_WITHIN) == (3, 8)
    for high, first in (({10, 17}, None), ({10, 12, 17}, 10), ({10, 12, 18}, None), ({10, 11, 12}, 10)):
        state = SpikeState()
        for step in range(1, max(high) + 1):
            state.add(step, 3.0 if step in high else 1.0, 1.0, limits)
        assert state.first_persistent == first, high


def test_values_that_are_not_finite_persist_once_there_are_limits_and_are_never_in_a_window() -> None:
    limits = NO_LIMITS._replace(loss=2.0, gradient_norm=2.0)
    for known, first in ((limits, 1), (NO_LIMITS, None)):
        state = SpikeState()
        assert not any(state.add(step, nan, inf, known) for step in range(1, 4))
        assert (state.first_persistent, state.seen, state.count) == (first, [], 0)
