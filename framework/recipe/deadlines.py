"""Deadlines: how long a rank may stay in one phase before the run counts as hung. One ladder, computed here
and checked as a whole:

    deadline of each phase  <  time-out of collectives  <  what a job has until it is told to save

The first finds a hang and knows the rank to blame. The second is the last resort where no watch runs any more; it knows only who
waited. At the third SLURM would cut the run, and nobody would know that it hung.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from framework.recipe.launch_rules import seconds_of
from framework.recipe.problem import Problem
from framework.recipe.schema import Recipe

# Where the recipe says nothing. A phase that reads terabytes from a busy file system takes minutes.
PHASE_S = 1800.0
# The first steps compile, load kernels and connect.
FIRST_STEPS_S = 1200.0
# What follows the measured steps never gives one less: a machine may be busy for a minute, and a hang that is found after two
# minutes costs little.
FLOOR_S = 120.0
# Collectives wait so much longer than the longest deadline.
MARGIN = 1.25


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a phase counts as hung.

    step: as stated; None: it follows the measured steps, from FLOOR_S to `most`. first_steps: until enough are measured. start:
    each phase before the first step, and the end of the run. save: one save. validate: one validation.
    """

    step: float | None
    first_steps: float
    start: float
    save: float
    validate: float

    @property
    def most(self) -> float:
        """The longest that any phase gets."""
        return max(self.step or 0.0, self.first_steps, self.start, self.save, self.validate)

    @property
    def collective(self) -> float:
        """The time-out of process groups."""
        return MARGIN * self.most


def find_deadlines(recipe: Recipe) -> Deadlines:
    """The ladder of a recipe. What it does not state is at most half of what a job has, so that the job can start again."""
    launch, has_s = recipe.launch, _job_seconds(recipe)

    def choose(stated: float | None, otherwise: float) -> float:
        if stated is not None:
            return stated
        return otherwise if has_s is None else max(FLOOR_S, min(otherwise, has_s / 2))

    step = launch.step_deadline_s if isinstance(launch.step_deadline_s, float) else None
    return Deadlines(
        step=step,
        first_steps=max(step or 0.0, choose(None, FIRST_STEPS_S)),
        start=choose(launch.start_deadline_s, PHASE_S),
        save=choose(launch.save_deadline_s, PHASE_S),
        validate=choose(launch.validate_deadline_s, PHASE_S),
    )


def find_deadline_problems(recipe: Recipe) -> Iterator[Problem]:
    """A stated deadline that a job's end would come before."""
    has_s = _job_seconds(recipe)
    if has_s is None:
        return
    for name in ("step_deadline_s", "start_deadline_s", "save_deadline_s", "validate_deadline_s"):
        stated = getattr(recipe.launch, name)
        if isinstance(stated, float) and MARGIN * stated >= has_s:
            message = (
                f"collectives would wait {MARGIN * stated:g} s, longer than the {has_s:g} s that a job has"
                f" (launch.time={recipe.launch.time}) until it is told to save: a hang would never be found"
            )
            largest = int((has_s - 1) / MARGIN)
            fix = (
                f"launch.{name}={largest} or less; or a longer launch.time" if largest >= 1 else "a longer launch.time"
            )
            yield Problem(f"launch.{name}", stated, message, fix)


def _job_seconds(recipe: Recipe) -> float | None:
    """What a job has until it is told to save; None where it has no limit, or one that cannot be read."""
    launch = recipe.launch
    limit = seconds_of(launch.time) if launch.kind == "slurm" and isinstance(launch.time, str) else None
    return None if limit is None else float(limit - launch.signal_seconds_before_end)
