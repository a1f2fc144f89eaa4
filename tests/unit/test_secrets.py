"""A secret goes from the environment in which ranks are started to the ranks, and nowhere else."""

import json
from dataclasses import asdict, replace
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from framework.cli import main
from framework.comm.connect import connect
from framework.commands.train import train
from framework.errors import EXIT_USER, RecipeError
from framework.launch.directory import RunDirectory
from framework.launch.resume import resume_recipe
from framework.mesh.topology import Topology
from framework.plan.plan import make_plan
from framework.recipe.check import check_recipe
from framework.recipe.compose import compose, load_recipe, save_recipe
from framework.recipe.convert import to_yaml
from framework.recipe.environment import describe_public, fill, hide_secrets, is_secret, looks_secret, secret_in
from framework.recipe.problem import render_problems
from framework.recipe.schema import Launch, Model, Recipe
from framework.train.reports import describe_run
from framework.train.state import RunState

SECRET = "hf_sEcReTsEcReT"
REFERENCE = "${oc.env:HF_TOKEN}"
BASE = ("data=files", "data.sources.files.path=corpus", "data.bpe_vocab=300")
TOKEN = f"launch.environment.HF_TOKEN={REFERENCE}"


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_TOKEN", SECRET)


def with_variables(**variables) -> Recipe:
    return replace(Recipe(), launch=Launch(environment=variables))


def test_a_reference_is_kept_through_compose_save_load_resume_and_requeue(tmp_path):
    path = tmp_path / "recipe.yaml"
    mixed = "launch.environment.https_proxy='http://me-${train.seed}:${oc.env:HF_TOKEN}@proxy:3128'"
    recipe = compose([*BASE, TOKEN, mixed]).require()
    kept = {"HF_TOKEN": REFERENCE, "https_proxy": "http://me-1234:${oc.env:HF_TOKEN}@proxy:3128"}
    assert recipe.launch.environment == kept
    for _ in range(2):
        save_recipe(recipe, path)
        assert load_recipe(path) == recipe
        recipe = compose(["train.steps=70"], base=path).require()
        assert recipe.launch.environment == kept
    assert SECRET not in path.read_text()


def test_other_interpolations_are_resolved_as_everywhere_and_escaped_ones_are_text():
    values = "launch.environment={A: '${train.seed}', B: '\\${HOME}', C: 'a\\\\b'}"
    composed = compose([*BASE, values]).require().launch.environment
    assert composed == {"A": 1234, "B": "${HOME}", "C": "a\\\\b"}
    assert compose([*BASE, f"track.wandb.project={REFERENCE}"]).require().track.wandb.project == SECRET


@pytest.mark.parametrize(
    "value", ["${oc.env:HF_TOKEN,none}", "${oc.decode:${oc.env:HF_TOKEN}}", "a${oc.env:${train.seed}}", "${oc.env:A-B}"]
)
def test_what_would_read_the_environment_at_once_is_refused(value):
    with pytest.raises(RecipeError) as error:
        compose([*BASE, f"launch.environment.A='{value}'"]).require()
    assert "launch.environment.A" in str(error.value)
    assert "read where the ranks start" in str(error.value)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HF_TOKEN", SECRET), ("WANDB_API_KEY", "abc"), ("AWS_SECRET_ACCESS_KEY", "a/b"), ("AWS_ACCESS_KEY_ID", "AKIA"),
        ("PGPASSWORD", "x y"), ("MY_CREDENTIALS", "me"), ("db_pass", "x"), ("GITHUB_PAT", "p"), ("APIKEY", "k"),
        ("https_proxy", "http://me:pw@proxy:3128"), ("ANY", "${oc.env:A} http://me:pw@proxy"),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_refused_with_the_way_to_give_it(name, value):
    assert is_secret(name, value)
    problems = check_recipe(with_variables(**{name: value}), {})
    (problem,) = (each for each in problems if "environment" in each.key)
    assert problem.key == f"launch.environment.{name}"
    assert f"'launch.environment.{name}=${{oc.env:{name}}}'" in problem.fix
    assert problem.value is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"), ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"), ("HF_TOKEN_PATH", "/home/me/token"),
        ("SSL_KEY_FILE", "/k"), ("NCCL_DEBUG", "WARN"), ("MAX_TOKENS", "9"), ("SSH_AUTH_SOCK", "/tmp/x"), ("KEYBOARD", "de"),
        ("https_proxy", "http://proxy:3128"), ("https_proxy", "http://me:${oc.env:PW}@proxy"), ("HF_TOKEN", REFERENCE),
        ("TOKEN_LIMIT", 5), ("X", "http://a:$PW@b"),
    ],
)  # fmt: skip
def test_what_is_no_secret_is_taken(name, value):
    assert not is_secret(name, value)


