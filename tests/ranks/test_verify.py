"""`meshwright verify`: it passes sound layouts, catches wrong ones, and tells a user's mistakes from its own faults."""

import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from framework.errors import EXIT_DONE, EXIT_FAILED, ModelError, RecipeError, TopologyError
from framework.model.loss import IGNORE
from framework.recipe.compose import compose
from framework.recipe.derive import derive
from framework.recipe.keys import list_keys
from framework.recipe.schema import Recipe
from framework.verify import command, oracle, sides
from framework.verify.compare import ErrorRow, compare, exceeds, judge, render
from framework.verify.evidence import Evidence, NothingToCompare, make_batches
from framework.verify.layout import choose_rank_device
from framework.verify.plain_optimizers import Noise, PlainLion, measure_noise
from framework.verify.pool import RankFailed
from framework.verify.pool import RankPool as AnyRankPool
from framework.verify.prepare import MAX_CONTEXT, VerifyOptions, prepare, shrink_recipe
from framework.verify.sides import NO_PART_OF_A_STEP, NOT_RUN, Sides, find_changes, find_config_changes
from tests.families import build_config, family
from tests.ranks.pool import RankPool

NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight")


def recipe_of(*overrides: str) -> Recipe:
    return compose(overrides).require()


def shrunk(recipe: Recipe, dtype: Any = None, ranks: int | None = None, experts: int = 0) -> tuple[Recipe, str]:
    """The small recipe, and what is left out as one text."""
    small, reasons = shrink_recipe(
        recipe, NAMES, positions=256, options=VerifyOptions(dtype=dtype, ranks=ranks), experts=experts
    )
    return small, "\n".join(map(str, find_changes(recipe, small, reasons)))


# --- the small recipe


def test_the_small_recipe_has_no_more_ranks_of_ulysses_than_heads() -> None:
    recipe = recipe_of(
        "parallel.cp=8",
        "parallel.context=ulysses",
        "parallel.tp=2",
        "launch.ranks=16",
        "model.config.num_attention_heads=16",
    )
    small, reasons = shrink_recipe(recipe, NAMES, positions=256, options=VerifyOptions(), heads=8)
    assert small.parallel.context == [4, 2]
    told = "\n".join(map(str, find_changes(recipe, small, reasons)))
    assert "parallel.context" in told
    assert "the small model has fewer heads" in told
    assert (
        shrink_recipe(recipe, NAMES, positions=256, options=VerifyOptions(), heads=16)[0].parallel.context == "ulysses"
    )


def test_the_small_recipe_keeps_what_is_verified() -> None:
    recipe = recipe_of("zero=stage_2", "optim=lion", "memory=full_checkpointing", "launch.ranks=2", "optim.lr=0.01")
    small, _ = shrunk(recipe)
    assert (small.zero, small.memory.activation_checkpointing) == (recipe.zero, "full")
    assert replace(small.optim, schedule=recipe.optim.schedule) == recipe.optim
    assert small.optim.schedule.name == recipe.optim.schedule.name
    assert (small.precision.compute, small.precision.master, small.precision.reduce) == ("fp32",) * 3
    assert small.batch.context == MAX_CONTEXT


@pytest.mark.parametrize(
    ("ranks", "asked", "expected"), [(1, None, 1), (3, None, 3), (64, None, 4), (64, 6, 6), (2, 1, 1)]
)
def test_ranks_are_few_unless_asked_for(ranks: int, asked: int | None, expected: int) -> None:
    recipe = recipe_of(
        f"launch.ranks={ranks}", f"batch.sequences_per_step={24 * ranks}", "batch.sequences_per_microbatch=8"
    )
    small, _ = shrunk(recipe, ranks=asked)
    assert small.launch.ranks == expected
    assert small.batch.sequences_per_step == expected * 2 * 3


def test_hsdp_keeps_both_axes() -> None:
    small, notes = shrunk(recipe_of("zero=hsdp", "launch.ranks=32", "batch.sequences_per_step=256"))
    assert (small.launch.ranks, small.zero.shard_within) == (4, 2)
    assert "2 replicas" in notes


def test_ranks_that_do_not_fit_the_layout_are_refused() -> None:
    recipe = recipe_of("launch.ranks=4")
    wide = replace(recipe, parallel=replace(recipe.parallel, tp=2))
    with pytest.raises(TopologyError, match="use a multiple of 2"):
        shrunk(wide, ranks=3)


