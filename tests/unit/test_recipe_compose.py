"""Composition: Hydra's semantics, users' folders, provenance, and every kind of mistake at its place."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from framework.errors import RecipeError
from framework.recipe import files, problem
from framework.recipe.compose import Composition, compose, save_recipe
from framework.recipe.problem import COMMAND_LINE, Problem, shipped_recipes


def recipe_of(*overrides: str, folders=()):
    return compose(list(overrides), folders).require()


def problem_of(composition: Composition, key: str) -> Problem:
    found = [problem for problem in composition.problems if problem.key == key]
    assert len(found) == 1, f"{key}: {composition.problems}"
    return found[0]


@pytest.fixture
def mine(tmp_path):
    """A user's own folder of recipes; `write("experiment/x", "...")` adds one."""
    folder = tmp_path / "mine"

    def write(name: str, text: str) -> Path:
        file = folder / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return folder

    return write


class TestHydraSemantics:
    def test_a_plain_value_replaces(self):
        assert recipe_of("train.steps=77").train.steps == 77

    def test_the_last_override_of_a_key_wins(self):
        assert recipe_of("train.steps=7", "train.steps=300").train.steps == 300

    def test_a_group_choice_replaces_the_whole_recipe_of_the_group(self):
        optim = recipe_of("optim=sgd").optim
        assert (optim.name, optim.lr, optim.weight_decay) == ("sgd", 0.1, 0.0)

    def test_a_nested_group_is_chosen_with_a_slash(self):
        assert recipe_of("optim/schedule=wsd").optim.schedule.name == "wsd"

    def test_an_experiment_beats_a_group_chosen_on_the_command_line(self):
        recipe = recipe_of("experiment=quickstart", "optim=lion")
        assert (recipe.optim.name, recipe.optim.lr) == ("lion", 4.0e-3)

    def test_the_command_line_beats_an_experiment(self):
        assert recipe_of("experiment=quickstart", "optim.lr=0.5").optim.lr == 0.5

    def test_two_experiments_are_merged_in_order(self, mine):
        mine("experiment/a", "# @package _global_\ntrain: {steps: 100, seed: 5}\n")
        folder = mine("experiment/b", "# @package _global_\ntrain: {steps: 200}\n")
        recipe = recipe_of("experiment=[a,b]", folders=[folder])
        assert (recipe.train.steps, recipe.train.seed) == (200, 5)

    def test_free_keys_below_model_config_need_no_plus(self):
        recipe = recipe_of("model=gpt2", "model.config.n_layer=4", "model.config.rope_parameters.rope_theta=5.0")
        assert recipe.model.config["n_layer"] == 4
        assert recipe.model.config["rope_parameters"] == {"rope_theta": 5.0}

    def test_a_source_is_added_by_naming_it(self):
        recipe = recipe_of("data.sources.mine.path=/data/*.jsonl", "data.sources.stdlib.weight=0.2")
        assert {name: (s.path, s.weight) for name, s in recipe.data.sources.items()} == {
            "stdlib": ("python-stdlib", 0.2),
            "mine": ("/data/*.jsonl", 1.0),
        }

    def test_plus_adds_what_is_not_set(self):
        assert (
            recipe_of("+optim.momentum=0.9", "+model.config.attention_bias=true").model.config["attention_bias"] is True
        )

    def test_plus_on_a_set_key_is_a_problem_that_names_where_it_is_set(self):
        problem = problem_of(compose(["+optim.lr=1.0"]), "+optim.lr")
        assert "recipes/optim/adamw.yaml:3" in problem.message
        assert problem.fix == "write optim.lr=1.0"

    def test_double_plus_sets_or_adds(self):
        recipe = recipe_of("++optim.lr=1.0", "++model.config.new=1")
        assert (recipe.optim.lr, recipe.model.config["new"]) == (1.0, 1)

    def test_tilde_gives_a_key_its_default_back(self):
        assert recipe_of("~optim.clip_norm").optim.clip_norm == 1.0
        assert recipe_of("data.sources.b.path=x", "~data.sources.stdlib").data.sources.keys() == {"b"}

    def test_tilde_with_another_value_than_the_set_one_is_a_problem(self):
        assert "is 0.0003, not 5" in problem_of(compose(["~optim.lr=5"]), "~optim.lr").message
        assert recipe_of("~optim.lr=3e-4").optim.lr == 3e-4

    def test_tilde_leaves_a_group_out(self):
        assert recipe_of("~checkpoint").checkpoint.every_steps is None

    def test_a_mapping_for_a_group_sets_values(self):
        optim = recipe_of("optim={lr: 0.5, eps: 1e-6}").optim
        assert (optim.name, optim.lr, optim.eps) == ("adamw", 0.5, 1e-6)

    def test_lists_are_replaced(self):
        assert recipe_of("track.wandb.tags=[a,b]", "optim.betas=[0.5,0.6]").optim.betas == (0.5, 0.6)

    def test_interpolations_resolve_after_the_command_line(self):
        recipe = recipe_of("data.bpe_vocab=512", "train.validate_every_steps=${train.steps}")
        assert recipe.model.config["vocab_size"] == 512
        assert recipe.train.validate_every_steps == recipe.train.steps

    @pytest.mark.parametrize("text", ["1e-4", "1E-4", "0.0001", "1.0e-4"])
    def test_floats_read_alike_in_files_and_on_the_command_line(self, mine, text):
        folder = mine("optim/own", f"name: adamw\nlr: {text}\n")
        assert recipe_of("optim=own", folders=[folder]).optim.lr == recipe_of(f"optim.lr={text}").optim.lr == 1e-4

    def test_composing_leaves_no_trace(self, tmp_path, monkeypatch):
        from hydra.core.global_hydra import GlobalHydra

        monkeypatch.chdir(tmp_path)
        recipe_of("experiment=quickstart")
        assert list(tmp_path.iterdir()) == []
        assert not GlobalHydra().is_initialized()


