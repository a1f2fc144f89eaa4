"""The oracle's parts, written from the recipe's words in plain torch: parameter groups, learning rates, losses of
preferences (a new loss goes here), the loss scale, adapters, mixtures of experts, and corrections of an update (decay by the
peak rate, clipped updates, QK-clip, averages of weights).

Nothing here is shared with the layouts under test. Norms are found by the stock model's classes here, and by names in
`optim/groups.py`: two ways to one set. Losses are DPO (arXiv 2305.18290, eq. 7), IPO (2310.12036, eq. 17, of means over tokens),
KTO (2402.01306, eq. 8 with both weights 1), ORPO (2403.07691, eq. 6 and 7) and SimPO (2405.14734, eq. 6); adapters are LoRA (Hu
et al. 2021, arXiv 2106.09685) and DoRA (Liu et al. 2024, arXiv 2402.09353). The logits of each head are noted by an attention
function of the stock model.
"""

import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from math import ceil, inf
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D

from framework.recipe.schema import Adapter, LearningRateSchedule, LossSettings, Model, Optim, Precision, Recipe
from framework.verify.evidence import IGNORE, WANTED

# fp8 is of matmuls only: their inputs and outputs are bf16.
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}

INITIAL, GROWTH_STEPS = 65536.0, 2000
CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")
# Weights of pairs are compared in these units: those that differ by rounding are equal.
UNIT = 2.0**-16


def decay_nothing(model: nn.Module) -> set[str]:
    """Names of the parameters that do not decay by themselves: biases, scales, those of norms, those of fewer than two dims,
    Mamba's A_log and D, and those that transformers marks. model: fresh from its constructor, which marks them."""
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2
        or re.search(r"(^|\.|_)bias$|(^|\.)(A_log|D|scale)$", name)
        # Not of an embedding that holds a norm (inkling's NormedEmbedding).
        or re.search(r"Norm(?!.*Embedding)", type(model.get_submodule(name.rpartition(".")[0])).__name__)
        or getattr(parameter, "_no_weight_decay", False)
    }


def find_groups(
    names: list[str], undecayed: set[str], optim: Optim, adapter: Adapter
) -> Iterator[tuple[str, float, float]]:
    """(name, share of the learning rate, weight decay) of each parameter, by the first group whose pattern matches."""
    for name in names:
        own = next((each for each in optim.groups.values() if re.search(each.pattern, name)), None)
        decay = 0.0 if name in undecayed else optim.weight_decay
        if own is not None and own.weight_decay is not None:
            decay = own.weight_decay
        ratio = own.lr_ratio if own is not None else 1.0
        yield name, ratio * adapter.b_lr_ratio if name.endswith("lora_B") else ratio, decay


def find_constants(model: nn.Module) -> set[str]:
    """Names of the parameters that a constructor freezes, but for biases by which experts are chosen. model: fresh from it."""
    named = ((name, each) for name, each in model.named_parameters() if not name.endswith("bias"))
    return {name for name, each in named if not each.requires_grad}


def is_trained(name: str, recipe: Recipe) -> bool:
    """Whether the recipe trains a parameter."""
    adapter, holders = recipe.adapter, name.split(".")[:-1]
    if adapter.kind == "none":
        return not any(re.search(pattern, name) for pattern in recipe.model.freeze)
    if re.search(r"lora_(A|B|magnitude_vector)$", name):
        return True
    whole = [f".{'.'.join(holders[: count + 1])}" for count in range(len(holders))]
    return any(path.endswith(f".{target}") for path in whole for target in adapter.train)


def learning_rate(step: int, schedule: LearningRateSchedule, peak: float, steps: int) -> float:
    """The rate of the step, counted from 0. Behind `start_step`, warm-up is a line from 0 at step -1 to the peak at step w; decay
    reaches final_ratio of the peak at step `stop_step` (None: `steps`, which no run of so many steps takes)."""
    stop = steps if schedule.stop_step is None else schedule.stop_step
    step, steps = max(0, step - schedule.start_step), max(0, stop - schedule.start_step)
    w, least, shape = schedule.warmup_steps, schedule.final_ratio * peak, str(schedule.name)
    begin = w
    if step < w:
        return (step + 1) * peak / (w + 1)
    if schedule.name == "wsd":
        length = math.ceil(steps / 10) if schedule.decay_steps is None else schedule.decay_steps
        shape, begin = schedule.decay_shape, max(w, steps - length)
    if step < begin or shape == "constant":
        return peak
    passed = (step - begin) / (steps - begin) if step < steps else 1.0
    if shape == "exponential":  # a line of log(rate)
        return peak * schedule.final_ratio**passed
    left = {"linear": 1 - passed, "cosine": math.cos(math.pi * passed / 2) ** 2, "sqrt": 1 - passed**0.5}[shape]
    return least + (peak - least) * left


