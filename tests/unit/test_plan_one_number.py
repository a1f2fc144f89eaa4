"""A rank's peak is one number wherever it is shown or decided upon."""

import re
from dataclasses import replace
from itertools import islice

import pytest

from framework.output import show_bytes
from framework.plan.advice import describe_relief, describe_savings, describe_verdict, find_relief, find_savings
from framework.plan.bounds import Engine
from framework.plan.check import check_layout, most_bytes
from framework.plan.forecast_plan import forecast_plan
from framework.plan.pages import make_page
from framework.plan.plan import GB, Plan, make_plan
from framework.plan.plan_text import describe_plan, describe_ranks
from framework.recipe.compose import compose
from tests.grid import IN_TURN

pytestmark = IN_TURN

GPUS = ("model=llama3_2_1b", "launch.device=cuda", "launch.ranks=8", "cluster=h100_ib", "precision=bf16")
LAYOUTS = {
    "zero 3": ("zero.stage=3",),
    "pipeline": ("parallel.pp=2", "parallel.tp=2", "zero.stage=1"),
    "offload": ("zero.stage=2", "memory.offload.optimizer=0.5", "memory=full_checkpointing"),
}


@pytest.fixture(scope="module", params=LAYOUTS)
def plan(request: pytest.FixtureRequest) -> Plan:
    return check_layout(compose([*GPUS, *LAYOUTS[request.param]]).require())


def test_a_rank_has_one_peak_in_all_that_a_plan_says(plan: Plan) -> None:
    found, ranks = forecast_plan(plan), plan.topology.ranks("pp", 0)
    fullest = max(ranks, key=lambda rank: plan.memory(rank).reserved)
    peak = plan.memory(fullest).reserved
    memory = found.forecast.memory
    # The forecast, and so the verdict and the page.
    assert [stage.reserved for stage in memory.stages] == [plan.memory(rank).reserved for rank in ranks]
    assert f"{show_bytes(memory.limit - peak)} to spare" in describe_verdict(memory, found.cluster)
    totals = [row["total"] for row in next(rows for rows in make_page(found).rows.values() if "total" in rows[0])]
    assert max(totals) == pytest.approx(peak / 2**30)
    # The screen, --ranks and --options.
    assert f"memory        {show_bytes(peak)} on rank {fullest}" in "\n".join(describe_plan(found, []))
    table = "\n".join(describe_ranks(plan)).partition("needs most\n")[2].partition("\n\n")[0].splitlines()
    place = table[1].index("all  live") + len("all")
    assert f"{peak / 2**30:.3f} GiB" in [line[:place].split("  ")[-1].strip() for line in table[2:]]
    assert show_bytes(peak) in next(describe_savings(plan))
    # Where a device has no memory left, and what `doctor` says.
    assert f"planned to hold {show_bytes(peak)}" in describe_relief(plan, fullest)
    assert most_bytes(plan) == peak


def test_what_advice_says_of_another_recipe_is_what_its_plan_says(plan: Plan) -> None:
    for saving in islice(find_savings(plan, 0), 2):
        key, _, value = saving.override.partition("=")
        recipe = plan.recipe
        group, name = key.split(".", 1)
        if "." in name:
            continue
        now = getattr(getattr(recipe, group), name)
        changed = replace(
            recipe, **{group: replace(getattr(recipe, group), **{name: type(now)(value) if now is not None else value})}
        )
        after = make_plan(changed, plan.config).memory(0).reserved
        assert plan.memory(0).reserved - saving.device == after
    assert all(size < plan.memory(0).reserved for _, size in find_relief(plan, 0))


def test_a_search_prunes_by_the_same_number(plan: Plan) -> None:
    if plan.recipe.memory.offload.optimizer == 0.5:
        pytest.skip("a search offloads all or none")
    found = forecast_plan(plan)
    engine = Engine(plan.shape, plan.recipe, found.cluster)
    assert engine.forecast(plan.candidate).memory.stages == found.forecast.memory.stages
    places = ((plan.candidate.zero, plan.candidate.shard, plan.candidate.offload),)
    assert engine.bytes.spare(plan.candidate, places, found.cluster.memory_bytes).tolist() == [
        found.forecast.memory.spare
    ]


def test_a_budget_is_met_by_that_number() -> None:
    """With as much as nothing recomputed needs `auto` recomputes nothing, with a byte less it does."""

    def plan_with(*words: str) -> Plan:
        return check_layout(compose([*GPUS, "zero.stage=3", *words]).require())

    peak = plan_with().memory(0).reserved
    auto = "memory.activation_checkpointing=auto"
    enough, less = (plan_with(auto, f"memory.budget_gb={(peak + more) / GB!r}") for more in (1, -(2**20)))
    assert set(enough.policies(0).values()) == {"none"}
    assert enough.memory(0).reserved == peak
    assert set(less.policies(0).values()) != {"none"}
    assert less.memory(0).reserved <= peak - 2**20
    with pytest.raises(Exception, match=r"memory\.budget_gb") as caught:
        plan_with(auto, "memory.budget_gb=0.5")
    least = float(re.search(r"set memory.budget_gb=([\d.]+)", str(caught.value))[1])  # type: ignore[index]
    assert plan_with(auto, f"memory.budget_gb={least}").memory(0).reserved <= least * GB
