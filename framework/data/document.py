"""Records become documents: text by a tokenizer, conversations and answers to compare by a chat template (chat.py).

A conversation is brought into the one form that chat templates of Hugging Face take, whatever form it has:

| form | the field of `data.sources.NAME.messages` is | beside it |
|---|---|---|
| messages | a list of role and content (OpenAI, Hugging Face) | `tools`, `system`, `chat_template_kwargs` |
| ShareGPT | a list of from and value | the same |
| prompt and completion | a string, or a list of messages | `completion` (or `response`, `answer`, `output`) |
| instruction | a string | `input`, `output`, `system`, `history` |

A list may be JSON in a string, as csv has it. Keys of a message that chat templates know (`reasoning_content`, `tool_calls`,
`name`) are kept; a `weight` of 0 says that a turn is not trained.

A record of answers becomes two documents, side by side in the token store and in rows:

| loss | the field of `data.sources.NAME.pairs` | beside it | documents |
|---|---|---|---|
| kto | an answer | `prompt`, `label` (true or false) | the prompt with the answer; with the answer of the record before |
| others | the answer that is chosen | `prompt`, `rejected` | the prompt with the chosen answer; with the rejected one |

Prompts and answers are strings, or lists of messages; answers may begin with the prompt, which is then what both have. Of a
document its answer alone has a loss, the end of its turn included. `train.trained` says which kind of answer a trained token is
of (`recipe/method_schema.py`), so the kind of a document is that of its last token.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from framework.data.chat import THOUGHTS, Chat, Conversation, Message
from framework.data.records import Record
from framework.data.tokenize import Encode, TokenizerInfo, load_encoder, load_tokenizer
from framework.errors import DataError
from framework.recipe.method_schema import PROBE, UNWANTED, WANTED

ROLES = ("system", "developer", "user", "assistant", "tool")
# ShareGPT's roles, and others of data sets that are often used.
ROLE_OF = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
# Fields with the answer to a prompt or an instruction, and all that a conversation may have beside its own field.
ANSWERS = ("completion", "response", "output", "answer", "answers")
BESIDE = (*ANSWERS, "input", "system", "history", "tools", "chat_template_kwargs")
# Fields beside an answer.
BESIDE_ANSWER = ("prompt", "rejected", "label", "system", "tools", "chat_template_kwargs")
# Labels in text, which csv has.
LABELS = {"true": True, "1": True, "false": False, "0": False}
# Answers come in pairs of a chosen and a rejected one, or each with a label.
Form = Literal["pair", "label"]


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


def read_conversation(record: Mapping[str, Any], name: str) -> Conversation:
    """The conversation of a record whose field `name` has it, or begins it. DataError, with the reason alone, if it has none."""
    value, messages = parse_messages(record[name]), []
    system = record.get("system")
    if isinstance(value, list):
        messages = [read_message(index, each) for index, each in enumerate(value)]
        # A prompt of messages; those that end with the answer have it already.
        is_open = bool(messages) and messages[-1]["role"] != "assistant"
        beside = [record[each] for each in ANSWERS if each != name and record.get(each)] if is_open else []
        completion = parse_messages(beside[0]) if beside else None
        if isinstance(completion, list):
            messages += [read_message(len(value) + index, each) for index, each in enumerate(completion)]
        elif isinstance(completion, str):
            messages.append({"role": "assistant", "content": completion})
    elif isinstance(value, str):
        messages = list(_read_answered(record, name, value))
    else:
        raise DataError(f"field `{name}` is neither messages nor a prompt but {type(value).__name__}")
    if not messages:
        raise DataError(f"field `{name}` has no messages")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    tools, options = _parse(record.get("tools")), _parse(record.get("chat_template_kwargs"))
    if tools and not isinstance(tools, list):
        raise DataError(f"field `tools` is not a list but {type(tools).__name__}")
    if options and not isinstance(options, Mapping):
        raise DataError(f"field `chat_template_kwargs` is not an object but {type(options).__name__}")
    return Conversation(messages, _drop_none(tools) or None, _drop_none(options) or {})


def parse_messages(value: Any) -> Any:
    """A value, or the messages that a string has as JSON: a prompt may begin with a bracket, too."""
    parsed = _parse(value)
    return parsed if isinstance(parsed, list) and all(isinstance(each, Mapping) for each in parsed) else value


def _parse(value: Any) -> Any:
    """A value, or the list or object that a string has as JSON."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("[", "{"):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _read_answered(record: Mapping[str, Any], name: str, prompt: str) -> Iterator[Message]:
    """The messages of a prompt or an instruction with its answer."""
    texts = [each for each in ANSWERS if isinstance(record.get(each), str) and each != name]
    answer = next((each for each in texts if record[each].strip()), None)
    if answer is None:
        raise DataError(f"field `{name}` is a string, and beside it there is no answer ({', '.join(ANSWERS[:4])})")
    yield from _read_history(_parse(record.get("history")) or [])
    more = record.get("input") or ""
    if not isinstance(more, str):
        raise DataError(f"field `input` is not a text but {type(more).__name__}")
    yield {"role": "user", "content": f"{prompt}\n\n{more}" if more and name != "input" else prompt}
    yield {"role": "assistant", "content": record[answer]}


def _read_history(turns: Any) -> Iterator[Message]:
    """The turns before an instruction: messages, or pairs of a question and its answer."""
    if not isinstance(turns, list):
        raise DataError(f"field `history` is not a list but {type(turns).__name__}")
    for index, turn in enumerate(turns):
        if isinstance(turn, Mapping):
            yield read_message(index, turn)
        elif isinstance(turn, list | tuple) and len(turn) == 2 and all(isinstance(each, str) for each in turn):
            yield {"role": "user", "content": turn[0]}
            yield {"role": "assistant", "content": turn[1]}
        else:
            raise DataError(f"field `history`: its element {index + 1} is neither a message nor a pair of texts")


def read_message(index: int, value: Any) -> Message:
    """A message with the names that templates know, and without keys that a column of Arrow filled with nothing."""
    where = f"message {index + 1}"
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is not an object but {type(value).__name__}")
    role = value.get("role", value.get("from"))
    if role is None:
        raise DataError(f"{where} has no role (it has: {', '.join(map(str, value)) or 'nothing'})")
    if not isinstance(role, str):
        raise DataError(f"{where} has a role that is no text but {type(role).__name__}")
    is_call = role == "function_call"
    role = ROLE_OF.get(role, role)
    if role not in ROLES:
        raise DataError(f"{where} has the role {role!r}, and known are {', '.join((*ROLES, *ROLE_OF))}")
    message = {key: each for key, each in value.items() if key not in ("from", "value") and each is not None}
    message |= {"role": role, "content": _read_content(where, value.get("content", value.get("value")), message)}
    if wrong := next((key for key in THOUGHTS if not isinstance(message.get(key, ""), str)), None):
        raise DataError(f"{where} has a `{wrong}` that is no text but {type(message[wrong]).__name__}")
    if thought := next((message[key] for key in THOUGHTS if message.get(key)), None):
        message |= dict.fromkeys(THOUGHTS[:2], thought)
    if is_call:
        message |= {"content": "", "tool_calls": [{"type": "function", "function": _parse(message["content"])}]}
    if calls := _parse(message.get("tool_calls")):
        if not isinstance(calls, list):
            raise DataError(f"{where} has `tool_calls` that are no list but {type(calls).__name__}")
        message["tool_calls"] = [_read_call(where, _drop_none(each)) for each in calls]
    else:
        message.pop("tool_calls", None)
    return message


def _read_content(where: str, content: Any, message: Message) -> str:
    if isinstance(content, list) and all(
        isinstance(each, Mapping) and isinstance(each.get("text"), str) for each in content
    ):
        return "".join(each["text"] for each in content)
    if content is None and (message.get("tool_calls") or message.get("reasoning_content")):
        return ""
    if not isinstance(content, str):
        found = "parts that are no text" if isinstance(content, list) else type(content).__name__
        raise DataError(f"{where} has no text but {found}")
    return content


def _read_call(where: str, call: Any) -> dict[str, Any]:
    """A tool call in the form of templates: {type, function: {name, arguments}} with an object of arguments."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where} has a tool call without a function's name")
    return {**call, "type": "function", "function": {**function, "arguments": _parse(function.get("arguments", {}))}}


def _drop_none(value: Any) -> Any:
    """A value without keys that say nothing: a column of Arrow gives every object all keys of all objects."""
    if isinstance(value, dict):
        return {key: _drop_none(each) for key, each in value.items() if each is not None}
    return [_drop_none(each) for each in value] if isinstance(value, list) else value


def beside_of(conversation: str | None, form: Form | None) -> Sequence[str] | None:
    """The fields that are read beside that of a conversation, or of answers of a form; None: beside text none is."""
    return None if conversation is None else BESIDE if form is None else BESIDE_ANSWER


def read_answers(record: Mapping[str, Any], name: str, form: Form) -> list[tuple[Conversation, int]]:
    """The conversations that end with each answer of a record, and the kinds of these. DataError, with the reason alone, where
    there is nothing to compare."""
    answers = {each: _read(record, each, "assistant") for each in ((name, "rejected") if form == "pair" else (name,))}
    kinds, label = [WANTED, UNWANTED], record.get("label")
    label = LABELS.get(label.lower(), label) if isinstance(label, str) else label
    if form == "label" and label not in (0, 1):
        raise DataError(f"field `label` beside the answer `{name}` is neither true nor false but {label!r}")
    if form == "label":
        kinds = [WANTED if label else UNWANTED]
    if all(each[0]["role"] != "assistant" for each in answers.values()):
        prompt = _find_shared([*answers.values()])
        answers = {field: each[len(prompt) :] for field, each in answers.items()}
    else:
        prompt = _read(record, "prompt", "user")
    for field, answer in answers.items():
        if [each["role"] for each in answer] != ["assistant"]:
            raise DataError(
                f"field `{field}` is not one answer of the assistant, behind a prompt (field `prompt`, or in it)"
            )
    # Earlier turns of the assistant are a part of the prompt.
    asked = [{**each, "weight": 0} if each["role"] == "assistant" else each for each in prompt]
    whole = [{**record, "messages": [*asked, *answer]} for answer in answers.values()]
    return [(read_conversation(each, "messages"), kind) for each, kind in zip(whole, kinds, strict=True)]


def _read(record: Mapping[str, Any], name: str, role: str) -> list[Message]:
    """The messages of a field: of a string one, with the role."""
    value = parse_messages(record.get(name))
    if isinstance(value, str) and value.strip():
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        found = "missing" if value is None else "empty" if not value else f"of no messages but {type(value).__name__}"
        raise DataError(f"field `{name}` is {found} (there is: {', '.join(record)})")
    return [read_message(index, each) for index, each in enumerate(value)]


def _find_shared(answers: list[list[Message]]) -> list[Message]:
    """The messages with which all answers begin, but for the last of each."""
    shared = min((each[:-1] for each in answers), key=len)
    while any(each[: len(shared)] != shared for each in answers):
        shared = shared[:-1]
    return shared


def encode_answers(record: Record, field: str, form: Form, chat: Chat) -> list[Document]:
    """The documents of a record, one for each answer. DataError as `read_answers` and `Chat.encode`."""
    if record.values is None:
        raise DataError(str(record.problem))
    found = []
    for conversation, kind in read_answers(record.values, field, form):
        ((ids, trained),) = chat.encode(conversation)
        found.append(Document(hash_values(record.values), 0, ids, trained.astype(np.uint8) * np.uint8(kind)))
    return found


def add_probes(documents: Iterable[Any]) -> Iterator[Any]:
    """Add to each document its prompt with the answer of the one before. The first comes last, and has the last's. Whatever is no
    document passes; a single document, to whose prompt there is no other answer, is left out."""
    first = last = None
    for each in documents:
        if not isinstance(each, Document):
            yield each
            continue
        if last is not None:
            yield from (each, _make_probe(each, last))
        first, last = first or each, each
    if first is not None and last is not None and first is not last:
        yield from (first, _make_probe(first, last))


def _make_probe(asked: Document, answered: Document) -> Document:
    assert asked.trained is not None and answered.trained is not None, "answers have kinds"  # noqa: PT018
    start, other = (int(np.flatnonzero(each)[0]) for each in (asked.trained, answered.trained))
    ids = np.concatenate([asked.ids[:start], answered.ids[other:]])
    return replace(asked, ids=ids, trained=np.where(np.arange(len(ids)) < start, 0, PROBE).astype(np.uint8))