@pytest.mark.parametrize(
    ("layout", "experts", "expected"),
    [  # (dp, ep, ranks): ep as it is, fewer for few ranks, for few experts, still shared by ranks if it was
        ({"ranks": 16, "ep": 4}, 8, (4, 4, 4)),
        ({"ranks": 64, "ep": 8}, 8, (4, 2, 4)),
        ({"ranks": 8, "ep": 8}, 8, (4, 4, 4)),
        ({"ranks": 64, "ep": 64}, 5, (4, 1, 4)),
        ({"ranks": 12, "ep": 6}, 3, (3, 3, 3)),
        ({"ranks": 64, "ep": 64, "tp": 4}, 8, (1, 4, 4)),
        ({"ranks": 64, "ep": 16, "tp": 4, "expert_tp": 4}, 8, (2, 2, 8)),
        ({"ranks": 64, "ep": 8, "pp": 8}, 6, (2, 2, 16)),
    ],
)
def test_fewer_ranks_divide_experts_where_they_can(
    layout: dict[str, int], experts: int, expected: tuple[int, int, int]
) -> None:
    ranks = layout.pop("ranks")
    recipe = recipe_of(
        f"launch.ranks={ranks}", "batch.sequences_per_step=1536", *(f"parallel.{key}={layout[key]}" for key in layout)
    )
    small, notes = shrunk(recipe, experts=experts)
    assert (derive(small).dp, small.parallel.ep, small.launch.ranks) == expected
    assert ("parallel.ep" in notes) == (small.parallel.ep != recipe.parallel.ep)
    assert derive(small).expert_tp == derive(recipe).expert_tp


def test_asked_ranks_divide_the_experts_or_are_refused() -> None:
    recipe = recipe_of("launch.ranks=8", "parallel.ep=8", "batch.sequences_per_step=64")
    assert shrunk(recipe, ranks=2, experts=8)[0].parallel.ep == 2
    with pytest.raises(TopologyError, match=r"--ranks 3 does not fit .* with ep = 8"):
        shrunk(recipe, ranks=3, experts=8)


def test_patterns_without_a_small_parameter_are_left_out_and_named() -> None:
    recipe = recipe_of("model.freeze=[embed,layers.77]", "+optim.groups.deep={pattern: layers.70}")
    small, notes = shrunk(recipe)
    assert small.model.freeze == ["embed"]
    assert small.optim.groups == {}
    assert "layers.77" in notes
    assert "layers.70" in notes


ADAPTER = ("adapter=lora", "adapter.dropout=0.1", "adapter.weights=somewhere")


def test_what_an_adapter_draws_or_reads_is_left_out_and_told() -> None:
    small, told = shrunk(recipe_of(*ADAPTER))
    assert (small.adapter.kind, small.adapter.dropout, small.adapter.weights) == ("lora", 0.0, None)
    assert "adapter.dropout 0.1 -> 0.0: drawn per microbatch" in told
    assert "adapter.weights somewhere -> nothing: not read" in told


def test_few_steps_see_all_of_a_schedule() -> None:
    states = ("warmup_steps=200", "start_step=100", "stop_step=900", "decay_steps=90", "decay_shape=sqrt")
    small, told = shrunk(recipe_of("optim/schedule=wsd", *(f"++optim.schedule.{each}" for each in states)))
    schedule = small.optim.schedule
    assert (schedule.start_step, schedule.warmup_steps, schedule.decay_steps, schedule.stop_step) == (1, 1, 1, 3)
    assert schedule.decay_shape == "sqrt"
    assert "optim.schedule.stop_step 900 -> 3: few steps see all of the schedule" in told


def test_fp64_needs_no_larger_eps() -> None:
    recipe = recipe_of("optim.lr=0.01")
    assert shrunk(recipe, "fp64")[0].optim.eps == recipe.optim.eps
    assert shrunk(recipe)[0].optim.eps > recipe.optim.eps


# --- the comparison


def evidence(**changes: object) -> Evidence:
    sound = Evidence((2.0, 1.0), (0.5, 0.4), {"a": torch.ones(3), "b": torch.zeros(2)}, {"a": torch.ones(3)})
    return replace(sound, **changes)  # type: ignore[arg-type]


def errors(found: Evidence, expected: Evidence) -> dict[str, float]:
    return {row.quantity: row.error for row in compare(found, expected)}


def test_equal_evidence_has_no_error() -> None:
    assert set(errors(evidence(), evidence()).values()) == {0.0}


