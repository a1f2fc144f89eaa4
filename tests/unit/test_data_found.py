"""Files found in folders and by globs: what is data, and that whatever else lies beside it is named and never trained on."""

import errno
import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from framework.commands.prepare import prepare_command
from framework.data.kinds import find_foreign
from framework.data.prepare import prepare
from framework.data.records import plan_shards, read_records
from framework.data.source import list_files
from framework.errors import DataError
from framework.recipe.schema import Data, Recipe, Source

LINE = b'{"text": "good", "body": "good"}\n'


def write(folder: Path, name: str, data: bytes = LINE) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)


def taken(path: Path | str, format: str = "auto", field: str = "text") -> list[str]:
    return [file.name for file in list_files("s", Source(str(path), format=format, field=field)).files]  # type: ignore[arg-type]


def read_texts(path: Path | str, format: str = "auto", field: str = "text") -> list[str | None]:
    source = Source(str(path), format=format, field=field)  # type: ignore[arg-type]
    shards = plan_shards(list_files("s", source).files)
    return [record.text for shard in shards for span in shard for record in read_records(span, field)]


@pytest.mark.parametrize(
    "beside",
    [
        "test.jsonl",
        "validation.jsonl",
        "dev.jsonl",
        "eval.jsonl.gz",
        "c4-val-00000-of-00002.jsonl",
        "test1.jsonl",
        "testset.jsonl",
        "held_out.jsonl",
        "test/a.jsonl",
        "en/validation/a.jsonl",
        "README.md",
        "LICENSE",
        "LICENSE.txt",
        ".gitattributes",
        ".hidden.jsonl",
        ".git/config.jsonl",
        "dataset_info.json",
        "dataset_infos.json",
        "state.json",
        "_SUCCESS",
        "._part.jsonl",
        ".part-0.jsonl.crc",
        "_temporary/0/part.jsonl",
        "part-00000",
        "a.jsonl.bak",
        "a.jsonl~",
        "a.jsonl.tmp",
        "a.xml",
        "a.yaml",
        "a.ipynb",
        "a.png",
        "a.pdf",
        "a.zip",
        "a.rar",
        "a.npy",
        "a.safetensors",
        "a.pkl",
        "a.jsonl.gz.gz",
        "a.jsonl.lz4",
        "a.parquet.gz",
    ],
)
def test_what_is_no_data_is_left_out_with_a_reason(tmp_path: Path, beside: str) -> None:
    write(tmp_path, "train.jsonl")
    write(tmp_path, beside)
    listing = list_files("s", Source(str(tmp_path)))
    assert [file.name for file in listing.files] == ["train.jsonl"]
    assert listing.left_out
    assert all(beside.startswith(name) for name in listing.left_out)
    assert all(reason not in ("", "None") for reason in listing.left_out.values())


