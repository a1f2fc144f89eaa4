"""Biases that balance experts move alike in every layout: by the loads of the whole batch, as one process counts them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from framework.checkpoint.folder import committed_name
from framework.checkpoint.load import Reader
from framework.comm.connect import connect
from framework.commands.trained_model import UnitReader, _read
from framework.model import mixtures
from framework.model.load import build_meta
from framework.model.mixtures import ExpertLoad, find_mixtures
from framework.model.units import find_units
from framework.model.weights import write_weights
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Model, Optim, Parallel, Pipeline, Recipe, Zero
from framework.train.beside_optimizer import RouterBiases
from framework.train.build import build
from framework.train.state import saved_entries
from framework.train.step import train_step
from framework.verify.compare import ErrorRow
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from tests.families import Family, build_config, family
from tests.grid import IN_TURN, few_of
from tests.ranks.parity import CPU, Case, assert_equal, expect, run_cases, small_recipe, topology_of, train_layouts
from tests.ranks.pool import RankPool
from tests.ranks.test_pipeline_state import resume

pytestmark = IN_TURN

# Large, so that the second step routes by what the first has moved.
BALANCED = Model(router_bias_rate=0.05)
RECOMPUTES = Memory(activation_checkpointing="full", compile="never")
# A bias that is a parameter, which ZeRO shards.
ERNIE = Family(
    "ernie4_5_moe",
    {
        **family("llama").config, "model_type": "ernie4_5_moe", "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 24,
        "moe_layer_start_index": 1, "moe_num_shared_experts": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
)  # fmt: skip


def recipe_of(
    world: int = 2, count: int = 2, zero: Zero | None = None, precision: str = "fp64", **changes: Any
) -> Recipe:
    parallel = changes.pop("parallel", Parallel())
    recipe = small_recipe(precision, world, count, 12, 0.05, zero or Zero(0), parallel)
    return replace(recipe, **{"model": BALANCED, **changes})


LAYOUTS = {
    "accumulation, zero 1": recipe_of(2, 3, Zero(1)),
    "zero 3, recomputed": recipe_of(2, 1, Zero(3), memory=RECOMPUTES),
    "hsdp, updates divided": recipe_of(4, 1, Zero(2, shard_within=2, optimizer_within="all")),
    "tp": recipe_of(2, parallel=Parallel(tp=2, sequence=False)),
    "dp x sp, zero 2": recipe_of(4, zero=Zero(2), parallel=Parallel(tp=2)),
    "ep, tokens divided": recipe_of(4, 1, Zero(2), parallel=Parallel(ep=2, tp=2)),
    "ep, tokens alike": recipe_of(4, 2, parallel=Parallel(ep=2, tp=2, sequence=False)),
    "pp x dp": recipe_of(4, 3, Zero(1), parallel=Parallel(pp=2), pipeline=Pipeline("1f1b")),
}


SHARDED = ("hsdp, updates divided",)
SHOWN = ("ep, tokens divided",)


def test_biases_move_as_in_one_process(pool: RankPool) -> None:
    shown, sharded = ({label: LAYOUTS[label] for label in labels} for labels in (SHOWN, SHARDED))
    cases = [Case("deepseek_v3", family("deepseek_v3"), shown), Case("ernie", ERNIE, sharded)]
    assert_equal(pool, 4, cases)


@pytest.mark.grid
@pytest.mark.parametrize(
    "model", [family("deepseek_v3"), ERNIE, family("minimax_m2"), family("glm4_moe")], ids=lambda each: each.name
)
def test_biases_of_other_families_move_as_in_one_process(pool: RankPool, model: Family) -> None:
    assert_equal(pool, 4, [Case(model.name, model, LAYOUTS)])


@pytest.mark.grid
def test_biases_follow_under_lion_and_in_fp32(pool: RankPool) -> None:
    lion = Optim(name="lion", lr=1e-3, betas=(0.9, 0.95), clip_norm=0.05)
    case = Case("deepseek_v3", family("deepseek_v3"), {"lion": recipe_of(2, optim=lion)})
    # The bias moves behind the measurement of rounding: routers that choose anew would leave nothing decided.
    found = pool.run(2, train_layouts, [case])[0][case.name, "lion"]
    assert sum(expect(case, found).undecided.values()) < 100
    assert_equal(pool, 2, [case, Case("fp32", family("deepseek_v3"), {"": recipe_of(2, 1, Zero(1), "fp32")})])


@pytest.mark.parametrize(
    "model", few_of([family("deepseek_v3"), ERNIE], lambda model: model is not ERNIE), ids=lambda each: each.name
)
def test_a_bias_survives_a_change_of_layout_and_is_exported_bit_by_bit(
    pool: RankPool, tmp_path: Path, model: Family
) -> None:
    case = Case(model.name, model, {"before": LAYOUTS["pp x dp"], "after": LAYOUTS["dp x sp, zero 2"]})
    found, expected = pool.run(4, resume, case, tmp_path / "saved")[0], expect(case)
    assert found.losses == pytest.approx(expected.losses[1:], rel=case.tolerance)
    meta = build_meta(case.config)
    biases = [each.bias for each in find_mixtures(meta, find_units(meta))]
    assert all(torch.equal(found.weights[bias], expected.weights[bias]) for bias in biases)
    # After the first step, of which the checkpoint is, each has moved by the rate or not at all.
    reader = Reader(committed_name(tmp_path / "saved", 1))
    units = UnitReader(case.recipe, meta, reader)
    write_weights(tmp_path / "export", meta, units.read_all(), torch.float32)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export").state_dict()
    for bias in biases:
        (moved,) = _read(
            reader, "weight/" if f"weight/{bias}" in reader.manifest.entries else "buffer/", [bias]
        ).values()
        assert set(moved.flatten().abs().tolist()) <= {0.0, float(torch.tensor(0.05, dtype=moved.dtype))}
        assert moved.any()
        assert torch.equal(exported[bias], moved.to(exported[bias].dtype))


# --- sabotage


def count_one_rank() -> AbstractContextManager[Any]:
    """Each rank moves by the loads of its own tokens."""
    return patch.object(mixtures, "all_reduce", lambda x, axis, label: None)


def count_one_microbatch() -> AbstractContextManager[Any]:
    """Only the last microbatch of a step counts."""
    whole = ExpertLoad.counting

    def counting(load: ExpertLoad) -> AbstractContextManager[None]:
        load.sums.zero_()
        return whole(load)

    return patch.object(ExpertLoad, "counting", counting)


def move_towards_the_load() -> AbstractContextManager[Any]:
    """The sign is wrong: the busy get busier."""
    whole = RouterBiases.update

    def update(biases: RouterBiases, sums: Tensor | None, is_finite: Tensor) -> None:
        biases._rate = -abs(biases._rate)
        whole(biases, sums, is_finite)

    return patch.object(RouterBiases, "update", update)


def run_sabotaged(
    rank: int, world: int, rendezvous: str, sabotage: Callable[[], AbstractContextManager[Any]], case: Case
) -> dict[str, list[ErrorRow]]:
    """Body: `run_cases` under a sabotage, which ends with it."""
    with sabotage():
        return run_cases(rank, world, rendezvous, [case])


@pytest.mark.grid
@pytest.mark.parametrize("sabotage", [count_one_rank, count_one_microbatch, move_towards_the_load])
def test_a_bias_that_follows_other_loads_shows(
    pool: RankPool, sabotage: Callable[[], AbstractContextManager[Any]]
) -> None:
    case = Case("", family("deepseek_v3"), {"": recipe_of(2, 3)})
    (rows,) = pool.run(2, run_sabotaged, sabotage, case)[0].values()
    assert {row.quantity: row for row in rows}["weight, step 3"].error > 1e-2


def test_a_bias_that_is_being_saved_moves_no_sooner_than_other_masters() -> None:
    """A save copies masters beside the next step, and a bias may be one: moved before that, it would be of another step."""
    recipe, config = recipe_of(1, 1), build_config(ERNIE)
    mesh = connect(topology_of(recipe, config), CPU)
    run = build(make_plan(recipe, config), mesh)
    [batch] = make_batches(config, 1, recipe.batch.sequences_per_step or 0, recipe.batch.context, seed=11)

    def read() -> list[Tensor]:
        return [entry.data.clone() for entry in saved_entries(run) if entry.name.startswith("weight/")]

    before, seen = read(), []
    run.optimizer.hold(lambda: seen.extend(read()))
    train_step(run, share(batch, recipe.batch.sequences_per_microbatch, mesh), 0, 0.1)
    assert all(map(torch.equal, seen, before))
    assert len(seen) == len(before)
    after = {entry.name: entry.data.clone() for entry in saved_entries(run)}
    assert any(name.endswith("e_score_correction_bias") and value.any() for name, value in after.items())
