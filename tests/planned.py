"""Planned bytes in the parts that runs count."""

from functools import partial

from framework.optim.optimizers import state_names
from framework.parallel.pipeline.lower import LiveMoment
from framework.parallel.pipeline.simulate import unit_costs
from framework.plan.activation_bytes import make_moments
from framework.plan.plan import Plan
from framework.plan.state_bytes import measure_units, total_on_device


def held_by_buffers(plan: Plan, rank: int) -> dict[str, int]:
    """Bytes of a rank's own buffers on its device by kind, exact for any rank; gathered: with full gradients, in backward.

    `Plan.memory` has those of the first rank at a place of the pipeline: others' moments of few bits may be cut into some
    blocks more or less.
    """
    states, moments = partial(state_names, plan.recipe.optim), plan.recipe.precision.moments
    return total_on_device(measure_units(plan.of_rank(rank).buffers, states, moments))


def kept_activations(plan: Plan, rank: int) -> int:
    """The most bytes of activations that a rank has at once, without gradients inside of a layer and of the loss."""
    own, sizes = plan.memory(rank), plan.activations
    inside = {"loss": sizes.loss_temporaries, "backward": sizes.backward_temporaries}
    kinds = ("activations", "logits", "temporaries", "communication")
    found = {name: sum(held[kind] for kind in kinds) for name, held in own.phases.items()}
    return max(size - (inside.get(name, 0) if size else 0) for name, size in found.items())


def moments_of(schedule: str, pp: int, virtual: int, accumulation: int) -> list[list[LiveMoment]]:
    """Moments of each rank at which it may have most, with stages that take equally long."""
    return list(map(make_moments(schedule, pp, virtual, accumulation, unit_costs(pp * virtual)), range(pp)))
