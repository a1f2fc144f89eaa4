"""Random recipes: the values that are drawn for each key, and the command line of a draw.

A draw is a function of (seed, number, attempt) alone, so fewer draws are the beginning of more, in any process. A recipe that is
refused is drawn again with the next attempt: this table need not know which options go together, only which have a use beside one
another.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from framework.errors import ModelError
from framework.model.load import REFUSALS, load_config
from framework.model.shrink import MIN_LAYERS, shrink
from framework.recipe.overrides import write_value
from framework.recipe.schema import KEPT_OPERATIONS, Model
from framework.verify.prepare import LEAST_EPS

Drawn = dict[str, Any]

# What most people train, and every family of stacked experts that tensor and expert parallelism are asked for.
DENSE = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "gpt_neo", "gptj",
    "opt", "bloom", "falcon", "starcoder2", "stablelm", "cohere", "cohere2", "olmo2", "olmo3", "granite", "glm", "glm4", "mpt",
    "smollm3", "nemotron", "seed_oss", "exaone4",
)  # fmt: skip
MIXTURES = (
    "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss", "glm4_moe",
    "llama4_text", "granitemoe", "minimax_m2", "phimoe", "ernie4_5_moe",
)  # fmt: skip
# Routers that are known to have a correction bias.
WITH_BIAS = ("deepseek_v3", "glm4_moe", "minimax_m2", "ernie4_5_moe")
OTHERS = tuple(sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - {*DENSE, *MIXTURES}))

# Half of the draws train everything. The others freeze what is read at both ends (a tied head with it), small ones, whole layers
# and so whole stages, halves of each layer, experts, routers, and everything but the last layer's weights or the head.
FREEZES: tuple[list[str], ...] = ([],) * 10 + (
    ["embed|wte|wpe"], ["bias|norm|ln"], [r"\.0\."], [r"\.[01]\."], [r"\.[1-9]\d*\."], ["attn|attention"],
    ["mlp|ffn|feed_forward|experts"], ["gate|router"], [r"^(?!.*(\.2\.|head))"], ["^(?!.*(head|embed_out))"],
)  # fmt: skip

MAX_RANKS = 8
# Keeps a step of the oracle, which computes all microbatches of all ranks, below a second.
MAX_MICROBATCHES = 16


def _always(_drawn: Drawn, _value: Any) -> bool:
    return True


@dataclass(frozen=True)
class Choice:
    """Values of one key: of the recipe, of the model's config (`config.KEY`), or `microbatches` of a rank.

    values: equally likely; one that stands twice is twice as likely. None is `null`, and in a config the family's own value.
    fits: whether a value has a use beside those drawn before it. A key without a fitting value is left out.
    """

    key: str
    values: tuple[Any, ...]
    fits: Callable[[Drawn, Any], bool] = _always

    def draw(self, rng: random.Random, drawn: Drawn) -> None:
        """Add a value that fits, if any does."""
        fitting = [value for value in self.values if self.fits(drawn, value)]
        if fitting:
            drawn[self.key] = rng.choice(fitting)


def _offloads_optimizer(drawn: Drawn, value: str) -> bool:
    moves_biases = drawn.get("model.router_bias_rate", 0.0) > 0
    return value == "host" or (drawn.get("memory.offload.optimizer", 0.0) > 0 and not moves_biases)


def _offloads_to_disk(drawn: Drawn, _value: str) -> bool:
    return drawn.get("memory.offload.home") == "disk"


def _may_have_experts(drawn: Drawn, _value: Any = None) -> bool:
    """Whether the family is none of those that are known to be dense: of the others only their models tell."""
    return drawn["model.family"] not in DENSE


def _sends_tokens(drawn: Drawn, value: Any) -> bool:
    return drawn.get("parallel.ep", 1) > 1 and (not value or drawn["parallel.ep"] % value == 0)


def _may_pad(drawn: Drawn, value: Any) -> bool:
    return _sends_tokens(drawn, None) and drawn["model.family"] != "llama4_text"


def _has_halves(drawn: Drawn, value: Any) -> bool:
    return _sends_tokens(drawn, value) and drawn["batch.sequences_per_microbatch"] > 1


def _drops_tokens(drawn: Drawn, _value: Any) -> bool:
    return drawn.get("model.expert_capacity") is not None


def _may_have_bias(drawn: Drawn, value: float) -> bool:
    return _may_have_experts(drawn) and (value == 0 or drawn["model.family"] in WITH_BIAS)


def _fits_experts(drawn: Drawn, value: str) -> bool:
    if value != "auto" and (drawn.get("parallel.ep", 1) > 1 or _drops_tokens(drawn, None)):
        return False  # tokens are sent, and Hugging Face's kernels are not asked
    return _may_have_experts(drawn) and not (value == "grouped_mm" and drawn["precision"] == "fp64")


def _fits_ranks(drawn: Drawn, value: int) -> bool:
    """Whether a degree divides the ranks that the degrees before it leave."""
    return _ranks_left(drawn) % value == 0


def _ranks_left(drawn: Drawn) -> int:
    degrees = [drawn.get(f"parallel.{axis}", 1) for axis in ("tp", "pp", "cp")]
    return max(1, int(drawn["launch.ranks"] // (degrees[0] * degrees[1] * degrees[2])))


def _divides_sequences(drawn: Drawn, value: str | list[int]) -> bool:
    cp: int = drawn.get("parallel.cp", 1)
    return cp > 1 and (isinstance(value, str) or value[0] * value[1] == cp)


def _fits_ep(drawn: Drawn, value: int) -> bool:
    return _may_have_experts(drawn) and drawn["launch.ranks"] // drawn["parallel.pp"] % value == 0


def _fits_expert_tp(drawn: Drawn, value: int | None) -> bool:
    return _may_have_experts(drawn) and value in (None, 1, drawn["parallel.tp"])


def _splits_weights(drawn: Drawn, _value: Any) -> bool:
    return bool(drawn["parallel.tp"] > 1)


def _splits_tokens(drawn: Drawn, _value: Any) -> bool:
    return bool(drawn.get("parallel.sequence", False))


def _may_offload_activations(drawn: Drawn, fraction: float) -> bool:
    return fraction == 0 or (
        drawn["memory.activation_checkpointing"] in ("none", "full") and drawn.get("memory.offload.home") != "disk"
    )


def _has_stages(drawn: Drawn, _value: Any) -> bool:
    return bool(drawn["parallel.pp"] > 1)


def _fits_schedule(drawn: Drawn, value: int | None) -> bool:
    return value is None or (drawn.get("pipeline.schedule") == "interleaved" and value * drawn["parallel.pp"] <= 12)


def _fits_batch(drawn: Drawn, value: int) -> bool:
    least = 2 * drawn["parallel.pp"] if drawn.get("pipeline.schedule") == "dualpipe_v" else 1
    return least <= value and value * _ranks_left(drawn) <= MAX_MICROBATCHES


def _from_stage(stage: int) -> Callable[[Drawn, Any], bool]:
    return lambda drawn, value: drawn["zero.stage"] >= stage


def _fits_shards(drawn: Drawn, value: int | None) -> bool:
    batch = _ranks_left(drawn) * drawn["parallel.cp"]
    return drawn["zero.stage"] > 0 and (value is None or batch % value == 0)


def _has_replicas(drawn: Drawn, _value: Any) -> bool:
    return drawn.get("zero.shard_within") is not None


def _has_moments(drawn: Drawn, value: str) -> bool:
    if drawn["optim.name"] == "sgd" and drawn.get("optim.momentum") == 0.0:
        return value == "fp32"
    if value != "fp32" and _offloads_to_disk(drawn, ""):
        return False  # few bits are kept in memory
    return value != "int8" or drawn["optim.name"] != "lion"


def _fits_compute(drawn: Drawn, value: str) -> bool:
    # Rounding in 16 bits decides most of Lion's signs, and the bounds of moments in few bits are those of fp32.
    is_verifiable = drawn["optim.name"] != "lion" and drawn.get("precision.moments", "fp32") == "fp32"
    return drawn["precision"] == "fp32" and (value == "fp32" or is_verifiable)


def _computes_in(dtype: str) -> Callable[[Drawn, Any], bool]:
    return lambda drawn, value: drawn.get("precision.compute") == dtype


def _is_optimizer(*names: str) -> Callable[[Drawn, Any], bool]:
    return lambda drawn, value: drawn["optim.name"] in names


def _may_be_frozen(drawn: Drawn, value: str) -> bool:
    is_frozen = bool(drawn["model.freeze"]) or drawn.get("model.router_bias_rate", 0.0) > 0
    return value == "none" or not (is_frozen or drawn.get("precision.compute") == "fp8")


def _has_adapter(drawn: Drawn, _value: Any) -> bool:
    return bool(drawn["adapter.kind"] != "none")


def _fits_targets(drawn: Drawn, value: list[str]) -> bool:
    return _has_adapter(drawn, value) and (
        value == ["all-linear"] or (drawn["adapter.kind"] == "lora" and _may_have_experts(drawn))
    )


def _keeps_operations(drawn: Drawn, _value: Any) -> bool:
    return drawn["memory.activation_checkpointing"] == "selective"


# Everything that is drawn, in this order.
CHOICES = (
    Choice("model.family", DENSE * 4 + MIXTURES * 8 + OTHERS),
    Choice("precision", ("fp32", "fp64")),
    Choice("train.seed", tuple(range(10))),
    Choice("train.steps", (5, 50)),
    Choice("config.vocab_size", (None, 96, 97, 101)),
    Choice("config.tie_word_embeddings", (None, True, False)),
    Choice("config.output_router_logits", (None, True), _may_have_experts),
    Choice("model.attention", ("auto", "auto", "eager", "sdpa")),
    Choice("model.freeze", FREEZES),
    Choice("launch.ranks", (1, 2, 2, 3, 4, 4, 4, 4, 5, 6, 6, 7, 8, 8, 8, 8)),
    Choice("parallel.tp", (1, 1, 1, 2, 2, 2, 3, 4, 4, 5, 7, 8), _fits_ranks),
    Choice("parallel.pp", (1, 1, 2, 2, 2, 3, 4, 4, 8), _fits_ranks),
    Choice("parallel.cp", (1, 1, 1, 1, 2, 2, 4, 4), _fits_ranks),
    Choice("parallel.context", ("ring", "ring", "ulysses", "gather", [2, 1], [2, 2], [2, 2]), _divides_sequences),
    Choice("parallel.ep", (1, 1, 1, 2, 4), _fits_ep),
    Choice("parallel.expert_tp", (None, 1, 2, 4), _fits_expert_tp),
    Choice("parallel.expert_hierarchical", (None, None, 2), _sends_tokens),
    Choice("parallel.expert_padding", (None, None, 4.0), _may_pad),
    Choice("model.expert_capacity", (None, None, None, 1.0, 1.25), _may_have_experts),
    Choice("model.expert_drop", ("weight", "position"), _drops_tokens),
    Choice("model.router_bias_rate", (0.0, 0.0, 0.05), _may_have_bias),
    Choice("model.experts", ("auto", "eager", "batched_mm", "grouped_mm"), _fits_experts),
    Choice("parallel.sequence", (True, True, False), _splits_weights),
    Choice("parallel.overlap", ("auto", "always"), _splits_tokens),
    Choice("memory.gathered_inputs", ("keep", "regather"), _splits_tokens),
    Choice("pipeline.schedule", ("gpipe", "1f1b", "interleaved", "zb_h1", "zbv", "dualpipe_v"), _has_stages),
    Choice("pipeline.virtual_stages", (None, 2, 3), _fits_schedule),
    Choice("batch.sequences_per_microbatch", (1, 2, 3)),
    Choice("parallel.expert_overlap", (False, True), _has_halves),
    Choice("microbatches", (1, 1, 2, 2, 3, 4, 6, 8, 16), _fits_batch),
    Choice("batch.context", (2, 3, 5, 8, 9, 13, 16, 17)),
    Choice("data.pack", ("concat", "concat", "documents")),
    Choice("zero.stage", (0, 1, 2, 3, 3)),
    Choice("zero.shard_within", (None, 1, 2, 2, 3, 4), _fits_shards),
    Choice("zero.optimizer_within", ("shard", "all"), _has_replicas),
    Choice("zero.accumulate", ("sharded", "local"), _from_stage(2)),
    Choice("zero.keep_gathered", (False, True), _from_stage(3)),
    Choice("zero.prefetch_units", (0, 1, 2, 3)),
    Choice("memory.activation_checkpointing", ("none", "none", "selective", "full", "sqrt")),
    Choice("memory.kept_operations", (list(KEPT_OPERATIONS), ["attention"]), _keeps_operations),
    Choice("memory.chunked_loss", (False, True)),
    Choice("memory.offload.optimizer", (0.0, 0.0, 0.5, 1.0)),
    Choice("memory.offload.home", ("host", "disk"), _offloads_optimizer),
    Choice("memory.offload.disk_path", (".",), _offloads_to_disk),
    Choice("memory.offload.activations", (0.0, 0.0, 0.5, 1.0), _may_offload_activations),
    Choice("memory.offload.parameters", (0.0, 0.5, 1.0), _from_stage(3)),
    Choice("optim.name", ("adamw", "adamw", "lion", "sgd")),
    Choice("optim.lr", (1e-3, 1e-2)),
    Choice("optim.betas", ([0.9, 0.95], [0.8, 0.99]), _is_optimizer("adamw", "lion")),
    Choice("optim.momentum", (0.0, 0.9), _is_optimizer("sgd")),
    Choice("optim.weight_decay", (0.0, 0.3)),
    Choice("optim.clip_norm", (None, 1e-3, 1.0)),
    Choice("optim.groups", ({}, {}, {"slow": {"pattern": "bias|norm|ln", "lr_ratio": 0.3}})),
    Choice("optim.schedule.name", ("constant", "linear", "cosine", "wsd")),
    Choice("optim.schedule.warmup_steps", (0, 1)),
    Choice("precision.moments", ("fp32", "fp32", "bf16", "int8"), _has_moments),
    Choice("precision.compute", ("fp32",) * 9 + ("bf16", "fp16", "fp8"), _fits_compute),
    Choice("precision.master", ("fp32", "none"), _computes_in("bf16")),
    Choice("precision.loss_scale", (None, "dynamic", 1024.0), _computes_in("fp16")),
    Choice("precision.fp8_scaling", ("tensor", "row"), _computes_in("fp8")),
    Choice("adapter.kind", ("none",) * 8 + ("lora", "dora"), _may_be_frozen),
    Choice("adapter.rank", (1, 2, 3, 8), _has_adapter),
    Choice("adapter.alpha", (1.0, 5.0, 32.0), _has_adapter),
    Choice("adapter.rank_stabilized", (False, True), _has_adapter),
    Choice("adapter.base", ("bf16", "bf16", "fp8", "nf4", "nf4"), _has_adapter),
    Choice("adapter.b_lr_ratio", (1.0, 4.0), _has_adapter),
    Choice("adapter.train", ([], [], [], ["lm_head"], ["embed_tokens"], ["norm"]), _has_adapter),
    Choice("adapter.targets", (["all-linear"], ["experts"], ["all-linear", "experts"]), _fits_targets),
)


def draw(seed: int, number: int, attempt: int, given: Mapping[str, Any]) -> Drawn:
    """The values of one draw by key, in the table's order. given: values that are not drawn."""
    rng = random.Random(f"{seed}/{number}/{attempt}")  # a text is hashed by SHA-512, alike in all processes
    drawn: Drawn = {}
    for choice in CHOICES:
        choice.draw(rng, drawn)
        if choice.key in given:
            drawn[choice.key] = given[choice.key]
    return drawn