class TestMergedFiles:
    """Those that are shipped are merged once for all compositions of a process."""

    @pytest.fixture
    def shipped(self, tmp_path, monkeypatch):
        """The folder of a shipped copy that may be edited."""
        folder = tmp_path / "recipes"
        shutil.copytree(shipped_recipes(), folder)
        for module in (files, problem):
            monkeypatch.setattr(module, "shipped_recipes", lambda: folder)
        return folder

    def test_an_edited_file_is_read_anew(self, shipped):
        file = shipped / "optim" / "adamw.yaml"
        before = compose([])
        file.write_text("# Edited.\nname: adamw\nlr: 0.125\n")
        after = compose([])
        assert before.origins["optim.lr"] == "recipes/optim/adamw.yaml:3"
        assert (after.require().optim.lr, after.origins["optim.lr"]) == (0.125, "recipes/optim/adamw.yaml:3")
        assert after.origins["optim.eps"] == "default"
        file.write_bytes(b"\xff\xfe")
        assert [each.origin for each in compose([]).problems] == ["recipes/optim/adamw.yaml"]

    def test_an_edited_file_is_read_anew_though_it_was_not_chosen(self, shipped):
        assert recipe_of().optim.name == "adamw"
        (shipped / "config.yaml").write_text((shipped / "config.yaml").read_text().replace("adamw", "sgd"))
        assert recipe_of().optim.name == "sgd"

    def test_values_of_one_composition_are_not_in_the_next(self):
        plain = compose([])
        words = [
            "optim.lr=0.5",
            "~data.sources.stdlib",
            "data.sources.mine.path=x",
            "+model.config.attention_bias=true",
        ]
        assert compose(words).require() != plain.require()
        assert compose([]) == plain

    def test_sabotaged_merged_files_that_are_handed_out_are_noticed(self, monkeypatch):
        monkeypatch.setattr(files, "pickle", SimpleNamespace(dumps=lambda found: found, loads=lambda found: found))
        files._merge_shipped.cache_clear()
        with pytest.raises(AssertionError):
            self.test_values_of_one_composition_are_not_in_the_next()
        files._merge_shipped.cache_clear()


