"""Records become documents: text by a tokenizer, conversations by its chat template."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from framework.data.chat import Chat
from framework.data.conversation import read_conversation
from framework.data.records import Record
from framework.data.tokenize import Encode, TokenizerInfo, load_encoder, load_tokenizer
from framework.errors import DataError


@dataclass(frozen=True)
class Document:
    """A tokenized document. num_bytes: of its text. ids: [n] int32, closed by the end-of-sequence id. trained: [n] bool, of a
    conversation, which ends with the last turn that is trained; of an answer [n] uint8, the kind of what is trained."""

    hash: int
    num_bytes: int
    ids: np.ndarray
    trained: np.ndarray | None = None


def hash_document(text: str) -> int:
    """64-bit hash of the text alone. So a document stays in its split whatever the file, the order and the seed of the run, and
    exact copies never stand on both sides."""
    return xxhash.xxh3_64_intdigest(text.encode())


@cache
def load_chat(folder: Path, train_on: str) -> Chat:
    """The chat template of a kept tokenizer, once per process."""
    return Chat(load_tokenizer(str(folder)), train_on)


def encode_conversation(record: Record, field: str, chat: Chat) -> list[Document]:
    """The documents of a conversation: one, unless its template writes earlier turns anew in later ones. DataError, with the
    reason alone, if it has none."""
    if record.values is None:
        raise DataError(str(record.problem))
    encoded = chat.encode(read_conversation(record.values, field))
    return [Document(hash_values(record.values), 0, ids, trained) for ids, trained in encoded]


def hash_values(values: dict[str, Any]) -> int:
    return hash_document(json.dumps(values, sort_keys=True, default=str))


@cache
def load_encoder_once(folder: Path) -> Encode:
    """`load_encoder`, once per process: a worker runs many jobs of one tokenizer, and a kept tokenizer's folder never changes."""
    return load_encoder(folder)


def encode_text(record: Record, encode: Encode, tokenizer: TokenizerInfo) -> list[Document]:
    """The document of a record. DataError, with the reason alone, if it has none."""
    if record.text is None:
        raise DataError(str(record.problem))
    ids = encode(record.text)
    if ids.size and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:
        raise DataError(f"token id {ids.max()} is outside the tokenizer's vocabulary of {tokenizer.vocab_size}")
    if not ids.size or ids[-1] != tokenizer.eos_id:
        ids = np.append(ids, np.int32(tokenizer.eos_id))
    return [Document(hash_document(record.text), len(record.text.encode()), ids)]
