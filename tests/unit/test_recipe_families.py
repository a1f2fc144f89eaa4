"""A family that transformers does not have is refused at once; none that it has is."""

import subprocess
import sys

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from framework.recipe import run_rules
from framework.recipe.compose import compose
from framework.recipe.run_rules import list_families, read_strings
from framework.recipe.schema import Model, Recipe


def problems_of(family, **model):
    return list(run_rules.family.find(Recipe(model=Model(family=family, **model))))


def test_every_family_of_transformers_passes():
    # Its own, without those that other tests register in this process.
    assert [family for family in CONFIG_MAPPING_NAMES if problems_of(family)] == []
    assert set(list_families()) == set(CONFIG_MAPPING_NAMES)


@pytest.mark.parametrize(
    ("typed", "meant"), [("lama", "llama"), ("Qwen3", "qwen3"), ("mixtrel", "mixtral"), ("gpt-2", "gpt2")]
)
def test_a_mistyped_family_is_refused_with_the_name_that_was_meant(typed, meant):
    (problem,) = problems_of(typed)
    assert f"model.family={meant}" in problem.fix


def test_a_name_like_none_is_refused_with_where_names_stand():
    assert "config.json" in problems_of("xxxxxxxxxx")[0].fix


def test_weights_say_what_the_model_is():
    assert problems_of("lama", weights="/models/mine") == []


def test_lists_that_lie_elsewhere_refuse_nothing(monkeypatch):
    monkeypatch.setattr(run_rules, "read_strings", frozenset)
    assert problems_of("lama") == []


def test_the_check_of_a_recipe_asks_without_importing_transformers():
    program = (
        "import sys; from framework.recipe.compose import compose\n"
        "print(compose(['experiment=quickstart', 'model.family=lama']).problems)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    said, imported = done.stdout.splitlines()
    assert "model.family=llama" in said
    assert imported == "[]"


def test_a_right_family_is_composed():
    assert compose(["experiment=quickstart", "model.family=gpt2", "~model.config"]).draft.model.family in read_strings()
