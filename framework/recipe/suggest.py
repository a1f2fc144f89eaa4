"""From a wrong name to the right one: our own key misspelt or misplaced, or another system's name for it."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from framework.recipe.foreign import explain_name
from framework.recipe.keys import NAME, list_groups, list_keys

FEW_KEYS = 8  # of a group, which a message can name
_ALIKE = 0.72  # ratio below which a suggestion is more likely noise than help


@dataclass(frozen=True)
class Explanation:
    fix: str
    final: bool  # it explains everything below the name as well


def nearest(name: str, names: Iterable[str], count: int = 1) -> list[str]:
    """The most similar of `names`, best first; none where nothing is similar."""
    return difflib.get_close_matches(name, list(names), n=count, cutoff=0.6)


def explain_unknown(path: str, value: Any = None) -> Explanation:
    """Advice on the unknown key `path` (dotted), and on its value where another system's has another name here."""
    structural = _explain_place(path)
    if structural:
        return Explanation(structural, final=True)
    if found := explain_name(path, value):
        return Explanation(found, final=False)
    ways = (_explain_group, _explain_sibling, _explain_similar)
    return Explanation(next(filter(None, (way(path) for way in ways))), final=False)


def _explain_place(path: str) -> str:
    """A known key in the wrong place of a file."""
    parts = path.split(".")
    if parts[0] == "experiment":
        return "an experiment's file begins with the line `# @package _global_`"
    known = {key.path for key in list_keys()}
    if path in known:
        return f"a file nests its keys, without dots: `{parts[0]}: {{{'.'.join(parts[1:])}: ...}}`"
    for i in range(1, len(parts)):
        without = ".".join(parts[: i - 1] + parts[i:])
        if parts[i] == parts[i - 1] and any(key == without or key.startswith(without + ".") for key in known):
            return (
                f"leave out `{parts[i]}:`; a file in the folder {'/'.join(parts[:i])} is placed below that key already"
            )
    return ""


def _explain_group(path: str) -> str:
    """A misspelt group of recipes, as in modle=gpt2 or optim/shedule=wsd."""
    if "." in path:
        return ""
    match = nearest(path, [*list_groups(), "experiment"])
    return f"did you mean {match[0]}?" if match else ""


def _explain_sibling(path: str) -> str:
    """A misspelt key of the group in which it was written, or one of our keys that belongs into another group."""
    group, _, name = path.rpartition(".")
    siblings = [key.rpartition(".")[2] for key in _paths() if _generic(key.rpartition(".")[0], group)]
    if match := nearest(name, siblings):
        return f"did you mean {group}.{match[0]}?" if group else f"did you mean {match[0]}?"
    elsewhere = [key for key in _paths() if key.rpartition(".")[2] == name]
    return f"did you mean {elsewhere[0]}?" if len(elsewhere) == 1 else ""


def _explain_similar(path: str) -> str:
    """The key whose whole path, or whose last part, looks most alike."""

    def likeness(key: str) -> tuple[float, float]:
        ours, theirs = key.rpartition(".")[2], path.rpartition(".")[2]
        whole = difflib.SequenceMatcher(None, path, key).ratio()
        last = difflib.SequenceMatcher(None, theirs, ours).ratio()
        contains = len(theirs) > 3 and theirs in ours  # warmup, in warmup_steps
        return max(whole, 0.9 * last, 0.85 * contains), whole

    best = max(_paths(), key=likeness)
    return f"did you mean {best}?" if likeness(best)[0] >= _ALIKE else _explain_list(path)


def _explain_list(path: str) -> str:
    """Where to look: the keys beside it if they are few, else the command that lists them."""
    group = path.rpartition(".")[0]
    siblings = [key.rpartition(".")[2] for key in _paths() if _generic(key.rpartition(".")[0], group)]
    if group and 0 < len(siblings) <= FEW_KEYS:
        return f"the keys of {group} are {', '.join(siblings)}"
    word = f" {group}." if siblings and group else ""
    return f"`meshwright check --keys{word}` lists all keys{f' of {group}' if word else ''}"


def _paths() -> list[str]:
    return [key.path for key in list_keys()]


def _generic(pattern: str, group: str) -> bool:
    """Whether a schema group such as data.sources.NAME is the group data.sources.web."""
    names, parts = pattern.split("."), group.split(".")
    return len(names) == len(parts) and all(name in (part, NAME) for name, part in zip(names, parts, strict=True))
