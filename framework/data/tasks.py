"""Evaluation tasks: questions of local files or a plugin's functions, tokenized, and scores that follow from log-probabilities.

| record of NAME.jsonl, one kind in a file | spans that are scored | scores |
|---|---|---|
| `context`, `choices`, `answer` | each choice behind the context | acc, acc_norm |
| `contexts`, `continuation`, `answer` | the continuation behind each context | acc, acc_norm |
| `context`, `continuation` | the continuation | acc (is it what the model says greedily?), perplexity |
| `text`; or a file of any other ending, which is one text | all of it | word_perplexity, byte_perplexity, bits_per_byte |

Tokens and scores are those of lm-evaluation-harness (0.4), so both give the same numbers. A context and what follows are
tokenized together, spaces between them with the latter, and split behind the tokens of the context alone. An empty context is the
token that begins a text, or ends one where there is none. Of a request longer than a row the end counts. A text is cut into rows;
the last one begins as early as a whole row does, and only what no other has scored counts. Texts are joined as they are written.

    acc       share of records whose answer has the largest log p           acc_norm  the same, of log p / characters
    perplexity  exp(-mean log p)    word_, byte_perplexity  exp(-sum log p / sum of words or bytes)    bits_per_byte  its log2

Tokens are kept below data.root as eval-NAME-KEY.npz, under a key of the file's ending and content, the tokenizer and the context.
"""

import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import xxhash

from framework.data.tokenize import WINDOW_CHARS, load_encoder, load_tokenizer, read_info
from framework.errors import DataError, RecipeError
from framework.files import write_atomically

# Raise it when equal files give other tokens.
TASKS_VERSION = 1
Kind = Literal["choices", "continuation", "text"]
KINDS: tuple[Kind, ...] = ("choices", "continuation", "text")
SCORES: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        "choices": ("acc", "acc_norm"),
        "continuation": ("acc", "perplexity"),
        "text": ("word_perplexity", "byte_perplexity", "bits_per_byte"),
    }
)
# Functions that make the records of a task, by name. Plugins add to it (`framework/extend.py`).
TASKS: dict[str, Callable[[], Iterable[Mapping[str, Any]]]] = {}
# Prefix of scores of the averaged weights (`eval.average`).
OF_AVERAGE = "average/"
# Scores whose smaller value is the better one.
LOWER_IS_BETTER = ("perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte")


def is_better_low(name: str) -> bool:
    """Whether a score, TASK/NAME, is the better the lower it is."""
    return name.rpartition("/")[2] in LOWER_IS_BETTER


class Request(NamedTuple):
    """A text to tokenize. continuation None: the whole context is scored, in as many rows as it takes. is_right, size: of a
    choice, whether it is an answer, and its characters."""

    context: str
    continuation: str | None = None
    is_right: bool = False
    size: float = 0.0


