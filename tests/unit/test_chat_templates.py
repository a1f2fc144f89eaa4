"""Masks of chat templates against pieces marked by hand; the proof of every conversation against the field's published bugs."""

import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from framework.data.chat import Chat, Rendering
from framework.data.document import read_conversation
from framework.errors import DataError
from tests.chat_templates import FAMILIES, answer, build_chat, build_tokenizer, read_trained, user

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "two"}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}
ALPHABET = "abc xyz  ÄÖé猫🦊\u0301\n.,<>[]|{}'\"0123456789"


def encode(name: str, messages: list[dict[str, Any]], train_on: str = "assistant", **more: Any) -> list[list[str]]:
    chat = build_chat(name, train_on)
    return read_trained(chat, chat.encode(read_conversation({"messages": messages, **more}, "messages")))


def expect(name: str, *said: str) -> list[list[str]]:
    """The pieces of plain answers, by what is marked in the family's table."""
    family = FAMILIES[name]
    pieces = [f"{family.lead}{each.strip() if family.trims else each}{family.end}" for each in said]
    return [pieces] if family.keeps else [[piece] for piece in pieces]


def expect_empty(name: str) -> str:
    """The piece of an answer without a word."""
    lead = FAMILIES[name].lead
    return f"{lead.rstrip() if name == 'glm4_5' else lead}{FAMILIES[name].end}"


@pytest.mark.parametrize("name", FAMILIES)
class TestFamilies:
    def test_one_turn(self, name: str) -> None:
        assert encode(name, [user("Hi"), answer("Hello <b>you</b>!")]) == expect(name, "Hello <b>you</b>!")

    def test_several_turns_and_a_system_prompt(self, name: str) -> None:
        system = [{"role": "system", "content": "Be kind."}] if FAMILIES[name].takes_system else []
        messages = [*system, user("Hi"), answer("Hello!"), user("More"), answer("  Sure \n"), user("And?")]
        assert encode(name, messages) == expect(name, "Hello!", "  Sure \n")
        if not system:
            with pytest.raises(
                DataError, match=r"the chat template fails, and data.chat_template sets another.*not supported"
            ):
                encode(name, [{"role": "system", "content": "Be kind."}, *messages])

    def test_the_last_turn_and_all(self, name: str) -> None:
        messages = [user("Hi"), answer("Hello!"), user("More"), answer("Sure")]
        assert encode(name, messages, "last") == expect(name, "Sure")
        ((everything,),) = encode(name, messages, "all")
        assert all(each in everything for each in ("Hi", "Hello!", "More", "Sure"))

    def test_unicode_and_what_looks_like_a_header(self, name: str) -> None:
        said = ("猫 é e\u0301 🦊🏽 ｜User｜ ok", "assistant\nuser: ## [x] <think")
        assert encode(name, [user("¿?"), answer(said[0]), user("🦊"), answer(said[1])]) == expect(name, *said)

    def test_empty_turns(self, name: str) -> None:
        found = encode(name, [user("Hi"), answer(""), user("?"), answer("ok")])
        assert [piece for document in found for piece in document] == [expect_empty(name), expect(name, "ok")[0][0]]

    def test_thinking(self, name: str) -> None:
        thought = [
            user("Hi"),
            answer("Hello!", reasoning_content="They greet."),
            user("?"),
            answer("Yes", reasoning_content="So."),
        ]
        form = FAMILIES[name].thought
        if form is None:
            with pytest.raises(DataError, match=r"message 2 would be trained as .*leaves out or changes 'They greet.'"):
                encode(name, thought)
        else:
            pieces = [form.format(thought="They greet.", said="Hello!"), form.format(thought="So.", said="Yes")]
            assert encode(name, thought) == [[piece] for piece in pieces]

    def test_tools(self, name: str) -> None:
        messages = [user("Add"), answer(None, tool_calls=[CALL]), {"role": "tool", "content": "3"}, answer("Three.")]
        called = FAMILIES[name].called
        if called is None:
            with pytest.raises(DataError, match=r"leaves out or changes 'add'|the chat template fails"):
                encode(name, messages, tools=[TOOL])
        else:
            pieces = [piece for document in encode(name, messages, tools=[TOOL]) for piece in document]
            assert pieces == [called, expect(name, "Three.")[0][0]]


def test_no_token_of_many_is_wrong() -> None:
    count_wrong(5)


@pytest.mark.grid
def test_no_token_of_a_hundred_thousand_is_wrong() -> None:
    assert count_wrong(100) > 100_000


def count_wrong(conversations: int) -> int:
    """Compare random conversations of all families, token by token, and return how many tokens that were."""
    rng, total = random.Random(3), 0
    for name in FAMILIES:
        chat = build_chat(name)
        for _ in range(conversations):
            messages, pieces = draw_conversation(rng, name)
            encoded = chat.encode(read_conversation({"messages": messages}, "messages"))
            for ids, trained in encoded:
                # As many of the pieces as the document has runs: were that wrong, the rest would not be used up.
                runs = sum(is_trained for _, is_trained in chat.read_runs(ids, trained))
                np.testing.assert_array_equal(trained, mark(chat, ids, pieces[:runs]), err_msg=f"{name}: {messages}")
                pieces, total = pieces[runs:], total + len(ids)
            assert not pieces, f"{name}: {messages}"
    return total


