"""Stages of a recipe: the recipe of each, its borders, and the table of a plan."""

import math
from dataclasses import replace

import pytest

from framework.errors import RunError
from framework.launch.identity import fixed, may_change, read_trained, values_of
from framework.optim.groups import learning_rate
from framework.recipe.check import check_recipe
from framework.recipe.compose import compose
from framework.recipe.keys import flatten, nest, value_of
from framework.recipe.problem import render_problems
from framework.recipe.schema import LearningRateSchedule, Recipe
from framework.recipe.stages import count_tokens, settle_borders, split_stages, stage_after, stage_of
from framework.track.report import RunInfo
from framework.track.summary import collect_curves, draw

WORDS = (
    "experiment=quickstart",
    "optim.schedule.final_ratio=0.1",
    "train.stages.a.until_share=0.5",
    "train.stages.b.until_tokens=400000",
    "train.stages.b.batch.context=256",
    "train.stages.b.optim.schedule.warmup_steps=3",
    "train.stages.c.batch.tokens_per_step=8192",
    "train.stages.c.optim.lr=1e-4",
)


def staged(*words: str) -> Recipe:
    return compose([*WORDS, *words]).require()


def test_a_stage_keeps_what_it_does_not_state() -> None:
    a, b, c = split_stages(staged())
    assert [(each.name, each.start, each.stop) for each in (a, b, c)] == [
        ("a", 0, 250),
        ("b", 250, 321),
        ("c", 321, 500),
    ]
    assert [each.recipe.batch.context for each in (a, b, c)] == [128, 256, 256]
    assert (c.recipe.batch.sequences_per_step, c.recipe.batch.tokens_per_step) == (None, 8192)
    assert [each.recipe.optim.lr for each in (a, b, c)] == [4e-3, 4e-3, 1e-4]
    spans = [(each.recipe.optim.schedule.start_step, each.recipe.optim.schedule.stop_step) for each in (a, b, c)]
    assert spans == [(0, 500), (250, 321), (250, 321)]
    assert [each.is_last for each in (a, b, c)] == [False, False, True]
    assert all(not each.recipe.train.stages and each.recipe.train.steps == each.stop for each in (a, b, c))
    assert count_tokens(staged()) == 250 * 1024 + 71 * 2048 + 179 * 8192


RAMP = (
    "experiment=quickstart",
    "optim.schedule.final_ratio=0.1",
    "model.config.rope_parameters={rope_type: default, rope_theta: 10000.0}",
    "train.stages.a.until_share=0.2",
    "train.stages.grow={until_step: 400, ramp: 4, batch: {context: 256, sequences_per_step: 40}}",
    "train.stages.grow.model.config.rope_parameters.rope_theta=50000.0",
    "train.stages.grow.data.sources.stdlib.weight=1.4",
    "train.stages.grow.optim.schedule.warmup_steps=2",
    "train.stages.last.optim.lr=1e-3",
)


def test_a_ramp_is_the_stages_that_it_says() -> None:
    ramped = compose(RAMP).require()
    stages = split_stages(ramped)
    assert [each.name for each in stages] == ["a", "grow_1", "grow_2", "grow_3", "grow_4", "last"]
    grown = [each.recipe for each in stages[1:5]]
    assert [(each.batch.context, each.batch.sequences_per_step) for each in grown] == [
        (160, 16),
        (192, 24),
        (224, 32),
        (256, 40),
    ]
    assert [each.model.config["rope_parameters"]["rope_theta"] for each in grown] == [2e4, 3e4, 4e4, 5e4]
    assert [each.data.sources["stdlib"].weight for each in grown] == [1.1, 1.2, 1.3, 1.4]
    # Equally many tokens in each, as far as whole steps allow; the schedule is over all of them.
    assert [each.stop for each in stages] == [100, 239, 316, 365, 400, 500]
    assert all(abs(each.num_tokens / 355_000 - 1) < 0.02 for each in stages[1:5])
    assert {(each.optim.schedule.start_step, each.optim.schedule.stop_step) for each in grown} == {(100, 400)}
    in_tokens = compose([*RAMP, "train.stages.grow.until_step=null", "train.stages.grow.until_tokens=500000"]).require()
    in_tokens = replace(in_tokens, train=replace(in_tokens.train, steps=600))
    borders = [each.stop for each in split_stages(in_tokens)]
    assert abs(sum(each.num_tokens for each in split_stages(in_tokens)[:5]) - 500_000) < 256 * 40
    settled = settle_borders(in_tokens)
    longer = replace(settled, train=replace(settled.train, steps=1000))
    assert [each.stop for each in split_stages(longer)] == [*borders[:-1], 1000]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train.stages.grow.ramp=7"], "from 8 to 40 in 7 equal steps of whole numbers -> train.stages.grow.ramp=8"),
        (["train.stages.grow.model.config.rope_scale=2.0"], "nothing says from which value it grows"),
        (["train.stages.a.ramp=2"], "changes none of the numbers that may grow"),
        (["train.stages.last={ramp: 2, batch: {context: 512}}"], "a ramp would move when the run gets longer"),
        (["train.stages.grow_2.until_step=450"], "train.stages.grow.ramp makes a stage of this name"),
        (["train.stages.grow.batch.sequences_per_step=12"], "grow_1, a part of this ramp: not a multiple"),
        (["train.stages.grow.until_step=102"], "grow_2 has no step"),
    ],
)
def test_a_ramp_that_cannot_be_is_refused(words: list[str], said: str) -> None:
    assert said in " ".join(render_problems(compose([*RAMP, *words]).problems).split())


