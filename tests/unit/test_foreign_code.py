"""Folders and files of strangers: no code of theirs runs, no kernel they name is fetched, no file of theirs takes a machine's
memory. Each folder here plants code that leaves a mark where it runs, and whoever is asked for permission says yes."""

import io
import json
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from framework.data.tokenize import load_tokenizer
from framework.errors import DataError, ModelError, RecipeError
from framework.model.generate import load_folder
from framework.model.load import build_meta, load_config, load_config_file
from framework.recipe.compose import compose, load_recipe
from framework.recipe.schema import Model
from tests.families import build_config, family
from tests.grid import IN_TURN

pytestmark = IN_TURN

CODE = "from pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
AUTO_MAP = {
    "AutoConfig": "planted.Config",
    "AutoModelForCausalLM": "planted.Model",
    "AutoTokenizer": ["planted.T", None],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of transformers with its tokenizer, and code beside them; standard input answers every question with yes."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(build_config(family("llama"))).save_pretrained(tmp_path)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE({"a": 0, "<e>": 1}, [])), eos_token="<e>"
    ).save_pretrained(tmp_path)
    (tmp_path / "planted.py").write_text(CODE)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    return tmp_path


def edit(file: Path, **values: object) -> None:
    """Set values of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def ran(folder: Path) -> bool:
    """Whether the planted code ran, in the folder or where transformers copies such code."""
    return any(folder.rglob("ran"))


def test_a_model_type_that_only_the_folders_code_knows_is_refused(folder: Path) -> None:
    edit(folder / "config.json", model_type="planted", auto_map=AUTO_MAP)
    for load in (lambda: load_config(Model(weights=str(folder))), lambda: load_folder(folder)):
        with pytest.raises(ModelError, match=r"planted.*runs no code that comes with weights"):
            load()
    assert not ran(folder)


def test_a_known_model_type_is_built_by_transformers_own_classes(folder: Path) -> None:
    edit(folder / "config.json", auto_map=AUTO_MAP)
    edit(folder / "tokenizer_config.json", auto_map=AUTO_MAP)
    config = load_config(Model(weights=str(folder)))
    assert type(build_meta(config)).__module__.startswith("transformers.models.llama")
    assert "auto_map" not in config.to_dict()  # an export would point to code that it does not carry
    model, _ = load_folder(folder)
    assert type(model).__module__.startswith("transformers.models.llama")
    assert not ran(folder)


def test_a_tokenizer_that_only_the_folders_code_reads_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="Planted")
    (folder / "config.json").unlink()
    with pytest.raises(DataError, match="only code that comes with it reads it"):
        load_tokenizer(str(folder))
    assert not ran(folder)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "_experts_implementation"])
def test_kernels_that_a_config_names_are_not_asked_for(folder: Path, key: str) -> None:
    """transformers fetches `owner/name` from the hub and runs it."""
    edit(folder / "config.json", **{key: "stranger/kernel"})
    for config in (load_config(Model(weights=str(folder))), load_config_file(folder / "config.json")):
        assert build_meta(config).config._attn_implementation == "sdpa"
        assert "stranger" not in json.dumps(config.to_dict())
    assert load_folder(folder)[0].config._attn_implementation == "sdpa"


def test_a_recipe_cannot_set_what_transformers_keeps_for_itself(folder: Path) -> None:
    values = {"_attn_implementation_internal": "stranger/kernel"}
    for model in (Model(weights=str(folder), config=values), Model("llama", values)):
        with pytest.raises(ModelError, match="_attn_implementation_internal is not a value of"):
            load_config(model)


def test_a_config_that_is_nested_without_end_is_refused(folder: Path) -> None:
    text = '{"model_type": "llama", "deep": ' + "[" * 200_000 + "]" * 200_000 + "}"
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json cannot be used"):
        load_config(Model(weights=str(folder)))
    with pytest.raises(ModelError, match="no readable Hugging Face config"):
        load_config_file(folder / "config.json")
    with pytest.raises(ModelError, match="holds no model"):
        load_folder(folder)


def bomb(line: str) -> str:
    """YAML of ten lines that expands to 9^10 values. line: with the mapping's key and value of a level."""
    lines = [line.format(n=n, inner=", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 10)]
    return "\n".join(["a0: &a0 {b: 1}", *lines])


DEEP = "train: " + "[" * 1000 + "]" * 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (bomb("a{n}: &a{n} [{inner}]"), "expand to"),
        (bomb("a{n}: &a{n} {{<<: [{inner}]}}"), "expand to"),
        ("train: &a {steps: *a}", "expand to"),
        (DEEP, "nested too deeply"),
    ],
    ids=["aliases", "merges", "itself", "deep"],
)
def test_a_yaml_file_that_expands_without_end_is_refused_at_once(tmp_path: Path, text: str, reason: str) -> None:
    """As an experiment of the user's folder, as a run's recipe, a layout, a cluster and as the folder's config.yaml."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    (tmp_path / "saved.yaml").write_text(text)
    started = time.process_time()
    for typed in (["experiment=mine"], [f"layout={tmp_path}/saved.yaml"], [f"cluster={tmp_path}/saved.yaml"]):
        problems = "\n".join(problem.message for problem in compose(typed, [tmp_path]).problems)
        assert reason in problems, typed
    with pytest.raises(RecipeError, match=reason):
        load_recipe(tmp_path / "saved.yaml")
    (tmp_path / "config.yaml").write_text(text)
    assert reason in "\n".join(problem.message for problem in compose(["+zero=stage_3"], [tmp_path]).problems)
    assert time.process_time() - started < 20  # seconds of a core; expanded, each would take hours


def test_aliases_of_an_ordinary_recipe_are_read(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ndefaults: [quickstart]\noptim: {lr: &rate 0.5, weight_decay: *rate}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(text)
    assert compose(["experiment=mine"], [tmp_path]).require().optim.weight_decay == 0.5
