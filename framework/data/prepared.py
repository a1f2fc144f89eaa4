"""Prepared data: the token stores of a recipe, found by name and checked by one rank, then mapped into memory by every rank.

A folder under data.root is named by a key of the recipe's words (path, format, field, tokenizer, validation; of conversations
the template and what is trained, too) and a key of the files (names, sizes, times). So a changed file makes a new store and never
touches one that a run is reading; another commit of hub weights, with a tokenizer of its own, makes one, too. If the files are
gone, the one complete store of the same words still serves.
"""

import errno
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from framework.data.document import Form
from framework.data.formats import open_ids
from framework.data.growing import GrowingStream
from framework.data.kinds import strip_compression
from framework.data.remote import Root
from framework.data.source import SourceFile, SourceMissing, list_files
from framework.data.store import (
    COUNTS_FILE,
    SPLITS,
    TOKENS_VERSION,
    Split,
    StoreMeta,
    TokenStream,
    open_stream,
    verify_small_files,
)
from framework.data.tokenize import INFO_FILE, hash_template, read_info
from framework.errors import DataError, StorageError
from framework.recipe.plugins import hash_owner
from framework.recipe.schema import Data, Model, Recipe, Source

# Raise it when equal conversations give other tokens.
CHAT_VERSION = 1
TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "*.model")

# A name that is no branch or tag.
COMMIT = re.compile("[0-9a-f]{40}")

# Kinds whose key does not name them, like text: the first version knew them by an ending of the same name.
KINDS_OF_NAME = ("jsonl", "json", "parquet", "arrow")


@dataclass(frozen=True)
class StorePlace:
    """The folder in which the store of a source is or will be. files: None if they are gone, () for a hub dataset."""

    name: str
    source: Source
    files: tuple[SourceFile, ...] | None
    folder: Path
    form: Form | None = None
    """The form of answers to compare; None of other sources."""


@dataclass(frozen=True)
class DataPlaces:
    """The folders of all data that a recipe needs. tokenizer: None if source files are gone; the stores then name theirs."""

    stores: tuple[StorePlace, ...]
    tokenizer: Path | None


@dataclass(frozen=True)
class PreparedSource:
    """The complete store of one source. streams: empty until `open_found`."""

    name: str
    weight: float
    folder: Path
    meta: StoreMeta
    streams: dict[Split, TokenStream] = field(default_factory=dict)
    files: tuple[SourceFile, ...] = ()
    """The files of ids, of an imported source."""


@dataclass(frozen=True)
class Prepared:
    """The data of a recipe. About a kilobyte per source when pickled before it is opened: rank 0 finds it and broadcasts it."""

    sources: tuple[PreparedSource, ...]
    """All sources of positive weight, in the recipe's order."""
    tokenizer: Path
    """The folder of the sources' common tokenizer."""
    vocab_size: int
    """One more than the tokenizer's largest id."""
    eos_id: int
    fingerprint: str
    """Hash of names, weights, tokens and their order: the data that the cursor of a checkpoint refers to."""
    unigram_entropy: float | None
    """Nats per token: -sum p ln p of the token frequencies p of the validation split itself, all sources together; None without
    one. No predictor that ignores context has a lower loss there, not even one that knows p. So a lower validation loss shows
    that context is used."""
    failed: str = "failed"
    """In the store of a stream, which other runs may share: the file with the reason why this run's tokenizer has ended."""
    root: Root = field(default_factory=partial(Root, "tokens"))
    """`data.root`, below which folders of other nodes have other names."""


