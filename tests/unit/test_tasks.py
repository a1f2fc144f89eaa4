"""Evaluation tasks: any form of record to requests, clear words for what is none, tokens kept, scores from log-probabilities."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from framework import cli
from framework.commands.evaluate import convert_task, import_tasks
from framework.data.tasks import (
    SCORES,
    TASKS,
    Request,
    Task,
    TaskEncoder,
    is_better_low,
    keep_tasks,
    list_tasks,
    open_task,
    read_records,
    refuse_unknown_score,
    tokenize_task,
)
from framework.data.tokenize import save_tokenizer, train_bpe
from framework.errors import EXIT_USER, DataError, ModelError, RecipeError
from framework.recipe.plugins import import_plugins
from framework.recipe.schema import Checkpoint, Recipe
from framework.train.loop import SavePolicy
from framework.train.state import RunState
from tests.tiny_run import WORDS


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tokenizer"
    save_tokenizer(train_bpe([" ".join(WORDS)], 280), folder)
    return folder


def write(folder: Path, *records: Any, name: str = "task.jsonl") -> Path:
    path = folder / name
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in records))
    return path


def test_records_are_requests(tmp_path: Path) -> None:
    choices = {"context": "Is it?", "choices": [" yes", " no"], "answer": 1}
    contexts = {"contexts": ["a", "bc"], "continuation": " d", "answer": [0, 1], "sizes": [2, 2.5]}
    found = list(
        read_records(write(tmp_path, choices, "", contexts, {"context": "", "continuation": "x"}, {"text": "t"}))
    )
    assert [(line, kind) for line, kind, _ in found] == [
        (1, "choices"),
        (3, "choices"),
        (4, "continuation"),
        (5, "text"),
    ]
    assert found[0][2] == [Request("Is it?", " yes", False, 3), Request("Is it?", " no", True, 2)]
    assert found[1][2] == [Request("a", " d", True, 2), Request("bc", " d", True, 2.5)]
    assert (found[2][2], found[3][2]) == ([Request("", "x")], [Request("t")])


CHOICES = {"context": "Is it?", "choices": [" yes", " no"], "answer": 1}


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ('{"context": ', "Expecting value"),
        ("[1]", "a record is an object"),
        ({"context": "a"}, "`continuation` is not there: it is a text with more than spaces"),
        ({"context": 3, "continuation": "b"}, "`context` is 3: it is a text"),
        ({**CHOICES, "answer": 2}, "`answer` is the number of one of 2 choices, from 0 on.* not 2"),
        ({**CHOICES, "answer": []}, r"not \[\]"),
        ({**CHOICES, "answer": True}, "not true"),
        ({"context": "a", "choices": [" b", " c"]}, "`answer` is .* not null"),
        ({**CHOICES, "choices": [" yes"]}, "`choices` is a list of at least two texts"),
        ({**CHOICES, "choices": [" yes", "  "]}, "`choices` is a list of at least two texts"),
        ({**CHOICES, "sizes": [1]}, "`sizes` are 2 positive numbers"),
        ({**CHOICES, "sizes": [1, 0]}, "`sizes` are 2 positive numbers"),
        ({**CHOICES, "sizes": 2}, "`sizes` are 2 positive numbers"),
        ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
        ({"text": " "}, "`text` is"),
        ({"text": "another kind"}, "a record of text, behind one of choices in line 1"),
        ({**CHOICES, "choices": [" yes", " no" * 40]}, "tokens, more than batch.context=8"),
    ],
)  # fmt: skip
def test_what_is_no_record_is_refused_with_its_line(tokenizer: Path, tmp_path: Path, record: Any, why: str) -> None:
    path = write(tmp_path, CHOICES, record)
    with pytest.raises(DataError, match=rf"eval.tasks: {path}:2: .*{why}"):
        keep_tasks([str(path)], tokenizer, 8)
    assert not list(tokenizer.parent.glob("eval-task-*"))


def test_files_that_are_no_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not there.*evaluate --import piqa --to"):
        list_tasks([str(tmp_path / "piqa.jsonl")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no .jsonl or .txt file"):
        list_tasks([str(tmp_path / "empty")])
    (tmp_path / "task.txt").write_text("a")
    with pytest.raises(DataError, match="are both task task: rename one"):
        list_tasks([str(write(tmp_path, CHOICES)), str(tmp_path / "task.txt")])
    assert len(list_tasks([str(tmp_path / "task.txt")] * 2)) == 1
    (tmp_path / "bytes.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="cannot be read as UTF-8"):
        list(read_records(tmp_path / "bytes.txt"))


def test_a_plugins_task_is_the_file_of_its_records(tokenizer: Path, tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "plugins" / "sums.py"
    import_plugins([str(example)])
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(record) + "\n" for record in TASKS["sums"]()))
    assert keep_tasks(["sums"], tokenizer, 32) == keep_tasks([str(tmp_path / "sums.jsonl")], tokenizer, 32)
    with pytest.raises(DataError, match=r"piqa is not there; copa is not there.*--import piqa --import copa --to"):
        list_tasks(["piqa", "sums", "copa"])


def test_two_runs_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", "runs/mine", "runs/other", "parallel.tp=2"]) == EXIT_USER
    assert "runs/mine is named before runs/other: evaluate each by itself" in capsys.readouterr().err


def test_an_import_evaluates_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", "runs/mine", "--import", "piqa"]) == EXIT_USER
    assert "leave runs/mine out" in capsys.readouterr().err


def test_tokens_are_kept_until_file_or_context_change(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path, CHOICES, CHOICES)
    (kept,) = keep_tasks([str(path)], tokenizer, 8)
    before = kept.stat().st_mtime_ns
    assert keep_tasks([str(path)], tokenizer, 8) == [kept]
    assert kept.stat().st_mtime_ns == before
    task, fresh = open_task(kept), tokenize_task("task", path, TaskEncoder(tokenizer), 8)
    assert (task.name, task.kind) == ("task", "choices")
    assert all(np.array_equal(each, vars(fresh)[name]) for name, each in vars(task).items())
    assert keep_tasks([str(path)], tokenizer, 9) != [kept]
    assert keep_tasks([str(path.rename(path.with_suffix(".txt")))], tokenizer, 8) != [kept]
    write(tmp_path, CHOICES)
    assert keep_tasks([str(path)], tokenizer, 8) != [kept]
    kept.write_bytes(kept.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"is damaged.*Delete it"):
        open_task(kept)


def test_each_token_of_a_text_is_scored_once(tokenizer: Path) -> None:
    encoder = TaskEncoder(tokenizer)
    text = " ".join(WORDS * 3)
    ids = encoder.encode(text)
    for context in (5, len(ids) - 1, len(ids), len(ids) + 1):
        windows = list(encoder.encode_windows(text, context))
        assert [each for _, scored in windows for each in scored] == ids
        whole = [encoder.prefix, *ids]
        for looked, scored in windows:
            assert len(looked + scored) == min(context, len(ids)) + 1
            assert any(whole[start:][: len(looked + scored)] == looked + scored for start in range(len(whole)))


def make_task(kind: Any, sizes: list[tuple[float, float]], first: list[int]) -> Task:
    ends = np.arange(1, len(sizes) + 1) * 2
    tokens = np.arange(2 * len(sizes), dtype=np.int32)
    return Task("t", kind, tokens, ends, tokens.astype(np.uint8) % 2, np.array(first), np.array(sizes, float))


def test_scores_are_their_formulas() -> None:
    task = make_task("choices", [(0, 2), (1, 8), (1, 1), (0, 1)], [0, 2, 4])
    log_p = np.array([-2.0, -4.0, -3.0, -3.0])
    assert task.judge(log_p, log_p) == {"acc": 0.5, "acc_norm": 1.0}  # of equal ones the first
    task = make_task("continuation", [(0, 0)] * 3, [0, 1, 2, 3])
    assert task.judge(np.array([-1.0, -2.0, -3.0]), np.array([0, 2, 0])) == {
        "acc": 2 / 3,
        "perplexity": pytest.approx(math.e**2),
    }
    task = make_task("text", [(2, 8), (0, 0), (1, 4)], [0, 2, 3])
    found = task.judge(np.array([-3.0, -6.0, -3.0]), np.zeros(3))
    assert found == {
        "word_perplexity": pytest.approx(math.exp(4)),
        "byte_perplexity": pytest.approx(math.exp(1)),
        "bits_per_byte": pytest.approx(1 / math.log(2)),
    }
    assert task.judge(np.array([-3e4] * 3), np.zeros(3))["word_perplexity"] == math.inf


def test_a_limit_takes_the_first_records() -> None:
    task = make_task("choices", [(0, 2), (1, 8), (1, 1), (0, 1)], [0, 2, 4])
    assert task.head(2) is task.head(None) is task
    head = task.head(1)
    assert (head.num_records, len(head.ends), len(head.tokens), len(head.sizes)) == (1, 2, 4, 2)


class World:
    size = 1


@pytest.mark.parametrize(
    ("by", "values", "best"), [("t/acc", [0.2, 0.3, 0.3], 1), ("t/perplexity", [9.0, 8.0, 10.0], 1)]
)
def test_the_best_checkpoint_may_be_that_of_a_score(by: str, values: list[float], best: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("framework.train.loop.broadcast_object", lambda choose, world: choose())
    policy = SavePolicy(Checkpoint(keep_best=by), 10, SimpleNamespace())  # type: ignore[arg-type]
    state = RunState("run", "data", best_step=7, best_validation_loss=-100.0)  # by the validation loss, before a resume
    for step, value in enumerate(values):
        state.step = step
        policy.note_best(state, 1.0, {by: value}, World())  # type: ignore[arg-type]
        policy.note_best(state, 0.1, {}, World())  # type: ignore[arg-type]
    assert (state.best_step, state.best_by) == (best, by)
    assert abs(state.best_validation_loss or 0) == values[best]


def test_a_score_that_no_task_has_is_refused() -> None:
    tasks = [make_task("continuation", [(0, 0)], [0, 1])]
    recipe = replace(Recipe(), checkpoint=Checkpoint(keep_best="t/acc_norm"))
    with pytest.raises(
        RecipeError, match=r"checkpoint.keep_best=t/acc_norm: no task has that score. There are t/acc, t/perplexity"
    ):
        refuse_unknown_score(recipe.checkpoint.keep_best, tasks, False)
    refuse_unknown_score("average/t/acc", tasks, True)
    for kind, names in SCORES.items():
        assert [is_better_low(f"t/{name}") for name in names] == ["acc" not in name for name in names], kind


def fake_task(output: str, requests: list[Any], **more: Any) -> Any:
    """A task of lm-evaluation-harness, as far as it is read."""
    return SimpleNamespace(OUTPUT_TYPE=output, instances=requests, **more)


def ask(doc_id: int, *args: str) -> Any:
    return SimpleNamespace(doc_id=doc_id, args=args, doc={"number": doc_id})


def test_tasks_of_lm_eval_become_records() -> None:
    choices = fake_task(
        "multiple_choice",
        [ask(0, "Q", " a"), ask(0, "Q", " bb"), ask(1, "R", " a"), ask(1, "R", " bb")],
        doc_to_choice=lambda doc: ["a", "bb"],
        doc_to_target=lambda doc: doc["number"],
        multiple_input=0,
    )
    assert list(convert_task("t", choices)) == [
        {"context": context, "choices": [" a", " bb"], "answer": number, "sizes": [1, 2]}
        for number, context in enumerate("QR")
    ]
    contexts = fake_task(
        "multiple_choice",
        [ask(0, "x one", " end"), ask(0, "x two", " end")],
        doc_to_choice=lambda doc: ["x one", "x two"],
        doc_to_text=lambda doc: 1,
        multiple_input=2,
    )
    assert list(convert_task("t", contexts)) == [
        {"contexts": ["x one", "x two"], "continuation": " end", "answer": 1, "sizes": [5, 5]}
    ]
    assert list(convert_task("t", fake_task("loglikelihood", [ask(0, "a", " b")]))) == [
        {"context": "a", "continuation": " b"}
    ]
    assert list(convert_task("t", fake_task("loglikelihood_rolling", [ask(0, "a")]))) == [{"text": "a"}]
    with pytest.raises(DataError, match="t is a task of generate_until"):
        list(convert_task("t", fake_task("generate_until", [])))


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(ModelError, match=r"pip install 'meshwright\[eval\]'. Local task files do not"):
        import_tasks(["piqa"], tmp_path)