def score_answers(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities and numbers of tokens of rows that have labels, [n] each.  logits: [rows, T, V]; labels: [rows, T]."""
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")
    lengths = (labels != IGNORE).sum(1)
    return -losses[lengths > 0].sum(1), lengths[lengths > 0]


def compare_answers(
    loss: LossSettings, log_p: Tensor, lengths: Tensor, kinds: Tensor, reference: Tensor, divergence: float
) -> Tensor:
    """The losses of pairs, [n / 2], from the numbers of their answers, [n] each. divergence: kto's, of the whole batch."""
    beta, ratio, mean = loss.beta, log_p - reference, log_p / lengths
    match loss.name:
        case "dpo":
            return -torch.log(torch.sigmoid(beta * (ratio[::2] - ratio[1::2])))
        case "ipo":
            of_token = ratio / lengths
            return (of_token[::2] - of_token[1::2] - 1 / (2 * beta)) ** 2
        case "simpo":
            return -torch.log(torch.sigmoid(beta * mean[::2] - beta * mean[1::2] - loss.margin))
        case "orpo":
            uncertain = mean.exp().clamp(max=1 - torch.finfo(mean.dtype).eps)
            odds = uncertain / (1 - uncertain)
            return -mean[::2] - beta * torch.log(torch.sigmoid(torch.log(odds[::2] / odds[1::2])))
        case "kto":
            surplus = ratio[::2] - divergence
            return 1 - torch.sigmoid(beta * torch.where(kinds[::2] == WANTED, surplus, -surplus))
    raise AssertionError(f"{loss.name} compares no answers")


class PlainLossScale:
    """Loss scale as textbooks have it: a Python number, updated on the host in each step.

    value: the factor of the loss before backward; 1 in every dtype but fp16.
    """

    def __init__(self, precision: Precision):
        self._is_dynamic = precision.compute == "fp16" and precision.loss_scale in (None, "dynamic")
        self.value = INITIAL if self._is_dynamic else float(precision.loss_scale or 1.0)
        self._clean, self._is_finite = 0, True

    def unscale(self, masters: Iterable[Tensor]) -> None:
        """Divide the masters' gradients by the scale."""
        gradients = [master.grad for master in masters if master.grad is not None]
        for gradient in gradients:
            gradient /= self.value
        self._is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)

    def take(self) -> bool:
        """Conclude the step; returns whether it updates."""
        if self._is_dynamic:
            self._clean = self._clean + 1 if self._is_finite else 0
            if not self._is_finite:
                self.value /= 2
            elif self._clean == GROWTH_STEPS:
                self.value, self._clean = 2 * self.value, 0
        return self._is_finite


class PlainMixtures:
    """Count loads from `start` to `take`, move biases by them, and drop pairs beyond the capacity.

    context: tokens of a sequence. real: of a microbatch that is padded, which of its tokens are real, [rows * length] bool; None:
    all. Real tokens are those of whole sequences, one after another.
    """

    def __init__(self, model: PreTrainedModel, settings: Model, context: int):
        self._settings, self._context = settings, context
        self.real: Tensor | None = None
        self._experts = find_experts(model)
        self._biases = {bias: path for path in self._experts if (bias := _find_bias(model, path))}
        self._loads: dict[str, Tensor] = {}
        for bias, path in self._biases.items():
            model.get_submodule(path).register_forward_pre_hook(partial(self._count, bias))
        if settings.expert_capacity is not None:
            for path in self._experts:
                model.get_submodule(path).register_forward_pre_hook(self._drop)

    def names(self) -> list[str]:
        """Full names of the biases, buffers or parameters."""
        return list(self._biases)

    def start(self) -> None:
        """Reset the counts."""
        self._loads = {bias: torch.zeros(self._experts[path], dtype=torch.int64) for bias, path in self._biases.items()}

    def take(self) -> dict[str, Tensor]:
        """Counted tokens of each expert, [E] int64, by the bias's full name."""
        return self._loads

    def move(self, biases: Mapping[str, Tensor], loads: Mapping[str, Tensor]) -> None:
        """Make one step, in place. biases: by full name; loads: those of `take`."""
        for name in self._biases:
            load, bias = loads[name].to(torch.float64), biases[name]
            moved = self._settings.router_bias_rate * (load.mean() - load).sign()
            bias.data.add_(moved.to(bias).view_as(bias))

    def z_loss(self, output: Any) -> Tensor:
        """The mean, over the real tokens of all mixtures, of the squared log of summed exponentials of their routers' logits."""
        layers = [each.flatten(0, -2) for each in output.router_logits]
        real = layers if self.real is None else [each[self.real] for each in layers]
        return torch.cat(real).exp().sum(-1).log().pow(2).mean()

    def _count(self, bias: str, experts: nn.Module, args: tuple[Any, ...]) -> None:
        chosen = args[1] if self.real is None else args[1][self.real]
        self._loads[bias] += torch.bincount(chosen.flatten().cpu(), minlength=len(self._loads[bias]))

    def _drop(self, experts: nn.Module, args: tuple[Tensor, Tensor, Tensor]) -> tuple[Any, ...]:
        hidden, index, weights = args
        real = torch.ones(len(index), dtype=torch.bool) if self.real is None else self.real
        tokens = real.nonzero().flatten().tolist()
        kept = weights.new_ones(weights.shape)
        for first in range(0, len(tokens), self._context):
            for token, slot in self._find_dropped(tokens[first : first + self._context], index, weights, experts):
                kept[token, slot] = 0
        return hidden, index, weights * kept

    def _find_dropped(
        self, tokens: list[int], index: Tensor, weights: Tensor, experts: nn.Module
    ) -> list[tuple[int, int]]:
        """The (token, slot) pairs of one sequence that find no room.  index, weights: [T, k]."""
        pairs = [(token, slot) for token in tokens for slot in range(index.shape[1])]
        if self._settings.expert_drop == "weight":  # of equal weights the first in the sequence: the sort is stable
            pairs.sort(key=lambda pair: -round(float(weights[pair].detach()) / UNIT))
        factor = self._settings.expert_capacity
        assert factor is not None, "a hook of a recipe with capacity"
        room = ceil(Fraction(str(factor)) * len(pairs) / _count_experts(experts))
        taken: dict[int, int] = {}
        dropped = []
        for pair in pairs:
            expert = int(index[pair])
            taken[expert] = taken.get(expert, 0) + 1
            if taken[expert] > room:
                dropped.append(pair)
        return dropped


