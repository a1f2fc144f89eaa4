"""Checkpoints of format 1, for runs that have them: every piece and every hash stands in the manifest; there is no index."""

from collections.abc import Iterator
from typing import Any

from framework.checkpoint.blocks import BlockCache, BlockFile
from framework.checkpoint.pieces import EntryRecord, Piece
from framework.checkpoint.place import Place
from framework.mesh.box import Box


def entry_records(entries: dict[str, Any]) -> dict[str, EntryRecord]:
    """The manifest's entries, without their pieces."""
    return {name: EntryRecord(tuple(value["shape"]), value["dtype"]) for name, value in entries.items()}


class Format1Index:
    """An `Index` for checkpoints of format 1, whose manifest has the pieces in its body."""

    def __init__(self, path: Place, body: dict[str, Any], cache: BlockCache) -> None:
        self.world = len(body["files"])
        self._path, self._body, self._cache = path, body, cache
        self._names = list(body["files"])

    def all_files(self) -> Iterator[BlockFile]:
        """All files but the manifest."""
        return self.data_files()

    def data_file(self, rank: int) -> BlockFile:
        """The file that stands at place `rank` in the manifest."""
        value = self._body["files"][self._names[rank]]
        hashes = tuple(int(digest, 16) for digest in value["hashes"])
        return BlockFile(self._path / self._names[rank], value["size"], value["block_bytes"], 0, self._cache, hashes)

    def data_files(self) -> Iterator[BlockFile]:
        """All files."""
        return map(self.data_file, range(self.world))

    def pieces(self, name: str, box: Box) -> Iterator[Piece]:
        """Pieces that together hold what was saved of the box, each once."""
        for value in self._body["entries"][name]["pieces"]:
            found = Box(tuple(value["box"]["offsets"]), tuple(value["box"]["sizes"]))
            if box.intersect(found) is not None:
                yield Piece(found, self._names.index(value["file"]), value["offset"])
