"""Token ids that other libraries wrote, read where they lie: equal to a reader written here, and trained on in the same order."""

import json
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from framework.data import formats
from framework.data.formats import open_ids
from framework.data.loader import Loader
from framework.data.prepare import prepare
from framework.data.prepared import find_prepared, open_found
from framework.data.source import SourceFile
from framework.errors import DataError
from framework.recipe.check import check_recipe
from framework.recipe.run_rules import token_stores
from framework.recipe.schema import Data, Model, Recipe, Source
from tests.unit.test_data_prepare import build, make_recipe, make_texts, write_jsonl

VOCAB = 300
Documents = list[list[int]]


def make_documents(count: int = 40) -> Documents:
    rng = np.random.default_rng(1)
    return [[*rng.integers(1, VOCAB - 20, rng.integers(1, 30)).tolist(), 0] for _ in range(count)]


def write_megatron(path: Path, documents: Documents, dtype: str = "<u2", code: int = 8, split: bool = False) -> Path:
    """Each document one sequence, or, with `split`, two, the second ones behind all first ones."""
    halves = [(each[: len(each) // 2], each[len(each) // 2 :]) if split else (each,) for each in documents]
    order = [(d, s) for s in range(1 + split) for d in range(len(documents))]
    data, starts = b"", {}
    for d, s in order:
        starts[d, s] = len(data)
        data += np.array(halves[d][s], dtype).tobytes()
    sequences = [(d, s) for d in range(len(documents)) for s in range(1 + split)]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sequences), len(documents) + 1)
    index += np.array([len(halves[d][s]) for d, s in sequences], "<i4").tobytes()
    index += np.array([starts[each] for each in sequences], "<i8").tobytes()
    index += np.arange(0, len(sequences) + 1, 1 + split).astype("<i8").tobytes()
    path.with_suffix(".idx").write_bytes(index)
    path.with_suffix(".bin").write_bytes(data)
    return path.with_suffix(".bin")


def write_datatrove(path: Path, documents: Documents, size: int = 2) -> Path:
    path = path.with_suffix(".ds")
    path.write_bytes(np.concatenate(documents).astype(f"<u{size}").tobytes())
    path.with_name(f"{path.name}.index").write_bytes(
        np.cumsum([len(each) for each in documents]).astype("<u8").tobytes()
    )
    path.with_name(f"{path.name}.metadata").write_text(f"some/tokenizer|{size}\n{sum(map(len, documents))}\n1 K")
    return path


def write_mds(path: Path, documents: Documents, encoding: str = "ndarray:uint16") -> Path:
    """Between a column of text and a number."""
    _, _, dtype = encoding.partition(":")

    def encode(ids: list[int]) -> bytes:
        if encoding == "bytes":
            return np.array(ids, "<i8").tobytes()
        wide = len(ids) > 255
        shape = bytes([1 << 2 | wide]) + struct.pack("<H" if wide else "<B", len(ids))
        return (b"" if dtype else bytes([33])) + shape + np.array(ids, dtype or "<i4").tobytes()

    samples = []
    for number, ids in enumerate(documents):
        text, value = b"x" * (number % 5), encode(ids)
        samples.append(struct.pack("<II", len(text), len(value)) + text + value + struct.pack("<q", number))
    names = {"column_names": ["name", "tokens", "number"], "column_encodings": ["str", encoding, "int"]}
    words = json.dumps({**names, "column_sizes": [None, None, 8], "format": "mds"}).encode()
    first = 4 * (len(samples) + 2) + len(words)
    offsets = first + np.cumsum([0, *(len(each) for each in samples)])
    path = path.with_suffix(".mds")
    path.write_bytes(struct.pack("<I", len(samples)) + offsets.astype("<u4").tobytes() + words + b"".join(samples))
    return path


def write_table(path: Path, documents: Documents, kind: str) -> Path:
    table = pyarrow.table({"tokens": pyarrow.array(documents, pyarrow.list_(pyarrow.int32()))})
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path.with_suffix(".parquet"), row_group_size=7)
        return path.with_suffix(".parquet")
    with (
        pyarrow.OSFile(str(path.with_suffix(".arrow")), "wb") as file,
        (pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file)(file, table.schema) as writer,
    ):
        writer.write_table(table, max_chunksize=7)
    return path.with_suffix(".arrow")


