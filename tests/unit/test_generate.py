"""Continuations of a tiny model, against a loop of whole forward passes without a cache."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from framework.commands.generate import generate_command
from framework.errors import ModelError
from framework.model.generate import generate
from tests.families import build_config, family

TEXT = ["def f(x):\n    return x + 1\n", "for i in range(10):\n    print(i)\n"]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=280, special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<end>", bos_token="<end>")


@pytest.fixture(scope="module")
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    torch.manual_seed(0)
    config = build_config(
        family("llama"), vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, initializer_range=0.5
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def test_greedy_continuation_equals_whole_forward_passes(model, tokenizer) -> None:
    ids = tokenizer("def g")["input_ids"]
    prompt_length = len(ids)
    with torch.no_grad():
        while len(ids) < prompt_length + 12 and ids[-1] != tokenizer.eos_token_id:
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    expected = tokenizer.decode(ids[prompt_length:], skip_special_tokens=True)
    assert generate(model, tokenizer, "def g", max_new_tokens=12, temperature=0.0) == expected


def test_a_text_ends_at_the_tokenizers_end_whatever_the_config_says(model, tokenizer) -> None:
    wrong = deepcopy(model)
    wrong.generation_config.eos_token_id = 2
    with torch.no_grad():  # of the final norm's gain a head that always prefers one token is made
        for parameter in wrong.model.layers.parameters():
            parameter.zero_()
        wrong.model.norm.weight.fill_(1.0)
        for token, expected_tokens in ((0, 0), (2, 5)):
            wrong.model.embed_tokens.weight.fill_(1.0)
            wrong.lm_head.weight.zero_()[token] = 1.0
            text = generate(wrong, tokenizer, "a", max_new_tokens=5, temperature=0.0)
            assert text == tokenizer.decode([token] * expected_tokens)


def test_draws_depend_on_the_seed_alone(model, tokenizer) -> None:
    def draw(seed: int) -> str:
        return generate(model, tokenizer, "for", max_new_tokens=12, temperature=1.0, seed=seed)

    torch.manual_seed(5)
    expected_next = torch.rand(1)
    torch.manual_seed(5)
    first = draw(1)
    assert torch.equal(torch.rand(1), expected_next)
    assert draw(1) == first
    assert draw(2) != first


def test_top_k_of_one_is_greedy(model, tokenizer) -> None:
    greedy = generate(model, tokenizer, "for", max_new_tokens=8, temperature=0.0)
    assert generate(model, tokenizer, "for", max_new_tokens=8, temperature=1.0, top_k=1) == greedy


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_pretrained_generation_config_changes_no_draw(model, tokenizer, temperature: float) -> None:
    own = model.generation_config
    expected = generate(model, tokenizer, "for", max_new_tokens=12, temperature=temperature)
    for stated in (
        {"repetition_penalty": 1.5},
        {"top_p": 0.1, "top_k": 2},
        {"no_repeat_ngram_size": 1},
        {"num_beams": 3},
    ):
        changed = deepcopy(model)
        changed.generation_config.update(**stated)
        assert generate(changed, tokenizer, "for", max_new_tokens=12, temperature=temperature) == expected
        assert stated.items() <= vars(changed.generation_config).items()
    assert model.generation_config is own


def test_empty_prompt_starts_from_the_start_token(model, tokenizer) -> None:
    assert isinstance(generate(model, tokenizer, "", max_new_tokens=4), str)


def test_too_many_tokens_say_how_many_fit(model, tokenizer) -> None:
    with pytest.raises(ModelError, match="at most 63 new tokens"):
        generate(model, tokenizer, "a", max_new_tokens=64)


def test_command_prints_prompt_and_continuation_of_a_folder_and_of_a_run(
    model, tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "run" / "export")
    for path in (tmp_path / "run", tmp_path / "run" / "export"):
        assert generate_command(path, "def g", max_new_tokens=6, temperature=0.0) == 0
        expected = "def g" + generate(model, tokenizer, "def g", 6, temperature=0.0)
        assert capsys.readouterr().out == expected + "\n"


def test_command_says_what_is_missing(model, tokenizer, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="neither a run nor"):
        generate_command(tmp_path, "a")
    (tmp_path / "recipe.yaml").touch()
    with pytest.raises(ModelError, match="no whole checkpoint yet"):
        generate_command(tmp_path, "a")
    model.save_pretrained(tmp_path / "export")
    with pytest.raises(ModelError, match="no model with a tokenizer"):
        generate_command(tmp_path, "a")
