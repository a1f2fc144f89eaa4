"""Every pipeline is the training run of stock Hugging Face and torch in one process, whatever its schedule, cut and ZeRO stage.

The product of meshes, schedules, virtual stages, ZeRO stages, microbatches, models and ties is too large: of any two of them
every pair of values is there, and in the grid with more families and stages on a rank.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch
from weakref import finalize

import pytest
import torch
from torch import Tensor

from framework.comm.connect import connect
from framework.comm.p2p import start_receive, start_send
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Topology
from framework.model.borders import Value
from framework.parallel.pipeline.execute import ActivationSpec, StageLinks
from framework.parallel.pipeline.lower import lower
from framework.parallel.pipeline.pipeline import UNITS_FILE, encode_unit_times
from framework.parallel.pipeline.schedules import make_schedule
from framework.parallel.pipeline.simulate import Action, ActionKind, Timed, needs, unit_costs
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Model, Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.stage import RankStage
from framework.train.step import train_step
from framework.verify.compare import compare
from framework.verify.evidence import Evidence
from framework.verify.layout import share
from tests.evaluation import evaluate
from tests.families import family
from tests.grid import few_of
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, Case, assert_equal, small_recipe, topology_of, train_layouts, worst_error
from tests.ranks.pool import RankPool

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v")
# Divides into 1, 2, 4 or 7 microbatches, and into 1, 2 or 7 on each of two data-parallel ranks.
SEQUENCES = 28
NUM_LAYERS = 8


def recipe_of(
    pp: int,
    schedule: str,
    count: int,
    precision: str = "fp32",
    dp: int = 1,
    zero: Zero | None = None,
    tp: int = 1,
    virtual: int | None = None,
    **changes: Any,
) -> Recipe:
    parallel = Parallel(pp=pp, tp=tp, sequence=False)
    recipe = small_recipe(precision, pp * dp * tp, count, SEQUENCES, 0.05, zero or Zero(stage=0), parallel)
    pipeline = Pipeline(schedule=schedule, virtual_stages=virtual)  # type: ignore[arg-type]
    return replace(recipe, pipeline=pipeline, **changes)


def case_of(name: str, layouts: dict[str, Recipe], num_layers: int = 4, **changes: Any) -> Case:
    key = {"gpt2": "n_layer"}.get(name, "num_hidden_layers")
    if name == "gemma2":
        changes |= {"layer_types": (["sliding_attention", "full_attention"] * num_layers)[:num_layers]}
    return Case(f"{name} {changes}", family(name), layouts, {key: num_layers, **changes})


# Ranks of a pipeline, data-parallel and tensor-parallel ones; schedules with their stages on each rank; ZeRO; microbatches.
MESHES = ((2, 2, 1), (2, 1, 2), (3, 1, 1), (4, 1, 1))
FORMS = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb_h1", 1), ("zbv", 2), ("dualpipe_v", 2))
MORE_FORMS = (*FORMS, ("interleaved", 3), ("interleaved", 4))
ZEROS = (Zero(0), Zero(1), Zero(2), Zero(3), Zero(3, None, "local", keep_gathered=True))
COUNTS = (1, 2, 4, 7)
NAMES = ("llama", "gpt2", "qwen3_moe")
MORE_NAMES = (*NAMES, "gemma2", "granite")


def can_run(mesh: tuple[int, int, int], form: tuple[str, int], *others: Any) -> bool:
    """There are layers for all stages, sequences for all microbatches, and dualpipe_v has those that it needs."""
    (pp, dp, _), (schedule, virtual), (_, count, *_) = mesh, form, others
    has_enough = schedule != "dualpipe_v" or count >= 2 * pp
    return pp * virtual <= NUM_LAYERS and SEQUENCES % (count * dp) == 0 and has_enough


def cases_of(rows: Iterable[tuple[Any, ...]], precision: str) -> list[Case]:
    """Of rows (mesh, form, zero, microbatches, name, tied): a case for each model, with its layouts."""
    layouts: dict[tuple[str, bool], dict[str, Recipe]] = {}
    for (pp, dp, tp), (schedule, virtual), zero, count, name, tied in rows:
        recipe = recipe_of(pp, schedule, count, precision, dp, zero, tp, virtual)
        label = f"pp {pp} dp {dp} tp {tp}, {virtual} {schedule}, {zero}, {count} microbatches"
        layouts.setdefault((name, tied), {})[label] = recipe
    return [case_of(name, each, NUM_LAYERS, tie_word_embeddings=tied) for (name, tied), each in layouts.items()]


@pytest.mark.grid
def test_any_two_of_mesh_schedule_zero_microbatches_model_and_tie_equal_one_process(pool: RankPool) -> None:
    rows = cover_pairs((MESHES, FORMS, ZEROS, COUNTS, NAMES, (True, False)), can_run)
    rows.append(((4, 1, 1), ("dualpipe_v", 2), Zero(2), 14, "llama", True))
    assert_equal(pool, 4, cases_of(rows, "fp64"))


@pytest.mark.grid
def test_any_two_with_more_stages_and_families_equal_one_process(pool: RankPool) -> None:
    rows = cover_pairs((MESHES, MORE_FORMS, ZEROS, COUNTS, MORE_NAMES, (True, False)), can_run)
    assert_equal(pool, 4, cases_of(rows, "fp64"))


UNEVEN = ("gemma2", "granite", "qwen3_moe", "opt", "bloom", "falcon", "deepseek_v3")


@pytest.mark.parametrize("name", few_of(UNEVEN, lambda name: name == "qwen3_moe"))
def test_families_in_two_and_three_uneven_stages_equal_one_process(pool: RankPool, name: str) -> None:
    """Scaled and summed embeddings, sliding masks, routers, layers that return tuples, parallel blocks."""
    layouts = {
        "1f1b on 3": recipe_of(3, "1f1b", 2, zero=Zero(stage=1)),
        "zb_h1 on 2": recipe_of(2, "zb_h1", 4, zero=Zero(stage=3)),
    }
    changes: dict[str, Any] = {} if name in ("bloom", "falcon") else {"num_hidden_layers": 5}
    if name == "gemma2":
        changes["layer_types"] = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    assert_equal(pool, 3, [Case(name, family(name), layouts, changes)])


def train(pool: RankPool, case: Case, world: int) -> dict[str, Evidence]:
    return {label: evidence for (_, label), evidence in pool.run(world, train_layouts, [case])[0].items()}


@pytest.mark.parametrize(
    ("name", "pp", "count", "zero"),
    few_of([("llama", 2, 7, 0), ("gpt2", 3, 4, 3), ("qwen3_moe", 4, 2, 2)], lambda name, *_: name == "llama"),
)
def test_gpipe_and_1f1b_are_bitwise_equal(pool: RankPool, name: str, pp: int, count: int, zero: int) -> None:
    layouts = {schedule: recipe_of(pp, schedule, count, zero=Zero(stage=zero)) for schedule in ("gpipe", "1f1b")}
    found = train(pool, case_of(name, layouts, tie_word_embeddings=True), pp)
    one, other = found["gpipe"], found["1f1b"]
    assert (one.losses, one.norms) == (other.losses, other.norms)
    for parameter, weight in one.weights.items():
        assert torch.equal(weight, other.weights[parameter])
        assert torch.equal(one.gradients[parameter], other.gradients[parameter])


def test_dropout_recomputation_and_freezing_do_not_know_of_stages(pool: RankPool) -> None:
    """Masks are drawn for a layer and a microbatch, wherever the model is cut; a first stage may have nothing to train."""
    dropout = {"resid_pdrop": 0.3, "attn_pdrop": 0.2, "embd_pdrop": 0.1}
    recomputes = Memory(activation_checkpointing="full", compile="never")
    layouts = {
        "one stage": recipe_of(1, "1f1b", 4),
        "two": recipe_of(2, "1f1b", 4),
        "three, split backward, recomputed": recipe_of(3, "zb_h1", 4, memory=recomputes),
        "in a V": recipe_of(2, "zbv", 4, zero=Zero(stage=2)),
    }
    found = train(pool, case_of("gpt2", layouts, **dropout), 3)
    assert worst_error(compare(found["two"], found["one stage"])) < 1e-5
    assert worst_error(compare(found["three, split backward, recomputed"], found["one stage"])) < 1e-5
    assert worst_error(compare(found["in a V"], found["one stage"])) < 1e-5
    without = train(pool, case_of("gpt2", {"one stage": layouts["one stage"]}), 1)
    assert worst_error(compare(found["one stage"], without["one stage"])) > 1e-2
    frozen = Model(freeze=["embed_tokens", r"layers\.[01]\."])
    layouts = {schedule: recipe_of(2, schedule, 4, model=frozen) for schedule in ("1f1b", "zb_h1")}
    assert_equal(pool, 2, [case_of("llama", layouts)])


def test_what_is_needed_first_does_not_wait_for_what_comes_later(pool: RankPool) -> None:
    """Two receives that are started side by side: the second is sent only when the first has been taken."""
    first, second = pool.run(2, take_one_by_one)[0]
    assert (first, second) == (0.0, 1.0)


def take_one_by_one(rank: int, world: int, rendezvous: str) -> tuple[float, ...]:
    """Body: rank 1 sends the gradients of two microbatches, the second behind rank 0's word that it has the first."""
    mesh = connect(Topology(pp=world), CPU, rendezvous, rank, timeout_s=20)
    axis, word = mesh.axis("pp"), torch.zeros(1)
    lowered = lower(make_schedule("gpipe", world, 2), unit_costs(world))
    hidden = Value(((1, (0, 0)),), (0, 1), (3,), torch.float32)
    spec = ActivationSpec(TokenLayout(1, 2, axis.axis), [(), (hidden,)], 0, torch.float32, CPU)
    links = StageLinks(axis, lowered, spec)
    taken = []
    if rank == 0:
        receives = [Action(0, ActionKind.RECEIVE_GRADIENT, microbatch) for microbatch in range(2)]
        links.start(receives, {})
        for receive in receives:
            (gradient,) = links.take(receive)
            taken.append(gradient.mean().item())
            start_send(word, axis, 1).wait()
    else:
        for microbatch in range(2):
            send = Action(1, ActionKind.SEND_GRADIENT, microbatch)
            links.start([send], {send: (torch.full((1, 2, 3), float(microbatch)),)})
            start_receive(word, axis, 0).wait()
    links.finish()
    mesh.close()
    return tuple(taken)


