"""`meshwright inspect`: the content of a checkpoint or a token store, every byte verified."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from framework.errors import EXIT_DONE, EXIT_USER, CheckpointError, DamagedStore
from framework.imports import loading_libraries
from framework.launch.directory import find_run
from framework.object_store import ObjectPath, Place, is_url, open_place

if TYPE_CHECKING:
    from framework.data.store import StoreMeta


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "path", metavar="PATH", help="a checkpoint's folder or URL, a run's id or folder: its newest, or a token store"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print what is at the path. Raises CheckpointError where there is nothing that can be inspected."""
    path = open_place(arguments.path) if is_url(arguments.path) else find_run(arguments.path)
    if isinstance(path, Path) and not path.exists():
        raise CheckpointError(f"there is no folder {path}: name a checkpoint, a run or a token store")
    if (path / "store.json").exists():
        return inspect_store(path)
    with loading_libraries():
        from framework.checkpoint.load import inspect_command

    return inspect_command(path)


def inspect_store(place: Place) -> int:
    """Print what a token store holds and verify every byte. Returns 0, or 86 if something is damaged."""
    from framework.data.remote import pull_small
    from framework.data.store import StoreMeta

    with TemporaryDirectory() as made:
        folder, away = (place, None) if isinstance(place, Path) else (Path(made), place)
        if away is not None:
            pull_small(away, folder)
        meta = StoreMeta.read(folder)
        assert meta is not None, f"{place} has a store.json"
        print(f"store         {place}\nsource        {meta.source.get('path')}, {meta.num_files} files")
        for split, size in meta.splits.items():
            print(f"{split:<13} {size.num_documents:,} documents, {size.num_tokens:,} tokens")
        damages = list(find_damage(folder, meta, away))
    for damage in damages:
        print(f"DAMAGED       {damage}")
    if not damages:
        print("verified      every checksum fits")
    return EXIT_USER if damages else EXIT_DONE


def find_damage(folder: Path, meta: "StoreMeta", place: ObjectPath | None = None) -> Iterator[str]:
    """Read every byte of a store, and yield a message for each damaged file or block. place: where its tokens are, if that is
    not the folder."""
    from framework.data.growing import GrowingStream
    from framework.data.remote import LARGE, hash_object
    from framework.data.store import SPLITS, describe_block, hash_blocks, map_file, map_hashes, verify_small_files

    try:
        verify_small_files(folder, meta)
        for split in SPLITS if meta.is_streamed else ():
            GrowingStream(folder.name, folder, meta, split, meta.source["shards"]).verify()  # what there is of it
        hashes = map_hashes(folder, meta)
    except DamagedStore as error:
        yield str(error)
        return
    for name, (dtype, length) in meta.list_files().items():
        is_away = place is not None and Path(name).suffix in LARGE and length
        try:
            if place is not None and is_away:
                found = list(hash_object(place / name, length * dtype.itemsize))
            else:
                found = list(hash_blocks(map_file(folder / name, dtype, length)))
        except DamagedStore as error:
            yield str(error)
            continue
        damaged = [block for block, hash in enumerate(found) if hash != hashes[name][block]]
        yield from (describe_block((place or folder) / name, block) for block in damaged)
