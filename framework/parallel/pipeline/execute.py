"""The one executor: interprets a rank's actions. Accumulation, whatever the number of microbatches, is its one-stage case."""

from collections.abc import Callable, Sequence

from torch import Tensor

from framework.parallel.pipeline.actions import Action, Kind


def execute(
    actions: Sequence[Action],
    forward: Callable[[int], Tensor],
    backward: Callable[[Tensor, bool], None],
) -> list[Tensor]:
    """Run the actions; return the microbatches' losses, detached, in order of microbatch.

    forward: computes a microbatch's loss by its index; backward: is given that loss, and whether it is the step's last
    backward, in which gradients are complete. A microbatch's graph lives from its F to its B and no longer.
    """
    live: dict[int, Tensor] = {}
    losses: dict[int, Tensor] = {}
    num_backwards = sum(action.kind is Kind.BACKWARD for action in actions)
    for action in actions:
        match action.kind:
            case Kind.FORWARD:
                live[action.microbatch] = forward(action.microbatch)
                losses[action.microbatch] = live[action.microbatch].detach()
            case Kind.BACKWARD:
                num_backwards -= 1
                backward(live.pop(action.microbatch), num_backwards == 0)
    assert not live, f"microbatches {sorted(live)} never ran backward"
    return [losses[index] for index in sorted(losses)]
