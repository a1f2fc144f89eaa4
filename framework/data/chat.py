"""Chat templates: a conversation as tokens, of which those that an assistant says are trained, its end of turn
included, and the proof of it for each conversation.

`apply_chat_template` of transformers renders; nothing of a template is interpreted here. What a turn trains follows from two
renderings: the conversation before the turn with the prompt for an answer, as inference has it, and that with the turn:

    ... <|im_start|>assistant\\n                       what inference is given
    ... <|im_start|>assistant\\nHello!<|im_end|>\\n     what it is to become
                              ^^^^^^^^^^^^^^^^         trained: the rest, without the blanks behind it

All turns of a conversation are trained in one document, as long as each rendering continues the one before. Templates that write
earlier turns anew (without their thinking, or with another end) give a document for each turn, in which it is the last.

Then the tokens are read back (`_prove`): what is trained must decode to each assistant's text in order, with an end behind it
that the template puts there whatever is said. A conversation whose tokens say anything else is refused.

Templates that print the date get a fixed one, so that equal conversations give equal tokens on any day.
"""

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from jinja2 import TemplateError

from framework.errors import DataError

# Keys of an assistant's thinking; templates read one of the first two.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
Message = dict[str, Any]
# The day that Llama 3.1's template has, too.
TODAY = date(2024, 7, 26)
NOW = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1\s*\)")
# Texts that no conversation has, in place of what an assistant says and thinks.
PROBE, PROBE_THOUGHT = "meshwright:answer", "meshwright:thought"
# Errors of a template that does not fit a conversation.
FAILURES = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RuntimeError)
# Characters of a difference that a message quotes.
QUOTED = 120


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
        trained = [index for index in of_assistant if _take_weight(index, self.messages[index]) != 0]
        if not trained:
            raise DataError("no turn of an assistant that is trained: with its roles, nothing of it is learnt")
        try:
            json.dumps([self.messages, self.tools, self.options], ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            raise DataError("its text is not Unicode: half of a surrogate pair, or bytes that are not UTF-8") from error
        object.__setattr__(self, "trained", trained)


def _take_weight(index: int, message: Message) -> float:
    """The weight of a message, taken out of it. DataError if that is no number."""
    weight = message.pop("weight", 1)
    try:
        return float(weight)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(f"message {index + 1} has a weight that is no number ({error})") from error


NO_CONVERSATION = Conversation([{"role": "user", "content": "."}, {"role": "assistant", "content": PROBE}])


@dataclass
class Rendering:
    """A document's text, and the spans of its characters that are trained, in order; it ends with the last."""

    text: str
    spans: list[tuple[int, int]]


class Chat:
    """A tokenizer with its chat template. train_on: assistant, last or all (`data.train_on`)."""

    def __init__(self, tokenizer: Any, train_on: str = "assistant") -> None:
        self._tokenizer, self._train_on = tokenizer, train_on
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        added = sorted((str(each) for each in tokenizer.added_tokens_decoder.values()), key=len, reverse=True)
        self._marker = re.compile("|".join(map(re.escape, added)) or r"(?!)")
        self._known: set[tuple[str, ...]] = set()

    def render(self, conversation: Conversation, messages: list[Message], answer: bool = False) -> str:
        """Messages of a conversation as text. answer: with the prompt for an answer. DataError where the template fails."""
        if not messages:
            return ""
        template = self._tokenizer.get_chat_template(None, conversation.tools)
        template = NOW.sub(lambda found: repr(TODAY.strftime(found[2])), template)
        options = {"tools": conversation.tools, "chat_template": template, "add_generation_prompt": answer}
        try:
            return self._apply(messages, options | conversation.options)
        except FAILURES as error:
            # Some templates take arguments of a call as a string of JSON.
            if any(each.get("tool_calls") for each in messages):
                with suppress(*FAILURES):
                    return self._apply([_write_arguments(each) for each in messages], options | conversation.options)
            raise DataError(
                f"the chat template fails, and data.chat_template sets another: {type(error).__name__}: {error}"
            ) from error

    def _apply(self, messages: list[Message], options: dict[str, Any]) -> str:
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, **options))

    def prompt(self, messages: list[Message]) -> str:
        """The text of messages with the prompt for an answer. DataError where the template fails."""
        return self.render(NO_CONVERSATION, messages, answer=True)

    def encode(self, conversation: Conversation) -> list[tuple[np.ndarray, np.ndarray]]:
        """The documents of a conversation as tokens: (ids [n] int32, trained [n] bool) of each.

        DataError, with the reason alone, where the template fails or what is trained is not what the assistant says.
        """
        turns = conversation.trained[-1:] if self._train_on == "last" else conversation.trained
        if self._train_on == "all":
            text = self.render(conversation, conversation.messages).rstrip()
            return [self._tokenize(Rendering(text, [(0, len(text))]))]
        encoded = [self._tokenize(each) for each in self._lay_out(conversation, turns)]
        self._prove(conversation, turns, encoded)
        return encoded

    def _lay_out(self, conversation: Conversation, turns: list[int]) -> list[Rendering]:
        documents: list[Rendering] = []
        for turn in turns:
            text, start = self._render_turn(conversation, turn)
            if documents and text.startswith(documents[-1].text):
                documents[-1].text = text
                documents[-1].spans.append((start, len(text)))
            else:
                documents.append(Rendering(text, [(start, len(text))]))
        return documents

    def _render_turn(self, conversation: Conversation, turn: int, said: Message | None = None) -> tuple[str, int]:
        """(the text up to the end of a turn, the character at which what is trained begins). said: in place of the message."""
        before, message = conversation.messages[:turn], said or conversation.messages[turn]
        prompt = self.render(conversation, before, answer=True)
        whole = self.render(conversation, [*before, message])
        start = len(prompt)
        if not before:  # an answer to nothing: what stands before its text is no part of it
            start = whole.find(find_texts(message)[0] or "\0")
        elif not whole.startswith(prompt):
            start = self._find_shared_start(conversation, before, message, prompt)
        if start < 0:
            raise DataError(
                f"message {turn + 1}: the chat template prompts for an answer with {prompt[-QUOTED:]!r}, but writes one as"
                f" {whole[-QUOTED:]!r}"
            )
        return self._end_turn(conversation, before, message, whole, start), start

    def _find_shared_start(
        self, conversation: Conversation, before: list[Message], message: Message, prompt: str
    ) -> int:
        """The character at which a turn leaves its prompt, where the prompt has more than a turn begins with (<think> of
        DeepSeek-R1): behind the header that both have. -1 if they part before the answer."""
        # With another text, of which no letter is the prompt's by chance.
        whole = self.render(conversation, [*before, _replace_texts(message)])
        shared = _count_shared(prompt, whole)
        if shared < _count_shared(prompt, self.render(conversation, before)):
            return -1
        return next(
            (each.start() for each in self._marker.finditer(whole) if each.start() < shared < each.end()), shared
        )

    def _end_turn(
        self, conversation: Conversation, before: list[Message], message: Message, whole: str, start: int
    ) -> str:
        """The text of a rendering up to the end of its last turn, whose trained text begins at character `start`."""
        text, said = whole.rstrip(), split_thought(message)[1]
        if not self._closes_turns:
            return text + self._find_next_marker(conversation, "tool" if message.get("tool_calls") else "user")
        if message.get("tool_calls"):
            return text
        if not said:  # what stands behind another text
            filled = {**message, "content": f"{message['content']}{PROBE}"}
            end = self._end_turn(conversation, before, filled, self.render(conversation, [*before, filled]), start)
            end = end.rpartition(PROBE)[2]
            return text[: text.find(end, start) + len(end)]
        ends = [found.end() for found in self._marker.finditer(text, text.rfind(said, start) + len(said))]
        if len(ends) > 1:
            # Some templates close the last turn of all with the end of a text as well (Phi 3), which no answer needs.
            shared = _count_shared(text, self.render(conversation, [*before, message], answer=True))
            return text[: max((end for end in ends if end <= shared), default=len(text))]
        return text

    @cached_property
    def turn_end(self) -> list[int]:
        """The ids with which an assistant's answer ends."""
        text, _ = self._render_turn(NO_CONVERSATION, 1)
        ids, _, _ = self._encode(text.rpartition(PROBE)[2], 0)
        return [int(each) for each in ids]

    @cached_property
    def _closes_turns(self) -> bool:
        """Whether the template ends an assistant's turn with something, and not by what begins the next one (GLM)."""
        return bool(self.render(NO_CONVERSATION, NO_CONVERSATION.messages).rpartition(PROBE)[2].strip())

    def _find_next_marker(self, conversation: Conversation, role: str) -> str:
        """The marker of the next turn, for templates that end a turn with nothing else: an answer is over when it comes."""
        probe = [*NO_CONVERSATION.messages, {"role": role, "content": "."}]
        found = self._marker.match(self.render(conversation, probe).rpartition(PROBE)[2].lstrip())
        if found is None:
            raise DataError("the chat template ends an assistant's turn with nothing that is trained as its end")
        return found[0]

    def _tokenize(self, document: Rendering) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of a document: (ids [n] int32, trained [n] bool). Text is cut where a span begins or ends and a token does not,
        as inference cuts it."""
        text, cuts = document.text, {cut for span in document.spans for cut in span if cut < len(document.text)}
        ids, starts, stops = self._encode(text, 0)
        crossed = [
            cut
            for cut in cuts
            if ((starts < cut) & (stops > cut)).any() and not self._swallows_blanks(text, cut, stops)
        ]
        if crossed:
            pieces = [
                self._encode(text[first:last], first) for first, last in pairwise([0, *sorted(crossed), len(text)])
            ]
            ids, starts, _ = (np.concatenate(each) for each in zip(*pieces, strict=True))
        trained = np.zeros(len(ids), dtype=bool)
        for start, stop in document.spans:
            trained |= (starts >= start) & (starts < stop)
        return ids, trained

    def _swallows_blanks(self, text: str, cut: int, stops: np.ndarray) -> bool:
        """Whether the token across a cut is a marker that takes the blanks behind it."""
        stop = int(stops[stops > cut].min())
        return text[cut:stop].isspace() and any(found.end() == cut for found in self._marker.finditer(text))

    def _encode(self, text: str, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Tokens of a text that begins at character `start`: ids [n] int32, and where each starts and stops, [n] int64."""
        if self._backend is None:
            ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            # Without offsets all of it is one piece, and every cut is made.
            return np.asarray(ids, np.int32), np.full(len(ids), start), np.full(len(ids), start + len(text))
        encoding = self._backend.encode(text, add_special_tokens=False)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2) + start
        return np.asarray(encoding.ids, dtype=np.int32), offsets[:, 0], offsets[:, 1]

    def decode(self, ids: np.ndarray) -> str:
        """The text of tokens, [n], with all markers."""
        if self._backend is not None:
            return str(self._backend.decode(ids.tolist(), skip_special_tokens=False))
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids.tolist(), **options))

    def _prove(
        self, conversation: Conversation, turns: list[int], encoded: list[tuple[np.ndarray, np.ndarray]]
    ) -> None:
        """DataError unless what is trained, decoded, is what the assistant says in `turns`, each with its end."""
        said = [text for each in encoded for text, is_trained in self.read_runs(*each) if is_trained]
        if len(said) != len(turns):
            raise DataError(f"{len(turns)} turns of the assistant, but {len(said)} pieces of text are trained")
        for turn, text in zip(turns, said, strict=True):
            why = self._find_difference(conversation, turn, self._normalize(text))
            if why is not None:
                raise DataError(f"message {turn + 1} would be trained as {_quote(text)}: {why}")

    def read_runs(self, ids: np.ndarray, trained: np.ndarray) -> Iterator[tuple[str, bool]]:
        """The text of each run of tokens that are trained, or not, in order. ids, trained: [n] each."""
        borders = [0, *(np.flatnonzero(trained[1:] != trained[:-1]) + 1), len(ids)]
        for start, stop in pairwise(borders):
            # A tokenizer may drop a leading space of what it decodes, so both are decoded from their start.
            yield self.decode(ids[:stop]).removeprefix(self.decode(ids[:start])), bool(trained[start])

    def _find_difference(self, conversation: Conversation, turn: int, text: str) -> str | None:
        """The difference of a turn's trained text from what its message says; None if it is right."""
        message = conversation.messages[turn]
        parts = [self._normalize(each) for each in split_thought(message) if each]
        for call in message.get("tool_calls", ()):
            parts += [call["function"]["name"], *_find_leaves(call["function"]["arguments"])]
        missing = next((each for each in parts if each not in text), None)
        if missing is not None:
            return f"the chat template leaves out or changes {_quote(missing)}"
        around = _cut_out(text, [self._normalize(each) for each in split_thought(message)])
        if not around[-1].strip():
            return "nothing is trained as its end"
        if around not in self._known:
            # The same turn with another text: what stands around it is the template's.
            probe = _replace_texts(message)
            whole, start = self._render_turn(conversation, turn, probe)
            wanted = _cut_out(self._normalize(whole[start:]), split_thought(probe))
            if around != wanted:
                return f"around what is said stands {_quote(' ... '.join(around))}, and in the chat template" + (
                    f" {_quote(' ... '.join(wanted))}"
                )
            self._known.add(around)
        return None

    def _normalize(self, text: str) -> str:
        """Text as a tokenizer with a normaliser sees it: composed, in Unicode's form C."""
        has_normalizer = self._backend is not None and self._backend.normalizer is not None
        return unicodedata.normalize("NFC", text) if has_normalizer else text


