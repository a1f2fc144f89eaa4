"""Streams: the order of tokens that come beside a run is that of tokens that are there, however often it is killed."""

import gzip
import io
import json
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from framework.commands.inspect import find_damage
from framework.commands.prepare import prepare_command
from framework.data import beside, growing, loader, records
from framework.data import source as source_module
from framework.data.beside import tokenize_rest, tokenizing
from framework.data.loader import Loader, validation_batches
from framework.data.order import SampleOrder
from framework.data.prepare import prepare, summarize_data
from framework.data.prepared import Prepared, find_prepared, open_found
from framework.data.shard import shard_path
from framework.data.store import StoreMeta
from framework.errors import EXIT_USER, DamagedStore, DataError
from framework.recipe.check import check_recipe
from framework.recipe.schema import Data, Recipe, Source
from framework.train.state import RunState, count_read
from tests.grid import IN_TURN
from tests.unit.test_conversations import write_jsonl as write_records
from tests.unit.test_data_prepare import make_recipe, make_texts, write_jsonl

pytestmark = IN_TURN

CONTEXT, STEP = 16, 6
KEYS: dict[str, Any] = {"seed": 5, "context": CONTEXT}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "MIN_SHARD_BYTES", 2000)
    monkeypatch.setattr(records, "TEXT_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr(beside, "HEAD_BYTES", 5000)
    monkeypatch.setattr(growing, "WINDOW_TOKENS", 40 * CONTEXT)
    monkeypatch.setattr(loader, "STEPS_READ_AT_ONCE", 1)
    monkeypatch.setattr(growing, "LOOK_EVERY_S", 0.01)


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    paths = [write_jsonl(tmp_path / f"{n}.jsonl", make_texts(250 - 150 * n, seed=n)) for n in range(2)]
    recipe = make_recipe(tmp_path / "tokens", *paths, mode="stream", pack="documents")
    return replace(recipe, train=replace(recipe.train, seed=5))


def begin(recipe: Recipe) -> Prepared:
    return prepare(recipe, 1, progress=False)


def reopen(recipe: Recipe) -> Prepared:
    return open_found(find_prepared(recipe))


def open_loader(prepared: Prepared, b: int = STEP, rank: int = 0, dp: int = 1, **more: Any) -> Loader:
    keys = {"pack": "documents", "sequences_per_microbatch": b, "num_microbatches": STEP // b // dp, **KEYS, **more}
    return Loader(prepared, dp_rank=rank, dp_size=dp, **keys)


def read_steps(opened: Loader, steps: range) -> list[Any]:
    return [
        [(each.input_ids.tolist(), each.labels.tolist(), each.sources) for each in opened.batch(step * STEP)]
        for step in steps
    ]


def ids_of(opened: Loader, steps: range) -> list[Any]:
    return [
        row for step in read_steps(opened, steps) for ids, labels, _ in step for row in zip(ids, labels, strict=True)
    ]


def test_tokens_that_come_are_those_that_are_there(recipe: Recipe) -> None:
    """More than an epoch of each source, with shards that come while they are waited for; then anew, in two ranks."""
    prepared = begin(recipe)
    assert not any(source.streams["train"].is_whole for source in prepared.sources)
    assert "the others come beside the run" in summarize_data(prepared, 0.1)
    held_out = [source.streams["validation"].num_tokens for source in prepared.sources]
    rest = threading.Thread(target=tokenize_rest, args=(recipe, 1))
    with open_loader(prepared) as opened:
        steps = range(140)
        first = ids_of(opened, range(2))
        rest.start()
        found = first + ids_of(opened, range(2, len(steps)))
        assert not opened.is_growing
    rest.join()
    whole = reopen(recipe)
    assert whole.fingerprint == prepared.fingerprint
    assert [source.streams["validation"].num_tokens for source in whole.sources] == held_out
    with open_loader(whole) as opened:
        assert ids_of(opened, steps) == found
    with open_loader(whole, b=1, rank=0, dp=2) as even, open_loader(whole, b=1, rank=1, dp=2) as odd:
        halves = [ids_of(each, range(5)) for each in (even, odd)]
    assert [row for pair in zip(*halves, strict=True) for row in pair] == found[: 5 * STEP]
    assert len({tuple(ids) for ids, _ in found[: 8 * STEP]}) > 8 * STEP - 3


def test_every_sample_of_an_epoch_once(recipe: Recipe) -> None:
    begin(recipe)
    tokenize_rest(recipe, 1)
    with open_loader(reopen(recipe)) as opened:
        opened._await(10**6)
        order = opened._order
    source, sample = order.locate(np.arange(4 * int(order.sizes.max())))
    for number, size in enumerate(order.sizes.tolist()):
        own = sample[source == number]
        assert sorted(own[:size]) == list(range(size)) == sorted(own[size : 2 * size])
        assert own[:size].tolist() != own[size : 2 * size].tolist()
        window = int(order.windows[number])
        assert sorted(own[:window]) == list(range(window))


def test_a_store_that_was_prepared_is_ordered_as_before() -> None:
    order = SampleOrder.of(7, {"a": (1.0, 50)})
    windowed = SampleOrder.of(7, {"a": (1.0, 50)}, windows={"a": 50})
    assert order.locate(np.arange(120))[1].tolist() == windowed.locate(np.arange(120))[1].tolist()


def test_shards_take_no_descriptors(recipe: Recipe) -> None:
    """There are thousands, and `ulimit -n` is often 1024."""
    begin(recipe)
    tokenize_rest(recipe, 1)
    before = len(os.listdir("/proc/self/fd"))
    prepared = reopen(recipe)
    assert sum(source.meta.source["shards"] for source in prepared.sources) > 5
    assert len(os.listdir("/proc/self/fd")) <= before


def read_shards(prepared: Prepared) -> dict[str, bytes]:
    folders = [source.folder for source in prepared.sources]
    return {f"{folder.name}/{path.name}": path.read_bytes() for folder in folders for path in sorted(folder.iterdir())}


def children() -> list[int]:
    return [int(each) for each in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def test_a_process_beside_is_killed_and_the_next_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has the usual sizes, so the source has several shards of half a megabyte."""
    monkeypatch.undo()
    monkeypatch.setattr(beside, "HEAD_BYTES", 1)
    monkeypatch.setattr(growing, "LOOK_EVERY_S", 0.01)
    path = write_jsonl(tmp_path / "a.jsonl", make_texts(24_000, num_words=10))
    recipe = make_recipe(tmp_path / "tokens", path, mode="stream", pack="concat", bpe_text_bytes=100_000)
    recipe = replace(recipe, train=replace(recipe.train, seed=5))
    prepared = begin(recipe)
    stream = prepared.sources[0].streams["train"]
    assert isinstance(stream, growing.GrowingStream) and stream.num_shards > 2  # noqa: PT018
    known = set(children())
    with tokenizing(recipe, prepared):
        (process,) = set(children()) - known
        os.kill(process, signal.SIGKILL)
        with pytest.raises(DataError, match=r"data.sources.s0: its process \d+ ended with signal 9"):
            stream.wait_for(10**9, threading.Event(), None)
    (prepared.sources[0].folder / prepared.failed).unlink()  # as `open_data` does
    said: list[str] = []
    monkeypatch.setattr(growing, "SAY_AFTER_S", 0.0)
    prepared = reopen(recipe)
    stream = prepared.sources[0].streams["train"]
    assert isinstance(stream, growing.GrowingStream)
    with tokenizing(recipe, prepared):
        stream.wait_for(10**9, threading.Event(), said.append)
    assert stream.is_whole
    assert said[0].startswith("waiting for tokens of data.sources.s0:")
    assert not set(children()) - known
    resumed = read_shards(prepared)
    other = replace(recipe, data=replace(recipe.data, root=str(tmp_path / "other")))
    again = begin(other)
    tokenize_rest(other, 1)
    assert read_shards(again) == resumed


def test_a_tokenizer_that_fails_says_why(recipe: Recipe, tmp_path: Path) -> None:
    prepared = begin(recipe)
    folder = prepared.sources[0].folder
    (folder / "failed-other").write_text("the disk of another run's node is full")
    (folder / prepared.failed).write_text("0.jsonl, row 3: not JSON")
    with (
        open_loader(prepared) as opened,
        pytest.raises(DataError, match=r"s0: 0.jsonl, row 3: not JSON. The next start"),
    ):
        read_steps(opened, range(100))
    tokenize_rest(recipe, 1)
    assert reopen(recipe).sources[0].streams["train"].is_whole  # whatever stands there
    os.utime(tmp_path / "0.jsonl", (1, 1))
    with pytest.raises(DataError, match="not prepared, or changed"):
        find_prepared(recipe)


def test_a_full_disk_does_not_hide_the_reason(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has no room for the file with the reason either."""
    prepared = begin(recipe)
    folder, stream = prepared.sources[0].folder, prepared.sources[0].streams["train"]
    assert isinstance(stream, growing.GrowingStream)
    (folder / prepared.failed).mkdir()
    process: Any = SimpleNamespace(stdout=io.BytesIO(b"No space left on device"), wait=lambda: EXIT_USER)
    beside._note_end(process, {folder: stream}, prepared.failed, threading.Event())
    with pytest.raises(DataError, match="s0: No space left on device"):
        stream.wait_for(10**9, threading.Event(), None)


def test_sources_that_are_gone_are_missed_where_tokens_are(recipe: Recipe, tmp_path: Path) -> None:
    begin(recipe)
    kept = (tmp_path / "1.jsonl").rename(tmp_path / "kept")
    with pytest.raises(DataError, match=r"files of data.sources.s1 are gone before all is tokenized. Restore them"):
        tokenize_rest(recipe, 1)
    kept.rename(tmp_path / "1.jsonl")
    tokenize_rest(recipe, 1)
    (tmp_path / "1.jsonl").unlink()
    tokenize_rest(recipe, 1)  # has nothing to do


def test_bad_records_of_former_starts_count(recipe: Recipe, tmp_path: Path) -> None:
    """Of those that may be there only the last shard's are left to be met."""
    lines = (tmp_path / "0.jsonl").read_text().splitlines()
    for row in range(20, 240, 10):
        lines[row] = "no json"
    (tmp_path / "0.jsonl").write_text("\n".join(lines))
    begin(replace(recipe, data=replace(recipe.data, bad_records=99)))
    tokenize_rest(replace(recipe, data=replace(recipe.data, bad_records=99)), 1)
    folder = reopen(recipe).sources[0].folder
    reports = sorted(folder.glob("[0-9]*.json"))
    reports[-1].unlink()
    with pytest.raises(DataError, match=r"data.bad_records=5"):
        tokenize_rest(replace(recipe, data=replace(recipe.data, bad_records=5)), 1)


def test_the_tokens_of_the_head_are_in_the_fingerprint(recipe: Recipe, tmp_path: Path) -> None:
    """Of a file of equal name and size, whose words have changed."""
    before = begin(recipe)
    path = tmp_path / "0.jsonl"
    text = path.read_text()
    path.write_text("\n".join(line[:10] + line[10:-2].swapcase() + line[-2:] for line in text.splitlines()) + "\n")
    other = replace(recipe, model=replace(recipe.model, tokenizer=str(before.tokenizer)))
    other = replace(other, data=replace(other.data, bpe_vocab=None))
    changed = begin(other).fingerprint
    path.write_text(text)
    assert begin(other).fingerprint != changed


def test_a_loader_that_is_closed_waits_no_longer(recipe: Recipe) -> None:
    opened = open_loader(begin(recipe))
    opened.batch(0)
    opened._ahead = 0, opened._thread.submit(opened._read, 10**6)
    opened.close()


def test_a_damaged_shard_is_named(recipe: Recipe) -> None:
    prepared = begin(recipe)
    path = shard_path(prepared.sources[0].folder, 0, "train.tokens")
    meta = StoreMeta.read(path.parent)
    assert meta is not None
    assert not list(find_damage(path.parent, meta))
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
    with open_loader(reopen(recipe)) as opened, pytest.raises(DamagedStore, match=r"00000.train"):
        opened.batch(0)
    assert any("00000.train" in line for line in find_damage(path.parent, meta))


def test_validation_is_of_the_head(recipe: Recipe) -> None:
    prepared = begin(recipe)
    keys: dict[str, Any] = {"context": CONTEXT, "pack": "documents", "sequences_per_microbatch": 2}
    before = [each.input_ids.tolist() for each in validation_batches(prepared, **keys)]
    tokenize_rest(recipe, 1)
    assert [each.input_ids.tolist() for each in validation_batches(reopen(recipe), **keys)] == before
    with pytest.raises(DataError, match=r"data.validation=1e-12 holds no document out"):
        begin(replace(recipe, data=replace(recipe.data, validation=1e-12)))


def test_a_stage_of_another_context_goes_on_behind_the_window_that_was_read(recipe: Recipe) -> None:
    """Of two sources, one read twice as often as the other, behind a stage of which 7 and 5 samples were read."""
    short, long = (replace(recipe, batch=replace(recipe.batch, context=each)) for each in (16, 64))
    state = RunState("run", "data", samples=90, read={"s0": 7, "s1": 5}, weights={"s0": 2.0, "s1": 1.0})
    assert count_read(state, short, short) == {"s0": 67, "s1": 35}
    assert count_read(state, short, long) == {"s0": 2 * growing.count_window(64), "s1": growing.count_window(64)}
    unread = replace(state, samples=0, read={"s1": growing.count_window(64)})
    assert count_read(unread, long, short) == {"s0": 0, "s1": growing.count_window(16)}


@pytest.mark.parametrize(("was", "now", "left_out"), [(16, 64, 1), (64, 16, 1), (64, 48, 2), (48, 64, 1)])
def test_no_token_of_a_stream_is_read_twice_where_its_rows_get_another_length(
    recipe: Recipe, was: int, now: int, left_out: int
) -> None:
    num_tokens, num_read = 8 * growing.WINDOW_TOKENS, 5 * growing.WINDOW_TOKENS // was // 3
    first, then = (replace(recipe, batch=replace(recipe.batch, context=each)) for each in (was, now))
    state = RunState("run", "data", samples=num_read, weights={"s0": 1.0})
    starts = count_read(state, first, then)
    times = np.zeros(num_tokens, np.uint8)
    for context, count, read in ((was, num_read, {}), (now, num_tokens // now - starts["s0"], starts)):
        order = SampleOrder.of(1, {"s0": (1.0, num_tokens // context)}, read, {"s0": growing.count_window(context)})
        for sample in order.locate(np.arange(count))[1]:
            times[sample * context : (sample + 1) * context] += 1
    assert times.max() == 1
    assert 0 < (times[: -max(was, now)] == 0).sum() < left_out * growing.WINDOW_TOKENS


def test_a_data_set_of_the_hub_is_listed_once_and_fetched_file_by_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = tmp_path / "hub"
    away.mkdir()
    texts = make_texts(90)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts[:30]}), away / "a.parquet", row_group_size=7)
    (away / "b.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": each}) + "\n" for each in texts[30:60]).encode())
    )
    (away / "c.json").write_text(json.dumps([{"text": each} for each in texts[60:]]))
    urls = [f"file://{path}" for path in sorted(away.iterdir())]
    config = SimpleNamespace(data_files={"train": urls})
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *words: SimpleNamespace(config=config))
    monkeypatch.setattr(source_module, "download_dataset", None)
    own = make_recipe(tmp_path / "own", "owner/name", mode="stream")  # whose tokenizer is trained on some of the files
    (source,) = begin(own).sources
    assert len(json.loads((source.folder / "hub.json").read_text())["files"]) == len(urls)
    local = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "t.jsonl", texts))
    tokenizer = str(prepare(local, 1, progress=False).tokenizer)
    recipe = replace(
        local, data=replace(local.data, sources={"s0": Source("owner/name")}, mode="stream", bpe_vocab=None)
    )
    recipe = replace(recipe, model=replace(recipe.model, tokenizer=tokenizer))
    monkeypatch.setattr(beside, "HEAD_BYTES", 1)
    begin(recipe)
    config.data_files["train"] = urls[:1]  # the hub has another commit by now
    tokenize_rest(recipe, 1)
    (source,) = reopen(recipe).sources
    assert source.streams["train"].is_whole
    plain = prepare(replace(local, model=recipe.model, data=replace(local.data, bpe_vocab=None)), 1, progress=False)
    assert {path.suffix for path in source.folder.iterdir()} == {"", ".json", ".tokens", ".ends", ".counts"}
    assert source.streams["train"].num_tokens > 0.8 * plain.sources[0].streams["train"].num_tokens


