"""Plugins: packages of the user's that put names into Meshwright's registries by the decorators of `framework/extend.py`.

`plugins: [my_package]` names installed packages. A folder or a file of Python comes from the command line alone
(`--plugins PATH`), so that a recipe that somebody else has written never says where code lies. Nothing else is imported: no
entry points are searched, no folder is.

The launcher imports them before the recipe is checked, each rank before it plans, and commands that need the model. Commands that
only read a run's recipe import nothing, and take names that they do not know as what the launcher has checked.
"""

import ast
import hashlib
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any

from framework.errors import RecipeError

# Kinds of names, as fields of the schema refer to them (`key(..., registry=KIND)`).
KINDS = (
    *("optimizer", "loss", "reader", "tokenizer", "chat template", "schedule", "tracker", "model", "context method"),
    *("pipeline schedule", "evaluation task"),
)
# Names that plugins have added, by kind, each with its plugin. They grow while plugins are imported, and never after.
ADDED: Mapping[str, dict[str, str]] = MappingProxyType({kind: {} for kind in KINDS})
# The plugin that is being imported; empty for the code of a script.
IMPORTING: ContextVar[str] = ContextVar("IMPORTING", default="")


def add(kind: str, registry: dict[str, Any], name: str, value: Any) -> None:
    """Put a name into a registry. Raises RecipeError where it is taken, unless the same plugin has added it before."""
    owner, owners = IMPORTING.get(), ADDED[kind]
    if name in registry and owners.get(name) != owner:
        whose = f"the plugin {owners[name]}" if owners.get(name) else "Meshwright"
        raise RecipeError(f"the {kind} {name} is {whose}'s already: give yours another name")
    registry[name], owners[name] = value, owner


def added_names(kind: str) -> tuple[str, ...]:
    """The names of a kind that plugins have added."""
    return tuple(ADDED.get(kind, ()))


def is_path(plugin: str) -> bool:
    """Whether a plugin is given by its place, not by the name of a package."""
    return plugin.endswith(".py") or not all(part.isidentifier() for part in plugin.split("."))


def modules_of(plugin: str) -> list[str]:
    """Names of the modules that are imported for a plugin: a package; of a folder that is none, each of its files."""
    path = Path(plugin)
    if not is_path(plugin):
        return [plugin]
    return [path.stem] if folder_of(path) != path else [file.stem for file in sorted(path.glob("*.py"))]


def folder_of(path: Path) -> Path:
    """The folder in which modules of a plugin are searched: its own where it is no package, else the one around it."""
    return path if path.is_dir() and not (path / "__init__.py").is_file() else path.parent


def import_plugins(plugins: Sequence[str]) -> None:
    """Import plugins that are not imported yet. Raises RecipeError that names the one that fails."""
    for plugin in plugins:
        with _naming(plugin):
            folder = folder_of(Path(plugin))
            if is_path(plugin) and not Path(plugin).exists():
                raise RecipeError("there is no such folder or file")
            # Last: nothing in the folder hides a library. Processes of `multiprocessing` get this search path.
            if is_path(plugin) and str(folder) not in sys.path:
                sys.path.append(str(folder))
            for name in modules_of(plugin):
                found = importlib.import_module(name).__file__ or ""
                if is_path(plugin) and folder not in Path(found).parents:
                    raise RecipeError(f"another module is called {name} already, of {found}: give yours another name")


@contextmanager
def _naming(plugin: str) -> Iterator[None]:
    token = IMPORTING.set(plugin)
    try:
        yield
    except Exception as error:  # a plugin may raise anything
        why = str(error) if isinstance(error, RecipeError) else f"{type(error).__name__}: {error}"
        raise RecipeError(f"the plugin {plugin} cannot be imported: {why}") from error
    finally:
        IMPORTING.reset(token)


def are_imported(plugins: Sequence[str]) -> bool:
    """Whether all plugins are imported here, so that a name which is in no registry is none."""
    return all(name in sys.modules for plugin in plugins for name in modules_of(plugin))


def describe_plugins(plugins: Sequence[str]) -> dict[str, str]:
    """The version of each plugin, where it is an installed package, and a hash of its Python files."""
    return {plugin: " ".join(filter(None, (_version(plugin), hash_plugin(plugin)))) for plugin in plugins}


def find_changed(plugins: Sequence[str], record: Mapping[str, Any]) -> Iterator[str]:
    """Warnings of plugins whose code is not that of a run's last launch. record: of run.json."""
    former = (record.get("launches") or [{}])[-1].get("plugins", {})
    for plugin, code in describe_plugins(plugins).items():
        if former.get(plugin, code) != code:
            yield f"WARNING: the plugin {plugin} has changed: {former[plugin]} at the run's last launch, {code} from now on"


def _version(plugin: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # of recipes with plugins alone

    try:
        return version(plugin.partition(".")[0])
    except (PackageNotFoundError, ValueError):
        return ""


def hash_plugin(plugin: str) -> str:
    """A hash of a plugin's Python files, and of those beside a file that it imports; empty for one that is not imported."""
    places = [getattr(sys.modules.get(name), "__file__", None) for name in modules_of(plugin)]
    waiting, files = [Path(place) for place in places if place and None not in places], dict[Path, bytes]()
    while waiting:
        path = waiting.pop()
        if path.name == "__init__.py":
            files |= {each: each.read_bytes() for each in path.parent.rglob("*.py")}
        elif path not in files:
            files[path] = path.read_bytes()
            waiting += _find_beside(path.parent, files[path]) if is_path(plugin) else ()
    digest = hashlib.blake2b(b"".join(files[path] for path in sorted(files)), digest_size=8)
    return digest.hexdigest() if files else ""


def _find_beside(folder: Path, text: bytes) -> Iterator[Path]:
    """Files of modules in a folder that a text of Python imports, wherever in it."""
    for node in ast.walk(ast.parse(text)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for first in (name.partition(".")[0] for name in names if name):
            yield from filter(Path.is_file, (folder / f"{first}.py", folder / first / "__init__.py"))


def hash_owner(kind: str, name: str) -> str:
    """The hash of the plugin that has added a name; empty for a name of Meshwright's own."""
    owner = ADDED[kind].get(name, "")
    return hash_plugin(owner) if owner else ""
