"""Model families of the installed transformers, found without importing it, which takes seconds."""

import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from framework.recipe.problem import Problem
from framework.recipe.schema import Recipe
from framework.recipe.suggest import nearest

# Where the automatic configurations are listed, below the package.
LISTS = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
NEAR = 3
# Families that have been there as long as the lists: without them the lists lie elsewhere, and nothing can be said.
OLD = {"gpt2", "llama"}


def find_family_problems(recipe: Recipe) -> Iterator[Problem]:
    """A family that transformers does not have. Silent where weights say what the model is, and where the lists cannot be read:
    building the model then refuses it."""
    family, strings = recipe.model.family, read_strings()
    if recipe.model.weights or recipe.model.config_file or family in strings or not strings >= OLD:
        return
    near = nearest(family.lower(), list_families(), NEAR)
    fix = (
        f"did you mean {' or '.join(f'model.family={name}' for name in near)}?"
        if near
        else "a model_type, as the config.json of a model on the hub says it"
    )
    yield Problem("model.family", family, "no model type of the installed transformers", fix)


@cache
def read_strings() -> frozenset[str]:
    """All strings of the lists: the families' names, and others. A name that is not among them is no family."""
    return frozenset(re.findall(r"[\"']([^\"'\n]*)[\"']", _read_lists()))


def list_families() -> list[str]:
    """The names that are listed with a configuration, for suggestions."""
    # ("albert", "AlbertConfig"), in a list of pairs, or "mlcd": "MLCDVisionConfig", in a dict.
    return [
        pair or entry
        for pair, entry in re.findall(r"\(\"([^\"]+)\", \"\w+Config\"|\"([^\"]+)\": \"\w+Config\"", _read_lists())
    ]


@cache
def _read_lists() -> str:
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    files = [Path(spec.origin).parent / name for name in LISTS]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
