"""Text models inside vision-language checkpoints: read from their folder, and written back into a copy of it."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from framework.cli import main
from framework.commands.trained_model import load_model
from framework.data.tokenize import train_bpe
from framework.errors import EXIT_DONE, EXIT_USER, ModelError
from framework.mesh.layout import Box
from framework.model.load import build_meta, is_part, load_config
from framework.model.shrink import shrink
from framework.model.weights import read_weights, write_into
from framework.recipe.schema import Model
from tests.grid import few_of
from tests.tiny_run import RECIPE, write_corpus

# By how a folder names the text model: two prefixes, experts one by one and stacked, a text family of its own (mistral).
FAMILIES = ("qwen3_5_moe", "llama4", "mistral3", "qwen3_5", "internvl", "lfm2_vl")


def _read(folder: Path, meta: PreTrainedModel) -> dict[str, Tensor]:
    wanted = {name: [Box((0,) * each.ndim, tuple(each.shape))] for name, each in meta.state_dict().items()}
    return {name: values.clone() for name, _, values in read_weights(folder, meta, wanted)}


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {key: each for file in sorted(folder.glob("*.safetensors")) for key, each in load_file(file).items()}


def _make(family: str, folder: Path, **text: Any) -> None:
    """Write a vision-language folder with random weights in bf16, several files and a processor's settings. text: values of the
    text model's config."""
    config = shrink(CONFIG_MAPPING[family]())
    config.get_text_config().update(text)
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder, max_shard_size="200KB"
    )
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": 224}))


def _assert_only_text_differs(theirs: Path, ours: Path, text: PreTrainedModel) -> None:
    """Files, names and dtypes of both folders are the same, and the text model's weights alone differ, all of them."""
    assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    for path in theirs.glob("*.json"):
        assert (ours / path.name).read_bytes() == path.read_bytes()
    before, after = _tensors(theirs), _tensors(ours)
    forms = [{key: (each.dtype, each.shape) for key, each in side.items()} for side in (before, after)]
    assert forms[0] == forms[1]
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert sum(before[key].numel() for key in changed) == sum(each.numel() for each in text.parameters())
    assert not any(part in key for key in before.keys() - changed for part in ("language_model", "lm_head"))


