"""A schedule, `optim.schedule.name=one_minus_square`: slow at first, then faster and faster down to `final_ratio`."""

from framework.extend import schedule


@schedule("one_minus_square")
def one_minus_square(progress):
    """From 1 to 0 while progress goes from 0 to 1; warm-up and final rate are the framework's."""
    return 1 - progress**2
