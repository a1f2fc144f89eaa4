"""Runs beside one another: the table of many, with the best, and the difference of two."""

import json
import math

import pytest

from framework.cli import main
from framework.commands import status
from framework.commands.diff import describe_difference, spread
from framework.errors import EXIT_DONE, EXIT_USER
from framework.launch.directory import RunDirectory
from framework.recipe.compose import compose, save_recipe
from framework.track.report import RunInfo, save_run_info


@pytest.fixture
def make(tmp_path):
    def make(name, *overrides, losses=(5.0, 4.0), validation=None, **launch):
        run = RunDirectory.create(tmp_path / "runs", name, "run")
        save_recipe(compose(["model=tiny_llama", *overrides]).require(), run.recipe)
        run.note_launch(["model=tiny_llama", *overrides], {}, **launch)
        records = [
            {
                "step": step,
                "loss": loss,
                "tokens_per_s": 1000.0 * step,
                "validation_loss": None,
                "unix_s": 0.0,
                "step_s": 1.0,
            }
            for step, loss in enumerate(losses, start=1)
        ]
        if validation is not None:
            records[0]["validation_loss"] = validation
        (run.path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return run

    return make


def test_a_sweep_ends_with_a_line_for_each_run_and_the_best_is_marked(make):
    """The lowest validation loss of any step, though another run has the lower loss in its last one."""
    runs = [
        make("a", "train.seed=1", "optim.lr=1e-3", losses=(5.0, 3.0), validation=4.5),
        make("b", "train.seed=1", "optim.lr=3e-4", losses=(5.0, 4.0), validation=4.25),
        make("c", "train.seed=1", "optim.lr=1e-4", losses=()),
    ]
    not_begun = RunDirectory.create(runs[0].path.parent, "d", "run")
    [table] = status.describe_sweep([*runs, not_begun])
    head, *rows = table.strip().splitlines()
    assert head.split("  ")[0] == "run"
    assert [row.split()[0] for row in rows] == ["a", "b", "c"]
    assert rows[1].startswith("b *  no checkpoint  2/250  4.0000  4.2500")
    assert "*" not in rows[0] + rows[2]
    assert [row.split()[-1] for row in rows] == ["optim.lr=1e-3", "optim.lr=3e-4", "optim.lr=1e-4"]


def test_status_of_several_runs_is_a_line_each_and_of_none_all_in_the_folder(make, monkeypatch, capsys):
    run = make("a")
    make("b"), make("c")
    assert main(["status", str(run.path), str(run.path.parent / "c")]) == EXIT_DONE
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["run", "a", "c"]
    monkeypatch.chdir(run.path.parent.parent)
    assert main(["status"]) == EXIT_DONE
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["run", "a", "b", "c"]


def test_a_recipe_that_nobody_can_read_costs_a_line_and_not_the_table(make):
    runs = [make("a"), make("b")]
    runs[0].recipe.write_text("train: {stpes: 3}\n")
    runs[0].record.unlink()
    _, first, second = status.describe_runs(runs, marks_best=False).splitlines()
    assert first.split() == ["a", "unreadable", "-", "-", "-", "-"]
    assert second.split()[:1] == ["b"]
    assert "2/250" in second


def test_a_last_line_that_a_crash_tore_does_not_hide_the_steps_before_it(make):
    metrics = make("a").path / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 3, "lo')
    assert status.read_curve_end(metrics) == (2, 4.0, 2000.0, None)


def test_a_validation_loss_that_is_not_a_number_is_not_the_lowest(make):
    """Compared with anything it is not larger, so that the first of them would stay the least."""
    metrics = make("a", losses=(5.0, 4.0, 3.0)).path / "metrics.jsonl"
    text = metrics.read_text().replace("null", "NaN", 1).replace("null", "4.5", 1).replace("null", "4.75", 1)
    metrics.write_text(text)
    assert status.read_curve_end(metrics)[3] == 4.5
    metrics.write_text(text.replace("4.5", "NaN").replace("4.75", "NaN"))
    assert math.isnan(status.read_curve_end(metrics)[3])


def test_a_loss_of_data_before_a_border_is_not_the_lowest(make):
    """A sweep's best run is told by what all validate on at the end."""
    run = make("a", losses=(5.0, 4.0, 3.0))
    path = run.path / "metrics.jsonl"
    path.write_text(path.read_text().replace("null", "2.5", 1).replace("null", "4.5", 1))
    assert status.read_curve_end(path)[3] == 2.5
    save_run_info(run.path, RunInfo("a", {}, total_steps=3, data_step=1))
    [_, line] = status.describe_runs([run], marks_best=False).splitlines()
    assert "4.5000" in line
    (run.path / "run_info.json").write_text("{")
    assert "2.5000" in status.describe_runs([run], marks_best=False)


def test_status_without_runs_says_how_to_start_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == EXIT_USER
    assert "there are no runs in runs" in capsys.readouterr().err


def test_two_runs_differ_in_their_keys_their_code_and_their_curves(make):
    first = make("a", "optim.lr=1e-3", commit="abc", edited=False, versions={"torch": "2.13.0"})
    second = make("b", "train.seed=7", losses=(5.0, 4.5, 4.0), commit="def", edited=False, versions={"torch": "2.12.1"})
    page = "\n".join(" ".join(line.split()) for line in describe_difference(first, second))
    assert "train.seed 1234 7" in page
    assert "optim.lr 0.001 0.0003" in page
    assert "run.id" not in page
    assert "commit abc def" in page
    assert "torch 2.13.0 2.12.1" in page
    assert "\n1 5.0000 5.0000 equal\n2 4.0000 4.5000 +0.5000\n" in page
    assert "\n3 " not in page
    assert "tokens/s, median 2,000 2,000 x 1.00" in page


def test_runs_without_a_difference_say_so_in_a_word(make):
    page = list(describe_difference(make("a"), make("b", losses=())))
    assert {"recipe: equal", "code: was not recorded", "environment: equal", "curves: no step that both have"} <= set(
        page
    )


def test_what_is_no_run_is_refused(make, tmp_path, capsys):
    assert main(["diff", str(make("a").path), str(tmp_path / "runs" / "nothing")]) == EXIT_USER
    assert "nothing is not a run" in capsys.readouterr().err


@pytest.mark.parametrize(("count", "most"), [(3, 12), (12, 12), (13, 12), (1000, 12)])
def test_shown_steps_are_spread_from_the_first_to_the_last(count, most):
    steps = list(range(1, count + 1))
    shown = spread(steps, most)
    assert len(shown) == min(count, most)
    assert (shown[0], shown[-1]) == (1, count)
    assert shown == sorted(set(shown))
