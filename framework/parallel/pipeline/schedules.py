"""Schedules: pure functions from (stages, microbatches) to each stage's list of actions."""

from framework.parallel.pipeline.actions import Action, Kind


def one_forward_one_backward(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """1F1B (Narayanan et al. 2021, section 2.2.1): stage s runs P - 1 - s forwards ahead, then one forward, one backward.

    With one stage this is F0 B0 F1 B1 ...: gradient accumulation is a pipeline of one stage.
    """
    schedule = []
    for stage in range(num_stages):
        ahead = min(num_stages - 1 - stage, num_microbatches)
        kinds = [Kind.FORWARD] * ahead
        kinds += [Kind.FORWARD, Kind.BACKWARD] * (num_microbatches - ahead)
        kinds += [Kind.BACKWARD] * ahead
        counts = {Kind.FORWARD: 0, Kind.BACKWARD: 0}
        actions = []
        for kind in kinds:
            actions.append(Action(stage, kind, counts[kind]))
            counts[kind] += 1
        schedule.append(actions)
    return schedule