REFUSED = (
    ["launch.environment.HF_TOKEN=SECRET"],
    ["launch.environment={HF_TOKEN: SECRET}"],
    ["launch={environment: {HF_TOKEN: SECRET}}"],
    ["+launch.environment.HF_TOKEN=SECRET"],
    ["launch.environment.HF_TOKEN=SECRET:="],
    ["launch={environment: {HF_TOKEN: SECRET:="],
    ["launch.environment.HF_TOKEN=SECRET,b"],
    ["launch.environment.A-B=SECRET"],
    ["launch.environment.A=SECRET${x"],
    ["launch.environment.A=${oc.env:HF_TOKEN}", "+launch.environment.A=SECRET"],
    ["launch.environment.A=SECRET", "~launch.environment.A=other"],
    ["launch.environment.A=other", "~launch.environment.A=SECRET"],
    ["launch.enviroment.HF_TOKEN=SECRET"],
    ["environment.HF_TOKEN=SECRET"],
    ["--launch.environment.HF_TOKEN=SECRET"],
    ["-m", "launch.environment.HF_TOKEN=SECRET", "optim.lr=1e-3,2e-3"],
    ["launch.set_up=['export HF_TOKEN=SECRET']"],
    ["launch.set_up=[\"HF_TOKEN='SECRET' module load x\"]"],
    ["launch.set_up='export HF_TOKEN=SECRET'"],
    ["launch.set_up=[\"export 'HF_TOKEN=SECRET'\\r\"]"],
    ['launch.sbatch=["--export=HF_TOKEN=SECRET\'"]', "launch=slurm", "launch.nodes=1", "batch.sequences_per_step=64"],
    ["launch.set_up=['curl http://me:SECRET@host']"],
    ["launch=slurm", "launch.nodes=1", "batch.sequences_per_step=64", "launch.sbatch=['--export=ALL,HF_TOKEN=SECRET']"],
    ["launch=slurm", "launch.nodes=1", "batch.sequences_per_step=64", "launch.sbatch=['--export=HF_TOKEN=SECRET']"],
)


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_a_refused_secret_is_not_said_and_leaves_no_file(words, capsys):
    assert main(["train", *BASE, *[word.replace("SECRET", SECRET) for word in words]]) == EXIT_USER
    said = capsys.readouterr()
    assert SECRET not in said.out + said.err
    assert "launch" in said.err or "HF_TOKEN" in said.err
    assert not list(Path().iterdir())


def test_a_password_of_a_tracker_is_refused() -> None:
    found = compose([*BASE, f"track.mlflow.uri=http://me:{SECRET}@host:5000"]).problems
    assert any("has a password" in each.message for each in found)
    assert SECRET not in render_problems(found)


TOKENS = (
    "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZaBcDeFgH",
    "sk-proj-abc123def456ghi789jkl",
    "ghp_1234567890abcdefghij1234567890abcdef",
    "AKIAIOSFODNN7EXAMPLE",
    "Authorization: Bearer abcdef",
    "Bearer abc123def456",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2ln",
)


@pytest.mark.parametrize(
    ("token", "key"),
    zip(TOKENS, cycle(["data.sources.stdlib.path", "track.wandb.tags", "model.config.name", "launch.partition"])),
)
def test_a_token_is_found_in_any_value_and_shown_nowhere(key, token, capsys):
    assert main(["train", *BASE, f"++{key}={json.dumps([token] if key.endswith('tags') else token)}"]) == EXIT_USER
    said = capsys.readouterr()
    assert "looks like a secret" in said.err
    assert token.split()[-1] not in said.out + said.err
    assert not list(Path().iterdir())
    assert token.split()[-1] not in hide_secrets(f"a line with {token} in it")


@pytest.mark.parametrize(
    "name",
    ["hf_checkpoint_conversion_of_llama", "sk-learn-models-of-everybody", "org/name-7b", "risk-1234567890abcdefghij",
     "0123456789abcdef0123456789abcdef01234567", "Bearer of good news", "a/Basic English/text"],
)  # fmt: skip
def test_names_that_are_no_tokens_are_taken(name):
    assert not looks_secret(name)
    assert hide_secrets(name) == name


@pytest.mark.parametrize(
    ("text", "key"),
    zip(
        ["a\x1b[31mb", "a\nb", "a\rb", "a\u202etxt", "a\x9bb"],
        cycle(["data.sources.stdlib.path", "model.tokenizer", "track.wandb.tags", "checkpoint.root"]),
    ),
)
def test_control_characters_are_refused_in_any_value_and_shown_escaped(key, text, capsys):
    quoted = f'"{text}"'
    assert main(["check", *BASE, f"{key}={f'[{quoted}]' if key.endswith('tags') else quoted}"]) == EXIT_USER
    said = capsys.readouterr().err
    assert "control characters" in said or "grammar" in said
    assert text not in said


def test_what_a_set_up_line_reads_from_somewhere_is_taken():
    lines = ["export HF_TOKEN=$(cat ~/.hf_token)", "export WANDB_API_KEY=$KEY", ". ~/.secrets", "module load token=1"]
    assert compose([*BASE, f"launch.set_up={json.dumps(lines)}"]).problems == []


