"""Tars of samples: what is in them is what is trained on, compressed or not."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from framework.data.kinds import read_samples
from framework.data.records import FileSpan, read_records
from framework.data.source import list_files
from framework.errors import DataError
from framework.recipe.schema import Source
from tests.unit.test_data_prepare import build, make_recipe, make_texts, read_documents


def pack(members: Sequence[tuple[str, bytes]]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        folder = tarfile.TarInfo("web")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return made.getvalue()


def compress_zstd(data: bytes) -> bytes:
    return bytes(pyarrow.compress(data, "zstd", asbytes=True))


COMPRESSORS: list[tuple[str, Callable[[bytes], bytes]]] = [
    (".tar", bytes), (".tar.gz", gzip.compress), (".tgz", gzip.compress), (".tar.bz2", bz2.compress),
    (".tar.xz", lzma.compress), (".tar.zst", compress_zstd),
]  # fmt: skip


def test_every_sample_is_a_document_however_its_tar_is_compressed(tmp_path: Path) -> None:
    texts, tars = make_texts(10 * len(COMPRESSORS)), tmp_path / "tars"
    tars.mkdir()
    for number, (ending, compress) in enumerate(COMPRESSORS):
        own = texts[10 * number : 10 * (number + 1)]
        members = [(f"web/{n:03}.txt", text.encode()) for n, text in enumerate(own[:5])]
        for n, text in enumerate(own[5:]):
            members += [
                (f"{n}.json", json.dumps({"text": text, "n": n}).encode()),
                (f"{n}.cls", b"7"),
                (f"{n}.jpg", b"\xff\xd8"),
            ]
        (tars / f"{number}{ending}").write_bytes(
            compress(pack([*members, ("__meta.txt", b"x"), ("web/._0.txt", b"x")]))
        )
    prepared = build(make_recipe(tmp_path / "tokens", tars))
    found = read_documents(prepared, "train") + read_documents(prepared, "validation")
    assert sorted(found) == sorted(texts)


def read(path: Path, field: str, beside: Any = None) -> list[Any]:
    (file,) = list_files("s", Source(str(path))).files
    return [each.values or each.text or each.problem for each in read_records(FileSpan(file, 0, 1, 1), field, beside)]


def test_a_sample_is_its_members_side_by_side(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    turns = [{"role": "user", "content": "hi"}]
    members = [("x/0.json", json.dumps({"messages": turns}).encode()), ("x/0.txt", b"a\n"), ("x/0.seg.TXT", b"b")]
    path.write_bytes(
        pack([*members, ("y/0.txt", "\ufeffé".encode()), ("1.txt", b"\xff"), ("2.json", b"{"), ("3.json", b"[1]")])
    )
    assert [list(each) for each in read_samples(path)] == [
        ["messages", "text", "seg.txt"],
        ["text"],
        ["text"],
        ["json"],
        ["json"],
    ]
    assert read(path, "text")[:3] == ["a\n", "é", "field `text` is not a string but bytes"]
    assert read(path, "text")[3] == "field `text` is missing (there is: json)"
    assert read(path, "seg.txt")[0] == "b"
    assert read(path, "messages", ("system",))[0] == {"messages": turns}


@pytest.mark.parametrize("ending", [".tar", ".tar.gz"])
def test_a_tar_that_breaks_off_is_named(tmp_path: Path, ending: str) -> None:
    data = pack([(f"{n}.txt", bytes(str(n), "ascii") * 3000) for n in range(5)])
    data = gzip.compress(data) if ending.endswith("gz") else data
    (tmp_path / f"a{ending}").write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=rf"a{ending}: cannot be read behind row"):
        read(tmp_path / f"a{ending}", "text")


def test_members_without_a_name_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(pack([("/", b"x"), ("", b"x"), ("..", b"x"), ("/abs/a.txt", b"one"), ("../b.txt", b"two")]))
    assert list(read_samples(path)) == [{"text": "one"}, {"text": "two"}]


@pytest.mark.parametrize("cut", [None, 1600], ids=["changed", "cut off"])
def test_a_damaged_header_is_not_the_end(tmp_path: Path, cut: int | None) -> None:
    """Of the second of three members, behind the folder's."""
    path, data = tmp_path / "a.tar", bytearray(pack([(f"{n}.txt", b"x") for n in range(3)]))
    data[1536 + 7] ^= 1
    path.write_bytes(data[:cut])
    with pytest.raises(
        DataError, match=r"a.tar: cannot be read behind row 0 \((bad checksum|truncated header) at byte 1,536\)"
    ):
        read(path, "text")