class TestFolders:
    def test_a_users_recipe_extends_a_shipped_one(self, mine):
        folder = mine("optim/hot", "defaults: [adamw, _self_]\nlr: 0.01\n")
        optim = recipe_of("optim=hot", folders=[folder]).optim
        assert (optim.lr, optim.weight_decay) == (0.01, 0.1)

    def test_a_users_experiment_extends_a_shipped_one(self, mine):
        folder = mine("experiment/long", "# @package _global_\ndefaults: [quickstart, _self_]\ntrain: {steps: 999}\n")
        recipe = recipe_of("experiment=long", folders=[folder])
        assert (recipe.train.steps, recipe.launch.ranks) == (999, 2)

    def test_a_users_recipe_stands_for_the_shipped_one_of_its_name(self, mine):
        folder = mine("optim/adamw", "name: adamw\nlr: 0.25\n")
        composition = compose([], [folder])
        assert composition.require().optim.lr == 0.25
        assert composition.origins["optim.lr"] == f"{folder}/optim/adamw.yaml:2"

    def test_the_first_folder_wins(self, mine, tmp_path):
        first = mine("optim/own", "lr: 0.1\n")
        second = tmp_path / "second"
        (second / "optim").mkdir(parents=True)
        (second / "optim" / "own.yaml").write_text("lr: 0.2\n")
        assert recipe_of("optim=own", folders=[first, second]).optim.lr == 0.1
        assert recipe_of("optim=own", folders=[second, first]).optim.lr == 0.2

    def test_a_folder_name_with_blanks_and_quotes_works(self, tmp_path):
        folder = tmp_path / "it's my 'own' folder, = yes"
        (folder / "optim").mkdir(parents=True)
        (folder / "optim" / "own.yaml").write_text("lr: 0.125\n")
        assert recipe_of("optim=own", folders=[folder]).optim.lr == 0.125

    def test_a_group_of_the_users_own_is_added_with_plus(self, mine):
        folder = mine("mine/a", "# @package _global_\nlaunch: {ranks: 4}\n")
        assert recipe_of("+mine=a", folders=[folder]).launch.ranks == 4

    def test_a_folder_that_is_not_there_is_an_error(self, tmp_path):
        with pytest.raises(RecipeError, match="no such folder"):
            compose([], [tmp_path / "nope"])


class TestOrigins:
    def test_every_leaf_has_its_file_and_line(self):
        origins = compose(["experiment=quickstart", "optim.lr=1.0"]).origins
        assert origins["optim.lr"] == COMMAND_LINE
        assert origins["optim.eps"] == "recipes/optim/adamw.yaml:5"
        assert origins["run.id"] == "default"
        assert origins["launch.ranks"].startswith("recipes/experiment/quickstart.yaml:")

    def test_the_line_is_the_one_that_says_it(self, mine):
        folder = mine(
            "experiment/x",
            "# @package _global_\n\ntrain:\n  # why\n  steps: 3\noptim: {lr: 1.0, schedule: {warmup_steps: 0}}\n",
        )
        origins = compose(["experiment=x"], [folder]).origins
        assert origins["train.steps"] == f"{folder}/experiment/x.yaml:5"
        assert origins["optim.schedule.warmup_steps"] == f"{folder}/experiment/x.yaml:6"

    def test_a_mapping_on_the_command_line_is_traced_by_key(self):
        origins = compose(["optim={lr: 1.0}"]).origins
        assert origins["optim.lr"] == COMMAND_LINE
        assert origins["optim.eps"] == "recipes/optim/adamw.yaml:5"

    def test_a_removed_key_is_a_default_again(self):
        assert compose(["~optim.clip_norm"]).origins["optim.clip_norm"] == "default"

    def test_origins_name_what_the_merge_took(self, mine):
        """The trace reads the files on its own; each file:line must hold the value that Hydra's merge ended with."""
        composition = compose(["experiment=pretrain_llama3_2_1b"])
        recipes = Path(__file__).parents[2]
        checked = 0
        for key, origin in composition.origins.items():
            file, _, line = origin.rpartition(":")
            if file.endswith(".yaml"):
                text = (recipes / file).read_text().splitlines()[int(line) - 1]
                assert key.rpartition(".")[2] in text, (key, origin, text)
                checked += 1
        assert checked > 40


