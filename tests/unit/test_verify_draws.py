"""Random verifications: what is drawn is a function of the seed, everything is drawn, and a command says all of it."""

from collections import Counter

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from framework.errors import ModelError, RecipeError
from framework.model.load import load_config
from framework.recipe.compose import compose
from framework.recipe.overrides import write_value
from framework.recipe.schema import Recipe
from scripts.random_recipes import CHOICES, OTHERS, Drawn, draw, write
from scripts.verify_random import Campaign
from tests.ranks.pool import RankPool

PLAIN = {"parallel.ep": 1, "parallel.cp": 1, "config.output_router_logits": None}


def recipe_of(drawn: Drawn) -> Recipe:
    return compose(write(drawn)).require()


def show_draws(rank: int, world: int, rendezvous: str) -> tuple[int, str]:
    """Body: a number that differs between processes, and what is drawn."""
    return hash("meshwright"), str([draw(7, number, 0, {}) for number in range(5)])


def test_another_process_draws_the_same(pool: RankPool) -> None:
    """With another hash seed, on which the order of sets depends."""
    (one, drawn), (other, again) = pool.run(2, show_draws)
    assert one != other
    assert drawn == again == str([draw(7, number, 0, {}) for number in range(5)])


def test_seed_number_and_attempt_each_change_the_draw() -> None:
    first = draw(7, 3, 0, {})
    assert draw(7, 3, 0, {}) == first
    assert all(draw(*place, {}) != first for place in ((8, 3, 0), (7, 4, 0), (7, 3, 1)))


def test_what_is_given_is_not_drawn_and_changes_no_other_draw_before_it() -> None:
    given = draw(7, 3, 0, {"launch.ranks": 4, "parallel.tp": 4})
    free = draw(7, 3, 0, {})
    assert (given["launch.ranks"], given["parallel.tp"]) == (4, 4)
    before = [choice.key for choice in CHOICES[: [choice.key for choice in CHOICES].index("launch.ranks")]]
    assert [given.get(key) for key in before] == [free.get(key) for key in before]


def test_every_value_is_drawn_within_500_draws() -> None:
    """Of families those that are named: the others are more than a hundred."""
    drawn = [draw(1, number, 0, {}) for number in range(500)]
    for choice in CHOICES:
        seen = Counter(str(each[choice.key]) for each in drawn if choice.key in each)
        missing = {str(value) for value in choice.values if value not in OTHERS} - seen.keys()
        assert not missing, f"{choice.key}: {missing} are never drawn"


def test_a_drawn_value_is_in_the_recipe_that_its_command_says() -> None:
    """Whatever is drawn comes back from the overrides, as the recipe has it."""
    for number in range(6):
        drawn = draw(2, number, 0, PLAIN | {"model.family": "qwen3"})
        recipe = recipe_of(drawn)
        for key, value in drawn.items():
            if "." in key and not key.startswith(("config.", "optim.groups")):
                group, _, name = key.partition(".")
                found = getattr(recipe, group)
                for part in name.split("."):
                    found = getattr(found, part)
                assert (list(found) if isinstance(found, tuple) else found) == value, key
        assert recipe.optim.groups.keys() == drawn["optim.groups"].keys()
        assert recipe.precision.reduce == drawn["precision"]
        assert recipe.precision.compute == drawn.get("precision.compute", drawn["precision"])


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt2", "gemma3_text", "deepseek_v3", "gpt_oss"])
def test_the_command_has_the_whole_small_model(family: str) -> None:
    """It says every value that is not the family's own, so that another version of `shrink` repeats the case."""
    drawn = draw(0, 0, 0, PLAIN | {"model.family": family, "config.vocab_size": 97, "config.tie_word_embeddings": True})
    config = load_config(recipe_of(drawn).model)
    assert (config.vocab_size, config.tie_word_embeddings) == (97, True)
    assert config.hidden_size <= 128
    assert config.num_hidden_layers <= 12


def test_a_family_without_a_small_text_model_is_refused_with_the_reason() -> None:
    with pytest.raises(ModelError, match="it is made of several models"):
        write(draw(0, 0, 0, PLAIN | {"model.family": "gemma3"}))


@pytest.mark.parametrize(
    "value",
    [None, True, 3, 1e-5, 1e9, -1.5, "sdpa", "", "a b", "1", "null", "yes", r"\.0\.", "embed|wte", [1, [True, "x"]],
     {"rope_type": "default", "rope_theta": 1e6, "inner": {"a": [None]}}, [], {}],
)  # fmt: skip
def test_a_value_comes_back_from_the_command_line(value: object) -> None:
    found = OverridesParser.create().parse_overrides([f"+key={write_value(value)}"])[0].value()
    assert found == value
    assert type(found) is type(value)


def test_overrides_take_the_place_of_what_is_drawn() -> None:
    campaign = Campaign(
        1, overrides=["parallel.tp=2", "optim.clip_norm=null", "precision=fp64", "optim.lr=1e-4", "track.every_steps=2"]
    )
    assert campaign.given == {"parallel.tp": 2, "optim.clip_norm": None, "precision": "fp64", "optim.lr": 1e-4}
    words = campaign.write(draw(0, 0, 0, campaign.given))
    assert words.count("parallel.tp=2") == 1
    assert "optim.lr=0.0001" in words
    with pytest.raises(RecipeError, match="an override is a key, an equals sign and a value"):
        assert Campaign(1, overrides=["optim.lr"]).given
    assert words[-1] == "track.every_steps=2"


def test_overrides_that_add_a_drawn_key_stand_alone() -> None:
    """The drawn value would stand beside them, and the recipe would be refused or have that one."""
    campaign = Campaign(1, overrides=["+parallel.tp=2", "++zero.stage=3", "+optim.groups.slow={pattern: norm}"])
    assert campaign.given == {"parallel.tp": 2, "zero.stage": 3}
    words = campaign.write(draw(0, 0, 0, campaign.given))
    assert [word for word in words if "parallel.tp" in word or "zero.stage" in word] == [
        "parallel.tp=2",
        "zero.stage=3",
    ]
    assert words[-1] == "+optim.groups.slow={pattern: norm}"
    with pytest.raises(RecipeError, match=r"~zero\.stage would remove a key that is drawn"):
        assert Campaign(1, overrides=["~zero.stage"]).given
