"""Checksums of token stores: bytes that rot are an error with the file's name before anything is trained on them."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from framework.commands.inspect import find_damage, inspect_store
from framework.data import store as store_module
from framework.data.pack import Packer
from framework.data.prepare import prepare
from framework.data.prepared import Prepared, find_prepared, open_found
from framework.data.store import BLOCK_BYTES, CHECKSUMS_FILE, StoreMeta, open_stream
from framework.errors import EXIT_DONE, EXIT_USER, DamagedStore, DataError
from framework.recipe.schema import Recipe
from tests.unit.test_data_prepare import build, make_recipe, make_texts, read_tree, write_jsonl


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a store of five blocks of tokens to train on."""
    place = tmp_path_factory.mktemp("checksums")
    source = write_jsonl(place / "a.jsonl", make_texts(2500, num_words=60))
    build(make_recipe(place / "tokens", source))
    return place


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> tuple[Recipe, Path]:
    """A recipe, and the folder of a copy of its store."""
    shutil.copytree(whole / "tokens", tmp_path / "tokens")
    return make_recipe(tmp_path / "tokens", whole / "a.jsonl"), next((tmp_path / "tokens").glob("s0-*"))


def flip(path: Path, offset: int) -> None:
    """Flip a bit of the byte at `offset`, from the end where it is negative."""
    with open(path, "r+b") as file:
        file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def open_store(recipe: Recipe) -> Prepared:
    return open_found(find_prepared(recipe))


def read_all(prepared: Prepared, mode: str = "documents") -> None:
    """Pack every sample of the training split, in one order of many."""
    stream = prepared.sources[0].streams["train"]
    packer = Packer([stream], 64, mode, prepared.eos_id)
    samples = np.random.default_rng(0).permutation(stream.num_tokens // 64)
    packer.pack(np.zeros_like(samples), samples)


@pytest.mark.parametrize("offset", [0, 3 * BLOCK_BYTES - 1, 3 * BLOCK_BYTES, -1])
def test_a_flipped_bit_of_tokens_is_an_error_when_its_block_is_first_read(
    store: tuple[Recipe, Path], offset: int
) -> None:
    recipe, folder = store
    path = folder / "train.tokens"
    flip(path, offset)
    stream = open_store(recipe).sources[0].streams["train"]
    block = (offset if offset >= 0 else path.stat().st_size + offset) // BLOCK_BYTES
    tokens_per_block = BLOCK_BYTES // 2
    for other in range(-(-stream.num_tokens // tokens_per_block)):
        read = (other * tokens_per_block + 10, other * tokens_per_block + 20)
        if other != block:
            assert stream.read(*read).size
    for read in ((block * tokens_per_block + 10, block * tokens_per_block + 20), (0, stream.num_tokens)):
        with pytest.raises(
            DamagedStore, match=rf"train.tokens: bytes .*\(block {block}\).*delete the folder"
        ) as caught:
            stream.read(*read)
    assert caught.value.exit_code == EXIT_USER


def test_a_block_is_hashed_once_in_a_process(store: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    prepared, hashed = open_store(store[0]), []
    hash_block = store_module.hash_block
    monkeypatch.setattr(store_module, "hash_block", lambda data: hashed.append(len(data)) or hash_block(data))
    read_all(prepared)
    read_all(prepared)
    sizes = [(store[1] / name).stat().st_size for name in ("train.tokens", "train.ends")]
    assert sum(hashed) == sum(sizes)
    assert len(hashed) == sum(-(-size // BLOCK_BYTES) for size in sizes) > 5


@pytest.mark.parametrize("document", [0, 1000, -1])
@pytest.mark.parametrize("byte", [0, 6])
def test_a_flipped_bit_of_ends_is_an_error_however_it_misleads_the_search(
    store: tuple[Recipe, Path], document: int, byte: int
) -> None:
    recipe, folder = store
    flip(folder / "train.ends", 8 * document + byte)
    with pytest.raises(DamagedStore, match=r"train.ends: bytes 0 to"):
        read_all(open_store(recipe))
    read_all(open_store(recipe), "concat")  # which reads no ends


@pytest.mark.parametrize("name", ["store.json", "validation.counts", CHECKSUMS_FILE])
@pytest.mark.parametrize("harm", ["flip", "halve", "empty", "delete"])
def test_a_damaged_small_file_is_named_and_prepare_makes_it_again(
    store: tuple[Recipe, Path], whole: Path, name: str, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, folder = store
    size = (folder / name).stat().st_size
    if harm == "flip":
        flip(folder / name, size - 20)
    elif harm == "delete":
        (folder / name).unlink()
    else:
        os.truncate(folder / name, size // 2 if harm == "halve" else 0)
    with pytest.raises(DataError, match=name if (folder / "store.json").exists() else "not prepared"):
        find_prepared(recipe)
    prepare(recipe)
    assert (name, harm) == ("store.json", "delete") or name in capsys.readouterr().err
    assert read_tree(folder.parent) == read_tree(whole / "tokens")


def test_a_store_that_is_made_again_is_verified(store: tuple[Recipe, Path]) -> None:
    recipe, folder = store
    flip(folder / "train.tokens", 1000)
    (folder / "store.json").unlink()
    with pytest.raises(DamagedStore, match=r"train.tokens: bytes .* are not as they were written"):
        prepare(recipe)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "info.json"])
@pytest.mark.parametrize("harm", ["flip", "halve", "empty", "delete"])
def test_a_damaged_tokenizer_of_the_stores_is_named(store: tuple[Recipe, Path], name: str, harm: str) -> None:
    recipe, folder = store
    path = next(folder.parent.glob("tokenizer-*")) / name
    size = path.stat().st_size
    if harm == "flip":
        flip(path, size // 2)
    elif harm == "delete":
        path.unlink()
    else:
        os.truncate(path, size // 2 if harm == "halve" else 0)
    with pytest.raises(Exception, match=r"tokenizer") as caught:
        find_prepared(recipe)
    assert getattr(caught.value, "exit_code", None) == EXIT_USER


def test_inspect_names_every_damaged_block(store: tuple[Recipe, Path], capsys: pytest.CaptureFixture[str]) -> None:
    _, folder = store
    assert inspect_store(folder) == EXIT_DONE
    assert "every checksum fits" in capsys.readouterr().out
    flip(folder / "train.tokens", 0)
    flip(folder / "train.tokens", 2 * BLOCK_BYTES)
    flip(folder / "validation.ends", 0)
    meta = StoreMeta.read(folder)
    assert meta is not None
    assert [message.partition(":")[0].rpartition("/")[2] for message in find_damage(folder, meta)] == [
        *("train.tokens", "train.tokens", "validation.ends"),
    ]
    assert inspect_store(folder) == EXIT_USER
    assert capsys.readouterr().out.count("DAMAGED") == 3


def test_a_checked_stream_is_the_stream(store: tuple[Recipe, Path]) -> None:
    _, folder = store
    meta = StoreMeta.read(folder)
    assert meta is not None
    stream = open_stream(folder, meta, "train")
    assert stream.read(0, stream.num_tokens).tolist() == np.fromfile(folder / "train.tokens", np.uint16).tolist()
    assert stream.read(5, 5).size == 0
    ends = np.fromfile(folder / "train.ends", np.int64)
    for start, stop in ((0, stream.num_tokens), (ends[0], ends[1]), (ends[0] - 1, ends[0]), (ends[-1], ends[-1] + 9)):
        expected = ends[(ends > start) & (ends <= stop)] - start
        assert stream.ends_within(int(start), int(stop)).tolist() == expected.tolist()
