"""The wheel has all that the program needs: it works away from any clone of the repository."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


# One day has both: they share the wheel.
pytestmark = pytest.mark.grid(part=3)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the wheel's content, as an installation has it."""
    place = tmp_path_factory.mktemp("wheel")
    for name in ("framework", "recipes", "slurm"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, place / "source" / name, symlinks=True, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, place / "source" / name)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(place)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=place / "source", check=True, capture_output=True)
    (wheel,) = place.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(place / "installed")
    return place / "installed"


def test_recipes_templates_and_the_licence_are_in_it(installed):
    for folder, pattern in (("recipes", "*.yaml"), ("slurm", "*.sh")):
        shipped = {str(path.relative_to(REPOSITORY / folder)) for path in (REPOSITORY / folder).rglob(pattern)}
        there = installed / "framework" / "shipped" / folder
        assert {str(path.relative_to(there)) for path in there.rglob(pattern)} == shipped
    (licence,) = installed.glob("*.dist-info/licenses/LICENSE")
    assert "Apache License" in licence.read_text()


def test_it_composes_and_renders_from_an_empty_folder(installed, tmp_path):
    words = ["submit", "experiment=pretrain_gpt2", "launch=slurm", "launch.nodes=2", "--dry-run"]
    done = subprocess.run(
        [sys.executable, "-m", "framework", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --nodes=2" in done.stdout
    assert list(tmp_path.iterdir()) == []
