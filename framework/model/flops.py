"""Model FLOPs per token, counted from shapes and the config, after PaLM (Chowdhery et al. 2022, appendix B).

    flops per token = 6 N + 6 sum over layers of heads (d_qk + d_v) reach + 6 sum over delta rules of 3 heads d_qk d_v

N: weights that a token is multiplied with, forward once and backward twice, two FLOPs each. reach: tokens that a query may
see, the whole context or the layer's window; as in PaLM the causal half is not taken off. With d_qk = d_v = d it is
PaLM's 6 N + 12 L H d T. A delta rule reads its state twice and writes it once, whatever the context. Recomputation does no
useful work and is not counted.

The FLOPs of each unit are the costs by which a pipeline splits the model.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, cycle

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.model.adapters import is_adapter
from framework.model.experts import count_experts, find_all_experts
from framework.model.load import layer_configs
from framework.model.shrink import EXPERTS_PER_TOKEN
from framework.model.units import Unit, count_state, find_mixers

# Kinds of attention to the tokens nearby, and where configs have how many.
LOCAL_ATTENTIONS = {
    **dict.fromkeys(("sliding_attention", "hybrid_sliding"), "sliding_window"),
    "chunked_attention": "attention_chunk_size",
}
# Kinds of layers without attention. All others attend, also where an indexer chooses keys: all tiles are computed.
NO_ATTENTION = ("linear_attention", "conv", "moe", "mlp")


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters, tied ones counted once.

    active: active parameters per token: of stacked experts, as many as a token is sent to. multiplied: the active ones that are
    in matmuls; rows of an embedding are looked up, which costs no FLOPs. adapters: those of the multiplied ones that are an
    adapter's, beside which the others are frozen.
    """

    total: int
    active: int
    multiplied: int
    adapters: int = 0


def measure_model(model: PreTrainedModel) -> ModelSize:
    """The parameters of a model, which may be on meta. Of stacked experts [E, ...], (experts per token) / E are active."""
    top_k, stacked = experts_per_token(model.config.get_text_config()), _find_stacked(model)
    head = model.get_output_embeddings()
    head_weight = getattr(head, "weight", None)
    lookups = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)} - {id(head_weight)}
    total = active = multiplied = adapters = 0
    for name, parameter in model.named_parameters():
        count = parameter.numel()
        total += count
        if top_k and id(parameter) in stacked:
            count = count * top_k // stacked[id(parameter)]
        active += count
        multiplied += 0 if id(parameter) in lookups else count
        adapters += count if is_adapter(name) else 0
    return ModelSize(total, active, multiplied, adapters)


def _find_stacked(model: PreTrainedModel) -> dict[int, int]:
    """The number of experts by the id of each weight and bias that has one part per expert."""
    found = find_all_experts(model)
    counted = [(each, count_experts(experts)) for _, experts, _ in found for each in experts.parameters()]
    return {id(each): count for each, count in counted if each.ndim > 1 and each.shape[0] % count == 0}


def flops_per_token(
    model: PreTrainedModel, context: int, units: Sequence[Unit] = (), trained: Collection[str] | None = None
) -> float:
    """Training FLOPs per token, forward and backward, with sequences of `context` tokens. trained: names of these units' trained
    parameters; None: all."""
    if trained is None or all(name in trained for name, _ in model.named_parameters()):
        states = sum(count_state(mixer) for _, mixer in find_mixers(model))
        attention = sum(attended(model.config.get_text_config(), context))
        return 6.0 * measure_model(model).multiplied + 6.0 * (attention + states)
    forward, found = unit_flops(model, units, context), find_trained(model, units, trained)
    # A frozen weight has no gradient, two FLOPs fewer; below the first trained unit there is no backward.
    frozen = _unit_weights(model, units, {id(model.get_parameter(name)) for name in trained})
    return sum(flops + (2 * flops - 2.0 * frozen[name] if found[name][1] else 0.0) for name, flops in forward.items())


def find_trained(
    model: PreTrainedModel, units: Sequence[Unit], trained: Collection[str]
) -> dict[str, tuple[float, bool]]:
    """(trained share of its parameters, does a backward come to it) of each unit, by name. Autograd goes no further back than the
    first unit with a trained parameter."""
    found, has_backward, ids = {}, False, {id(model.get_parameter(name)) for name in trained}
    head = model.get_output_embeddings()
    for unit in units:
        own = [model.get_parameter(name) for name in unit.parameters]
        # A tied weight is the embedding's, and multiplied in the head.
        own += list(head.parameters()) if unit.name == "head" and head is not None else []
        numel, of_trained = (sum(each.numel() for each in part) for part in (own, [x for x in own if id(x) in ids]))
        has_backward = has_backward or of_trained > 0
        found[unit.name] = (of_trained / numel if numel else 1.0, has_backward)
    return found


