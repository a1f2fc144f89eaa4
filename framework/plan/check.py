"""Is a recipe's layout one that ranks can build? Asked before a job is queued, where the answer costs seconds and no GPU."""

from framework.model.load import load_config
from framework.plan.plan import Plan, make_plan
from framework.recipe.schema import Recipe


def check_layout(recipe: Recipe) -> Plan:
    """The recipe's plan, with each rank of one pipeline laid out: ranks that differ in other coordinates are laid out alike.

    Raises what the ranks would raise: ModelError, TopologyError, RecipeError, ScheduleError. Asks the hub for a config that is
    not here yet.
    """
    plan = make_plan(recipe, load_config(recipe.model))
    for rank in plan.topology.ranks("pp", 0):
        plan.of_rank(rank)
    return plan


def most_bytes(plan: Plan) -> int:
    """The most memory that a rank is planned to hold."""
    return max(plan.memory(rank).total for rank in plan.topology.ranks("pp", 0))


def describe_need(plan: Plan) -> str:
    """The model's size and the most memory that a rank is planned to hold, in a line."""
    most = most_bytes(plan)
    size = f"{most / 2**30:,.1f} GiB" if most >= 2**30 else f"{most / 2**20:,.0f} MiB"
    return (
        f"{plan.size.total:,} parameters in {plan.recipe.precision.compute}, at most {size} a rank, kernels not counted"
    )
