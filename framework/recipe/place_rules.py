"""Rules of the two keys that name a folder or a URL: `run.root` and `checkpoint.root`. They tell what the text alone does;
whether a store answers is asked before a run begins."""

import re
from collections.abc import Iterator

from framework.recipe.problem import Problem
from framework.recipe.schema import Recipe
from framework.recipe.suggest import nearest

RUN_ROOT, CHECKPOINT_ROOT = "run.root", "checkpoint.root"


def find_run_root_problems(recipe: Recipe) -> Iterator[Problem]:
    yield from find_place_problems(RUN_ROOT, recipe.run.root)


def find_checkpoint_root_problems(recipe: Recipe) -> Iterator[Problem]:
    root = recipe.checkpoint.root
    if root is None:
        return
    if not root.strip():
        yield Problem(CHECKPOINT_ROOT, root, "names no place", "checkpoint.root=null for RUN/checkpoints")
        return
    yield from find_place_problems(CHECKPOINT_ROOT, root)
    if _is_url(recipe.run.root) and not _is_url(root):
        message = (
            f"is a folder of this machine, which a start elsewhere lacks, while run.root={recipe.run.root} is a URL"
        )
        yield Problem(CHECKPOINT_ROOT, root, message, "leave it out: checkpoints then lie in the run's store; or a URL")


def find_place_problems(key: str, root: str) -> Iterator[Problem]:
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


def _is_url(root: str) -> bool:
    return "://" in root and not root.startswith("file://")
