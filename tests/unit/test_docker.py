"""The images' files pass their linters, and the script that they call installs the program as the README says."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.parametrize("file", sorted((REPOSITORY / "docker").glob("*.Dockerfile")), ids=lambda file: file.name)
def test_a_dockerfile_has_no_finding(file):
    result = subprocess.run([BIN / "hadolint", file], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    text = file.read_text()
    assert "docker/install.sh" in text
    assert ":latest" not in text


@pytest.mark.parametrize("file", ["docker/install.sh", "scripts/local_cluster.sh", "scripts/install_browser.sh"])
def test_a_shell_script_has_no_finding(file):
    result = subprocess.run([BIN / "shellcheck", REPOSITORY / file], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_the_install_script_is_the_readmes_line():
    script = (REPOSITORY / "docker" / "install.sh").read_text()
    assert script.splitlines()[-1] == "make install"
    assert "make install" in (REPOSITORY / "README.md").read_text()


@pytest.mark.grid
def test_the_install_script_installs_the_program(tmp_path):
    """With --no-deps, and the packages of this environment: what is tested is ours, not PyPI."""
    clone = tmp_path / "clone"
    packages = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "tokens", "__pycache__", "*.egg-info", ".*_cache")
    shutil.copytree(REPOSITORY, clone, ignore=ignored)
    environment = {**os.environ, "PIP_NO_DEPS": "1", "PYTHON": sys.executable}
    environment.pop("PYTHONPATH", None)
    # The packages stand in the clone's environment as if pip had put them there: `make install` imports what it compiles.
    venv.create(clone / ".venv", with_pip=True)
    (next((clone / ".venv").glob("lib/python*/site-packages")) / "packages.pth").write_text(f"{packages}\n")
    subprocess.run([clone / "docker" / "install.sh"], env=environment, check=True, capture_output=True, timeout=300)
    assert (clone / ".venv" / "compiled").is_file()
    command = [
        clone / ".venv" / "bin" / "meshwright",
        "check",
        "launch=slurm",
        "launch.nodes=1",
        "batch.sequences_per_step=64",
    ]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert "8 ranks" in result.stdout
