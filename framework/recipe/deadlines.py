"""Deadlines: how long a rank may stay in one phase before the run counts as hung. One ladder, checked as a whole:

    deadline of each phase  <  time-out of collectives  <  time of a job until it is told to save

The first finds a hang and knows the rank to blame. The second is the last resort where no watch runs any more; it knows only who
waited. At the third SLURM would cut the run, and nobody would know that it hung.
"""

from dataclasses import dataclass

from framework.recipe.schema import Recipe

# Where the recipe says nothing. A phase that reads terabytes from a busy file system takes minutes.
PHASE_S = 1800.0
# The first steps compile, load kernels and connect.
FIRST_STEPS_S = 1200.0
# Shortest deadline, however short the measured steps: a machine may be busy for a minute, and a hang that is found after two
# minutes costs little.
FLOOR_S = 120.0
# Collectives wait so much longer than the longest deadline.
MARGIN = 1.25


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a phase counts as hung."""

    # The stated deadline; None: it follows the measured steps, from FLOOR_S to `most`.
    step: float | None
    # A step, until enough are measured.
    first_steps: float
    # Each phase before the first step, and the end of the run.
    start: float
    # One save.
    save: float
    # One validation.
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
    """The ladder of a recipe. Unstated deadlines are at most half of a job's time, so that the job can start again."""
    launch, has_s = recipe.launch, count_job_seconds(recipe)

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


def seconds_of(time: str) -> int | None:
    """A time limit in sbatch's notation as seconds; None if it is not one."""
    days, dash, clock = time.rpartition("-")
    parts = clock.split(":")
    if len(parts) > 3 or not all(part.isdigit() for part in (*parts, *([days] if dash else []))):
        return None
    numbers = [int(part) for part in parts]
    if dash:  # D-H, D-H:M, D-H:M:S
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return ((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds
    hours, minutes, seconds = (0, *numbers, 0) if len(numbers) == 1 else (0, 0, *numbers)[-3:]  # M, M:S, H:M:S
    return (hours * 60 + minutes) * 60 + seconds


def count_job_seconds(recipe: Recipe) -> float | None:
    """Seconds of a job until it is told to save; None where it has no limit, or one that cannot be read."""
    launch = recipe.launch
    limit = seconds_of(launch.time) if launch.kind == "slurm" and isinstance(launch.time, str) else None
    return None if limit is None else float(limit - launch.signal_seconds_before_end)
