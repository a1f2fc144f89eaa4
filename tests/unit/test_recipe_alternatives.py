"""Alternative keys: what the user states counts more than a default of a shipped recipe, for every command alike."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from framework.cli import main
from framework.errors import EXIT_USER, MeshwrightError, ModelError
from framework.launch.settle import settle
from framework.model.load import inline_config_file, load_config
from framework.recipe.compose import compose, compose_open
from framework.recipe.keys import value_of
from framework.recipe.problem import render_problems, shipped_recipes
from framework.recipe.schema import Recipe
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
FILES = ("data=files", "data.sources.files.path=/data")


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["batch.tokens_per_step=65536"], {"batch.sequences_per_step": None}),
        (["experiment=pretrain_llama3_2_1b", "batch.sequences_per_step=256"], {"batch.tokens_per_step": None}),
        (["model=llama3_1_8b", "data.bpe_vocab=300"], {"model.tokenizer": None}),
        (["model.tokenizer=/tokenizer", "model.config.vocab_size=9"], {"data.bpe_vocab": None}),
        (["launch.ranks=8"], {"batch.sequences_per_microbatch": 4}),
        (["batch.sequences_per_step=12"], {"batch.sequences_per_microbatch": 6}),
    ],
)
def test_what_is_stated_stands_and_its_alternative_follows(words: list[str], values: dict[str, Any]) -> None:
    composition = compose(words)
    for key, expected in values.items():
        assert value_of(composition.require(), key) == expected
        assert composition.origins[key].startswith("follows from")


def test_a_search_takes_the_batch_in_tokens() -> None:
    composition = compose_open(["batch.tokens_per_step=65536", "launch.ranks=4"], ())
    assert composition.require().batch.sequences_per_step is None
    assert main(["search", "batch.tokens_per_step=65536", "launch.ranks=2", "cluster=h100_ib", "--best=1"]) == 0


def test_an_experiment_of_the_users_counts_more_than_config_yaml(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nbatch: {tokens_per_step: 65536}\n")
    assert compose(["experiment=mine"], [tmp_path]).require().batch.sequences_per_step is None
    both = "# @package _global_\nbatch: {tokens_per_step: 65536, sequences_per_step: 7}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(both)
    assert "stated twice" in render_problems(compose(["experiment=mine"], [tmp_path]).problems)
    # What a file says of both ranks and microbatches is its author's mistake, not for us to change.
    wrong = "# @package _global_\nlaunch: {ranks: 8}\nbatch: {sequences_per_step: 32, sequences_per_microbatch: 8}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(wrong)
    assert "not a multiple" in render_problems(compose(["experiment=mine"], [tmp_path]).problems)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["batch.tokens_per_step=65536", "batch.sequences_per_step=3"], "stated twice"),
        (["train.steps=5", "train.epochs=2"], "give train.steps or train.epochs"),
        (
            ["checkpoint.every_minutes=5", "checkpoint.interval=young_daly", "checkpoint.mtbf_hours=9"],
            "give checkpoint.every_minutes or checkpoint.interval",
        ),
        (["launch.ranks=8", "batch.sequences_per_microbatch=8"], "not a multiple"),
        (["model.weights=/m", "data.bpe_vocab=300"], "has a tokenizer already"),
        (["model.weights=/m", "model.config_file=/c"], "has a config of its own"),
    ],
)
def test_two_statements_of_one_strength_are_a_mistake(words: list[str], message: str) -> None:
    assert message in render_problems(compose(words).problems)
    if not words[0].startswith("launch"):  # a search chooses the microbatch
        assert message in render_problems(compose_open(words, ()).problems)


@pytest.mark.parametrize("ranks", [1, 16])
@pytest.mark.parametrize(
    "name",
    few_of(
        sorted(file.stem for file in (shipped_recipes() / "model").glob("*.yaml")),
        lambda name: name in ("llama3_2_1b", "qwen3_30b_a3b"),
    ),
)
def test_a_shipped_model_composes_on_a_usual_number_of_ranks(name: str, ranks: int) -> None:
    words = [f"model={name}", *FILES, f"launch.ranks={ranks}"]
    compose(words).require()
    compose([*words, "batch.tokens_per_step=1048576", "batch.context=4096"]).require()


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config")
    LlamaConfig(**SMALL, rope_parameters={"rope_type": "default", "rope_theta": 77.0}).save_pretrained(folder)
    return folder / "config.json"


def test_a_folder_of_weights_is_the_model(config_file: Path) -> None:
    model = compose([f"model.weights={config_file.parent}", *FILES]).require().model
    assert (model.config, model.tokenizer) == ({}, None)
    assert load_config(model).rope_parameters["rope_theta"] == 77.0


def test_a_reference_to_nothing_is_reported_and_no_fault(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    file = tmp_path / "experiment" / "mine.yaml"
    for text in ("model: {weights: '${oc.env:ABSENT_HERE}'}", "model: 5", "batch: 5\nlaunch: []"):
        file.write_text(f"# @package _global_\n{text}\n")
        assert compose(["experiment=mine"], [tmp_path]).problems, text


def test_a_family_that_contradicts_the_weights_is_refused_with_both(config_file: Path) -> None:
    model = compose([f"model.weights={config_file.parent}", "model.family=gpt2", *FILES]).require().model
    with pytest.raises(ModelError, match=r"model.family=gpt2 contradicts model.weights=.* says llama"):
        load_config(model)


def test_a_config_file_is_a_model(config_file: Path) -> None:
    for path in (config_file, config_file.parent):
        recipe = compose([f"model.config_file={path}", "model.config.num_hidden_layers=3"]).require()
        config = load_config(recipe.model)
        assert (config.hidden_size, config.num_hidden_layers) == (32, 3)
    assert main(["plan", f"model.config_file={config_file}", "cluster=h100_ib"]) == 0
    settled = settle(recipe)
    assert settled.model.config_file is None
    kept, nowhere = load_config(settled.model), {"architectures": None, "_name_or_path": ""}
    assert kept.to_dict() | nowhere == config.to_dict() | nowhere


def test_a_config_file_may_have_infinities(config_file: Path, tmp_path: Path) -> None:
    values = json.loads(config_file.read_text())
    file = tmp_path / "config.json"
    for limit in (float("inf"), {"__float__": "Infinity"}):
        family = {
            **values,
            "model_type": "granite",
            "architectures": ["GraniteForCausalLM"],
            "residual_multiplier": limit,
        }
        file.write_text(json.dumps(family))
        config = load_config(inline_config_file(Recipe().model.__class__(config_file=str(file))))
        assert (config.model_type, config.residual_multiplier) == ("granite", float("inf"))
    file.write_text(json.dumps({**values, "attention_dropout": float("nan")}))
    assert load_config(Recipe().model.__class__(config_file=str(file))).attention_dropout != 0.0


def test_what_is_no_config_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(MeshwrightError, match=str(path)):
            load_config(compose([f"model.config_file={path}"]).require().model)
    assert main(["plan", f"model.config_file={tmp_path / 'absent.json'}"]) == EXIT_USER


def test_a_chosen_recipe_of_which_an_experiment_states_keys_is_noted() -> None:
    words = ["experiment=quickstart", "model=llama3_1_8b"]
    (note,) = compose(words).notes
    assert "model=llama3_1_8b" in note
    assert "model.config.hidden_size" in note
    assert compose(words[:1]).notes == compose(words[1:]).notes == ()