def test_each_difference_is_seen_where_it_is() -> None:
    assert errors(evidence(losses=(2.0, 1.1)), evidence())["loss"] == pytest.approx(0.1)
    assert errors(evidence(norms=(0.5, 0.5)), evidence())["gradient norm"] == pytest.approx(0.25)
    worse = {"a": torch.tensor([1.0, 1.0, 1.5]), "b": torch.zeros(2)}
    (row,) = (row for row in compare(evidence(gradients=worse), evidence()) if row.quantity == "gradient, step 1")
    assert (row.error, row.where) == (pytest.approx(0.5), "a")


@pytest.mark.parametrize(
    "broken",
    [
        {"gradients": {"a": torch.ones(3)}},
        {"weights": {"a": torch.tensor([1.0, float("nan"), 1.0])}},
        {"losses": (2.0,)},
        {"norms": (0.5, float("nan"))},
    ],
    ids=["a gradient missing", "a weight not finite", "a step missing", "a norm not finite"],
)
def test_what_is_missing_or_not_finite_is_an_infinite_error(broken: dict[str, object]) -> None:
    assert max(errors(evidence(**broken), evidence()).values()) == float("inf")


def test_noise_where_the_truth_is_zero_is_no_error() -> None:
    noisy = evidence(gradients={"a": torch.ones(3), "b": torch.full((2,), 1e-9)})
    assert errors(noisy, evidence())["gradient, step 1"] < 1e-5


def test_the_table_says_which_row_is_too_far() -> None:
    table = render([ErrorRow("loss", 1e-7, "step 1"), ErrorRow("gradient norm", 1e-3, "step 2")], 1e-5)
    assert [line.split()[-1] for line in table.splitlines()[1:]] == ["yes", "NO"]


# --- the command


def test_a_sound_layout_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of("launch.ranks=2", "zero=stage_1")
    assert command.verify(recipe, VerifyOptions(dtype="fp64", steps=2)) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "equal: this layout trains as one process does" in printed
    assert "dp 2" in printed


def test_a_mismatch_is_a_fault_to_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle is made to start from other weights than the layout. Any model config will do."""
    honest = sides.initial_weights
    monkeypatch.setattr(sides, "initial_weights", lambda config, seed, *rest: honest(config, seed + 1, *rest))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(family("qwen3").config))
    assert command.verify(recipe_of(), VerifyOptions(file, steps=1)) == EXIT_FAILED
    printed = capsys.readouterr().out
    assert printed.count("quantity") == 2, "in fp32, and again in fp64"
    assert "MISMATCH" in printed
    assert "please open an issue" in printed
    assert "qwen3" in printed


def test_mistakes_are_explained_before_any_rank_starts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--steps 0"):
        command.verify(recipe_of(), VerifyOptions(steps=0))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="model_type"):
        command.verify(recipe_of(), VerifyOptions(tmp_path / "config.json", steps=1))


def test_a_model_that_stock_cannot_train_is_no_mismatch() -> None:
    recipe, _ = shrunk(recipe_of())
    with pytest.raises(NothingToCompare, match=r"stock transformers .* does not train the gpt2 in fp32"):
        Sides(recipe, build_config(family("gpt2"), n_positions=4), 1).run_oracle(None)


def test_a_fault_of_the_oracle_is_not_told_as_one_of_stock_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("ours")

    recipe, _ = shrunk(recipe_of())
    run = partial(Sides(recipe, build_config(family("llama")), 1).run_oracle, None)
    for place in ("_widen", "PlainMixtures", "_stock_optimizer"):
        with monkeypatch.context() as broken:
            broken.setattr(oracle, place, fail)
            with pytest.raises(RuntimeError, match=r"^ours$"):
                run()


def test_an_error_of_a_rank_arrives_as_it_was_raised(pool: RankPool) -> None:
    recipe, _ = shrunk(recipe_of("launch.ranks=2", "optim.name=lion"))
    nothing_left = replace(recipe, model=replace(recipe.model, freeze=["."]))
    with pytest.raises(RecipeError, match="leaves no parameter"):
        Sides(nothing_left, build_config(family("llama")), 1, pool).run()


def refuse_beside_a_crash(rank: int, *_: object) -> None:
    """Body: a user's mistake on rank 0, a fault on the others."""
    raise ModelError("refused") if rank == 0 else ValueError("a bug")


