"""Preparing: equal bytes however it is interrupted and by how many workers, and clear words for what cannot be."""

import errno
import fcntl
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast

from framework.commands.prepare import prepare_command
from framework.data import jobs as jobs_module
from framework.data import prepare as prepare_module
from framework.data import tokenize as tokenize_module
from framework.data.join import JoinPlan
from framework.data.prepare import prepare, summarize_data
from framework.data.prepared import (
    Prepared,
    _describe_source,
    _key,
    _key_files,
    compute_entropy,
    find_prepared,
    locate,
    open_found,
)
from framework.data.records import MIN_SHARD_BYTES, plan_shards
from framework.data.shard import ShardJob, ShardReport, hash_document, settle_threshold, tokenize_shards
from framework.data.source import list_files
from framework.data.store import Split
from framework.data.tokenize import decode_start, load_encoder, load_tokenizer, train_bpe
from framework.errors import EXIT_DONE, EXIT_USER, DataError, ModelError
from framework.files import write_atomically
from framework.recipe.schema import Data, Model, Recipe, Source

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


def make_texts(count: int, seed: int = 0, num_words: int = 12) -> list[str]:
    rng = random.Random(seed)
    return [f"{n} " + " ".join(rng.choices(WORDS, k=num_words)) for n in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def make_recipe(root: Path, *paths: Path | str, **data: Any) -> Recipe:
    sources = {f"s{number}": Source(str(path)) for number, path in enumerate(paths)}
    return Recipe(data=Data(**{"sources": sources, "root": str(root), "bpe_vocab": 300, "validation": 0.1, **data}))


def build(recipe: Recipe, workers: int = 1) -> Prepared:
    return prepare(recipe, workers, progress=False)


def read_documents(prepared: Prepared, split: Split, source: int = 0) -> list[str]:
    """The texts of a split, by way of the kept tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer)
    stream = prepared.sources[source].streams[split]
    if not stream.num_tokens:
        return []
    tokens = stream.read(0, stream.num_tokens)
    documents = np.split(tokens, stream.ends_within(0, stream.num_tokens))
    assert documents[-1].size == 0
    assert all(document[-1] == prepared.eos_id for document in documents[:-1])
    return [tokenizer.decode(document[:-1]) for document in documents[:-1]]


class JoinInterrupted(Exception):
    pass


def tokenize_only(recipe: Recipe) -> Path:
    """Prepares as far as the join; the folder of the only store."""

    def interrupt(folder: Path, progress: bool) -> None:
        raise JoinInterrupted(folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_module, "join_store", interrupt)
        with pytest.raises(JoinInterrupted) as caught:
            build(recipe)
    folder: Path = caught.value.args[0]
    return folder


def read_tree(root: Path) -> dict[str, bytes]:
    """Every file under a root but the lock files."""
    paths = [path for path in root.rglob("*") if path.is_file() and not path.name.endswith(".lock")]
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in paths}


def test_the_store_holds_every_text_once(tmp_path: Path) -> None:
    texts = make_texts(200)
    prepared = build(make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", texts)))
    train, held_out = read_documents(prepared, "train"), read_documents(prepared, "validation")
    assert sorted(train + held_out) == sorted(texts)
    assert [text for text in texts if text in set(train)] == train
    assert held_out == [text for text in texts if hash_document(text) < 0.1 * 2**64]
    stream = prepared.sources[0].streams["train"]
    assert stream.num_documents == len(train) > 150
    assert stream.read(0, 1).dtype == np.uint16


def test_unigram_entropy_is_that_of_the_validation_tokens(tmp_path: Path) -> None:
    prepared = build(make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_texts(200))))
    stream = prepared.sources[0].streams["validation"]
    tokens = stream.read(0, stream.num_tokens).tolist()
    frequencies = [tokens.count(token) / len(tokens) for token in set(tokens)]
    assert prepared.unigram_entropy == pytest.approx(-sum(p * math.log(p) for p in frequencies), rel=1e-12)
    assert compute_entropy(np.array([5, 5, 0, 5, 5])) == pytest.approx(math.log(4))
    assert compute_entropy(np.zeros(4, dtype=np.int64)) is None


def test_no_validation_split_where_none_is_asked_for(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    prepared = build(make_recipe(tmp_path / "tokens", source, validation=0.0))
    streams = prepared.sources[0].streams
    assert (streams["validation"].num_tokens, streams["train"].num_documents) == (0, 50)
    assert prepared.unigram_entropy is None


@pytest.mark.parametrize("num_documents", [2, 3, 10])
@pytest.mark.parametrize("validation", [1e-9, 0.5])
def test_a_tiny_corpus_has_documents_on_both_sides(tmp_path: Path, num_documents: int, validation: float) -> None:
    texts = make_texts(num_documents)
    prepared = build(make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", texts), validation=validation))
    train, held_out = read_documents(prepared, "train"), read_documents(prepared, "validation")
    assert train
    assert held_out
    assert sorted(train + held_out) == sorted(texts)
    if validation < 1e-3:
        assert held_out == [min(texts, key=hash_document)]


def test_one_document_cannot_be_split(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", ["one"] * 3))
    with pytest.raises(DataError, match=r"data.validation=0.1 .*Set data.validation=0"):
        build(recipe)
    whole = build(replace(recipe, data=replace(recipe.data, validation=0.0)))
    assert whole.sources[0].streams["train"].num_documents == 3


def test_settled_threshold_moves_only_as_far_as_it_must() -> None:
    hashes = [50, 60, 30, 90]
    assert settle_threshold(40, hashes) == 40
    assert settle_threshold(10, hashes) == 31
    assert settle_threshold(95, hashes) == 90
    assert settle_threshold(0, hashes) == 0
    assert settle_threshold(95, [7, 7]) == settle_threshold(95, []) == 0


@pytest.fixture(scope="module")
def three_shards(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A source of three shards, and the files that one process makes of it."""
    folder = tmp_path_factory.mktemp("three_shards")
    source = write_jsonl(folder / "a.jsonl", make_texts(2500, num_words=100))
    assert source.stat().st_size > 2.5 * MIN_SHARD_BYTES
    plan = JoinPlan.read(build(make_recipe(folder / "tokens", source)).sources[0].folder)
    assert plan is not None
    assert len(plan.shards) == 3
    return source, read_tree(folder / "tokens")


def test_workers_do_not_change_a_byte(tmp_path: Path, three_shards: tuple[Path, dict[str, bytes]]) -> None:
    source, whole = three_shards
    build(make_recipe(tmp_path, source), workers=3)
    assert read_tree(tmp_path) == whole


def test_a_finished_store_is_reused_untouched(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_texts(50)))
    build(recipe)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens").rglob("*.tokens")}
    assert times
    assert build(recipe).fingerprint == find_prepared(recipe).fingerprint
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens").rglob("*.tokens")} == times


