"""Files of images and hosts pass their linters and agree with the docs; the script that images call installs the program."""

import json
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

from framework import errors
from framework.recipe.compose import compose

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.mark.parametrize("file", sorted((REPOSITORY / "docker").glob("*.Dockerfile")), ids=lambda file: file.name)
def test_a_dockerfile_has_no_finding(file):
    result = subprocess.run([BIN / "hadolint", file], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout
    text = file.read_text()
    assert "docker/install.sh" in text
    stages = re.findall(r"(?m)^FROM (\S+)( AS \w+)?$", text)
    assert len(stages) > 1, "compilers and sources stay in a stage of their own"
    names = {name.removeprefix(" AS ") for _, name in stages if name}
    assert all("@sha256:" in base or base in names for base, _ in stages)
    assert re.findall(r"(?m)^USER (\S+)$", text) == ["1000"]


def test_a_job_of_kubernetes_reads_exit_codes_as_the_documentation_says():
    job = yaml.safe_load((REPOSITORY / "docker" / "kubernetes.yaml").read_text())["spec"]
    by_action: dict[str, list[int]] = {}
    for rule in job["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            by_action.setdefault(rule["action"], []).extend(rule["onExitCodes"]["values"])
    assert by_action == {
        "FailJob": [errors.EXIT_USER, errors.EXIT_NUMERICS, errors.EXIT_MEMORY, errors.EXIT_INTERRUPTED],
        "Ignore": [errors.EXIT_RESUME, errors.EXIT_NODE],
    }
    container = job["template"]["spec"]["containers"][0]
    recipe = compose(container["args"]).require()
    assert recipe.launch.ranks == container["resources"]["limits"]["nvidia.com/gpu"]
    assert recipe.run.id is not None, "a second pod finds the run by its id"
    table = (REPOSITORY / "docs" / "hosts.md").read_text()
    for code in sum(by_action.values(), [errors.EXIT_DONE]):
        assert f"\n| {code} | " in table


def test_the_devcontainer_builds_a_stage_that_is_there():
    file = REPOSITORY / ".devcontainer" / "devcontainer.json"
    build = json.loads(file.read_text())["build"]
    dockerfile = (file.parent / build["dockerfile"]).resolve()
    assert f" AS {build['target']}\n" in dockerfile.read_text()


@pytest.mark.parametrize("file", ["docker/install.sh", "scripts/local_cluster.sh", "scripts/install_browser.sh"])
def test_a_shell_script_has_no_finding(file):
    result = subprocess.run([BIN / "shellcheck", REPOSITORY / file], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_the_install_script_is_the_readmes_line():
    script = (REPOSITORY / "docker" / "install.sh").read_text()
    assert "\nmake install\n" in script
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
