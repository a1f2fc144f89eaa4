"""Stages that send each tensor-parallel rank's own tokens train as one process does (sequence parallelism in a pipeline).

A sequence has 9 tokens, which two ranks do not divide: what travels is padded.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import framework.plan.plan
from framework.comm.connect import connect
from framework.comm.objects import all_gather_object
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Axis
from framework.model.borders import Value
from framework.parallel.pipeline.execute import ActivationSpec
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.step import train_step
from framework.verify.compare import compare
from framework.verify.layout import share
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, Case, assert_equal, small_recipe, topology_of, worst_error
from tests.ranks.pool import RankPool
from tests.ranks.test_pipeline import SCHEDULES, case_of, train

pytestmark = IN_TURN

RECOMPUTES = Memory(activation_checkpointing="full", gathered_inputs="regather", compile="never")


def recipe_of(schedule: str, count: int = 4, pp: int = 2, tp: int = 2, zero: int = 0, **changes: Any) -> Recipe:
    parallel = Parallel(pp=pp, tp=tp, sequence=True)
    recipe = small_recipe("fp64", pp * tp, count, 8, 0.05, Zero(stage=zero), parallel)
    return replace(recipe, pipeline=Pipeline(schedule=schedule), **changes)  # type: ignore[arg-type]


def layouts_of(*schedules: str) -> dict[str, Recipe]:
    return {f"{each} zero {index % 4}": recipe_of(each, zero=index % 4) for index, each in enumerate(schedules)}


# A V with a split backward, in which a rank has the first and the last stage, runs each day, recomputed and tied: below.
@pytest.mark.grid
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_hands_on_each_ranks_own_tokens(pool: RankPool, schedule: str) -> None:
    zero = SCHEDULES.index(schedule) % 4
    assert_equal(pool, 4, [case_of("llama", {schedule: recipe_of(schedule, zero=zero)})])


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe_of("zbv", memory=RECOMPUTES), id="recomputed in a V"),
        pytest.param(
            recipe_of("zb_h1", memory=replace(RECOMPUTES, activation_checkpointing="none")),
            marks=pytest.mark.grid,
            id="regathered",
        ),
    ],
)
def test_ties_recomputation_and_gathering_again_hand_on_tokens(pool: RankPool, recipe: Recipe) -> None:
    assert_equal(pool, 4, [case_of("gpt2", {"split backward": recipe}, tie_word_embeddings=True)])


@pytest.mark.grid
@pytest.mark.parametrize("name", ["gpt2", "gemma2", "granite", "qwen3_moe"])
def test_families_hand_on_tokens(pool: RankPool, name: str) -> None:
    recomputed = {f"{each}, recomputed": recipe_of(each, memory=RECOMPUTES) for each in ("1f1b", "zb_h1")}
    assert_equal(pool, 4, [case_of(name, layouts_of(*SCHEDULES) | recomputed)])


@pytest.mark.grid
def test_dropout_does_not_know_of_stages_that_hold_tokens(pool: RankPool) -> None:
    dropout = {"resid_pdrop": 0.3, "attn_pdrop": 0.2, "embd_pdrop": 0.1}
    layouts = {
        "one stage": recipe_of("1f1b", pp=1),
        "two": recipe_of("1f1b"),
        "in a V, recomputed": recipe_of("zbv", memory=RECOMPUTES),
    }
    found = train(pool, case_of("gpt2", layouts, **dropout), 4)
    assert worst_error(compare(found["two"], found["one stage"])) < 1e-9
    assert worst_error(compare(found["in a V, recomputed"], found["one stage"])) < 1e-9


def seed_layers_alike() -> AbstractContextManager[Any]:
    """Sabotage: layers are seeded as if all ranks held the same tokens."""
    return patch.object(framework.plan.plan, "mask_of", lambda tokens: 0)


def find_seeds(
    rank: int, world: int, rendezvous: str, case: Case, sabotage: Callable[[], AbstractContextManager[Any]]
) -> dict[str, int]:
    """Body: how many seeds the ranks have in the last layer: outside, in its attention, in its experts."""
    with sabotage():
        return count_seeds(rank, rendezvous, case)


def count_seeds(rank: int, rendezvous: str, case: Case) -> dict[str, int]:
    recipe = case.layouts[""]
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    seeds: dict[str, int] = {}

    def note(place: str, module: nn.Module, args: Any) -> None:
        seeds.setdefault(place, torch.initial_seed())

    layer = run.stages[0].model.model.model.layers[-1]
    for place, module in {
        "outside": layer.post_attention_layernorm,
        "attention": layer.self_attn.o_proj,
        "experts": layer.mlp.experts,
    }.items():
        module.register_forward_pre_hook(partial(note, place))
    train_step(run, share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh), 0, 0.0)
    everywhere = all_gather_object(seeds, mesh.axis("tp"))
    mesh.close()
    return {place: len({each[place] for each in everywhere}) for place in seeds}


@pytest.mark.parametrize("sabotage", few_of([nullcontext, seed_layers_alike], lambda each: each is nullcontext))
def test_streams_of_later_layers_differ_where_ranks_hold_other_tokens_and_heads(
    pool: RankPool, sabotage: Callable[[], AbstractContextManager[Any]]
) -> None:
    case = case_of("qwen3_moe", {"": recipe_of("1f1b", pp=1)}, attention_dropout=0.1)
    found = pool.run(2, find_seeds, case, sabotage)[0]
    assert (found == {"outside": 2, "attention": 2, "experts": 1}) == (sabotage is nullcontext)


def test_a_message_has_one_ranks_part_of_the_tokens() -> None:
    layouts = {is_sharded: TokenLayout(3, 9, Axis("tp", 2, 0), is_sharded) for is_sharded in (False, True)}
    border = (Value(((1, (0, 0)),), (0, 1), (32,), torch.float64),)
    buffers = {
        key: ActivationSpec(x, [(), border], 0, torch.float64, CPU).make_buffers(1) for key, x in layouts.items()
    }
    assert {key: [each.shape for each in found] for key, found in buffers.items()} == {
        False: [(3, 9, 32)],
        True: [(3, 5, 32)],
    }
