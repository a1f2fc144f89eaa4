"""Plugins: each example of examples/plugins trains, resumes, and is the same training run in a layout; and what is no plugin."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from framework import cli
from framework.errors import EXIT_DONE, EXIT_USER
from framework.recipe.compose import compose, load_recipe
from framework.recipe.plugins import ADDED, describe_plugins, find_changed, import_plugins
from framework.track.jsonl import METRICS_FILE, read_records
from framework.verify.compare import compare
from framework.verify.prepare import VerifyOptions, prepare
from tests import tiny_run
from tests.grid import IN_TURN, few_of
from tests.ranks.pool import RankPool

pytestmark = IN_TURN

EXAMPLES = Path(__file__).parents[2] / "examples" / "plugins"
SHARDED = ("parallel.tp=2", "zero.stage=3")
CHAT = ("data.sources.files.messages=messages", "data.sources.files.path=chat.jsonl", "data.chat_template=plain_chat")
# (file, the overrides that use it, those of a run; ranks of its verification, more than one of a run)
ROWS = [
    ("nesterov", ("optim.name=nesterov",), (), 4),
    ("focal", ("loss.name=focal", "loss.beta=2"), (), 4),
    ("one_minus_square", ("optim.schedule.name=one_minus_square",), (), 4),
    ("soft_llama", ("model.family=soft_llama",), (), 4),
    ("gather_ring", ("parallel.cp=2", "parallel.context=gather_ring"), ("launch.ranks=2",), 4),
    ("eager_1f1b", ("parallel.pp=2", "pipeline.schedule=eager_1f1b"), ("launch.ranks=2",), 8),
    ("fortunes", ("data.sources.files.format=fortunes",), ("data.sources.files.path=jokes",), 0),
    ("bytes_tokenizer", ("model.tokenizer=bytes",), ("~data.bpe_vocab",), 0),
    ("plain_chat", CHAT, ("data.overlong=truncate", "batch.context=64"), 0),
    ("curve", (), (), 0),
    ("sums", ("eval.tasks=[sums]",), ("launch.ranks=2", "parallel.tp=2"), 0),
]


def plugin_of(name: str) -> str:
    return str(EXAMPLES / f"{name}.py")


def with_plugins(*plugins: str) -> str:
    return f"plugins=[{','.join(plugins)}]"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with texts of three forms."""
    monkeypatch.chdir(tmp_path)
    tiny_run.write_corpus(tmp_path / "corpus")
    (tmp_path / "jokes").write_text("\n%\n".join(file.read_text() for file in sorted(Path("corpus").iterdir())))
    turns = [{"role": "user", "content": "mesh?"}, {"role": "assistant", "content": "axis and layout " * 3}]
    (tmp_path / "chat.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 30)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "words", "more"),
    few_of([row[:3] for row in ROWS], lambda name, words, more: name in ("nesterov", "fortunes")),
)
def test_a_run_of_each_example_trains_and_resumes(
    name: str, words: Sequence[str], more: Sequence[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    small = ("batch.sequences_per_step=4", "batch.sequences_per_microbatch=2", "run.id=mine")
    common = [*tiny_run.RECIPE, *small, *words, *more, "--plugins", plugin_of(name)]
    assert cli.main(["train", *common, "train.steps=2"]) == EXIT_DONE, capfd.readouterr().err
    assert f"plugins  {plugin_of(name)} (" in capfd.readouterr().out
    assert cli.main(["train", "run.id=mine", "train.steps=3"]) == EXIT_DONE, capfd.readouterr().err
    run = Path("runs/mine")
    assert [record["step"] for record in read_records(run / METRICS_FILE)] == [1, 2, 3]
    launches = json.loads((run / "run.json").read_text())["launches"]
    assert [each["plugins"] for each in launches] == [describe_plugins([plugin_of(name)])] * 2


@pytest.mark.parametrize(
    ("name", "words", "ranks"),
    few_of([(*row[:2], row[3]) for row in ROWS if row[3]], lambda name, words, ranks: name == "nesterov"),
)
def test_a_layout_with_each_example_is_one_training_run(
    name: str, words: Sequence[str], ranks: int, pool: RankPool
) -> None:
    recipe = compose(
        ["experiment=quickstart", *SHARDED, *words, f"launch.ranks={ranks}", with_plugins(plugin_of(name))]
    ).require()
    sides = prepare(recipe, VerifyOptions(dtype="fp64", ranks=ranks, steps=2)).sides
    found, expected = (sides if ranks > pool.size else replace(sides, pool=pool)).run()
    rows = compare(found, expected)
    assert {row.quantity: row.error for row in rows if row.error > 1e-9} == {}


@pytest.mark.grid
def test_the_average_of_the_weights_has_scores_of_its_own(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are those of the exported average."""
    (folder / "words.txt").write_text("axis and layout of a mesh\n" * 20)
    words = [
        "eval.tasks=[sums,words.txt]",
        "eval.average=true",
        "train.ema=0.5",
        "optim.lr=0.01",
        "run.id=mine",
    ]
    more = ["--plugins", plugin_of("sums"), "train.steps=4", "eval.every_steps=2"]
    assert cli.main(["train", *tiny_run.RECIPE, *words, *more]) == EXIT_DONE, capfd.readouterr().err
    scores = {each["step"]: each["scores"] for each in read_records(Path("runs/mine") / METRICS_FILE)}
    assert [step for step, found in scores.items() if found] == [2, 4]
    assert {"sums/acc", "average/sums/acc", "average/words/word_perplexity"} <= scores[4].keys()
    assert cli.main(["export", "mine", "--to", "mean", "--average"]) == EXIT_DONE
    context = compose(tiny_run.RECIPE).require().batch.context
    layout = ["--tasks", "words.txt", "--json", "found.json", f"batch.context={context}", "precision.compute=fp32"]
    assert cli.main(["evaluate", "mean", *layout]) == EXIT_DONE, capfd.readouterr().err
    found = json.loads(Path("found.json").read_text())["scores"]["words/word_perplexity"]
    assert scores[4]["average/words/word_perplexity"] == pytest.approx(found, rel=1e-5)
    assert scores[4]["words/word_perplexity"] != pytest.approx(found, rel=1e-3)


def problems_of(*overrides: str) -> str:
    problems = compose(["experiment=quickstart", *overrides]).problems
    return "\n".join(f"{each.message} -> {each.fix}" for each in problems)


def write(path: Path, text: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return str(path)


def test_a_plugin_that_fails_names_itself(tmp_path: Path) -> None:
    broken = write(tmp_path / "broken_plugin.py", "raise KeyError('no such thing')")
    taken = write(tmp_path / "taken_plugin.py", "from framework.extend import schedule\nschedule('cosine')(float)")
    again = write(tmp_path / "again.py", "from framework.extend import schedule\nschedule('one_minus_square')(float)")
    hidden = write(tmp_path / "argparse.py", "")
    assert f"the plugin {broken} cannot be imported: KeyError" in problems_of(with_plugins(broken))
    assert f"{taken} cannot be imported: the schedule cosine is Meshwright's" in problems_of(with_plugins(taken))
    import_plugins([plugin_of("one_minus_square")])
    assert f"is the plugin {plugin_of('one_minus_square')}'s already" in problems_of(with_plugins(again))
    assert "another module is called argparse" in problems_of(with_plugins(hidden))
    assert "there is no such folder or file" in problems_of(with_plugins("no_such_file.py"))
    assert "the plugin no_such_package cannot be imported: ModuleNotFoundError" in problems_of(
        "plugins=[no_such_package]"
    )
    assert "no such folder or file" in problems_of(with_plugins(str(tmp_path / "nothing.py")))


def test_a_plugin_that_has_changed_since_a_launch_is_named(tmp_path: Path) -> None:
    plugin = write(tmp_path / "changes_later.py", "A = 1")
    import_plugins([plugin])
    record = {"launches": [{"plugins": {}}, {"plugins": describe_plugins([plugin])}]}
    assert list(find_changed([plugin], record)) == list(find_changed([plugin], {})) == []
    write(tmp_path / "changes_later.py", "A = 2")
    (line,) = find_changed([plugin], record)
    assert f"{plugin} has changed" in line
    write(tmp_path / "changes_later.py", "if True:\n    from beside_it import A")
    write(tmp_path / "beside_it.py", "A = 1")
    write(tmp_path / "bystander.py", "A = 1")
    before = describe_plugins([plugin])
    write(tmp_path / "bystander.py", "A = 2")
    assert describe_plugins([plugin]) == before
    write(tmp_path / "beside_it.py", "A = 2")
    assert describe_plugins([plugin]) != before


def test_a_name_that_no_plugin_has_is_explained(tmp_path: Path) -> None:
    words = with_plugins(plugin_of("nesterov")), "optim.name=nestorov"
    assert "did you mean nesterov?" in problems_of(*words)


def test_a_file_does_not_say_where_code_lies(tmp_path: Path) -> None:
    write(tmp_path / "experiment" / "theirs.yaml", f"# @package _global_\nplugins: [{plugin_of('nesterov')}]\n")
    composition = compose(["experiment=theirs"], [tmp_path])
    (problem,) = [each for each in composition.problems if each.key == "plugins"]
    assert "recipes do not say where code lies" in problem.message
    assert problem.fix.endswith(f"--plugins {plugin_of('nesterov')}")


def test_no_plugins_refuses_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "experiment=quickstart", "--plugins", plugin_of("nesterov"), "--no-plugins"]
    assert cli.main(words) == EXIT_USER
    assert "none may be imported" in capsys.readouterr().err


def test_a_saved_recipe_is_read_without_its_plugins(tmp_path: Path) -> None:
    """`status` reads runs whose plugins are gone."""
    path = write(tmp_path / "recipe.yaml", "plugins: [gone_package]\noptim: {name: theirs}\n")
    assert load_recipe(Path(path)).optim.name == "theirs"


def test_nothing_is_imported_that_was_not_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "bystander.py", "raise SystemExit('imported')")
    asked = write(tmp_path / "asked_for.py", "")
    code = (
        "import sys\nfrom framework import cli\n"
        "assert cli.main(sys.argv[1:]) == 0\n"
        "print([name for name in sys.modules if name in ('framework.extend', 'torch', 'asked_for', 'bystander')])"
    )
    for words, expected in ([], "[]"), (["--plugins", asked], "['asked_for']"):
        command = [sys.executable, "-c", code, "check", "experiment=quickstart", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == expected


def test_each_kind_has_an_example() -> None:
    import_plugins([plugin_of(row[0]) for row in ROWS])
    assert {row[0] for row in ROWS} == {file.stem for file in EXAMPLES.glob("*.py")}
    assert [kind for kind, names in ADDED.items() if not names] == []


def test_a_layouts_file_does_not_say_where_code_lies_either(tmp_path: Path) -> None:
    saved = write(tmp_path / "recipe.yaml", f"plugins: [{plugin_of('nesterov')}]\noptim: {{name: nesterov}}\n")
    assert "plugins" not in {each.key for each in compose([], base=Path(saved)).problems}
    layout = write(tmp_path / "mine.yaml", f"# @package _global_\nplugins: [{plugin_of('focal')}]\n")
    (problem,) = [each for each in compose([f"layout={layout}"], base=Path(saved)).problems if each.key == "plugins"]
    assert "recipes do not say where code lies" in problem.message
