"""Forms of a decoder layer, the input of forecasts: its widths, its mixture of experts, its attention and the mask of that,
and the bytes that its recurrent mixer keeps for backward.

A mixer is counted: it computes once on meta, by the functions that ranks use, all of which (chunks, triangular systems, scans
over states) a closed form would have to follow. Of T tokens on t ranks of tp each keeps the mixer's input, T h e, and 1/t of
all else. Beside the mixer a layer keeps T' h (4 + e) for its norm and its mlp if it has one, by the estimate of
`activations`.
"""

from copy import deepcopy
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PretrainedConfig, PreTrainedModel

from framework.mesh.token_layout import ContextSlices
from framework.model.experts import Router, count_experts, find_experts
from framework.model.flops import attention_masks, attention_reach, expert_groups, experts_per_token
from framework.model.load import layer_configs
from framework.model.units import find_layers, find_mixers
from framework.parallel.attention import find_stock_attention
from framework.parallel.attention.recurrent import ONE_RANK, Pieces, hook_mixer
from framework.parallel.tensor.partition import count_kv_heads
from framework.recipe.schema import Recipe

# Names of model.attention by which layers of that form compute with torch's SDPA.
SDPA = ("auto", "sdpa")

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
# Hidden values that a layer of another form is taken to keep: GPT's in 16 bits, without the matrix of its attention
# (Korthikanti et al. 2022, section 4: 34 s b h bytes).
ESTIMATED_VALUES = 17
# The part of these behind the attention: the second norm and the mlp (21 of 34 in the same count).
ESTIMATED_BEHIND = 10


def read_masks(recipe: Recipe, config: PretrainedConfig, cp: int, context: int) -> tuple[str | None, ...]:
    """The mask that each layer's attention reads; none where it is Meshwright's, which reads none."""
    has_documents = recipe.data.isolates
    if cp > 1 or recipe.model.attention not in SDPA:
        return ()
    if find_stock_attention(config, recipe) is None:
        return ()
    return attention_masks(config.get_text_config(), context, has_documents)


@dataclass(frozen=True)
class AttentionShape:
    """Attention of a layer on a rank of tp."""

    heads: int
    kv_heads: int
    key_dim: int
    """Features of a head's queries and keys."""
    value_dim: int
    reach: int
    """Tokens that a query sees at the most, itself included."""
    is_windowed: bool = False
    """Whether these are the last ones."""

    def pairs(self, context: int) -> int:
        """Pairs of a query and a key that it sees, in a sequence of `context` tokens."""
        reach = min(self.reach, context)
        return reach * context - reach * (reach - 1) // 2


def attention_shapes(config: PretrainedConfig, tp: int, context: int) -> list[AttentionShape | None]:
    """The attention of each layer, None for one without. config: of the text model."""
    reaches, layers = attention_reach(config, context), cycle(layer_configs(config))
    # Chunks are documents to us: what lies before one is known to be unseen only when rows have come.
    windowed = [kind != "chunked_attention" for kind in getattr(config, "layer_types", None) or reaches]
    return [
        _read_shape(layer, tp, reach, is_windowed and reach < context)
        for layer, reach, is_windowed in zip(layers, reaches, windowed, strict=False)
    ]


