"""From wrong names to right ones: our own misspelt, and what other systems call them."""

import ast

import pytest

from framework.recipe.compose import compose
from framework.recipe.convert import to_recipe
from framework.recipe.keys import (
    NAME,
    OUR_VALUES,
    explain_unknown,
    foreign_names,
    list_paths,
    list_systems,
    names_of,
    read_table,
)

KEYS = list_paths()


def test_foreign_names_lead_to_ours():
    """One name of each kind and system; that all of the table is sound is asserted below."""
    for foreign, ours in {
        "learning_rate": "optim.lr (HF Trainer",
        "gradient_accumulation_steps": "batch.sequences_per_step / (dp * batch.sequences_per_microbatch)",
        "num_train_epochs": "train.epochs",
        "zero_optimization.stage": "zero.stage (DeepSpeed",
        "optimizer.params.lr": "optim.lr (DeepSpeed",
        "zero_optimization.zero_quantized_gradients": "zero.quantize_reduce (DeepSpeed",
        "zero_optimization.zero_quantized_weights": "zero.quantize_gather (DeepSpeed",
        "zero_optimization.zero_hpz_partition_size": "zero.secondary_shard (DeepSpeed",
        "moe.ep_size": "parallel.ep (DeepSpeed",
        "tensor_model_parallel_size": "parallel.tp (Megatron",
        "lr_decay_style": "optim.schedule.name (Megatron",
        "--moe-token-dispatcher-type": "parallel.expert_hierarchical",
        "moe_z_loss_coeff": "train.router_z_loss",
        "training.local_batch_size": "batch.sequences_per_microbatch (torchtitan",
        "parallelism.data_parallel_shard_degree": "zero.shard_within (torchtitan",
        "num_experts_per_tok": "model.config.num_experts_per_tok",
        "base_model": "model.weights (axolotl",
        "sample_packing": "data.pack (axolotl",
        "flash_attention": "model.attention=flash_attention_2",
        "lora_r": "adapter.rank (axolotl",
        "load_in_4bit": "adapter.base",
        "peft.r": "adapter.rank",
        "lora_target_linear": "adapter.targets",
        "gptq": "adapter.base=nf4 or fp8",
        "messages": "data.sources.NAME.messages (axolotl",
        "train_on_inputs": "data.train_on",
        "mask_history": "data.train_on",
        "assistant_only_loss": "data.train_on (HF Trainer",
        "excess_length_strategy": "data.overlong",
        "chat_template": "data.chat_template",
        "cutoff_len": "batch.context (LLaMA-Factory",
        "zero.cpu_offload": "memory.offload.optimizer",
        "zero_optimization.offload_param.device": "memory.offload.optimizer",
        "activation_checkpointing.cpu_checkpointing": "memory.offload.activations",
    }.items():
        assert ours in explain_unknown(foreign), foreign


def test_foreign_names_are_found_below_any_section_and_as_flags():
    for name in ("args.learning_rate", "optim.learning_rate", "a.b.learning-rate", "Learning_Rate"):
        assert explain_unknown(name).startswith("optim.lr"), name


ENTRIES = [(system, name, entry) for system in list_systems() for name, entry in names_of(system).items()]


def test_the_table_is_sound():
    for system, name, entry in ENTRIES:
        assert name == name.lower().replace("-", "_")
        # In a file of its own a name of ours may mean something else: checkpoint.interval is a number of steps.
        assert name not in KEYS or (system, name) == ("torchtitan", "checkpoint.interval"), f"{name} is a key of ours"
        is_ours = entry.key in KEYS or entry.key.startswith("model.config.")
        assert is_ours or (not entry.key and " " in entry.note), f"{system}: {name}: neither a key nor a sentence"


