"""Every file of a run, of its checkpoint and of its token store, damaged in every way: each command names the file and ends with
code 86, or mends the damage, or its result is equal to the bit. docs/reliability.md has the table, which this checks.
"""

import contextlib
import io
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from framework.cli import main
from framework.errors import EXIT_DONE, EXIT_USER
from tests import tiny_run
from tests.grid import IN_TURN, few_of

pytestmark = IN_TURN

DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"
HARMS = ("flip", "halve", "empty", "delete", "swap")
# A run that has ended after step 6 of 8; a resume trains the last two.
STEPS, EVERY = 8, 2
STOPPED, BEFORE = "checkpoints/step-00000006", "checkpoints/step-00000004"
RUN_FILES = (
    "recipe.yaml", "run.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "tokenizer/info.json",
    "checkpoints.json", "lineage.json", "lease", "metrics.jsonl", "goodput.jsonl", "run_info.json", "ranks.json", "report.txt",
    "report.png", "goodput.png", "lock", "lock.ranks",
)  # fmt: skip
CHECKPOINT_FILES = ("manifest.json", "index.bin", "rank-00000.bin")
STORE_FILES = (
    "store.json", "train.tokens", "train.ends", "checksums", "validation.counts", "shards.json",
)  # fmt: skip
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "info.json")
PLACES = (
    *(f"RUN/{name}" for name in RUN_FILES),
    *(f"RUN/{STOPPED}/{name}" for name in CHECKPOINT_FILES),
    *(f"STORE/{name}" for name in STORE_FILES),
    *(f"TOKENIZER/{name}" for name in TOKENIZER_FILES),
)
COMMANDS = {
    "export": ("export", "runs/a", "--to", "exported"),
    "inspect": ("inspect", "runs/a"),
    "status": ("status", "runs/a"),
    "diff": ("diff", "runs/a", "runs/b"),
    "resume": ("train", "run.id=a"),
}
SHOWN = {
    ("RUN/recipe.yaml", "flip"), ("RUN/run.json", "halve"), ("RUN/tokenizer/tokenizer.json", "swap"),
    ("STORE/train.tokens", "flip"), (f"RUN/{STOPPED}/manifest.json", "delete"),
}  # fmt: skip


@dataclass(frozen=True)
class Said:
    """How a command ended."""

    code: int
    text: str


def call(*words: str) -> Said:
    """A command in this process, with all that it says. What is not explained is raised, or has a traceback in its words."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
        code = main(words)
    assert "Traceback" not in said.getvalue(), said.getvalue()
    return Said(code, said.getvalue())


def train(run_id: str, corpus: str, *words: str) -> None:
    recipe = [word.replace("=corpus", f"={corpus}") for word in tiny_run.RECIPE]
    said = call(
        "train", *recipe, f"run.id={run_id}", f"train.steps={STEPS}", f"checkpoint.every_steps={EVERY}", "checkpoint.keep=9",
        "launch.device=cpu", *words,
    )  # fmt: skip
    assert said.code == EXIT_DONE, said.text


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the finished run `a`, a run `b` of other text and another learning rate, and their stores; `own` names those
    of `a`."""
    place = tmp_path_factory.mktemp("golden")
    with contextlib.chdir(place):
        tiny_run.write_corpus(Path("corpus"))
        tiny_run.write_corpus(Path("other"))
        for path in Path("other").iterdir():
            path.write_text(path.read_text()[::-1])
        train("a", "corpus")
        Path("own").write_text("\n".join(path.name for path in Path("tokens").iterdir()))
        train("b", "other", "optim.lr=0.01")
    return place


def stop_before_the_end(place: Path) -> None:
    """Make the finished run one that has ended after step 6."""
    run = place / "runs" / "a"
    shutil.rmtree(run / "checkpoints" / f"step-{STEPS:08d}")
    (run / "checkpoints.json").write_text('{"committed_step": 6}')
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:6]))


