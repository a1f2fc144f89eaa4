"""Widths of a decoder layer, its mixture of experts and the mask of its attention: the input of `activations.py`."""

from dataclasses import dataclass

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.model.experts import Router, count_experts, find_experts
from framework.model.flops import attention_masks, expert_groups, experts_per_token
from framework.model.units import find_layers
from framework.parallel.attention import find_stock_attention
from framework.recipe.schema import Recipe

# Names of model.attention by which layers of that form compute with torch's SDPA.
SDPA = ("auto", "sdpa")

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


def read_masks(recipe: Recipe, config: PretrainedConfig, cp: int, context: int) -> tuple[str | None, ...]:
    """The mask that each layer's attention reads; none where it is Meshwright's, which reads none."""
    has_documents = recipe.data.isolates
    if cp > 1 or recipe.model.attention not in SDPA:
        return ()
    if find_stock_attention(config, recipe) is None:
        return ()
    return attention_masks(config.get_text_config(), context, has_documents)


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