def test_every_translated_value_is_a_legal_one():
    """Of each name with values of its own, and of values of our keys: the schema takes what stands for them."""
    pairs = [(entry.key, ours) for _, _, entry in ENTRIES if entry.key for ours in entry.values.values()]
    ours_by_key = read_table()[OUR_VALUES]
    pairs += [
        (key, ours) for key, values in ours_by_key.items() for theirs, ours in values.items() if theirs != "number"
    ]
    assert all(values.get("number", key) in KEYS for key, values in ours_by_key.items())
    for key, ours in dict.fromkeys((key, repr(ours)) for key, ours in pairs):
        tree = {key.split(".")[-1]: ast.literal_eval(ours)}
        for group in reversed(key.split(".")[:-1]):
            tree = {group: tree}
        assert to_recipe(tree, {})[1] == [], f"{key}={ours}"


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("parallelism.data_parallel_replicate_degree", 4, "zero.shard_within"),
        ("parallelism.data_parallel_shard_degree", -1, "zero.shard_within=null"),
        ("finetuning_type", "full", "adapter.kind=none"),
        ("finetuning_type", "lora", "adapter.kind=lora"),
        ("zero_quantized_weights", False, "zero.quantize_gather=none"),
        ("load_in_4bit", True, "adapter.base=nf4"),
        ("load_in_8bit", False, "adapter.base=bf16"),
        ("recompute_activations", True, "memory.activation_checkpointing=selective"),
        ("gradient_checkpointing", True, "memory.activation_checkpointing=full"),
        ("use_distributed_optimizer", True, "zero.stage=1"),
        ("moe_token_drop_policy", "probs", "model.expert_drop=weight"),
        ("tokens.train_steps", 100, "train.steps"),
        ("tokens.batch_accumulation_per_replica", 4, "accumulation follows"),
        ("checkpoints.checkpoint_interval", 10, "checkpoint.every_steps"),
        ("learning_rate_scheduler.min_decay_lr", 1e-5, "optim.schedule.final_ratio: over optim.lr"),
        ("parallelism.tp_mode", "REDUCE_SCATTER", "parallel.sequence=True"),
        ("parallelism.recompute_layer", True, "memory.activation_checkpointing=full"),
        ("reduce_bucket_size", 5e8, "travel in a message of their own"),
        ("partition_activations", True, "parallel.sequence divides"),
        ("distributed_timeout_minutes", 10, "launch.step_deadline_s"),
    ],
)
def test_a_translation_is_right_in_meaning_and_value(name, value, words):
    fix = explain_unknown(name if name != "reduce_bucket_size" else f"zero_optimization.{name}", value)
    if name == "partition_activations":
        fix = explain_unknown(f"activation_checkpointing.{name}", value)
    assert words in fix
    if name.endswith("replicate_degree"):
        assert "parallel.dp" not in fix


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("checkpoint.interval=500", "checkpoint.every_steps=500"),
        ("precision.compute=bfloat16", "precision.compute=bf16"),
        ("memory.activation_checkpointing=true", "memory.activation_checkpointing=full"),
        ("memory.compile=true", "memory.compile=always"),
        ("optim.name=adamw_torch", "optim.name=adamw"),
        ("launch.device=gpu", "launch.device=cuda"),
    ],
)
def test_a_foreign_value_of_our_key_is_told_ours(override, fix):
    (problem,) = [each for each in compose([override]).problems if each.key == override.partition("=")[0]]
    assert problem.fix == fix


def test_sentences_speak_of_keys_that_exist():
    groups = {path.split(".")[0] for path in KEYS}
    for _, name, entry in ENTRIES:
        sentence = " ".join((entry.note, entry.differs))
        words = [word.strip("(),:;*").partition("=")[0] for word in sentence.split()]
        for word in words:
            head, _, rest = word.partition(".")
            if head in groups and rest and head != "model":
                assert any(key == word or key.startswith(f"{word}.") for key in KEYS), f"{name}: {word}"


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("paralel.tp", "parallel.tp"),
        ("tp", "parallel.tp"),
        ("train.stpes", "train.steps"),
        ("tran.steps", "train.steps"),
        ("lr", "optim.lr"),
        ("optim.weight_deca", "optim.weight_decay"),
        ("optim.warmup", "optim.schedule.warmup_steps"),
        ("optim.heads", "optim.muon.heads"),
        ("batch.sequence_per_step", "batch.sequences_per_step"),
        ("checkpoint.every_step", "checkpoint.every_steps"),
        ("data.sources.web.wieght", "data.sources.web.weight"),
        ("optim.groups.head.patern", "optim.groups.head.pattern"),
        ("modle", "model"),
        ("optim/shedule", "optim/schedule"),
        ("wandb.project", "track.wandb.project"),
    ],
)
def test_our_own_names_misspelt_or_misplaced(wrong, right):
    assert explain_unknown(wrong) == f"did you mean {right}?"


def test_every_key_is_found_again_after_a_slip_of_the_pen():
    """Two letters swapped in the last part: the fix must name the key itself."""
    for key in KEYS:
        group, _, name = key.rpartition(".")
        if len(name) < 5:
            continue
        slip = f"{group}.{name[0]}{name[2]}{name[1]}{name[3:]}".replace(NAME, "web")
        if slip != key.replace(NAME, "web") and slip.rpartition(".")[2] not in foreign_names():
            assert key.replace(NAME, "web") in explain_unknown(slip), slip


def test_what_resembles_nothing_is_sent_to_the_list():
    assert explain_unknown("zzqqx.xxyq") == "`meshwright check --keys` lists all keys"


def test_what_resembles_nothing_in_a_group_is_told_its_keys():
    found = explain_unknown("data.sources.web.max_bytes")
    assert found == "the keys of data.sources.web are path, weight, epochs, format, field, messages, pairs"
    assert explain_unknown("launch.zzz") == "`meshwright check --keys launch.` lists all keys of launch"
