"""The program as a user meets it: outputs, exit codes, and how fast it answers."""

import itertools
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from framework import cli
from framework.commands import train as train_module
from framework.commands.arguments import make_parser
from framework.errors import EXIT_USER, MeshwrightError, NumericsError
from framework.launch.resume import has_subject
from framework.start import python_words
from framework.verify.prepare import VerifyOptions
from tests.grid import few_of

COMMANDS = ["train", "check", "verify", "plan", "prepare", "generate", "export", "inspect"]

NO_FILES = {"schedule_to": None, "html": None, "overwrite": False, "loads": None}


@pytest.fixture
def run(capsys, monkeypatch):
    """run("check", "a=b") -> (exit code, stdout, stderr), on a terminal of 110 columns."""
    monkeypatch.setenv("COLUMNS", "110")

    def call(*argv: str) -> tuple[int, str, str]:
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def rooms(monkeypatch):
    """Puts a recorder in place of the function of a room that a command calls, where the import finds it."""
    import types

    calls = []

    def install(module: str, name: str, code: int = 0, error: BaseException | None = None):
        def room(*arguments, **named):
            calls.append((*arguments, named) if named else arguments)
            if error is not None:
                raise error
            return code

        if module in (
            "framework.commands.train",
            "framework.commands.generate",
            "framework.commands.plan",
            "framework.commands.prepare",
        ):  # the command's own file
            monkeypatch.setattr(f"{module}.{name}", room)
            return calls
        stand_in = types.ModuleType(module)
        setattr(stand_in, name, room)
        monkeypatch.setitem(sys.modules, module, stand_in)
        return calls

    return install