@pytest.mark.parametrize(
    "name", ["latest.jsonl", "contest.jsonl", "devices.jsonl", "evaluate.jsonl", "train-test.jsonl"]
)
def test_words_are_whole_words(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    assert taken(tmp_path) == [name]


def test_a_name_in_the_recipe_is_no_accident(tmp_path: Path) -> None:
    for name in ("test/a.jsonl", "test/train/b.jsonl", "train/c.jsonl", "README.md", "docs/README.md"):
        write(tmp_path, name)
    assert taken(tmp_path / "test") == ["a.jsonl", "train/b.jsonl"]
    assert taken(tmp_path / "test" / "a.jsonl") == ["a.jsonl"]
    assert taken(f"{tmp_path}/test/*.jsonl") == [f"{tmp_path}/test/a.jsonl"]
    assert taken(f"{tmp_path}/*/*.jsonl") == [f"{tmp_path}/train/c.jsonl"]
    assert taken(f"{tmp_path}/**/*.jsonl") == [f"{tmp_path}/train/c.jsonl"]
    assert taken(f"{tmp_path}/**/*.md") == [f"{tmp_path}/README.md", f"{tmp_path}/docs/README.md"]
    with pytest.raises(DataError, match=r"2 held out by its name \(test\): test/a.jsonl"):
        taken(f"{tmp_path}/te*/**")


def test_prose_and_code_are_held_out_only_beside_a_train_part(tmp_path: Path) -> None:
    for name in ("src/eval.py", "src/main.py", "tests/test_main.py", "docs/notes.md", "data.bin", "setup.cfg"):
        write(tmp_path, name, b"text\n")
    assert taken(tmp_path) == ["docs/notes.md", "src/eval.py", "src/main.py", "tests/test_main.py"]
    for name in ("wiki/train.txt", "wiki/valid.txt", "wiki/test.txt"):
        write(tmp_path, name, b"text\n")
    assert taken(tmp_path / "wiki") == ["train.txt"]


def save(folder: Path, **splits: str) -> None:
    made = {name: datasets.Dataset.from_dict({"text": [text]}) for name, text in splits.items()}
    datasets.DatasetDict(made).save_to_disk(str(folder))


def test_of_a_saved_dict_the_train_part_is_read(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    save(tmp_path / "saved", train="good", test="held", unsupervised="other")
    assert read_texts(tmp_path / "saved") == ["good"]
    assert read_texts(f"{tmp_path}/saved/*/*.arrow") == ["good"]
    assert read_texts(f"{tmp_path}/**/*.arrow") == ["good"]
    assert read_texts(tmp_path) == ["good"]
    assert read_texts(tmp_path / "saved" / "test") == ["held"]
    save(tmp_path / "none", calibration="held", other="held")
    with pytest.raises(DataError, match=r"not the train split of a DatasetDict but calibration: calibration/data"):
        taken(tmp_path / "none")


def test_caches_and_indices_beside_a_saved_set_are_no_documents(tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": ["good"]}).save_to_disk(str(tmp_path / "saved"))
    data = (tmp_path / "saved" / "data-00000-of-00001.arrow").read_bytes()
    for name in ("cache-0123456789abcdef.arrow", "cache-1_00000_of_00002.arrow", "indices.arrow", "tmpabc.arrow"):
        (tmp_path / "saved" / name).write_bytes(data)
    assert read_texts(tmp_path / "saved") == read_texts(f"{tmp_path}/saved/*.arrow") == ["good"]
    assert len(list_files("s", Source(str(tmp_path / "saved"))).left_out) == 6


def test_linked_folders_are_read_once_and_circles_end(tmp_path: Path) -> None:
    write(tmp_path, "elsewhere/b.jsonl")
    write(tmp_path, "data/a.jsonl")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")
    for number in range(8):  # glob would go round in these for ever
        (tmp_path / "data" / f"circle{number}").symlink_to(tmp_path / "data")
    (tmp_path / "data" / "c.jsonl").symlink_to("a.jsonl")
    (tmp_path / "data" / "gone.jsonl").symlink_to("nowhere.jsonl")
    assert taken(tmp_path / "data") == ["a.jsonl", "linked/b.jsonl"]
    assert taken(f"{tmp_path}/data/**/*.jsonl") == [f"{tmp_path}/data/{name}" for name in ("a.jsonl", "linked/b.jsonl")]
    left_out = list_files("s", Source(str(tmp_path / "data"))).left_out
    assert left_out == {"c.jsonl": "the same file as a.jsonl", "gone.jsonl": "no regular file"}


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a.jsonl")
    write(tmp_path, "locked/b.jsonl")
    scan = os.scandir

    def refuse(path: str) -> Any:  # the tests may run as root, to whom no folder is locked
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    for path in (str(tmp_path), f"{tmp_path}/**/*.jsonl"):
        with pytest.raises(DataError, match=r"data.sources.s.path=.*Permission denied: .*locked"):
            taken(path)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonlines", LINE),
        ("a.ndjson", LINE),
        ("A.JSONL", LINE),
        ("a.json.1", LINE),
        ("a.jsonl.1.gz", gzip.compress(LINE, mtime=0)),
        ("A.JSONL.GZ", gzip.compress(LINE, mtime=0)),
        ("a.csv", b"id,body,text\n1,good,x\n"),
        ("a.csv.gz", gzip.compress(b"\xef\xbb\xbfbody,text\r\ngood,x\r\n", mtime=0)),
        ("a.tsv", b"id\tbody\n1\tgood\n"),
    ],
)
def test_records_of_other_endings_are_read_by_their_field(tmp_path: Path, name: str, data: bytes) -> None:
    write(tmp_path, name, data)
    assert read_texts(tmp_path / name, field="body") == read_texts(tmp_path, field="body") == ["good"]


def test_a_cell_may_have_quotes_line_ends_and_any_length(tmp_path: Path) -> None:
    long = "x" * 200_000
    (tmp_path / "a.csv").write_text(f'text,id\n"two\nlines, ""quoted""",1\n\n{long},2\n')
    assert read_texts(tmp_path / "a.csv") == ['two\nlines, "quoted"', long]
    with pytest.raises(DataError, match=r"a.csv: no field `body`.*one of: text, id"):
        read_texts(tmp_path / "a.csv", field="body")


@pytest.mark.parametrize("name", ["part-00000", "a.dat", "a.jsonl.bak", "a.log.old", "data.gz"])
def test_a_named_file_of_unknown_ending_is_read_only_under_a_format(tmp_path: Path, name: str) -> None:
    write(tmp_path, name, gzip.compress(LINE, mtime=0) if name.endswith(".gz") else LINE)
    with pytest.raises(DataError, match=r"tells no format; it begins like JSON lines.*data.sources.s.format"):
        taken(tmp_path / name)
    assert read_texts(tmp_path / name, "jsonl") == ["good"]
    with pytest.raises(DataError, match=r"no format known for .*begins like JSON lines"):
        taken(tmp_path)


def test_spark_output_is_read_under_a_format(tmp_path: Path) -> None:
    for name in ("part-00000", "part-00001", "_SUCCESS", ".part-00000.crc", "_temporary/part-00002"):
        write(tmp_path, name)
    assert taken(tmp_path, "jsonl") == ["part-00000", "part-00001"]
    table = pyarrow.table({"text": ["good"]})
    pyarrow.parquet.write_table(table, tmp_path / "part")
    assert read_texts(tmp_path / "part", "parquet") == ["good"]
    with pytest.raises(DataError, match=r"begins like parquet: set format=parquet"):
        taken(tmp_path / "part")


def test_a_field_is_not_looked_for_in_prose(tmp_path: Path) -> None:
    write(tmp_path, "a.txt", b"id,body\n1,x\n")
    for path in (tmp_path, tmp_path / "a.txt", f"{tmp_path}/*.txt"):
        with pytest.raises(DataError, match=r"data.sources.s.field=body, but a.txt is plain text"):
            taken(path, field="body")
    assert read_texts(tmp_path / "a.txt", "csv", "body") == ["x"]
    assert read_texts(tmp_path / "a.txt", "text", "body") == ["id,body\n1,x\n"]


@pytest.mark.parametrize("format", ["auto", "text"])
@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (gzip.compress(LINE, mtime=0), "gzip data"),
        (b"PK\x03\x04" + bytes(50), "a zip archive"),
        (b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n", "a PDF"),
        (b"\x89PNG\r\n\x1a\n" + bytes(50), "a PNG image"),
        (pickle.dumps({"text": "x"}, protocol=4), "a pickle"),
        (np.arange(100.0).tobytes(), "binary data"),
        ("text in two bytes\n".encode("utf-16-le"), "UTF-16LE"),
        ("text in two bytes\n".encode("utf-16-be"), "UTF-16BE"),
        ("текст, два байта\n".encode("utf-16-le"), "UTF-16LE"),
        ("text in four bytes\n".encode("utf-32-le"), "UTF-32LE"),
        ("текст".encode("utf-32-be"), "UTF-32BE"),
        ("with a mark".encode("utf-16"), "UTF-16 text"),
        ("with a mark".encode("utf-32"), "UTF-32 text"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a Git LFS pointer"),
    ],
)
def test_first_bytes_refuse_what_the_ending_promised(tmp_path: Path, data: bytes, seen: str, format: str) -> None:
    for name in ("a.txt", "a.jsonl", "a.csv", "a.json"):
        write(tmp_path, f"{name}/{name}", data)
        with pytest.raises(DataError, match=rf"{name}: .* begins like {seen}"):
            read_texts(tmp_path / name / name, format)


@pytest.mark.parametrize("data", [LINE, LINE + LINE, b'[\n {"text": "x"}\n]', b"\xef\xbb\xbf" + LINE])
def test_json_with_the_ending_of_prose_is_refused_unless_the_recipe_says_text(tmp_path: Path, data: bytes) -> None:
    write(tmp_path, "a.txt", data)
    with pytest.raises(DataError, match=r"plain text by its ending, but it begins like .*JSON.*format=jsonl"):
        read_texts(tmp_path / "a.txt")
    assert read_texts(tmp_path / "a.txt", "text") == [data.decode("utf-8-sig")]
    write(tmp_path, "b.py", b'{\n    "name": 1,\n}\n')
    assert read_texts(tmp_path / "b.py") == ['{\n    "name": 1,\n}\n']


def test_text_of_any_script_is_text() -> None:
    for text in (
        "plain",
        "Привет мир",
        "नमस्ते",
        "汉字文本",
        "שלום",
        "été\tà\r\n",
        "\x1b[1mbold\x1b[0m\f",
        "a\0" + "b" * 20,
        "",
    ):
        assert find_foreign(text.encode()) is None


@pytest.mark.parametrize("layout", ["stream", "file", "feather"])
def test_arrow_files_of_every_layout(tmp_path: Path, layout: str) -> None:
    table = pyarrow.table({"id": range(5), "text": [f"text {number}" for number in range(5)]})
    path = tmp_path / ("a.feather" if layout == "feather" else "a.arrow")
    if layout == "feather":
        pyarrow.feather.write_feather(table, path, chunksize=2)
    else:
        new = pyarrow.ipc.new_stream if layout == "stream" else pyarrow.ipc.new_file
        with pyarrow.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    assert read_texts(path) == [f"text {number}" for number in range(5)]


def test_prepare_lists_what_it_left_out_and_the_store_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(40):
        write(tmp_path, f"data/{number}.jsonl", json.dumps({"text": f"text {number}"}).encode())
    for name in ("test.jsonl", "README.md", "_SUCCESS"):
        write(tmp_path, f"data/{name}")
    data = Data(sources={"s": Source(f"{tmp_path}/data")}, root=f"{tmp_path}/tokens", bpe_vocab=300, validation=0.1)
    prepared = prepare(Recipe(data=data), workers=1, progress=False)
    kept = json.loads((prepared.sources[0].folder / "left_out.json").read_text())
    assert kept.keys() == {"test.jsonl", "README.md", "_SUCCESS"}
    prepare_command(Recipe(data=data), workers=1)
    printed = capsys.readouterr().out
    assert "s: read from 40 files; 3 left out (" in printed
    assert "1 held out by its name (test): test.jsonl" in printed


def test_a_source_that_is_refused_is_not_replaced_by_an_old_store(tmp_path: Path) -> None:
    """A store that was made of files that are now refused must not serve, unlike that of files that are gone."""
    write(tmp_path, "data/a.jsonl", b"".join(json.dumps({"text": f"text {n}"}).encode() + b"\n" for n in range(40)))
    data = Data(sources={"s": Source(f"{tmp_path}/data")}, root=f"{tmp_path}/tokens", bpe_vocab=300, validation=0.1)
    prepare(Recipe(data=data), workers=1, progress=False)
    (tmp_path / "data" / "a.jsonl").rename(tmp_path / "data" / "a.xyz")
    with pytest.raises(DataError, match=r"no format known for .xyz: a.xyz"):
        prepare(Recipe(data=data), workers=1, progress=False)
