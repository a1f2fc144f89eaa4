"""Conversations that every machine has: questions about Python's builtins, answered by their own docstrings (`python-help`)."""

import builtins
import inspect
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from framework.files import write_atomically

PYTHON_HELP = "python-help"
TYPES = (str, list, dict, set, int, float, bytes)
QUESTIONS = ("What does {} do?", "Tell me about {}.", "How do I use {}?")
LONGEST = 120


def write_help(folder: Path) -> Path:
    """Write the conversations to a file in `folder`, one on each line: equal ones for one version of Python."""
    path = folder / f"{PYTHON_HELP}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    facts, conversations = list(_list_facts()), list[list[dict[str, str]]]()
    for question in QUESTIONS:  # each answer by itself, and behind that to the question before
        conversations += [_ask(question, *fact) for fact in facts]
        conversations += [_ask(question, *first) + _ask("And {}?", *second) for first, second in pairwise(facts)]
    with write_atomically(path) as file:
        file.writelines(json.dumps({"messages": each}).encode() + b"\n" for each in conversations)
    return path


def _ask(question: str, name: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question.format(name)}, {"role": "assistant", "content": answer}]


def _list_facts() -> Iterator[tuple[str, str]]:
    """(name, first sentence of its docstring) of functions and of methods, in the order of their names."""
    named: list[tuple[str, Any]] = [(name, getattr(builtins, name)) for name in sorted(vars(builtins))]
    named = [(name, each) for name, each in named if inspect.isbuiltin(each)]
    named += [(f"{kind.__name__}.{name}", getattr(kind, name)) for kind in TYPES for name in sorted(vars(kind))]
    for name, each in named:
        sentence = (inspect.getdoc(each) or "").partition("\n\n")[0].replace("\n", " ").partition(". ")[0]
        if "_" not in name and callable(each) and 0 < len(sentence) <= LONGEST and "->" not in sentence:
            yield name, sentence.removesuffix(".") + "."
