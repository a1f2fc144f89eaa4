"""Files of other systems, written as their users write them, become recipes that compose, with nothing left out in silence."""

import json
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from framework.cli import main
from framework.errors import EXIT_DONE, EXIT_USER, RecipeError
from framework.recipe.compose import compose
from framework.recipe.foreign_files import read_file
from framework.recipe.keys import value_of
from tests.grid import IN_TURN

pytestmark = IN_TURN

TORCHTITAN = """
[job]
dump_folder = "./outputs"
[metrics]
log_freq = 10
enable_wandb = true
[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "/models/llama"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.2
min_lr_factor = 0.1
[training]
local_batch_size = 2
seq_len = 8192
steps = 5000
dataset = "c4"
dataset_path = "/data/c4/*.jsonl"
[parallelism]
data_parallel_replicate_degree = 4
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
[checkpoint]
interval = 500
async_mode = "async_with_pinned_mem"
keep_latest_k = 5
[activation_checkpoint]
mode = "selective"
[compile]
enable = true
"""
NANOTRON = """
checkpoints: {checkpoint_interval: 1000, checkpoints_path: /saves, save_final_state: true}
data_stages:
- name: general
  start_training_step: 1
  data: {dataset: {hf_dataset_or_datasets: /data/web, text_column_name: content}, seed: 42}
- name: anneal
  start_training_step: 9000
  data: {dataset: {hf_dataset_or_datasets: /data/good, text_column_name: content}}
general: {project: small, run: small-1b, seed: 7}
logging: {iteration_step_info_interval: 5}
model:
  dtype: bfloat16
  init_method: {std: 0.025}
  model_config: {is_llama_config: true, hidden_size: 2048, intermediate_size: 8192, num_attention_heads: 32, 
    num_hidden_layers: 24, num_key_value_heads: 32, rope_theta: 130000.0, rope_scaling: null, tie_word_embeddings: true,
    vocab_size: 49152, use_cache: true}
optimizer:
  clip_grad: 1.0
  weight_decay: 0.01
  zero_stage: 1
  optimizer_factory: {name: adamW, adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1.0e-08}
  learning_rate_scheduler: {learning_rate: 0.0005, lr_decay_starting_step: 8000, lr_decay_steps: 2000, lr_decay_style: linear,
    lr_warmup_steps: 500, lr_warmup_style: linear, min_decay_lr: 0.00005}
parallelism: {dp: 4, tp: 2, pp: 1, pp_engine: 1f1b, tp_mode: REDUCE_SCATTER}
tokenizer: {tokenizer_name_or_path: /models/small}
tokens: {batch_accumulation_per_replica: 16, micro_batch_size: 4, sequence_length: 2048, train_steps: 10000,
  val_check_interval: -1}
"""
AXOLOTL = """
base_model: /models/llama
datasets:
  - {path: /data/books.jsonl, type: completion, field: body}
  - {path: /data/chat.jsonl, type: chat_template}
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
adapter:
gradient_accumulation_steps: 4
micro_batch_size: 2
max_steps: 500
warmup_ratio: 0.1
optimizer: adamw_torch_fused
lr_scheduler: cosine
learning_rate: 2e-5
bf16: true
gradient_checkpointing: true
flash_attention: true
deepspeed: deepspeed_configs/zero3_bf16.json
wandb_project: mine
"""
LLAMA_FACTORY = """
model_name_or_path: /models/qwen
stage: pt
finetuning_type: full
dataset: c4_demo
cutoff_len: 2048
output_dir: saves/x
logging_steps: 10
save_steps: 500
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
bf16: true
val_size: 0.1
eval_steps: 500
"""
TRAINER = {
    "output_dir": "out", "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 1000, "bf16": True,
    "warmup_ratio": 0.05, "lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "seed": 1,
    "gradient_checkpointing": True, "save_steps": 200, "save_total_limit": 2, "optim": "adamw_torch",
    "fsdp": "full_shard auto_wrap",
    "label_smoothing_factor": 0.1, "run_name": "tiny",
}  # fmt: skip
FILES = {
    "torchtitan.toml": TORCHTITAN,
    "nanotron.yaml": NANOTRON,
    "axolotl.yml": AXOLOTL,
    "factory.yaml": LLAMA_FACTORY,
    "trainer.json": json.dumps(TRAINER),
}
EXPECTED: dict[str, dict[str, Any]] = {
    "torchtitan.toml": {
        "launch.ranks": 64, "zero.stage": 3, "zero.shard_within": 8, "parallel.tp": 2, "batch.sequences_per_step": 64,
        "batch.sequences_per_microbatch": 2, "batch.context": 8192, "optim.schedule.name": "wsd",
        "optim.schedule.decay_steps": 1000,
        "optim.schedule.final_ratio": 0.1, "checkpoint.every_steps": 500, "checkpoint.interval": None, "checkpoint.mode": "async",
        "checkpoint.keep": 5, "memory.activation_checkpointing": "selective", "optim.weight_decay": 0.1, "train.steps": 5000,
        "model.tokenizer": "/models/llama", "precision.compute": "bf16", "parallel.dp": None,
    },
    "nanotron.yaml": {
        "launch.ranks": 8, "parallel.tp": 2, "parallel.sequence": True, "batch.sequences_per_step": 256, "zero.stage": 1,
        "batch.context": 2048, "train.steps": 10000, "train.validate_every_steps": None, "optim.lr": 0.0005, "train.seed": 7,
        "optim.schedule.name": "wsd", "optim.schedule.decay_steps": 2000, "optim.schedule.final_ratio": 0.1,
        "run.name": "small-1b",
        "optim.betas": (0.9, 0.95), "checkpoint.root": "/saves", "track.wandb.project": "small",
        "model.tokenizer": "/models/small",
    },
    "axolotl.yml": {
        "model.weights": "/models/llama", "batch.sequences_per_step": 8 * 8, "train.steps": 500,
        "optim.schedule.warmup_steps": 50, "optim.schedule.final_ratio": 0.0, "optim.betas": (0.9, 0.999),
        "optim.weight_decay": 0.0, "zero.stage": 3, "model.attention": "flash_attention_2",
        "data.validation": 0.05, "data.pack": "best_fit", "track.wandb.project": "mine",
    },
    "factory.yaml": {
        "model.weights": "/models/qwen", "batch.sequences_per_step": 8 * 8, "train.epochs": 3.0, "optim.schedule.name": "cosine",
        "optim.schedule.final_ratio": 0.0, "data.validation": 0.1, "train.validate_every_steps": 500, "optim.weight_decay": 0.0,
    },
    "trainer.json": {
        "batch.sequences_per_step": 8 * 8, "optim.lr": 5e-5, "optim.schedule.warmup_steps": 50, "optim.schedule.final_ratio": 0.1,
        "memory.activation_checkpointing": "full", "checkpoint.keep": 2, "zero.stage": 3, "train.seed": 1, "run.name": "tiny",
    },
}  # fmt: skip
# What must be said: it is not in the recipe, or it means something else.
SAID = {
    "torchtitan.toml": ["No counterpart"],
    "nanotron.yaml": ["anneal", "lr_warmup_style"],
    "axolotl.yml": ["/data/chat.jsonl", "how many ranks"],
    "factory.yaml": ["dataset_info.json", "to be given: data.sources.files.path"],
    "trainer.json": ["label smoothing", "names no model", "names no length"],
}
RANKS = {"axolotl.yml": 8, "factory.yaml": 8, "trainer.json": 8}