def locate(recipe: Recipe, progress: bool = False) -> DataPlaces:
    """Name the folders of a recipe's data, and bring the small files of stores in an object store to this node; no tokens are
    read. progress: bars on stderr.

    DataError if a source is missing and no complete store of it is left.
    """
    sources = recipe.data.read
    if not sources:
        raise DataError("data.sources has no source of positive weight. Set data.sources.<name>.path")
    missing: DataError | None = None
    files: dict[str, tuple[SourceFile, ...] | None] = {}
    for name, source in sources.items():
        try:
            files[name] = list_files(name, source, progress).files
        except SourceMissing as error:
            files[name] = None
            missing = missing or error
    places, root = [], Root.of(recipe.data)
    tokenizer_words, tokenizer_files = _describe_tokenizer(recipe, sources, list(files.values()))
    tokenizer = _place_tokenizer(root, tokenizer_words, tokenizer_files)
    if tokenizer is not None and _is_of_other_commit(recipe.model, tokenizer):
        tokenizer_words["revision"] = recipe.model.revision
        tokenizer = _place_tokenizer(root, tokenizer_words, tokenizer_files)
    for name, source in sources.items():
        words = {"tokenizer": tokenizer_words, "validation": recipe.data.validation, **_describe_source(source)}
        form: Form | None = None
        if source.messages is not None:
            words["train_on"] = recipe.data.train_on
        elif source.pairs is not None:
            form = words["form"] = "label" if recipe.loss.name == "kto" else "pair"
        if recipe.data.mode == "stream":
            words["stream"] = recipe.train.seed  # which draws the order of its shards
        stem = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}-{_key(words)}"
        files_key = _key_files([files[name], *tokenizer_files])
        folder = root.folder / f"{stem}-{files_key}" if files_key else _find_only(root, stem, missing)
        root.pull(folder.name)
        places.append(StorePlace(name, source, files[name], folder, form))
    return DataPlaces(tuple(places), tokenizer)


def _place_tokenizer(root: Root, words: dict[str, Any], listings: list[tuple[SourceFile, ...] | None]) -> Path | None:
    """The folder of the kept tokenizer, from an object store on this node; None where source files are gone."""
    key = _key_files(listings)
    if key is None:
        return None
    folder = root.folder / f"tokenizer-{_key(words)}-{key}"
    root.pull_tokenizer(folder.name)
    return folder


def _is_of_other_commit(model: Model, tokenizer: Path) -> bool:
    """Whether the tokenizer of hub weights was kept at another commit than the one that a run has settled. It may be another
    tokenizer, and has names of its own. The first commit's are those that stores without a commit have."""
    if model.tokenizer is not None or not COMMIT.fullmatch(model.revision or ""):
        return False
    info = read_info(tokenizer)
    return info is not None and info.revision not in (None, model.revision)


def _describe_source(source: Source) -> dict[str, Any]:
    """The properties of a source that its tokens depend on; its weight is not one."""
    words = {"path": source.path, "format": source.format, "field": source.field, "version": TOKENS_VERSION}
    if source.is_imported:
        words["hashes"] = True  # stores without them are made anew
    if reader := hash_owner("reader", source.format):
        words["reader"] = reader
    # Without conversations names stay as they were before there were any.
    if source.conversation is not None:
        words |= {"messages" if source.messages else "pairs": source.conversation, "chat_version": CHAT_VERSION}
    return words


def _describe_tokenizer(
    recipe: Recipe, sources: dict[str, Source], files: list[tuple[SourceFile, ...] | None]
) -> tuple[dict[str, Any], list[tuple[SourceFile, ...] | None]]:
    """(the recipe's words, the listings) that the tokenizer depends on: its own files, or the text that it is trained on."""
    name, data = recipe.model.tokenizer or recipe.model.weights, recipe.data
    template = {} if data.chat_template is None else {"chat_template": hash_template(data.chat_template)}
    if name:
        patterns = TOKENIZER_FILES + ("chat_template*",) * data.has_conversations
        if code := hash_owner("tokenizer", name):
            return {"tokenizer": name, "code": code, **template}, [()]
        return {"tokenizer": name, **template}, [_list_tokenizer_files(Path(name).expanduser(), patterns)]
    if recipe.data.bpe_vocab is None:
        raise DataError(
            "model.tokenizer, model.weights and data.bpe_vocab are all null: there is no tokenizer. Set model.tokenizer to "
            "a folder or hub name, or data.bpe_vocab to the size of one to train on the sources"
        )
    described = [_describe_source(source) for source in sources.values()]
    words = {"bpe_vocab": recipe.data.bpe_vocab, "validation": recipe.data.validation, "sources": described, **template}
    if recipe.data.bpe_text_bytes != Data.bpe_text_bytes:  # with the default, names stay as they were without this key
        words["bpe_text_bytes"] = recipe.data.bpe_text_bytes
    return words, files


