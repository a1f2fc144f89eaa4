"""What a checkpoint holds and where, and how it is known to be whole.

    step-00000100/
        manifest.json       what there is: state, every entry's shape and dtype; written last, so its presence under a final name
                            means that all else is there; its size does not depend on the number of ranks
        index.bin           where it is: each entry's pieces in the ranks' files, each file's size and hash        pieces.py
        rank-00000.bin      the elements that rank 0 wrote: entries one after another, each aligned to ALIGNMENT bytes
        rank-00001.bin      ...

An element is found by its place in the *global* tensor, never by the rank that wrote it: that is why any layout loads what any
other has saved. The manifest has its own hash and that of the index, which has those of the files: trees of hashes, so that a
reader of a part verifies that part and reads no more (blocks.py).
"""

import errno
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import xxhash

from framework.checkpoint.blocks import BlockCache, BlockFile, DamagedCheckpoint
from framework.checkpoint.pieces import INDEX_BLOCK_BYTES, EntryRecord, FileRecord, Index
from framework.checkpoint.place import Place, sizes_in
from framework.checkpoint.storage import read
from framework.errors import CheckpointError
from framework.mesh.layout import Shard

FORMAT = 2
MANIFEST = "manifest.json"
# Small, because who needs some of a block reads all of it: after a change of layout a rank needs some of many ranks' files.
BLOCK_BYTES = 1 << 20
ALIGNMENT = 64


@dataclass(frozen=True)
class Manifest:
    """All that is known without opening another file. `state` is the caller's; `world` is how many ranks saved; block_bytes: of
    the ranks' files; index: `index.bin`."""

    step: int
    world: int
    state: dict[str, Any]
    entries: dict[str, EntryRecord]
    index: FileRecord
    block_bytes: int = BLOCK_BYTES


def encode_manifest(manifest: Manifest) -> str:
    """JSON that begins with a hash of the rest, so that a changed manifest is noticed as surely as a changed file."""
    index = {"bytes": manifest.index.num_bytes, "block_bytes": manifest.index.block_bytes}
    body = {
        "format": FORMAT,
        "step": manifest.step,
        "world": manifest.world,
        "state": manifest.state,
        "block_bytes": manifest.block_bytes,
        "index": index | {"xxh3": f"{manifest.index.root:016x}"},
        "entries": {name: _encode_entry(record) for name, record in manifest.entries.items()},
    }
    text = json.dumps(body)
    return _head(xxhash.xxh3_64_hexdigest(text.encode())) + text + "}"


def replace_state(path: Place, state: dict[str, Any]) -> str:
    """The manifest of the checkpoint folder `path` with another state. Raises DamagedCheckpoint as `read_manifest`."""
    read_manifest(path)
    body = _verified_body((path / MANIFEST).read_bytes())
    if body is None:
        raise DamagedCheckpoint(f"{path / MANIFEST} was changed while it was read")
    text = json.dumps({**json.loads(body), "state": state})
    return _head(xxhash.xxh3_64_hexdigest(text.encode())) + text + "}"


def read_manifest(path: Place) -> Manifest:
    """The manifest of the checkpoint folder `path`. Raises DamagedCheckpoint when it is missing or changed, StorageError when the
    file system does not let it be read."""
    body = None
    # Read twice before it is called damage: what a page cache or a network has spoilt is whole on the disk.
    for _ in range(2):
        try:
            body = _verified_body(read((path / MANIFEST).read_bytes, path / MANIFEST))
        except FileNotFoundError as error:
            raise DamagedCheckpoint(f"{path} has no readable {MANIFEST}: {error.strerror}") from error
        if body is not None:
            return _decode(path, json.loads(body))
    raise DamagedCheckpoint(f"{path / MANIFEST} was cut or changed after it was written: its hash does not fit")


def open_index(path: Place, manifest: Manifest, cache: BlockCache) -> Index:
    """The index of the checkpoint `path`: in which file each element is, and at which offset."""
    return Index(path, manifest.entries, manifest.index, manifest.world, manifest.block_bytes, cache)


def verify_sizes(path: Place, manifest: Manifest) -> None:
    """Raise DamagedCheckpoint unless every file is there in its full size; costs one stat per file, so one rank does it for all.
    An object store lists all of them at once.

    Raises StorageError when the file system does not say.
    """
    index = open_index(path, manifest, BlockCache(2 * INDEX_BLOCK_BYTES))
    size_of = sizes_in(path)
    for file in index.all_files():
        _verify_size(file, size_of)


def _verify_size(file: BlockFile, size_of: Callable[[str], int]) -> None:
    try:
        size = size_of(file.path.name)
    except (FileNotFoundError, KeyError) as error:
        raise DamagedCheckpoint(f"{file.path} is missing ({os.strerror(errno.ENOENT)})") from error
    if size != file.size:
        raise DamagedCheckpoint(f"{file.path} has {size} bytes, {file.size} were saved")


def _head(digest: str) -> str:
    return f'{{"xxh3": "{digest}", "manifest": '


def _verified_body(data: bytes) -> bytes | None:
    """The JSON within, None unless its hash fits."""
    body = data[len(_head("0" * 16)) : -1]
    return body if data == _head(xxhash.xxh3_64_hexdigest(body)).encode() + body + b"}" else None


def _encode_entry(record: EntryRecord) -> dict[str, Any]:
    shards = [[shard.dim, shard.count, shard.segments, shard.pieces] for shard in record.shards]
    return {
        "shape": record.shape,
        "dtype": record.dtype,
        "shards": shards,
        "first": record.first,
        "count": record.count,
    }


def _decode(path: Place, body: dict[str, Any]) -> Manifest:
    if body["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {body['format']}, this version reads format {FORMAT}")
    index = FileRecord(body["index"]["bytes"], body["index"]["block_bytes"], int(body["index"]["xxh3"], 16))
    entries = {name: _decode_entry(value) for name, value in body["entries"].items()}
    return Manifest(body["step"], body["world"], body["state"], entries, index, body["block_bytes"])


def _decode_entry(value: dict[str, Any]) -> EntryRecord:
    shards = tuple(
        Shard("", dim, 0, count, tuple(segments), tuple(pieces)) for dim, count, segments, pieces in value["shards"]
    )
    return EntryRecord(tuple(value["shape"]), value["dtype"], shards, value["first"], value["count"])
