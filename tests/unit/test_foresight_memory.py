"""What is foretold of a layout's memory is what its Plan counts, for every family, layout and option."""

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product

import pytest

from framework.errors import MeshwrightError
from framework.optim.optimizers import state_names
from framework.parallel.pipeline.lower import LiveMoment, live_moments, lower
from framework.parallel.pipeline.schedules import make_schedule
from framework.parallel.pipeline.simulate import unit_costs
from framework.plan.candidate import Candidate
from framework.plan.cluster import ClusterRates
from framework.plan.forecast_memory import MemoryModel, describe_estimate
from framework.plan.plan import Plan, make_plan
from framework.plan.shape import DEFAULT, make_shape
from framework.plan.space import ModelRules
from framework.plan.state_bytes import CONTEXT_BYTES, FRAGMENTATION, KINDS, measure_units, total_on_disk, total_on_host
from framework.recipe.check import check_recipe
from framework.recipe.machines import read_shipped
from framework.recipe.schema import Batch, Memory, Offload, Optim, Parallel, ParameterGroup, Pipeline, Recipe, Zero
from tests.families import FAMILIES, Family, build_config, family, is_kind
from tests.grid import IN_TURN, few_of
from tests.planned import held_by_buffers, moments_of
from tests.ranks.parity import small_recipe

pytestmark = IN_TURN


def draw(rng: random.Random) -> Recipe:
    """A layout of a random recipe, legal or not."""
    pick = rng.choice
    parallel = Parallel(
        tp=pick((1, 1, 2, 4)),
        pp=pick((1, 1, 2, 3)),
        cp=pick((1, 1, 2)),
        ep=pick((1, 1, 2, 4)),
        sequence=pick((True, False)),
    )
    world = pick((1, 2, 4)) * parallel.tp * parallel.pp * parallel.cp
    zero = Zero(pick((0, 1, 2, 3)))
    if zero.stage:
        within = pick((None, 1, 2))
        zero = replace(zero, shard_within=within, optimizer_within="all" if within and pick((True, False)) else "shard")
    if zero.stage >= 2:
        zero = replace(
            zero, accumulate=pick(("sharded", "local")), keep_gathered=zero.stage == 3 and pick((False, True))
        )
    offload = Offload(
        optimizer=pick((0.0, 0.0, 0.5, 1.0)),
        parameters=pick((0.0, 0.5, 1.0)) if zero.stage == 3 else 0.0,
        activations=pick((0.0, 0.0, 0.4, 1.0)),
    )
    policies = ("none", "full") if offload.activations else ("none", "selective", "full", "sqrt")
    memory = Memory(
        pick(policies),
        chunked_loss=pick((False, False, True)),
        gathered_inputs="regather" if parallel.sequence and pick((True, False)) else "keep",
        compile="never",
        offload=offload,
    )
    schedule = pick(("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"))
    if zero.stage:
        zero = replace(zero, quantize_gather=pick(("none", "none", "int8", "fp8")))
    if zero.quantize_gather != "none":
        zero = replace(zero, quantize_min_elements=pick((0, 500, 2**16)))
    if zero.stage == 3 and not zero.keep_gathered:
        zero = replace(zero, secondary_shard=pick((None, 2)))
    recipe = small_recipe(pick(("fp32", "bf16")), world, pick((1, 2, 4, 6)), 48, None, zero, parallel)
    return replace(
        recipe,
        zero=zero,
        memory=memory,
        pipeline=Pipeline(schedule=schedule if parallel.pp > 1 else "1f1b"),  # type: ignore[arg-type]
        batch=replace(recipe.batch, context=32),
        precision=replace(recipe.precision, moments=pick(("fp32", "fp32", "bf16", "int8"))),
        model=replace(recipe.model, freeze=pick(([], [], ["bias|norm|ln"], [r"\.0\."]))),
        optim=pick((Optim(), Optim(groups={"slow": ParameterGroup("bias|norm|ln", lr_ratio=0.3)}))),
    )


def plans(family: Family, seed: int, count: int) -> Iterator[Plan]:
    """Plans of random layouts of a family; those that are refused are drawn again, some times."""
    rng, config, left = random.Random(f"{seed}/{family.name}"), build_config(family), 12 * count
    while count and left:
        left -= 1
        recipe = draw(rng)
        recipe = replace(recipe, launch=replace(recipe.launch, device="cuda", kind="local"))
        try:
            if any(not each.key.startswith(("data.", "model.tokenizer")) for each in check_recipe(recipe, {})):
                continue
            plan = make_plan(recipe, config)
            plan.memory(0)
        except MeshwrightError:
            continue
        count -= 1
        yield plan


def cluster_of(num_bytes: int) -> ClusterRates:
    return replace(ClusterRates.from_group(read_shipped("h100_ib")), memory_bytes=num_bytes)


