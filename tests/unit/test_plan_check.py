"""A recipe that no rank could build is refused before anything is written, with the key, the reason and a way out."""

import time
from itertools import product
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from framework import cli
from framework.errors import EXIT_DONE, EXIT_USER, ModelError
from framework.launch.parts import check_ranks, summarize
from framework.model.load import build_meta, load_config, refuse_fresh_seeds
from framework.plan.check import check_layout, check_layouts
from framework.recipe.compose import compose
from framework.recipe.schema import Model
from tests.grid import few_of

QUICKSTART = ("experiment=quickstart", "launch.device=cpu")
SMALL = ("~model", "data.bpe_vocab=300")
BERT = "{vocab_size:300,hidden_size:32,intermediate_size:56,num_hidden_layers:2,num_attention_heads:4,is_decoder:true}"
TWO = ("launch.ranks=2", "parallel.dp=1")
SIZES = "{vocab_size:300,hidden_size:32,intermediate_size:56,num_hidden_layers:2,num_attention_heads:4,num_key_value_heads:2}"
# What passed `check` and failed on the ranks: overrides of the quickstart, and what the error says.
MISTAKES = {
    "misspelt key": (("model.config.num_hiden_layers=3",), ("model.config.num_hiden_layers", "num_hidden_layers")),
    "unknown value": (("model.config.hidden_act=relux",), ("model.config", "relux")),
    "wrong type": (("model.config.hidden_size=wide",), ("model.config", "hidden_size", "wide")),
    "uneven heads": (("model.config.num_key_value_heads=3",), ("num_key_value_heads=1 or 2 or 4",)),
    "pp over layers": (
        ("parallel.pp=4", "launch.ranks=4"),
        ("parallel.pp=4 makes 4 stages", "the model has 2 layers"),
    ),
    "tp over heads": (
        ("parallel.tp=8", "launch.ranks=8"),
        ("parallel.tp=8", "4 heads (num_attention_heads)", "2 key-value heads (num_key_value_heads)", "[1, 2, 4]"),
    ),
    "ep over experts": (
        (
            "model.family=mixtral",
            "model.config.num_local_experts=6",
            "parallel.tp=2",
            "parallel.ep=4",
            "launch.ranks=4",
        ),
        ("parallel.ep=4 does not divide the 6 experts", "1, 2, 3, 6"),
    ),
    "expert_tp over an expert's features": (
        ("model.family=gpt_oss", "model.config.intermediate_size=25", "parallel.tp=2", "launch.ranks=2"),
        ("parallel.tp=2 does not divide the 25 features of", "parallel.expert_tp=1"),
    ),
    "whole experts without experts": (
        ("parallel.tp=2", "parallel.expert_tp=1", "launch.ranks=2"),
        ("parallel.expert_tp=1: llama has no stacked experts", "leave the key out"),
    ),
    "ep without experts": (
        ("parallel.ep=2", "launch.ranks=2"),
        ("parallel.ep=2: llama has no stacked experts", "leave the key out"),
    ),
    "a family without initial values": (
        (*SMALL, "model.family=openai-gpt", "~model.config.intermediate_size", "model.config.n_head=2"),
        ("openai-gpt models cannot start from random weights", "attn.c_attn.weight", "Set model.weights"),
    ),
    "widths that grouped matmuls do not take": (
        ("model.family=mixtral", "model.config.intermediate_size=50"),
        ("has experts of 50 features on a rank", "in float32 want multiples of 4: use model.experts=eager"),
    ),
    "layers that run in cycles, with divided tokens": (
        (
            *(*SMALL, "model.family=hrm_text", "parallel.tp=2", "launch.ranks=2", "parallel.dp=1"),
            "model.config={vocab_size:300,hidden_size:32,intermediate_size:56,num_hidden_layers:16,num_attention_heads:4,"
            "head_dim:8}",
        ),
        ("parallel.sequence=true cannot divide the tokens of hrm_text", "Use parallel.sequence=false"),
    ),
    "an attention that the model replaces": (
        (*SMALL, *TWO, "model.family=big_bird", f"model.config={BERT}", "parallel.tp=2"),
        ("bert.encoder.layer.0.attention.self", "set model.config.attention_type=original_full"),
    ),
    "stages of an attention that the model replaces": (
        (*SMALL, *TWO, "model.family=big_bird", f"model.config={BERT}", "parallel.pp=2"),
        ("puts another module in the place of bert.encoder.layer.0.attention.self", "Use parallel.pp=1"),
    ),
    "an attention that takes its width from its input": (
        (*SMALL, *TWO, "model.family=trocr", "~model.config.intermediate_size", "parallel.tp=2"),
        ("model.decoder.layers.0.self_attn (TrOCRAttention)", "use parallel.tp=1"),
    ),
    "context over positions": (
        ("batch.context=4096",),
        ("batch.context = 4096", "2,048 positions", "max_position_embeddings=4096"),
    ),
    "both": (
        ("batch.context=4096", "parallel.tp=8", "launch.ranks=8"),
        ("batch.context = 4096", "parallel.tp=8 does not divide"),
    ),
    "packing": (("data.pack=documents", "~model", "model.family=rwkv", "data.bpe_vocab=300"), ("data.pack=concat",)),
    "weights that are nowhere": (
        ("model.weights=/nowhere/m", "data.bpe_vocab=null", "model.config={}"),
        ("model.weights=/nowhere/m is no folder here",),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_check_with_the_model_names_key_reason_and_fix(name, capsys):
    overrides, says = MISTAKES[name]
    assert cli.main(["check", *QUICKSTART, *overrides]) == EXIT_DONE  # as it stands in the files, nothing is wrong
    capsys.readouterr()
    assert cli.main(["check", "--model", *QUICKSTART, *overrides]) == EXIT_USER
    out, err = capsys.readouterr()
    assert out == ""
    assert not [words for words in says if words not in " ".join(err.split())], err


def test_a_family_without_a_number_of_layers_is_refused():
    with pytest.raises(ModelError, match=r"model\.family=blt: its config has no num_hidden_layers"):
        refuse_fresh_seeds(AutoConfig.for_model("blt"))


COMMANDS = ("train", "submit --dry-run", "train -m optim.lr=1e-3,1e-4")
NAMES = ("misspelt key", "pp over layers", "tp over heads", "ep over experts", "context over positions")


@pytest.mark.parametrize(
    ("command", "name"),
    few_of(product(COMMANDS, NAMES), lambda command, name: COMMANDS.index(command) == NAMES.index(name)),
)
def test_what_no_rank_could_build_leaves_nothing_behind(command, name, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    slurm = ["launch=slurm", "launch.gres=null"] if command.startswith("submit") else []
    overrides, says = MISTAKES[name]
    code = cli.main([*command.split(), *QUICKSTART, *slurm, *overrides])
    out, err = capfd.readouterr()
    assert code == EXIT_USER
    assert says[0] in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_runs_that_cannot_be_is_refused_before_data_is_prepared(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert cli.main(["train", *QUICKSTART, "run.root=file"]) == EXIT_USER
    assert f"run.root=file: {tmp_path}/file is no folder" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


XGLM = "{vocab_size:300,d_model:32,ffn_dim:56,num_layers:2,attention_heads:4}"
GPTJ = "{vocab_size:300,n_embd:32,n_layer:2,n_head:4,rotary_dim:4}"


def on_cpu(family, config, *overrides):
    words = ["~model", f"model.family={family}", f"model.config={config}", "data.bpe_vocab=300", "launch.device=cpu"]
    return compose([*words, *overrides]).require()


def test_a_table_that_stays_fp32_beside_weights_of_few_bits_is_refused():
    with pytest.raises(
        ModelError, match=r"xglm does not run in bfloat16 .*embed_positions.weights stays fp32 .*precision=fp32"
    ):
        check_layout(on_cpu("xglm", XGLM, "precision=bf16"))
    check_layout(on_cpu("xglm", XGLM, "precision=fp32"))


def test_a_table_that_the_model_casts_is_no_mistake():
    """gptj has a table of positions in fp32, too."""
    plan = check_layout(on_cpu("gptj", GPTJ, "precision=bf16"))
    assert any(buffer.dim() > 1 for buffer in plan.whole.buffers())


def test_a_vocabulary_that_no_one_states_is_named(capsys):
    assert cli.main(["check", *QUICKSTART, "model.tokenizer=x", "data.bpe_vocab=null"]) == EXIT_USER
    assert "model.config.vocab_size=<entries of the tokenizer>" in " ".join(capsys.readouterr().err.split())


def test_a_recipe_that_ranks_can_build_says_what_it_needs(capsys):
    assert cli.main(["check", "--model", *QUICKSTART]) == EXIT_DONE
    assert "model         500,352 parameters in fp32, at most" in capsys.readouterr().out


def test_layers_that_are_dropped_at_random_are_refused_where_ranks_have_parts_of_the_model():
    words = [
        "model.family=opt",
        "model.config={vocab_size: 300, hidden_size: 16, num_attention_heads: 2, layerdrop: 0.1}",
    ]
    words += ["launch.device=cpu", "launch.ranks=2", "data.bpe_vocab=300"]
    with pytest.raises(ModelError, match=r"model\.config\.layerdrop=0\.1 .* parallel\.pp=2 cannot"):
        check_layout(compose(["~model", *words, "parallel.pp=2"]).require())
    check_layout(compose(["~model", *words, "zero.stage=3"]).require())


@pytest.fixture
def qwen3(tmp_path):
    """A folder with a Qwen3 of one layer."""
    config = {
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = AutoConfig.for_model("qwen3", **config, intermediate_size=48, head_dim=8)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def with_weights(folder, *overrides):
    return compose(["~model", f"model.weights={folder}", *overrides]).require()


def test_the_header_names_the_model_of_the_weights(qwen3):
    """model.family stays at its default, llama, where weights are given."""
    recipe = with_weights(qwen3)
    assert "model    qwen3, weights of" in summarize(recipe, check_ranks([recipe]).model_type)


def test_values_that_contradict_the_weights_config_are_an_explained_error(qwen3):
    with pytest.raises(ModelError, match=r"qwen3 model cannot be built from model.config"):
        check_layout(with_weights(qwen3, "model.config.num_hidden_layers=2"))
    (qwen3 / "config.json").unlink()
    with pytest.raises(ModelError, match=r"model.weights=.* has no config.json"):
        check_layout(with_weights(qwen3))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("model.config.intermediate_size=64", r"does not hold the weights .*\n  of another shape \(3\)"),
        ("model.config.attention_bias=true", r"does not hold the weights .*\n  missing \(4\)"),
    ],
)
def test_weights_that_are_another_model_s_are_refused_where_a_run_begins_with_them(qwen3, change, says):
    with pytest.raises(ModelError, match=says):
        check_ranks([with_weights(qwen3, change)])
    assert check_ranks([with_weights(qwen3, change)], is_new=False).model_type == "qwen3"
    assert check_ranks([with_weights(qwen3)]).model_type == "qwen3"


def test_weights_that_are_no_safetensors_are_refused(qwen3):
    (qwen3 / "model.safetensors").rename(qwen3 / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has neither model.safetensors nor .* but pytorch_model.bin"):
        check_ranks([with_weights(qwen3)])


def test_a_family_that_takes_a_new_seed_in_every_forward_is_refused():
    config = "model.config={is_decoder: true, axial_pos_embds: false, vocab_size: 300}"
    recipe = compose(["~model", "model.family=reformer", config, "data.bpe_vocab=300", "launch.device=cpu"]).require()
    with pytest.raises(ModelError, match=r"model\.family=reformer .* repeated, resumed or verified: choose another"):
        check_layout(recipe)


def test_the_layout_of_a_large_model_is_checked_in_less_than_three_seconds():
    recipe = compose(
        ["model=llama3_1_70b", "launch.ranks=64", "parallel.tp=8", "parallel.pp=8", "batch.sequences_per_microbatch=1"]
    ).require()
    before_s = time.process_time()
    check_layout(recipe)
    assert time.process_time() - before_s < 3.0


def test_the_largest_of_a_sweep_is_found_and_a_mistake_in_any_is_raised():
    small, large, tall = (
        compose([*QUICKSTART, *overrides]).require()
        for overrides in ([], ["model.config.hidden_size=256"], ["model.config.num_key_value_heads=3"])
    )
    assert check_layouts([small, large, small]).size.total == check_layout(large).size.total
    with pytest.raises(Exception, match="num_key_value_heads=3 does not divide"):
        check_layouts([small, tall])


def test_a_folder_for_states_that_cannot_hold_them_is_refused_before_a_run_is_made(tmp_path, monkeypatch, capsys):
    """Of this machine; a cluster's nodes look for themselves."""
    monkeypatch.chdir(tmp_path)
    words = (*QUICKSTART, "memory.offload.optimizer=1", "memory.offload.home=disk")
    for folder, says in ((tmp_path / "absent", "no such folder"), (Path("/dev/shm"), "is on a tmpfs")):
        found = f"memory.offload.disk_path={folder}"
        assert cli.main(["train", *words, found]) == EXIT_USER
        said = capsys.readouterr()
        assert f"{found}: {says}" in said.err or f"{found} {says}" in said.err
        assert "model " not in said.out
        assert not list(tmp_path.iterdir()), "no run, no tokens"
        assert cli.main(["doctor", *words, found]) == EXIT_USER
        assert f"fix  states' disk  {folder} cannot be used" in capsys.readouterr().out
    check_ranks([compose([*words, f"memory.offload.disk_path={tmp_path / 'absent'}", "launch.kind=slurm"]).require()])


def test_a_family_whose_default_config_lacks_a_value_is_refused():
    with pytest.raises(ModelError, match=r"dbrx model cannot be built from model.config: .*rope_theta"):
        build_meta(load_config(Model(family="dbrx")))
