"""A folder's weights are those that `from_pretrained` takes, or are refused by the names of the files.

Other files lie beside them, an index is stale, names or links lead out of the folder, values are not finite.
"""

import json
import os
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from framework.errors import ModelError
from framework.mesh.layout import Box
from framework.model.load import build_meta
from framework.model.safetensors_files import INDEX, SINGLE, find_files
from framework.model.weights import read_weights
from tests.families import build_config, family

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PROBES = ("model.norm.weight", "lm_head.weight")


@pytest.fixture(scope="module")
def stock() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(build_config(family("llama"), num_hidden_layers=1), dtype=torch.float32)


@pytest.fixture
def folder(tmp_path: Path, stock: PreTrainedModel) -> Path:
    """A folder with a config, and no weights yet."""
    folder = tmp_path / "model"
    stock.config.save_pretrained(folder)
    return folder


def filled(stock: PreTrainedModel, value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, value) for name, tensor in stock.state_dict().items()}


def save(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def write_single(folder: Path, stock: PreTrainedModel) -> None:
    save(folder / SINGLE, filled(stock, 1.0))


def write_shards(folder: Path, stock: PreTrainedModel, index: str = INDEX) -> None:
    items = list(filled(stock, 2.0).items())
    halves = dict(zip(SHARDS, (dict(items[:5]), dict(items[5:])), strict=True))
    for file, tensors in halves.items():
        save(folder / file, tensors)
    weight_map = {name: file for file, tensors in halves.items() for name in tensors}
    (folder / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_bin(folder: Path, stock: PreTrainedModel) -> None:
    torch.save(filled(stock, 3.0), folder / "pytorch_model.bin")


def write_variant(folder: Path, stock: PreTrainedModel) -> None:
    save(folder / "model.fp16.safetensors", filled(stock, 4.0))


def write_named(folder: Path, stock: PreTrainedModel) -> None:
    save(folder / "other.safetensors", filled(stock, 5.0))
    change_config(folder, transformers_weights="other.safetensors")


def write_stale_index(folder: Path, stock: PreTrainedModel) -> None:
    """An index of files that are gone."""
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(stock.state_dict(), "gone.safetensors")})
    )


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def change_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def theirs(folder: Path) -> dict[str, Tensor] | None:
    """Some weights as `from_pretrained` has them; None where it fails."""
    try:
        entries = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    except OSError:
        return None
    return {name: entries[name] for name in PROBES}


def ours(folder: Path, stock: PreTrainedModel) -> dict[str, Tensor]:
    meta = build_meta(stock.config)
    wanted = {name: [Box((0,) * entry.ndim, tuple(entry.shape))] for name, entry in meta.state_dict().items()}
    read = {name: tensor.clone() for name, _, tensor in read_weights(folder, meta, wanted)}
    return {name: read[name] for name in PROBES}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor] | None) -> None:
    assert expected is not None
    assert all(torch.equal(found[name], expected[name]) for name in PROBES)


WRITERS = (write_single, write_shards, write_bin, write_variant, write_named, write_stale_index)
# An index is of shards that are there, or of others.
COMBINATIONS = [
    found
    for count in range(1, len(WRITERS) + 1)
    for found in combinations(WRITERS, count)
    if not {write_shards, write_stale_index} <= set(found)
]


@pytest.mark.parametrize(
    "writers", COMBINATIONS, ids=lambda writers: "+".join(each.__name__.removeprefix("write_") for each in writers)
)
def test_files_are_chosen_as_from_pretrained_chooses(writers: tuple, folder: Path, stock: PreTrainedModel) -> None:
    for write in writers:
        write(folder, stock)
    expected = theirs(folder)
    if expected is None or expected["model.norm.weight"][0] == 3.0:  # a .bin, which transformers unpickles
        with pytest.raises(ModelError, match=r"gone\.safetensors is missing .*index|pytorch_model\.bin|model\.fp16"):
            ours(folder, stock)
    else:
        assert_equal(ours(folder, stock), expected)


def test_an_index_names_files_and_headers_say_what_they_hold(folder: Path, stock: PreTrainedModel) -> None:
    """Keys under another file's name, keys that are not in the index, and keys in two files: the last file counts."""
    write_shards(folder, stock)
    save(folder / SHARDS[1], load_file(folder / SHARDS[1]) | {"model.norm.weight": torch.full((32,), 7.0)})
    change_index(folder, lambda names: names.update({"model.norm.weight": SHARDS[0], "lm_head.weight": SHARDS[0]}))
    change_index(folder, lambda names: names.pop("model.layers.0.mlp.up_proj.weight"))
    assert_equal(ours(folder, stock), theirs(folder))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "{outside}", "link.safetensors", "sub/../../secret.safetensors", "a\0b", ""]
)
def test_an_index_names_files_of_its_folder_alone(name: str, folder: Path, stock: PreTrainedModel) -> None:
    secret = folder.parent / "secret.safetensors"
    save(secret, filled(stock, 9.0))
    (folder / "sub").mkdir()
    (folder / "link.safetensors").symlink_to(secret)
    write_shards(folder, stock)
    name = name.format(outside=secret)
    change_index(folder, lambda names: names.update({"model.norm.weight": name}))
    with pytest.raises(ModelError, match=r"index\.json names .*(outside of the folder|no file's name)"):
        ours(folder, stock)
    (folder / INDEX).unlink()
    change_config(folder, transformers_weights=name)
    if name:  # else none is named
        with pytest.raises(ModelError, match=r"config\.json names .*(outside of the folder|no file's name)"):
            find_files(folder)


def test_a_snapshot_of_the_hub_links_to_its_blobs(tmp_path: Path, folder: Path, stock: PreTrainedModel) -> None:
    snapshot, blobs = tmp_path / "models--o--n" / "snapshots" / "0123", tmp_path / "models--o--n" / "blobs"
    snapshot.mkdir(parents=True)
    write_shards(folder, stock)
    os.rename(folder, blobs)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(os.path.relpath(path, snapshot))
    assert_equal(ours(snapshot, stock), theirs(snapshot))


def test_an_adapter_beside_the_weights_is_refused(folder: Path, stock: PreTrainedModel) -> None:
    write_single(folder, stock)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"adapter_config\.json"):
        ours(folder, stock)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_values_that_are_not_finite_are_refused(
    value: float, dtype: torch.dtype, folder: Path, stock: PreTrainedModel
) -> None:
    write_shards(folder, stock)
    for shard in SHARDS:
        save(folder / shard, {name: tensor.to(dtype) for name, tensor in load_file(folder / shard).items()})
    ours(folder, stock)
    tensors = load_file(folder / SHARDS[1])
    tensors["model.norm.weight"].view(-1)[7:8].copy_(torch.tensor([value]))
    save(folder / SHARDS[1], tensors)
    with pytest.raises(ModelError, match=rf"{SHARDS[1]} has NaN or infinite values in model\.norm\.weight"):
        ours(folder, stock)
