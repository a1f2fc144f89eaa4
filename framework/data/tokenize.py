"""The tokenizer: loaded by `transformers` or trained offline, then kept beside the token stores.

`AutoTokenizer.from_pretrained` loads the kept folder, so ranks, generation and export need neither the hub nor the
text it was trained on. `info.json` in it holds what training needs to know without importing transformers.
"""

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from framework.errors import DamagedStore, DataError
from framework.files import sync, sync_tree, write_json

END_OF_TEXT = "<|endoftext|>"
INFO_FILE = "info.json"
TEMPLATES = Path(__file__).parents[1] / "shipped" / "templates"

# Text with everything that normalisers, pre-tokenizers and post-processors treat specially.
PROBE = "  Is it\tthe same?\n\n\tdef f(x): return x**2  # Äpfel, 猫, 🦊, e\u0301, 12345  "

_OTHER_TOKENIZER = (
    "Set model.tokenizer to the folder or the hub name of one; pretrained weights need that of their training"
)

_OTHER_TEMPLATE = (
    "Set data.chat_template to a file with one, or to chatml, which writes <|im_start|> and <|im_end|>; or model.tokenizer to a"
    " tokenizer with a template"
)

# Longer texts are encoded in windows of this many characters: `tokenizers` takes some 200 bytes of memory a character.
# Each window overlaps the next, and they are joined where both agree on AGREEING_TOKENS in a row.
WINDOW_CHARS = 1 << 18
OVERLAP_CHARS = 1 << 14
AGREEING_TOKENS = 64

Encode = Callable[[str], np.ndarray]

# Tokenizers and templates of plugins, by name: a function that makes a fast tokenizer, and the text of a template.
TOKENIZERS: dict[str, Callable[[], Any]] = {}
CHAT_TEMPLATES: dict[str, str] = {}


@dataclass(frozen=True)
class TokenizerInfo:
    """The content of info.json."""

    hash: str
    """Equal for tokenizers that encode alike."""
    vocab_size: int
    """One more than the largest id."""
    eos_id: int
    files: dict[str, str]
    """xxh3 of each of the kept folder's other files."""
    revision: str | None = None
    """The commit of the hub at which it was loaded; None of others, and of those that were kept before it was noted."""


def load_tokenizer(name: str, revision: str | None = None, key: str = "model.tokenizer") -> Any:
    """Load the tokenizer of a folder or of the hub (at `revision`, or the newest). key: the recipe's key that names it.

    DataError if there is none, ModelError if there is neither such a folder nor a hub that answers.
    """
    if name in TOKENIZERS:
        return TOKENIZERS[name]()
    from transformers import AutoTokenizer  # two seconds, and the workers do not need it

    from framework.model.hub import TOKENIZER_FILES, resolve_folder

    folder = resolve_folder(name, revision, TOKENIZER_FILES, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError, RecursionError) as error:
        # Without any, transformers lists what a tokenizer may be made of, and not what is missing.
        patterns = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken")
        has_files = any(any(Path(folder).glob(pattern)) for pattern in patterns)
        why = str(error).partition("\n")[0] if has_files else "it has no tokenizer files"
        if "trust_remote_code" in str(error):
            why = "only code that comes with it reads it, and Meshwright runs none"
        raise DataError(f"{key}={name}: no tokenizer can be loaded from it ({why}). {_OTHER_TOKENIZER}") from error
    # From a folder with a model's config alone transformers makes a tokenizer that knows special tokens and no text.
    if set(tokenizer.get_vocab().values()) <= set(tokenizer.all_special_ids):
        raise DataError(f"{key}={name} has no tokenizer: no text would become tokens. {_OTHER_TOKENIZER}")
    return tokenizer


def read_commit(folder: Path) -> str | None:
    """The commit of a snapshot in the hub cache; None of another folder."""
    return folder.name if folder.parent.name == "snapshots" else None


def read_template(name: str) -> str | None:
    """The text of the template that `data.chat_template` names, a file or one that Meshwright ships; None if it is neither."""
    if name in CHAT_TEMPLATES:
        return CHAT_TEMPLATES[name]
    for path in (Path(name).expanduser(), TEMPLATES / f"{name}.jinja"):
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return None


def hash_template(name: str) -> str:
    """A hash of a template's text, or the name of one of the tokenizer's own."""
    text = read_template(name)
    return name if text is None else xxhash.xxh3_128_hexdigest(text.encode())


