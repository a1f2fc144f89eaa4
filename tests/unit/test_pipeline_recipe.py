"""The keys of `pipeline`: what contradicts itself is said before anything runs, with the key and a way out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from framework.errors import ModelError, RecipeError, ScheduleError
from framework.model.flops import unit_flops
from framework.model.load import build_meta, load_config
from framework.model.probe import find_layer_calls
from framework.model.units import find_units
from framework.parallel.pipeline.pipeline import PipelinePlan, plan_pipeline
from framework.parallel.pipeline.simulate import Costs, simulate
from framework.plan.plan import make_plan
from framework.plan.plan_text import save_schedule
from framework.recipe.compose import compose
from framework.recipe.files import search_path

PIPELINE = ("parallel.pp=2", "launch.ranks=2", "batch.sequences_per_step=8", "batch.sequences_per_microbatch=1")


def problems_of(*overrides: str) -> dict[str, str]:
    return {each.key: f"{each.message} | {each.fix}" for each in compose([*PIPELINE, *overrides]).problems}


def pipeline_of(*overrides: str) -> PipelinePlan:
    recipe = compose([*PIPELINE, *overrides]).require()
    return make_plan(recipe, load_config(recipe.model)).pipeline


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (["pipeline.virtual_stages=2"], "pipeline.virtual_stages", "schedule=1f1b has 1 on each rank"),
        (["pipeline.schedule=zbv", "pipeline.virtual_stages=1"], "pipeline.virtual_stages", "zbv has 2 on each rank"),
        (
            ["pipeline.schedule=interleaved", "pipeline.virtual_stages=1"],
            "pipeline.virtual_stages",
            "has 2 or more on each rank",
        ),
        (["pipeline.layers=[3]"], "pipeline.layers", "for each of pp * virtual_stages = 2 * 1 stages"),
        (["pipeline.layers=[4,0]"], "pipeline.layers", "at least 1"),
        (["pipeline.table=a.csv", "pipeline.schedule=zbv"], "pipeline.schedule", "a.csv is a schedule as well"),
        (
            ["pipeline.schedule=dualpipe_v", "batch.sequences_per_step=3"],
            "pipeline.schedule",
            "needs 4 microbatches in a step, and there are 3 | batch.sequences_per_step=4 or more",
        ),
        (["pipeline.schedule=1f1"], "pipeline.schedule", "1f1b"),
        (["pipeline.fill_bubbles=validation", "parallel.pp=1"], "pipeline.fill_bubbles", "no bubbles with parallel.pp=1"),
        (
            ["pipeline.fill_bubbles=validation", "train.validate_every_steps=null"],
            "pipeline.fill_bubbles",
            "there is no validation",
        ),
    ],
)  # fmt: skip
def test_a_contradiction_is_named_with_its_key_and_a_way_out(overrides: list[str], key: str, words: str) -> None:
    problems = problems_of(*overrides)
    assert problems.keys() == {key}
    assert words in problems[key]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"])
def test_every_schedule_is_chosen_by_its_name_alone(schedule: str) -> None:
    pipeline = pipeline_of(f"pipeline.schedule={schedule}")
    assert len(pipeline.stages) == (2 if schedule in ("gpipe", "1f1b", "zb_h1") else 4)


def test_more_stages_than_layers_and_a_wrong_sum_of_layers_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"makes 32 stages, and the model has \d+ layers"):
        pipeline_of("parallel.pp=32", "launch.ranks=32")
    with pytest.raises(RecipeError, match=r"pipeline.layers=\[1, 100\] makes 2 stages of 101 layers"):
        pipeline_of("pipeline.layers=[1,100]")


def test_layers_can_be_given() -> None:
    pipeline = pipeline_of("model.config.num_hidden_layers=5", "pipeline.layers=[4,1]")
    assert [(each.start, each.stop) for each in pipeline.stages] == [(0, 4), (4, 5)]


def test_a_table_is_a_schedule_and_a_missing_or_waiting_one_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    with pytest.raises(ScheduleError, match=r"pipeline.table=.*mine.csv cannot be read"):
        pipeline_of(f"pipeline.table={table}")
    table.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert len(pipeline_of(f"pipeline.table={table}", "batch.sequences_per_step=2").stages) == 2
    table.write_text("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n")
    with pytest.raises(ScheduleError, match=r"(?s)deadlocks: rank 0 waits before 0B0 for 1B0 of rank 1.*>>>"):
        pipeline_of(f"pipeline.table={table}", "batch.sequences_per_step=2")


def test_layers_are_those_of_the_stages_of_a_table(tmp_path: Path) -> None:
    """Two on each rank, which no other key says: the launcher writes their layers where pipeline.layers names a run."""
    table = [f"pipeline.table={tmp_path}/mine.csv", "model.config.num_hidden_layers=6"]
    save_schedule(tmp_path / "mine.csv", pipeline_of("pipeline.schedule=zbv"), 8, "llama, pp=2")
    assert [each.stop for each in pipeline_of(*table, "pipeline.layers=[1,2,2,1]").stages] == [1, 3, 5, 6]
    with pytest.raises(RecipeError, match=r"pipeline.layers=\[3, 3\] makes 2 stages of 6 layers; .* in 4 stages"):
        pipeline_of(*table, "pipeline.layers=[3,3]")
    assert "at least 1" in problems_of(*table, "pipeline.layers=[1,2,3,0]")["pipeline.layers"]


def test_a_planned_schedule_is_written_as_a_table_that_is_read_again_and_as_a_picture(tmp_path: Path) -> None:
    pipeline = pipeline_of("pipeline.schedule=zbv")
    save_schedule(tmp_path / "mine.csv", pipeline, 8, "llama, pp=2")
    again = pipeline_of(f"pipeline.table={tmp_path}/mine.csv")
    assert again.make(8).actions == pipeline.make(8).actions
    assert again.stages == pipeline.stages
    save_schedule(tmp_path / "mine.svg", pipeline, 8, "llama, pp=2")
    assert (tmp_path / "mine.svg").read_text().startswith("<?xml")
    with pytest.raises(RecipeError, match=r"--schedule-to .*mine.txt: end the name in .csv for a table, in .svg"):
        save_schedule(tmp_path / "mine.txt", pipeline, 8, "llama, pp=2")
    with pytest.raises(RecipeError, match=r"there is no folder .*missing"):
        save_schedule(tmp_path / "missing" / "mine.csv", pipeline, 8, "llama, pp=2")


def test_a_family_whose_model_mixes_what_lies_on_both_sides_of_a_cut_is_refused_by_name() -> None:
    from transformers import AutoConfig

    with pytest.raises(ModelError, match="xlm models cannot be cut into pipeline stages: its layers hand on more"):
        find_layer_calls(AutoConfig.for_model("xlm"))


@pytest.mark.parametrize(("family", "outputs"), [("llama4_text", 0), ("mamba", 0), ("bamba", 2)])
def test_a_family_that_asks_other_stages_for_what_their_modules_are_can_be_cut(family: str, outputs: int) -> None:
    """llama4 sends token ids to the device of its embedding, mamba casts to its head's dtype, bamba unpacks two outputs."""
    from transformers import AutoConfig

    assert find_layer_calls(AutoConfig.for_model(family)).num_outputs == outputs


