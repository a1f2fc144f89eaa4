"""When units are unsharded, resharded and reduced changes nothing: not by choice, not by what a model does, not over time."""

import gc
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from framework.comm.connect import connect
from framework.plan.plan import make_plan
from framework.recipe.schema import Recipe, Zero
from framework.train.build import build
from framework.train.state import RunState, restore, saved_entries
from framework.train.step import TrainingRun, train_step
from framework.verify.compare import compare
from framework.verify.evidence import Evidence, TokenBatch, make_batches
from framework.verify.layout import gather_full, owned_weights, share
from tests.evaluation import evaluate
from tests.families import Family, build_config, family
from tests.grid import IN_TURN, few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.crossed_model import CROSSED
from tests.ranks.parity import CONTEXT, CPU, Case, assert_equal, small_recipe, topology_of, train_layouts, worst_error
from tests.ranks.pool import RankPool
from tests.ranks.spare_model import SPARE
from tests.saving import save_checkpoint

pytestmark = IN_TURN

SEQUENCES = 12
STAGE_3 = Zero(stage=3)
ACCUMULATE: tuple[Literal["sharded", "local"], ...] = ("sharded", "local")


def train(pool: RankPool, world: int, case: Case) -> dict[str, Evidence]:
    """Evidence by the label of the layout."""
    return {label: evidence for (_, label), evidence in pool.run(world, train_layouts, [case])[0].items()}


def assert_bitwise_equal(found: dict[str, Evidence]) -> None:
    (first, expected), *others = found.items()
    for label, evidence in others:
        assert (evidence.losses, evidence.norms) == (expected.losses, expected.norms), f"{label}, {first}"
        for ours, theirs in ((evidence.gradients, expected.gradients), (evidence.weights, expected.weights)):
            assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == [], f"{label}, {first}"


@pytest.mark.parametrize(
    ("depths", "stage", "world", "tied"),
    [
        ("few", 3, 2, True),
        *(pytest.param("all", *row, marks=pytest.mark.grid) for row in product((1, 2, 3), (2, 4), (True, False))),
    ],
)
def test_prefetch_and_kept_parameters_are_bitwise_equal(
    pool: RankPool, depths: str, stage: int, world: int, tied: bool
) -> None:
    ways = [
        *(Zero(stage=stage, prefetch_units=depth) for depth in ((0, 2) if depths == "few" else (0, 1, 2, 9))),
        *(
            Zero(stage=stage, prefetch_units=depth, keep_gathered=True)
            for depth in ((1,) if depths == "few" else (0, 1))
        ),
    ]
    recipe = small_recipe("fp32", world, 3, SEQUENCES, clip_norm=0.05)
    layouts = {str(zero): replace(recipe, zero=zero) for zero in ways}
    assert_bitwise_equal(train(pool, world, Case("", family("gemma2"), layouts, {"tie_word_embeddings": tied})))


@pytest.mark.parametrize(("stage", "precision"), few_of([(1, "fp32"), (3, "bf16")], lambda stage, _: stage == 3))
def test_dividing_the_update_among_replicas_is_bitwise_equal(pool: RankPool, stage: int, precision: str) -> None:
    """Of two replicas a + b is b + a. Norms are summed in another grouping, so nothing is clipped by them."""
    ways = [Zero(stage, 2), Zero(stage, 2, optimizer_within="all")]
    layouts = {str(zero): small_recipe(precision, 4, 3, SEQUENCES, None, zero) for zero in ways}
    found = train(pool, 4, Case("", family("llama"), layouts))
    norms = found[str(ways[0])].norms
    assert found[str(ways[1])].norms == pytest.approx(norms, rel=1e-6)
    assert_bitwise_equal({label: replace(evidence, norms=norms) for label, evidence in found.items()})


def crossed_layouts(precision: str, world: int, clip_norm: float | None) -> dict[str, Recipe]:
    ways = [Zero(stage=stage) for stage in (0, 1, 2)]
    ways += [Zero(stage=3, prefetch_units=depth) for depth in (0, 1, 2)]
    if world == 4:
        ways.append(Zero(stage=3, shard_within=2))
    return {str(zero): small_recipe(precision, world, 3, SEQUENCES, clip_norm, zero) for zero in ways}


@pytest.mark.parametrize(
    ("world", "stages"),
    [(3, (3,)), *(pytest.param(world, (0, 1, 2, 3), marks=pytest.mark.grid) for world in (2, 3, 4))],
)
def test_parameters_read_elsewhere_than_where_they_stand_equal_one_process(
    pool: RankPool, world: int, stages: tuple[int, ...]
) -> None:
    every = crossed_layouts("fp64", world, 0.005)
    layouts = {label: recipe for label, recipe in every.items() if recipe.zero.stage in stages}
    assert_equal(pool, world, [Case("crossed", CROSSED, layouts)])


