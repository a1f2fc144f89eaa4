"""The strict conversion: types, ranges, legal values, and one problem per mistake."""

import dataclasses
import typing
from dataclasses import asdict
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from framework.recipe.convert import to_recipe
from framework.recipe.keys import NAME, list_keys, split_optional
from framework.recipe.schema import Recipe


def nested(path: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for a.b"""
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def convert(path: str, value: Any):
    """(the value that the recipe has at `path`, problems)"""
    recipe, problems = to_recipe(nested(path, value), {})
    for name in path.split("."):
        recipe = recipe[name] if isinstance(recipe, dict) else getattr(recipe, name)
    return recipe, problems


SCALAR_KEYS = [key for key in list_keys() if NAME not in key.path]
INTS = [key for key in SCALAR_KEYS if split_optional(key.kind)[0] is int]
FLOATS = [key for key in SCALAR_KEYS if split_optional(key.kind)[0] is float]
CHOICES = [key for key in SCALAR_KEYS if typing.get_origin(key.kind) is Literal]
TEXTS = [key for key in SCALAR_KEYS if split_optional(key.kind)[0] is str]


def test_nothing_at_all_is_the_schemas_defaults():
    assert to_recipe({}, {}) == (Recipe(), [])


def test_every_key_has_a_meaning_and_a_default_that_is_legal():
    for key in list_keys():
        assert key.doc
        assert key.legal
        if key.default is not dataclasses.MISSING and NAME not in key.path:
            assert convert(key.path, key.default)[1] == [], key.path


def test_whole_numbers_are_neither_truth_values_nor_fractions_nor_text():
    for key in INTS:
        good = int(key.low or 0) + 1
        assert convert(key.path, good) == (good, [])
        for wrong in (True, good + 0.5, float(good), str(good), [good], {"a": good}):
            value, (problem,) = convert(key.path, wrong)
            assert (problem.key, problem.value) == (key.path, wrong)
            assert "whole number" in problem.message
            assert value == key.default


def test_numbers_may_be_written_whole_but_must_be_finite():
    for key in FLOATS:
        value, problems = convert(key.path, 0 if key.low == 0 else 1)
        assert isinstance(value, float)
        assert problems == []
        for wrong in (True, "0.5", "3e-4", float("nan"), float("inf"), [0.5]):
            assert len(convert(key.path, wrong)[1]) == 1


def test_ranges_are_closed_and_checked_at_both_ends():
    for key in [key for key in INTS + FLOATS if key.low is not None]:
        kind = split_optional(key.kind)[0]
        assert convert(key.path, kind(key.low))[1] == []
        assert len(convert(key.path, kind(key.low - 1))[1]) == 1
        if key.high is not None:
            assert convert(key.path, kind(key.high))[1] == []
            assert len(convert(key.path, kind(key.high + 1))[1]) == 1


def test_choices_list_the_legal_values():
    for key in CHOICES:
        for choice in typing.get_args(key.kind):
            assert convert(key.path, choice) == (choice, [])
        for wrong in ("nonsense", 1, True, None, [typing.get_args(key.kind)[0]]):
            (problem,) = convert(key.path, wrong)[1]
            assert all(choice in problem.message for choice in typing.get_args(key.kind))


def test_text_is_never_made_of_numbers():
    for key in TEXTS:
        assert convert(key.path, "007") == ("007", [])
        for wrong in (7, 7.5, True, ["7"]):
            (problem,) = convert(key.path, wrong)[1]
            assert "text" in problem.message


def test_null_is_legal_exactly_where_the_schema_says_so():
    for key in SCALAR_KEYS:
        _, optional = split_optional(key.kind)
        problems = convert(key.path, None)[1]
        assert (problems == []) == optional
        assert optional == key.legal.endswith("or null")


def test_betas_are_two_numbers_in_range():
    assert convert("optim.betas", [0, 1]) == ((0.0, 1.0), [])
    for wrong in ([0.9], [0.9, 0.9, 0.9], 0.9, [0.9, 1.1], ["0.9", 0.9], {"a": 0.9}):
        assert len(convert("optim.betas", wrong)[1]) == 1, wrong


def test_an_element_of_a_list_is_named():
    (problem,) = convert("model.freeze", ["a", 3])[1]
    assert problem.message.startswith("3 in it must be text")


def test_fixes_say_how_to_write_it():
    assert convert("train.steps", 1e5)[1][0].fix == "write 100000"
    assert convert("train.steps", "1,000")[1][0].fix == "write 1000, without quotes"
    assert convert("optim.lr", "x")[1][0].fix == ""
    assert convert("track.wandb.tags", "a")[1][0].fix == "write it as a list: [a]"
    assert convert("optim.betas", 0.9)[1][0].fix == "write it as a list: [0.9, 0.9]"
    assert convert("launch.device", "cudaa")[1][0].fix == "did you mean cuda?"


def test_model_config_takes_any_value_but_only_text_as_names():
    config = {"a": {"b": [1, None, {"c": 2.5}]}, "d": True}
    assert convert("model.config", config) == (config, [])
    assert "text" in convert("model.config", {1: 2})[1][0].message
    assert "named values" in convert("model.config", [1])[1][0].message


def test_named_groups_report_their_own_keys_and_leave_broken_ones_out():
    tree = {"a": {"path": "x", "wieght": 2}, "b": {"weight": -1}, "c": 3, "d": {"path": "y", "weight": 2}}
    recipe, problems = to_recipe({"data": {"sources": tree}}, {})
    assert {problem.key for problem in problems} == {
        "data.sources.a.wieght",
        "data.sources.b.weight",
        "data.sources.b.path",
        "data.sources.c",
        "data.sources.c.path",
    }
    assert recipe.data.sources.keys() == {"a", "d"}
    assert recipe.data.sources["d"].weight == 2.0


def test_unknown_sections_are_reported_by_leaf():
    problems = to_recipe({"trainer": {"a": 1, "b": {"c": 2}}, "empty": {}}, {})[1]
    assert [(problem.key, problem.value) for problem in problems] == [
        ("trainer.a", 1),
        ("trainer.b.c", 2),
        ("empty", None),
    ]


def test_origins_are_those_of_the_key_or_of_what_is_nearest():
    origins = {"train.steps": "f:1", "data.sources.a.weight": "f:2", "x": "f:3"}
    tree = {"train": {"steps": 0}, "data": {"sources": {"a": {"weight": 1}}}, "x": {"y": 1}}
    problems = to_recipe(tree, origins)[1]
    assert {problem.key: problem.origin for problem in problems} == {
        "train.steps": "f:1",
        "data.sources.a.path": "f:2",
        "x.y": "f:3",
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from([key.path for key in SCALAR_KEYS]), JSON)
def test_any_value_is_either_taken_or_one_problem(path, value):
    _, problems = convert(path, value)
    assert len(problems) <= 1
    if not problems:
        again, more = to_recipe(asdict(to_recipe(nested(path, value), {})[0]), {})
        assert more == []
        assert repr(again) == repr(to_recipe(nested(path, value), {})[0])


@given(st.dictionaries(st.sampled_from([*(f.name for f in dataclasses.fields(Recipe)), "x", 3]), JSON, max_size=4))
def test_no_tree_breaks_the_conversion(tree):
    recipe, _ = to_recipe(tree, {})
    assert isinstance(recipe, Recipe)
