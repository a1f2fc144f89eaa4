"""Conversations: a record's messages, in the one form that chat templates of Hugging Face take, whatever form it has.

| form | the field is | beside it |
|---|---|---|
| messages | a list of role and content (OpenAI, Hugging Face) | `tools`, `system`, `chat_template_kwargs` |
| ShareGPT | a list of from and value | the same |
| prompt and completion | a string, or a list of messages | `completion` (or `response`, `answer`, `output`) |
| instruction | a string | `input`, `output`, `system`, `history` |

A list may be JSON in a string, as csv has it. Keys of a message that chat templates know (`reasoning_content`, `tool_calls`,
`name`) are kept; a `weight` of 0 says that a turn is not trained.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from framework.errors import DataError

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
# Keys of an assistant's thinking; templates read one of the first two.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Messages with role and content, of which at least one is the assistant's. options: more that its template is given."""

    messages: list[Message]
    tools: list[Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    trained: list[int] = field(init=False)
    """Numbers of the assistant's messages that may be trained."""

    def __post_init__(self) -> None:
        of_assistant = [index for index, each in enumerate(self.messages) if each["role"] == "assistant"]
        trained = [index for index in of_assistant if float(self.messages[index].pop("weight", 1)) != 0]
        if not trained:
            raise DataError("no turn of an assistant that is trained: with its roles, nothing of it is learnt")
        object.__setattr__(self, "trained", trained)


def read_conversation(record: Mapping[str, Any], name: str) -> Conversation:
    """The conversation of a record whose field `name` has it, or begins it. DataError, with the reason alone, if it has none."""
    value, messages = parse_messages(record[name]), []
    system = record.get("system")
    if isinstance(value, list):
        messages = [read_message(index, each) for index, each in enumerate(value)]
        # A prompt of messages; those that end with the answer have it already.
        is_open = bool(messages) and messages[-1]["role"] != "assistant"
        completion = parse_messages(record.get("completion")) if is_open else None
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
    for asked, answered in record.get("history") or ():
        yield {"role": "user", "content": str(asked)}
        yield {"role": "assistant", "content": str(answered)}
    more = record.get("input")
    yield {"role": "user", "content": f"{prompt}\n\n{more}" if more and name != "input" else prompt}
    yield {"role": "assistant", "content": record[answer]}


def read_message(index: int, value: Any) -> Message:
    """A message with the names that templates know, and without keys that a column of Arrow filled with nothing."""
    where = f"message {index + 1}"
    if not isinstance(value, Mapping):
        raise DataError(f"{where} is not an object but {type(value).__name__}")
    role = value.get("role", value.get("from"))
    if role is None:
        raise DataError(f"{where} has no role (it has: {', '.join(map(str, value)) or 'nothing'})")
    is_call = role == "function_call"
    role = ROLE_OF.get(role, role)
    if role not in ROLES:
        raise DataError(f"{where} has the role {role!r}, and known are {', '.join((*ROLES, *ROLE_OF))}")
    message = {key: each for key, each in value.items() if key not in ("from", "value") and each is not None}
    message |= {"role": role, "content": _read_content(where, value.get("content", value.get("value")), message)}
    if thought := next((message[key] for key in THOUGHTS if isinstance(message.get(key), str)), None):
        message |= dict.fromkeys(THOUGHTS[:2], thought)
    if is_call:
        message |= {"content": "", "tool_calls": [{"type": "function", "function": _parse(message["content"])}]}
    if calls := message.get("tool_calls"):
        message["tool_calls"] = [_read_call(where, _drop_none(each)) for each in calls]
    else:
        message.pop("tool_calls", None)
    return message


def _read_content(where: str, content: Any, message: Message) -> str:
    if isinstance(content, list) and all(
        isinstance(each, Mapping) and each.get("text") is not None for each in content
    ):
        return "".join(str(each["text"]) for each in content)
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
