"""Sources: which files a path means, how they are cut, what records come out, and which are bad."""

import bz2
import gzip
import importlib.util
import json
import lzma
import os
import random
import sys
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from framework.data import records as records_module
from framework.data import source as source_module
from framework.data.records import TEXT_DOCUMENT_BYTES, FileSpan, Record, count_rows_before, plan_shards, read_records
from framework.data.source import SourceFile, download_dataset, is_hub_name, list_files
from framework.errors import DataError
from framework.recipe.schema import Source

LINE = b'{"text": "one"}\n'
TEXTS = ["first text", "zweiter Text, mit Umlaut: ä", "third\nwith a line end"]


def read_all(source: Source) -> list[Record]:
    shards = plan_shards(list_files("s", source).files)
    return [record for shard in shards for span in shard for record in read_records(span, source.field)]


def write_lines(path: Path, values: list[object]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def file_of(path: Path, kind: str) -> SourceFile:
    return SourceFile(path.name, path, kind, path.stat().st_size, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.json", "array.json", "a.jsonl.gz", "array.json.gz", "a.parquet", "a.arrow", "saved"]
)
def test_every_format_gives_the_same_texts(tmp_path: Path, name: str) -> None:
    path, rows = tmp_path / name, [{"text": text, "id": n} for n, text in enumerate(TEXTS)]
    table = pyarrow.Table.from_pylist(rows)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if name == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    elif name.endswith(".parquet"):
        pyarrow.parquet.write_table(table, path, row_group_size=2)
    elif name.endswith(".arrow"):
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    else:
        data = (json.dumps(rows, indent=2) if name.startswith("array") else lines).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    records = read_all(Source(str(path)))
    assert [record.text for record in records] == TEXTS
    assert all(record.problem is None for record in records)


def test_a_text_file_is_one_document_and_blank_ones_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\n".encode())
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text(" \n\n")
    (tmp_path / "d.txt").write_text("three")
    (tmp_path / ".hidden.txt").write_text("no")
    assert [record.text for record in read_all(Source(str(tmp_path)))] == ["one\r\ntwo\n", "three"]


def test_a_large_text_file_is_cut_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    text = "".join(f"line {number}: " + "x" * (number % 300) + "\n" for number in range(8000))
    path.write_text(text)
    pieces = [record.text or "" for record in read_all(Source(str(path)))]
    assert "".join(pieces) == text
    assert all(piece.endswith("\n") for piece in pieces)
    assert len(pieces) == -(-len(text) // TEXT_DOCUMENT_BYTES) > 5
    assert max(map(len, pieces)) < TEXT_DOCUMENT_BYTES + 400


@settings(deadline=None)
@given(
    lines=st.lists(st.text(alphabet="aä\u3042 ", max_size=12), max_size=12),
    cuts=st.lists(st.integers(1, 150), max_size=4, unique=True),
    last_newline=st.booleans(),
)
def test_spans_read_every_line_once_and_know_its_row(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], cuts: list[int], last_newline: bool
) -> None:
    path = tmp_path_factory.mktemp("spans") / "a.jsonl"
    data = "\n".join(json.dumps({"text": "t" + line}, ensure_ascii=False) for line in lines) + "\n" * last_newline
    path.write_bytes(data.encode())
    file = file_of(path, "jsonl")
    borders = [0, *sorted(cut for cut in cuts if cut < file.num_bytes), file.num_bytes]
    spans = [FileSpan(file, start, stop, stop - start) for start, stop in pairwise(borders)]
    found = [
        (count_rows_before(span) + record.index, record.text) for span in spans for record in read_records(span, "text")
    ]
    assert found == list(enumerate("t" + line for line in lines))


def test_shards_cover_all_files_and_do_not_cut_small_ones(tmp_path: Path) -> None:
    sizes = [10, 700_000, 5, 3_000_000, 20]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * size)
    spans = [span for shard in plan_shards(list_files("s", Source(str(tmp_path))).files) for span in shard]
    for number, size in enumerate(sizes):
        of_file = [(span.start, span.stop) for span in spans if span.file.name == f"{number}.txt"]
        assert of_file[0][0] == 0
        assert of_file[-1][1] == size
        assert all(left[1] == right[0] for left, right in pairwise(of_file))
    assert sum(span.num_bytes for span in spans) == sum(sizes)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "broken', "not JSON: Invalid control character at column 17"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"content": "x", "id": 1}', "field `text` is missing (there is: content, id)"),
        (b'{"text": 3}', "not a string but int"),
        (b'{"text": null}', "not a string but NoneType"),
        (b'{"text": " \\n"}', "is empty"),
        (b'{"text": "\\ud800"}', "half of a surrogate pair"),
        (b"[1, 2]", "not an object but list"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"text": "x", "id": ' + b'{"a":' * 200_000, "nested too deeply"),
        (b'{"text": "x", "id": ' + b"9" * 4301 + b"}", "limit (4300 digits)"),
        (b'{"text": NaN}', "not a string but float"),
        (b'{"text": "x", "id": 1, "text": "y"}', "field `text` stands there twice"),
        (b'{"text": "x\0y"}', "a NUL at byte 11"),
        ('{"text": "x"}'.encode("utf-16-le"), "a NUL at byte 1"),
        (b"\0" * 4096, "a NUL at byte 0"),
    ],
)
def test_a_bad_line_is_found_with_its_row_and_the_others_are_kept(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n')
    one, bad, two = read_all(Source(str(path)))
    assert (one.text, bad.text, two.text) == ("one", None, "two")
    assert bad.index == 2
    assert bad.problem is not None
    assert problem in bad.problem


def test_what_only_looks_odd_is_read(tmp_path: Path) -> None:
    lines = [
        b'\xef\xbb\xbf{"text": "mark"}',
        b'{"text": "nan", "score": NaN}',
        b'{"text": "\\"text\\": twice", "inner": {"text": 1}}',
        b'{"text": "nul \\u0000"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    texts = [record.text for record in read_all(Source(str(tmp_path / "a.jsonl")))]
    assert texts == ["mark", "nan", '"text": twice', "nul \0"]


@pytest.mark.parametrize(
    ("element", "problem"),
    [
        (b'{"text": "x", "id": ' + b"9" * 4301 + b"}", "limit (4300 digits)"),
        (b'{"text": "\xff"}', "not UTF-8"),
        (b'{"text": "x", "text": "y"}', "stands there twice"),
        (b"3", "not an object but int"),
    ],
    ids=["digits", "bytes", "twice", "number"],
)
def test_a_bad_element_of_an_array_is_a_bad_record(tmp_path: Path, element: bytes, problem: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf[ {"text": "one"} ,\n' + element + b', {"text": "two"}\n]\n')
    one, bad, two = read_all(Source(str(path)))
    assert (one.text, bad.text, two.text, bad.index) == ("one", None, "two", 1)
    assert problem in str(bad.problem)


@pytest.mark.parametrize("rest", [b"[" * 200_000, b'{"te', b'{"text": "x"} {', b'{"text": "x"}] x', b""])
def test_an_array_that_breaks_off_names_the_row(tmp_path: Path, rest: bytes) -> None:
    (tmp_path / "a.json").write_bytes(b'[{"text": "one"},' + rest)
    with pytest.raises(DataError, match=r"a.json, row 2: .*Replace the file"):
        read_all(Source(str(tmp_path / "a.json")))


@pytest.mark.parametrize("data", [b"[]", b" [ ]\n"])
def test_an_empty_array_has_no_records(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.json").write_bytes(data)
    assert read_all(Source(str(tmp_path / "a.json"))) == []


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b"a,b,c", "3 cells in a row of 2 columns"),
        (b"\xff,1", "not UTF-8"),
        (b"a\0b,1", "a NUL in it"),
        (b'"a"b,1', "not csv: ',' expected after"),
        (b" ,1", "is empty"),
    ],
)
def test_a_bad_row_of_a_csv_file_is_found(tmp_path: Path, row: bytes, problem: str) -> None:
    (tmp_path / "a.csv").write_bytes(b"text,id\none,1\n" + row + b"\ntwo,2\n")
    one, bad, two = read_all(Source(str(tmp_path / "a.csv")))
    assert (one.text, bad.text, two.text, bad.index) == ("one", None, "two", 1)
    assert problem in str(bad.problem)


def test_a_line_beyond_the_limit_is_a_bad_record_that_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records_module, "LONGEST_LINE_BYTES", 50)
    long = json.dumps({"text": "x" * 300}).encode()
    lines = b'{"text": "one"}\n' + long + b'\n{"text": "two"}\n'
    for name, data in (("a.jsonl", lines), ("a.jsonl.gz", gzip.compress(lines)), ("end.jsonl", lines + long)):
        (tmp_path / name).write_bytes(data)
        records = read_all(Source(str(tmp_path / name)))
        assert [record.text for record in records[:3]] == ["one", None, "two"]
        assert all(record.text or "a line of more than 50 bytes" in str(record.problem) for record in records)
        assert (
            max(
                len(line)
                for _, line in records_module._read_lines(FileSpan(file_of(tmp_path / name, "jsonl"), 0, 10**6, 0))
            )
            == 51
        )
    (tmp_path / "a.txt").write_bytes(b"short\n" + b"x" * 300)
    assert [record.text for record in read_all(Source(str(tmp_path / "a.txt")))] == [None]
    (tmp_path / "a.csv").write_bytes(b"text\n" + b"x" * 300)
    with pytest.raises(DataError, match=r"a.csv: a line of more than 50 bytes at byte 5"):
        read_all(Source(str(tmp_path / "a.csv")))


