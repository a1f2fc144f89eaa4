"""The learning rate as a pure function of the step, so that a resume has nothing to restore.

With s the 0-based index of an optimizer step, w = warmup_steps and n = total_steps:

    warm-up   s < w :  peak * (s + 1) / (w + 1)      no step runs at rate zero; index w has the peak
    decay     s >= w:  peak * shape(s), from 1 towards final_ratio, which it reaches at index n, one after the last step

Both ends are open in the same way: neither the first nor the last step of a run that starts or ends at zero is wasted.
"""

import math

from framework.recipe.schema import LearningRateSchedule


def learning_rate(step: int, schedule: LearningRateSchedule, peak: float, total_steps: int) -> float:
    """The rate used by the optimizer step of 0-based index `step`; beyond `total_steps` it stays at its last value."""
    warmup_steps = schedule.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    match schedule.name:
        case "constant":
            return peak
        case "linear":
            shape = 1 - _progress(step, warmup_steps, total_steps)
        case "cosine":
            shape = (1 + math.cos(math.pi * _progress(step, warmup_steps, total_steps))) / 2
        case "wsd":
            shape = 1 - _progress(step, wsd_decay_start(schedule, total_steps), total_steps)
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * shape)


def wsd_decay_start(schedule: LearningRateSchedule, total_steps: int) -> int:
    """Index of the last step at the peak; a linear decay of `decay_steps` follows (null: of a tenth of the run)."""
    decay_steps = schedule.decay_steps if schedule.decay_steps is not None else math.ceil(total_steps / 10)
    return max(schedule.warmup_steps, total_steps - decay_steps)


def _progress(step: int, start: int, stop: int) -> float:
    """How far `step` is on the way from `start` (0, also before it) to `stop` (1, also after it)."""
    if step >= stop:
        return 1.0
    return max(0.0, (step - start) / (stop - start))