WRITERS: dict[str, tuple[str, Callable[[Path, Documents], Path]]] = {
    "megatron": ("megatron", write_megatron),
    "megatron int32": ("megatron", lambda path, documents: write_megatron(path, documents, "<i4", 4)),
    "megatron of sentences": ("megatron", lambda path, documents: write_megatron(path, documents, split=True)),
    "datatrove": ("datatrove", write_datatrove),
    "datatrove uint32": ("datatrove", lambda path, documents: write_datatrove(path, documents, 4)),
    "mds": ("mds", write_mds),
    "mds of any dtype": ("mds", lambda path, documents: write_mds(path, documents, "ndarray")),
    "mds of bytes": ("mds", lambda path, documents: write_mds(path, documents, "bytes")),
    "parquet": ("ids", lambda path, documents: write_table(path, documents, "parquet")),
    "arrow": ("ids", lambda path, documents: write_table(path, documents, "file")),
    "arrow stream": ("ids", lambda path, documents: write_table(path, documents, "stream")),
}


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_a_file_without_rows_has_no_documents(tmp_path: Path, kind: str) -> None:
    """A writer of many workers leaves some: an empty row group or an empty batch."""
    table = pyarrow.table({"tokens": pyarrow.array([], pyarrow.list_(pyarrow.int32()))})
    path = write_table(tmp_path / "none", [], kind)
    if kind != "parquet":
        with (pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file)(str(path), table.schema) as writer:
            writer.write_batch(pyarrow.RecordBatch.from_pydict({"tokens": []}, table.schema))
    full = write_table(tmp_path / "some", make_documents(3), kind)
    none, some = open_ids([file_of(path, "ids"), file_of(full, "ids")], "tokens", VOCAB)
    assert (none.num_documents, some.num_documents) == (0, 3)


@pytest.mark.parametrize("name", ["megatron", "datatrove", "mds"])
def test_a_file_of_no_documents_has_none(tmp_path: Path, name: str) -> None:
    kind, write = WRITERS[name]
    if name == "datatrove":
        path = tmp_path / "none.ds"
        for each in (path, path.with_name("none.ds.index")):
            each.write_bytes(b"")
    else:
        path = write(tmp_path / "none", [])
    assert open_ids([file_of(path, kind)], "tokens", VOCAB)[0].num_documents == 0