@dataclass(frozen=True)
class Task:
    """The tokenized requests of one file, in its order."""

    name: str
    kind: Kind
    tokens: np.ndarray
    """[tokens] int32, of all requests."""
    ends: np.ndarray
    """[requests] int64: behind the last token of each."""
    scored: np.ndarray
    """[tokens] uint8: 1 where a token's log-probability counts."""
    first: np.ndarray
    """[records + 1] int64: the first request of each record."""
    sizes: np.ndarray
    """[requests, 2]: of choices whether it is an answer, and its characters; of texts words and bytes, once for each text."""

    @property
    def num_records(self) -> int:
        return len(self.first) - 1

    def head(self, limit: int | None) -> "Task":
        """The first `limit` records."""
        if limit is None or limit >= self.num_records:
            return self
        requests = int(self.first[limit])
        tokens = int(self.ends[requests - 1])
        return replace(
            self,
            tokens=self.tokens[:tokens],
            ends=self.ends[:requests],
            scored=self.scored[:tokens],
            first=self.first[: limit + 1],
            sizes=self.sizes[:requests],
        )

    def judge(self, log_p: np.ndarray, missed: np.ndarray) -> dict[str, float]:
        """Scores by name. log_p, missed: [requests] fp64, the log-probabilities, and how many tokens are not the likeliest."""
        values: tuple[float, ...]
        if self.kind == "choices":
            values = self._count_right(log_p), self._count_right(log_p / self.sizes[:, 1])
        elif self.kind == "continuation":
            values = float((missed == 0).mean()), _exp(-log_p.mean())
        else:
            of_word, of_byte = -log_p.sum() / self.sizes.sum(0)
            values = _exp(of_word), _exp(of_byte), float(of_byte) / math.log(2)
        return dict(zip(SCORES[self.kind], values, strict=True))

    def _count_right(self, values: np.ndarray) -> float:
        """The share of records whose largest value is that of an answer."""
        chosen = [start + values[start:stop].argmax() for start, stop in zip(self.first, self.first[1:], strict=False)]
        return float(self.sizes[chosen, 0].mean())


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def list_tasks(paths: Sequence[str]) -> dict[str, Path]:
    """The files of `eval.tasks` by the names of their tasks; a folder stands for its .jsonl and .txt files, and a plugin's task
    for NAME.jsonl, which is no file. DataError that names all that are not there, or two of one name."""
    found: dict[str, Path] = {}
    missing: list[str] = []
    for path in (Path(each).expanduser() for each in paths):
        files = [Path(f"{path}.jsonl") if str(path) in TASKS else path]
        if path.is_dir():
            files = sorted(each for each in path.iterdir() if each.suffix in (".jsonl", ".txt"))
        if not files or not (path.exists() or str(path) in TASKS):
            missing.append(f"{path} {'has no .jsonl or .txt file' if path.exists() else 'is not there'}")
        for file in files:
            if found.get(file.stem, file) != file:
                raise DataError(f"eval.tasks: {found[file.stem]} and {file} are both task {file.stem}: rename one")
            found[file.stem] = file
    if missing:
        names = " ".join(f"--import {Path(each.split()[0]).stem}" for each in missing)
        raise DataError(
            f"eval.tasks: {'; '.join(missing)}. Name a file or folder of tasks (docs/evaluation.md), or write tasks of"
            f" lm-evaluation-harness: meshwright evaluate {names} --to {Path(missing[0].split()[0]).parent}; a plugin's"
            " task needs --plugins PLUGIN"
        )
    return found


def read_task(file: Path) -> bytes:
    """The content of a task's file, or of the one that a plugin's task stands for."""
    if (make := TASKS.get(file.stem)) is None or file.exists():
        return file.read_bytes()
    return "".join(json.dumps(record) + "\n" for record in make()).encode()


def keep_tasks(paths: Sequence[str], tokenizer: Path, context: int) -> list[Path]:
    """Tokenize tasks, unless that is done, and return the files of their tokens, beside the folder of the tokenizer. DataError
    with file and line where a record cannot be understood."""
    files, info = list_tasks(paths), read_info(tokenizer) if paths else None
    kept, open_encoder = [], cache(partial(TaskEncoder, tokenizer))
    for name, file in files.items():
        words = [TASKS_VERSION, file.suffix, xxhash.xxh3_128_hexdigest(read_task(file)), info and info.hash, context]
        place = tokenizer.parent / f"eval-{name}-{xxhash.xxh3_64_hexdigest(json.dumps(words).encode())}.npz"
        if not place.exists():
            task = tokenize_task(name, file, open_encoder(), context)
            arrays: dict[str, Any] = {name: each for name, each in vars(task).items() if isinstance(each, np.ndarray)}
            with write_atomically(place, unfinished=place.with_suffix(f".{os.getpid()}")) as written:
                np.savez(written, kind=KINDS.index(task.kind), **arrays)
        kept.append(place)
    return kept