def test_an_error_of_one_rank_does_not_hide_a_crash_of_another(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "run_rank", refuse_beside_a_crash)
    recipe, _ = shrunk(recipe_of("launch.ranks=2", "optim.name=lion"))
    with pytest.raises(RankFailed, match=r"(?s)refused.*a bug"):
        Sides(recipe, build_config(family("llama")), 1, pool).run()


def test_ranks_that_do_not_start_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    class DyingPool(AnyRankPool):
        ended: ClassVar[list[str]] = []

        def start(self, *_: object) -> None:
            raise RankFailed("a rank died while it was starting")

        def drop(self) -> None:
            self.ended.append("drop")

        def close(self) -> None:
            self.ended.append("close")

    monkeypatch.setattr(sides, "RankPool", DyingPool)
    recipe, _ = shrunk(recipe_of())
    for given in (None, DyingPool(1, "math")):
        with pytest.raises(RankFailed, match="while it was starting"):
            Sides(recipe, build_config(family("llama")), 1, given).run()
    assert DyingPool.ended == ["close", "drop"]


@pytest.mark.grid
def test_a_rank_that_fails_tells_where(pool: RankPool) -> None:
    """Lion's oracle waits for the ranks, so that theirs is the first error; but stock transformers fails here, too."""
    recipe, _ = shrunk(recipe_of("launch.ranks=2", "optim.name=lion"))
    both = Sides(recipe, build_config(family("gpt2"), n_positions=4), 1, pool)
    with both._running_ranks() as ranks, pytest.raises(RankFailed, match="in train_step"):
        both._collect(ranks)
    with pytest.raises(NothingToCompare, match="does not train the gpt2"):
        both.run()


# --- rounding and faults


@pytest.mark.grid
def test_a_mismatch_in_fp32_that_is_rounding_is_told_from_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tolerance below fp32's rounding stands for a model that rounds badly."""
    monkeypatch.setitem(command.TOLERANCES, "fp32", 1e-9)
    assert command.verify(recipe_of("launch.ranks=2"), VerifyOptions(steps=1)) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "NO" in printed
    assert "in fp64" in printed
    assert "The fp32 difference is rounding" in printed


@pytest.mark.grid
def test_a_fault_in_fp32_alone_is_a_mismatch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Sides.run

    def run(each: Sides) -> tuple[Evidence, Evidence]:
        found, expected = whole(each)
        spoilt = {name: gradient * 1.001 for name, gradient in found.gradients.items()}
        return (replace(found, gradients=spoilt) if each.dtype == "fp32" else found), expected

    monkeypatch.setattr(Sides, "run", run)
    assert command.verify(recipe_of(), VerifyOptions(steps=1)) == EXIT_FAILED
    assert "a fault in fp32 alone" in capsys.readouterr().out


def test_a_sign_that_rounding_decides_is_taken_from_the_layout_where_it_is_legal() -> None:
    """Elements: decided, undecided and other than the layout's, undecided beside an illegal weight."""
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0, 1.0]))
    weight.grad = torch.tensor([0.5, 1e-9, 1e-9])
    lion = PlainLion([{"params": [weight], "weight_decay": 0.0}], {"lr": 0.1, "betas": (0.9, 0.99)})
    layout = torch.tensor([1.1, 1.1, 1.5])
    lion.follow({weight: Noise(1e-8, torch.ones(3, dtype=torch.bool))}, {weight: layout})
    assert weight.tolist() == pytest.approx([0.9, 1.1, 0.9])
    assert lion.state[weight]["undecided"].tolist() == [False, True, True]


def test_a_gradient_of_exactly_zero_is_decided_unless_its_row_is_alive() -> None:
    """ErrorRow 0 is zero however it is rounded. In row 1 the middle is zero by chance."""
    gradient = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 1e-9]])
    noise = measure_noise(gradient, [gradient + gradient.sign() * 1e-9], torch.float32)
    assert noise.is_live.expand(2, 3).tolist() == [[False] * 3, [True] * 3]


def test_one_process_that_does_not_stay_finite_bounds_nothing() -> None:
    """Else its limits would be infinite, and whatever a layout does within them."""
    spoilt = evidence(weights={"a": torch.tensor([torch.nan, 1.0, 1.0])})
    for references, truth in (([evidence(), spoilt], evidence()), ([spoilt], spoilt)):
        with pytest.raises(ModelError, match=r"bf16 does not stay finite \(weight, step 2, a\)"):
            judge(spoilt, references, truth, "bf16")
    (*_, row) = judge(spoilt, [evidence()], evidence(), "bf16")
    assert exceeds([row], 0.0)