class TestHelp:
    def test_the_overview_names_all_commands(self, run):
        for argv in ([], ["--help"], ["-h"], ["help"]):
            code, out, _ = run(*argv)
            assert code == 0
            assert all(f"  {command} " in out for command in COMMANDS)

    @pytest.mark.parametrize("command", COMMANDS)
    def test_each_command_explains_itself(self, command, capsys):
        assert cli.main([command, "--help"]) == 0
        assert f"usage: meshwright {command}" in capsys.readouterr().out

    def test_commands_that_compose_list_recipes_and_keys(self, capsys):
        assert cli.main(["check", "--help-recipe"]) == 0
        out = capsys.readouterr().out
        assert "llama3_2_1b" in out
        assert "quickstart" in out

    def test_recipes_of_a_folder_of_the_users_are_listed(self, run, tmp_path):
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "my_own.yaml").write_text("# A model of mine.\nfamily: gpt2\n")
        for words in (("--recipes", str(tmp_path), "--help-recipe"), ("--help-recipe", "--recipes", str(tmp_path))):
            code, out, _ = run("check", *words)
            assert (code, "my_own" in out, "llama3_2_1b" in out) == (0, True, True)

    def test_keys_are_listed(self, run):
        _, out, _ = run("check", "--help-recipe")
        assert "optim.schedule    name warmup_steps" in out

    @pytest.mark.parametrize("command", [*COMMANDS, "submit", "status", "doctor", "diff", "save", "stop"])
    def test_the_help_of_a_command_fits_a_screen(self, command, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        assert cli.main([command, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80

    def test_the_version_says_what_runs(self, run):
        code, out, _ = run("--version")
        assert code == 0
        assert out.startswith("meshwright ")
        assert f"Python {sys.version.split()[0]}, torch 2." in out

    def test_keys_are_explained_and_searched(self, run):
        _, out, _ = run("check", "--keys")
        assert "optim.lr = 0.0003\n    peak learning rate\n    a number of at least 0" in out
        _, out, _ = run("check", "--keys", "warm-up")
        assert out.startswith("optim.schedule.name")
        assert "model.family" not in out
        assert "adapter.base = " in run("check", "--keys", "nf4")[1]
        assert "no key has 'xyzzy'" in run("check", "--keys", "xyzzy")[1]


class TestCheck:
    def test_prints_the_recipe_and_what_follows(self, run):
        code, out, err = run("check", "experiment=quickstart", "launch.ranks=4", "batch.sequences_per_step=32")
        assert (code, err) == (0, "")
        assert "  lr: 0.004" in out
        assert "4 ranks: dp 4 x tp 1" in out
        assert "32 sequences of 128 tokens = 4,096 tokens" in out
        assert "2 microbatches of 4 on each of 4 dp ranks" in out

    def test_says_what_compilation_comes_to_and_why(self, run):
        def say(*overrides):
            lines = run("check", "experiment=quickstart", *overrides)[1].splitlines()
            return [line for line in lines if line.startswith("compile ")]

        (auto,) = say()
        assert "never (memory.compile=auto): it does not pay on CPUs" in auto
        for overrides, reason in (
            (("adapter=lora", "parallel.tp=2", "launch.ranks=2"), "adapters lie beside weights that ranks divide"),
            (("adapter=lora", "adapter.dropout=0.1"), "adapter.dropout"),
        ):
            (auto,) = say("launch.device=cuda", *overrides)
            assert reason in auto.removeprefix(f"{'compile':13} never (memory.compile=auto): ")
        assert say("memory.compile=never") == []
        (always,) = say("memory.compile=always")
        assert "each layer's forward" in always
        _, experts = say("memory.compile=always", "model.experts=eager")
        assert "multiplied in a loop" in experts
        overlapped = ("parallel.tp=2", "parallel.overlap=always", "launch.ranks=2")
        (pieces,) = say("memory.compile=always", *overlapped)
        assert "graphs end at tp's regions" in pieces
        (kept,) = say("launch.device=cuda", "memory.activation_checkpointing=selective", *overlapped)
        assert "with parallel.overlap=always graphs end" in kept

    def test_the_printed_recipe_is_the_recipe(self, run, tmp_path):
        from framework.recipe.compose import compose, load_recipe

        _, out, _ = run("check", "experiment=pretrain_gpt2")
        path = tmp_path / "recipe.yaml"
        path.write_text(out.rpartition("\n\n")[0])
        assert load_recipe(path) == compose(["experiment=pretrain_gpt2"]).require()

    def test_sources(self, run):
        code, out, _ = run("check", "--sources", "experiment=quickstart", "train.seed=7")
        lines = {line.split(" = ")[0]: line for line in out.splitlines() if " = " in line}
        assert code == 0
        assert lines["train.seed"].endswith("command line")
        assert lines["optim.eps"].endswith("recipes/optim/adamw.yaml:5")
        assert lines["run.id"].endswith("default")

    def test_options_may_stand_anywhere_among_overrides(self, run):
        assert run("check", "train.seed=7", "--sources", "train.steps=30") == run(
            "check", "--sources", "train.seed=7", "train.steps=30"
        )

    def test_mistakes_are_one_screen_with_exit_code_86(self, run):
        code, out, err = run("check", "learning_rate=1e-3", "paralel.tp=2", "optim=adamv", "train.steps=x")
        assert (code, out) == (EXIT_USER, "")
        assert "4 problems in the recipe" in err
        assert "optim.lr (HF Trainer: learning_rate)" in err
        assert "did you mean parallel.tp?" in err
        assert "did you mean optim=adamw?" in err
        assert "whole number" in err
        assert "Traceback" not in err
        assert len(err.splitlines()) <= 24
        assert max(map(len, err.splitlines())) <= 120

    def test_recipes_of_the_users_own(self, run, tmp_path):
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "own.yaml").write_text(
            "# @package _global_\ndefaults: [quickstart, _self_]\ntrain: {steps: 777}\n"
        )
        code, out, _ = run("check", "--recipes", str(tmp_path), "experiment=own")
        assert code == 0
        assert "steps: 777" in out
        assert run("check", "experiment=own")[0] == EXIT_USER

    @pytest.mark.parametrize(
        "text",
        [
            "defaults: [quickstart, _self_]\ntrain: {steps: 77}\n",
            "defaults:\n  - override /model: gpt2\ntrain: {steps: 77}\n",
            "defaults: [nowhere]\n",
            "train: {steps: 77}\n",
        ],
    )
    def test_an_experiment_without_its_first_line_is_told_so_and_nothing_of_hydras(self, run, tmp_path, text):
        (tmp_path / "experiment").mkdir()
        (tmp_path / "experiment" / "own.yaml").write_text(text)
        code, _, err = run("check", "--recipes", str(tmp_path), "experiment=own")
        assert code == EXIT_USER
        assert "begins with the line `# @package _global_`" in " ".join(err.split())
        assert f"{tmp_path}/experiment/own.yaml:" in err
        assert "@experiment" not in err

    def test_a_mistake_that_the_model_shows_has_the_line_of_the_file(self, run, tmp_path):
        (tmp_path / "experiment").mkdir()
        text = "# @package _global_\ndefaults: [quickstart]\n\nparallel:\n  tp: 3\nlaunch: {ranks: 3}\n"
        (tmp_path / "experiment" / "own.yaml").write_text(text)
        for command in (["check", "--model"], ["plan"]):
            code, _, err = run(*command, "--recipes", str(tmp_path), "experiment=own")
            assert code == EXIT_USER
            assert err.startswith("meshwright: parallel.tp=3 does not divide")
            assert err.endswith(f"\n  parallel.tp is set in {tmp_path}/experiment/own.yaml:5\n")


def list_options(command):
    """The options of a command, by their names."""
    parser = make_parser(command.name, "summary", command.composes)
    command.add_options(parser)
    return {name for action in parser._actions for name in action.option_strings}


def test_commands_and_options_that_texts_name_exist():
    """`meshwright COMMAND --option` in docs, messages and comments; a line of a block of code as well."""
    options = {command.name: list_options(command) for command in cli.COMMANDS}
    root = Path(cli.__file__).parents[1]
    files = [root / "README.md"]
    for folder, pattern in (
        ("docs", "*.md"),
        ("framework", "*.py"),
        ("recipes", "*.yaml"),
        ("scripts", "*.py"),
        ("slurm", "*.sh"),
    ):
        files += (root / folder).rglob(pattern)
    wrong, count = [], 0
    for file in (each for each in files if each.is_file()):
        for line in file.read_text(encoding="utf-8").splitlines():
            for named in re.findall(r"(?:^\s*|[`$\"'] ?)meshwright ([a-z][a-z-]*\b(?![.:])[^`\n]*)", line):
                name, typed = (
                    re.match("[a-z]+", named)[0],
                    set(re.findall(r"(?<= )--[a-z0-9-]+", named.partition("#")[0])),
                )
                count += 1
                if name != "on" and not (name in options and typed <= options[name]):  # on CPUs: a profile's name
                    wrong.append(f"{file.relative_to(root)}: meshwright {named}")
    assert count > 100
    assert not wrong, "\n".join(wrong)


class TestArguments:
    def test_a_word_that_is_no_command_says_who_does_it(self, run):
        assert "`meshwright status RUN` prints it" in run("goodput", "x")[2]

    def test_unknown_commands_and_options_have_a_suggestion(self, run):
        assert run("chekc")[0] == EXIT_USER
        assert "did you mean check?" in run("chekc")[2]
        assert "did you mean --sources?" in run("check", "--soruces")[2]
        assert "the command comes first: meshwright train experiment=x" in run("experiment=x")[2]

    def test_keys_written_as_flags_are_explained(self, run):
        code, _, err = run("train", "--learning_rate=1e-3", "--optim.lr=3", "--bf16")
        assert code == EXIT_USER
        assert "write optim.lr=1e-3 (HF Trainer: learning_rate)" in err
        assert "write optim.lr=3" in err
        assert "write precision.compute=... (HF Trainer: bf16)" in err

    def test_missing_arguments_are_the_users_mistake(self, run):
        code, _, err = run("export", "runs/x")
        assert code == EXIT_USER
        assert "--to" in err

    @pytest.mark.parametrize(
        ("argv", "module", "name", "expected"),
        [
            (["plan"], "framework.commands.plan", "print_plan", ([], NO_FILES)),
            (
                ["plan", "--schedule-to", "a.svg", "--ranks", "--html=a.html"],
                "framework.commands.plan",
                "print_plan",
                (["ranks"], NO_FILES | {"schedule_to": Path("a.svg"), "html": Path("a.html")}),
            ),
            (
                ["plan", "--options", "--layouts", "--schedule"],
                "framework.commands.plan",
                "print_plan",
                (["layouts", "schedule", "options"], NO_FILES),
            ),
            (
                ["prepare", "--workers=3"],
                "framework.commands.prepare",
                "prepare_command",
                ({"workers": 3, "show": None},),
            ),
            (["verify"], "framework.verify.command", "verify", (VerifyOptions(),)),
            (
                ["verify", "--fp64", "--steps", "5"],
                "framework.verify.command",
                "verify",
                (VerifyOptions(dtype="fp64", steps=5),),
            ),
            (
                ["verify", "--dtype=bf16", "--strict"],
                "framework.verify.command",
                "verify",
                (VerifyOptions(dtype="bf16", strict=True),),
            ),
            (["verify", "--device", "cuda"], "framework.verify.command", "verify", (VerifyOptions(device="cuda"),)),
        ],
    )
    def test_composing_commands_pass_the_recipe_on(self, run, rooms, argv, module, name, expected):
        calls = rooms(module, name, code=5)
        assert run(*argv, "train.seed=42")[0] == 5
        ((recipe, *rest),) = calls
        assert recipe.train.seed == 42
        assert tuple(rest) == expected

    def test_commands_on_runs_pass_their_arguments_on(self, run, rooms, tmp_path):
        generated = rooms("framework.commands.generate", "generate_command")
        run("generate", str(tmp_path), "--prompt", "def", "--temperature", "0", "--max-new-tokens", "9", "--seed", "3")
        named = {"prompt": "def", "max_new_tokens": 9, "temperature": 0.0, "seed": 3, "chat": False, "system": None}
        assert generated.pop() == (tmp_path, named)
        code, _, err = run("generate", str(tmp_path), "--max-tokens", "9")
        assert code == EXIT_USER
        assert "no option --max-tokens 9; did you mean --max-new-tokens?" in err
        exported = rooms("framework.commands.trained_model", "export_model")
        for words, named in ((), {}), (("--step", "7"), {"step": 7}), (("--best",), {"best": True}):
            run("export", "some-run", "--to", str(tmp_path), *words)
            assert exported.pop() == (
                Path("runs/some-run"),
                {
                    "to": tmp_path,
                    "best": False,
                    "step": None,
                    "merged": False,
                    "averaged": False,
                    "dtype": None,
                    "text": False,
                }
                | named,
            )
        code, _, err = run("export", "some-run", "--to", str(tmp_path), "--step", "7", "--best")
        assert (code, exported) == (EXIT_USER, [])
        assert "--best: not allowed with argument --step" in err
        rooms("framework.commands.trained_model", "export_model", error=OSError(28, "No space left on device", "out/x"))
        code, _, err = run("export", "some-run", "--to", str(tmp_path / "out"))
        assert (code, "no room at out/x (No space left on device)" in err) == (EXIT_USER, True)
        inspected = rooms("framework.checkpoint.load", "inspect_command")
        run("inspect", str(tmp_path))
        assert inspected.pop() == (tmp_path,)

    @pytest.mark.parametrize("command", ["train", "verify", "plan", "prepare"])
    def test_a_wrong_recipe_reaches_no_room(self, run, rooms, command):
        calls = [
            *rooms("framework.commands.train", "train"),
            *rooms("framework.verify.command", "verify"),
            *rooms("framework.commands.plan", "print_plan"),
            *rooms("framework.commands.prepare", "prepare_command"),
        ]
        assert run(command, "train.steps=0")[0] == EXIT_USER
        assert calls == []


class TestErrors:
    @pytest.mark.parametrize("error", [MeshwrightError("what, why, how"), NumericsError("what, why, how")])
    def test_typed_errors_are_printed_without_a_traceback(self, run, rooms, error):
        rooms("framework.commands.plan", "print_plan", error=error)
        assert run("plan") == (error.exit_code, "", "meshwright: what, why, how\n")

    def test_control_c_is_130(self, run, rooms):
        rooms("framework.commands.plan", "print_plan", error=KeyboardInterrupt())
        assert run("plan")[0] == 130

    def test_our_own_faults_keep_their_traceback(self, rooms):
        rooms("framework.commands.plan", "print_plan", error=ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            cli.main(["plan"])


class TestTrain:
    def test_a_new_run_is_composed_in_full(self, run, rooms):
        calls = rooms("framework.commands.train", "train")
        assert run("train", "experiment=quickstart", "optim.lr=0.5")[0] == 0
        ((recipe, overrides, folders),) = calls
        assert (recipe.launch.ranks, recipe.optim.lr) == (2, 0.5)
        assert (overrides, folders) == (["experiment=quickstart", "optim.lr=0.5"], [])

    @pytest.mark.parametrize("argv", [(), ("train.steps=50", "optim=lion"), ("launch.ranks=2",)])
    def test_no_run_starts_where_nothing_says_what_to_train(self, run, rooms, argv):
        calls = rooms("framework.commands.train", "train")
        code, out, err = run("train", *argv)
        assert (code, out, calls) == (EXIT_USER, "", [])
        assert "\n  meshwright train experiment=quickstart\n" in err
        assert "  pretrain_gpt2         GPT-2 small from scratch on 10 billion tokens of FineWeb-Edu" in err
        assert max(map(len, err.splitlines())) <= 130

    @pytest.mark.parametrize("word", ["experiment=quickstart", "model=gpt2", "data.sources.a.path=x"])
    def test_one_word_on_what_to_train_is_enough(self, run, rooms, word):
        rooms("framework.commands.train", "train", code=5)
        assert run("train", word)[0] == 5

    @pytest.mark.parametrize(("own", "expected"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
    def test_threads_of_a_rank_on_cpus_sleep_while_they_wait(self, run, rooms, monkeypatch, tmp_path, own, expected):
        """Before torch is imported: its OpenMP reads the environment once. What the user has set stands."""
        import os

        monkeypatch.setenv("OMP_WAIT_POLICY", own or "")
        if own is None:
            monkeypatch.delenv("OMP_WAIT_POLICY")
        rooms("framework.commands.train", "train")
        run("train", "experiment=quickstart", "launch.device=cuda", "precision.compute=fp32")
        assert os.environ.get("OMP_WAIT_POLICY") == own
        monkeypatch.setattr("framework.launch.process.GPU_DRIVERS", (tmp_path,))
        run("train", "experiment=quickstart")  # launch.device=auto, where there is a GPU
        assert os.environ.get("OMP_WAIT_POLICY") == own
        monkeypatch.setattr("framework.launch.process.GPU_DRIVERS", (tmp_path / "none",))
        run("train", "experiment=quickstart")
        assert os.environ["OMP_WAIT_POLICY"] == expected

    def test_values_for_a_run_that_exists_are_judged_beside_what_it_saved(self, run, rooms, tmp_path):
        """A warm-up of 400 steps is longer than config.yaml's run, not than the saved one."""
        from framework.recipe.compose import compose, save_recipe

        saved = compose(["optim=lion", "train.steps=1000"]).require()
        (tmp_path / "mine").mkdir()
        save_recipe(saved, tmp_path / "mine" / "recipe.yaml")
        calls = rooms("framework.commands.train", "train")
        argv = ["train", "run.id=mine", f"run.root={tmp_path}", "optim.schedule.warmup_steps=400"]
        assert run(*argv)[0] == 0
        assert calls[0][0].optim.name == "lion"
        code, _, err = run(*argv, "optim=sgd")
        assert code == EXIT_USER
        assert "optim.schedule.warmup_steps" in err


class TestSweep:
    @pytest.fixture
    def processes(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        started = []

        def start(codes):
            def run_process(command):
                started.append(command)
                return codes[len(started) - 1]

            monkeypatch.setattr(train_module, "run_process", run_process)
            return started

        return start

    def test_every_combination_is_a_process_of_its_own(self, run, processes, tmp_path):
        started = processes([(0, False)] * 4)
        code, out, _ = run(
            "train", "-m", "--recipes", str(tmp_path), "optim=adamw,lion", "train.seed=1,2", "train.steps=50"
        )
        assert code == 0
        prefix = [sys.executable, *python_words("framework", "train", "--recipes", str(tmp_path))]
        assert started == [
            [*prefix, f"optim={optim}", f"train.seed={seed}", "train.steps=50", f"run.id=run-sweep-001-{index}"]
            for index, (optim, seed) in enumerate(itertools.product(("adamw", "lion"), (1, 2)))
        ]
        assert "[4/4]" in out

    def test_status_knows_a_sweep_and_those_of_its_runs_that_have_not_begun(self, run, processes, tmp_path):
        processes([(0, False)] * 2)
        assert run("train", "-m", "model=tiny_llama", "train.seed=1,2")[0] == 0
        code, out, _ = run("status", "run-sweep-001")
        assert code == 0
        assert out.split("\n\n") == [
            f"run      runs/run-sweep-001-{index}, not begun" + "\n" * index for index in (0, 1)
        ]

    def test_a_failure_stops_no_other_and_its_code_is_returned(self, run, processes):
        started = processes([(88, False), (0, False), (1, False)])
        code, out, _ = run("train", "-m", "model=tiny_llama", "train.seed=1,2,3")
        assert (code, len(started)) == (88, 3)
        assert "exit 88  meshwright train model=tiny_llama train.seed=1" in out
        assert "done     meshwright train model=tiny_llama train.seed=2" in out

    def test_control_c_ends_the_sweep_with_the_code_of_the_run_that_saved(self, run, processes):
        started = processes([(0, False), (85, True), (0, False)])
        assert run("train", "-m", "model=tiny_llama", "train.seed=1,2,3")[0] == 85
        assert len(started) == 2

    def test_nothing_starts_if_one_combination_is_wrong(self, run, processes):
        started = processes([])
        code, _, err = run("train", "-m", "optim.lr=1e-3,x", "optim=adamw,lino")
        assert (code, started) == (EXIT_USER, [])
        assert err.count("optim.lr = x") == 2
        assert err.count("did you mean optim=lion?") == 2

    def test_runs_of_a_sweep_need_names_of_their_own(self, run, processes):
        assert "would name 2 runs" in run("train", "-m", "model=tiny_llama", "run.id=x", "train.seed=1,2")[2]
        started = processes([(0, False)] * 2)
        assert run("train", "-m", "model=tiny_llama", "run.id=a,b")[0] == 0
        assert len(started) == 2

    def test_a_child_is_waited_for_through_control_c(self, tmp_path):
        """The parent gets SIGINT as well; it must not kill a child that is still saving."""
        child = (
            "import os, signal, time; signal.signal(signal.SIGINT, lambda *_: None)\n"
            "os.kill(os.getppid(), signal.SIGINT); time.sleep(1); print('saved', flush=True)"
        )
        parent = (
            "import sys; from framework.commands.train import run_process\n"
            f"print(run_process([sys.executable, '-c', {child!r}]))"
        )
        out = subprocess.run(
            [sys.executable, "-c", parent], capture_output=True, text=True, timeout=60, check=False
        ).stdout
        assert out == "saved\n(0, True)\n"

    def test_without_m_several_values_are_a_mistake(self, run):
        code, _, err = run("train", "train.seed=1,2")
        assert code == EXIT_USER
        assert "train -m" in err


class TestFlags:
    """What other systems' users type: keys and files of recipes as options."""

    @pytest.mark.parametrize(
        ("words", "fix"),
        [
            (("experiment=quickstart", "--lr", "3"), "write optim.lr=3"),
            (("--learning-rate", "3e-4", "experiment=quickstart"), "write optim.lr=3e-4"),
            (("--train.steps=5",), "write train.steps=5"),
            (("--zero.stage",), "write zero.stage=..."),
            (("--config", "quickstart.yaml"), "write experiment=quickstart"),
            (("--experiment", "quickstrat"), "write experiment=quickstrat"),
            (("--data", "filse"), "write data=filse"),
            (("--optim", "adamw"), "write optim=adamw"),
            (("--optim", "adamw_torch"), "optim.name is adamw"),
            (("--config", "my.yaml"), "write --recipes DIR experiment=my"),
            (("--modle", "experiment=quickstart"), "did you mean --model?"),
        ],
    )
    def test_the_override_that_was_meant_is_said(self, run, words, fix):
        code, _, err = run("check", *words)
        assert code == EXIT_USER
        assert fix in err
        assert err.count("no such option") + err.count("there is no option") == 1
        assert "***" not in err, "a word of ours is no secret"


class TestSpeed:
    BUDGET_S, MODEL_BUDGET_S = 1.5, 4.5

    @pytest.mark.parametrize(
        "argv",
        few_of(
            [["--help"], ["check", "--help"], ["check", "experiment=quickstart"], ["check", "lr=3"], ["status"]],
            lambda argv: argv in (["check", "experiment=quickstart"], ["status"]),
        ),
    )
    def test_check_and_help_answer_at_once(self, argv):
        self.measure(argv, self.BUDGET_S)

    @pytest.mark.grid  # what it costs is torch and transformers, which other tests load once for all
    def test_a_model_is_laid_out_soon(self):
        self.measure(["check", "--model", "experiment=quickstart"], self.MODEL_BUDGET_S)

    def measure(self, argv, budget_s):
        """In seconds of the processor, which on an idle machine are those of the clock: other tests may run beside."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "framework", *argv], capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < budget_s

    def test_neither_imports_torch_or_transformers(self):
        program = (
            "import sys; from framework import cli\n"
            "cli.main(['--help']); cli.main(['check']); cli.main(['check', '--sources']); cli.main(['check', 'x=1'])\n"
            "sys.exit(sum(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'datasets')))"
        )
        assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0

    def test_python_m_framework_is_the_same_program(self):
        done = subprocess.run([sys.executable, "-m", "framework", "chekc"], capture_output=True, text=True, check=False)
        assert done.returncode == EXIT_USER
        assert "did you mean check?" in done.stderr

    def test_a_reader_that_leaves_is_no_fault(self):
        done = subprocess.run(
            f"{sys.executable} -m framework check --keys | head -1",
            shell=True,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout == "train.steps = 1000\n"
        assert done.stderr == ""


class TestRunsByName:
    @pytest.fixture(scope="class")
    def begun(self, tmp_path_factory):
        """Two runs as a launcher begins them."""
        from framework.recipe.compose import compose, save_recipe

        folder = tmp_path_factory.mktemp("begun") / "runs"
        for name in ("demo-001", "demo-002"):
            (folder / name).mkdir(parents=True)
            save_recipe(compose([f"run.id={name}"]).require(), folder / name / "recipe.yaml")
        return folder

    @pytest.fixture
    def runs(self, monkeypatch, tmp_path, begun):
        """Copies of them, in ./runs."""
        monkeypatch.chdir(tmp_path)
        return shutil.copytree(begun, tmp_path / "runs")

    @pytest.mark.parametrize(
        "command",
        [
            ["train"],
            ["submit", "launch.kind=slurm"],
            ["train", "train.steps=500", "launch.ranks=2"],
            ["train", "optim.lr=1e-4"],
            ["train", "optim=lion"],
        ],
    )
    def test_a_mistyped_run_is_not_a_new_one(self, command, run, runs):
        code, _, err = run(*command, "run.id=demo-01")
        assert code == EXIT_USER
        assert "there is no run runs/demo-01 to go on with; did you mean run.id=demo-001?" in err
        assert "Runs there: demo-001, demo-002. For a new run of this name say what it trains" in err
        assert len(list(runs.iterdir())) == 2

    def test_a_new_run_may_be_named(self, run, rooms, runs):
        calls = rooms("framework.commands.train", "train")
        for more in ("experiment=quickstart", "model.config={vocab_size: 32000}"):
            assert run("train", "run.id=mine", more)[0] == 0
        assert [call[0].run.id for call in calls] == ["mine", "mine"]

    def test_a_folder_that_a_sweep_has_made_is_no_run_yet(self, run, rooms, runs):
        calls = rooms("framework.commands.train", "train")
        (runs / "demo-003").mkdir()
        code, _, err = run("train", "run.id=demo-003")
        assert code == EXIT_USER
        assert "there is no run runs/demo-003 to go on with" in err
        assert run("train", "model=tiny_llama", "train.seed=1", "run.id=demo-003")[0] == 0
        assert len(calls) == 1

    @pytest.mark.parametrize(
        "words",
        [
            ["data.root=/scratch"],
            ["model.attention=sdpa"],
            ["~model", "data.bpe_vocab=4096"],
            ["data={root: /scratch}"],
            ["model={attention: sdpa}"],
            ["-m", "optim.lr=1e-3,3e-4"],
        ],
    )
    @pytest.mark.parametrize("command", [["train"], ["submit"]])
    def test_what_is_trained_has_to_be_said(self, command, words, run, rooms, runs):
        calls = rooms("framework.commands.train", "train")
        code, _, err = run(*command, *words)
        assert code == EXIT_USER
        assert "nothing says what to train" in err
        assert calls == []

    @pytest.mark.parametrize(
        "words",
        [
            ["~model", "model.weights=gpt2", "data.bpe_vocab=null"],
            ["++model.family=llama"],
            ["data=files"],
            ["data={sources: {files: {path: /scratch}}}"],
        ],
    )
    def test_a_model_or_data_of_any_kind_say_it(self, words):
        assert has_subject(words)

    def test_a_run_is_inspected_by_its_id(self, run, rooms, runs):
        calls = rooms("framework.checkpoint.load", "inspect_command")
        assert run("inspect", "demo-001")[0] == 0
        assert calls == [(Path("runs/demo-001"),)]

    def test_nothing_to_inspect_is_said_before_libraries_load(self, run, tmp_path):
        words = ["inspect", f"{tmp_path}/nowhere"]
        script = f"import sys; from framework import cli\nprint(cli.main({words}), 'torch' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(EXIT_USER), "False"]
        assert f"there is no folder {tmp_path}/nowhere" in done.stderr

    def test_a_folder_of_runs_is_no_run_and_names_them(self, run, runs):
        code, _, err = run("status", "runs")
        assert code == EXIT_USER
        assert "runs is not a run (it has no recipe.yaml). Runs there: demo-001, demo-002" in err
