"""What a checkpoint holds and where: each entry's boxes in the ranks' files, and a hash of every block of every file.

    step-00000100/
        manifest.json       this index; written last, so its presence under a final name means that all else is there
        rank-00000.bin      the elements that rank 0 wrote: entries one after another, each aligned to ALIGNMENT bytes
        rank-00001.bin      ...

An element is found by its place in the *global* tensor, never by the rank that wrote it: that is why any layout loads
what any other has saved. Files are hashed in blocks, so that a reader of a part verifies that part and reads no more.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from framework.errors import CheckpointError
from framework.mesh.box import Box
from framework.mesh.layout import Layout

FORMAT = 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 4 << 20
ALIGNMENT = 64


class DamagedCheckpoint(CheckpointError):
    """The files are not those that were saved: missing, cut or changed. An older checkpoint may still be whole."""


@dataclass(frozen=True, eq=False)
class Entry:
    """A named tensor as one rank holds it: what to save, or where to load to.

    name: such as `weight/model.embed_tokens.weight`. data: 1-D, contiguous, exactly the elements that `layout` owns, in
    the order of its boxes; read when saving, filled in place when loading.
    """

    name: str
    layout: Layout
    data: torch.Tensor

    def __post_init__(self) -> None:
        owned = self.layout.numel_owned
        assert self.data.shape == (owned,), (self.name, self.data.shape, owned)
        assert self.data.is_contiguous(), (self.name, self.data.stride())


@dataclass(frozen=True)
class Piece:
    """A box of an entry, row-major from byte `offset` of `file`."""

    box: Box
    file: str
    offset: int


@dataclass(frozen=True)
class EntryRecord:
    """An entry in the checkpoint: global shape, dtype (`float32`), and the pieces that cover it without overlap."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class FileRecord:
    """A file: its size in bytes and the xxh3 of each of its blocks, taken from memory when it was written."""

    size: int
    block_bytes: int
    hashes: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """All that is known without opening the files. `state` is the caller's; `world` is how many ranks saved."""

    step: int
    world: int
    state: dict[str, Any]
    entries: dict[str, EntryRecord]
    files: dict[str, FileRecord]


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def encode_manifest(manifest: Manifest) -> str:
    """JSON that begins with a hash of the rest, so that a changed manifest is noticed as surely as a changed file."""
    body = json.dumps({"format": FORMAT, **asdict(manifest)})
    return _head(xxhash.xxh3_64_hexdigest(body.encode())) + body + "}"


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint folder `path`. Raises DamagedCheckpoint when it is missing or changed."""
    try:
        text = (path / MANIFEST).read_text()
    except OSError as error:
        raise DamagedCheckpoint(f"{path} has no readable {MANIFEST}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DamagedCheckpoint(f"{path / MANIFEST} was changed after it was written: {error}") from error
    body = text[len(_head("0" * 16)) : -1]
    if text != _head(xxhash.xxh3_64_hexdigest(body.encode())) + body + "}":
        raise DamagedCheckpoint(f"{path / MANIFEST} was cut or changed after it was written: its hash does not fit")
    values = json.loads(body)
    if values["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {values['format']}, this version reads format {FORMAT}")
    return _decode(values)


def verify_sizes(path: Path, manifest: Manifest) -> None:
    """Raise DamagedCheckpoint unless every file is there in its full size; costs one stat per file."""
    for name, record in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{path / name} is missing ({error.strerror})") from error
        if size != record.size:
            raise DamagedCheckpoint(f"{path / name} has {size} bytes, {record.size} were saved")


def _head(digest: str) -> str:
    return f'{{"xxh3": "{digest}", "manifest": '


def _decode(body: dict[str, Any]) -> Manifest:
    def piece(value: dict[str, Any]) -> Piece:
        box = Box(tuple(value["box"]["offsets"]), tuple(value["box"]["sizes"]))
        return Piece(box, value["file"], value["offset"])

    def entry(value: dict[str, Any]) -> EntryRecord:
        return EntryRecord(tuple(value["shape"]), value["dtype"], tuple(map(piece, value["pieces"])))

    def file(value: dict[str, Any]) -> FileRecord:
        return FileRecord(value["size"], value["block_bytes"], tuple(value["hashes"]))

    return Manifest(
        step=body["step"],
        world=body["world"],
        state=body["state"],
        entries={name: entry(value) for name, value in body["entries"].items()},
        files={name: file(value) for name, value in body["files"].items()},
    )