# --- what is left out


def test_every_changed_key_is_told() -> None:
    """Whatever key of the recipe a verification changes, the user reads of it: found by comparison, not by a list."""
    recipe = recipe_of("memory.compile=always", "precision=bf16", "launch.ranks=2", "optim.betas=[0.8,0.9]")
    small, told = shrunk(recipe)
    assert "memory.compile always -> never" in told
    assert "precision.compute bf16 -> fp32" in told
    forgotten = replace(small, optim=replace(small.optim, betas=(0.1, 0.2)), zero=replace(small.zero, prefetch_units=7))
    changed = {change.key for change in find_changes(recipe, forgotten, {})}
    assert {"optim.betas", "zero.prefetch_units"} <= changed


def test_every_key_is_compared_or_named_as_no_part_of_a_step() -> None:
    """A key that the schema gets tomorrow is compared unless somebody says here that no step reads it."""
    ignored = {key.path for key in list_keys() if re.fullmatch(NO_PART_OF_A_STEP, key.path)}
    compared = {key.path for key in list_keys()} - ignored
    mixed = {"train", "model", "pipeline", "data"}
    assert {path.partition(".")[0] for path in ignored} - mixed == {
        "eval", "checkpoint", "track", "launch", "cluster", "run",
    }  # fmt: skip
    assert {path.partition(".")[0] for path in compared} - mixed == {
        "batch", "adapter", "loss", "parallel", "zero", "memory", "precision", "optim", "plugins",
    }  # fmt: skip
    of_train = {path.split(".")[1] for path in compared if path.startswith("train.")}
    assert of_train == {"seed", "z_loss", "router_z_loss", "ema", "stages"}
    assert {path for path in ignored if path.startswith(("model.", "pipeline."))} == {
        "model.tokenizer", "model.revision", "pipeline.fill_bubbles",
    }  # fmt: skip
    told = set(re.findall(r"\w+\.[\w*]+", "; ".join(NOT_RUN)))
    untold = {path for path in ignored if not told & {path, f"{path.partition('.')[0]}.*"}}
    assert untold == {"train.steps", "train.epochs"}, "named as all but N steps"


STAGES = (
    "train.stages={a:{until_step:100,optim:{clip_norm:0.001,betas:[0.5,0.5]},batch:{context:64}},"
    "b:{until_step:200,batch:{context:128}},c:{optim:{lr:1.0}}}"
)