def _read_shape(config: PretrainedConfig, tp: int, reach: int, is_windowed: bool) -> AttentionShape | None:
    if not reach or not getattr(config, "num_attention_heads", None):
        return None
    heads, kv_heads = config.num_attention_heads, count_kv_heads(config)
    key_dim = value_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):  # latent attention: keys and values of every head are made before it
        key_dim, value_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return AttentionShape(heads // tp, kv_heads // min(tp, kv_heads), key_dim, value_dim, reach, is_windowed)


@dataclass(frozen=True)
class LayerWidths:
    """Features of a whole layer of Llama's form."""

    hidden: int
    q: int
    kv: int
    heads: int
    # Key-value heads.
    kv_heads: int
    # Inner size of the mlp, or of one expert.
    inner: int
    # RMS norms of queries and keys.
    has_qk_norms: bool = False
    # None where the mlp is no mixture.
    mixture: "MixtureWidths | None" = None

    def of_rank(self, tp: int) -> tuple[int, int, int]:
        """Features of queries and of keys on a rank of tp, and its heads."""
        return self.q // tp, self.kv // min(tp, self.kv_heads), self.heads // tp


@dataclass(frozen=True)
class MixtureWidths:
    """A mixture's experts, to how many of them a token is sent, and the features inside of one. Shared experts, which every token
    meets, are among a layer's linear layers. is_balanced: by the auxiliary loss of all routers
    (model.config.output_router_logits)."""

    experts: int
    top_k: int
    inner: int
    has_gate: bool = True
    is_balanced: bool = False
    groups: tuple[int, int] = (1, 1)
    """Groups of experts, and those of them to which the router limits a token."""

    width: int = 0
    """Features of a row that an expert reads: hidden ones, or of a latent space."""

    has_biases: bool = False

    @property
    def router(self) -> Router:
        """The choice of experts."""
        return Router(self.experts, self.top_k, *self.groups)


def layer_widths(model: PreTrainedModel) -> LayerWidths | None:
    """From the shapes of the layers; None if they differ, or are not RMS norms, a softmax attention and a gated mlp or a mixture
    of gated experts."""
    found = find_layers(model)
    forms = set() if found is None else {_read_layer(model.config.get_text_config(), layer) for layer in found[1]}
    return forms.pop() if len(forms) == 1 else None


def _read_layer(config: PretrainedConfig, layer: nn.Module) -> LayerWidths | None:
    parts = {
        name: module for name, module in layer.named_modules() if any(True for _ in module.parameters(recurse=False))
    }
    linears = {name.rpartition(".")[2]: module for name, module in parts.items() if isinstance(module, nn.Linear)}
    norms = [name.rpartition(".")[2] for name, module in parts.items() if "RMSNorm" in type(module).__name__]
    has_qk_norms = {"q_norm", "k_norm"} <= set(norms)
    mixture = _plain_mixture(config, layer)
    # Beside these a mixture has its router and its experts, and a layer of no mixture nothing.
    num_parts = len(linears) + len(norms) + (0 if mixture is None else 2)
    blocks = ATTENTION | MLP if mixture is None else ATTENTION
    if set(linears) != blocks or len(norms) != (4 if has_qk_norms else 2) or len(parts) != num_parts:
        return None
    outputs = {name: linear.out_features for name, linear in linears.items()}
    return LayerWidths(
        hidden=linears["q_proj"].in_features,
        q=outputs["q_proj"],
        kv=outputs["k_proj"],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        inner=outputs["up_proj"] if mixture is None else mixture.inner,
        has_qk_norms=has_qk_norms,
        mixture=mixture,
    )


def _plain_mixture(config: PretrainedConfig, layer: nn.Module) -> MixtureWidths | None:
    """None where there are no experts, or they have no gate, or biases, or are called in llama4's way."""
    found = list(find_experts(layer))
    if len(found) != 1 or set(dict(found[0][1].named_parameters())) != {found[0][2].first, found[0][2].last}:
        return None
    return gated_mixture(layer, config)


def gated_mixture(model: nn.Module, config: PretrainedConfig) -> MixtureWidths | None:
    """`read_mixture` of experts that have a gate and are not called in llama4's way; None for others, which have no formulas."""
    form = next((form for _, _, form in find_experts(model)), None)
    is_known = form is not None and form.has_gate and not form.is_expert_major
    return read_mixture(model, config) if is_known else None


def read_mixture(model: nn.Module, config: PretrainedConfig) -> MixtureWidths | None:
    """Widths of the first mixture; None without one. config: of the text model."""
    found, top_k = next(find_experts(model), None), experts_per_token(config)
    if found is None or top_k is None:
        return None
    _, experts, form = found
    last = experts.get_parameter(form.last).shape
    inner = last[1] if form.is_transposed or form.is_expert_major else last[2]
    is_balanced = bool(getattr(config, "output_router_logits", False))
    groups, width = expert_groups(config), last[1] * last[2] // inner
    has_biases = getattr(experts, f"{form.last}_bias", None) is not None
    return MixtureWidths(count_experts(experts), top_k, inner, form.has_gate, is_balanced, groups, width, has_biases)


# Tokens that are counted; what more of them keep is in proportion.
COUNTED = 1024


class MixerBytes(NamedTuple):
    """kept: bytes that a whole mixer keeps of a sequence, beside its input; replaced: of the estimated values of its layer, those
    that are not estimated then."""

    kept: int
    replaced: int


def measure_mixer(layer: nn.Module, hidden: int, tokens: int, dtype: torch.dtype) -> MixerBytes | None:
    """The bytes of a layer on meta; None where it has no mixer, or several, or one that asks for more than hidden states."""
    mixers = [mixer for _, mixer in find_mixers(layer)]
    if len(mixers) != 1:
        return None
    mixer, counted = deepcopy(mixers[0]).to(dtype), min(tokens, COUNTED)
    hook_mixer(mixer, Pieces(ContextSlices(counted), ONE_RANK))
    x = torch.empty(1, counted, hidden, dtype=dtype, device="meta", requires_grad=True)
    sizes = {id(each.untyped_storage()): 0 for each in (x, *mixer.parameters())}
    saved: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)  # so that no other storage gets its id
        sizes.setdefault(id(tensor.untyped_storage()), tensor.untyped_storage().nbytes())
        return tensor

    try:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            mixer(hidden_states=x)
    except (TypeError, RuntimeError, NotImplementedError):
        return None
    own = {id(each) for each in mixers[0].parameters()}
    has_mlp = any(each.ndim > 1 and id(each) not in own for each in layer.parameters())
    return MixerBytes(
        sum(sizes.values()) * tokens // counted, ESTIMATED_VALUES - ESTIMATED_BEHIND if has_mlp else ESTIMATED_VALUES
    )
