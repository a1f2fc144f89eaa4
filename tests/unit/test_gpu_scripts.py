"""The runs that are prepared for GPUs go through on a CPU in tiny sizes, so that they follow the code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = REPOSITORY / "scripts" / "gpu"
PAGE = REPOSITORY / "docs" / "gpu.md"
# A row of each program: the last that it measures.
LAST = {"nccl": "end", "kernels": "AdamW, 4 bytes off a boundary", "steps": "0 of 8, zero 3, full: planned peak"}


@pytest.mark.grid
def test_the_run_on_one_gpu_measures_all_of_its_rows(tmp_path: Path) -> None:
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    ended = subprocess.run(
        ["bash", str(SCRIPTS / "one_gpu.sh"), "--tiny"],
        check=False,
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    failed = [row for row in rows if row["value"] is None]
    assert not failed, ended.stdout + ended.stderr
    assert set(LAST.items()) <= {(row["part"], row["name"]) for row in rows}
    table = (tmp_path / "table.md").read_text().splitlines()
    assert len(table) == 2 + len(rows)


def test_the_table_goes_between_the_marks_of_the_page(tmp_path: Path) -> None:
    rows, page = tmp_path / "rows.jsonl", tmp_path / "gpu.md"
    rows.write_text(
        json.dumps({"part": "steps", "name": "alone: MFU", "value": 51.26, "unit": "%", "note": "a|b"}) + "\n"
    )
    page.write_text(PAGE.read_text())
    command = [sys.executable, str(SCRIPTS / "rows.py"), str(rows), "--write", str(page)]
    for _ in range(2):
        subprocess.run(command, check=True)
    before, after = PAGE.read_text().splitlines(), page.read_text().splitlines()
    assert [line for line in after if line not in before] == [
        "| part | what | measured | |",
        "|---|---|---:|---|",
        "| steps | alone: MFU | 51.26 % | a/b |",
    ]


@pytest.mark.parametrize("name", ["one_gpu.sh", "eight_gpus.sh", "two_nodes.sh"])
def test_shell_scripts_are_well_formed(name: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)