class PlainAdapters:
    """Adapters as their papers state them: the model computes with merged weights, whose gradients the chain rule takes to A, B
    and the magnitudes. masters: by name, with those of adapters."""

    def __init__(self, model: PreTrainedModel, adapter: Adapter, masters: Mapping[str, nn.Parameter]):
        self._scale = adapter.alpha / (math.sqrt(adapter.rank) if adapter.rank_stabilized else adapter.rank)
        self._masters = masters
        # Prefix of an adapter's names, by the name of its weight. Linear layers have one weight, stacks several.
        prefixes = [name.removesuffix("lora_A") for name in masters if name.endswith("lora_A")]
        self._prefixes = {f"{each}weight" if each.endswith(".") else each[:-1]: each for each in prefixes}
        holders = {name: model.get_submodule(name.rpartition(".")[0]) for name in self._prefixes}
        self._transposed = {name for name, holder in holders.items() if self._is_transposed(holder)}
        self._merged: dict[str, Tensor] = {}

    def names(self) -> list[str]:
        """The weights that are merged."""
        return list(self._prefixes)

    def merge(self) -> dict[str, Tensor]:
        """The merged weights, in the masters' dtype; `accumulate` goes back from these."""
        self._merged = {name: self._merge(name, prefix) for name, prefix in self._prefixes.items()}
        return self._merged

    def accumulate(self, gradients: Mapping[str, Tensor]) -> None:
        """Add to the masters' gradients those that follow from the gradients of merged weights."""
        found = [name for name in self._merged if name in gradients]
        torch.autograd.backward(
            [self._merged[name] for name in found], [gradients[name] for name in found], retain_graph=True
        )

    def _merge(self, name: str, prefix: str) -> Tensor:
        weight = self._masters[name].detach()
        weight = weight.mT if name in self._transposed else weight
        merged = weight + self._scale * self._masters[f"{prefix}lora_B"] @ self._masters[f"{prefix}lora_A"]
        if (magnitude := self._masters.get(f"{prefix}lora_magnitude_vector")) is not None:
            merged = (magnitude / merged.detach().norm(dim=1))[:, None] * merged
        return merged.mT if name in self._transposed else merged

    @staticmethod
    def _is_transposed(module: nn.Module) -> bool:
        return isinstance(module, Conv1D) or bool(getattr(module, "is_transposed", False))


def find_experts(model: nn.Module) -> dict[str, int]:
    """Paths of the modules that are called with tokens, their experts and weights; with the number of experts of each."""
    return {
        path: _count_experts(module)
        for path, module in model.named_modules()
        if hasattr(
            module, "is_transposed"
        )  # set by `use_experts_implementation`; longcat_flash's are told by their arguments
        or ("top_k_index" in inspect.signature(type(module).forward).parameters and hasattr(module, "down_proj"))
    }


def _count_experts(experts: nn.Module) -> int:
    return len(experts.get_parameter("down_proj"))


def _find_bias(model: nn.Module, path: str) -> str:
    """The correction bias beside the experts at `path`, of one number for each; "" without."""
    block, count = f"{path.rpartition('.')[0]}.", _count_experts(model.get_submodule(path))
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    beside = [name for name, each in named.items() if name.startswith(block) and each.numel() == count]
    return next((name for name in beside if name.rpartition(".")[2] in CORRECTION_BIASES), "")


IMPLEMENTATION = "meshwright_oracle"
# Names of projections of queries.
QUERIES = ("q_proj", "c_attn", "qkv_proj", "query_key_value", "q_b_proj", "query")


def widen(model: PreTrainedModel, base: PreTrainedModel) -> dict[str, tuple[float, float]]:
    """Factors of initial values and of learning rates under muP, by the name of a parameter. base: the narrower model."""
    factors, narrow = {}, dict(base.named_parameters(remove_duplicate=False))
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
