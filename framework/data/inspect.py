"""Inspection of a token store: what it holds, and every byte of it verified (`meshwright inspect`)."""

from collections.abc import Iterator
from pathlib import Path

from framework.data.store import StoreMeta, describe_block, hash_blocks, map_file, map_hashes, verify_small_files
from framework.errors import EXIT_DONE, EXIT_USER, DamagedStore


def find_damage(folder: Path, meta: StoreMeta) -> Iterator[str]:
    """Read every byte of a store, and yield a message for each damaged file or block."""
    try:
        verify_small_files(folder, meta)
        hashes = map_hashes(folder, meta)
    except DamagedStore as error:
        yield str(error)
        return
    for name, file in meta.list_files().items():
        try:
            found = hash_blocks(map_file(folder / name, *file))
        except DamagedStore as error:
            yield str(error)
            continue
        damaged = [block for block, hash in enumerate(found) if hash != hashes[name][block]]
        yield from (describe_block(folder / name, block) for block in damaged)


def inspect_store(folder: Path) -> int:
    """Print what a token store holds and verify every byte (`meshwright inspect`). Returns 0, or 86 if something is damaged."""
    meta = StoreMeta.read(folder)
    assert meta is not None, f"{folder} has a store.json"
    print(f"store         {folder}\nsource        {meta.source['path']}, {meta.num_files} files")
    for split, size in meta.splits.items():
        print(f"{split:<13} {size.num_documents:,} documents, {size.num_tokens:,} tokens")
    damages = list(find_damage(folder, meta))
    for damage in damages:
        print(f"DAMAGED       {damage}")
    if not damages:
        print("verified      every checksum fits")
    return EXIT_USER if damages else EXIT_DONE
