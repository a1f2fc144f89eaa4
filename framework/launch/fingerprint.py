"""The fingerprint of a rank: what must be equal on all ranks of a run, see `comm/meeting.py`."""

import platform
from importlib.metadata import version
from pathlib import Path

import xxhash

import framework
from framework.recipe.schema import Recipe


def take_fingerprint(recipe: Recipe) -> dict[str, str]:
    """This process's fingerprint, by name. Torch is imported already."""
    import torch

    found = {
        "recipe": xxhash.xxh3_64_hexdigest(repr(recipe).encode()),
        "code": hash_code(Path(framework.__file__ or "").parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": recipe.launch.device,
        "compute": recipe.precision.compute,
    }
    if recipe.launch.device == "cuda":
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def hash_code(package: Path) -> str:
    """Of the names and the texts of a package's Python files."""
    digest = xxhash.xxh3_64()
    for file in sorted(package.rglob("*.py")):
        digest.update(file.relative_to(package).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()
