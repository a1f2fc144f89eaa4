"""A working folder whose files bear the names of modules: each says that it was imported, and fails."""

from pathlib import Path

NAMES = (
    "random",
    "tokenize",
    "runpy",
    "json",
    "torch",
    "numpy",
    "wandb",
    "yaml",
    "socket",
    "sitecustomize",
    "framework",
)
MODULE = """from pathlib import Path
Path({folder!r}, "imported-{name}").touch()
raise ImportError("{name} of the working folder")
"""


def write_hostile_modules(folder: Path, but: tuple[str, ...] = ()) -> None:
    """Write modules and packages into the folder. but: names that are left out."""
    for number, name in enumerate(each for each in NAMES if each not in but):
        file = folder / f"{name}.py" if number % 2 else folder / name / "__init__.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(MODULE.format(folder=str(folder), name=name))


def refuse_imported(folder: Path) -> None:
    """Assert that none was imported."""
    assert [path.name for path in folder.glob("imported-*")] == []
