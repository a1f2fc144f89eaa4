"""What is foretold of a plan: the forecasts by which a search ranks layouts, of the one that the recipe states."""

from collections import Counter
from dataclasses import dataclass, replace

from framework.foresight.candidate import Candidate
from framework.foresight.forecast import Forecast
from framework.foresight.memory import forecast_memory
from framework.foresight.settings import Settings, chosen_counts, planned_candidate
from framework.foresight.shape import ModelShape, make_shape
from framework.foresight.time import TimeModel
from framework.parallel.pipeline.simulate import Costs
from framework.plan.cluster import Cluster
from framework.plan.plan import Plan


@dataclass(frozen=True)
class PlanForecast:
    """A plan with its forecasts. shape: of its model. costs: seconds of each stage's actions with one microbatch.
    cautions: what of the recipe the step time does not have."""

    plan: Plan
    shape: ModelShape
    cluster: Cluster
    candidate: Candidate
    forecast: Forecast
    costs: Costs
    cautions: tuple[str, ...] = ()


def forecast_plan(plan: Plan) -> PlanForecast:
    """On the recipe's cluster."""
    candidate, cluster = planned_candidate(plan), Cluster.from_recipe(plan.recipe)
    shape, settings = make_shape(plan.config, plan.recipe), Settings.of(plan.recipe)
    memory = forecast_memory(shape, candidate, settings, cluster, chosen_counts(plan))
    cautions = []
    if plan.recipe.memory.activation_checkpointing == "auto":
        policies = Counter(policy for rank in plan.topology.ranks("pp", 0) for policy in plan.policies(rank).values())
        policy = policies.most_common(1)[0][0]
        candidate = replace(candidate, checkpointing=policy)
        if len(policies) > 1:
            cautions.append(f"the step time is that of activation checkpointing {policy} for all layers")
    if plan.recipe.pipeline.table is not None:
        cautions.append(f"the step time is that of pipeline.schedule={candidate.schedule}, not of pipeline.table")
    times = TimeModel(shape, plan.recipe, cluster)
    forecast = Forecast(memory, times.forecast(candidate))
    return PlanForecast(plan, shape, cluster, candidate, forecast, times.costs(candidate), tuple(cautions))