@pytest.mark.parametrize("name", FILES)
def test_a_file_becomes_an_experiment_that_composes(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_text(FILES[name])
    ranks = [f"launch.ranks={RANKS[name]}"] if name in RANKS else []
    assert main(["check", "--from", str(file), *ranks]) == EXIT_DONE
    text = capsys.readouterr().out
    for words in SAID[name]:
        assert words in text
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "theirs.yaml").write_text(text)
    more = ["data.sources.files.path=/data"] if "to be given: data" in text else []
    recipe = compose(["experiment=theirs", *ranks, *more], [tmp_path]).require()
    for key, expected in EXPECTED[name].items():
        assert value_of(recipe, key) == expected, key


@pytest.mark.parametrize("name", FILES)
def test_every_name_of_a_file_is_in_the_recipe_or_said(name: str, tmp_path: Path) -> None:
    """An unknown name beside the known ones is said, in each form."""
    file = tmp_path / name
    text = FILES[name]
    added = {".toml": '\n[job2]\nodd_name = "x"\n', ".json": ""}.get(file.suffix, "\nodd_name: x\n")
    file.write_text(text + added if added else json.dumps({**TRAINER, "odd_name": "x"}))
    reading = read_file(file, 8)
    assert any("odd_name: x: no key of ours" in line for line in reading.absent)


def test_ranks_are_those_of_the_command_line_where_a_file_has_none(tmp_path: Path) -> None:
    file = tmp_path / "axolotl.yml"
    file.write_text(AXOLOTL)
    for ranks in (1, 4):
        assert read_file(file, ranks).settings["batch.sequences_per_step"] == 8 * ranks


def test_adapters_are_translated(tmp_path: Path) -> None:
    file = tmp_path / "factory.yaml"
    file.write_text(LLAMA_FACTORY)
    assert read_file(file, 1).settings.get("adapter.kind", "none") == "none"
    file.write_text(LLAMA_FACTORY.replace("finetuning_type: full", "finetuning_type: lora\nlora_rank: 4"))
    settings = read_file(file, 1).settings
    assert (settings["adapter.kind"], settings["adapter.rank"]) == ("lora", 4)


@pytest.mark.parametrize(
    ("name", "text"),
    [("x.yaml", "odd: 1\n"), ("x.yaml", "- 1\n"), ("x.toml", "a = \n"), ("x.json", "{"), ("absent.yaml", None)],
)
def test_what_is_no_such_file_is_refused(name: str, text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match="--from"):
        read_file(tmp_path / name, 1)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("odd", ["text", None, 0, [], {}])
def test_values_of_another_kind_are_the_users_mistakes(name: str, odd: Any, tmp_path: Path) -> None:
    """Each value of a file in turn, as nobody's system writes it."""
    load = {".toml": tomllib.loads, ".json": json.loads}.get(Path(name).suffix, yaml.safe_load)
    keys = [
        (section, key)
        for section, values in load(FILES[name]).items()
        for key in (values if isinstance(values, dict) else [None])
    ]
    for section, key in keys:
        tree = load(FILES[name])
        if key is None:
            tree[section] = odd
        else:
            tree[section][key] = odd
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(tree))
        with suppress(RecipeError):
            read_file(file, 8)


def test_a_recipe_that_cannot_be_run_is_printed_with_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nanotron.yaml"
    tree = yaml.safe_load(NANOTRON)
    tree["optimizer"]["learning_rate_scheduler"]["lr_warmup_steps"] = 20000
    file.write_text(yaml.safe_dump(tree))
    assert main(["check", "--from", str(file)]) == EXIT_USER
    printed = capsys.readouterr()
    assert "warmup_steps: 20000" in printed.out
    assert "optim.schedule.warmup_steps" in printed.err
