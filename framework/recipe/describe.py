"""Recipes and their keys in words, for `check` and `--help`."""

import itertools
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict
from pathlib import Path

from framework.recipe.derive import (
    Derived,
    compiles,
    count_context_parts,
    explain_not_compiled,
    overlaps_matmuls,
    unpadded_lengths,
)
from framework.recipe.files import find_file, list_options
from framework.recipe.keys import flatten, list_groups, list_keys, plain
from framework.recipe.problem import find_width, show
from framework.recipe.schema import Data, Recipe


def describe_derived(derived: Derived) -> str:
    """The numbers that follow from a recipe, each with its derivation."""
    d = derived
    axes = " x ".join(f"{axis} {getattr(d, axis)}" for axis in ("dp", "tp", "pp", "cp"))
    is_dense = d.ep == 1 and d.expert_tp == d.tp
    experts = "" if is_dense else f"; experts: ep {d.ep}, expert_tp {d.expert_tp}"
    microbatches = f"{d.accumulation} microbatch{'es' if d.accumulation != 1 else ''} of {d.sequences_per_microbatch}"
    length = f"{d.total_tokens // d.tokens_per_step:,} steps = {d.total_tokens:,} tokens"
    if d.epochs is not None:
        length = f"{d.epochs:g} pass{'es' * (d.epochs != 1)} over the text: steps follow when the data is prepared"
    rows = (
        ("world", f"{d.world} rank{'s' if d.world != 1 else ''}: {axes}{experts}"),
        ("step", f"{d.sequences_per_step:,} sequences of {d.context:,} tokens = {d.tokens_per_step:,} tokens"),
        ("accumulation", f"{microbatches} on " + (f"each of {d.dp} dp ranks" if d.dp != 1 else "the only dp rank")),
        ("run", length),
    )
    return "\n".join(f"{name:13} {text}" for name, text in (*rows, *_say_context(d)))


def _say_context(d: Derived) -> Iterator[tuple[str, str]]:
    """Slices of a sequence under context parallelism, and lengths that need no padding."""
    if d.cp == 1:
        return
    parts = count_context_parts(d.ulysses, d.ring)
    each = parts // d.cp * -(-d.context // parts)
    slices = f"each of {d.cp} cp ranks has {each:,} tokens of a sequence (ulysses {d.ulysses} x ring {d.ring})"
    if padding := each * d.cp - d.context:
        lengths = " or ".join(map(str, unpadded_lengths(d.context, d.ulysses, d.ring)))
        slices += f", {padding} of padding in all: none with batch.context={lengths}"
    yield "context", slices


def describe_blend(data: Data, tokens: Mapping[str, int] | None = None) -> str:
    """The sources that are read, with their shares of the samples where there are several. tokens: of each, if they are known."""
    if len(data.read) < 2 or (data.blends_by_tokens and not tokens):
        return ", ".join(data.read) + ", shares follow from their tokens (meshwright prepare)" * (len(data.read) > 1)
    weights = data.weigh(tokens or dict.fromkeys(data.read, 1))
    return ", ".join(f"{name} {weight / sum(weights.values()):.0%}" for name, weight in weights.items())


def describe_compilation(recipe: Recipe) -> str:
    """The effect of `memory.compile` and its reasons, a line each; empty where it is `never`."""
    if recipe.memory.compile == "never":
        return ""
    return "\n".join(f"{'compile':13} {text}" for text in _say_what_compiles(recipe))


def _say_what_compiles(recipe: Recipe) -> Iterator[str]:
    if not compiles(recipe):
        yield f"never (memory.compile=auto): {explain_not_compiled(recipe)}"
        return
    ends = "; graphs end at tp's regions (parallel.overlap=always)" if overlaps_matmuls(recipe) else ""
    yield f"each layer's forward, at its first call{ends}"
    if recipe.model.experts == "eager" or (recipe.model.experts, recipe.precision.compute) == ("auto", "fp64"):
        yield "but for experts, which are multiplied in a loop: how many tokens each has is known from the data only"


def describe_sources(recipe: Recipe, origins: Mapping[str, str]) -> str:
    """One line per key: its value, and the file and line or the override that set it."""
    values = flatten(plain(asdict(recipe)))
    rows = [(f"{key} = {show(value)}", origins.get(key, "default")) for key, value in values.items()]
    column = min(max(len(text) for text, _ in rows), 72)
    return "\n".join(f"{text:{column}}   {origin}" for text, origin in rows)


def describe_keys(word: str = "") -> str:
    """Keys whose path, meaning or legal values contain `word`: default, legal values, meaning."""
    found = [key for key in list_keys() if word.lower() in f"{key.path} {key.doc} {key.legal}".lower()]
    if not found:
        return f"no key has {word!r} in its name, meaning or values"
    rows = [("must be given" if key.default is MISSING else show(plain(key.default)), key) for key in found]
    return "\n".join(f"{key.path} = {default}\n    {key.doc}\n    {key.legal}" for default, key in rows)


def describe_groups(folders: Sequence[Path]) -> str:
    """The groups of recipes and the recipes in them, one group a line, in the schema's order."""
    found = {folder.name for root in folders for folder in root.iterdir() if folder.is_dir()}
    known = [group for group in list_groups() if any((root / group).is_dir() for root in folders)]
    groups = {group: list_options(group, folders) for group in [*known, *sorted(found - set(known))]}
    return "\n".join(f"  {group:15} {' '.join(options)}" for group, options in groups.items() if options)


def describe_experiments(folders: Sequence[Path]) -> str:
    """The experiments, one a line, each with the first sentence of the comment at its top."""
    rows = {}
    for name in list_options("experiment", folders):
        file = find_file(f"experiment/{name}", folders)
        lines = file.read_text().splitlines() if file else []
        comment = [line.lstrip("# ") for line in itertools.takewhile(lambda line: line.startswith("#"), lines)]
        text = " ".join(line for line in comment if not line.startswith("@package"))
        first = re.split(r"\. |: meshwright", text)[0].rstrip(".")
        rows[name] = textwrap.shorten(first, find_width() - 25, placeholder=" ...")
    return "\n".join(f"  {name:21} {text}" for name, text in rows.items())


def describe_group_keys() -> str:
    """The names of all keys, one group a line."""
    rows: dict[str, list[str]] = {}
    for key in list_keys():
        group, _, name = key.path.rpartition(".")
        rows.setdefault(group, []).append(name)
    return "\n".join(f"  {group:17} {' '.join(names)}" for group, names in rows.items())
