"""The Python API: every script of examples/api runs, and importing the package imports nothing."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import framework
from tests import tiny_run
from tests.grid import few_of

SCRIPTS = Path(__file__).parents[2] / "examples" / "api"
SAID = {
    "compose_recipe": ["optim.name = adamv (command line): must be one of", "did you mean adamw?", "tokens a step"],
    "plan_layout": ["rank 0:", "rank 7:", "MiB"],
    "train_steps": ["step 5: loss"],
    "own_loop": ["after step 5: 40 sequences", "llama, 500k parameters, 5 steps of 1.02k tokens", "step 5/5 | loss"],
    "read_checkpoint": ["step 2: weight/model.embed_tokens.weight [1024, 128]"],
}


@pytest.mark.parametrize("name", few_of(SAID, lambda name: name != "read_checkpoint"))
def test_a_script_of_the_api_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_run.write_corpus(tmp_path / "texts")
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    out = "".join(capfd.readouterr())
    assert [each for each in SAID[name] if each not in out] == [], out


def test_each_script_is_run() -> None:
    assert {file.stem for file in SCRIPTS.glob("*.py")} == SAID.keys()


def test_importing_the_package_imports_nothing_of_it() -> None:
    code = "import sys, framework; print([each for each in sys.modules if each.startswith(('framework.', 'torch'))])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_every_name_is_there_and_others_are_explained() -> None:
    assert all(callable(getattr(framework, name)) for name in framework.API)
    with pytest.raises(AttributeError, match="there are compose, "):
        framework.no_such_name  # noqa: B018
