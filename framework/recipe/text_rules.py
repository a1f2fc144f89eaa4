"""Rules of every text in a recipe, whatever its key: none looks like a secret, for recipe.yaml keeps it, and none has control
characters, which a terminal obeys and which break a line of a log in two. `launch` has rules of its own."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from framework.output import CONTROLS, in_a_line
from framework.recipe.environment import looks_secret
from framework.recipe.keys import flatten
from framework.recipe.problem import Problem
from framework.recipe.schema import Recipe

# Whose rules say how to give a secret.
OWN_SECRETS = ("launch.environment", "launch.set_up", "launch.sbatch")
# A prompt may have lines.
MAY_HAVE_LINES = ("train.sample",)


def find_text_problems(recipe: Recipe) -> Iterator[Problem]:
    for key, value in flatten(asdict(recipe)).items():
        texts = [key, *_texts_in(value)]
        if not key.startswith(OWN_SECRETS) and any(map(looks_secret, texts)):
            message = "looks like a secret, and the run's recipe.yaml would keep it for all to read"
            fix = "give it to the ranks by its variable, such as 'launch.environment.HF_TOKEN=${oc.env:HF_TOKEN}'"
            yield Problem(key, None, message, fix)
        found = next((text for text in texts if _has_controls(text, key in MAY_HAVE_LINES)), None)
        if found is not None and not key.startswith("launch."):
            yield Problem(in_a_line(key), None, f"has control characters: {in_a_line(found)[:80]}", "leave them out")


def _has_controls(text: str, may_have_lines: bool) -> bool:
    return CONTROLS.search(text) is not None or ("\r" in text) or ("\n" in text and not may_have_lines)


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, element in value.items():
            yield from (str(name), *_texts_in(element))
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _texts_in(element)
