"""Corrections of an update in plain torch: decay by the peak rate, clipped updates, QK-clip, averages of weights. The logits of
each head are noted by an attention function of the stock model, and projections are found by their names."""

from collections.abc import Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from framework.recipe.schema import Recipe

IMPLEMENTATION = "meshwright_oracle"
# Names of projections of queries.
QUERIES = ("q_proj", "c_attn", "qkv_proj", "query_key_value", "q_b_proj", "query")


def widen(model: PreTrainedModel, base: PreTrainedModel) -> dict[str, tuple[float, float]]:
    """Factors of initial values and of learning rates under muP, by the name of a parameter. base: the narrower model."""
    factors, narrow = {}, dict(base.named_parameters())
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.ndim < 2 or isinstance(module, nn.Embedding):
                continue
            ratios = [a / b for a, b in zip(parameter.shape[-2:], narrow[name].shape[-2:], strict=True)]
            turned = isinstance(module, Conv1D) or getattr(module, "is_transposed", False)
            fan_in, fan_out = ratios if turned else ratios[::-1]
            factors[name] = (fan_in**-1.0 if fan_out == 1.0 else fan_in**-0.5), fan_in**-1.0
    return factors


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """transformers' SDPA attention, or its words with a soft cap, which SDPA has not; it notes on the module the largest logit of
    each key head, before the cap."""
    noted, cap = vars(module).get("noted_logits"), options.get("softcap")
    group = query.shape[1] // key.shape[1]
    logits = (options.get("scaling") or query.shape[-1] ** -0.5) * query @ key.repeat_interleave(group, 1).mT
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    if mask is not None:
        seen = seen & (mask if mask.dtype == torch.bool else mask == 0)
    if noted is not None and module.training:
        real = noted["kit"].real
        counted = seen if real is None else seen & real.view(len(query), 1, -1, 1)
        found = logits.detach().masked_fill(~counted, -inf).amax((0, 2, 3)).view(-1, group).amax(1)
        noted["largest"] = found.maximum(noted["largest"]) if "largest" in noted else found
    if cap is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    weights = (cap * torch.tanh(logits / cap)).masked_fill(~seen, -inf).softmax(-1)
    weights = nn.functional.dropout(weights, options.get("dropout", 0.0), module.training)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2), None


AttentionInterface.register(IMPLEMENTATION, _attend)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


class PlainStability:
    """Corrections of updates by the recipe. real: of rows that are padded, which tokens are real; None: all."""

    def __init__(self, recipe: Recipe, model: PreTrainedModel):
        self._optim, self._ema = recipe.optim, recipe.train.ema
        self.real: Tensor | None = None
        self._before: list[Tensor] = []
        self._attentions: dict[str, nn.Module] = {}
        if self._optim.qk_clip is not None:
            model.set_attn_implementation(IMPLEMENTATION)
            self._attentions = {
                path: each
                for path, each in model.named_modules()
                if any(isinstance(getattr(each, name, None), nn.Linear | Conv1D) for name in QUERIES)
            }

    def start(self) -> None:
        """Forget the logits that were noted."""
        for each in self._attentions.values():
            vars(each)["noted_logits"] = {"kit": self}

    @torch.no_grad()
    def prepare_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Decay by the peak rate where the recipe says so, and keep the weights. optimizer: with a group for each weight."""
        for group in optimizer.param_groups:
            (master,) = group["params"]
            if self._optim.decay_follows == "peak" and master.grad is not None:
                master *= 1 - self._optim.lr * group["lr_ratio"] * group["decay"]
        self._before = [group["params"][0].detach().clone() for group in optimizer.param_groups]

    @torch.no_grad()
    def correct_update(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> None:
        """Shorten updates whose root mean square over the learning rate is above the limit; then scale projections."""
        limit = self._optim.clip_update
        for group, old in zip(optimizer.param_groups, self._before, strict=True):
            (master,) = group["params"]
            if limit is not None and master.grad is not None:
                decay = 0.0 if self._optim.name == "sgd" else group["lr"] * group["weight_decay"]
                update = (master - (1 - decay) * old) / group["lr"]
                rms = update.pow(2).mean().sqrt()
                if rms > limit:
                    master.copy_((1 - decay) * old + group["lr"] * update * limit / rms)
        if self._optim.qk_clip is not None:
            self._clip_logits(self._optim.qk_clip, masters)

    @torch.no_grad()
    def average(self, averages: Mapping[str, Tensor], masters: Mapping[str, nn.Parameter]) -> None:
        """Move averages towards the masters."""
        decay = self._ema or 0.0
        for name, average in averages.items():
            average.copy_(decay * average + (1 - decay) * masters[name])

    def _clip_logits(self, limit: float, masters: Mapping[str, nn.Parameter]) -> None:
        """Scale the projections of heads with larger logits than the limit."""
        for path, attention in self._attentions.items():
            largest = vars(attention)["noted_logits"]["largest"].double()
            factor = torch.where(largest > limit, limit / largest, 1.0)
            for name, master in masters.items():
                kind = name.removeprefix(f"{path}.").split(".")[0]
                if name.startswith(f"{path}.") and (rows := _scales(attention, kind, factor)):
                    dim = 1 if isinstance(getattr(attention, kind), Conv1D) and master.ndim == 2 else 0
                    scale = torch.cat(
                        [each.repeat_interleave(master.shape[dim] // sum(map(len, rows))) for each in rows]
                    )
                    master.mul_((scale if dim or master.ndim == 1 else scale[:, None]).to(master.dtype))


def _scales(attention: Any, kind: str, factor: Tensor) -> list[Tensor]:
    """Factors of equally many rows of a projection, one after another."""
    root, ones = factor.sqrt(), torch.ones_like(factor)
    if hasattr(attention, "qk_nope_head_dim"):
        nope, rope, value = attention.qk_nope_head_dim, attention.qk_rope_head_dim, attention.v_head_dim
        if kind in ("q_proj", "q_b_proj"):
            return [each for s, f in zip(root, factor, strict=True) for each in (s.expand(nope), f.expand(rope))]
        return [each for s, o in zip(root, ones, strict=True) for each in (s.expand(nope), o.expand(value))] * (
            kind == "kv_b_proj"
        )
    config = attention.config
    heads = getattr(config, "num_attention_heads", None) or config.n_head
    queries = root.repeat_interleave(heads // len(root))
    match kind:
        case "q_proj" | "query":
            return [queries]
        case "k_proj" | "key":
            return [root]
        case "c_attn" | "qkv_proj":
            return [queries, root, ones]
        case "query_key_value":
            return [torch.stack([root, root, ones], 1).flatten()]
    return []
