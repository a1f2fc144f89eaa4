"""Rules of `run.root`, a folder, and `checkpoint.root`, a folder or a URL, by their text alone: whether a store answers is asked
before a run begins."""

import re
from collections.abc import Iterator

from framework.recipe.problem import Problem
from framework.recipe.schema import Recipe
from framework.recipe.suggest import nearest

CHECKPOINT_ROOT = "checkpoint.root"


def find_run_root_problems(recipe: Recipe) -> Iterator[Problem]:
    root = recipe.run.root
    if not root.strip():
        yield Problem("run.root", root, "names no folder", "run.root=runs")
    elif "::" in root or re.match(r"[a-z][a-z0-9]*:/", root):
        message = "is no folder: a run keeps its lock, lease and logs on a file system"
        fix = f"run.root=runs checkpoint.root={root}, which keeps the checkpoints there"
        yield Problem("run.root", root, message, "a path without file://" if root.startswith("file:") else fix)


def find_checkpoint_root_problems(recipe: Recipe) -> Iterator[Problem]:
    root = recipe.checkpoint.root
    if root is None:
        return
    if not root.strip():
        yield Problem(CHECKPOINT_ROOT, root, "names no place", "checkpoint.root=null for RUN/checkpoints")
        return
    yield from _find_place_problems(CHECKPOINT_ROOT, root)


def _find_place_problems(key: str, root: str) -> Iterator[Problem]:
    """What is wrong with the text of a place."""
    protocol, is_url, rest = root.partition("://")
    if not root.strip():
        yield Problem(key, root, "names no place", f"{key}=runs; or {key}=s3://bucket/runs")
    elif "::" in root:
        message = "chains protocols: a cache between the run and its store would show a former state"
        yield Problem(key, root, message, f"{key}=s3://bucket/runs, the store itself")
    elif protocol == "memory" and is_url:
        message = "is the memory of one process, and goes with it"
        yield Problem(key, root, message, f"{key}=s3://bucket/runs; or /dev/shm/runs")
    elif (slip := re.match(r"([a-z][a-z0-9]+):/(?!/)", root)) is not None:
        message = "would be a folder of that name here"
        yield Problem(key, root, message, f"{key}={slip[1]}://{root[slip.end() :]}")
    elif is_url and not rest.strip("/"):
        yield Problem(key, root, "names no bucket or folder", f"{key}={protocol}://bucket/runs")
    elif is_url:
        from fsspec import available_protocols, registry  # for those who name one

        if protocol not in (known := [*available_protocols(), *registry]):
            near = nearest(protocol, known) or ["s3", "gs", "abfs"]
            message = f"fsspec knows no protocol {protocol}"
            yield Problem(key, root, message, ", ".join(f"{each}://..." for each in near))
