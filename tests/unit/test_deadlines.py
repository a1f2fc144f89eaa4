"""Deadlines: one ladder in order, a step's follows the measured ones, and time in which nobody looked does not count."""

import random
from dataclasses import replace

import pytest

from framework.monitor.progress import FIRST_STEPS, LOOK_S, Current, Phase, Progress, Save, StepPace, Stopwatch
from framework.recipe.compose import compose
from framework.recipe.machines import FLOOR_S, Deadlines, deadlines, find_deadlines

SLURM = ("launch=slurm", "launch.nodes=1", "batch.sequences_per_step=256")
AUTO = Deadlines(step=None, first_steps=1200.0, start=1800.0, save=1800.0, validate=1800.0)


def pace_of(seconds):
    pace = StepPace()
    for each in seconds:
        pace.add(each)
    return pace


@pytest.fixture(scope="module")
def recipe():
    return compose([*SLURM, "launch.signal_seconds_before_end=60"]).require()


def launched(recipe, **keys):
    return replace(recipe, launch=replace(recipe.launch, **keys))


@pytest.mark.parametrize(("time", "has_s"), [("00:10:00", 540), ("01:00:00", 3540), ("7-00:00:00", 604740)])
@pytest.mark.parametrize("stated", [{}, {"step_deadline_s": 30.0}, {"start_deadline_s": 60.0}])
def test_phases_end_before_collectives_and_these_before_the_job(recipe, time, has_s, stated):
    ladder = find_deadlines(launched(recipe, time=time, **stated))
    assert max(ladder.first_steps, ladder.start, ladder.save, ladder.validate) < ladder.collective < has_s
    assert ladder.step is None or ladder.step <= ladder.first_steps


@pytest.mark.parametrize("name", ["step_deadline_s", "start_deadline_s", "save_deadline_s", "validate_deadline_s"])
def test_a_deadline_behind_the_jobs_end_is_refused_with_the_largest_that_fits(recipe, name):
    short = launched(recipe, time="00:17:40")
    (problem,) = deadlines.find(launched(short, **{name: 900.0}))
    assert problem.key == f"launch.{name}"
    assert f"launch.{name}=799 or less" in problem.fix
    assert not list(deadlines.find(launched(short, **{name: 799.0})))
    assert not list(deadlines.find(launched(short, kind="local", **{name: 900.0})))


def test_the_ladder_is_checked_with_the_recipe():
    (problem,) = compose([*SLURM, 'launch.time="00:20:00"', "launch.step_deadline_s=2000"]).problems
    assert problem.key == "launch.step_deadline_s"


@pytest.mark.parametrize("value", ["0.5", "soon"])
def test_a_deadline_that_is_no_time_is_refused(value):
    (problem,) = compose(["batch.sequences_per_step=8", f"launch.step_deadline_s={value}"]).problems
    assert problem.key == "launch.step_deadline_s"


def test_every_phase_has_a_deadline():
    progress = Progress()
    for phase in Phase:
        seconds, key = progress.find_deadline(Current(phase, 1, 0.0), AUTO)
        assert 0 < seconds <= AUTO.most < AUTO.collective
        assert key.startswith("launch.")


def test_a_stated_deadline_counts_once_steps_are_measured():
    ladder = Deadlines(step=5.0, first_steps=1200.0, start=1800.0, save=1800.0, validate=1800.0)
    progress = Progress(is_timed=True)
    for number in range(FIRST_STEPS):
        assert progress.find_deadline(Current(Phase.STEP, number, 0.0), ladder)[0] == 1200.0
        progress.pace.add(0.1)
    assert progress.find_deadline(Current(Phase.STEP, 9, 0.0), ladder)[0] == 5.0
    assert progress.find_deadline(Current(Phase.DATA, 9, 0.0), ladder)[0] == 5.0
    progress.is_timed = False  # a validation is in it
    assert progress.find_deadline(Current(Phase.STEP, 9, 0.0), ladder)[0] == ladder.most


@pytest.mark.parametrize(
    ("seconds", "low", "high"),
    [
        ([0.01] * 50, FLOOR_S, FLOOR_S),
        ([30.0] * 50, 300.0, 300.0),
        ([30.0] * 49 + [500.0], 1000.0, 1000.0),  # one step in fifty saves, say: the next such one is no hang
        ([30.0, 33.0, 36.0] * 16, 330.0, 500.0),
        ([900.0] * 5, 1800.0, 1800.0),  # never beyond what collectives wait
    ],
)
def test_auto_follows_the_measured_steps(seconds, low, high):
    assert low <= pace_of(seconds).find_deadline(AUTO) <= high


def test_auto_never_ends_a_step_of_a_noisy_run():
    """Ten thousand steps whose times spread over an order of magnitude, none of which is a hang."""
    rng, pace = random.Random(7), StepPace()
    for _ in range(10_000):
        seconds = 20.0 * rng.lognormvariate(0.0, 0.5)
        assert seconds < pace.find_deadline(AUTO)
        pace.add(seconds)


def test_a_stopwatch_counts_only_time_in_which_it_was_looked_at():
    watch, value, now = Stopwatch(), object(), 1000.0
    for _ in range(20):
        now += 0.5
        watch.look(value, now)
    assert watch.seconds == pytest.approx(9.5)
    assert watch.look(value, now + 3600.0) == pytest.approx(9.5 + LOOK_S)  # the laptop was shut
    assert watch.look(object(), now + 3601.0) == 0.0


def test_a_rank_that_is_suspended_in_every_phase_is_never_judged():
    """The whole process sleeps for an hour in each step: nothing of that is a hang."""
    watch, now = Stopwatch(), 0.0
    for step in range(100):
        current = Current(Phase.STEP, step, now)
        for elapsed in (0.1, 3600.0, 0.5, 0.5):
            now += elapsed
            assert watch.look(current, now) < 5.0


def test_the_oldest_save_is_the_one_that_is_written():
    progress = Progress()
    assert progress.save is None
    first, second = Save(20), Save(40)
    progress.saves.extend((first, second))
    assert progress.save is first
    progress.saves.popleft()
    assert progress.save is second