@pytest.mark.grid
@pytest.mark.parametrize("world", [2, 3, 4])
def test_fp32_parameters_in_bf16_units_are_the_same_at_all_stages(pool: RankPool, world: int) -> None:
    """A scale of one element has a buffer of its own, of which most ranks hold nothing but padding."""
    found = train(pool, world, Case("crossed", CROSSED, crossed_layouts("bf16", world, None)))
    of_stage_0 = found.pop(str(Zero(stage=0)))
    assert of_stage_0.weights["layers.1.scale.weight"] != 0.9, "the scale was not trained"
    for label, evidence in found.items():
        assert worst_error(compare(evidence, of_stage_0)) < 1e-3, label


ENTERED = ((1, 2, 3), (None, 2), ACCUMULATE, (0, 1))


@pytest.mark.parametrize(
    "rows",
    [cover_pairs(ENTERED, lambda *row: True)[::2], pytest.param([*product(*ENTERED)], marks=pytest.mark.grid)],
    ids=["few", "all"],
)
def test_layers_that_one_of_four_ranks_enters_equal_one_process(pool: RankPool, rows: list[tuple[Any, ...]]) -> None:
    """Layer 1 runs on rank 3 alone, in the first of two microbatches; layer 3 on no rank."""
    ways = [Zero(stage, within, accumulate, prefetch_units=depth) for stage, within, accumulate, depth in rows]
    case = Case("spare", SPARE, {str(zero): small_recipe("fp64", 4, 2, 8, 0.02, zero) for zero in ways})
    opened = [int(batch.input_ids[3, 0]) for batch in case.batches()]
    assert [row for row in range(8) if int(case.batches()[0].input_ids[row, 0]) in opened] == [3]
    assert_equal(pool, 4, [replace(case, changes={"open_tokens": opened}, by_microbatch=True)])


def train_steps(run: TrainingRun, recipe: Recipe, batches: list[TokenBatch], start: int = 0) -> list[list[float]]:
    """Loss and norm of each step."""
    rows = recipe.batch.sequences_per_microbatch
    values = [
        train_step(run, share(batch, rows, run.mesh), step, recipe.optim.lr).read()
        for step, batch in enumerate(batches[start:], start)
    ]
    return [[each.loss, each.gradient_norm] for each in values]


def weights_of(run: TrainingRun) -> dict[str, Tensor]:
    return gather_full(owned_weights(run), run.mesh.axis("world"))


def states_of(run: TrainingRun) -> dict[str, Tensor]:
    """Everything that a checkpoint keeps, in full, by entry."""
    parts = {entry.name: (entry.layout, entry.data) for entry in saved_entries(run)}
    return gather_full(parts, run.mesh.axis("world"))


def train_and_save(rank: int, world: int, rendezvous: str, case: Case, root: Path) -> tuple[list[list[float]], dict]:
    """Body: train on all batches, saving after the first; losses and norms after it, and the last state."""
    (recipe,) = case.layouts.values()
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    batches = case.batches()
    train_steps(run, recipe, batches[:1])
    state = RunState("zero", "", step=1, num_updates=run.optimizer.num_updates)
    save_checkpoint(root, 1, saved_entries(run), state.to_json(), mesh.axis("world"), keep=1)
    found = train_steps(run, recipe, batches, start=1), states_of(run)
    mesh.close()
    return found


def resume_and_train(rank: int, world: int, rendezvous: str, case: Case, root: Path) -> tuple[list[list[float]], dict]:
    """Body: as if the run had ended after the first batch."""
    (recipe,) = case.layouts.values()
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh, resumes=True)
    state = restore(run, root)
    found = train_steps(run, recipe, case.batches(), start=state.step), states_of(run)
    mesh.close()
    return found


@pytest.mark.parametrize(
    ("family_of", "precision", "zero"),
    [
        pytest.param(family("gemma2"), "fp32", STAGE_3, marks=pytest.mark.grid),
        (family("mixtral"), "bf16", Zero(stage=3, shard_within=2, accumulate="local")),
        pytest.param(CROSSED, "bf16", Zero(stage=3, keep_gathered=True), marks=pytest.mark.grid),
        pytest.param(
            family("gpt2"), "bf16", Zero(stage=3, shard_within=2, optimizer_within="all"), marks=pytest.mark.grid
        ),
    ],
    ids=["gemma2", "mixtral", "crossed", "gpt2"],
)
def test_resume_at_stage_3_is_bitwise_equal(
    pool: RankPool, tmp_path: Path, family_of: Family, precision: str, zero: Zero
) -> None:
    case = Case("", family_of, {"": small_recipe(precision, 4, 1, SEQUENCES, 0.005, zero)})
    reports, states = pool.run(4, train_and_save, case, tmp_path)[0]
    reports_resumed, states_resumed = pool.run(4, resume_and_train, case, tmp_path)[0]
    assert reports_resumed == reports
    assert states_resumed.keys() == states.keys()
    assert [name for name in states if not torch.equal(states_resumed[name], states[name])] == []


