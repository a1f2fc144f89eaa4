"""The ids of a model's beginning, end and padding are those of the tokenizer that made its data."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoConfig, PreTrainedTokenizerFast

from framework.data.tokenize import save_tokenizer, train_bpe
from framework.errors import RunError
from framework.launch.directory import RunDirectory
from framework.launch.resume import keep_settled, resume_recipe
from framework.launch.settle import settle_tokens
from framework.model.generate import find_end, set_token_ids
from framework.model.load import build_meta, load_config
from framework.recipe.compose import compose, save_recipe
from framework.recipe.schema import Model

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tokenizer as the quickstart trains it: its end is 0, and there is no beginning."""
    folder = tmp_path_factory.mktemp("tokenizer") / "kept"
    save_tokenizer(train_bpe(["a text of some words"] * 3, 300), folder)
    return folder


def settled(folder: Path, family: str, **config: object) -> dict[str, object]:
    recipe = compose(["experiment=quickstart"]).require()
    model = Model(family=family, config={**SMALL, **config})
    return settle_tokens(replace(recipe, model=model), folder).model.config


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "opt", "gpt2"])
def test_a_model_from_scratch_ends_where_its_tokenizer_does(folder, family):
    small = {"vocab_size": 300} if family in ("opt", "gpt2") else {}
    recipe = compose(["experiment=quickstart"]).require()
    model = replace(recipe.model, family=family, config=small or SMALL)
    config = settle_tokens(replace(recipe, model=model), folder).model.config
    assert {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")} == {
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


def test_an_id_that_the_recipe_has_of_another_tokenizer_is_corrected_and_said(folder, capsys):
    assert settled(folder, "llama", eos_token_id=2)["eos_token_id"] == 0
    assert "model.config.eos_token_id=0, the tokenizer's; the recipe has 2" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["gemma", "opt", "phi3"])
def test_no_row_of_the_embedding_is_taken_for_padding_by_default(family):
    """Families whose default padding is an ordinary token of another tokenizer, or outside its vocabulary."""
    config = {"vocab_size": 300} if family == "opt" else SMALL
    assert build_meta(load_config(Model(family=family, config=config))).get_input_embeddings().padding_idx is None


def test_padding_of_its_own_is_kept_and_the_end_of_a_text_is_no_padding(tmp_path):
    tokenizer: PreTrainedTokenizerFast = train_bpe(["some words"], 300)
    tokenizer.pad_token = tokenizer.eos_token
    save_tokenizer(tokenizer, tmp_path / "same")
    assert settled(tmp_path / "same", "llama")["pad_token_id"] is None
    tokenizer.add_special_tokens({"pad_token": "<pad>", "bos_token": "<s>"})
    save_tokenizer(tokenizer, tmp_path / "own")
    config = settled(tmp_path / "own", "llama")
    assert config["pad_token_id"] == tokenizer.pad_token_id
    assert config["bos_token_id"] == tokenizer.bos_token_id


@pytest.mark.parametrize(("stated", "end"), [(0, 0), ([7, 0], [7, 0]), (2, 0), ([7, 2], 0), (None, 0)])
def test_several_ends_of_a_chat_model_stay_where_the_tokenizers_is_among_them(folder, stated, end):
    assert find_end(stated, PreTrainedTokenizerFast.from_pretrained(folder)) == end


def test_pretrained_weights_keep_their_ids_but_end_where_their_data_ends(folder, tmp_path):
    config = load_config(Model(config={**SMALL, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}))
    config.save_pretrained(tmp_path)
    recipe = compose(["experiment=quickstart"]).require()
    model = replace(recipe.model, weights=str(tmp_path), config={})
    assert settle_tokens(replace(recipe, model=model), folder).model.config == {"eos_token_id": 0}
    config.eos_token_id = [2, 0]
    config.save_pretrained(tmp_path)
    assert settle_tokens(replace(recipe, model=model), folder).model.config == {}


def test_a_resume_keeps_what_was_settled(folder):
    recipe = compose(["experiment=quickstart"]).require()
    begun = settle_tokens(recipe, folder)
    assert begun.model.config["eos_token_id"] == 0
    assert keep_settled(begun, recipe).model == begun.model


def test_an_id_that_is_typed_on_a_resume_is_a_change(folder, tmp_path):
    run = RunDirectory.create(tmp_path, "x", "demo")
    words = [f"run.root={tmp_path}", "run.id=x", "model.config.eos_token_id=5"]
    save_recipe(settle_tokens(compose(["experiment=quickstart", *words[:2]]).require(), folder), run.recipe)
    (run.path / "metrics.jsonl").write_text('{"step": 1}\n')
    for more in ([], ["experiment=quickstart"]):
        with pytest.raises(RunError, match=r"model.config.eos_token_id +0 +5"):
            resume_recipe(run, [*words, *more], [])


def test_a_config_of_several_parts_has_no_ids_of_its_own(folder, tmp_path):
    AutoConfig.for_model("gemma3").save_pretrained(tmp_path)
    recipe = compose(["experiment=quickstart"]).require()
    model = replace(recipe.model, weights=str(tmp_path), config={})
    assert settle_tokens(replace(recipe, model=model), folder).model.config == {}


def test_ids_are_written_where_generation_and_loading_look():
    model = build_meta(load_config(Model(config=SMALL)))
    set_token_ids(model, {"eos_token_id": 5})
    assert model.config.eos_token_id == model.generation_config.eos_token_id == 5