def test_a_step_belongs_to_one_stage() -> None:
    recipe = staged()
    assert [stage_after(recipe, step).name for step in (0, 249, 250, 320, 321, 500)] == list("aabbcc")
    assert [stage_of(recipe, step).name for step in (0, 250, 251, 321, 322)] == list("aabbc")


def test_borders_stay_when_a_run_gets_longer() -> None:
    settled = settle_borders(staged())
    assert [each.until_step for each in settled.train.stages.values()] == [250, 321, None]
    longer = replace(settled, train=replace(settled.train, steps=1000))
    assert [each.stop for each in split_stages(longer)] == [250, 321, 1000]
    assert settle_borders(settled) == settled


def test_the_recipe_of_a_checkpoint_is_that_of_its_stage() -> None:
    recipe = settle_borders(staged())
    state = {"recipe": values_of(recipe), "step": 300}
    assert [value_of(read_trained(state), key) for key in ("batch.context", "optim.lr")] == [256, 4e-3]
    assert value_of(read_trained({**state, "step": 250}), "batch.context") == 128


def test_a_stage_that_would_train_at_rate_0_is_refused() -> None:
    words = [
        "experiment=quickstart",
        "optim.schedule.final_ratio=0.0",
        "train.stages={a: {until_step: 50, optim: {schedule: {warmup_steps: 5}}}, b: {}}",
    ]
    [problem] = compose(words).problems
    assert problem.key == "train.stages.b.optim.schedule"
    assert "its learning rate is 0: the schedule of a stage before has ended with step 50" in problem.message
    mended = (
        "train.stages.b.optim.schedule.warmup_steps=0",
        "optim.schedule.final_ratio=0.1",
        "train.stages.b.optim.schedule.name=constant",
    )
    for word in mended:
        schedule = split_stages(compose([*words, word]).require())[1].recipe.optim.schedule
        assert learning_rate(60, schedule, 1.0, 500) > 0


def test_names_with_dots_are_read_back_from_a_checkpoint() -> None:
    """Sources, stages and groups of the optimizer; a ramp of such a source; a plugin's optimizer, which is not imported here."""
    words = [
        "data.sources={c4.en: {path: corpus}, more: {path: more}}",
        "~data.sources.stdlib",
        "optim.groups={no.decay: {pattern: norm, weight_decay: 0.0}}",
        "train.stages={v1.0: {until_step: 100}, v1.1: {until_step: 200, ramp: 2}, v2: {}}",
        "train.stages.v2.data={sources: {c4.en: {weight: 0.5}}}",
    ]
    composed = compose(["experiment=quickstart", *words]).draft
    ramp = replace(composed.train.stages["v1.1"], data={"sources": {"c4.en": {"weight": 3.0}}})
    recipe = replace(composed, train=replace(composed.train, stages={**composed.train.stages, "v1.1": ramp}))
    assert not check_recipe(recipe, {})
    weights = [each.recipe.data.sources["c4.en"].weight for each in split_stages(recipe)]
    assert weights == [1.0, 2.0, 3.0, 0.5]
    record = fixed(values_of(recipe))
    assert flatten(nest(record)) == record
    for step, weight in ((100, 1.0), (150, 2.0), (200, 3.0), (300, 0.5)):
        trained = read_trained({"recipe": {**record, "optim.name": "my_rule"}, "step": step})
        assert list(trained.data.sources) == ["c4.en", "more"]
        assert trained.data.sources["c4.en"].weight == weight
        assert list(trained.optim.groups) == ["no.decay"]
        assert trained.optim.name == "my_rule"
    with pytest.raises(RunError, match=r"step 9 records cannot be read:(.|\n)*data.sorces"):
        read_trained({"recipe": {**record, "data.sorces": 1}, "step": 9})
    assert may_change("train.stages.v1.0.memory.compile")
    assert not may_change("train.stages.v1.0.data.sources.memory.weight")