class TestMistakes:
    def test_all_at_once_from_files_and_command_line(self, mine):
        folder = mine(
            "experiment/bad",
            "# @package _global_\n"
            "train: {stpes: 5}\n"
            "learning_rate: 3e-4\n"
            "optim:\n"
            "  betas: [0.9]\n"
            "  schedule: {name: cosin}\n"
            "launch: {ranks: 0}\n",
        )
        composition = compose(
            ["experiment=bad", "paralel.tp=2", "optim=adamv", "train.seed=x", "precision.compute=fp64"], [folder]
        )
        assert composition.recipe is None
        keys = {problem.key for problem in composition.problems}
        assert keys >= {
            "train.stpes", "learning_rate", "optim.betas", "optim.schedule.name", "launch.ranks",
            "paralel.tp", "optim", "train.seed",
        }  # fmt: skip
        bad = f"{folder}/experiment/bad.yaml"
        assert problem_of(composition, "train.stpes").origin == f"{bad}:2"
        assert problem_of(composition, "train.stpes").fix == "did you mean train.steps?"
        assert problem_of(composition, "learning_rate").fix == "optim.lr (HF Trainer: learning_rate)"
        assert problem_of(composition, "optim.schedule.name").message == "must be one of constant, linear, cosine, wsd"
        assert problem_of(composition, "paralel.tp").origin == COMMAND_LINE
        assert problem_of(composition, "paralel.tp").fix == "did you mean parallel.tp?"
        assert "did you mean optim=adamw?" in problem_of(composition, "optim").fix
        with pytest.raises(RecipeError) as error:
            composition.require()
        assert all(key in str(error.value) for key in keys)

    def test_rules_between_keys_are_judged_beside_wrong_keys(self):
        composition = compose(["train.stpes=5", "optim.schedule.warmup_steps=1000"])
        assert {problem.key for problem in composition.problems} == {"train.stpes", "optim.schedule.warmup_steps"}

    def test_a_wrong_key_is_not_reported_again_by_a_rule_that_reads_it(self):
        composition = compose(["launch.ranks=0", "batch.sequences_per_step=7"])
        assert [problem.key for problem in composition.problems] == ["launch.ranks"]

    @pytest.mark.parametrize(
        ("override", "fix"),
        [
            ("optim=adamv", "did you mean optim=adamw? there are: adamw, lion, muon, sgd"),
            ("model=llama", "llama3_2_1b"),
            ("optim/schedule=cos", "cosine"),
            ("experiment=[quickstart,quikstart]", "did you mean experiment=quickstart?"),
        ],
    )
    def test_a_bad_option_names_the_nearest_and_all(self, override, fix):
        problem = problem_of(compose([override]), override.partition("=")[0])
        assert problem.origin == COMMAND_LINE
        assert fix in problem.fix

    @pytest.mark.parametrize(
        ("word", "fix"),
        [
            ("quickstart", "write experiment=quickstart"),
            ("gpt2", "write model=gpt2"),
            ("wsd", "write optim/schedule=wsd"),
            ("recipes/experiment/quickstart.yaml", "write experiment=quickstart"),
            ("/my/recipes/experiment/poems.yaml", "write --recipes /my/recipes experiment=poems"),
            ("my.yaml", "keep the file in DIR/experiment/, and write --recipes DIR experiment=my"),
            ("runs/demo-001/recipe.yaml", "run.id=demo-001 goes on with that run"),
            ("train.steps:500", "write train.steps=500"),
            ("experiment:quickstart", "write experiment=quickstart"),
            ("train.steps", "write train.steps=... with a value"),
            ("=", "such as train.steps=500"),
            ("zero=3", "did you mean zero=stage_3?"),
            ("zero=zero2", "did you mean zero=stage_2?"),
            ("model=recipes/model/gpt2.yaml", "did you mean model=gpt2?"),
        ],
    )
    def test_what_people_type_leads_to_what_is_written(self, word, fix):
        (problem,) = compose([word]).problems
        assert fix in problem.fix

    def test_a_bad_option_in_a_file_has_its_line(self, mine):
        mine("experiment/other", "# @package _global_\ndefaults:\n  - override /model: llama3_2_1\n")
        folder = mine(
            "experiment/x", "# @package _global_\ndefaults:\n  - quickstart\n  - override /model: llama3_2_1\n"
        )
        problem = problem_of(compose(["experiment=x"], [folder]), "model")
        assert problem.origin == f"{folder}/experiment/x.yaml:4"
        assert "llama3_2_1b" in problem.fix

    def test_a_bad_group_in_a_file_has_its_line(self, mine):
        folder = mine("experiment/x", "# @package _global_\ndefaults:\n  - quickstart\n  - override /modle: gpt2\n")
        problem = problem_of(compose(["experiment=x"], [folder]), "modle")
        assert (problem.origin, problem.fix) == (f"{folder}/experiment/x.yaml:4", "did you mean model?")

    @pytest.mark.parametrize(
        ("text", "line", "message"),
        [
            ("train:\n  steps: 3\n seed: 3\n", 3, "not valid YAML"),
            ("train:\n  steps: 3\n  steps: 4\n", 3, "duplicate key steps"),
            ("train: {steps: ${train.seed\n", 1, "not valid YAML"),
            ("train:\n  steps: ${train.seed\n", 2, "not an interpolation"),
            ("train:\n\tsteps: 3\n", 2, "not valid YAML"),
        ],
    )
    def test_bad_syntax_has_its_file_and_line_beside_the_command_lines_mistakes(self, mine, text, line, message):
        folder = mine("experiment/x", text)
        composition = compose(["experiment=x", "stpes=3"], [folder])
        assert {problem.key for problem in composition.problems} > {"stpes"}
        (problem,) = [problem for problem in composition.problems if problem.key != "stpes"]
        assert problem.origin == f"{folder}/experiment/x.yaml:{line}"
        assert message in problem.message

    @pytest.mark.parametrize("content", [b"name: [adamw\n", b"name: adamw\nlr: 1\n lr: 2\n", b"\xff\xfe\x00"])
    def test_bad_syntax_of_a_group_that_is_chosen_has_its_file(self, mine, content):
        folder = mine("optim/x", "")
        (folder / "optim" / "x.yaml").write_bytes(content)
        (problem,) = compose(["experiment=quickstart", "optim=x"], [folder]).problems
        assert problem.origin.startswith(f"{folder}/optim/x.yaml")

    def test_a_file_that_is_not_text_is_named(self, mine):
        folder = mine("experiment/x", "")
        (folder / "experiment" / "x.yaml").write_bytes(b"\xff\xfe\x00")
        assert [p.origin for p in compose(["experiment=x"], [folder]).problems] == [f"{folder}/experiment/x.yaml"]

    @pytest.mark.parametrize(
        ("text", "line", "says"),
        [
            ("# @package _global_\ndefaults:\n  - /model: gpt2\n", ":3", "- override /model: gpt2"),
            (
                "# @package _global_\ndefaults: [override /model: gpt2, quickstart]\n",
                "",
                "at the end of the defaults list",
            ),
            ("# @package _global_\ndefaults: quickstart\n", "", "must be a list"),
            ("# @package _global_\ndefaults: [x, _self_]\n", ":2", "leads back to its own file"),
            ("# @package _global_\ndefaults: [quikstart]\n", ":2", "quickstart"),
            ("# @package _global_\noptim: [1, 2]\n", "", "Cannot merge"),
        ],
    )
    def test_what_hydra_objects_to_has_its_file(self, mine, text, line, says):
        folder = mine("experiment/x", text)
        (problem,) = compose(["experiment=x"], [folder]).problems
        assert problem.origin == f"{folder}/experiment/x.yaml{line}"
        assert says in f"{problem.message} {problem.fix}"

    def test_a_recipe_that_extends_its_own_name_is_told_so(self, mine):
        folder = mine("optim/adamw", "defaults: [adamw, _self_]\nlr: 1.0\n")
        (problem,) = compose([], [folder]).problems
        assert (problem.origin, "name of its own" in problem.fix) == (f"{folder}/optim/adamw.yaml:1", True)

    def test_text_that_yaml_reads_as_a_number_is_told_so(self, mine):
        folder = mine("experiment/x", "# @package _global_\nrun: {name: 12:30:45}\n")
        assert "read as 45045" in problem_of(compose(["experiment=x"], [folder]), "run.name").fix

    def test_an_experiment_without_its_package_line_is_told_so(self, mine):
        folder = mine("experiment/x", "train: {steps: 3}\n")
        assert "# @package _global_" in problem_of(compose(["experiment=x"], [folder]), "experiment").fix

    def test_a_group_written_inside_itself_is_told_so(self, mine):
        folder = mine("optim/x", "optim: {lr: 1.0}\n")
        assert "leave out `optim:`" in problem_of(compose(["optim=x"], [folder]), "optim.optim").fix

    def test_a_file_may_begin_with_the_mark_of_utf_8(self, mine):
        folder = mine("experiment/x", "\ufeff# @package _global_\ntrain: {steps: 3}\n")
        assert compose(["experiment=x"], [folder]).draft.train.steps == 3

    def test_settings_of_hydra_in_a_file_are_unknown_keys(self, mine):
        folder = mine("experiment/x", "# @package _global_\nhydra: {run: {dir: there}}\n")
        assert problem_of(compose(["experiment=x"], [folder]), "hydra.run.dir").message == "unknown key"

    def test_dotted_keys_in_a_file_are_told_to_nest(self, mine):
        folder = mine("experiment/x", "# @package _global_\noptim.lr: 1.0\n")
        assert "nests" in problem_of(compose(["experiment=x"], [folder]), "optim.lr").fix

    def test_a_mandatory_value_is_missing_until_it_is_given(self):
        problem = problem_of(compose(["data=files"]), "data.sources.files.path")
        assert problem.origin == "recipes/data/files.yaml:5"
        assert recipe_of("data=files", "data.sources.files.path=x.txt").data.sources["files"].path == "x.txt"

    def test_a_source_without_its_path_is_missing_it(self):
        assert "must be given" in problem_of(compose(["data.sources.new.weight=2"]), "data.sources.new.path").message

    @pytest.mark.parametrize("value", ["${now:%Y}", "x${now:%H}", "${hydra:runtime.cwd}", "${hydra.job.name}"])
    def test_interpolations_that_differ_per_rank_are_forbidden(self, mine, value):
        folder = mine("experiment/x", f"# @package _global_\nrun: {{name: '{value}'}}\n")
        assert "differ" in problem_of(compose(["experiment=x"], [folder]), "run.name").message

    def test_interpolations_in_lists_are_checked_as_well(self, mine):
        folder = mine("experiment/x", "# @package _global_\ntrack: {wandb: {tags: ['${now:%Y}']}}\n")
        assert "differ" in problem_of(compose(["experiment=x"], [folder]), "track.wandb.tags").message

    def test_an_interpolation_of_nothing_is_one_problem_each(self):
        composition = compose(["train.seed=${nothing}", "run.name=${nor.this}", "data.sources.a.path=${x}"])
        assert sorted(p.key for p in composition.problems) == ["data.sources.a.path", "run.name", "train.seed"]

    def test_values_below_a_value_are_told_its_type(self):
        assert "whole number" in problem_of(compose(["train.steps.x=2"]), "train.steps").message

    def test_a_value_for_a_group_is_told_its_keys(self):
        assert "mode, project" in problem_of(compose(["track.wandb=offline"]), "track.wandb").fix


