"""Processes of ours import this copy of the package, and nothing from the folder in which they start."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from framework import start
from tests.hostile_folder import refuse_imported, write_hostile_modules

# A process of `multiprocessing` imports the module of what it runs.
SPAWNS = """import multiprocessing, sys
from importlib.util import find_spec
from framework import cli
if __name__ == "__main__":
    sys.argv[1:] = ["--version"]
    cli.main()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(find_spec, ["yaml"]).origin)
"""


@pytest.fixture
def hostile(tmp_path):
    folder = tmp_path / "hostile"
    folder.mkdir()
    write_hostile_modules(folder)
    return folder


def run(folder, *words, **variables):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")} | variables
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=60
    )


def copy_package(to: Path, **modules: str) -> None:
    """A small copy of the package, with modules of its own, in a folder whose other files are hostile."""
    package = to / "framework"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name in ("start.py", "__main__.py"):
        shutil.copy(Path(start.__file__).with_name(name), package)
    for name, text in modules.items():
        (package / f"{name}.py").write_text(text)
    write_hostile_modules(to, but=("framework",))


def test_a_module_starts_in_a_hostile_folder(hostile):
    done = run(hostile, *start.python_words("framework", "--version"))
    assert (done.returncode, done.stderr) == (0, "")
    refuse_imported(hostile)


def test_a_process_runs_the_copy_that_starts_it_and_nothing_else_of_its_folder(tmp_path):
    clone = tmp_path / "clone"
    copy_package(clone, told="import framework, random, sys; print(framework.__file__, *sys.argv[1:])")
    done = run(clone, "-P", str(clone / "framework" / "start.py"), "framework.told", "a", "b")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == [str(clone / "framework" / "__init__.py"), "a", "b"]
    refuse_imported(clone)


def test_a_clone_is_run_by_its_name_and_nothing_else_of_its_folder(tmp_path):
    """The first imports are Python's own, and come before ours."""
    clone = tmp_path / "clone"
    copy_package(clone, cli="import tokenize, random, numpy\ndef main(): print(__file__)")
    done = run(clone, "-m", "framework")
    assert (done.returncode, done.stdout) == (0, f"{clone / 'framework' / 'cli.py'}\n")
    refuse_imported(clone)


@pytest.mark.parametrize("path", ["", ":/nowhere"])
def test_what_libraries_start_does_not_look_into_the_folder(hostile, tmp_path, path):
    program = tmp_path / "program.py"
    program.write_text(SPAWNS)
    if path:  # by which Python itself looks there, in the first process
        for file in hostile.iterdir():
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        write_hostile_modules(
            hostile, but=("random", "tokenize", "runpy", "json", "socket", "sitecustomize", "framework")
        )
    done = run(hostile, str(program), PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(hostile) not in done.stdout.splitlines()[1]
    refuse_imported(hostile)


def test_a_path_of_the_users_is_kept(hostile, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "told.py").write_text("print('mine')")
    assert run(hostile, *start.python_words("told"), PYTHONPATH=str(tmp_path / "mine")).stdout == "mine\n"