def test_bad_rows_of_a_column_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    column = pyarrow.array([b"one", b"\xff", None, b"", b"two"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, row_group_size=2)
    records = read_all(Source(str(path)))
    spans = [span for shard in plan_shards(list_files("s", Source(str(path))).files) for span in shard]
    rows = [count_rows_before(span) + record.index for span in spans for record in read_records(span, "text")]
    assert rows == [0, 1, 2, 3, 4]
    assert [record.text for record in records] == ["one", None, None, None, "two"]
    problems = [record.problem or "" for record in records]
    for problem, expected in zip(problems, ["", "not UTF-8", "NoneType", "empty", ""], strict=True):
        assert expected in problem


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": pyarrow.Codec("zstd").compress}


def compress(data: bytes, ending: str) -> bytes:
    return bytes(memoryview(COMPRESS[ending](data)))


@pytest.mark.parametrize("ending", list(COMPRESS))
def test_compressed_files_of_several_members_are_read_to_the_end(tmp_path: Path, ending: str) -> None:
    members = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
    (tmp_path / f"a.jsonl{ending}").write_bytes(b"".join(compress(member, ending) for member in members))
    assert [record.text for record in read_all(Source(str(tmp_path)))] == TEXTS


@pytest.mark.parametrize("ending", list(COMPRESS))
def test_a_truncated_file_names_the_row_it_was_read_to(tmp_path: Path, ending: str) -> None:
    rng = random.Random(0)
    lines = b"".join(json.dumps({"text": str(rng.random())}).encode() + b"\n" for _ in range(10_000))
    (tmp_path / f"a.jsonl{ending}").write_bytes(
        compress(lines[:200_000], ending) + compress(lines[200_000:], ending)[:-9]
    )
    with pytest.raises(DataError, match=rf"a.jsonl{ending}: cannot be read behind row [1-9]\d+ \(") as caught:
        read_all(Source(str(tmp_path)))
    assert "Replace the file" in str(caught.value)


def test_a_zstd_window_that_takes_a_library_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    window = 20 << 3  # 2^(10 + 20) bytes, as `zstd --long=30` writes
    frame = b"\x28\xb5\x2f\xfd\x00" + bytes([window]) + ((len(LINE) << 3) | 1).to_bytes(3, "little") + LINE
    (tmp_path / "a.jsonl.zst").write_bytes(frame)
    for name in ("compression.zstd", "backports.zstd"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        DataError, match=r"a.jsonl.zst: compressed with a window above 128 MiB .*pip install backports.zstd"
    ):
        read_all(Source(str(tmp_path)))
    monkeypatch.undo()
    if importlib.util.find_spec("backports") or sys.version_info >= (3, 14):
        assert [record.text for record in read_all(Source(str(tmp_path)))] == ["one"]


@pytest.mark.parametrize(
    "name", ["a.parquet", "a.arrow", "a.feather", "a.jsonl.gz", "a.jsonl.zst", "a.json.xz", "a.json"]
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(b'{"text": "one"}\n' * 1000)[:-20])
    else:
        path.write_bytes(b'[{"text": "one"}, {"te' * 20)
    with pytest.raises(DataError, match=name) as caught:
        read_all(Source(str(path)))
    assert "Replace the file" in str(caught.value)


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_offsets_that_leave_the_data_are_damage_and_no_crash(tmp_path: Path, kind: pyarrow.DataType) -> None:
    """pyarrow itself follows them, to a segmentation fault of the worker."""
    width = np.int32 if kind == pyarrow.string() else np.int64
    offsets = np.array([0, 3, 1 << 30, 6], dtype=width)
    column = pyarrow.Array.from_buffers(kind, 3, [None, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"onetwo")])
    table = pyarrow.table({"text": column})
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match=r"a.arrow: cannot be read behind row 0"):
        read_all(Source(str(tmp_path / "a.arrow")))


