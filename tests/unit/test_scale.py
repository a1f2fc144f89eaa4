"""What thousands of ranks would do at a start, a resume and a save grows no faster than n log n in the whole world."""

import math
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.scale import fit

REPOSITORY = Path(__file__).parents[2]
WORLDS = (8, 16, 32, 64)


@pytest.mark.parametrize(
    ("form", "count"),
    [
        ("1", lambda n: 7),
        ("1/n", lambda n: 100 + 6400 / n),
        ("log n", lambda n: 4 + 2 * math.log2(n)),
        ("n", lambda n: 500 + 2 * n),
        ("1/n + n", lambda n: 64_000 / n + 40 * n),
        ("n^2", lambda n: 3 * n * n),
    ],
)
def test_the_form_of_a_growth_is_found_and_goes_on(form: str, count) -> None:
    found, at = fit(WORLDS, [count(world) for world in WORLDS], 8192, slack=0.05)
    assert found == form
    assert at == pytest.approx(count(8192), rel=1e-6)


@pytest.mark.grid
def test_no_count_of_every_rank_grows_with_the_world() -> None:
    command = [sys.executable, "scripts/scale.py", "--ranks", "8", "16", "32"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=600)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
