"""Saved recipes: what is read is what was written, whatever the texts in it look like."""

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework.errors import RecipeError
from framework.recipe.compose import compose, load_recipe, resolve, save_recipe
from framework.recipe.convert import read_base
from framework.recipe.schema import Data, Model, Optim, ParameterGroup, Recipe, Run, Source

TEXT = st.text(max_size=12) | st.sampled_from(
    ["1e-3", "3", "0x1f", "007", "12:30:45", "yes", "null", "~", "true", "1_000", ".nan", "", " ", "- a", "a: b", "#", "@x",
     "${train.steps}", "\\${x}", "\\\\${x}", "${", "a\nb", "2001-01-01", "{a}", "[1]", "%", "\u2028", "\x85", "größe 数据", "?",
     "!t"]
)  # fmt: skip
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
FINITE = st.floats(0, 1e30, allow_nan=False)
RECIPES = st.builds(
    lambda config, path, weight, pattern, freeze, name, betas: replace(
        Recipe(),
        model=Model(config=config, freeze=freeze),
        data=Data(sources={name: Source(path, weight)}),
        optim=Optim(lr=weight, betas=betas, groups={name: ParameterGroup(pattern)}),
        run=Run(id=path),
    ),
    st.dictionaries(TEXT, PLAIN, max_size=3), TEXT, FINITE, TEXT, st.lists(TEXT, max_size=3), TEXT,
    st.tuples(st.floats(0, 1), st.floats(0, 1)),
)  # fmt: skip


@given(RECIPES)
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_saved_recipe_loads_equal(tmp_path, recipe):
    path = tmp_path / "recipe.yaml"
    save_recipe(recipe, path)
    assert load_recipe(path) == recipe


@given(TEXT)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_texts_survive_as_the_base_of_a_resume(tmp_path, text):
    config = {"a": text, "b": [text], "c": {"d": text}}
    save_recipe(replace(Recipe(), model=Model(config=config)), tmp_path / "recipe.yaml")
    tree, origins, problems = read_base(tmp_path / "recipe.yaml")
    plain, unresolved = resolve(tree, origins)
    assert plain["model"]["config"] == config
    assert problems == unresolved == []


def test_a_composed_recipe_loads_equal(tmp_path):
    recipe = compose(["experiment=pretrain_llama3_2_1b", "track.wandb.tags=['1e-3',x]"]).require()
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_keys_that_yaml_would_read_as_equal_stay_two(tmp_path):
    recipe = replace(Recipe(), model=Model(config={" ": 1, "\x85": 2}))
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def test_letters_of_all_scripts_stay_readable(tmp_path):
    save_recipe(replace(Recipe(), run=Run(root="größe/数据")), tmp_path / "recipe.yaml")
    assert "root: größe/数据" in (tmp_path / "recipe.yaml").read_text(encoding="utf-8")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "recipe.yaml"
    save_recipe(Recipe(), path)
    before = path.read_bytes()

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_recipe(replace(Recipe(), run=Run(id="x")), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_edited_recipe_is_read_as_strictly_as_any(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("train:\n  stpes: 3\n  seed: x\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert "train.steps" in str(error.value)
    assert f"{path}:2" in str(error.value)
    assert f"{path}:3" in str(error.value)


@pytest.mark.parametrize("content", [b"train: [", b"\xff\xfe", b"- 1", b""])
def test_a_file_that_is_no_recipe_is_named(tmp_path, content):
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError, match=r"recipe\.yaml"):
        load_recipe(path)


def test_a_recipe_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(RecipeError, match="No such file"):
        load_recipe(tmp_path / "recipe.yaml")


def test_nobody_else_reads_it(tmp_path):
    (tmp_path / "recipe.yaml").write_text("")
    (tmp_path / "recipe.yaml").chmod(0o644)  # of a run from before
    save_recipe(Recipe(), tmp_path / "recipe.yaml")
    assert (tmp_path / "recipe.yaml").stat().st_mode & 0o777 == 0o600