@pytest.mark.parametrize(
    "zero",
    few_of(
        [STAGE_3, Zero(stage=3, shard_within=2, optimizer_within="all")], lambda zero: zero.shard_within is not None
    ),
    ids=str,
)
def test_a_checkpoint_of_stage_3_on_four_ranks_continues_at_stage_0_on_two(
    pool: RankPool, tmp_path: Path, zero: Zero
) -> None:
    saved = Case("", family("mixtral"), {"": small_recipe("fp64", 4, 1, SEQUENCES, 0.05, zero)})
    loaded = Case("", family("mixtral"), {"": small_recipe("fp64", 2, 3, SEQUENCES, 0.05)})
    reports, states = pool.run(4, train_and_save, saved, tmp_path)[0]
    reports_loaded, states_loaded = pool.run(2, resume_and_train, loaded, tmp_path)[0]
    torch.testing.assert_close(torch.tensor(reports_loaded), torch.tensor(reports), rtol=1e-9, atol=0.0)
    assert states_loaded.keys() == states.keys()
    for name in states:
        torch.testing.assert_close(states_loaded[name], states[name], rtol=1e-9, atol=1e-12)


def train_and_evaluate(rank: int, world: int, rendezvous: str, case: Case, evaluates: bool) -> tuple[list, dict]:
    """Body: train, with evaluations on other batches before, between and after the steps, or without."""
    (recipe,) = case.layouts.values()
    mesh = connect(topology_of(recipe, case.config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, case.config), mesh)
    batches, reports = case.batches(), []
    for step in range(len(batches)):
        if evaluates:
            evaluate(run, share(batches[-1], recipe.batch.sequences_per_microbatch, mesh))
        reports += train_steps(run, recipe, batches[: step + 1], start=step)
    found = reports, weights_of(run)
    mesh.close()
    return found


@pytest.mark.parametrize(
    "zero", few_of([Zero(stage=1), STAGE_3, Zero(stage=3, keep_gathered=True)], lambda zero: zero == STAGE_3), ids=str
)
def test_evaluation_between_steps_is_bitwise_equal(pool: RankPool, zero: Zero) -> None:
    case = Case("", family("gpt2"), {"": small_recipe("fp32", 2, 3, SEQUENCES, 0.05, zero)})
    plain_reports, plain_weights = pool.run(2, train_and_evaluate, case, False)[0]
    reports, weights = pool.run(2, train_and_evaluate, case, True)[0]
    assert reports == plain_reports
    assert [name for name in weights if not torch.equal(weights[name], plain_weights[name])] == []


def live_bytes() -> int:
    """Bytes of all storages that a tensor of this process keeps alive."""
    time.sleep(0.1)  # gloo's threads hold the tensors of a collective for a moment longer than its wait
    gc.collect()
    storages = {each.untyped_storage() for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def watch_memory(rank: int, world: int, rendezvous: str, recipe: Recipe, num_steps: int) -> list[int]:
    """Body: live bytes after a few steps, and after many more."""
    config = build_config(family("llama"), num_hidden_layers=2)
    mesh = connect(topology_of(recipe, config), CPU, rendezvous, rank)
    run = build(make_plan(recipe, config), mesh)
    batches = make_batches(config, 4, 4, CONTEXT, seed=3)
    live = []
    for step in range(num_steps):
        train_steps(run, recipe, batches[: step % 4 + 1], start=step % 4)
        if step in (3, num_steps - 1):
            live.append(live_bytes())
    mesh.close()
    return live


@pytest.mark.parametrize("steps", few_of([12, 500], lambda steps: steps == 12))
def test_many_steps_at_stage_3_leave_memory_flat(pool: RankPool, steps: int) -> None:
    keeping = Zero(stage=3, accumulate="local", keep_gathered=True)
    for zero, num_microbatches, num_steps in ((STAGE_3, 1, steps), (keeping, 2, min(steps, 20))):
        recipe = small_recipe("bf16", 2, num_microbatches, 4, 0.05, zero)
        for early, late in pool.run(2, watch_memory, recipe, num_steps):
            assert early == late