class TestBase:
    def test_only_values_apply_to_a_saved_recipe(self, tmp_path):
        save_recipe(recipe_of("optim=lion", "train.steps=70"), tmp_path / "recipe.yaml")
        resumed = compose(
            ["train.seed=9", "optim=sgd", "experiment=quickstart"], base=tmp_path / "recipe.yaml"
        ).require()
        assert (resumed.optim.name, resumed.train.steps, resumed.train.seed) == ("lion", 70, 9)

    def test_without_overrides_it_is_the_saved_recipe(self, tmp_path):
        saved = recipe_of("experiment=quickstart", "data.sources.b.path=x")
        save_recipe(saved, tmp_path / "recipe.yaml")
        assert compose([], base=tmp_path / "recipe.yaml").require() == saved

    def test_mistakes_on_the_command_line_and_in_an_edited_file(self, tmp_path):
        path = tmp_path / "recipe.yaml"
        save_recipe(recipe_of(), path)
        tree = yaml.safe_load(path.read_text())
        tree["train"]["stpes"] = 3
        path.write_text(yaml.safe_dump(tree))
        composition = compose(["lr=3"], base=path)
        assert {problem.key for problem in composition.problems} == {"lr", "train.stpes"}
        assert str(path) in problem_of(composition, "train.stpes").origin