def split_thought(message: Message) -> tuple[str, str]:
    """(what a turn thinks, what it says), without blanks around. Templates take thinking in tags out of the text."""
    thought, content = str(message.get(THOUGHTS[0]) or ""), str(message["content"])
    if not thought and "</think>" in content:
        thought, _, content = content.partition("</think>")
        thought = thought.replace("<think>", "")
    return thought.strip(), content.strip()


def find_texts(message: Message) -> list[str]:
    """The texts that a turn trains, in order: its thinking, what it says and the names of the functions that it calls."""
    names = [call["function"]["name"] for call in message.get("tool_calls", ())]
    return [*(each for each in split_thought(message) if each), *names] or [""]


def _replace_texts(message: Message) -> Message:
    """A message that says and thinks something else, with the same blanks and tags around."""
    thought, content = split_thought(message)
    head, tag, tail = str(message["content"]).rpartition("</think>")
    if thought and tag:
        head = PROBE_THOUGHT.join(head.rsplit(thought, 1))
    probe = {**message, "content": head + tag + (tail.replace(content, PROBE, 1) if content else tail)}
    return probe | {key: PROBE_THOUGHT for key in THOUGHTS if thought and message.get(key)}


def _count_shared(left: str, right: str) -> int:
    """The number of characters with which both texts begin."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))


def _cut_out(text: str, pieces: Sequence[str]) -> tuple[str, ...]:
    """The text around pieces of a text, in order; a piece that is empty or not there counts as none."""
    around = []
    for piece in pieces:
        before, found, after = text.partition(piece) if piece else (text, "", "")
        if found:
            around.append(before)
            text = after
    return (*around, text)


def _find_leaves(value: Any) -> Iterator[str]:
    """Texts and numbers in arguments of a call, as JSON writes them, without quotes."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _find_leaves(each)
    elif isinstance(value, str):
        yield value if json.dumps(value) == f'"{value}"' else ""
    elif not isinstance(value, bool) and value is not None:
        yield json.dumps(value)


def _write_arguments(message: Message) -> Message:
    """A message whose calls have their arguments as JSON in a string."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _quote(text: str) -> str:
    return repr(text if len(text) <= QUOTED else f"{text[: QUOTED // 2]} ... {text[-QUOTED // 2 :]}")