def assert_is_planned(plan: Plan) -> None:
    """States are those of the buffers that ranks lay out, and a search has the plan's number."""
    shape = make_shape(plan.config, plan.recipe)
    candidate, chosen = plan.candidate, plan.chosen
    assert ModelRules(shape).refuse(candidate) is None
    found = MemoryModel.of(shape, plan.recipe).forecast(candidate, cluster_of(0), chosen)
    names, moments = partial(state_names, plan.recipe.optim), plan.recipe.precision.moments
    for rank, stage in zip(plan.topology.ranks("pp", 0), found.stages, strict=True):
        assert stage == plan.memory(rank), f"{plan.title}, rank {rank}: {candidate}"
        planned, title = held_by_buffers(plan, rank), f"{plan.title}, rank {rank}: {candidate}"
        assert {kind: stage.phases["backward"][kind] for kind in KINDS} == planned, title
        on_host = total_on_host(measure_units(plan.of_rank(rank).buffers, names, moments), is_pinned=True)
        disk, ring = total_on_disk(plan.of_rank(rank).buffers, names)
        assert stage.host - stage.on_host["activations"] == sum(on_host.values()) + ring, title
        assert stage.disk == disk, title


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_states_are_foretold_as_they_are_planned(name: str) -> None:
    for plan in plans(family(name), seed=1, count=2):
        assert_is_planned(plan)


@pytest.mark.grid
@pytest.mark.parametrize("each", few_of(FAMILIES, is_kind), ids=lambda each: each.name)
def test_states_of_any_family_are_foretold_as_they_are_planned(each: Family) -> None:
    for plan in plans(each, seed=2, count=6):
        assert_is_planned(plan)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"])
def test_in_flight_microbatches_are_those_of_the_whole_schedule(schedule: str) -> None:
    """Of hundreds of microbatches a few are simulated: ranks have as many in flight at once."""
    virtuals = {"interleaved": (2, 3), "zbv": (2,), "dualpipe_v": (2,)}.get(schedule, (1,))
    for pp, virtual, accumulation in product((2, 3, 4, 6), virtuals, (13, 24, 50, 97)):
        few = moments_of(schedule, pp, virtual, accumulation)
        whole = make_schedule(schedule, pp, accumulation, virtual)
        lowered = lower(whole, unit_costs(whole.num_stages))
        for rank in range(pp):
            # Not one is missing, and none is more than there is.
            there = live_moments(lowered, rank)
            assert set(few[rank]) <= set(there), (pp, virtual, accumulation, rank)
            for each in there:
                assert any(is_at_least(other, each) for other in few[rank]), (pp, virtual, accumulation, rank, each)


def is_at_least(one: LiveMoment, other: LiveMoment) -> bool:
    alike, pairs = one[:2] == other[:2], list(zip(one.live, other.live, strict=True))
    has_between = one.between + sum(a[1] - b[1] for a, b in pairs) >= other.between
    return alike and has_between and all(a[1] >= b[1] and a[2] >= b[2] for a, b in pairs)


def test_a_model_without_formulas_says_what_is_estimated() -> None:
    candidate = Candidate(checkpointing="full")
    assert describe_estimate(make_shape(build_config(family("llama"))), candidate) is None
    words = describe_estimate(make_shape(build_config(family("gpt2"))), candidate)
    assert words is not None
    assert "gpt2" in words
    assert "computes again" in words


def test_the_fullest_phase_is_what_a_rank_holds_and_slack_is_beside_it() -> None:
    """By hand, a rank on a GPU: what is reserved is the largest phase, its slack, and what is not torch's."""
    model = MemoryModel.of(make_shape(build_config(family("llama"))), replace(DEFAULT, batch=Batch(1)))
    found = model.forecast(Candidate(sequences=8, context=64), cluster_of(10**9))
    (stage,) = found.stages
    assert stage.held == max(stage.phases.values(), key=lambda each: sum(each.values()))
    assert stage.reserved == sum(stage.held.values()) + stage.slack + stage.outside
    assert stage.outside == CONTEXT_BYTES
    moving = sum(stage.held[kind] for kind in ("gathered", "activations", "logits", "temporaries", "communication"))
    assert stage.slack == int(FRAGMENTATION * moving)
    assert found.spare == 10**9 - stage.reserved


@pytest.mark.parametrize(
    ("candidate", "words"),
    [
        (Candidate(tp=3), "parallel.tp=3 does not divide the 4 heads"),
        (Candidate(ep=2), "llama has no stacked experts"),
        (Candidate(pp=4), "parallel.pp=4 makes 4 stages, and the model has 3 layers"),
        (Candidate(cp=8, ulysses=8), "a Ulysses degree of 8 does not divide the 4 heads"),
    ],
)
def test_a_degree_is_refused_with_the_words_of_the_rules(candidate: Candidate, words: str) -> None:
    refusal = ModelRules(make_shape(build_config(family("llama")))).refuse(replace(candidate, context=64))
    assert refusal is not None
    assert words in refusal
    assert "\n" not in refusal
