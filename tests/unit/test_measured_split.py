"""Stages are split by measured times as well as any split could be; whose times they are is checked."""

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, count, pairwise
from math import comb
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from framework.errors import RecipeError
from framework.launch.settle import settle
from framework.model.load import load_config
from framework.model.stage import StageBounds, split_stages
from framework.model.units import Unit
from framework.parallel.pipeline.draw import describe_pipeline
from framework.parallel.pipeline.pipeline import (
    MOST,
    PipelinePlan,
    UnitTimes,
    encode_unit_times,
    fastest_split,
    plan_pipeline,
)
from framework.parallel.pipeline.simulate import Action, ActionKind, Timed, simulate
from framework.plan.cluster import ClusterRates
from framework.plan.plan import make_plan
from framework.plan.plan_text import describe_run
from framework.plan.time import TimeModel
from framework.recipe.compose import compose
from framework.recipe.schema import Pipeline, Recipe, Zero
from framework.train.profiler import UnitClock
from tests.grid import IN_TURN

pytestmark = IN_TURN

# Seconds of (forward, backward) by kind of unit: where they differ as FLOPs do not say.
HYBRID = {"attention": (1.0, 2.2), "recurrent": (1.9, 5.0)}  # a recurrence in torch, with as many FLOPs as attention
MIXTURE = {"dense": (0.8, 1.6), "experts": (2.1, 3.7)}  # deepseek_v3's first layers are dense
ENDS = {"embedding": (0.1, 0.3), "head": (1.3, 1.9)}


def times_of(kinds: Sequence[tuple[float, float]], rng: random.Random) -> UnitTimes:
    """Of layers of these kinds, as measured: with some noise."""
    units = (
        {"embedding": ENDS["embedding"]}
        | {f"layers.{n}": each for n, each in enumerate(kinds)}
        | {"head": ENDS["head"]}
    )
    noisy = {name: [seconds * rng.uniform(0.97, 1.03) for seconds in each] for name, each in units.items()}
    return UnitTimes("runs/x", *({name: each[place] for name, each in noisy.items()} for place in (0, 1)))


def kinds_of(form: str, num_layers: int) -> list[tuple[float, float]]:
    if form == "hybrid":
        return [HYBRID["attention" if number % 4 == 3 else "recurrent"] for number in range(num_layers)]
    return [MIXTURE["dense" if number < 3 else "experts"] for number in range(num_layers)]


def plan_of(times: UnitTimes, schedule: str, pp: int, virtual: int, count: int) -> PipelinePlan:
    settings = Pipeline(schedule=schedule, virtual_stages=virtual, layers="runs/x")  # type: ignore[arg-type]
    flops = dict.fromkeys(times.forward, 1.0)
    return plan_pipeline(settings, pp, count, flops, Zero(), times)


def bubble_of(pipeline: PipelinePlan, times: UnitTimes, counts: Sequence[int], num_microbatches: int) -> float:
    return simulate(pipeline.make(num_microbatches), times.of_stages(split_stages(counts))).bubble


@pytest.mark.parametrize("form", ["hybrid", "dense first"])
@pytest.mark.parametrize(
    ("schedule", "pp", "virtual", "count", "num_layers"),
    [
        ("gpipe", 3, 1, 6, 11),
        ("1f1b", 4, 1, 8, 12),
        ("1f1b", 2, 1, 37, 9),  # more microbatches than are simulated
        ("interleaved", 2, 2, 6, 10),
        ("zb_h1", 4, 1, 8, 12),
        ("zbv", 3, 2, 6, 11),
        ("dualpipe_v", 2, 2, 6, 10),
    ],
)
def test_the_bubble_is_within_a_twentieth_of_the_best_split(form, schedule, pp, virtual, count, num_layers):
    times = times_of(kinds_of(form, num_layers), random.Random(num_layers))
    pipeline = plan_of(times, schedule, pp, virtual, count)
    found = [each.stop - each.start for each in pipeline.stages]
    num_stages = pp * virtual
    edges = combinations(range(1, num_layers), num_stages - 1)
    every = [[stop - start for start, stop in pairwise((0, *cuts, num_layers))] for cuts in edges]
    assert len(every) == comb(num_layers - 1, num_stages - 1)
    assert len(every) < MOST
    best = min(bubble_of(pipeline, times, each, count) for each in every)
    assert bubble_of(pipeline, times, found, count) <= 1.05 * best
    by_flops = plan_pipeline(
        Pipeline(schedule=schedule, virtual_stages=virtual), pp, count, dict.fromkeys(times.forward, 1.0), Zero()
    )
    stated = bubble_of(pipeline, times, [each.stop - each.start for each in by_flops.stages], count)
    assert bubble_of(pipeline, times, found, count) <= stated
    assert pipeline.costs == times.of_stages(pipeline.stages)
    assert f"layers {found} take" in pipeline.gain


