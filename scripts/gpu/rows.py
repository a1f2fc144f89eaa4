"""Rows of measurements: one JSON line each in $OUT/rows.jsonl, and on the screen; and the table of them in docs/gpu.md.

python scripts/gpu/rows.py --machine                     the first row: card, date, versions
python scripts/gpu/rows.py ROWS.jsonl                    the table, in Markdown
python scripts/gpu/rows.py ROWS.jsonl --write docs/gpu.md README.md
"""

import argparse
import json
import os
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

# Between these marks a page has the table, and the sentence on which GPU it was run.
TABLE = "<!-- rows of scripts/gpu: begin -->", "<!-- rows of scripts/gpu: end -->"
STATUS = "<!-- gpu: begin -->", "<!-- gpu: end -->"
CARD = {"part": "machine", "name": "card"}


class Rows:
    """The rows of one part of the run. A measurement that fails is a row, and the others go on."""

    def __init__(self, part: str):
        self._part = part
        self._path = Path(os.environ.get("OUT", "/tmp")) / "rows.jsonl"

    def add(self, name: str, value: Any, unit: str = "", note: str = "") -> None:
        """One row, of the first rank. value: a number, a word, or None for what has failed, of which the note says why."""
        if os.environ.get("RANK", "0") != "0":
            return
        row = {"part": self._part, "name": name, "value": value, "unit": unit, "note": note}
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{self._part:8} {name:58} {_show(value)} {unit}  {note}", flush=True)

    def attempt(self, name: str, work: Callable[[], Any], unit: str = "") -> None:
        """The row of what `work` returns, which is "ok" for None and True, and a failure for False."""
        try:
            found = work()
        except Exception as error:  # of any kind: the next measurement is worth as much
            self.add(name, None, note=f"{type(error).__name__}: {str(error).strip()[:300]}")
            return
        if found is False:
            self.add(name, None, note="differs")
        else:
            self.add(name, "ok" if found in (None, True) else found, unit)


def render(rows: list[dict[str, Any]]) -> str:
    """The table."""
    lines = ["| part | what | measured | |", "|---|---|---:|---|"]
    for row in rows:
        measured = f"{_show(row['value'])} {row['unit']}".strip()
        note = row["note"].replace("|", "/").replace("\n", " ")
        lines.append(f"| {row['part']} | {row['name']} | {measured} | {note} |")
    return "\n".join(lines)


def _show(value: Any) -> str:
    if value is None:
        return "**failed**"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def describe_machine() -> None:
    """Add the row of the card, or of the CPU."""
    import torch
    import transformers

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = f"{date.today()}, torch {torch.__version__}, transformers {transformers.__version__}"
    Rows(CARD["part"]).add(CARD["name"], card, note=versions)


def write(page: Path, rows: list[dict[str, Any]]) -> None:
    """Write the table and the card into a page, each where it has marks for it."""
    text = page.read_text()
    cards = [row for row in rows if CARD.items() <= row.items()]
    status = [f"**Run on one {row['value']}, {row['note'].partition(',')[0]}**" for row in cards]
    for (begin, end), content in ((TABLE, f"\n{render(rows)}\n"), *((STATUS, each) for each in status)):
        if begin in text:
            before, _, rest = text.partition(begin)
            text = f"{before}{begin}{content}{end}{rest.partition(end)[2]}"
    page.write_text(text)


def main() -> None:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path, nargs="?")
    parser.add_argument("--machine", action="store_true", help="add the row of this machine's card")
    parser.add_argument("--write", type=Path, nargs="+", default=[], help="pages with marks for the table or the card")
    options = parser.parse_args()
    if options.machine:
        describe_machine()
    if options.rows is None:
        return
    rows = [json.loads(line) for line in options.rows.read_text().splitlines()]
    for page in options.write:
        write(page, rows)
    if not options.write:
        print(render(rows))


if __name__ == "__main__":
    main()