def draw_conversation(rng: random.Random, name: str) -> tuple[list[dict[str, Any]], list[str]]:
    """A random conversation of what a family's template can write: a system prompt, plain answers, thinking, calls; and the
    pieces of it that are trained, by what is marked in the family's table."""
    family = FAMILIES[name]

    def draw_text() -> str:
        return f"q{rng.random():.3f} {''.join(rng.choices(ALPHABET, k=rng.randint(0, 40)))}."

    kinds = ["plain", "plain", *["thought"] * bool(family.thought), *["called"] * bool(family.called)]
    has_system = family.takes_system and rng.random() < 0.3
    messages, pieces = [{"role": "system", "content": draw_text()}] * has_system, []
    for _ in range(rng.randint(1, 3)):
        said, kind = draw_text(), rng.choice(kinds)
        messages.append(user(draw_text()))
        if kind == "called":
            messages += [answer(None, tool_calls=[CALL]), {"role": "tool", "content": draw_text()}]
            pieces.append(str(family.called))
        thought = draw_text().replace("\n", " ") if kind == "thought" else ""
        messages.append(answer(said, **({"reasoning_content": thought} if thought else {})))
        form = str(family.thought)
        pieces.append(form.format(thought=thought, said=said) if thought else expect(name, said)[0][0])
    return messages, pieces


def mark(chat: Chat, ids: np.ndarray, pieces: list[str]) -> np.ndarray:
    """The tokens of marked pieces, found from behind by decoding."""
    trained, stop = np.zeros(len(ids), dtype=bool), len(ids)
    for piece in reversed(pieces):
        while not chat.decode(ids[:stop]).endswith(piece):
            stop -= 1
        start = next(at for at in range(stop - 1, -1, -1) if chat.decode(ids[at:stop]) == piece)
        trained[start:stop] = True
        stop = start
    return trained


HARMS = ("all ones", "all zeros", "end untrained", "header trained", "one late", "last turn only")
# The published bugs of masks, each planted where it was found. docs/finetuning.md has the others with their tests.
PUBLISHED = {
    "TRL 4201": ("qwen2_5", "header trained"),
    "TRL 4879": ("qwen3", "all zeros"),
    "TRL 5988": ("glm4_5", "end untrained"),
    "Megatron-Bridge 3359": ("llama3_1", "all ones"),
    "Megatron-Bridge 2598": ("mistral", "all ones"),
    "marin 7237, Llama": ("llama3_1", "all zeros"),
    "marin 7237, Qwen": ("qwen3", "all zeros"),
    "marin 7237, Gemma": ("gemma3", "all zeros"),
    "marin 7237, gpt-oss": ("gpt_oss", "all zeros"),
    "Automodel 3739": ("glm5", "header trained"),  # the prompt's <think>
}


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *(pytest.param(*each, id=bug) for bug, each in PUBLISHED.items()),
        *(pytest.param(*each, marks=pytest.mark.grid) for each in product(FAMILIES, HARMS)),
    ],
)
def test_published_bugs_are_refused(name: str, harm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Chat._tokenize

    def tokenize(self: Chat, document: Rendering) -> tuple[np.ndarray, np.ndarray]:
        ids, trained = whole(self, document)
        runs = np.flatnonzero(np.diff(np.concatenate([[False], trained, [False]]).astype(np.int8))).reshape(-1, 2)
        for start, stop in runs if harm in ("end untrained", "header trained", "one late") else ():
            trained[stop - 1] = harm == "header trained"
            trained[start - 1] = harm == "header trained"
            trained[start] = harm != "one late"
        if harm == "last turn only":
            trained[: runs[-1][0]] = False
        return ids, trained & (harm != "all zeros") | (harm == "all ones")

    monkeypatch.setattr(Chat, "_tokenize", tokenize)
    messages = [user("Hi"), answer("Hello there!"), user("More"), answer("Sure, more.")]
    if harm == "last turn only" and not FAMILIES[name].keeps:
        return  # each turn is a document of its own
    with pytest.raises(DataError, match=r"would be trained as|pieces of text are trained"):
        encode(name, messages)


def test_the_tests_that_docs_name_are_there() -> None:
    """docs/finetuning.md: of all published bugs."""
    root = Path(__file__).parents[2]
    named = re.findall(r"`(tests/\S+\.py): (test_\w+)`", (root / "docs/finetuning.md").read_text())
    assert len(named) >= 5
    assert all(f"def {name}(" in (root / file).read_text() for file, name in named)


def test_the_date_of_a_template_is_no_date_of_today() -> None:
    chat = build_chat("smollm3")
    assert "Today Date: 26 July 2024" in chat.prompt([user("a")])


def test_a_marker_that_is_plain_text_ends_a_turn_too() -> None:
    """A base model's tokenizer has no <|im_end|>: several tokens are the end then."""
    tokenizer = build_tokenizer("olmo2")
    plain = Chat(type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|endoftext|>"))
    plain._tokenizer.chat_template = FAMILIES["chatml"].template
    encoded = plain.encode(read_conversation({"messages": [user("Hi"), answer("Hello")]}, "messages"))
    assert read_trained(plain, encoded) == [["Hello<|im_end|>"]]
    assert len(plain.turn_end) > 1


def test_a_turn_without_an_end_is_refused() -> None:
    chat = build_chat("chatml")
    chat._tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    try:
        with pytest.raises(DataError, match=r"ends an assistant's turn with nothing"):
            chat.encode(read_conversation({"messages": [user("Hi"), answer("Hello")]}, "messages"))
    finally:
        chat._tokenizer.chat_template = FAMILIES["chatml"].template