@pytest.mark.parametrize(("schedule", "pp", "virtual"), [("1f1b", 6, 1), ("zbv", 3, 2)])
def test_of_more_splits_than_are_tried_the_best_is_found_as_well(schedule, pp, virtual):
    """A fifth of them, of 14 layers in six stages."""
    times = times_of(kinds_of("hybrid", 14), random.Random(3))
    pipeline = plan_of(times, schedule, pp, virtual, 6)
    edges = combinations(range(1, 14), 5)
    every = [tuple(stop - start for start, stop in pairwise((0, *cuts, 14))) for cuts in edges]
    lengths = {each: simulate(pipeline.make(6), times.of_stages(split_stages(each))).length for each in every}
    found = fastest_split([(3, 3, 2, 2, 2, 2)], lengths.__getitem__, most=len(every) // 5)
    assert lengths[found] <= 1.01 * min(lengths.values())


def test_a_measured_split_gains_where_flops_do_not_tell():
    """A hybrid's layers have equal FLOPs here, and times that differ twofold."""
    times = times_of([HYBRID["recurrent"]] * 4 + [HYBRID["attention"]] * 4, random.Random(1))
    pipeline = plan_of(times, "1f1b", 2, 1, 8)
    assert [each.stop - each.start for each in pipeline.stages] == [3, 5]
    assert bubble_of(pipeline, times, [3, 5], 8) < 0.8 * bubble_of(pipeline, times, [4, 4], 8)


def test_a_stage_takes_its_backward_too_in_what_plan_prints():
    """Frozen layers cost a forward alone."""
    pipeline = plan_of(times_of([(1.0, 0.0)] * 4 + [(1.0, 2.0)] * 4, random.Random(1)), "1f1b", 2, 1, 8)
    lines = describe_pipeline(pipeline, 8).splitlines()
    shares = [int(line.split("%")[0].split()[-1]) for line in lines if " + " in line]
    costs = pipeline.costs
    own = [sum(each) for each in zip(costs.forward, costs.input, costs.weight, strict=True)]
    assert shares == [round(100 * each / max(own)) for each in own]
    assert shares != [round(100 * each / max(costs.forward)) for each in costs.forward]


# --- the file

PIPELINE = (
    *("parallel.pp=2", "launch.ranks=2", "batch.sequences_per_step=8", "batch.sequences_per_microbatch=1"),
    "model.config.num_hidden_layers=6",
)


def recipe_of(path: Path, *overrides: str) -> Recipe:
    return compose([*PIPELINE, f"pipeline.layers={path}", *overrides]).require()


def write_times(path: Path, recipe: Recipe) -> None:
    """Times of the recipe's model, of which the first two layers are three times as slow as the others."""
    plan = make_plan(replace(recipe, pipeline=Pipeline()), load_config(recipe.model))
    layers = [unit.name for unit in plan.units if unit.is_layer]
    units = {unit.name: (1.0, 2.0) for unit in plan.units} | dict.fromkeys(layers[:2], (3.0, 6.0))
    path.write_bytes(encode_unit_times(plan.config.model_type, plan.size.total, units))


def test_the_launcher_settles_the_split_and_plan_shows_the_gain(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path, "launch.device=cpu", "precision.compute=fp32")
    write_times(tmp_path / "units.json", recipe)
    plan = make_plan(recipe, load_config(recipe.model))
    assert [each.stop - each.start for each in plan.pipeline.stages] == [2, 4]
    forms, _ = TimeModel(plan.shape, plan.recipe, ClusterRates.from_recipe(plan.recipe)).stages(plan.candidate)
    assert [sum(count for _, count in each.layers) for each in forms] == [2, 4]
    line = next(line for line in describe_run(plan) if line.startswith("pipeline "))
    assert re.search(
        r"by measured times; layers \[2, 4\] take .* s a step by the times of .*, and \[4, 2\], the split by FL", line
    )
    settled = settle(recipe)
    assert settled.pipeline.layers == [2, 4]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "timed-001").symlink_to(tmp_path)
    by_id = replace(recipe, pipeline=replace(recipe.pipeline, layers="timed-001"))
    assert make_plan(by_id, load_config(recipe.model)).pipeline.stages == plan.pipeline.stages
    (tmp_path / "units.json").unlink()
    assert make_plan(settled, load_config(recipe.model)).pipeline.stages == plan.pipeline.stages