def test_a_missing_column_names_those_there_are(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"content": ["x"], "id": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"no field `text`.*content, id"):
        read_all(Source(str(tmp_path / "a.parquet")))


def test_a_missing_path_names_key_and_nearest(tmp_path: Path) -> None:
    write_lines(tmp_path / "corpus_train.jsonl", [{"text": "x"}])
    with pytest.raises(DataError) as caught:
        list_files("web", Source(str(tmp_path / "corpus_trian.jsonl")))
    assert "data.sources.web.path" in str(caught.value)
    assert f"the nearest name there is {tmp_path / 'corpus_train.jsonl'}" in str(caught.value)
    with pytest.raises(DataError, match=str(tmp_path / "corpus_train.jsonl")):
        list_files("web", Source(str(tmp_path / "corpus_trainn" / "deep" / "a.jsonl")))


def test_a_glob_takes_what_matches_and_a_folder_what_is_of_the_format(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_lines(tmp_path / name, [{"text": name}])

    def names(path: Path | str, format: str = "auto") -> list[str]:
        return [Path(file.name).name for file in list_files("s", Source(str(path), format=format)).files]  # type: ignore[arg-type]

    assert names(f"{tmp_path}/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/**/*.jsonl") == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert names(tmp_path, "jsonl") == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert names(tmp_path, "text") == ["notes.txt"]
    with pytest.raises(DataError, match=r"several kinds \(3 jsonl, 1 text\).*data.sources.s.format"):
        names(tmp_path)
    with pytest.raises(DataError, match=r"no files for data.sources.s.format=parquet"):
        names(tmp_path, "parquet")


def test_the_standard_library_is_a_corpus() -> None:
    files = list_files("py", Source("python-stdlib")).files
    names = {file.name for file in files}
    assert {"os.py", "json/__init__.py"} <= names
    assert not [name for name in names if "site-packages" in name or name.startswith("test/")]
    assert sum(file.num_bytes for file in files) > 5_000_000
    assert Path(os.__file__) in {file.path for file in files}


def test_hub_names() -> None:
    names = ("owner/name", "owner/name:config", "HuggingFaceFW/fineweb-edu:sample-10BT", "o/n-v1.5")
    paths = ("data/a.jsonl", "data/a.json.gz", "./data", "../owner/name", "/abs/path", "a/b/c", "name", "*/x")
    assert all(is_hub_name(name) for name in names)
    assert not any(is_hub_name(path) for path in paths)


@pytest.fixture
def offline_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def test_listing_that_takes_long_shows_a_bar(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(source_module, "BAR_DELAY_S", 0.0)
    for n in range(3):
        (tmp_path / f"{n}.txt").write_text("text")
    for path in (str(tmp_path), f"{tmp_path}/*.txt", "python-stdlib"):
        files = list_files("s", Source(path), progress=True).files
        assert "list files: " in capsys.readouterr().err
        assert list_files("s", Source(path)).files == files
        assert plan_shards(files, progress=True) == plan_shards(files)
        assert "plan shards: " in capsys.readouterr().err


@pytest.mark.usefixtures("offline_datasets")
def test_datasets_loads_what_the_hub_format_names(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    write_lines(tmp_path / "set" / "train.jsonl", [{"text": text} for text in TEXTS])
    source = Source(str(tmp_path / "set"), format="hub")
    assert list_files("s", source).files == ()
    shards = plan_shards(download_dataset("s", source))
    records = [record for shard in shards for span in shard for record in read_records(span, "text")]
    assert [record.text for record in records] == TEXTS


@pytest.mark.usefixtures("offline_datasets")
def test_a_hub_dataset_that_does_not_load_names_key_and_fix() -> None:
    with pytest.raises(DataError, match=r"data.sources.web.path=nobody/nothing.*owner/name:configuration"):
        download_dataset("web", Source("nobody/nothing"))