@pytest.fixture(scope="module")
def exported(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The weights that an export of step 6 has."""
    place = tmp_path_factory.mktemp("exported")
    shutil.copytree(golden / "runs", place / "runs")
    stop_before_the_end(place)
    with contextlib.chdir(place):
        assert call(*COMMANDS["export"]).code == EXIT_DONE
    return (place / "exported" / "model.safetensors").read_bytes()


def commands_of(name: str) -> tuple[str, ...]:
    """The commands that may meet a file: only training opens stores."""
    return tuple(COMMANDS) if name.startswith("RUN/") else ("resume",)


def find(place: Path, name: str) -> tuple[Path, Path]:
    """The file of run `a`, and the one of the same kind that it is swapped for."""
    kind, _, name = name.partition("/")
    if kind == "RUN":
        run = place / "runs" / "a"
        return run / name, (run / name.replace(STOPPED, BEFORE) if STOPPED in name else place / "runs" / "b" / name)
    stores = {"STORE": "files-*", "TOKENIZER": "tokenizer-*"}
    both = list((place / "tokens").glob(stores[kind]))
    own = next(folder for folder in both if folder.name in (place / "own").read_text())
    other = next(folder for folder in both if folder != own)
    return own / name, other / name


def harm(path: Path, other: Path, how: str) -> None:
    if how == "delete":
        path.unlink()
    elif how == "swap":
        data = other.read_bytes()
        other.write_bytes(path.read_bytes())
        path.write_bytes(data)
    elif how == "flip":
        data = bytearray(path.read_bytes())
        if data:
            middle = len(data) // 2
            # A flipped digit of a line of JSON is another number, and what a letter of a recipe does depends on its key: a quote
            # and a colon show what becomes of a line that can no longer be read.
            mark = {".jsonl": b'"', ".yaml": b":"}.get(path.suffix)
            data[middle if mark is None else data.index(mark, middle)] ^= 1
        path.write_bytes(data)
    else:
        os.truncate(path, path.stat().st_size // 2 if how == "halve" else 0)


def judge(command: str, said: Said, place: Path, golden: Path, exported: bytes, name: str) -> str:
    """`refused`, `mended` or `harmless`, and nothing else."""
    file = Path(name).name
    is_named = file in said.text or Path(name).parent.name in said.text
    if said.code == EXIT_USER:
        assert is_named, f"{command} does not name {name}:\n{said.text}"
        return "refused"
    assert said.code == EXIT_DONE, said.text
    if command == "resume":
        last = f"checkpoints/step-{STEPS:08d}/rank-00000.bin"
        assert (place / "runs" / "a" / last).read_bytes() == (golden / "runs" / "a" / last).read_bytes(), said.text
        steps = re.findall(r'^\{"step": (\d+)', (place / "runs" / "a" / "metrics.jsonl").read_text(), re.M)
        assert steps == [str(step) for step in range(1, STEPS + 1)], said.text
    if command == "export":
        is_equal = (place / "exported" / "model.safetensors").read_bytes() == exported
        assert is_equal or (is_named and re.search("exported step [24] ", said.text)), said.text
    return "mended" if is_named and re.search("damaged|gone|lacks|anew", said.text) else "harmless"


def suffer(golden: Path, exported: bytes, folder: Path, name: str, how: str) -> dict[str, str]:
    """How each command meets a damaged file: first those that change nothing."""
    found, place = {}, folder / "place"
    shutil.copytree(golden, place)
    stop_before_the_end(place)
    harm(*find(place, name), how)
    with contextlib.chdir(place):
        for command in commands_of(name):
            found[command] = judge(command, call(*COMMANDS[command]), place, golden, exported, name)
    return found


def describe(name: str, outcomes: dict[str, dict[str, str]]) -> str:
    """A cell for each command: one word where all harms end alike."""
    cells = []
    for command in COMMANDS:
        if command not in commands_of(name):
            cells.append("-")
            continue
        by_word: dict[str, list[str]] = {}
        for how in HARMS:
            by_word.setdefault(outcomes[how][command], []).append(how)
        common = max(by_word, key=lambda word: len(by_word[word]))
        others = [f"{', '.join(hows)}: {word}" for word, hows in by_word.items() if word != common]
        cells.append("; ".join([common, *others]))
    return " | ".join(cells)


def rows_of_docs() -> dict[str, str]:
    rows = re.findall(r"^\| `((?:RUN|STORE|TOKENIZER)/[^`]+)` \| (.*) \|$", DOCS.read_text(), re.M)
    return dict(rows)


def expected_of(cell: str, how: str) -> str:
    """The word of a cell of the table for a harm."""
    common, *others = cell.split("; ")
    for other in others:
        hows, _, word = other.partition(": ")
        if how in hows.split(", "):
            return word
    return common


CASES = [(name, how) for name in PLACES for how in HARMS]


@pytest.mark.parametrize(("name", "how"), few_of(CASES, lambda name, how: (name, how) in SHOWN))
def test_a_damaged_file_is_named_mended_or_harmless_as_the_table_says(
    golden: Path, exported: bytes, tmp_path: Path, name: str, how: str
) -> None:
    found = suffer(golden, exported, tmp_path, name, how)
    cells = dict(zip(COMMANDS, rows_of_docs()[name].split(" | "), strict=True))
    assert found == {command: expected_of(cells[command], how) for command in commands_of(name)}


def test_the_table_has_every_file() -> None:
    assert tuple(rows_of_docs()) == PLACES