@pytest.mark.parametrize("family", few_of(FAMILIES, {"qwen3_5_moe", "llama4", "mistral3"}.__contains__))
def test_a_trained_text_model_goes_back_into_the_checkpoint_that_it_came_from(family: str, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    _make(family, theirs)
    text = build_meta(load_config(Model(weights=str(theirs))))
    assert is_part(text, theirs)
    assert sum(p.numel() for p in text.parameters()) < sum(each.numel() for each in _tensors(theirs).values())
    values = _read(theirs, text)
    trained = {name: each.float() + torch.randn_like(each) / 64 for name, each in values.items()}
    layers = [
        {name: each for name, each in trained.items() if (".layers.0." in name) == first} for first in (True, False)
    ]
    for path in theirs.iterdir():
        path.chmod(0o444)
    write_into(ours, theirs, text, layers)
    assert all(path.stat().st_mode & 0o200 for path in ours.iterdir())

    _assert_only_text_differs(theirs, ours, text)

    # Stock transformers, of the whole and of the text alone with the values that were trained.
    whole = AutoModelForImageTextToText.from_pretrained(ours, dtype=torch.float32).eval()
    if family == "llama4":  # its own forward asks its text model's output for images
        whole = whole.language_model
    alone = AutoModelForCausalLM.from_config(text.config, dtype=torch.float32).eval()
    alone.load_state_dict({name: each.bfloat16().float() for name, each in trained.items()})
    ids = torch.randint(0, 90, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(whole(input_ids=ids).logits, alone(input_ids=ids).logits)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_weights_of_one_byte_are_written_as_such_or_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    _make("mistral3", theirs)
    text = build_meta(load_config(Model(weights=str(theirs))))
    values = _read(theirs, text)
    for path in theirs.glob("*.safetensors"):
        narrow = {key: each.to(dtype) if "language" in key else each for key, each in load_file(path).items()}
        save_file(narrow, path, {"format": "pt"})
    if dtype == torch.int8:
        with pytest.raises(ModelError, match="as codes or in a dtype that is not written"):
            write_into(ours, theirs, text, [values])
        assert not ours.exists()
        return
    write_into(ours, theirs, text, [{name: 2 * each for name, each in values.items()}])
    found = _read(ours, text)
    assert dtype in {each.dtype for each in found.values()}
    for name, each in found.items():
        assert torch.equal(each.float(), (2 * values[name]).to(each.dtype).float())


def test_a_run_that_begins_with_a_vision_language_folder_is_exported_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "corpus")
    _make("mistral3", tmp_path / "theirs", vocab_size=320)
    train_bpe(["mesh axis layout box dual"] * 9, 300).save_pretrained("theirs")
    words = [each for each in RECIPE if not each.startswith(("model.", "data.bpe_vocab"))]
    words += ["~model", "model.weights=theirs", "launch.ranks=1", "launch.device=cpu", "optim.lr=0.01"]
    assert main(["train", "run.id=tuned", *words, "train.steps=2"]) == EXIT_DONE
    assert main(["export", "tuned", "--to", "ours"]) == EXIT_DONE
    model, _ = load_model(Path("runs/tuned"))
    _assert_only_text_differs(Path("theirs"), Path("ours"), model)
    whole = AutoModelForImageTextToText.from_pretrained("ours", dtype=torch.float32).eval()
    ids = torch.randint(0, 300, (2, 7))
    with torch.no_grad():
        torch.testing.assert_close(whole(input_ids=ids).logits, model.bfloat16().float().eval()(ids).logits)

    assert main(["export", "tuned", "--to", "narrow", "--dtype", "bf16"]) == EXIT_USER
    recipe = Path("runs/tuned/recipe.yaml")
    kept = recipe.read_text()
    recipe.write_text(re.sub(r"(\n  config:)", r"\1\n    rms_norm_eps: 0.01", kept))
    with monkeypatch.context() as patch:
        patch.setattr("framework.commands.trained_model.verify_identity", lambda *_: None)
        assert main(["export", "tuned", "--to", "other"]) == EXIT_USER
    recipe.write_text(kept)
    shutil.rmtree("theirs")
    assert main(["export", "tuned", "--to", "none"]) == EXIT_USER
    said = capsys.readouterr().err
    assert "--dtype goes with --text" in said
    assert "values of model.config (rms_norm_eps) it would be another model. Add --text" in said
    assert "the checkpoint of the text model is not at model.weights=theirs" in said
    assert "or export this alone with --text" in said
    assert main(["export", "tuned", "--to", "text", "--text", "--dtype", "bf16"]) == EXIT_DONE
    text = AutoModelForCausalLM.from_pretrained("text", dtype=torch.float32)
    assert type(text).__name__ == "MistralForCausalLM"
    for name, each in text.state_dict().items():
        assert torch.equal(each, model.state_dict()[name].bfloat16().float()), name


def test_layers_that_the_text_model_lacks_are_refused_and_other_towers_are_not(tmp_path: Path) -> None:
    _make("mistral3", tmp_path)
    text = build_meta(load_config(Model(weights=str(tmp_path))))
    index = tmp_path / "model.safetensors.index.json"
    file = tmp_path / sorted(set(json.loads(index.read_text())["weight_map"].values()))[0]
    tensors = load_file(file)
    key = next(
        key for key in _tensors(tmp_path) if key.endswith("layers.0.input_layernorm.weight") and "language_model" in key
    )
    more = key.replace("layers.0", "layers.7")
    save_file({**tensors, more: torch.ones(64)}, file, {"format": "pt"})
    with pytest.raises(ModelError, match=rf"not of this model \(1\):\s+{re.escape(more)}"):
        _read(tmp_path, text)
