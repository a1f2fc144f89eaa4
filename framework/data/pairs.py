"""Answers to compare: two documents for each record, side by side in the token store and in rows.

| loss | the field of `data.sources.NAME.pairs` | beside it | documents |
|---|---|---|---|
| kto | an answer | `prompt`, `label` (true or false) | the prompt with the answer; with the answer of the record before |
| others | the answer that is chosen | `prompt`, `rejected` | the prompt with the chosen answer; with the rejected one |

Prompts and answers are strings, or lists of messages; answers may begin with the prompt, which is then what both have. They are
rendered by the chat template, and of a document its answer alone has a loss, the end of its turn included. `train.trained` says
which kind of answer a trained token is of (`recipe/method_schema.py`), so the kind of a document is that of its last token.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from framework.data.chat import Chat
from framework.data.conversation import Conversation, Message, parse_messages, read_conversation, read_message
from framework.data.document import Document, hash_values
from framework.data.records import Record
from framework.errors import DataError
from framework.recipe.method_schema import PROBE, UNWANTED, WANTED

# Fields beside an answer.
BESIDE_ANSWER = ("prompt", "rejected", "label", "system", "tools", "chat_template_kwargs")
# Answers come in pairs of a chosen and a rejected one, or each with a label.
Form = Literal["pair", "label"]


def read_answers(record: Mapping[str, Any], name: str, form: Form) -> list[tuple[Conversation, int]]:
    """The conversations that end with each answer of a record, and the kinds of these. DataError, with the reason alone, where
    there is nothing to compare."""
    answers = {each: _read(record, each, "assistant") for each in ((name, "rejected") if form == "pair" else (name,))}
    kinds, label = [WANTED, UNWANTED], record.get("label")
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
    document passes."""
    first = last = None
    for each in documents:
        if not isinstance(each, Document):
            yield each
            continue
        if last is not None:
            yield from (each, _make_probe(each, last))
        first, last = first or each, each
    if first is not None and last is not None:
        yield from (first, _make_probe(first, last))


def _make_probe(asked: Document, answered: Document) -> Document:
    assert asked.trained is not None and answered.trained is not None, "answers have kinds"  # noqa: PT018
    start, other = (int(np.flatnonzero(each)[0]) for each in (asked.trained, answered.trained))
    ids = np.concatenate([asked.ids[:start], answered.ids[other:]])
    return replace(asked, ids=ids, trained=np.where(np.arange(len(ids)) < start, 0, PROBE).astype(np.uint8))