@dataclass(frozen=True)
class Observed:
    """Of one rank: what it did when, its most live microbatches, the loss of a validation over all its sequences."""

    timed: tuple[Timed, ...]
    peak_live: int
    validation: float


@contextmanager
def counting_live_microbatches() -> Iterator[list[int]]:
    """The most microbatches at once of which anything is kept for backward."""
    kept: dict[int, int] = {}
    peak = [0]
    forward = RankStage.forward

    class Kept:
        """Alive as long as autograd keeps the tensor."""

        def __init__(self, tensor: Tensor, microbatch: int):
            self.tensor = tensor
            kept[microbatch] = kept.get(microbatch, 0) + 1
            peak[0] = max(peak[0], sum(count > 0 for count in kept.values()))
            finalize(self, lambda: kept.__setitem__(microbatch, kept[microbatch] - 1))

    def watched(stage: RankStage, microbatch: int, received: Tensor | None) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: Kept(x, microbatch), lambda each: each.tensor):
            return forward(stage, microbatch, received)

    with patch.object(RankStage, "forward", watched):
        yield peak


def observe(rank: int, world: int, rendezvous: str, case: Case) -> dict[str, Observed]:
    """Body: two steps of each layout; the second is observed."""
    found = {}
    for number, (label, recipe) in enumerate(case.layouts.items()):
        mesh = connect(topology_of(recipe, case.config), CPU, f"{rendezvous}-{number}", rank)
        run = build(make_plan(recipe, case.config), mesh)
        microbatches = share(case.batches()[0], recipe.batch.sequences_per_microbatch, mesh)
        before = evaluate(run, microbatches)
        train_step(run, microbatches, 0, 0.0)
        with counting_live_microbatches() as peak:
            result = train_step(run, microbatches, 1, 0.0)
        assert before == pytest.approx(result.read().loss, rel=1e-5), label
        found[label] = Observed(result.timed, peak[0], evaluate(run, microbatches[:3]))
        mesh.close()
    return found


