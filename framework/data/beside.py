"""`data.mode=stream`: `prepare` tokenizes the head of each source before a run, a process beside the run the rest.

    shards in an order drawn by train.seed --tokenize--> 00000 ... 0000h, the head | the others, while the run trains

The store of a stream has shards (shard.py) and is never joined. Its store.json is written once the head is there, and never
changes: held-out documents are those of the head, so each validation has the same. Rank 0 starts the process, which ends with it;
the next start goes on with the shards that are missing. A data set of the hub is listed once, at a commit, and its files are
fetched one by one, when they are tokenized.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import xxhash

from framework.data.growing import GrowingStream
from framework.data.jobs import list_all, make_jobs, make_meta, read_reports, run_jobs
from framework.data.join import hold_lock
from framework.data.prepared import Prepared, StorePlace, locate
from framework.data.shard import ShardJob, shard_path
from framework.data.source import SourceFile, is_hub_name, list_dataset
from framework.data.store import StoreMeta, TokenStream, complete_store, read_json
from framework.data.tokenize import TokenizerInfo, read_info
from framework.errors import EXIT_DONE, EXIT_USER, DataError, MeshwrightError
from framework.files import write_atomically, write_json
from framework.host import count_cores
from framework.recipe.convert import load_recipe, save_recipe
from framework.recipe.plugins import import_plugins
from framework.recipe.schema import Recipe
from framework.start import python_words

# Source bytes of a head: a few seconds' work, whose held-out documents are all that is validated.
HEAD_BYTES = 8 << 20
# Training goes first.
NICENESS = 10
HUB_FILES = "hub.json"


def list_stream(place: StorePlace) -> tuple[SourceFile, ...]:
    """The files of a stream; of a data set of the hub those that were listed first."""
    if place.files or not is_hub_name(place.source.path):
        return list_all(place)
    path = place.folder / HUB_FILES
    listed = read_json(path, dict)
    if listed is None:
        found = list_dataset(place.name, place.source)
        listed = {"files": [[each.url, each.kind, each.num_bytes] for each in found]}
        place.folder.mkdir(exist_ok=True)  # the tokenizer that is trained on them comes before the store
        write_json(path, listed)
    return tuple(SourceFile.of_url(*each) for each in listed["files"])


def list_read(recipe: Recipe, place: StorePlace) -> tuple[SourceFile, ...]:
    """The files of a source as `data.mode` has them read: of a stream of the hub, to be fetched one by one."""
    return list_stream(place) if recipe.data.mode == "stream" else list_all(place)


def make_head(
    recipe: Recipe, place: StorePlace, folder: Path, tokenizer: TokenizerInfo, workers: int, progress: bool
) -> None:
    """Tokenize the head of a stream and complete its store. folder: of the tokenizer."""
    files = list_stream(place)
    jobs = make_jobs(recipe, place, files, folder, tokenizer, progress)
    sums = list(accumulate(job.num_bytes for job in jobs))
    head = jobs[: 1 + bisect_left(sums, HEAD_BYTES)]
    run_jobs(recipe, head, workers, progress)
    splits = [report.splits for report in read_reports(head)]
    meta = make_meta(recipe, place, len(files), folder.name, tokenizer, splits, head[0].threshold if head else 0)
    words = {"shards": len(jobs), "head": len(head), "seed": recipe.train.seed}
    of_files = [[each.name, each.num_bytes] for each in files]
    # The head's tokens stand for those of all files, which are not known yet.
    named = [meta.fingerprint, meta.source, words, recipe.data.validation, of_files]
    fingerprint = xxhash.xxh3_128_hexdigest(json.dumps(named).encode())
    meta = replace(meta, source={**meta.source, **words}, fingerprint=fingerprint)
    if recipe.data.validation > 0 and not meta.splits["validation"].num_tokens:
        raise DataError(
            f"data.validation={recipe.data.validation} holds no document out of the first {len(head)} shards of"
            f" data.sources.{place.name}, all that a stream validates. Raise it, or set data.validation=0 (and"
            " train.validate_every_steps=null)"
        )
    held_out = GrowingStream(place.name, place.folder, meta, "validation", len(head))
    complete_store(place.folder, meta, held_out.count_ids(meta.vocab_size))


@contextmanager
def tokenizing(recipe: Recipe, prepared: Prepared) -> Iterator[None]:
    """Have a process tokenize what is missing of streams meanwhile. For rank 0."""
    streams = {each.folder: each.streams["train"] for each in prepared.sources if not each.streams["train"].is_whole}
    if not streams:
        yield
        return
    path = next(iter(streams)) / f"recipe-{os.getpid()}.yaml"
    save_recipe(recipe, path)
    process = subprocess.Popen(
        [sys.executable, *python_words(__name__, str(path))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the training process
    )
    assert process.stdin is not None, "a pipe"
    is_over = threading.Event()
    watch = threading.Thread(target=_note_end, args=(process, streams, prepared.failed, is_over), daemon=True)
    watch.start()
    try:
        yield
    finally:
        is_over.set()
        process.stdin.close()
        watch.join()
        path.unlink(missing_ok=True)


def _note_end(
    process: "subprocess.Popen[bytes]", streams: Mapping[Path, TokenStream], failed: str, is_over: threading.Event
) -> None:
    """Wait for the tokenizer, and if it has failed tell this rank's streams why, and those of others by a file in each folder. A
    disk that has no room for it is the usual reason: then this rank ends the run."""
    assert process.stdout is not None, "a pipe"
    said, code = process.stdout.read().decode().strip(), process.wait()
    ended = f"signal {-code}, perhaps for want of memory" if code < 0 else f"exit code {code}"
    reason = said or f"its process {process.pid} ended with {ended}"
    for folder, stream in streams.items() if code != 0 and not is_over.is_set() else ():
        assert isinstance(stream, GrowingStream), "others are whole"
        stream.reason = reason
        with suppress(OSError), write_atomically(folder / failed) as file:
            file.write(reason.encode())


def tokenize_rest(recipe: Recipe, workers: int) -> None:
    """Tokenize the shards of all streams that are missing, those first that a run needs first."""
    import_plugins(recipe.plugins)
    due: list[tuple[float, ShardJob]] = []
    with ExitStack() as stack:
        for place in sorted(locate(recipe).stores, key=lambda each: each.folder):
            meta = StoreMeta.read(place.folder)
            if meta is None:
                raise DataError(f"the files of data.sources.{place.name} change while the run begins. Start it again")
            stack.enter_context(hold_lock(place.folder, is_told=False))
            reports = (shard_path(place.folder, shard, "json") for shard in range(meta.source["shards"]))
            if all(path.exists() for path in reports):
                continue
            if place.files is None:
                raise DataError(
                    f"the files of data.sources.{place.name} are gone before all is tokenized. Restore them"
                )
            tokenizer = place.folder.parent / meta.tokenizer_folder
            info = read_info(tokenizer)
            if info is None:
                raise DataError(f"{tokenizer}, by which data.sources.{place.name} is tokenized, is gone. Restore it")
            jobs = make_jobs(recipe, place, list_stream(place), tokenizer, info, progress=False)
            if meta.source["shards"] != len(jobs):
                raise DataError(
                    f"the files of data.sources.{place.name} have changed since the run began. Restore them"
                )
            ends = np.cumsum([job.num_bytes for job in jobs]) / place.source.weight
            due += zip(ends.tolist(), jobs, strict=True)
        run_jobs(recipe, [job for _, job in sorted(due, key=lambda each: each[0])], workers, progress=False)


def main() -> int:
    """The process beside a run, given its recipe. The end of standard input is that of the rank that has started it."""
    recipe = load_recipe(Path(sys.argv[1]))
    os.nice(NICENESS)

    def end_with_rank() -> None:
        while os.read(sys.stdin.fileno(), 1):  # not by `sys.stdin`, which waits for its readers when the process ends
            pass
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)  # so that its workers end, too

    threading.Thread(target=end_with_rank, daemon=True).start()
    try:
        tokenize_rest(recipe, count_cores())
    except (MeshwrightError, OSError) as error:
        print(error)
        return EXIT_USER
    except KeyboardInterrupt:
        pass
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
