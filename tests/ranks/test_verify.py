"""`meshwright verify`: it passes sound layouts, catches wrong ones, and tells a user's mistakes from its own faults."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from framework.errors import EXIT_DONE, EXIT_FAILED, ModelError, RecipeError, TopologyError
from framework.recipe.compose import compose
from framework.recipe.schema import Recipe
from framework.verify import command, sides
from framework.verify.compare import Row, compare, render
from framework.verify.evidence import Evidence
from framework.verify.left_out import find_changes
from framework.verify.options import Options
from framework.verify.rank import RankFailed, running_ranks
from framework.verify.small import MAX_CONTEXT, shrink_recipe
from tests.families import build_config, family

NAMES = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight")


def recipe_of(*overrides: str) -> Recipe:
    return compose(overrides).require()


def shrunk(recipe: Recipe, dtype: Any = None, ranks: int | None = None) -> tuple[Recipe, str]:
    """The small recipe, and what is left out as one text."""
    small = shrink_recipe(recipe, NAMES, positions=256, options=Options(dtype=dtype, ranks=ranks))
    return small.recipe, "\n".join(map(str, find_changes(recipe, small.recipe, small.reasons)))


# --- the small recipe


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


def test_patterns_without_a_small_parameter_are_left_out_and_named() -> None:
    recipe = recipe_of("model.freeze=[embed,layers.77]", "+optim.groups.deep={pattern: layers.70}")
    small, notes = shrunk(recipe)
    assert small.model.freeze == ["embed"]
    assert small.optim.groups == {}
    assert "layers.77" in notes
    assert "layers.70" in notes


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
    table = render([Row("loss", 1e-7, "step 1"), Row("gradient norm", 1e-3, "step 2")], 1e-5)
    assert [line.split()[-1] for line in table.splitlines()[1:]] == ["yes", "NO"]


# --- the command


def test_a_sound_layout_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = recipe_of("launch.ranks=2", "zero=stage_1")
    assert command.verify(recipe, Options(dtype="fp64", steps=2)) == EXIT_DONE
    printed = capsys.readouterr().out
    assert "equal: this layout trains as one process does" in printed
    assert "dp 2" in printed


def test_a_mismatch_is_a_fault_to_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle is made to start from other weights than the layout. Any model config will do."""
    honest = sides.initial_weights
    monkeypatch.setattr(sides, "initial_weights", lambda config, seed: honest(config, seed + 1))
    file = tmp_path / "config.json"
    file.write_text(json.dumps(family("qwen3").config))
    assert command.verify(recipe_of(), Options(file, steps=1)) == EXIT_FAILED
    printed = capsys.readouterr().out
    assert printed.count("quantity") == 2, "in fp32, and again in fp64"
    assert "MISMATCH" in printed
    assert "please open an issue" in printed
    assert "qwen3" in printed


def test_mistakes_are_explained_before_any_rank_starts(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="--steps 0"):
        command.verify(recipe_of(), Options(steps=0))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="model_type"):
        command.verify(recipe_of(), Options(tmp_path / "config.json", steps=1))


def test_a_model_that_stock_cannot_train_is_no_mismatch(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(family("xglm").config))
    with pytest.raises(ModelError, match="there is nothing to compare with"):
        command.verify(recipe_of(), Options(file, dtype="fp64", steps=1))


def test_an_error_of_a_rank_arrives_as_it_was_raised(tmp_path: Path) -> None:
    recipe, _ = shrunk(recipe_of("launch.ranks=2"))
    nothing_left = replace(recipe, model=replace(recipe.model, freeze=["."]))
    config = build_config(family("llama"))
    with (
        running_ranks(nothing_left, config, 1, tmp_path) as ranks,
        pytest.raises(RecipeError, match="leaves no parameter"),
    ):
        ranks.wait()


def test_a_rank_that_fails_tells_where(tmp_path: Path) -> None:
    recipe, _ = shrunk(recipe_of("launch.ranks=2"))
    config = build_config(family("gpt2"), n_positions=4)
    with running_ranks(recipe, config, 1, tmp_path) as ranks, pytest.raises(RankFailed, match="in train_step"):
        ranks.wait()
