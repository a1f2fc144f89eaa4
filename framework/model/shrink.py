"""A small copy of any Hugging Face causal language model: same family, same kinds of layers, same ratios, odd sizes.

Verification on CPU needs a model that takes every code path of the real one and costs nothing. Heads become few, and two
scales carry over what a config expresses as sums and products of sizes (nope + rope = query dims, expand * hidden = inner):

    head_scale = head_dim' / head_dim      width_scale = hidden' / hidden      hidden' : heads' * head_dim' as before

What a value measures is read off its name: Hugging Face's names are many, but they follow few patterns.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from framework.errors import ModelError

Values = dict[str, Any]

POSITIONS = 256
WINDOW = 8
VOCABULARY = 96
STATE = 8
MIN_LAYERS = 3
MAX_EXPERTS = 8
MAX_HEAD_RATIO = 8
TARGET_HIDDEN = 64

# Names that configs share through `attribute_map`, and values that are no property of the model.
COMMON_NAMES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim", "max_position_embeddings")
NOT_OF_THE_MODEL = ("id2label", "label2id", "transformers_version", "model_type", "_name_or_path", "auto_map",
                    "quantization_config")  # fmt: skip

# Query heads and their key-value heads: the ratio is kept.
HEAD_PAIRS = (
    ("num_attention_heads", "num_key_value_heads"),
    ("num_attention_heads", "num_kv_heads"),
    ("swa_num_attention_heads", "swa_num_key_value_heads"),
    ("linear_num_value_heads", "linear_num_key_heads"),
)
# Heads of state-space layers and their width: the product stays a multiple of the hidden size.
STATE_HEADS = (
    ("mamba_n_heads", "mamba_d_head"),
    ("mamba_num_heads", "mamba_head_dim"),
    ("n_mamba_heads", "mamba_headdim"),
    ("num_heads", "head_dim"),
)
EXPANSIONS = {"expand", "mamba_expand"}

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")
EXPERT_GROUPS = ("n_group", "num_expert_group")

# Config names that say which layers are of another kind, where it does not list all layers.
LEADING_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
LAYER_INDICES = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "cross_attention_layers", "hybrid_layer_ids")
LAYER_PERIODS = (("attn_layer_period", "attn_layer_offset"), ("expert_layer_period", "expert_layer_offset"))

POSITION_COUNTS = r"max_position_embeddings|n_positions|n_ctx|max_seq_len|context_length|max_(source|target)_positions"
LAYER_COUNTS = (
    r"num_hidden_layers|n_layers?|num_layers(_per_stack)?|(num_)?(en|de)coder_layers|num_blocks|max_window_layers"
)
TOKENS = r".*_token_(id|index)|(pad|bos|eos|unk|mask)_index"


@dataclass(frozen=True)
class Sizes:
    """The numbers from which the small model's values follow. positions: the original's; layers: indices of the layers kept."""

    head_scale: Fraction
    width_scale: Fraction
    positions: int
    vocabulary: int
    layers: tuple[int, ...]


def shrink(config: PretrainedConfig, least_layers: int = MIN_LAYERS) -> PretrainedConfig:
    """A config of about a million parameters or fewer that takes the same code paths as `config`.

    Kept: family, ties, rope, query heads per key-value head (at most 8), widths relative to the hidden size, one layer of
    each kind at least, fewer experts per token than experts, whether sizes are odd. Dropout and noise of routers are off,
    special tokens lie inside the vocabulary, windows are 8 or 9 tokens wide. Sequences have at most 256 tokens.
    It has least_layers layers or more, if the original has. Raises ModelError where no small sizes are found.
    """
    small = _shrink(config, _choose_sizes(_values(config.get_text_config()), least_layers), least_layers)
    # Chosen for soft caps. A model that has been built names the attention that was chosen for it.
    small._attn_implementation = "eager" if config._attn_implementation == "eager" else None
    return small


def _shrink(config: PretrainedConfig, sizes: Sizes, least_layers: int) -> PretrainedConfig:
    values = _values(config)
    if "hidden_size" in values:
        sizes = _choose_sizes(values, least_layers)
    small = {name: _shrink_value(name, value, sizes) for name, value in values.items()}
    small |= _shrink_heads(values) | _shrink_state_heads(values, sizes) | _shrink_experts(values)
    small |= _shrink_layers(values, sizes) | _shrink_rope(values, sizes)
    for name in config.sub_configs:
        part = getattr(config, name, None)
        small[name] = _shrink(part, sizes, least_layers) if isinstance(part, PretrainedConfig) else part
    own_names = config.attribute_map
    try:
        return type(config)(**{own_names.get(name, name): value for name, value in small.items()})
    except (ValueError, StrictDataclassError) as error:
        raise ModelError(
            f"no small {config.model_type} model was found; its config refuses the sizes tried: {error}"
        ) from error


def _values(config: PretrainedConfig) -> Values:
    """The config's values under Hugging Face's common names: hidden_size, not n_embd."""
    common = {config.attribute_map[name]: name for name in COMMON_NAMES if name in config.attribute_map}
    return {common.get(name, name): value for name, value in config.to_dict().items() if name not in NOT_OF_THE_MODEL}


def _choose_sizes(values: Values, least_layers: int) -> Sizes:
    hidden, vocabulary = values.get("hidden_size", TARGET_HIDDEN), values.get("vocab_size") or 0
    hidden_small, head_scale = _choose_widths(values, hidden, min(TARGET_HIDDEN, hidden))
    positions = [value for name, value in values.items() if re.fullmatch(POSITION_COUNTS, name) and value]
    return Sizes(
        head_scale=head_scale,
        width_scale=Fraction(hidden_small, hidden),
        positions=max(positions, default=POSITIONS),
        vocabulary=min(vocabulary or VOCABULARY, VOCABULARY + vocabulary % 4),
        layers=_choose_layers(values, least_layers),
    )


def _choose_widths(values: Values, hidden: int, target: int) -> tuple[int, Fraction]:
    """The hidden size nearest to `target` that some small head width leads to, and that width over the original's.

    It is a multiple of 8, because PyTorch's grouped products want rows of 16 bytes, and of the heads if it was one.
    """
    heads = values.get("num_attention_heads")
    if not heads:
        return target, Fraction(target, hidden)
    heads_small = _shrink_heads(values).get("num_attention_heads", _few(heads))
    head_dim = values.get("v_head_dim") or values.get("head_dim") or hidden // heads
    multiple = lcm(8, heads_small) if hidden % heads == 0 else 8
    choices = []
    for scale in (Fraction(small, head_dim) for small in {4, 8, 16, 32, 64, min(head_dim, TARGET_HIDDEN)}):
        exact = Fraction(hidden, heads) * heads_small * scale
        rounded = max(round(exact / multiple), 1) * multiple
        is_product = hidden == heads * head_dim  # then some families derive the head width, so it has to stay exact
        if _rotates(values, scale) and (rounded == exact or not is_product):
            choices.append((rounded, scale))
    if not choices:
        raise ModelError(f"no small model has the proportions of {heads} heads of {head_dim}, hidden {hidden}")
    return min(choices, key=lambda choice: abs(choice[0] - target))


def _rotates(values: Values, head_scale: Fraction) -> bool:
    """Whether heads of this scale have an even number of rotated dims, enough for each section of a multi-axis rope."""
    own = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    separate = values.get("qk_rope_head_dim")
    for rope in _ropes(values):
        share = rope["partial_rotary_factor"]
        rotated = (separate if separate and share == 1 else own) * head_scale
        if int(rotated * share) < 2 * len(rope.get("mrope_section") or [1]) or int(rotated * share) % 2:
            return False
    return separate is None or separate * head_scale >= 2


def _shrink_value(name: str, value: Any, sizes: Sizes) -> Any:
    """The small model's value of a key, which follows from what its name says that it measures; other values stay."""
    if isinstance(value, list):
        return [_shrink_value(name, entry, sizes) for entry in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        return value
    rule = next((rule for pattern, rule in RULES.items() if re.fullmatch(pattern, name)), None)
    return value if rule is None else rule(value, sizes)


def _few(value: int) -> int:
    """A count of heads: 4, 2, 3 or 1, which divides by 2 and 4 as the original does."""
    return 4 if value % 4 == 0 else 2 if value % 2 == 0 else min(value, 3)


def _width(value: int, sizes: Sizes) -> int:
    """A width in proportion to the hidden size; a multiple of 8 stays one (see `_shrink_hidden`), odd stays odd."""
    exact, odd = value * sizes.width_scale, value % 2
    return max(round(exact / 8), 1) * 8 if value % 8 == 0 else max(round((exact - odd) / 2), 1) * 2 + odd


def _head_width(value: int, sizes: Sizes) -> int:
    return max(round(value * sizes.head_scale / 2), 1) * 2


def _rank(value: int, sizes: Sizes) -> int:
    return max(round(value * sizes.width_scale / 2), 2) * 2


def _original_positions(value: int, sizes: Sizes) -> int:
    """The positions before a rope was stretched; the factor of the stretch stays."""
    return value if sizes.positions <= POSITIONS else max(value * POSITIONS // sizes.positions, 4)


def _window(value: int, sizes: Sizes) -> int:
    """A window shorter than a sequence, unless the original is longer than any sequence."""
    return value if value >= sizes.positions else min(value, WINDOW + value % 2)


# Replacements of config values, by name; the first pattern that matches a whole name decides.
RULES: dict[str, Callable[[Any, Sizes], Any]] = {
    r".*(dropout|pdrop|layerdrop|jitter_noise).*": lambda value, sizes: type(value)(0),
    r".*vocab_size.*": lambda value, sizes: sizes.vocabulary,
    TOKENS: lambda value, sizes: value % sizes.vocabulary,
    POSITION_COUNTS: lambda value, sizes: min(value, POSITIONS),
    r"original_max_position_embeddings": _original_positions,
    LAYER_COUNTS: lambda value, sizes: min(value, len(sizes.layers)),
    r".*head_?dim|(.*_)?d_head|dim_head|kv_channels|rotary_dim|query_pre_attn_scalar|d_rel": _head_width,
    r".*heads?|num_query_groups": lambda value, sizes: _few(value),
    r".*_rank": _rank,
    r".*(hidden|intermediate|embedding|ffn|proj|embed|mid)_(size|dim).*|[dn]_inner|d_?ff|dim_ff": _width,
    r"d_model|lru_width|.*d_ssm|dim_model_base": _width,
    r"sliding_window(_size)?|.*window_size|attention_chunk_size|local_attention|index_topk": _window,
    r"(mamba_)?chunk_size|(index_)?block_size": lambda value, sizes: min(value, WINDOW),
    r"index_topk_blocks": lambda value, sizes: min(value, 2),
    r".*d_state|.*state_size": lambda value, sizes: min(value, STATE),
    r"(mamba_)?n_?groups|o_groups": lambda value, sizes: min(value, 2),
}


def _shrink_heads(values: Values) -> Values:
    """The numbers of query and key-value heads, which keep their ratio."""
    small: Values = {}
    for name, name_kv in HEAD_PAIRS:
        heads, heads_kv = values.get(name), values.get(name_kv)
        if heads and heads_kv and heads % heads_kv == 0:
            ratio = heads // heads_kv
            kept_ratio = ratio if ratio <= MAX_HEAD_RATIO else MAX_HEAD_RATIO - ratio % 2
            small |= {name_kv: _few(heads_kv), name: _few(heads_kv) * kept_ratio}
    return small


def _shrink_state_heads(values: Values, sizes: Sizes) -> Values:
    """The heads of state-space layers and their width, so that the product fits."""
    small: Values = {}
    for name, name_width in STATE_HEADS:
        if values.get(name) and values.get(name_width) and values.keys() & EXPANSIONS:
            heads = _few(values[name])
            small |= {name: heads, name_width: int(values[name] * values[name_width] * sizes.width_scale) // heads}
    return small


def _shrink_experts(values: Values) -> Values:
    """The numbers of experts: at most 8, a divisor of the original number if there is one; at most half of them per token."""
    found = [name for name in EXPERTS if values.get(name)]
    if not found:
        return {}
    full = values[found[0]]
    divisors = [count for count in range(MAX_EXPERTS // 2, MAX_EXPERTS + 1) if full % count == 0]
    experts = full if full <= MAX_EXPERTS else max(divisors, default=MAX_EXPERTS - 3)
    small: Values = dict.fromkeys(found, experts)
    if values.get("zero_expert_num"):
        small["zero_expert_num"] = max(values["zero_expert_num"] * experts // full, 1)
    most = max(experts // 2, 1)
    for name in EXPERT_GROUPS:
        if (groups := values.get(name) or 1) > 1 and values.get("topk_group"):
            kept = max(count for count in range(1, most + 1) if experts % count == 0 and count <= groups)
            small |= {name: kept, "topk_group": max(kept * values["topk_group"] // groups, 1)}
            most = min(most, small["topk_group"] * experts // kept)
    return small | {name: min(values[name], most) for name in EXPERTS_PER_TOKEN if values.get(name)}


def _choose_layers(values: Values, least: int) -> tuple[int, ...]:
    """The first layer of each kind, and more of the most frequent kind: at least `least`, and one more than kinds."""
    count = _count_layers(values)
    columns = _per_layer(values, count)
    if not columns and any(values.get(period) for period, _ in LAYER_PERIODS):
        return tuple(range(min(count, max(4, least))))
    kinds = [tuple(repr(column[index]) for column in columns.values()) for index in range(count)]
    # One of each kind; two of hybrid layers, because zamba ties the weights of all of them.
    kept = [index for index, kind in enumerate(kinds) if kinds[:index].count(kind) < (2 if "'hybrid'" in kind else 1)]
    frequency = Counter(kinds)
    others = sorted(set(range(count)) - set(kept), key=lambda index: (-frequency[kinds[index]], index))
    wanted = max(least, len(kept) + (len(frequency) > 1))
    return tuple(sorted(kept + others[: wanted - len(kept)]))


def _count_layers(values: Values) -> int:
    stated = next((value for name, value in values.items() if re.fullmatch(LAYER_COUNTS, name) and value), None)
    return stated or len(values.get("layer_types") or values.get("layers_block_type") or ())


def _per_layer(values: Values, count: int) -> dict[str, list[Any]]:
    """The config's statements about each layer, a column for each of them."""
    columns = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == count > 2}
    for name in LEADING_LAYERS:
        if values.get(name):
            columns[name] = [index < values[name] for index in range(count)]
    for name in LAYER_INDICES:
        if values.get(name):
            columns[name] = [index in values[name] for index in range(count)]
    if values.get("num_kv_shared_layers"):
        columns["num_kv_shared_layers"] = [index >= count - values["num_kv_shared_layers"] for index in range(count)]
    if (step := values.get("decoder_sparse_step") or 1) > 1:
        dense = values.get("mlp_only_layers") or []
        columns["mlp_only_layers"] = [index in dense or (index + 1) % step > 0 for index in range(count)]
    if isinstance(overrides := values.get("per_layer_config"), dict):
        by_index = {int(index): own for index, own in overrides.items()}  # with as many digits as the last layer has
        columns["per_layer_config"] = [by_index.get(index) for index in range(count)]
    return columns


def _shrink_layers(values: Values, sizes: Sizes) -> Values:
    """The config's statements about each layer, restricted to the layers that are kept."""
    columns = _per_layer(values, _count_layers(values))
    small: Values = {}
    for name, column in columns.items():
        kept = [column[index] for index in sizes.layers]
        if name in LEADING_LAYERS or name == "num_kv_shared_layers":
            small[name] = sum(kept)
        elif name in LAYER_INDICES:
            small[name] = [index for index, inside in enumerate(kept) if inside]
        elif name == "per_layer_config":
            small[name] = {
                f"{index:02d}": {key: _shrink_value(key, value, sizes) for key, value in own.items()}
                for index, own in enumerate(kept)
                if own
            }
        else:
            small[name] = _shrink_value(name, kept, sizes)
    if "attention_layers" in small:  # gpt_neo states them twice
        small["attention_types"] = [[small["attention_layers"], 1]]
    if values.get("decoder_sparse_step"):
        small["decoder_sparse_step"] = 1  # mlp_only_layers says it all
    if values.get("moe_layer_end_index"):
        small["moe_layer_end_index"] = len(sizes.layers) - 1
    for period, offset in LAYER_PERIODS:
        if values.get(period):
            kept_period = min(values[period], 4)
            small |= {period: kept_period, offset: values[offset] * kept_period // values[period]}
    return small


def _ropes(values: Values) -> list[Values]:
    """The rope of the model, or those of its kinds of layers, with an older name of the rotated share filled in."""
    rope = values.get("rope_parameters") or {}
    by_kind = [part for part in rope.values() if isinstance(part, dict)]
    share = values.get("partial_rotary_factor") or values.get("rotary_pct") or 1.0
    return [{"partial_rotary_factor": share, **part} for part in by_kind or [rope]]


def _shrink_rope(values: Values, sizes: Sizes) -> Values:
    """The rope over fewer dims and positions: its factors and sections, which count pairs of rotated dims, become fewer."""
    rope = values.get("rope_parameters")
    if not rope:
        return {}
    by_kind = {kind: _shrink_one_rope(part, sizes) for kind, part in rope.items() if isinstance(part, dict)}
    return {"rope_parameters": rope | by_kind if by_kind else _shrink_one_rope(rope, sizes)}


def _shrink_one_rope(rope: Values, sizes: Sizes) -> Values:
    small = {name: _shrink_value(name, value, sizes) for name, value in rope.items()}
    for name in ("short_factor", "long_factor"):
        if factors := rope.get(name):
            pairs = int(len(factors) * sizes.head_scale)
            small[name] = [factors[pair * len(factors) // pairs] for pair in range(pairs)]
    if sections := rope.get("mrope_section"):
        kept = [max(int(section * sizes.head_scale), 1) for section in sections[:-1]]
        small["mrope_section"] = [*kept, int(sum(sections) * sizes.head_scale) - sum(kept)]
    return small
