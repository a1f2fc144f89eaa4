"""Speed of the data room: `prepare` on the cores there are, and what one rank's Loader feeds.

    python scripts/bench/data.py [--tokens 200000000] [--windows 15]

Feeding is measured through `Loader.batch`, prefetch thread and conversion to int64 tensors included, by a caller that does
nothing else, from a store of random tokens (documents of 500 on average) in a temporary folder, the page cache warm. The
bar is 5,000,000 tokens/s per rank.
"""

import argparse
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import numpy as np

from framework.commands.prepare import prepare_command
from framework.data.join import JoinPlan, join_store
from framework.data.loader import Loader
from framework.data.prepared import Prepared, PreparedSource
from framework.data.shard import SplitReport, SplitWriter, sum_splits
from framework.data.store import STORE_VERSION, StoreMeta, open_stream
from framework.recipe.schema import Data, Recipe, Source

BAR_TOKENS_PER_S = 5_000_000
SHARD_TOKENS = 10_000_000
WINDOW_S = 0.2


def write_store(folder: Path, num_tokens: int) -> Prepared:
    """A store of random documents, as `prepare` would have written it."""
    rng = np.random.default_rng(0)
    dtype = np.dtype(np.uint16)
    reports: list[dict[str, SplitReport]] = []
    for shard in range(-(-num_tokens // SHARD_TOKENS)):
        with ExitStack() as stack:
            writer, written = SplitWriter(stack, folder, shard, "train", dtype), 0
            while written < SHARD_TOKENS:
                document = rng.integers(1, 50_000, size=rng.integers(20, 1000))
                writer.add(np.append(document, 0))
                written += len(document) + 1
            report = writer.finish()
        assert report is not None
        reports.append({"train": report})
    meta = StoreMeta(STORE_VERSION, {}, 0, "", "", 50_000, 0, dtype.name, 0, sum_splits(reports), 0, 0, "")
    JoinPlan(meta, [], reports).write(folder)
    join_store(folder)
    stream = open_stream(folder, meta, "train")
    stream.count_ids(50_000)  # reads it all, into the page cache
    source = PreparedSource("random", 1.0, folder, meta, {"train": stream})
    return Prepared((source,), folder, vocab_size=50_000, eos_id=0, fingerprint="", unigram_entropy=None)


def measure_feed(
    prepared: Prepared, context: int, pack: str, b: int, num_microbatches: int, windows: int
) -> tuple[float, float, float]:
    """Tokens per second of one rank: the median and the best of some windows (other work on the machine slows some), and the best
    per second of CPU, of both threads, which other work slows least."""
    speeds, cpu_speeds, cursor = [], [], 0
    with Loader(
        prepared,
        seed=1,
        context=context,
        pack=pack,  # type: ignore[arg-type]
        sequences_per_microbatch=b,
        num_microbatches=num_microbatches,
    ) as loader:
        for _ in range(windows):
            start_s, start_cpu_s, tokens = time.perf_counter(), time.process_time(), 0
            while time.perf_counter() - start_s < WINDOW_S:
                tokens += sum(microbatch.input_ids.numel() for microbatch in loader.batch(cursor))
                cursor += loader.sequences_per_step
            speeds.append(tokens / (time.perf_counter() - start_s))
            cpu_speeds.append(tokens / (time.process_time() - start_cpu_s))
    return median(speeds), max(speeds), max(cpu_speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200_000_000)
    parser.add_argument("--windows", type=int, default=15, help=f"of {WINDOW_S} s for each measurement")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = Data(sources={"stdlib": Source("python-stdlib")}, root=folder, bpe_vocab=8192, validation=0.02)
        prepare_command(Recipe(data=data))
    with tempfile.TemporaryDirectory() as folder:
        prepared = write_store(Path(folder), arguments.tokens)
        print(
            f"\n{'context':>7} {'pack':10} {'microbatches x b':>16} {'median tokens/s':>16} {'best':>14} {'best per CPU s':>15}"
            "  median / bar"
        )
        for context in (256, 1024):
            for pack in ("concat", "documents"):
                for b, num_microbatches in ((1, 1), (8, 1), (4, 8)):
                    middle, best, cpu = measure_feed(prepared, context, pack, b, num_microbatches, arguments.windows)
                    step = f"{num_microbatches} x {b}"
                    ratio = middle / BAR_TOKENS_PER_S
                    print(
                        f"{context:7} {pack:10} {step:>16} {middle:16,.0f} {best:14,.0f} {cpu:15,.0f}  {ratio:.1f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
