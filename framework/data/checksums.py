"""Checksums of a token store: what rots on the disk is an error with the file's name, never other text to train on.

    checksums       uint64: xxh3 of each block of train.tokens, train.ends, validation.tokens and validation.ends, one file after
                    another; then 16 bytes: xxh3-128 of the values of store.json, of validation.counts, and of all before

A rank verifies a block of tokens or ends before it first reads from it, once in its life. Rank 0 verifies the small files when it
looks for the store. `meshwright inspect STORE` verifies every byte. A store that an earlier Meshwright made has no such file: it
is read unverified, and `meshwright prepare` adds the file.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from json import dumps
from pathlib import Path

import numpy as np
import xxhash

from framework.data.store import (
    ENDS_DTYPE,
    SPLITS,
    Split,
    StoreMeta,
    TokenStream,
    damaged,
    explain_damage,
    map_file,
    open_stream,
)
from framework.errors import EXIT_DONE, EXIT_USER, DamagedStore
from framework.files import write_atomically

CHECKSUMS_FILE = "checksums"
# Half of what Linux reads ahead around the page that a map touches first, so verifying reads no more of the disk.
BLOCK_BYTES = 1 << 16
HASH_DTYPE = np.dtype("<u8")
SEAL_BYTES = 16
COUNTS_FILE = "validation.counts"


def list_sizes(meta: StoreMeta) -> dict[str, int]:
    """Bytes of each file with block checksums, in the order of the checksums."""
    sizes = {}
    for split in SPLITS:
        size = meta.splits[split]
        sizes[f"{split}.tokens"] = size.num_tokens * np.dtype(meta.dtype).itemsize
        sizes[f"{split}.ends"] = size.num_documents * ENDS_DTYPE.itemsize
    return sizes


def hash_block(data: np.ndarray) -> int:
    """xxh3 of a block's bytes."""
    return xxhash.xxh3_64_intdigest(data.data)


def hash_blocks(values: np.ndarray) -> Iterator[int]:
    """The hash of each block of a file, mapped into memory."""
    data = values.view(np.uint8)
    for start in range(0, len(data), BLOCK_BYTES):
        yield hash_block(data[start : start + BLOCK_BYTES])


def write_checksums(folder: Path, meta: StoreMeta, hashes: Sequence[int]) -> None:
    """Write the file. hashes: of all blocks of all files, in the order of `list_sizes`."""
    data = np.array(hashes, dtype=HASH_DTYPE).tobytes()
    with write_atomically(folder / CHECKSUMS_FILE) as file:
        file.write(data + _seal(meta, (folder / COUNTS_FILE).read_bytes(), data))


def has_checksums(folder: Path) -> bool:
    return (folder / CHECKSUMS_FILE).exists()


def verify_small_files(folder: Path, meta: StoreMeta) -> None:
    """DamagedStore unless store.json, validation.counts and the checksums belong together. Of a store without checksums only the
    sizes are known."""
    counts = _read(folder / COUNTS_FILE, meta.vocab_size * np.dtype(np.int64).itemsize)
    if has_checksums(folder):
        data = _read(folder / CHECKSUMS_FILE, _count_all(meta) * HASH_DTYPE.itemsize + SEAL_BYTES)
        if _seal(meta, counts, data[:-SEAL_BYTES]) != data[-SEAL_BYTES:]:
            raise DamagedStore(
                explain_damage(
                    f"{folder}: one of store.json, {COUNTS_FILE} and {CHECKSUMS_FILE} is not as it was written"
                )
            )


def open_checked(folder: Path, meta: StoreMeta, split: Split) -> TokenStream:
    """Map a split into memory, verified as it is read: three files. DamagedStore where one is missing or of the wrong size."""
    stream = open_stream(folder, meta, split)
    if not has_checksums(folder) or not stream.num_tokens:
        return stream
    hashes = _map_hashes(folder, meta)
    stream.verify_tokens = _verifier(folder / f"{split}.tokens", stream.tokens, hashes)
    stream.verify_ends = _verifier(folder / f"{split}.ends", stream.ends, hashes)
    return stream


