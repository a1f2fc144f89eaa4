"""What a pretrained folder says is in every export of a run that began with it, and is checked before the run is made."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from framework.cli import main
from framework.commands.trained_model import load_model
from framework.data.tokenize import save_tokenizer, train_bpe
from framework.errors import EXIT_DONE, DataError, ModelError
from framework.launch.settle import settle_tokens
from framework.model.generate import add_end
from framework.model.load import build_meta, load_config
from framework.model.weights import refuse_unwritable_configs
from framework.plan.check import check_layout, check_weights
from framework.recipe.compose import compose
from framework.recipe.schema import Model
from tests.families import LLAMA, build_config, family, needs_newer_transformers
from tests.tiny_run import RECIPE, write_corpus

GENERATION = {"eos_token_id": [3, 4], "do_sample": False, "temperature": 0.6, "top_p": 0.9, "a_later_value": [1]}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
SMALL = {**LLAMA, "vocab_size": 320, "num_hidden_layers": 1}
WORDS = [each for each in RECIPE if not each.startswith(("model.", "data.bpe_vocab"))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A chat model's folder: a list of end tokens, sampling values that transformers warns of, a template, a processor's file, a
    padding id of -1 and a value that nobody knows."""
    folder = tmp_path / "model"
    AutoModelForCausalLM.from_config(build_config(family("llama"), **SMALL)).save_pretrained(folder)
    tokenizer = train_bpe(["mesh axis layout box dual"] * 9, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    write(folder / "generation_config.json", GENERATION)
    write(folder / "preprocessor_config.json", {"size": 3})
    change_config(folder, pad_token_id=-1, a_later_value={"a": 1})
    return folder


def write(path: Path, values: object) -> None:
    path.write_text(json.dumps(values))


def change_config(folder: Path, **values: object) -> None:
    write(folder / "config.json", json.loads((folder / "config.json").read_text()) | values)


def compose_run(folder: Path, *more: str) -> Any:
    return compose(
        [*WORDS, "~model", f"model.weights={folder}", "launch.ranks=1", "launch.device=cpu", *more]
    ).require()


@needs_newer_transformers  # which refuses to save such values
def test_an_export_has_what_the_folder_has(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run whose pretrained folder is gone by then."""
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    words = [*WORDS, "~model", f"model.weights={folder}", "launch.ranks=1", "launch.device=cpu"]
    assert main(["train", "run.id=tuned", *words, "train.steps=2"]) == EXIT_DONE
    stock = AutoModelForCausalLM.from_pretrained(folder)
    template = AutoTokenizer.from_pretrained(folder).chat_template
    shutil.rmtree(folder)
    assert main(["export", "runs/tuned", "--to", "out"]) == EXIT_DONE

    out = AutoModelForCausalLM.from_pretrained("out")
    end = AutoTokenizer.from_pretrained("out").eos_token_id
    assert read_json("generation_config.json") | {"transformers_version": ""} == {
        **GENERATION, "eos_token_id": [3, 4, end], "transformers_version": "",
    }  # fmt: skip
    assert out.config.a_later_value == stock.config.a_later_value == {"a": 1}
    assert out.config.pad_token_id == stock.config.pad_token_id == -1
    assert AutoTokenizer.from_pretrained("out").chat_template == template == TEMPLATE
    assert "<|im_end|>" in AutoTokenizer.from_pretrained("out").all_special_tokens
    assert read_json("preprocessor_config.json") == {"size": 3}
    out.save_pretrained("again")
    assert main(["export", "runs/tuned", "--to", "narrow", "--dtype", "bf16"]) == EXIT_DONE
    narrow = AutoModelForCausalLM.from_pretrained("narrow", dtype="auto").state_dict()
    assert all(torch.equal(narrow[name], each.to(torch.bfloat16)) for name, each in out.state_dict().items())
    assert {each.dtype for each in narrow.values()} == {torch.bfloat16}
    model, _ = load_model(tmp_path / "runs" / "tuned")
    assert model.generation_config.eos_token_id == [3, 4, end]


def read_json(name: str) -> Any:
    return json.loads(Path("out", name).read_text())


@pytest.mark.parametrize(("stated", "ends"), [(None, 5), (5, 5), (3, [3, 5]), ([3, 4], [3, 4, 5]), ([5, 3], [5, 3])])
def test_the_end_of_documents_ends_a_text_too(stated: Any, ends: Any) -> None:
    tokenizer = train_bpe(["mesh"], 300)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    assert add_end(stated, tokenizer.eos_token_id) == ends
    tokenizer.eos_token = None
    assert add_end(stated, tokenizer.eos_token_id) == stated


@pytest.mark.parametrize("text", ["[1]", "{", '{"eos_token_id": 1, "max_new_tokens": -3}'])
def test_a_generation_config_that_transformers_does_not_read_is_refused_before_the_run(text: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json is no generation config that transformers reads"):
        check_weights(check_layout(compose_run(folder)))


def test_a_config_that_transformers_does_not_save_is_refused_before_the_run(folder: Path) -> None:
    model = build_meta(load_config(Model(weights=str(folder))))
    refuse_unwritable_configs(model)
    model.config.num_beams = 4
    with pytest.raises(ModelError, match=r"(?s)does not save the config .*num_beams"):
        refuse_unwritable_configs(model)


def test_a_tokenizer_with_more_entries_than_the_weights_says_one_fix(folder: Path, tmp_path: Path) -> None:
    """Before the run is made; whoever sets model.config.vocab_size instead is told the same."""
    tokenizer = tmp_path / "tokenizer"
    info = save_tokenizer(AutoTokenizer.from_pretrained(folder), tokenizer)
    write(tokenizer / "info.json", asdict(replace(info, vocab_size=333)))
    with pytest.raises(DataError, match=r"320 entries, is smaller .* 333: .*model\.tokenizer=null.*embeddings\(333\)"):
        settle_tokens(compose_run(folder), tokenizer)
    with pytest.raises(ModelError, match=r"model\.config\.vocab_size=320.*or remove it.*\n?.*resize_token_embeddings"):
        check_weights(check_layout(compose_run(folder, "model.config.vocab_size=333")))


@needs_newer_transformers
def test_values_that_stock_only_warns_of_are_as_it_writes_them(folder: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "stock")
    stock = GenerationConfig.from_pretrained(tmp_path / "stock").to_dict()
    assert {name: stock[name] for name in GENERATION} == GENERATION
