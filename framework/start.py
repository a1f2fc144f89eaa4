"""Start a module in a process of its own that runs this copy of the package: `python -P framework/start.py MODULE ARGUMENTS`.

`python -m` searches the working folder first: a user's `random.py` there ends the process, and in another clone of Meshwright the
clone's code runs. `-P` leaves that folder out. Python then finds the installed copy, which need not be the one that starts the
process: this file, which is run by its path, has the package imported from where it lies itself.
"""

import os
import runpy
import sys
from importlib.machinery import PathFinder

_PACKAGE = os.path.dirname(os.path.realpath(__file__))
_HOME, _NAME = os.path.split(_PACKAGE)


def python_words(module: str, *arguments: str) -> tuple[str, ...]:
    """The arguments with which Python runs a module, one of this copy or of a library."""
    return ("-P", os.path.join(_PACKAGE, "start.py"), module, *arguments)


def guard_imports() -> None:
    """Have this process, and those that it or a library starts, import nothing from the working folder, and this copy of the
    package. PYTHONPATH may name that folder; an empty word in it, from a colon too many, does not.

    `python -m framework` has the folder in front of its search path, and in a clone finds the package there.
    """
    words = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths, here = [path for path in words if path], os.getcwd()
    front = slice(
        1 + len(words)
    )  # the folders of Python and its libraries come later, and one of them may be the working folder
    if here not in map(os.path.abspath, paths):
        sys.path[front] = [path for path in sys.path[front] if path not in ("", here)]
    if prefer_this_copy():
        paths.insert(0, _HOME)
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def prefer_this_copy() -> bool:
    """Have imports of the package find this copy, here and in processes of `multiprocessing`, which get this search path. Returns
    whether the path had to be changed: the folder then comes as late as it may, so that nothing else in it hides a library."""
    specs = (finder.find_spec(_NAME, None) for finder in sys.meta_path)
    found = next((spec.origin for spec in specs if spec is not None), None)
    if found is not None and os.path.dirname(os.path.realpath(found)) == _PACKAGE:
        return False
    others = (number for number, folder in enumerate(sys.path) if PathFinder.find_spec(_NAME, [folder]) is not None)
    sys.path.insert(next(others, len(sys.path)), _HOME)
    return True


if __name__ == "__main__":
    prefer_this_copy()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