def test_the_times_of_another_model_and_files_of_something_else_are_refused_with_the_key(tmp_path):
    file = tmp_path / "units.json"
    recipe = recipe_of(tmp_path)
    with pytest.raises(RecipeError, match=r"pipeline.layers=.*units.json cannot be read.*track.timeline_step=5"):
        make_plan(recipe, load_config(recipe.model))
    write_times(file, recipe)
    other = recipe_of(tmp_path, "model.config.num_hidden_layers=7")
    with pytest.raises(
        RecipeError, match=r"another model, llama with .* in 8 units; this one is llama .* in 9: .*null"
    ):
        make_plan(other, load_config(other.model))
    for text in ("[]", "{", '{"model": "llama"}', file.read_text().replace("1.0", '"quick"')):
        file.write_text(text)
        with pytest.raises(RecipeError, match="no file of unit times"):
            make_plan(recipe, load_config(recipe.model))
    write_times(file, recipe)
    sound = file.read_text()
    for text in (sound.replace("1.0", "-1.0"), sound.replace("1.0", "0.0").replace("3.0", "0.0")):
        file.write_text(text)
        with pytest.raises(RecipeError, match="no pairs of seconds"):
            make_plan(recipe, load_config(recipe.model))


def test_a_word_without_a_pipeline_and_a_list_of_another_length_keep_their_meaning():
    assert recipe_of(Path("runs/x"), "parallel.pp=1", "launch.ranks=1").pipeline.layers == "runs/x"
    (problem,) = compose([*PIPELINE, "pipeline.layers=[6]"]).problems
    assert "for each of pp * virtual_stages = 2 * 1 stages" in problem.message
    (problem,) = compose([*PIPELINE, "pipeline.layers=6"]).problems
    assert problem.key == "pipeline.layers"


# --- the times of a step


class Ticks(nn.Module):
    """Two layers between an embedding and a head without a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layers = nn.Embedding(5, 3), nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().sum()


@pytest.mark.parametrize("bounds", [StageBounds(0, 1, 0, 2), StageBounds(0, 2, 0, 2)])
# By microbatch: dualpipe_v has both kinds of backwards.
@pytest.mark.parametrize("splits", [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("freezes", [False, True])
def test_ends_have_what_layers_leave_of_their_stage(bounds, splits, freezes):
    """A clock that goes on by one with every look: a layer takes 1 forward, and 2 back, as the one below begins before it has
    ended, or the action ends behind it; its stage takes 10 and 30. Above a frozen embedding no gradient comes out of layers."""
    model, ticks = Ticks(), count()
    model.embedding.requires_grad_(not freezes)
    units = [
        Unit("embedding", ("embedding",), ("embedding.weight",)),
        *(Unit(f"layers.{n}", (f"layers.{n}",), (f"layers.{n}.weight",)) for n in range(2)),
        Unit("head", (), ()),
    ]
    run = SimpleNamespace(
        stages={0: SimpleNamespace(model=SimpleNamespace(model=model, bounds=bounds))},
        mesh=SimpleNamespace(device=torch.device("cpu")),
    )
    clock = UnitClock(run, units, 4, lambda: float(next(ticks)))
    for step in (3, 4, 5, 3, 4):  # a rewind trains the measured step again
        now = clock.begin_step(step)
        for _ in range(2):
            model(torch.tensor([1, 2])).backward()
            now()
        with torch.no_grad():  # a validation in a bubble
            model(torch.tensor([1, 2]))
    whole, halves = {ActionKind.BACKWARD: 30.0}, {ActionKind.INPUT: 20.0, ActionKind.WEIGHT: 10.0}
    kinds = [{ActionKind.FORWARD: 10.0} | (halves if each else whole) for each in splits]
    timed = [Timed(Action(0, kind, m), 0.0, seconds) for m in range(2) for kind, seconds in kinds[m].items()]
    back = 2.0 + sum(splits) / 2  # layers have a share of the weights' gradients
    layers = {f"layers.{n}": (1.0, back) for n in range(2)}
    rest = 30.0 - 2 * back
    if bounds.is_last:
        assert clock.measure(timed) == {"embedding": (1.0, 0.0), **layers, "head": (7.0, rest)}
    else:
        assert clock.measure(timed) == {"embedding": (8.0, rest), **layers}
    clock.begin_step(5)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