def test_a_border_that_is_typed_takes_the_place_of_one_in_a_file() -> None:
    [_, b, _] = split_stages(
        compose(["experiment=nanochat_d20", "train.stages.conversations.until_share=0.99"]).require()
    )
    assert b.stop == round(0.99 * 22600)


def test_shapes_of_a_decay() -> None:
    def rates(shape: str) -> list[float]:
        schedule = LearningRateSchedule("wsd", decay_steps=4, decay_shape=shape, final_ratio=0.25)  # type: ignore[arg-type]
        return [learning_rate(step, schedule, 1.0, 10) for step in (0, 6, 7, 8, 10, 20)]

    assert rates("linear") == pytest.approx([1, 1, 0.8125, 0.625, 0.25, 0.25])
    assert rates("exponential") == pytest.approx([1, 1, 0.25**0.25, 0.5, 0.25, 0.25])
    assert rates("sqrt") == pytest.approx([1, 1, 0.25 + 0.75 / 2, 0.25 + 0.75 * (1 - math.sqrt(0.5)), 0.25, 0.25])
    assert rates("cosine")[3] == pytest.approx(0.625)


def test_a_schedule_has_bounds_of_its_own() -> None:
    schedule = LearningRateSchedule("linear", warmup_steps=1, final_ratio=0.0, start_step=10, stop_step=15)
    assert [learning_rate(step, schedule, 1.0, 99) for step in (3, 10, 11, 13, 15, 50)] == [0.5, 0.5, 1, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optim.schedule.decay_shape=sqrt", "only wsd has a decay of its own"),
        ("optim.schedule.stop_step=10", "the warm-up is longer than the schedule, of 10 steps"),
        ("optim.schedule.start_step=600", "ends with step 500, before it begins"),
        ("train.stages.b.optim.schedule.warmup_steps=100", "within train.stages.b"),
        ("train.stages.b.parallel.tp=2", "-> state parallel.tp outside of train.stages"),
        ("train.stages.b.batch.contxt=64", "did you mean train.stages.b.batch.context?"),
        ("train.stages.b.data.sources.web.weight=2", "-> train.stages.b.data.sources.web.path=..."),
    ],
)
def test_bad_input(word: str, said: str) -> None:
    assert said in " ".join(render_problems(compose([*WORDS, word]).problems).split())


@pytest.mark.grid
def test_a_plan_has_a_line_for_each_stage(capsys: pytest.CaptureFixture[str]) -> None:
    from framework.commands.plan import print_plan

    words = ["train.stages.b.batch.context=2048", "train.stages.b.until_tokens=2000000", "cluster=h100_ib"]
    assert print_plan(staged(*words, "batch.sequences_per_microbatch=1")) == 0
    head, a, b, c, whole, *rest = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["stage", "steps", "tokens", "sequences"]
    assert a.split()[:5] == ["a", "1", "to", "250", "256,000"]
    assert [line.split()[0] for line in (b, c, whole)] == ["b", "c", "all"]
    assert "stage b:" in rest


@pytest.mark.grid
@pytest.mark.parametrize("experiment", ["speedrun_gpt2", "nanochat_d20"])
def test_recipes_of_records_are_planned(capsys: pytest.CaptureFixture[str], experiment: str) -> None:
    from framework.commands.plan import print_plan

    assert print_plan(compose([f"experiment={experiment}", "cluster=h100_ib"]).require()) == 0
    assert ("assistant" in capsys.readouterr().out) == (experiment == "nanochat_d20")


def test_a_report_marks_borders() -> None:
    record = dict.fromkeys(("tokens", "loss", "lr", "gradient_norm", "step_s", "tokens_per_s", "data_wait_s"), 1.0)
    record |= {"exposed_communication_s": 0.0, "memory_bytes": 0, "mfu": None, "validation_loss": None}
    curves = collect_curves({**record, "step": step} for step in range(1, 9))
    plain, marked = (draw(RunInfo("x", {}, 8, stages=stages), curves) for stages in ({}, {"a": 0, "b": 4}))
    assert plain != marked
