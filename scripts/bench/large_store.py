"""A store of many gigabytes under a small limit of open files: what preparing it and training on it take.

    python scripts/bench/large_store.py FOLDER [--gigabytes 10] [--open-files 256]

Tokenizing so much text takes a CPU hours. So of the source's 4,096 files all but six are sparse, and their shards are written
here as a worker of `prepare` leaves them, with random ids. `meshwright prepare` then finds those shards done, tokenizes the
other six files and joins all; `meshwright train` trains a tiny model for 20 steps. FOLDER keeps what was made: remove it.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import xxhash

from framework.data.prepare import prepare
from framework.data.prepared import locate
from framework.data.records import MAX_SHARDS, plan_shards
from framework.data.shard import ShardReport, SplitReport, shard_path
from framework.data.tokenize import train_bpe
from framework.recipe.compose import compose

NUM_REAL = 6
FILE_BYTES = 8 << 20
DOCUMENT_TOKENS = 1000
VOCAB = 4096
HELD_OUT = 50  # one document in so many
WORDS = [f"{first}{second}" for first in ("mesh", "axis", "box", "dual") for second in ("a", "e", "i", "o", "u")]


def write_source(folder: Path) -> None:
    """Files of equal size, so that each is one shard; blank lines fill up those that have text."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    for number in range(MAX_SHARDS):
        with open(folder / f"{number:05d}.jsonl", "wb") as file:
            if number < NUM_REAL:
                while file.tell() < FILE_BYTES - 10_000:
                    text = " ".join(rng.choices(WORDS, k=500))
                    file.write(json.dumps({"text": text}).encode() + b"\n")
                file.write(b"\n" * (FILE_BYTES - file.tell()))
            file.truncate(FILE_BYTES)


def write_shard(folder: Path, shard: int, ids: np.ndarray, threshold: int) -> None:
    """A shard and its report, as `tokenize_shard` would leave it; `ids`: [documents, DOCUMENT_TOKENS]."""
    splits = {}
    for split, documents in (("validation", ids[::HELD_OUT]), ("train", np.delete(ids, np.s_[::HELD_OUT], axis=0))):
        ends = np.arange(1, len(documents) + 1, dtype=np.int64) * DOCUMENT_TOKENS
        documents.tofile(shard_path(folder, shard, f"{split}.tokens"))
        ends.tofile(shard_path(folder, shard, f"{split}.ends"))
        checksum = xxhash.xxh3_128_hexdigest(np.ascontiguousarray(documents).tobytes() + ends.tobytes())
        splits[split] = SplitReport(len(documents), documents.size, checksum)
    report = ShardReport(threshold, splits, FILE_BYTES, (), lowest_hash=0, highest_hash=2**64 - 1)
    report.write(shard_path(folder, shard, "json"))


def measure(title: str, arguments: list[str], open_files: int, folder: Path) -> None:
    """Runs `meshwright ...` under the limit and prints what it took at its peak."""
    start_s = time.perf_counter()
    process = subprocess.Popen(
        ["sh", "-c", f'ulimit -n {open_files}; exec "$@"', "sh", sys.executable, "-m", "framework", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    files, maps, disk = 0, 0, 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        try:
            files = max(files, len(os.listdir(f"/proc/{process.pid}/fd")))
            maps = max(maps, len(Path(f"/proc/{process.pid}/maps").read_text().splitlines()))
        except (FileNotFoundError, ProcessLookupError):
            continue
        disk = max(disk, measure_disk(folder / "tokens"))
        time.sleep(0.5)
    print(
        f"{title}: exit code {os.waitstatus_to_exitcode(status)}, {time.perf_counter() - start_s:.1f} s, at most "
        f"{usage.ru_maxrss / 1024:.0f} MiB resident, {files} open files, {maps} memory maps, {disk / 1e9:.2f} GB of tokens",
        flush=True,
    )


def measure_disk(root: Path) -> int:
    total = 0
    for entry in os.scandir(next(root.glob("files-*"))):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=10)
    parser.add_argument("--open-files", type=int, default=256)
    arguments = parser.parse_args()
    folder = arguments.folder.absolute()
    write_source(folder / "source")
    texts = (json.loads(line)["text"] for line in (folder / "source/00000.jsonl").read_text().split("\n") if line)
    train_bpe(texts, VOCAB).save_pretrained(folder / "tokenizer")
    overrides = [
        *(
            "track=none",
            "data=files",
            f"data.sources.files.path={folder}/source",
            f"data.root={folder}/tokens",
        ),
        *(
            f"data.validation={1 / HELD_OUT}",
            f"model.tokenizer={folder}/tokenizer",
            "data.bpe_vocab=null",
            "precision=fp32",
            "train.steps=20",
        ),
        f"model.config={{vocab_size: {VOCAB}, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,"
        " num_attention_heads: 2, num_key_value_heads: 1, tie_word_embeddings: true}",
        *("optim.schedule.warmup_steps=2", "batch.context=256", "batch.sequences_per_step=8"),
        *("train.validate_every_steps=10", "train.validation_sequences=64", "launch.threads_per_rank=1"),
    ]
    composition = compose(overrides)
    recipe = composition.recipe
    assert recipe is not None, composition.problems
    place = locate(recipe).stores[0]
    assert place.files is not None
    assert len(plan_shards(place.files)) == MAX_SHARDS
    place.folder.mkdir(parents=True)
    start_s = time.perf_counter()
    rng, num_documents = np.random.default_rng(0), round(arguments.gigabytes * 1e9 / MAX_SHARDS / 2 / DOCUMENT_TOKENS)
    pool = rng.integers(1, 300, size=(2 * num_documents, DOCUMENT_TOKENS), dtype=np.uint16)
    pool[:, -1] = 0  # the end-of-sequence id
    for shard in range(NUM_REAL, MAX_SHARDS):
        first = int(rng.integers(num_documents))
        write_shard(place.folder, shard, pool[first : first + num_documents], int(recipe.data.validation * 2**64))
    print(f"{MAX_SHARDS - NUM_REAL} shards written in {time.perf_counter() - start_s:.1f} s", flush=True)
    measure("prepare", ["prepare", *overrides], arguments.open_files, folder)
    measure("prepare again", ["prepare", *overrides], arguments.open_files, folder)
    measure("train", ["train", *overrides, "run.id=large"], arguments.open_files, folder)
    prepared, maps = prepare(recipe), Path("/proc/self/maps").read_text().splitlines()
    num_maps = sum(str(prepared.sources[0].folder) in line for line in maps)
    print(
        f"opened: {prepared.sources[0].meta.splits['train'].num_tokens:,} tokens, {num_maps} memory maps of the store"
    )


if __name__ == "__main__":
    main()
