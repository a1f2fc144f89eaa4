"""Hugging Face folders in and out, against `save_pretrained` and `from_pretrained` themselves."""

import json
import resource
import shutil
import weakref
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import huggingface_hub
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.errors import ModelError
from framework.mesh.layout import Box
from framework.model import safetensors_files
from framework.model.hub import resolve_folder
from framework.model.safetensors_files import match_keys, plan_files, to_checkpoint
from framework.model.weights import read_weights, write_weights
from tests.families import FAMILIES, RECURRENT, STOCK_EXPERTS, Family, build_config, family, is_kind
from tests.grid import few_of

# One family per way of storing: plain, gate and up in one, [in, out] matrices, experts one by one, experts stacked.
WAYS = ("llama", "phi3", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "minimax_m2", "qwen3_next")


def _model(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def _meta(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def _whole(tensor: Tensor) -> Box:
    return Box((0,) * tensor.ndim, tuple(tensor.shape))


def _read_all(folder: Path, meta: PreTrainedModel) -> dict[str, Tensor]:
    wanted = {name: [_whole(entry)] for name, entry in meta.state_dict().items()}
    return {name: tensor for name, _, tensor in read_weights(folder, meta, wanted)}


def _folder_tensors(folder: Path) -> dict[str, Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


def _assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [n for n in theirs if ours[n].dtype != theirs[n].dtype or not torch.equal(ours[n], theirs[n])]
    assert different == []


def _by_layer(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """The state dict in pieces: each layer, then all else; a tied weight once."""
    pieces: dict[str, dict[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if name not in model.all_tied_weights_keys:
            layer = next((part for part in name.split(".") if part.isdigit()), "rest")
            pieces.setdefault(layer, {})[name] = tensor
    yield from pieces.values()


@pytest.mark.parametrize(
    "family", few_of((*FAMILIES, *RECURRENT[1:], *STOCK_EXPERTS), is_kind), ids=lambda family: family.name
)
def test_a_folder_of_save_pretrained_is_read_and_ours_equals_it_and_loads(family: Family, tmp_path: Path) -> None:
    config = build_config(family)
    model = _model(config)
    model.save_pretrained(tmp_path / "theirs")
    _assert_equal(_read_all(tmp_path / "theirs", _meta(config)), model.state_dict())
    write_weights(tmp_path / "ours", _meta(config), _by_layer(model), torch.float32)
    _assert_equal(_folder_tensors(tmp_path / "ours"), _folder_tensors(tmp_path / "theirs"))
    configs = [json.loads((tmp_path / side / "config.json").read_text()) for side in ("ours", "theirs")]
    assert configs[0] == configs[1] | {"use_cache": configs[0].get("use_cache")}
    _assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("name", "tied"), few_of(product(WAYS, (True, False)), lambda name, tied: tied == (name in ("llama", "gpt2")))
)
def test_sharded_folder_reads_and_writes_the_same(name: str, tied: bool, tmp_path: Path) -> None:
    config = build_config(family(name), tie_word_embeddings=tied)
    model = _model(config)
    write_weights(tmp_path / "ours", _meta(config), _by_layer(model), torch.float32, max_shard_bytes=30_000)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 2
    for folder in ("ours", "theirs"):
        _assert_equal(_read_all(tmp_path / folder, _meta(config)), model.state_dict())
    _assert_equal(AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict(), model.state_dict())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel, dict[str, Tensor]]]:
    """Per way of storing: a folder, its meta model and its values."""
    made = {}
    for name in WAYS:
        config = build_config(family(name))
        model = _model(config)
        folder = tmp_path_factory.mktemp(name)
        model.save_pretrained(folder)
        made[name] = (folder, _meta(config), model.state_dict())
    return made


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_boxes_read_as_slices_of_the_state_dict(data: st.DataObject, folders: dict) -> None:
    folder, meta, values = folders[data.draw(st.sampled_from(WAYS))]
    names = data.draw(st.lists(st.sampled_from(sorted(values)), min_size=1, max_size=4, unique=True))
    wanted: dict[str, list[Box]] = {}
    for name in names:
        for _ in range(data.draw(st.integers(1, 3))):
            cuts = [sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in values[name].shape]
            box = Box(tuple(a for a, _ in cuts), tuple(b - a for a, b in cuts))
            if box.numel:
                wanted.setdefault(name, []).append(box)
    read = list(read_weights(folder, meta, wanted))
    assert sorted((name, box.offsets) for name, box, _ in read) == sorted(
        (name, box.offsets) for name, boxes in wanted.items() for box in boxes
    )
    for name, box, tensor in read:
        assert torch.equal(tensor, values[name][box.slices()])


def test_only_the_needed_bytes_are_read(tmp_path: Path) -> None:
    """One expert of 32 and some rows of an embedding, out of 3 GB: 100 MB of memory are enough."""
    config = build_config(
        family("mixtral"), hidden_size=4096, intermediate_size=2048, num_hidden_layers=1, num_local_experts=32
    )
    meta = _meta(config)
    plan_files(tmp_path, to_checkpoint(meta, meta.state_dict()), max_file_bytes=10**12)
    wanted = {
        "model.layers.0.mlp.experts.gate_up_proj": [Box((5, 0, 0), (1, 4096, 4096))],
        "model.embed_tokens.weight": [Box((3, 0), (2, 4096))],
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = [(name, tuple(tensor.shape)) for name, _, tensor in read_weights(tmp_path, meta, wanted)]
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert sizes == [(name, boxes[0].sizes) for name, boxes in wanted.items()]
    assert grown_kib < 400 * 1024


def test_expert_rows_need_only_their_experts_keys() -> None:
    meta = _meta(build_config(family("mixtral")))
    assemblies, unwanted = match_keys(meta, to_checkpoint(meta, meta.state_dict()))
    assembly = assemblies["model.layers.1.mlp.experts.gate_up_proj"]
    assert unwanted == []
    assert [key for _, key in assembly.rows(1, 3).sources] == [
        f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.weight" for part in ("w1", "w3") for expert in (1, 2)
    ]


@pytest.mark.parametrize("stored", ["lm_head.weight", "model.embed_tokens.weight"])
def test_tied_weight_is_found_under_either_name(stored: str, tmp_path: Path) -> None:
    config = build_config(family("llama"), tie_word_embeddings=True)
    model = _model(config)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[stored] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    _assert_equal(_read_all(tmp_path, _meta(config)), model.state_dict())


def test_tied_copies_that_differ_are_refused(tmp_path: Path) -> None:
    _model(build_config(family("llama"), tie_word_embeddings=False)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"(?s)lm_head.weight.*model.config.tie_word_embeddings=false"):
        _read_all(tmp_path, _meta(build_config(family("llama"), tie_word_embeddings=True)))


def test_folder_of_the_headless_model_reads_when_the_head_is_tied(tmp_path: Path) -> None:
    config = build_config(family("llama"), tie_word_embeddings=True)
    model = _model(config)
    model.model.save_pretrained(tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    _assert_equal(_read_all(tmp_path, _meta(config)), model.state_dict())

    with pytest.raises(ModelError, match=r"missing \(1\):\n    lm_head.weight"):
        _read_all(tmp_path, _meta(build_config(family("llama"), tie_word_embeddings=False)))


def test_all_differences_are_named_at_once(tmp_path: Path) -> None:
    _model(build_config(family("llama"), num_hidden_layers=4, intermediate_size=64)).save_pretrained(tmp_path)
    meta = _meta(build_config(family("llama"), attention_bias=True))
    with pytest.raises(ModelError) as caught:
        _read_all(tmp_path, meta)
    text = str(caught.value)
    assert str(tmp_path) in text
    assert "missing (12)" in text
    assert "model.layers.2.self_attn.o_proj.bias" in text
    assert "not of this model (9)" in text
    assert "model.layers.3.mlp.up_proj.weight" in text
    assert "model.layers.0.mlp.down_proj.weight: [32, 64], the model has [32, 56]" in text


def test_another_number_of_experts_is_named_with_both_shapes(tmp_path: Path) -> None:
    _model(build_config(family("mixtral"), num_local_experts=6)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"experts.down_proj: \[6, 32, 56\], the model has \[4, 32, 56\]"):
        _read_all(tmp_path, _meta(build_config(family("mixtral"))))


def test_another_vocabulary_says_how_to_set_it(tmp_path: Path) -> None:
    _model(build_config(family("llama"), vocab_size=101)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model.config.vocab_size=101"):
        _read_all(tmp_path, _meta(build_config(family("llama"))))


def test_long_lists_of_names_stay_on_one_screen(tmp_path: Path) -> None:
    _model(build_config(family("llama"), num_hidden_layers=9)).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"and 34 more") as caught:
        _read_all(tmp_path, _meta(build_config(family("llama"))))
    assert len(str(caught.value).splitlines()) < 30


def test_unreadable_folders_say_which_file_and_what_to_do(tmp_path: Path) -> None:
    config = build_config(family("llama"))
    meta = _meta(config)
    with pytest.raises(ModelError, match="no weights"):
        _read_all(tmp_path, meta)
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model.bin.*save_pretrained"):
        _read_all(tmp_path, meta)
    _model(config).save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ModelError, match=rf"{shard.name} is missing or damaged"):
        _read_all(tmp_path, meta)
    shard.unlink()
    with pytest.raises(ModelError, match=rf"{shard.name} is missing or damaged"):
        _read_all(tmp_path, meta)
    (tmp_path / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ModelError, match="no index"):
        _read_all(tmp_path, meta)


def test_quantized_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="quantized by fp8"):
        _read_all(tmp_path, _meta(build_config(family("llama"))))


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next"])
def test_written_in_bf16_equals_save_pretrained_of_the_model_in_bf16(name: str, tmp_path: Path) -> None:
    config = build_config(family(name))
    model = _model(config)
    write_weights(tmp_path / "ours", _meta(config), _by_layer(model), torch.bfloat16)
    model.save_pretrained(tmp_path / "fp32")
    AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=torch.bfloat16).save_pretrained(tmp_path / "theirs")
    _assert_equal(_folder_tensors(tmp_path / "ours"), _folder_tensors(tmp_path / "theirs"))
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_switches_the_cache_on_and_leaves_the_model_alone(tmp_path: Path) -> None:
    config = build_config(family("llama"), use_cache=False)
    meta = _meta(config)
    write_weights(tmp_path / "out", meta, _by_layer(_model(config)), torch.float32)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["use_cache"] is True
    assert meta.config.use_cache is False


def test_writing_holds_one_unit(tmp_path: Path) -> None:
    config = build_config(family("mixtral"))
    model = _model(config)
    earlier: list[weakref.ref] = []

    def units() -> Iterator[dict[str, Tensor]]:
        for unit in _by_layer(model):
            assert [reference for reference in earlier if reference() is not None] == []
            copies = {name: tensor.clone() for name, tensor in unit.items()}
            earlier.extend(weakref.ref(tensor) for tensor in copies.values())
            yield copies
            del copies

    write_weights(tmp_path / "out", _meta(config), units(), torch.float32)
    assert len(earlier) == len(model.state_dict())


def test_interrupted_writing_leaves_nothing(tmp_path: Path) -> None:
    model = _model(build_config(family("llama")))

    def units() -> Iterator[dict[str, Tensor]]:
        yield next(_by_layer(model))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_weights(tmp_path / "out", _meta(model.config), units(), torch.float32)
    assert list(tmp_path.iterdir()) == []


def test_a_unit_left_out_is_noticed(tmp_path: Path) -> None:
    model = _model(build_config(family("llama")))
    units = [unit for unit in _by_layer(model) if "model.layers.2.mlp.up_proj.weight" not in unit]
    with pytest.raises(AssertionError, match=r"model.layers.2.mlp"):
        write_weights(tmp_path / "out", _meta(model.config), units, torch.float32)


def test_existing_folder_and_full_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(build_config(family("llama")))
    (tmp_path / "config.json").touch()
    with pytest.raises(ModelError, match="exists already"):
        write_weights(tmp_path, _meta(model.config), _by_layer(model), torch.float32)
    usage = shutil.disk_usage(tmp_path)._replace(free=9)
    monkeypatch.setattr(safetensors_files.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ModelError, match=r"9 bytes free, the weights need [\d,]+"):
        write_weights(tmp_path / "out", _meta(model.config), _by_layer(model), torch.float32)
    assert not (tmp_path / "out").exists()


def test_resolve_folder_takes_a_folder_as_it_is(tmp_path: Path) -> None:
    assert resolve_folder(str(tmp_path)) == tmp_path


def test_resolve_folder_finds_a_hub_name_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0123abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve_folder("owner/name") == snapshot


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("owner/absent", "hf download owner/absent"),
        ("/no/such/folder", "no folder here"),
        ("no:such", "no folder here"),
    ],
)
def test_resolve_folder_without_folder_or_hub_says_what_to_do(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=says):
        resolve_folder(name)