def test_a_changed_file_makes_a_new_store_and_leaves_the_old(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    recipe = make_recipe(tmp_path / "tokens", source)
    old = build(recipe)
    write_jsonl(source, make_texts(51, seed=1))
    with pytest.raises(DataError, match=r"not prepared, or changed since: data.sources.s0 .*meshwright prepare"):
        find_prepared(recipe)
    new = build(recipe)
    assert new.fingerprint != old.fingerprint
    assert old.sources[0].folder.exists()


def test_a_store_outlives_its_source(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(50))
    recipe = make_recipe(tmp_path / "tokens", source)
    fingerprint = build(recipe).fingerprint
    source.unlink()
    assert find_prepared(recipe).fingerprint == build(recipe).fingerprint == fingerprint
    with pytest.raises(DataError, match="no such file"):
        find_prepared(replace(recipe, data=replace(recipe.data, bpe_vocab=301)))


@pytest.mark.parametrize(
    "name", ["a.txt", "a.jsonl", "a.json", "a.jsonl.gz", "a.parquet", "a.csv", "a.jsonlines", "a.json.1"]
)
def test_a_store_of_an_earlier_version_serves_unless_the_file_was_read_as_text_then(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    (file,) = list_files("s", Source(str(tmp_path / name))).files
    earlier = _key([[[file.name, file.num_bytes, file.mtime_ns]]])
    assert (_key_files([(file,)]) == earlier) == (name not in ("a.csv", "a.jsonlines", "a.json.1"))


def test_the_text_of_the_bpe_names_its_store_unless_it_is_the_default(tmp_path: Path) -> None:
    """Stores and runs from before the key was there must be found again, so the default adds nothing to a name."""
    texts = [text * 200 for text in make_texts(500)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    recipe = make_recipe(tmp_path / "tokens", source)
    few = replace(recipe, data=replace(recipe.data, bpe_text_bytes=1))
    assert len(plan_shards(list_files("s0", few.data.sources["s0"]).files)) > 1
    sampled = [sum(1 for _ in prepare_module._sample_texts(each, locate(each).stores, False)) for each in (few, recipe)]
    assert 0 < 2 * sampled[0] < sampled[1]
    assert locate(few).tokenizer != locate(recipe).tokenizer
    assert locate(few).stores[0].folder != locate(recipe).stores[0].folder
    words = {"bpe_vocab": 300, "validation": 0.1, "sources": [_describe_source(few.data.sources["s0"])]}
    assert f"tokenizer-{_key(words)}-" in str(locate(recipe).tokenizer)


def test_each_commit_of_hub_weights_has_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`prepare` may run before a run settles the commit, and stores from before commits were noted serve any."""
    first, other = "a" * 40, "b" * 40
    repository = tmp_path / "models--owner--name"
    for commit, entries in ((first, WORDS), (other, WORDS[::-1])):
        save_words(repository / "snapshots" / commit, entries)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(first)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_texts(9)), bpe_vocab=None)

    def at(revision: str | None) -> Recipe:
        return replace(recipe, model=Model(weights="owner/name", revision=revision))

    newest = build(at(None))
    assert [find_prepared(at(each)).tokenizer for each in (None, first, "main")] == [newest.tokenizer] * 3
    with pytest.raises(DataError, match="not prepared"):
        find_prepared(at(other))
    older = build(at(other))
    assert older.fingerprint != newest.fingerprint
    assert [find_prepared(at(each)).tokenizer for each in (other, first)] == [older.tokenizer, newest.tokenizer]
    info = json.loads((newest.tokenizer / "info.json").read_text())
    assert info.pop("revision") == first
    (newest.tokenizer / "info.json").write_text(json.dumps(info))
    assert find_prepared(at(other)).tokenizer == newest.tokenizer


def save_words(folder: Path, words: list[str]) -> None:
    """A tokenizer of whole words."""
    entries = {each: number for number, each in enumerate(["<end>", "?", *words])}
    tokenizer = Tokenizer(models.WordLevel(entries, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="?").save_pretrained(folder)


def test_equal_text_elsewhere_has_an_equal_fingerprint(tmp_path: Path) -> None:
    fingerprints = set()
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        source = write_jsonl(tmp_path / place / "a.jsonl", make_texts(50))
        os.utime(source, (1, len(fingerprints)))
        fingerprints.add(build(make_recipe(tmp_path / place / "tokens", source)).fingerprint)
    assert len(fingerprints) == 1


def test_weights_are_part_of_the_fingerprint_but_not_of_the_store(tmp_path: Path) -> None:
    sources = [write_jsonl(tmp_path / f"{n}.jsonl", make_texts(50, n)) for n in range(2)]
    recipe = make_recipe(tmp_path / "tokens", *sources)
    heavier = {**recipe.data.sources, "s1": replace(recipe.data.sources["s1"], weight=3.0)}
    one, two = build(recipe), find_prepared(replace(recipe, data=replace(recipe.data, sources=heavier)))
    assert one.fingerprint != two.fingerprint
    assert [source.folder for source in one.sources] == [source.folder for source in two.sources]


def test_a_source_of_weight_zero_is_left_out(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_texts(50)), tmp_path / "missing")
    left_out = {**recipe.data.sources, "s1": replace(recipe.data.sources["s1"], weight=0.0)}
    prepared = build(replace(recipe, data=replace(recipe.data, sources=left_out)))
    assert [source.name for source in prepared.sources] == ["s0"]


def test_prepare_command_prints_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_texts(50)))
    assert prepare_command(recipe, workers=1) == EXIT_DONE
    printed = capsys.readouterr()
    assert "unigram entropy of the validation split" in printed.out
    assert "cores" in printed.out
    assert "tokenize: 100%" in printed.err


# Interrupted and concurrent

SCRIPT = """
import sys
from pathlib import Path
from framework.data.prepare import prepare
from framework.recipe.schema import Data, Recipe, Source
if __name__ == "__main__":
    data = Data(sources={"s0": Source(sys.argv[1])}, root=sys.argv[2], bpe_vocab=300, validation=0.1)
    prepare(Recipe(data=data), workers=2, progress=False)
"""


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.005)


def list_children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.grid
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds child processes through /proc")
def test_after_kill_9_it_resumes_to_equal_bytes_and_leaves_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(6000, num_words=100))
    build(make_recipe(tmp_path / "whole", source), workers=2)
    (tmp_path / "prepare.py").write_text(SCRIPT)
    killed = subprocess.Popen([sys.executable, tmp_path / "prepare.py", source, tmp_path / "killed"])
    wait_for(lambda: len(list((tmp_path / "killed").rglob("0*.json"))) >= 2, "two finished shards")
    children = list_children(killed.pid)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    wait_for(lambda: not any(map(is_running, children)), "the workers to end with their parent")
    finished = {int(path.stem) for path in (tmp_path / "killed").rglob("0*.json")}
    assert len(children) >= 2
    assert not list((tmp_path / "killed").rglob("shards.json"))
    written_again: set[int] = set()

    def tokenize(jobs: list[ShardJob], workers: int) -> Iterator[tuple[ShardJob, ShardReport]]:
        written_again.update(job.shard for job in jobs)
        return tokenize_shards(jobs, workers)

    monkeypatch.setattr(jobs_module, "tokenize_shards", tokenize)
    build(make_recipe(tmp_path / "killed", source))
    assert read_tree(tmp_path / "killed") == read_tree(tmp_path / "whole")
    assert written_again
    assert not written_again & finished, "finished shards are not written again"


def test_remains_of_an_unfinished_shard_do_not_survive(
    tmp_path: Path, three_shards: tuple[Path, dict[str, bytes]]
) -> None:
    source, whole = three_shards
    folder = tokenize_only(make_recipe(tmp_path / "tokens", source))
    (folder / "shards.json").unlink()
    (folder / "00001.json").unlink()
    (folder / "00001.train.tokens").write_bytes(b"half of a shard")
    (folder / "00001.validation.tokens.unfinished").write_bytes(b"half of a shard")
    build(make_recipe(tmp_path / "tokens", source))
    assert read_tree(tmp_path / "tokens") == whole


def test_a_shard_whose_only_document_changes_sides_leaves_no_files_of_the_other(tmp_path: Path) -> None:
    for number in range(2):
        padded = {"text": f"document {number}", "other": "x" * MIN_SHARD_BYTES}
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(padded))
    folder = tokenize_only(make_recipe(tmp_path / "tokens", f"{tmp_path}/*.jsonl", validation=1e-9))
    found = sorted(path.name for path in folder.glob("*.tokens"))
    assert found in (
        ["00000.train.tokens", "00001.validation.tokens"],
        ["00000.validation.tokens", "00001.train.tokens"],
    )


def test_a_damaged_store_is_named(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_texts(50)))
    tokens = build(recipe).sources[0].folder / "train.tokens"
    os.truncate(tokens, 10)
    with pytest.raises(DataError, match=r"/train.tokens: 10 bytes, but .*delete the folder"):
        open_found(find_prepared(recipe))


def test_a_second_process_waits_for_the_first(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_texts(50)))
    folder = build(recipe).sources[0].folder
    (folder / "store.json").unlink()
    with open(folder.with_name(f".{folder.name}.lock")) as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = threading.Thread(target=build, args=(recipe,))
        second.start()
        second.join(0.3)
        assert second.is_alive()
        assert not (folder / "store.json").exists()
    second.join(30)
    assert (folder / "store.json").exists()


# What cannot be


def test_bad_records_are_an_error_that_names_file_and_row(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    source.write_bytes(source.read_bytes() + b'{"text": "broken\n{"body": "x"}\n')
    recipe = make_recipe(tmp_path / "tokens", source)
    with pytest.raises(
        DataError,
        match=r"a.jsonl, row 21: not JSON.*s0 has at least 1 bad record and data.bad_records=0.* quarantine it$",
    ) as caught:
        build(recipe)
    assert caught.value.exit_code == EXIT_USER
    assert not list((tmp_path / "tokens").rglob("*.tokens*"))
    with pytest.raises(DataError, match="not prepared"):
        find_prepared(recipe)


def test_bad_records_within_the_budget_are_quarantined(tmp_path: Path) -> None:
    texts = make_texts(20)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    source.write_bytes(b'{"text": "broken\n' + source.read_bytes() + b'{"body": "x"}\n')
    recipe = make_recipe(tmp_path / "tokens", source, bad_records=2)
    prepared = build(recipe)
    assert sorted(read_documents(prepared, "train") + read_documents(prepared, "validation")) == sorted(texts)
    quarantine = (prepared.sources[0].folder / "quarantine.jsonl").read_text().splitlines()
    found = [(json.loads(line)["file"], json.loads(line)["row"]) for line in quarantine]
    assert found == [(str(source), 1), (str(source), 22)]
    with pytest.raises(DataError, match=r"quarantine.jsonl lists 2 bad records .*data.bad_records=1"):
        find_prepared(replace(recipe, data=replace(recipe.data, bad_records=1)))


def test_the_budget_counts_all_shards_of_a_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("framework.data.records.MIN_SHARD_BYTES", 1)
    for number in range(3):
        path = write_jsonl(tmp_path / f"{number}.jsonl", make_texts(10, number))
        path.write_bytes(path.read_bytes() + b"broken\n")
    with pytest.raises(DataError, match=r"row 11: not JSON.*at least 2 bad"):
        build(make_recipe(tmp_path / "tokens", f"{tmp_path}/*.jsonl", bad_records=1))


def test_an_id_outside_the_vocabulary_is_a_bad_record(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"<eos>": 0, "one": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 77)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(tmp_path / "tokenizer")
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", ["one"]))
    with pytest.raises(DataError, match=r"a.jsonl, row 1: token id 77 is outside the tokenizer's vocabulary of 3"):
        build(replace(recipe, model=Model(tokenizer=str(tmp_path / "tokenizer"))))


def test_a_model_vocabulary_smaller_than_the_tokenizer_is_an_error(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_texts(50)))
    small = replace(recipe, model=Model(config={"vocab_size": 299}))
    with pytest.raises(DataError, match=r"model.config.vocab_size=299 is smaller .* 300"):
        build(small)
    assert not list((tmp_path / "tokens").rglob("*.tokens*"))
    assert build(replace(recipe, model=Model(config={"vocab_size": 300}))).vocab_size == 300
    with pytest.raises(DataError, match=r"model.config.vocab_size=299"):
        find_prepared(small)


def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, three_shards: tuple[Path, dict[str, bytes]]
) -> None:
    source, whole = three_shards
    recipe = make_recipe(tmp_path / "tokens", source)
    rename = os.replace

    def run_out_of_space(unfinished: Path, path: Path) -> None:
        if path.name.startswith("00001."):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(unfinished, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", run_out_of_space)
        with pytest.raises(
            DataError, match=r"00001\.\w+\.\w+: No space left.*About [\d,]+ more bytes.*data.root="
        ) as caught:
            build(recipe)
    assert caught.value.exit_code == EXIT_USER
    assert [path.name for path in (tmp_path / "tokens").rglob("0*.json")] == ["00000.json"]
    assert not list((tmp_path / "tokens").rglob("*.unfinished"))
    build(recipe)
    assert read_tree(tmp_path / "tokens") == whole


def test_a_file_that_does_not_fit_does_not_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_out_of_space(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", run_out_of_space)
    with pytest.raises(OSError, match=r"No space left.*/a'") as caught, write_atomically(tmp_path / "a") as file:
        file.write(b"text")
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dangling", [False, True])
def test_nothing_is_written_through_a_planted_link(tmp_path: Path, dangling: bool) -> None:
    """Where others may write into data.root, they may guess the names of its locks and unfinished files."""
    victim, root = tmp_path / "victim", tmp_path / "tokens"
    recipe = make_recipe(root, write_jsonl(tmp_path / "a.jsonl", make_texts(50)))
    places = locate(recipe)
    assert places.tokenizer is not None
    store, tokenizer = places.stores[0].folder, places.tokenizer
    store.mkdir(parents=True)
    locks = [folder.with_name(f".{folder.name}.lock") for folder in (store, tokenizer)]
    unfinished = [
        store / f"{name}.unfinished" for name in ("store.json", "shards.json", "00000.json", "00000.train.ends")
    ]
    joined = [store / name for name in ("train.tokens", "validation.ends")]
    unfinished_tokenizer = tokenizer.with_name(tokenizer.name + ".unfinished")
    (tmp_path / "folder").mkdir()
    for link in (*locks, *unfinished, *joined):
        if not dangling:
            victim.write_text("precious")
        link.symlink_to(victim)
    unfinished_tokenizer.symlink_to(tmp_path / "folder")
    for link in (*locks, *joined):
        with pytest.raises(DataError, match=f"{link}: a link, .*Remove it"):
            build(recipe)
        link.unlink()
    build(recipe)
    assert not list((tmp_path / "folder").iterdir())
    assert not victim.exists() if dangling else victim.read_text() == "precious"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_words_of_a_bad_record_are_safe_to_print_and_its_row_is_quarantined(tmp_path: Path, name: str) -> None:
    bad = json.dumps({"\x1b]0;\x07": 1, "\ud800": 2, "x" * 5000: 3})
    lines = [json.dumps({"text": text}) for text in make_texts(50)] + [bad]
    (tmp_path / name).write_text("\n".join(lines) if name == "a.jsonl" else f"[{','.join(lines)}]")
    recipe = make_recipe(tmp_path / "tokens", tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}, row 51: field `text` is missing \(there is: ") as caught:
        build(recipe)
    str(caught.value).encode()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2000
    prepared = build(replace(recipe, data=replace(recipe.data, bad_records=1)))
    (kept,) = map(json.loads, (prepared.sources[0].folder / "quarantine.jsonl").read_text().splitlines())
    assert (kept["file"], kept["row"]) == (str(tmp_path / name), 51)


def test_an_empty_source_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n")
    with pytest.raises(DataError, match=r"data.sources.s0.path=.*no text to train on"):
        build(make_recipe(tmp_path / "tokens", tmp_path / "a.txt", validation=0.0))


def test_a_missing_source_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.sources.s0.path=.*no such file"):
        build(make_recipe(tmp_path / "tokens", tmp_path / "a.jsonl"))
    assert not (tmp_path / "tokens").exists()


def test_a_root_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_texts(5)))
    (tmp_path / "tokens").write_text("")
    with pytest.raises(DataError, match=r"data.root=.*Set another one"):
        build(recipe)


def test_a_root_below_what_is_no_folder_of_the_users_is_an_error(tmp_path: Path) -> None:
    recipe = make_recipe(Path("/proc/tokens"), write_jsonl(tmp_path / "a.jsonl", make_texts(5)))
    with pytest.raises(DataError, match=r"data.root=/proc/tokens: no folder can be made there .*Set another one"):
        build(recipe)


def test_a_root_without_file_locks_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_texts(5)))
    with pytest.raises(DataError, match=r"data.root=.*No locks available.*file locks"):
        build(recipe)


def test_no_tokenizer_is_an_error_that_names_the_keys(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(5))
    with pytest.raises(DataError, match=r"Set model.tokenizer to .* or data.bpe_vocab"):
        build(make_recipe(tmp_path / "tokens", source, bpe_vocab=None))
    (tmp_path / "empty").mkdir()
    recipe = replace(make_recipe(tmp_path / "tokens", source), model=Model(tokenizer=str(tmp_path / "empty")))
    with pytest.raises(DataError, match=r"empty: no tokenizer can be loaded from it \(it has no tokenizer files\)"):
        build(recipe)


@pytest.mark.parametrize(
    ("record", "fix"),
    [
        ({"id": 1, "content": "words"}, "set data.sources.s0.field=content"),
        ({"messages": []}, "set data.sources.s0.messages=messages to train on conversations"),
        ({"a": "b"}, "set data.sources.s0.field to the one that has the text"),
    ],
)
def test_a_field_of_another_name_is_named(record: dict[str, Any], fix: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    recipe = make_recipe(tmp_path / "tokens", tmp_path / "a.jsonl")
    (tmp_path / "b").mkdir()
    given = train_bpe(["some words"], 300)
    given.save_pretrained(tmp_path / "b")
    with pytest.raises(DataError, match=f"data.bad_records=0: {fix}$"):
        build(replace(recipe, model=Model(tokenizer=str(tmp_path / "b"))))


# The tokenizer


def test_weights_without_a_tokenizer_are_refused_and_leave_no_store(tmp_path: Path) -> None:
    """transformers makes a tokenizer of the config alone: every text would become nothing but the ends of documents."""
    AutoConfig.for_model("qwen3", vocab_size=300).save_pretrained(tmp_path / "weights")
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(5))
    recipe = make_recipe(tmp_path / "tokens", source, bpe_vocab=None)
    with pytest.raises(DataError, match=r"model.weights=.*weights has no tokenizer.*Set model.tokenizer to"):
        build(replace(recipe, model=Model(weights=str(tmp_path / "weights"))))
    assert not list((tmp_path / "tokens").glob("*/store.json"))


@pytest.mark.parametrize(
    ("name", "says"), [("/no/such", "is no folder here"), ("owner/absent", "`hf download owner/absent`")]
)
def test_a_tokenizer_that_is_nowhere_says_what_to_do(name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for key in ("model.tokenizer", "model.weights"):
        with pytest.raises(ModelError, match=f"{key}={name} .*{says}"):
            load_tokenizer(name, key=key)


def test_a_given_tokenizer_is_used_as_it_is_and_kept(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["one two", "two one two"])
    tokenizer = Tokenizer(
        models.WordLevel({"<s>": 0, "</s>": 1, "one": 2, "two": 3, "<unk>": 70_000}, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(2)
    given = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    given.save_pretrained(tmp_path / "given")
    recipe = make_recipe(tmp_path / "tokens", source, validation=0.0)
    prepared = build(replace(recipe, model=Model(tokenizer=str(tmp_path / "given"))))
    stream = prepared.sources[0].streams["train"]
    assert stream.read(0, stream.num_tokens).tolist() == [0, 2, 3, 1, 0, 3, 2, 3, 1]
    assert stream.read(0, 1).dtype == np.uint32
    assert prepared.vocab_size == 70_001
    assert AutoTokenizer.from_pretrained(prepared.tokenizer)("two")["input_ids"] == [0, 3]


def test_the_start_of_a_text_is_quoted_as_a_prompt(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", ["one two three four five\nsix"] * 3))
    prepared = build(replace(recipe, data=replace(recipe.data, validation=0.0)))
    stream = prepared.sources[0].streams["train"]
    assert decode_start(prepared.tokenizer, stream.read(0, 24)) == "one two three four"
    assert decode_start(prepared.tokenizer, stream.read(0, 0)) == "TEXT"


def test_a_trained_tokenizer_is_deterministic_and_lossless(tmp_path: Path) -> None:
    texts = make_texts(300)
    kept = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        recipe = make_recipe(tmp_path / name / "tokens", write_jsonl(tmp_path / name / "a.jsonl", texts))
        kept.append(build(recipe).tokenizer)
    assert (kept[0] / "tokenizer.json").read_bytes() == (kept[1] / "tokenizer.json").read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(kept[0])
    text = " tabs\t, Umlaute äöü, 猫 and 🦊\r\n  <|endofte"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert load_encoder(kept[0])(text).tolist() == tokenizer(text)["input_ids"]


# Two documents, one of them nearly all of the text


@pytest.mark.parametrize("held_out", ["long", "short"])
def test_a_long_document_does_not_take_the_text_from_training(held_out: str, tmp_path: Path) -> None:
    long = "a rather long document " * 4000
    short = next(
        text for text in make_texts(100) if (hash_document(text) < hash_document(long)) == (held_out == "short")
    )
    prepared = build(
        make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", [long, short]), validation=0.01)
    )
    held, trained = (prepared.sources[0].streams[split].num_tokens for split in ("validation", "train"))
    assert 0 < held < 0.15 * trained
    assert "".join(read_documents(prepared, "validation") + read_documents(prepared, "train")) in (
        long + short,
        short + long,
    )
    note = summarize_data(prepared, 0.01)
    assert f"s0: 100% of the samples, {trained:,} tokens to train on, {held:,} held out" in note
    assert f"that is {held / (held + trained):.1%} of the tokens; data.validation asks for 1.0%" in note


def test_windows_of_a_long_document_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [make_texts(1, num_words=3000)[0], *make_texts(20)])
    whole = build(make_recipe(tmp_path / "whole", source))
    monkeypatch.setattr(tokenize_module, "WINDOW_CHARS", 1500)
    monkeypatch.setattr(tokenize_module, "OVERLAP_CHARS", 600)
    build(make_recipe(tmp_path / "windows", source))
    assert read_tree(tmp_path / "windows") == read_tree(tmp_path / "whole")
    monkeypatch.setattr(tokenize_module, "AGREEING_TOKENS", 10_000)
    recipe = make_recipe(tmp_path / "none", source)
    with pytest.raises(DataError, match=r"a.jsonl, row 1: its tokens around character .*cut the document.*bad_records"):
        build(replace(recipe, model=Model(tokenizer=str(whole.tokenizer))))


def test_documents_of_ordinary_length_are_held_out_whole(tmp_path: Path) -> None:
    texts = make_texts(200)
    prepared = build(make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", texts)))
    held, trained = (read_documents(prepared, split) for split in ("validation", "train"))
    assert sorted(held + trained) == sorted(texts)
    assert "note" not in summarize_data(prepared, 0.1)


def test_a_source_says_how_often_a_run_reads_it(tmp_path: Path) -> None:
    prepared = build(make_recipe(tmp_path / "tokens", write_jsonl(tmp_path / "a.jsonl", make_texts(50))))
    trained = prepared.sources[0].streams["train"].num_tokens
    assert "read 2.5 times" in summarize_data(prepared, 0.1, int(2.5 * trained))
    assert "times" not in summarize_data(prepared, 0.1, trained) + summarize_data(prepared, 0.1)


def test_a_blend_says_the_share_of_each_source(tmp_path: Path) -> None:
    paths = [write_jsonl(tmp_path / f"{seed}.jsonl", make_texts(50, seed)) for seed in (1, 2)]
    lines = summarize_data(build(make_recipe(tmp_path / "tokens", *paths)), 0.1).splitlines()
    assert [line.split(" of the samples")[0] for line in lines[:2]] == ["tokens   s0: 50%", "tokens   s1: 50%"]
    assert lines[-1] == "note     sources are blended by weight: data.sources.s0.weight=0 would leave s0 out"
