"""The tokenizer: loaded by `transformers` or trained offline, then kept beside the token stores.

The kept folder is what `AutoTokenizer.from_pretrained` loads, so ranks, generation and export need neither the hub nor the
text it was trained on. `info.json` in it holds what training needs to know without importing transformers.
"""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from framework.data.store import write_json
from framework.errors import DataError

END_OF_TEXT = "<|endoftext|>"

# Has what normalisers, pre-tokenizers and post-processors treat specially.
PROBE = "  Is it\tthe same?\n\n\tdef f(x): return x**2  # Äpfel, 猫, 🦊, e\u0301, 12345  "

_OTHER_TOKENIZER = (
    "Set model.tokenizer to the folder or the hub name of one; pretrained weights need that of their training"
)

Encode = Callable[[str], np.ndarray]


@dataclass(frozen=True)
class TokenizerInfo:
    """vocab_size: one more than the largest id. hash: equal for tokenizers that encode alike."""

    hash: str
    vocab_size: int
    eos_id: int


def load_tokenizer(name: str, revision: str | None = None, key: str = "model.tokenizer") -> Any:
    """The tokenizer of a folder or of the hub, there at `revision` or the newest. key: of the recipe, which names it.

    DataError where there is none, ModelError where there is neither such a folder nor a hub that can be asked.
    """
    from transformers import AutoTokenizer  # two seconds, and the workers do not need it

    from framework.model.hub import fetch_tokenizer

    folder = fetch_tokenizer(name, revision, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, ImportError, KeyError) as error:
        why = str(error).partition("\n")[0] if _has_tokenizer_files(Path(folder)) else "it has no tokenizer files"
        raise DataError(f"{key}={name}: no tokenizer can be loaded from it ({why}). {_OTHER_TOKENIZER}") from error
    # Of a folder with a model's config alone transformers makes a tokenizer that knows special tokens and no text.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise DataError(f"{key}={name} has no tokenizer: no text would become tokens. {_OTHER_TOKENIZER}")
    return tokenizer


def _has_tokenizer_files(folder: Path) -> bool:
    """Without any, transformers lists what a tokenizer may be made of, and not what is missing."""
    return any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken"))


def train_bpe(texts: Iterable[str], vocab_size: int, progress: bool = False) -> Any:
    """A byte-level BPE of at most `vocab_size` entries, the end-of-text token included; equal texts give equal entries.

    progress: the library's own bars, on a terminal: only it knows how many merges there are to come.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all bytes, so that nothing is ever unknown
        # Elsewhere the library prints plain lines past Python's streams, and panics where nobody reads them.
        show_progress=progress and sys.stdout.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def save_tokenizer(tokenizer: Any, folder: Path) -> TokenizerInfo:
    """Writes `tokenizer` and its info; `folder` appears as a whole or not at all."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"model.tokenizer={tokenizer.name_or_path}: it has no end-of-sequence token, which closes every document. "
            f"Choose another tokenizer, or save a copy with tokenizer.eos_token set"
        )
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _save_pretrained(tokenizer, unfinished)
        info = TokenizerInfo(
            hash=_hash_tokenizer(unfinished, tokenizer.eos_token_id),
            vocab_size=max(tokenizer.get_vocab().values()) + 1,
            eos_id=tokenizer.eos_token_id,
        )
        _check_encoder(tokenizer, unfinished)
        write_json(unfinished / "info.json", asdict(info))
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return info


def _save_pretrained(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except Exception as error:  # all that the `tokenizers` library raises, with the system's words in it
        if f"os error {errno.ENOSPC}" not in str(error):
            raise
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from error


def read_info(folder: Path) -> TokenizerInfo | None:
    """The info of a kept tokenizer, or None where there is none."""
    try:
        return TokenizerInfo(**json.loads((folder / "info.json").read_text()))
    except FileNotFoundError:
        return None


def load_encoder(folder: Path) -> Encode:
    """text -> ids [n] int64, with the special tokens that the tokenizer itself adds (BOS of Llama, none of GPT-2).

    Straight through the `tokenizers` library where it can be: workers then start in 0.2 s instead of 3 s.
    """
    if not (folder / "tokenizer.json").exists():
        tokenizer = load_tokenizer(str(folder))
        return lambda text: np.asarray(tokenizer(text, verbose=False)["input_ids"], dtype=np.int64)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()  # some hub tokenizers are saved with a limit
    backend.no_padding()
    # encode_batch_fast leaves out the offsets, which encode() computes; a batch of one stays on this thread.
    return lambda text: np.asarray(backend.encode_batch_fast([text])[0].ids, dtype=np.int64)


def decode_start(folder: Path, ids: np.ndarray, num_words: int = 4) -> str:
    """The first words of the text of `ids`, on one line; `TEXT` where the kept tokenizer is of a kind that is slow to load."""
    file = folder / "tokenizer.json"
    text = Tokenizer.from_file(str(file)).decode(ids.tolist()) if file.exists() else ""
    words = text.strip().partition("\n")[0].split()[:num_words]
    return " ".join(words) or "TEXT"


def _check_encoder(tokenizer: Any, folder: Path) -> None:
    expected, found = tokenizer(PROBE)["input_ids"], load_encoder(folder)(PROBE).tolist()
    if expected != found:
        raise DataError(
            f"model.tokenizer={tokenizer.name_or_path}: its tokenizer.json encodes otherwise than transformers does "
            f"({found[:8]} ... against {expected[:8]} ...). Save it anew with its save_pretrained, or choose another"
        )


def _hash_tokenizer(folder: Path, eos_id: int) -> str:
    """A hash of tokenizer.json, which says how to encode, or of all files where there is none."""
    files = [folder / "tokenizer.json"]
    if not files[0].exists():
        files = sorted(path for path in folder.iterdir() if path.is_file())
    digest = xxhash.xxh3_128(str(eos_id).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
