"""Fingerprint: what must be equal on all ranks, as strings by name, and how a rank that differs is explained.

Ranks with another recipe, code or torch would train something else than the others, or hang in a collective that these never
start. `connect` compares fingerprints before any group is made; `launch/process.py` takes them.
"""

from collections.abc import Mapping, Sequence

# What to do about a difference, by its name.
FIXES = {
    "recipe": "recipe.yaml of the run was changed or is not yet seen while ranks start (a file system's cache): start again",
    "code": "ranks import different copies of Meshwright: one installation, or one image, on all nodes",
}
FIX = "nodes have different software: one environment, or one image, on all of them"


def describe_difference(mine: Mapping[str, str], first: Mapping[str, str]) -> str:
    """The differences of `mine` from `first`, rank 0's, as one line; empty if there are none."""
    names = [*first, *(name for name in mine if name not in first)]
    differs = [name for name in names if mine.get(name) != first.get(name)]
    return ", ".join(f"{name} {mine.get(name, 'none')} (rank 0: {first.get(name, 'none')})" for name in differs)


def explain_differences(shown: Sequence[str], count: int, world: int) -> str:
    """The error of a world in which ranks differ: how many do, some of them in detail, and what to do about it.

    shown: descriptions of some of the `count` ranks that differ, each `rank 3 on n1: torch 2.12.0 (rank 0: 2.13.0), ...`.
    """
    words = {part.split()[0] for line in shown for part in line.partition(": ")[2].split(", ")}
    more = [f"  and {count - len(shown)} more"] if count > len(shown) else []
    fixes = dict.fromkeys(FIXES.get(word, FIX) for word in sorted(words))
    lines = [f"{count} of {world} ranks differ from rank 0", *(f"  {line}" for line in shown), *more]
    return "\n".join([*lines, *(f"-> {fix}" for fix in fixes)])