def file_of(path: Path, kind: str) -> SourceFile:
    return SourceFile(path.name, path, kind, 0, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", WRITERS)
def test_ids_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    kind, write = WRITERS[name]
    documents = [*make_documents(), list(range(1, 290))]
    path = write(tmp_path / "a", documents)
    (opened,) = open_ids([file_of(path, kind)], "tokens", VOCAB)
    assert [opened.read(number).tolist() for number in range(opened.num_documents)] == documents


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("bpe")
    return str(build(make_recipe(folder / "tokens", write_jsonl(folder / "a.jsonl", make_texts(60)))).tokenizer)


def import_recipe(root: Path, path: Path, kind: str, tokenizer: str, share: float = 0.2) -> Recipe:
    source = Source(str(path), format=kind, field="tokens")  # type: ignore[arg-type]
    data = Data(sources={"s0": source}, root=str(root), validation=share)
    return Recipe(data=data, model=Model(tokenizer=tokenizer))


@pytest.mark.parametrize("name", ["megatron", "datatrove", "mds", "parquet", "arrow"])
def test_it_is_trained_on_in_place_with_its_borders_and_held_out_whole(
    name: str, tmp_path: Path, tokenizer: str
) -> None:
    kind, write = WRITERS[name]
    first, second = make_documents(30), make_documents(50)[30:]
    (tmp_path / "data").mkdir()
    for number, documents in enumerate((first, second)):
        write(tmp_path / "data" / f"part{number}", documents)
    recipe = import_recipe(tmp_path / "tokens", tmp_path / "data", kind, tokenizer)
    prepare(recipe, 1, progress=False)
    prepared = open_found(find_prepared(recipe))
    source = prepared.sources[0]
    found = {}
    for split, stream in source.streams.items():
        ids = stream.read(0, stream.num_tokens).tolist()
        found[split] = [ids[a:b] for a, b in zip([0, *stream.ends.tolist()], stream.ends.tolist(), strict=False)]
    assert found["validation"]
    whole = first + second
    held_out = [each for each in whole if each in found["validation"]]
    assert found == {"train": [each for each in whole if each not in held_out], "validation": held_out}
    counts = np.fromfile(source.folder / "validation.counts", np.int64)
    assert counts.tolist() == np.bincount(np.concatenate(held_out), minlength=prepared.vocab_size).tolist()
    assert not list((tmp_path / "tokens").rglob("*.tokens"))
    joined = np.concatenate(found["train"])
    with Loader(
        prepared, seed=1, context=9, pack="documents", sequences_per_microbatch=4, num_microbatches=1
    ) as loader:
        for cursor in range(0, 40, 4):
            for row in loader.batch(cursor)[0].input_ids.numpy():
                assert any(
                    np.array_equal(joined[at : at + 9][: len(row)], row[: len(joined[at : at + 9])])
                    for at in range(0, len(joined), 9)
                )


def test_decoded_row_groups_are_bounded_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "KEPT_BYTES", 1)
    original, read = formats._read_group, list[str]()

    def read_group(path: Path, number: int, field: str) -> Any:
        read.append(path.stem)
        return original(path, number, field)

    monkeypatch.setattr(formats, "_read_group", read_group)
    documents = make_documents(3)
    first, second = open_ids(
        [file_of(write_table(tmp_path / name, documents, "parquet"), "ids") for name in "ab"], "tokens", VOCAB
    )
    for opened in (first, first, second, first):
        assert opened.read(2).tolist() == documents[2]
    assert read[-3:] == ["a", "b", "a"]