def test_a_conversation_of_a_stream_is_shown_without_a_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
    urls = [f"file://{write_records(tmp_path / f'{n}.jsonl', [{'messages': said}] * 9)}" for n in range(2)]
    config = SimpleNamespace(data_files={"train": urls})
    monkeypatch.setattr(datasets, "load_dataset_builder", lambda *words: SimpleNamespace(config=config))
    monkeypatch.setattr(source_module, "download_dataset", None)
    sources = {"s0": Source("owner/name", messages="messages")}
    given = {"mode": "stream", "pack": "documents", "chat_template": "chatml", "validation": 0.0}
    prepare_command(make_recipe(tmp_path / "tokens", sources=sources, **given), workers=1, show=11)
    shown = capsys.readouterr().out
    assert "record 11 (1.jsonl)" in shown
    assert "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[[Hello!<|im_end|>]]" in shown


@pytest.mark.parametrize(
    "data",
    [
        {"root": "s3://bucket/a"},
        {"pack": "best_fit"},
        {"temperature": 2.0},
        {"sources": {"a": Source("p", format="megatron")}, "bpe_vocab": None},
    ],
)
def test_what_a_stream_cannot_do_is_refused(data: dict[str, Any]) -> None:
    recipe = make_recipe(Path("r"), Path("a"), Path("b"))
    recipe = replace(recipe, batch=replace(recipe.batch, sequences_per_step=4, sequences_per_microbatch=4))
    streamed = replace(recipe, data=replace(recipe.data, mode="stream"))
    assert not [each for each in check_recipe(streamed, {}) if each.key == "data.mode"]
    refused = replace(recipe, data=Data(**{**vars(streamed.data), **data}))
    assert "data.mode" in [each.key for each in check_recipe(refused, {})]