def test_a_family_that_does_not_run_on_token_ids_alone_is_refused_by_name() -> None:
    """roberta counts its positions from tokens that are no padding; without a padding id its forward fails."""
    from transformers import AutoConfig

    with pytest.raises(ModelError, match=r"roberta models cannot be cut .*: it does not run on token ids alone"):
        find_layer_calls(AutoConfig.for_model("roberta", pad_token_id=None))


def step_time(pipeline: PipelinePlan, costs: list[float]) -> float:
    return simulate(pipeline.make(8), Costs(costs, costs, costs)).length


def test_a_large_vocabulary_on_few_layers_is_cut_by_cost() -> None:
    """The slowest stage is at least 15 % faster than by an even count of layers."""
    overrides = ("model=llama3_2_1b", "model.config.num_hidden_layers=12", "parallel.pp=4", "launch.ranks=4")
    by_cost = pipeline_of(*overrides)
    evenly = pipeline_of(*overrides, "pipeline.layers=[3,3,3,3]")
    assert max(by_cost.costs.forward) <= 0.85 * max(evenly.costs.forward)
    assert step_time(by_cost, [*by_cost.costs.forward]) < step_time(evenly, [*evenly.costs.forward])


@pytest.mark.grid
def test_no_shipped_model_is_cut_worse_than_evenly() -> None:
    models = sorted(file.stem for root in search_path() for file in (root / "model").glob("*.yaml"))
    assert len(models) > 10
    for model in models:
        recipe = compose([*PIPELINE, f"model={model}"]).require()
        whole = build_meta(load_config(recipe.model))
        costs = unit_flops(whole, find_units(whole), recipe.batch.context)
        num_layers = len(costs) - 2
        for pp in (each for each in (2, 4, 8) if each <= num_layers):
            evenly = replace(recipe.pipeline, layers=[len(part) for part in np.array_split(range(num_layers), pp)])
            found, even = (
                max(plan_pipeline(settings, pp, 8, costs, recipe.zero).costs.forward)
                for settings in (recipe.pipeline, evenly)
            )
            assert found <= even * (1 + 1e-12), model