def unit_flops(model: PreTrainedModel, units: Sequence[Unit], context: int) -> dict[str, float]:
    """Forward FLOPs per token of each unit, by name: two for each weight in a matmul, and those of its attention."""
    of_layers, weights = iter(attended(model.config.get_text_config(), context)), _unit_weights(model, units)
    found = {}
    for unit in units:
        states = sum(count_state(model.get_submodule(path)) for path in unit.modules)
        found[unit.name] = 2.0 * (weights[unit.name] + states + (next(of_layers) if unit.is_layer else 0))
    return found


def _unit_weights(
    model: PreTrainedModel, units: Sequence[Unit], without: Collection[int] = frozenset()
) -> dict[str, int]:
    """Weights in a token's matmuls of each unit, by name; of stacked experts, those of one token. without: ids of parameters that
    do not count."""
    stacked, chosen = _find_stacked(model), experts_per_token(model.config.get_text_config())
    head, found = model.get_output_embeddings(), dict.fromkeys([unit.name for unit in units], 0)
    for unit in units:
        modules = [each for each in map(model.get_submodule, unit.modules) if each is not head]
        for parameter in chain.from_iterable(
            each.parameters(recurse=False) for each in modules if not isinstance(each, nn.Embedding)
        ):
            count = parameter.numel() * (id(parameter) not in without)
            experts = stacked.get(id(parameter)) if chosen else None
            found[unit.name] += count * (chosen or 1) // experts if experts else count
    # A tied weight belongs to the embedding's unit, but its matmul is in the head.
    if head is not None:
        found["head"] += sum(each.numel() for each in head.parameters() if id(each) not in without)
    return found


def attended(config: PretrainedConfig, context: int) -> list[int]:
    """The multiplications of a token's attention, by layer: heads (d_qk + d_v) for each token that it sees."""
    reaches = attention_reach(config, context)
    widths = [attention_width(layer) for layer in layer_configs(config)]
    return [width * reach for width, reach in zip(cycle(widths), reaches, strict=False)]


def attention_width(config: PretrainedConfig) -> int:
    """The product heads (d_qk + d_v) of a layer; 0 for models without attention."""
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        return 0
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention
        return heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim)
    return heads * 2 * head_dim


def attention_reach(config: PretrainedConfig, context: int) -> list[int]:
    """The number of tokens that a query sees, by layer; 0 for linear attention and state-space layers."""
    reaches = {kind: min(reach, context) for kind, reach in _local_reaches(config).items()}
    return [0 if kind in NO_ATTENTION else reaches.get(kind, context) for kind in _layer_types(config)]


def attention_masks(config: PretrainedConfig, context: int, packs: bool) -> tuple[str | None, ...]:
    """The mask that each layer's attention is given by a model that computes with SDPA, by the kind of its attention; None where
    it is given none, because it is causal and nothing else. packs: documents are kept apart."""
    reaches = _local_reaches(config)
    # A window as long as the context gets a mask as well, which masks nothing more.
    return tuple(
        kind if reach and (packs or reaches.get(kind, context + 1) <= context) else None
        for kind, reach in zip(_layer_types(config), attention_reach(config, context), strict=True)
    )


def _layer_types(config: PretrainedConfig) -> list[str]:
    layer_types: list[str] | None = getattr(config, "layer_types", None)
    if layer_types is not None:
        return layer_types
    is_windowed = bool(_local_reaches(config).get("sliding_attention")) and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if is_windowed else "full_attention"] * config.num_hidden_layers


def _local_reaches(config: PretrainedConfig) -> dict[str, int]:
    """Tokens that a query sees at the most, by kind of attention."""
    found = {kind: getattr(config, key, None) for kind, key in LOCAL_ATTENTIONS.items()}
    return {kind: reach for kind, reach in found.items() if reach}


def experts_per_token(config: PretrainedConfig) -> int | None:
    """The number of experts that a token is sent to; None for a dense model."""
    # dbrx has them in a config of their own.
    holders = (config, getattr(config, "ffn_config", None))
    counts = (getattr(each, key, None) for each in holders for key in EXPERTS_PER_TOKEN)
    return next((count for count in counts if count), None)


def expert_groups(config: PretrainedConfig) -> tuple[int, int]:
    """(groups of experts, those of them to which a token is limited); (1, 1) where its router knows none."""
    groups, kept = getattr(config, "n_group", None) or 1, getattr(config, "topk_group", None) or 1
    return (groups, kept) if kept < groups else (1, 1)
