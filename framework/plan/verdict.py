"""Does a plan fit its device, and if not, which changes of the recipe make it fit at the least cost of a step?"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from framework.errors import MeshwrightError, RecipeError
from framework.plan.cluster import Cluster
from framework.plan.forecast import Forecast, MemoryForecast
from framework.plan.forecast_memory import forecast_memory
from framework.plan.forecast_plan import PlanForecast, forecast_plan
from framework.plan.layouts import OFFLOADED, candidate_of
from framework.plan.memory import show_bytes
from framework.plan.plan import Plan
from framework.plan.rejections import describe_shortages
from framework.plan.relief import list_changes, set_key
from framework.plan.settings import Settings
from framework.plan.shape import ModelShape
from framework.plan.time import TimeModel
from framework.recipe.check import check_recipe
from framework.recipe.derive import derive
from framework.recipe.schema import Recipe

# Changes that are said, and how many may be made together.
SHOWN = 3
MOST_TOGETHER = 2

Setting = tuple[str, object]


@dataclass(frozen=True)
class Change:
    """Settings with which a layout fits, and what is foretold with them."""

    settings: tuple[Setting, ...]
    forecast: Forecast

    @property
    def overrides(self) -> str:
        """As they are typed."""
        return " ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in self.settings)


def describe_verdict(memory: MemoryForecast, cluster: Cluster) -> str:
    """Such as `fits the 79.6 GiB of h100_ib with 9.1 GiB to spare`."""
    limit = f"{show_bytes(memory.limit)} of {cluster.name}{', which is assumed,' if cluster.is_assumed else ''}"
    shortages = list(describe_shortages(memory.node))
    if memory.spare < 0:
        shortages = [f"{show_bytes(-memory.spare)} over the {limit.rstrip(',')}", *shortages]
    if shortages:
        return f"does not fit: {'; '.join(shortages)}"
    node = memory.node
    return f"fits the {limit} with {show_bytes(memory.spare)} to spare" + (
        f", and a node's host memory with {show_bytes(node.spare)} of {show_bytes(node.there)}"
        if node.offloaded + node.copies
        else ""
    )


def caution_of_fit(plan: Plan) -> str:
    """Why a plan does not fit its cluster, for commands that go on all the same; empty where it fits."""
    try:
        found = forecast_plan(plan)
    except RecipeError as error:  # nodes of another form than the cluster's
        return " ".join(str(error).split())
    if found.forecast.memory.fits:
        return ""
    return f"{describe_verdict(found.forecast.memory, found.cluster)}; `meshwright plan` says what would"


def find_changes(found: PlanForecast) -> list[Change]:
    """The cheapest by step time; single ones before those that take two. Empty where nothing is missing, or nothing helps."""
    if found.forecast.memory.fits:
        return []
    settings = _list_settings(found)
    fitting: list[Change] = []
    for together in range(1, MOST_TOGETHER + 1):
        tried = (_try(found, each) for each in combinations(settings, together))
        fits = [change for change in tried if change is not None and not _has_one_of(change, fitting)]
        fitting += sorted(fits, key=lambda each: each.forecast.time.step_s)
        if len(fitting) >= SHOWN:
            break
    return fitting[:SHOWN]


def describe_changes(found: PlanForecast, changes: Sequence[Change]) -> Iterator[str]:
    """A line for each, with what it costs; or what is left where none helps."""
    if found.forecast.memory.fits:
        return
    before = found.forecast.time.step_s
    for each in changes:
        ratio = each.forecast.time.step_s / before - 1
        yield f"{each.overrides}: {show_bytes(each.forecast.memory.spare)} to spare, step time {ratio:+.0%}"
    if not changes:
        yield "no two changes make it fit: more ranks, or `meshwright search` for another layout"


def _has_one_of(change: Change, fitting: Sequence[Change]) -> bool:
    """Whether a part of a change is enough."""
    return any(set(each.settings) < set(change.settings) for each in fitting)


def _list_settings(found: PlanForecast) -> list[Setting]:
    derived = found.plan.derived
    degrees = [derived.tp << power for power in range(1, 4) if derived.dp % (1 << power) == 0]
    tp = [("parallel.tp", degree) for degree in degrees if degree <= found.cluster.ranks_per_node]
    return list(dict.fromkeys([*list_changes(found.plan), *tp, *_list_reliefs_of_nodes(found)]))


def _list_reliefs_of_nodes(found: PlanForecast) -> list[Setting]:
    """Settings with which ranks take less of a node that has too little."""
    if found.forecast.memory.node.fits:
        return []
    recipe, given = found.plan.recipe, found.plan.recipe.memory.offload
    settings: list[Setting] = [(f"memory.offload.{name}", 0.0) for name in OFFLOADED if getattr(given, name)]
    if given.home == "disk":
        settings += [("memory.offload.home", "host"), ("memory.offload.disk_path", None)]
    if recipe.checkpoint.neighbor_copies:
        settings += [("checkpoint.neighbor_copies", 0), ("checkpoint.neighbor_every_steps", None)]
    return settings


def _try(found: PlanForecast, settings: Sequence[Setting]) -> Change | None:
    """None where the settings contradict one another, the recipe or the model, or do not fit the device either."""
    recipe = found.plan.recipe
    for key, value in settings:
        recipe = set_key(recipe, key, value)
    if len({key for key, _ in settings}) < len(settings) or check_recipe(recipe, {}):
        return None
    try:
        forecast = _forecast(recipe, found.shape, found.cluster)
    except MeshwrightError:
        return None
    return None if forecast is None else Change(tuple(settings), forecast)


def _forecast(recipe: Recipe, shape: ModelShape, cluster: Cluster) -> Forecast | None:
    derive(recipe)
    candidate = candidate_of(recipe)
    if shape.refusal(candidate):
        return None
    memory = forecast_memory(shape, candidate, Settings.of(recipe), cluster)
    if not memory.fits:
        return None
    return Forecast(memory, TimeModel(shape, recipe, cluster).forecast(candidate))