def test_a_row_group_that_two_threads_ask_for_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the loader and of a validation."""
    original, both = formats._read_group, threading.Barrier(2)

    def read_group(path: Path, number: int, field: str) -> Any:
        with suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # for another thread, which must not come
        return original(path, number, field)

    documents = make_documents(10)
    (opened,) = open_ids([file_of(write_table(tmp_path / "a", documents, "parquet"), "ids")], "tokens", VOCAB)
    monkeypatch.setattr(formats, "_read_group", read_group)  # behind the first group, which is read to open it
    with ThreadPoolExecutor(2) as threads:
        assert [ids.tolist() for ids in threads.map(opened.read, [8, 8])] == [documents[8]] * 2
    assert both.broken


@pytest.mark.parametrize("name", ["megatron", "datatrove"])
def test_another_index_beside_the_same_ids_is_another_store(name: str, tmp_path: Path, tokenizer: str) -> None:
    kind, write = WRITERS[name]
    documents = make_documents(4)
    path = write(tmp_path / "a", documents)
    before = path.stat()
    recipe = import_recipe(tmp_path / "tokens", path, kind, tokenizer, share=0)
    prepare(recipe, 1, progress=False)
    write(tmp_path / "a", [[each for document in documents for each in document]])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DataError, match="changed since"):
        find_prepared(recipe)
    assert prepare(recipe, 1, progress=False).sources[0].meta.splits["train"].num_documents == 1


@pytest.mark.parametrize("name", ["megatron", "datatrove", "mds", "arrow"])
def test_other_ids_of_equal_size_and_time_are_noticed(name: str, tmp_path: Path, tokenizer: str) -> None:
    kind, write = WRITERS[name]
    documents = make_documents(6)
    path = write(tmp_path / "a", documents)
    before = {each: each.stat() for each in tmp_path.iterdir()}
    recipe = import_recipe(tmp_path / "tokens", path, kind, tokenizer, share=0)
    stream = prepare(recipe, 1, progress=False).sources[0].streams["train"]
    assert len(stream.read(0, stream.num_tokens)) == len(stream.read(0, stream.num_tokens))
    longest = max(range(6), key=lambda each: len(documents[each]))
    documents[longest] = [documents[longest][0] ^ 1, *documents[longest][1:]]
    write(tmp_path / "a", documents)
    for each, stat in before.items():
        assert not each.is_file() or each.stat().st_size == stat.st_size
        os.utime(each, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    stream = open_found(find_prepared(recipe)).sources[0].streams["train"]
    with pytest.raises(DataError, match=rf"document {longest + 1} of .*a[.\w]* has other ids"):
        stream.read(0, stream.num_tokens)


def test_empty_documents_are_on_neither_side(tmp_path: Path, tokenizer: str) -> None:
    """Of two different documents one is held out, whatever the hash of an empty one is."""
    for number in range(8):
        path = write_megatron(tmp_path / f"a{number}", [[], [5 + number, 0], [], [6 + number, 0]])
        prepared = prepare(
            import_recipe(tmp_path / "tokens", path, "megatron", tokenizer, share=1e-6), 1, progress=False
        )
        assert [each.num_documents for each in prepared.sources[0].meta.splits.values()] == [1, 1]


def test_bad_input_names_the_key(tmp_path: Path, tokenizer: str) -> None:
    def refuse(path: Path, kind: str, match: str) -> None:
        with pytest.raises(DataError, match=match):
            prepare(import_recipe(tmp_path / "tokens", path, kind, tokenizer), 1, progress=False)

    refuse(
        write_megatron(tmp_path / "a", [[5, 70_000]], "<i4", 4),
        "megatron",
        r"a.bin, document 1: ids from 5 to 70000.*tokenizer",
    )
    broken = write_megatron(tmp_path / "b", make_documents())
    broken.with_suffix(".idx").write_bytes(b"MM")
    refuse(broken, "megatron", r"b.bin: not a file of data.sources.NAME.format=megatron.*does not begin as an index")
    short = write_datatrove(tmp_path / "c", make_documents())
    short.write_bytes(short.read_bytes()[:-2])
    refuse(short, "datatrove", r"c.ds: not a file .* the index ends elsewhere")
    refuse(write_mds(tmp_path / "d", make_documents(), "pkl:"), "mds", r"the encoding of tokens is pkl")
    table = pyarrow.table({"text": ["a"]})
    pyarrow.parquet.write_table(table, tmp_path / "e.parquet")
    refuse(tmp_path / "e.parquet", "ids", r"e.parquet: not a file .* field `tokens` of ids")
    for name, ids, why in (("f", [1, None], "null"), ("g", [1.5], "document 1 is of float64")):
        kind = pyarrow.list_(pyarrow.float64() if name == "g" else pyarrow.int32())
        pyarrow.parquet.write_table(
            pyarrow.table({"tokens": pyarrow.array([[], ids], kind)}), tmp_path / f"{name}.parquet"
        )
        refuse(tmp_path / f"{name}.parquet", "ids", rf"{name}.parquet: not a file .* field `tokens` of ids .*{why}")


def test_a_recipe_that_needs_the_text_of_ids_is_refused() -> None:
    def find(**words: Any) -> set[str]:
        source = Source("/data/a", format="ids", messages=words.pop("messages", None))
        return {problem.key for problem in check_recipe(Recipe(data=Data(sources={"s0": source}, **words)), {})}

    assert "data.sources.s0.format" in find(messages="tokens")
    assert "data.root" in find(root="s3://bucket/a")
    assert "data.bpe_vocab" in find(bpe_vocab=300)
    assert not {"data.sources.s0.format", "data.root", "data.bpe_vocab"} & find()


def test_keys_of_an_object_store_are_refused_where_they_do_nothing_or_harm() -> None:
    def find(reference: str | None = None, **words: Any) -> set[str]:
        recipe = Recipe(data=Data(sources={"s0": Source("/data/a.jsonl")}, **words))
        recipe = replace(recipe, loss=replace(recipe.loss, name="next_token", reference=reference))
        return {problem.key for problem in token_stores.find(recipe)}

    assert find(cache_gb=3.0) == {"data.cache_gb"}
    assert find("RUN", root="gs://bucket/a") == {"loss.reference"}
    assert not find("base", root="gs://bucket/a", cache_gb=3.0) | find("RUN")