# dualpipe_v needs twice as many microbatches.
@pytest.mark.parametrize(
    "schedules",
    [("gpipe", "1f1b"), pytest.param(SCHEDULES[:-1], marks=pytest.mark.grid)],
    ids=["few", "more"],
)
def test_ranks_do_what_was_simulated_and_keep_no_more_microbatches(pool: RankPool, schedules: Sequence[str]) -> None:
    """Order of each rank, every action after what it needs; 1F1B keeps min(P - rank, M) microbatches, not M; validation gives
    the same loss on all ranks, and with nothing learnt the training's."""
    layouts = {schedule: recipe_of(4, schedule, 7) for schedule in schedules}
    by_rank = pool.run(4, observe, case_of("llama", layouts, num_layers=8))
    for label, recipe in layouts.items():
        virtual = 2 if label in ("interleaved", "zbv") else 1
        schedule = make_schedule(recipe.pipeline.schedule, 4, 7, virtual)
        ends: dict[Action, Timed] = {each.action: each for of_rank in by_rank for each in of_rank[label].timed}
        for rank, of_rank in enumerate(by_rank):
            assert tuple(each.action for each in of_rank[label].timed) == schedule.actions[rank], label
            for each in of_rank[label].timed:
                needed = needs(schedule, each.action)
                assert needed is None or ends[needed].end <= each.start, (label, str(each.action))
        assert len({of_rank[label].validation for of_rank in by_rank}) == 1
    assert [of_rank["1f1b"].peak_live for of_rank in by_rank] == [4, 3, 2, 1]
    assert [of_rank["gpipe"].peak_live for of_rank in by_rank] == [7, 7, 7, 7]


@pytest.mark.parametrize(
    ("name", "schedule", "split"),
    [("llama", "1f1b", [1, 3]), pytest.param("deepseek_v3", "zbv", [1, 1, 1, 1], marks=pytest.mark.grid)],
)
def test_stages_split_by_measured_times_equal_one_process(pool: RankPool, tmp_path, name, schedule, split) -> None:
    """Times that no FLOPs would tell: the first layer is as slow as all others together."""
    recipe = recipe_of(2, schedule, 4, "fp64")
    recipe = replace(recipe, pipeline=replace(recipe.pipeline, layers=str(tmp_path)))
    case = case_of(name, {"measured": recipe})
    plan = make_plan(replace(recipe, pipeline=Pipeline()), case.config)
    units = {unit.name: (3.0, 6.0) if unit.name == "layers.0" else (1.0, 2.0) for unit in plan.units}
    (tmp_path / UNITS_FILE).write_bytes(encode_unit_times(plan.config.model_type, plan.size.total, units))
    assert [each.stop - each.start for each in make_plan(recipe, case.config).pipeline.stages] == split
    assert_equal(pool, 2, [case])