def open_task(place: Path) -> Task:
    """A kept task. DataError where its file is damaged, which its checksums say."""
    try:
        with np.load(place) as arrays:
            values = dict(arrays)
        kind = KINDS[int(values.pop("kind"))]
        return Task(place.stem.removeprefix("eval-").rpartition("-")[0], kind, **values)
    except (ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{place} is damaged ({error}). Delete it; the next start tokenizes its task again") from error


def refuse_unknown_score(keep_best: bool | str, tasks: Sequence[Task], has_average: bool) -> None:
    """Raise RecipeError where checkpoint.keep_best names no score of the tasks. has_average: the tasks score it, too."""
    names = [f"{task.name}/{name}" for task in tasks for name in SCORES[task.kind]]
    names += [f"{OF_AVERAGE}{name}" for name in names] * has_average
    if isinstance(keep_best, str) and keep_best not in names:
        raise RecipeError(f"checkpoint.keep_best={keep_best}: no task has that score. There are {', '.join(names)}")


# --- from a file to requests


def read_records(file: Path) -> Iterator[tuple[int, Kind, list[Request]]]:
    """The line, kind and requests of each record. DataError at the first that cannot be understood."""
    try:
        text = read_task(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"eval.tasks: {file} cannot be read as UTF-8 text: {error}") from error
    lines = text.split("\n") if file.suffix == ".jsonl" else [json.dumps({"text": text})]
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield number, *_read_record(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise DataError(f"eval.tasks: {file}:{number}: {error}") from error


def _read_record(record: Any) -> tuple[Kind, list[Request]]:
    """ValueError, with the reason alone, where it is no record."""
    if not isinstance(record, dict):
        raise ValueError(f"a record is an object, not {json.dumps(record)[:40]}")
    if "text" in record:
        return "text", [Request(_take(record, "text"))]
    if "choices" not in record and "contexts" not in record:
        return "continuation", [Request(_take(record, "context", may_be_empty=True), _take(record, "continuation"))]
    name = "choices" if "choices" in record else "contexts"
    several = record[name]
    is_texts = isinstance(several, list) and all(isinstance(each, str) and each.strip() for each in several)
    if not is_texts or len(several) < 2:
        raise ValueError(f"`{name}` is a list of at least two texts, not {json.dumps(several)[:40]}")
    answers = record.get("answer")
    answers = answers if isinstance(answers, list) else [answers]
    if not answers or any(type(each) is not int or not 0 <= each < len(several) for each in answers):
        legal = f"the number of one of {len(several)} {name}, from 0 on, or a list of such numbers"
        raise ValueError(f"`answer` is {legal}, not {json.dumps(record.get('answer'))}")
    # A choice begins with the space before it, which lm-evaluation-harness does not count.
    sizes = record.get("sizes") or [len(each.lstrip()) if name == "choices" else len(each) for each in several]
    is_numbers = isinstance(sizes, list) and all(isinstance(each, int | float) and each > 0 for each in sizes)
    if not is_numbers or len(sizes) != len(several):
        raise ValueError(f"`sizes` are {len(several)} positive numbers, not {json.dumps(sizes)}")
    if name == "choices":
        context = _take(record, "context", may_be_empty=True)
        pairs = [(context, each) for each in several]
    else:
        continuation = _take(record, "continuation")
        pairs = [(each, continuation) for each in several]
    return "choices", [
        Request(*pair, number in answers, size) for number, (pair, size) in enumerate(zip(pairs, sizes, strict=True))
    ]


def _take(record: Mapping[str, Any], name: str, may_be_empty: bool = False) -> str:
    value = record.get(name)
    if not isinstance(value, str) or not (value.strip() or may_be_empty):
        found = "is not there" if name not in record else f"is {json.dumps(value)[:40]}"
        raise ValueError(f"`{name}` {found}: it is a text" + " with more than spaces" * (not may_be_empty))
    return value


# --- from requests to tokens


class TaskEncoder:
    """A kept tokenizer, with the special tokens that lm-evaluation-harness has by default."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = load_tokenizer(str(folder))
        self._encode_long = load_encoder(folder)
        bos = self._tokenizer.bos_token_id
        self.prefix = int(self._tokenizer.eos_token_id if bos is None else bos)
        self._prefix_text = str(self._tokenizer.decode([self.prefix]))

    def encode(self, text: str, is_bare: bool = False) -> list[int]:
        """The ids of a text. is_bare: without special tokens, which a text that begins with one does not get either."""
        is_bare = is_bare or text.startswith(self._prefix_text)
        if len(text) > WINDOW_CHARS and not is_bare:
            return [int(each) for each in self._encode_long(text)]
        return list(self._tokenizer.encode(text, add_special_tokens=not is_bare, verbose=False))

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The ids of a context and of what follows."""
        if context == "":
            ids = self.encode(continuation, is_bare=True)
            return ([self.prefix], ids) if ids[:1] != [self.prefix] else (ids[:1], ids[1:])
        whole, first = self.encode(context + continuation), self.encode(context.rstrip())
        return first or [self.prefix], whole[len(first) :]

    def encode_request(
        self, request: Request, context: int
    ) -> tuple[list[tuple[list[int], list[int]]], tuple[float, float]]:
        """The pairs of a request, each of ids to look at and ids that are scored; and its `Task.sizes`."""
        if request.continuation is not None:
            return [self.encode_pair(request.context, request.continuation)], (request.is_right, request.size)
        text = request.context
        return list(self.encode_windows(text, context)), (len(re.split(r"\s+", text)), len(text.encode()))

    def encode_windows(self, text: str, context: int) -> Iterator[tuple[list[int], list[int]]]:
        """Rows of a text: (ids to look at, ids that are scored). Each of its tokens is scored once."""
        ids = [self.prefix, *self.encode(text)]
        for start in range(1, len(ids), context):
            stop = min(start + context, len(ids))
            yield ids[max(0, stop - context - 1) : start], ids[start:stop]


def tokenize_task(name: str, file: Path, encoder: TaskEncoder, context: int) -> Task:
    """The task of a file, whose requests fit into rows of `context` tokens. DataError with file and line."""
    pairs: list[tuple[list[int], list[int]]] = []
    first, sizes, kinds = [0], list[tuple[float, float]](), dict[Kind, int]()
    for line, kind, requests in read_records(file):
        kinds.setdefault(kind, line)
        if len(kinds) > 1:
            (one, at), (other, _) = kinds.items()
            raise DataError(f"eval.tasks: {file}:{line}: a record of {other}, behind one of {one} in line {at}")
        for request in requests:
            found, size = encoder.encode_request(request, context)
            for _, scored in found:
                _refuse_length(f"{file}:{line}", len(scored), context)
            pairs += found
            sizes += [size] + [(0.0, 0.0)] * (len(found) - 1)
        first.append(len(pairs))
    if not pairs:
        raise DataError(f"eval.tasks: {file} has no record")
    documents = [np.array((looked + scored)[-(context + 1) :], np.int32) for looked, scored in pairs]
    ends = np.cumsum([len(each) for each in documents])
    marks = np.zeros(ends[-1], np.uint8)
    for end, (_, scored) in zip(ends, pairs, strict=True):
        marks[end - len(scored) : end] = 1
    arrays = ends.astype(np.int64), marks, np.array(first, np.int64), np.array(sizes, np.float64)
    return Task(name, next(iter(kinds)), np.concatenate(documents), *arrays)


def _refuse_length(where: str, count: int, context: int) -> None:
    """Raises DataError where a continuation has no token, or more than a row has."""
    if count == 0:
        raise DataError(f"eval.tasks: {where}: its continuation has no token of its own behind the context")
    if count > context:
        raise DataError(
            f"eval.tasks: {where}: its continuation has {count:,} tokens, more than batch.context={context:,}: shorten it, or"
            " leave the record out"
        )
