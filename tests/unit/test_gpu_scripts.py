"""The runs that are prepared for GPUs go through on a CPU in tiny sizes, so that they follow the code."""

import json
import os
import re
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


def test_table_and_card_go_between_the_marks_of_pages(tmp_path: Path) -> None:
    rows, pages = tmp_path / "rows.jsonl", (PAGE, REPOSITORY / "README.md")
    card = {"part": "machine", "name": "card", "value": "H100", "unit": "", "note": "2026-12-01, torch 2.11"}
    speed = {"part": "steps", "name": "alone: MFU", "value": 51.26, "unit": "%", "note": "a|b"}
    rows.write_text(json.dumps(card) + "\n" + json.dumps(speed) + "\n")
    copies = [tmp_path / page.name for page in pages]
    for page, copy in zip(pages, copies, strict=True):
        copy.write_text(page.read_text())
    for _ in range(2):
        subprocess.run([sys.executable, str(SCRIPTS / "rows.py"), str(rows), "--write", *map(str, copies)], check=True)
    new = {
        page.name: [line for line in copy.read_text().splitlines() if line not in page.read_text().splitlines()]
        for page, copy in zip(pages, copies, strict=True)
    }
    assert new["gpu.md"][1:] == [
        "| part | what | measured | |",
        "|---|---|---:|---|",
        "| machine | card | H100 | 2026-12-01, torch 2.11 |",
        "| steps | alone: MFU | 51.26 % | a/b |",
    ]
    assert all("**Run on one H100, 2026-12-01**" in each[0] for each in new.values())


def test_it_is_said_once_whether_a_gpu_has_run_it() -> None:
    said = re.compile(r"not (been |yet )?run on a GPU|no GPU has run", re.I)
    files = [*(REPOSITORY / "docs").glob("*.md"), *(REPOSITORY / "framework").rglob("*.py")]
    assert [str(each) for each in files if said.search(each.read_text()) and each != PAGE] == []


@pytest.mark.parametrize("name", ["one_gpu.sh", "eight_gpus.sh", "two_nodes.sh"])
def test_shell_scripts_are_well_formed(name: str) -> None:
    subprocess.run(["bash", "-n", str(SCRIPTS / name)], check=True)