@pytest.mark.parametrize("options", [[], ["--sources"]])
def test_check_prints_the_reference_and_no_password(options, capsys):
    assert (
        main(["check", *options, *BASE, TOKEN, 'model.weights="https://me:pAsSwOrD@host/x"', "data.bpe_vocab=null"])
        == 0
    )
    said = capsys.readouterr().out
    assert REFERENCE in said
    assert "https://me:***@host/x" in said
    assert SECRET not in said
    assert "pAsSwOrD" not in said


def test_only_the_user_reads_what_may_have_values(tmp_path):
    run = RunDirectory.create(tmp_path / "runs", "x", "run")
    run.record.chmod(0o644)  # of a run from before
    run.note_launch([TOKEN], {})
    assert run.record.stat().st_mode & 0o777 == 0o600


def test_trackers_get_the_names_of_variables_and_how_many_lines_set_up():
    recipe = replace(
        with_variables(NCCL_SOCKET_IFNAME="hsn0-value", HF_TOKEN=REFERENCE),
        model=Model(weights="https://me:pAsSwOrD@host/x"),
    )
    recipe = replace(recipe, launch=replace(recipe.launch, set_up=["module load secret-module"]))
    public = describe_public(recipe)
    text = json.dumps(public)
    assert public["launch"]["environment"] == ["HF_TOKEN", "NCCL_SOCKET_IFNAME"]
    assert public["model"]["weights"] == "https://me:***@host/x"
    assert not [value for value in ("hsn0-value", "pAsSwOrD", "secret-module", "oc.env") if value in text]
    assert public["train"] == asdict(recipe.train)


def test_run_info_has_what_trackers_get_and_commands_that_can_be_typed():
    config = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    recipe = replace(with_variables(A="a-value"), run=replace(Recipe().run, root="my 'runs'"))
    train = replace(recipe.train, sample="once upon\na time")
    recipe = replace(recipe, batch=replace(recipe.batch, sequences_per_step=8), train=train)
    mesh = connect(Topology(), torch.device("cpu"))
    plan = make_plan(recipe, config)
    prepared = SimpleNamespace(unigram_entropy=None, sources=())
    state = RunState("x", "")
    info = describe_run(plan.recipe, plan, prepared, mesh, Path(recipe.run.root, "x"), state)  # type: ignore[arg-type]
    assert info.config == describe_public(plan.recipe)
    assert info.commands["resume"] == """meshwright train run.id=x 'run.root="my '"'"'runs'"'"'"'"""
    # Not RUN/export: train.sample leaves one there, and an export replaces nothing.
    assert info.commands["export"] == """meshwright export 'my '"'"'runs'"'"'/x' --to x-model"""
    assert info.commands["generate"] == """meshwright generate 'my '"'"'runs'"'"'/x' --prompt 'once upon'"""


def test_a_reference_is_read_where_the_ranks_start():
    variables = {"HF_TOKEN": REFERENCE, "PROXY": "http://me:${oc.env:PW}@p", "N": 3, "TEXT": "$(id) '"}
    filled = fill(variables, {"HF_TOKEN": SECRET, "PW": "a$b"})
    assert filled == {"HF_TOKEN": SECRET, "PROXY": "http://me:a$b@p", "N": "3", "TEXT": "$(id) '"}


@pytest.mark.parametrize("value", [None, ""])
def test_a_missing_variable_is_named_before_anything_is_made(value, monkeypatch):
    monkeypatch.delenv("HF_TOKEN") if value is None else monkeypatch.setenv("HF_TOKEN", value)
    recipe = compose([*BASE, "launch.environment.TOKEN_OF_MINE=${oc.env:HF_TOKEN}"]).require()
    with pytest.raises(RecipeError) as error:
        train(recipe, [], [])
    assert "launch.environment.TOKEN_OF_MINE refers to HF_TOKEN" in str(error.value)
    assert "export HF_TOKEN" in str(error.value)
    assert error.value.exit_code == EXIT_USER
    assert not list(Path().iterdir())


def test_a_run_with_a_secret_from_before_goes_on_once_it_is_a_reference():
    run = RunDirectory.create(Path("runs"), "x", "run")
    recipe = compose([*BASE, "launch.environment={A: b}"]).require()
    save_recipe(replace(recipe, launch=Launch(environment={"HF_TOKEN": SECRET})), run.recipe)
    with pytest.raises(RecipeError, match="looks like a secret") as error:
        resume_recipe(run, [], [])
    assert SECRET not in str(error.value)
    resumed, changes = resume_recipe(run, [TOKEN], [])
    assert resumed.launch.environment == {"HF_TOKEN": REFERENCE}
    assert SECRET not in repr(changes)
    assert SECRET not in to_yaml(resumed)


def test_a_password_of_digits_and_one_of_several_words_are_secrets():
    assert is_secret("DB_PASSWORD", 31415926)
    assert not is_secret("NUM_KEYS", 512)
    assert hide_secrets("""DB_PASSWORD="one two" HF_TOKEN='a b $c' x""") == "DB_PASSWORD=*** HF_TOKEN=*** x"
    assert secret_in('export HF_TOKEN="$(cat ~/.hf token)"') is None
    assert secret_in("export OPTIONS='--quiet HF_TOKEN=hf_x'") == "HF_TOKEN"