def _verifier(path: Path, values: np.ndarray, hashes: dict[str, np.ndarray]) -> Callable[[int, int], None]:
    """A function that verifies the blocks with elements [start, stop) of a file, each once. It is called for each sample, so
    what has been verified costs it a look at some flags."""
    expected, data = hashes[path.name], values.view(np.uint8)
    is_verified = np.zeros(len(expected), dtype=bool)
    num_elements = BLOCK_BYTES // values.itemsize

    def verify(start: int, stop: int) -> None:
        first, last = start // num_elements, (stop - 1) // num_elements
        if not is_verified[first : last + 1].all():
            for block in first + np.flatnonzero(~is_verified[first : last + 1]):
                _verify_block(path, int(block), data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES], expected)
                is_verified[block] = True

    return verify


def _verify_block(path: Path, block: int, data: np.ndarray, expected: np.ndarray) -> None:
    if hash_block(data) != expected[block]:
        raise DamagedStore(describe_block(path, block))


def describe_block(path: Path, block: int) -> str:
    """The message for a block of tokens or ends that is not what was written."""
    first = block * BLOCK_BYTES
    return explain_damage(
        f"{path}: bytes {first:,} to {first + BLOCK_BYTES:,} (block {block:,}) are not as they were written: their checksum in"
        f" {CHECKSUMS_FILE} does not fit, so they would be other text"
    )


def find_damage(folder: Path, meta: StoreMeta) -> Iterator[str]:
    """A message for each damaged file or block of a store; every byte is read."""
    try:
        verify_small_files(folder, meta)
        hashes = _map_hashes(folder, meta) if has_checksums(folder) else {}
    except DamagedStore as error:
        yield str(error)
        return
    for name, num_bytes in list_sizes(meta).items():
        try:
            data = map_file(folder / name, np.dtype(np.uint8), num_bytes)
        except DamagedStore as error:
            yield str(error)
            continue
        expected = hashes.get(name, ())
        yield from (
            describe_block(folder / name, block)
            for block, (found, was) in enumerate(zip(hash_blocks(data), expected, strict=False))
            if found != was
        )


def inspect_store(folder: Path) -> int:
    """`meshwright inspect` of a token store: print what it holds and verify every byte. Returns 0, or 86 where one is damaged."""
    meta = StoreMeta.read(folder)
    assert meta is not None, f"{folder} has a store.json"
    print(f"store         {folder}\nsource        {meta.source['path']}, {meta.num_files} files")
    for split, size in meta.splits.items():
        print(f"{split:<13} {size.num_documents:,} documents, {size.num_tokens:,} tokens")
    damages = list(find_damage(folder, meta))
    for damage in damages:
        print(f"DAMAGED       {damage}")
    if not damages and has_checksums(folder):
        print("verified      every checksum fits")
    elif not damages:
        print("verified      sizes only: the store has no checksums; `meshwright prepare` adds them")
    return EXIT_USER if damages else EXIT_DONE


def _seal(meta: StoreMeta, counts: bytes, hashes: bytes) -> bytes:
    digest = xxhash.xxh3_128(dumps(asdict(meta), sort_keys=True).encode())
    digest.update(counts)
    digest.update(hashes)
    return digest.digest()


def _count_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES)


def _count_all(meta: StoreMeta) -> int:
    return sum(map(_count_blocks, list_sizes(meta).values()))


def _map_hashes(folder: Path, meta: StoreMeta) -> dict[str, np.ndarray]:
    """The hashes of each file's blocks. A flipped bit in them is met as a block that does not fit."""
    num_bytes = _count_all(meta) * HASH_DTYPE.itemsize
    data = map_file(folder / CHECKSUMS_FILE, np.dtype(np.uint8), num_bytes + SEAL_BYTES)
    hashes, found, first = data[:num_bytes].view(HASH_DTYPE), {}, 0
    for name, size in list_sizes(meta).items():
        found[name] = hashes[first : first + _count_blocks(size)]
        first += _count_blocks(size)
    return found


def _read(path: Path, num_bytes: int) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise damaged(path, num_bytes, None) from error
    if len(data) != num_bytes:
        raise damaged(path, num_bytes, len(data))
    return data