def _list_tokenizer_files(folder: Path, patterns: Sequence[str]) -> tuple[SourceFile, ...]:
    """A local tokenizer's own files, not the weights and logs beside them; () for a tokenizer of the hub."""
    paths = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    stats = [(path, path.stat()) for path in paths]
    return tuple(SourceFile(path.name, path, "text", stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def _key(value: Any) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(value, sort_keys=True).encode())[:10]


def _key_files(listings: list[tuple[SourceFile, ...] | None]) -> str | None:
    """A key of the files in all listings; None if those of one listing are gone."""
    known = [listing for listing in listings if listing is not None]
    if len(known) < len(listings):
        return None
    return _key([[_identify(file) for file in listing] for listing in known])


def _identify(file: SourceFile) -> list[Any]:
    """Name, size and time of a file, and its kind unless it is one of the first version's."""
    is_old = file.kind == "text" or (
        file.kind in KINDS_OF_NAME and strip_compression(file.path).suffix == f".{file.kind}"
    )
    return [file.name, file.num_bytes, file.mtime_ns, *([] if is_old else [file.kind])]


def _find_only(root: Root, stem: str, missing: DataError | None) -> Path:
    """The only store of this stem that is complete, or can be completed without its files."""
    complete = root.list(stem)
    if len(complete) == 1:
        return complete[0]
    assert missing is not None, "a store is searched for only where files are gone"
    if not complete:
        raise missing
    raise DataError(
        f"{missing}. {len(complete)} stores of earlier files are left and one alone would be used: delete all but one of "
        f"{', '.join(map(str, complete))}"
    )


def find_prepared(recipe: Recipe, places: DataPlaces | None = None) -> Prepared:
    """Find and check what `prepare` has built, without opening tokens. Every source file's name, size and time are looked at,
    unless `places` are given.

    DataError, naming the command, if a store is not there; StorageError if the file system fails.
    """
    root = Root.of(recipe.data)
    with _explain_errors():
        metas = [(place, StoreMeta.read(place.folder)) for place in (places or locate(recipe)).stores]
        for place, meta in metas:
            if meta is not None:
                verify_small_files(place.folder, meta)
        absent = [place for place, meta in metas if meta is None or root.is_pending(place.folder)]
        if absent:
            names = ", ".join(f"data.sources.{place.name} (expected in {place.folder})" for place in absent)
            raise DataError(
                f"not prepared, or changed since: {names}. Run `meshwright prepare` with the same overrides to tokenize"
            )
        found = [_check_source(place, meta, recipe) for place, meta in metas if meta is not None]
        weights = recipe.data.weigh({each.name: each.meta.splits["train"].num_tokens for each in found})
        sources = tuple(replace(each, weight=weights[each.name]) for each in found)
        first = sources[0].meta
        tokenizer = root.folder / first.tokenizer_folder
        info = read_info(tokenizer)
        known = {(each.meta.tokenizer_hash, each.meta.vocab_size, each.meta.eos_id) for each in sources}
        if info is None or known != {(info.hash, info.vocab_size, info.eos_id)}:
            raise DataError(
                f"the stores {', '.join(str(source.folder) for source in sources)} do not share one tokenizer that is still "
                f"there ({tokenizer / INFO_FILE}). Delete them and run `meshwright prepare` again"
            )
        counts = [np.fromfile(source.folder / COUNTS_FILE, dtype=np.int64) for source in sources]
    check_vocabulary(recipe, first.vocab_size)
    if recipe.data.validation > 0 and not any(source.meta.splits["validation"].num_tokens for source in sources):
        raise DataError(
            f"data.validation={recipe.data.validation} holds documents out, but no source has two different documents. "
            f"Set data.validation=0 (and train.validate_every_steps=null), or give more documents"
        )
    identity = [[source.name, source.weight, source.meta.fingerprint] for source in sources]
    return Prepared(
        sources=sources,
        tokenizer=tokenizer,
        vocab_size=first.vocab_size,
        eos_id=first.eos_id,
        fingerprint=xxhash.xxh3_128_hexdigest(json.dumps(identity).encode()),
        unigram_entropy=compute_entropy(np.sum(counts, axis=0)),
        failed=f"failed-{recipe.run.id}",
        root=root,
    )


def _check_source(place: StorePlace, meta: StoreMeta, recipe: Recipe) -> PreparedSource:
    if meta.num_bad_records > recipe.data.bad_records:
        raise DataError(
            f"{place.folder / 'quarantine.jsonl'} lists {meta.num_bad_records} bad "
            f"record{'s' if meta.num_bad_records > 1 else ''} of data.sources.{place.name}, "
            f"data.bad_records={recipe.data.bad_records}. Repair the source, or raise data.bad_records"
        )
    if meta.splits["train"].num_tokens < 2:
        raise DataError(
            f"data.sources.{place.name}.path={place.source.path}: no text to train on was found in "
            f"{meta.num_files} files. Set another path, or data.sources.{place.name}.weight=0 to leave the source out"
        )
    files = place.files if meta.is_imported else ()
    if files is None:
        raise DataError(
            f"data.sources.{place.name}.path={place.source.path}: its ids are read there, and its files are gone"
        )
    return PreparedSource(place.name, place.source.weight, place.folder, meta, files=files)


def open_found(found: Prepared) -> Prepared:
    """Map the tokens into memory: per source at most five files are opened, and nothing else is looked at. Of tokens in an object
    store the small files are brought to this node.

    DataError if a file is missing or has the wrong size, StorageError if it cannot be opened (EMFILE, EIO, ESTALE).
    """
    root = found.root
    with _explain_errors():
        reader = root.open()
        sources = []
        for source in found.sources:
            folder = source.folder if reader is None else root.folder / source.folder.name
            root.pull(folder.name)
            ids = open_ids(source.files, source.meta.source.get("field", ""), source.meta.vocab_size)
            streams: dict[Split, TokenStream]
            if source.meta.is_streamed:
                number = {"train": source.meta.source["shards"], "validation": source.meta.source["head"]}
                streams = {
                    each: GrowingStream(source.name, folder, source.meta, each, number[each], found.failed)
                    for each in SPLITS
                }
            else:
                streams = {split: open_stream(folder, source.meta, split, reader, ids) for split in SPLITS}
            sources.append(replace(source, folder=folder, streams=streams))
    tokenizer = found.tokenizer if reader is None else root.folder / found.tokenizer.name
    return replace(found, sources=tuple(sources), tokenizer=tokenizer)


@contextmanager
def _explain_errors() -> Iterator[None]:
    """Turn an OSError into a DataError if it is about permissions, else into a StorageError: it says nothing about the store."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise DataError(
                f"{error}: allow whoever trains to read what is under data.root and in data.sources"
            ) from error
        raise StorageError(
            f"the prepared data cannot be opened: {error}. Look at the file system and at `ulimit -n`"
        ) from error


def check_vocabulary(recipe: Recipe, vocab_size: int, of_model: int | None = None) -> None:
    """DataError if the tokenizer has more entries than the model. of_model: the model's vocabulary; None: as the recipe states
    it."""
    model = recipe.model
    stated = model.config.get("vocab_size") if of_model is None else of_model
    if stated is None or stated >= vocab_size:
        return
    says = f"smaller than the tokenizer's vocabulary of {vocab_size}: ids from {stated} on would have no embedding."
    if model.weights is None:
        raise DataError(
            f"model.config.vocab_size={stated} is {says} Set model.config.vocab_size to {vocab_size} or more, or choose a smaller"
            " tokenizer"
        )
    raise DataError(
        f"the vocabulary of model.weights={model.weights}, {stated} entries, is {says} Use the weights' own tokenizer"
        " (model.tokenizer=null), or give the weights more rows once: load them with transformers,"
        f" model.resize_token_embeddings({vocab_size}), model.save_pretrained(DIR), and set model.weights=DIR"
    )


def compute_entropy(counts: np.ndarray) -> float | None:
    """-sum p ln p in nats of the frequencies p = counts / sum(counts), counts: [vocab]; None if there are none."""
    p = counts[counts > 0] / max(1, counts.sum())
    return float(-(p * np.log(p)).sum()) if p.size else None