def set_template(tokenizer: Any, name: str | None) -> None:
    """Give a tokenizer the chat template that `data.chat_template` names. DataError where there is none."""
    own = tokenizer.chat_template
    if name is None and own is None:
        raise DataError(f"{tokenizer.name_or_path or 'the tokenizer'} has no chat template: {_OTHER_TEMPLATE}")
    if name is not None:
        named = own.get(name) if isinstance(own, dict) else None
        tokenizer.chat_template = named or read_template(name)
        if tokenizer.chat_template is None:
            names = f", and the tokenizer has {', '.join(own)}" if isinstance(own, dict) else ""
            raise DataError(f"data.chat_template={name}: no such file or name{names}. {_OTHER_TEMPLATE}")


def train_bpe(texts: Iterable[str], vocab_size: int, progress: bool = False, markers: Sequence[str] = ()) -> Any:
    """Train a byte-level BPE of at most `vocab_size` entries, the end-of-text token included; equal texts give equal entries.

    markers: of a chat template, each an entry that no text is merged with.
    progress: the library's own bars, on a terminal: only it knows how many merges are to come.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, *markers],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # all bytes, so that nothing is ever unknown
        # Elsewhere the library prints plain lines past Python's streams, and panics where nobody reads them.
        show_progress=progress and sys.stdout.isatty(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def save_tokenizer(tokenizer: Any, folder: Path) -> TokenizerInfo:
    """Write `tokenizer` and its info; `folder` appears as a whole or not at all."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"model.tokenizer={tokenizer.name_or_path}: it has no end-of-sequence token, which closes every document. "
            f"Choose another tokenizer, or save a copy with tokenizer.eos_token set"
        )
    if isinstance(templates := tokenizer.chat_template, dict):  # it would save them in a folder of their own
        tokenizer.chat_template = templates.get("default", next(iter(templates.values()), None))
    unfinished = folder.with_name(folder.name + ".unfinished")
    if unfinished.is_symlink():
        unfinished.unlink()
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        _save_pretrained(tokenizer, unfinished)
        info = TokenizerInfo(
            hash=_hash_tokenizer(unfinished, tokenizer.eos_token_id),
            vocab_size=max(tokenizer.get_vocab().values()) + 1,
            eos_id=tokenizer.eos_token_id,
            files={path.name: hash_file(path) for path in sorted(unfinished.iterdir())},
            revision=read_commit(Path(tokenizer.name_or_path)),
        )
        _check_encoder(tokenizer, unfinished)
        write_json(unfinished / INFO_FILE, asdict(info))
        sync_tree(unfinished)
        os.replace(unfinished, folder)
        sync(folder.parent)
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
    """The info of a kept tokenizer, or None if there is none. DamagedStore if it cannot be read or another file has changed."""
    path = folder / INFO_FILE
    try:
        info = TokenizerInfo(**json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DamagedStore(_explain_damage(path, f"cannot be understood ({error})")) from error
    for name, expected in info.files.items():
        found = hash_file(folder / name) if (folder / name).is_file() else None
        if found != expected:
            what = "is missing" if found is None else f"is not as {INFO_FILE} beside it says"
            raise DamagedStore(_explain_damage(folder / name, what))
    return info


def hash_file(path: Path) -> str:
    """xxh3 of a small file."""
    return xxhash.xxh3_128_hexdigest(path.read_bytes())


def _explain_damage(path: Path, what: str) -> str:
    return (
        f"{path} {what}: text would become other tokens. Copy the folder {path.parent.name} anew: a run has it from data.root,"
        " and data.root can have it back from RUN/tokenizer. Else delete it with the stores and run `meshwright prepare`"
    )


def load_encoder(folder: Path) -> Encode:
    """A function text -> ids [n] int32, with the special tokens that the tokenizer itself adds (BOS for Llama, none for GPT-2).

    It uses the `tokenizers` library alone if it can: workers then start in 0.2 s instead of 3 s.
    """
    if not (folder / "tokenizer.json").exists():
        tokenizer = load_tokenizer(str(folder))
        return lambda text: np.asarray(tokenizer(text, verbose=False)["input_ids"], dtype=np.int32)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.no_truncation()  # some hub tokenizers are saved with a limit
    backend.no_padding()
    return lambda text: _encode_short(backend, text) if len(text) <= WINDOW_CHARS else _encode_long(backend, text)


def _encode_short(backend: Tokenizer, text: str) -> np.ndarray:
    # encode_batch_fast leaves out the offsets, which encode() computes; a batch of one stays on this thread.
    return np.asarray(backend.encode_batch_fast([text])[0].ids, dtype=np.int32)


def _encode_long(backend: Tokenizer, text: str) -> np.ndarray:
    """The ids of the whole text, [n] int32, in memory for one window. DataError if two windows do not agree on them."""
    before, after = _find_special_tokens(backend)
    chunks = [before]
    window, unread = _encode_window(backend, text, 0), 0
    for start in range(WINDOW_CHARS - OVERLAP_CHARS, len(text) - OVERLAP_CHARS, WINDOW_CHARS - OVERLAP_CHARS):
        following = _encode_window(backend, text, start)
        stop, resume = _find_join(window, following, start + OVERLAP_CHARS // 4)
        chunks.append(window[0, unread:stop])
        window, unread = following, resume
    return np.concatenate([*chunks, window[0, unread:], after]).astype(np.int32)


def _find_special_tokens(backend: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """The ids that the tokenizer adds in front of every text, and behind it."""
    bare, whole = (backend.encode(PROBE, add_special_tokens=each).ids for each in (False, True))
    starts = [start for start in range(len(whole)) if whole[start : start + len(bare)] == bare]
    if not starts or not bare:
        raise DataError(
            f"its tokenizer changes a text to which it adds special tokens: cut it below {WINDOW_CHARS:,} characters"
        )
    return np.asarray(whole[: starts[0]], np.int32), np.asarray(whole[starts[0] + len(bare) :], np.int32)


def _encode_window(backend: Tokenizer, text: str, start: int) -> np.ndarray:
    """Tokens of a window of a text, without special ones: [3, n] int64, their ids, where they start and where they stop in the
    whole text, in characters."""
    encoding = backend.encode(text[start : start + WINDOW_CHARS], add_special_tokens=False)
    offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2) + start
    return np.vstack([np.asarray(encoding.ids, dtype=np.int64), offsets.T])


def _find_join(left: np.ndarray, right: np.ndarray, start: int) -> tuple[int, int]:
    """The first join of two windows from character `start` on: (tokens of `left` in front of it, tokens of `right` in front of
    it)."""
    count, (_, starts, stops) = AGREEING_TOKENS, left
    for index in range(int(np.searchsorted(starts, start)), starts.size - count):
        other = int(np.searchsorted(right[1], starts[index]))
        is_between_tokens = stops[index - 1] <= starts[index]
        if is_between_tokens and np.array_equal(left[:, index : index + count], right[:, other : other + count]):
            return index, other
    raise DataError(
        f"its tokens around character {start:,} depend on more than {OVERLAP_CHARS:,} characters, so that a text of more than "
        f"{WINDOW_CHARS:,} cannot be tokenized in bounded memory: cut the document"
    )


def cut_at_spaces(text: str) -> Iterator[str]:
    """Cut a text into chunks of at most WINDOW_CHARS, in front of a space: a byte-level BPE counts the same words."""
    start = 0
    while len(text) - start > WINDOW_CHARS:
        stop = start + WINDOW_CHARS
        while (space := text.rfind(" ", start + 1, stop)) > 0 and text[space + 1].isspace():
            stop = space
        stop = space if space > 0 else start + WINDOW_CHARS
        yield text[start:stop]
        start = stop
    yield text[start:]


def decode_start(folder: Path, ids: np.ndarray) -> str:
    """The first words of the text of `ids` ([n]), on one line; `TEXT` if the kept tokenizer is of a kind that is slow to load."""
    file = folder / "tokenizer.json"
    text = Tokenizer.from_file(str(file)).decode(ids.tolist()) if file.exists() else ""
    words = text.strip().partition("\n")[0].split()[:4]
    return " ".join(words) or "TEXT"


def _check_encoder(tokenizer: Any, folder: Path) -> None:
    expected, found = tokenizer(PROBE)["input_ids"], load_encoder(folder)(PROBE).tolist()
    if expected != found:
        raise DataError(
            f"model.tokenizer={tokenizer.name_or_path}: its tokenizer.json encodes otherwise than transformers does "
            f"({found[:8]} ... against {expected[:8]} ...). Save it anew with its save_pretrained, or choose another"
        )


def _hash_tokenizer(folder: Path, eos_id: int) -> str:
    """A hash of tokenizer.json, which determines the encoding, or of all files if there is none."""
    files = [folder / "tokenizer.json"]
    if not files[0].exists():
        files = sorted(path for path in folder.iterdir() if path.is_file() and path.name != INFO_FILE)
    digest = xxhash.xxh3_128(str(eos_id).encode())
    for file in files:
        digest.update(file.read_bytes() if file.is_file() else b"")
    return digest.hexdigest()
