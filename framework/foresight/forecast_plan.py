"""What is foretold of a plan: the forecasts by which a search ranks layouts, of the one that the recipe states."""

from dataclasses import dataclass

from framework.errors import RecipeError
from framework.foresight.candidate import Candidate
from framework.foresight.forecast import Forecast
from framework.foresight.layouts import candidate_of
from framework.foresight.memory import forecast_memory
from framework.foresight.shape import make_shape
from framework.foresight.time import TimeModel
from framework.parallel.pipeline.simulate import Costs
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan


@dataclass(frozen=True)
class PlanForecast:
    """A plan with its forecasts. costs: seconds of each stage's actions with one microbatch, for the simulator."""

    plan: Plan
    cluster: Cluster
    candidate: Candidate
    forecast: Forecast
    costs: Costs


def forecast_plan(plan: Plan) -> PlanForecast:
    """On the recipe's cluster. RecipeError where no candidate says what the recipe does, with the key."""
    candidate, cluster = candidate_of(plan.recipe), Cluster.from_recipe(plan.recipe)
    shape = make_shape(plan.config, plan.recipe)
    times = TimeModel(shape, plan.recipe, cluster)
    forecast = Forecast(forecast_memory(shape, candidate, plan.recipe, cluster), times.forecast(candidate))
    return PlanForecast(plan, cluster, candidate, forecast, times.costs(candidate))


__all__ = ["PlanForecast", "RecipeError", "forecast_plan"]