def write(drawn: Drawn) -> list[str]:
    """The overrides of a recipe that has the drawn values and no others of a model's. Raises ModelError where the family has no
    small copy."""
    values = {
        key: value
        for key, value in drawn.items()
        if not key.startswith("config.") and key not in ("model.family", "precision", "microbatches")
    }
    values["batch.sequences_per_step"] = (
        drawn["batch.sequences_per_microbatch"] * drawn["microbatches"] * _ranks_left(drawn)
    )
    if drawn["optim.name"] == "adamw" and drawn["precision"] != "fp64":
        values["optim.eps"] = LEAST_EPS
    model = [f"model.family={drawn['model.family']}", f"model.config={write_value(_describe_config(drawn))}"]
    # Without `~model` the tiny Llama's values would stay beside them, and its tokenizer goes with it.
    return [
        "~model",
        *model,
        "data.bpe_vocab=512",
        f"precision={drawn['precision']}",
        *(f"{key}={write_value(value)}" for key, value in values.items() if value not in ([], {})),
    ]


def _describe_config(drawn: Drawn) -> dict[str, Any]:
    """The values of a small config of the family that are not the family's own, and those that are drawn."""
    stages = drawn["parallel.pp"] * _count_virtual_stages(drawn)
    try:
        full = load_config(Model(family=drawn["model.family"]))
        small = shrink(full, max(MIN_LAYERS, stages)).to_dict()
    except REFUSALS as error:
        raise ModelError(f"the default config has no small copy: {error}") from error
    wanted = {
        key.removeprefix("config."): value
        for key, value in drawn.items()
        if key.startswith("config.") and value is not None
    }
    if "vocab_size" in wanted:  # all sizes of it, as a small copy has them: logits are as many as there are token ids
        wanted |= {key: wanted["vocab_size"] for key in small if "vocab_size" in key}
    small |= {key: value for key, value in wanted.items() if key in small}
    changes = dict(_find_changes(full, small))
    if full.get_text_config() is not full or changes.keys() & full.sub_configs.keys():
        raise ModelError("it is made of several models: its text model may be a family of its own")
    return changes


def _find_changes(full: PretrainedConfig, small: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    before = full.to_dict()
    for key, value in small.items():
        if key not in before or before[key] != value:
            yield key, value


def _count_virtual_stages(drawn: Drawn) -> int:
    twice = drawn.get("pipeline.schedule") in ("interleaved", "zbv", "dualpipe_v")
    return drawn.get("pipeline.virtual_stages") or (2 if twice else 1)