def test_each_stage_of_which_a_step_differs_is_verified(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []
    monkeypatch.setattr(command, "run", lambda prepared: ran.append(prepared.sides.recipe) or EXIT_DONE)
    assert command.verify(recipe_of("launch.ranks=1", STAGES), VerifyOptions()) == EXIT_DONE
    assert [(each.optim.clip_norm, each.optim.lr) for each in ran] == [(0.001, ran[0].optim.lr), (0.001, 1.0)]
    told = capsys.readouterr().out
    assert "stage         a, b, from seeded weights" in told
    assert told.count("equal") == 1


def test_a_stage_that_differs_from_one_process_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run", lambda prepared: int(prepared.sides.recipe.optim.lr == 1.0))
    assert command.verify(recipe_of("launch.ranks=1", STAGES), VerifyOptions()) == EXIT_FAILED


def test_dropout_that_is_off_is_told() -> None:
    original = build_config(family("gpt2"), resid_pdrop=0.1)
    (change,) = find_config_changes(original, build_config(family("gpt2")))
    assert str(change) == "model.config.resid_pdrop 0.1 -> 0.0: drawn per microbatch"


# --- packed documents


def test_documents_restart_their_positions_and_predict_nothing_across_a_border() -> None:
    (batch,) = make_batches(build_config(family("llama")), 1, 4, 40, seed=1, packs_documents=True)
    assert batch.position_ids is not None
    begins = batch.position_ids == 0
    assert begins[:, 0].all()
    assert 4 * 40 // 10 < int(begins.sum()) < 4 * 40 // 2, "documents of several tokens each"
    steps = batch.position_ids.diff(dim=1)
    assert ((steps == 1) | begins[:, 1:]).all()
    assert (batch.labels[:, :-1][begins[:, 1:]] == IGNORE).all()
    assert (batch.labels != IGNORE).any()


@pytest.mark.grid
def test_packed_documents_are_verified_as_such(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, told = shrunk(recipe_of("launch.ranks=2", "parallel.tp=2", "data.pack=documents"), "fp64")
    assert "data.pack" not in told
    config = build_config(family("qwen3"), use_cache=False)  # with one stock ignores positions
    packed = Sides(recipe, config, 1, pool)
    assert not exceeds(compare(*packed.run()), 1e-9)
    whole = sides.make_run_batches
    monkeypatch.setattr(  # the oracle's
        sides, "make_run_batches", lambda *args: [replace(batch, position_ids=None) for batch in whole(*args)]
    )
    assert exceeds(compare(*packed.run()), 1e-3)


def test_documents_that_a_model_mixes_up_are_refused() -> None:
    mixes = ("model.family=gpt_oss", "model.attention=eager", "data.pack=documents")
    with pytest.raises(RecipeError, match="documents that share a row see one another"):
        command.verify(recipe_of("~model", "data.bpe_vocab=512", *mixes), VerifyOptions())


# --- strict


TINY = (
    "model.config.hidden_size=32", "model.config.intermediate_size=40", "model.config.num_hidden_layers=2",
    "model.config.vocab_size=97", "batch.context=9", "batch.sequences_per_step=6", "batch.sequences_per_microbatch=3",
)  # fmt: skip


def test_strict_verifies_the_recipe_in_its_own_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of(*TINY, "launch.ranks=2", "precision=fp64", "optim.lr=1e-4")
    plan = prepare(recipe, VerifyOptions(strict=True))
    kept = replace(plan.sides.recipe, launch=recipe.launch)
    assert (kept, plan.changes) == (recipe, [])
    assert command.verify(recipe, VerifyOptions(strict=True, steps=1)) == EXIT_DONE
    assert "6 sequences of 9 tokens" in capsys.readouterr().out


def test_strict_refuses_with_everything_that_it_would_leave_out() -> None:
    recipe = recipe_of(
        "model=gpt2", "zero=hsdp", "launch.ranks=64", "batch.sequences_per_step=512", "zero.shard_within=node"
    )
    with pytest.raises(RecipeError, match=r"(?s)resid_pdrop 0.1.*zero.shard_within node.*floating-point.*64 ranks"):
        command.verify(recipe, VerifyOptions(strict=True))
    with pytest.raises(RecipeError, match=r"--dtype, --ranks would change it"):
        command.verify(recipe, VerifyOptions(strict=True, dtype="fp64", ranks=2))


def test_strict_refuses_what_an_adapter_draws_or_reads() -> None:
    with pytest.raises(RecipeError, match=r"(?s)adapter.weights somewhere.*adapter.dropout 0.1 -> 0.0"):
        prepare(recipe_of(*TINY, *ADAPTER), VerifyOptions(strict=True))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_routers_that_draw_lots_among_equal_scores_are_refused_where_scores_are_equal(dtype: str) -> None:
    """phimoe's do, and have a gradient only there: with tp=2 in bf16 a router's was 2.4 times the largest of one process."""
    recipe = recipe_of("~model", "data.bpe_vocab=512", "model.family=phimoe", f"precision={dtype}")
    for options in (VerifyOptions(strict=True), VerifyOptions(dtype=dtype)):
        with pytest.raises(RecipeError, match=rf"precision.compute={dtype}: PhimoeTopKRouter draws lots .* in fp32"):
            prepare(recipe, options)
    prepare(recipe, VerifyOptions(dtype="fp32"))


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match="--device cuda: torch sees no GPU here"):
        command.verify(recipe_of(), VerifyOptions(device="cuda"))


@pytest.mark.parametrize(("gpus", "backends"), [(4, ["nccl"] * 4), (2, ["gloo"] * 4), (1, ["gloo"] * 4)])
def test_ranks_share_gpus_over_gloo(monkeypatch: pytest.MonkeyPatch, gpus: int, backends: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    chosen = [choose_rank_device("cuda", rank, 4) for rank in range(4)]
    assert [backend for _, backend in chosen] == backends
    assert [device.index for device, _ in chosen] == [rank % gpus for rank in range(4)]


# --- bf16


def test_a_layout_in_bf16_is_within_the_measured_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        command.verify(recipe_of("launch.ranks=2", "zero=stage_1"), VerifyOptions(dtype="bf16", steps=1)) == EXIT_DONE
    )
    assert "beside one process in fp32" in capsys.readouterr().out
