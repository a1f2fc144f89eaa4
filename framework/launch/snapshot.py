"""The code of a run: a copy of the package that every start and requeue imports, and the commit that it came from.

A job may wait for days and start many times; what is edited or updated meanwhile is not part of the run.
"""

import platform
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import framework


def copy_code(to: Path) -> None:
    """Put the package into the folder `to`, which is not there yet."""
    package = Path(framework.__file__ or "").parent
    shutil.copytree(package, to / package.name, ignore=shutil.ignore_patterns("__pycache__"))


def describe_software() -> dict[str, Any]:
    """What a launch is of: `describe_commit`, and the versions of Python and of the libraries that compute."""
    libraries = {name: version(name) for name in ("torch", "transformers")}
    return describe_commit() | {"versions": {"python": platform.python_version(), **libraries}}


def describe_commit() -> dict[str, Any]:
    """{commit, edited}: the commit of the package's repository, and whether files differ from it. Empty outside of git."""
    folder = Path(framework.__file__ or "").parent
    commit, edits = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--", ".")
    return {} if commit is None else {"commit": commit, "edited": bool(edits)}


def _git(folder: Path, *words: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *words], check=False, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None
