"""`meshwright evaluate` and evaluation in the loop, end to end: one set of scores, wherever they are asked for."""

import argparse
import json

import pytest

from framework.cli import main
from framework.commands.evaluate import choose_layout
from framework.commands.trained_model import export_model
from framework.errors import EXIT_DONE, EXIT_USER, RecipeError
from framework.recipe.compose import compose
from framework.track.jsonl import METRICS_FILE, read_records
from tests import tiny_run
from tests.lm_eval_figures import write_tasks

RECIPE = (
    *tiny_run.RECIPE,
    "run.id=a",
    "train.steps=6",
    "batch.sequences_per_step=4",
    "batch.sequences_per_microbatch=2",
)
EXACT = ("precision=fp64", "batch.context=24")


@pytest.mark.grid
def test_a_run_its_checkpoint_and_its_export_have_the_same_scores(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    tiny_run.write_corpus(tmp_path / "corpus")
    write_tasks(tmp_path / "tasks")
    asked = ("eval.tasks=[tasks]", "eval.every_steps=3", "eval.limit=7", "checkpoint.keep_best=last_word/perplexity")
    assert main(["train", *RECIPE, *EXACT, *asked, "optim=lion", "optim.lr=1e-3"]) == EXIT_DONE
    run = tmp_path / "runs" / "a"
    scores = {each["step"]: each["scores"] for each in read_records(run / METRICS_FILE)}
    assert [step for step, found in scores.items() if found] == [3, 6]
    said = capfd.readouterr().err
    assert f"last_word/acc {scores[3]['last_word/acc']:.4g}" in said
    assert "prose/bits_per_byte" in (run / "report.txt").read_text()

    def evaluate(*words):
        assert main(["evaluate", *words, "--tasks", "tasks", "--limit", "7", "--json", "scores.json"]) == EXIT_DONE
        return json.loads((tmp_path / "scores.json").read_text())

    found = evaluate("runs/a")
    assert "moments" not in capfd.readouterr().err, "nothing is trained"
    assert (found["step"], found["context"], found["records"]["choices"]) == (6, 24, 7)
    assert found["scores"] == pytest.approx(scores[6], rel=1e-9)
    assert evaluate("runs/a", "parallel.tp=2", "zero.stage=3")["scores"] == pytest.approx(scores[6], rel=1e-9)
    best = min(scores[3], scores[6], key=lambda each: each["last_word/perplexity"])
    assert evaluate("runs/a", "--best")["scores"] == pytest.approx(best, rel=1e-9)
    export_model(run, tmp_path / "model")
    assert evaluate("model", *EXACT)["scores"] == pytest.approx(scores[6], rel=1e-9)
    assert "prose     " in capfd.readouterr().out
    assert main(["diff", "runs/a", "runs/a"]) == EXIT_DONE
    assert "6 last_word/acc" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "nothing to evaluate: name a run or an exported folder"),
        (["nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(words, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["evaluate", *words]) == EXIT_USER
    assert why in capsys.readouterr().err


def test_tasks_and_limit_of_options_go_before_those_of_a_chosen_recipe(tmp_path):
    known = compose(["experiment=quickstart"]).require()
    arguments = argparse.Namespace(overrides=["eval=core"], tasks=["mine"], limit=3)
    chosen = choose_layout(known, arguments, tmp_path).eval
    assert (chosen.tasks, chosen.limit) == (["mine"], 3)


@pytest.mark.parametrize(
    "word", ["model=llama3_2_1b", "model@model=gpt2", "+adapter=lora", "adapter.rank=4", "model.weights=elsewhere"]
)
def test_another_model_than_that_of_the_run_is_refused(word, tmp_path):
    arguments = argparse.Namespace(run="runs/a", overrides=[word], tasks=["mine"], limit=None)
    with pytest.raises(RecipeError, match="are those of runs/a: leave it out"):
        choose_layout(compose(["experiment=quickstart"]).require(), arguments, tmp_path)


@pytest.mark.grid
def test_a_malformed_task_leaves_no_run_behind(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny_run.write_corpus(tmp_path / "corpus")
    (tmp_path / "bad.jsonl").write_text('{"context": "a", "continuation": " b"}\n{"context": "a"}\n')
    assert main(["train", *RECIPE, "eval.tasks=[bad.jsonl]"]) == EXIT_USER
    assert "eval.tasks: bad.jsonl:2: `continuation` is not there" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "a").exists()
