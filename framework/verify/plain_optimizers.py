"""The oracle's Lion, with the noise by which it knows signs that rounding decides, and its Muon: one parameter after the other in
one process, from the papers' words. torch has no Lion, and its Muon takes weights of two dims only; a test compares the two where
both apply."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

from framework.recipe.schema import Optim

# Ranks sum in another order than one process, which changes a gradient differently than perturbed weights do: by at most so many
# times as much. Over six random layouts the most were 15 times in fp32, 1.3 in fp64 and 1.02 in bf16.
NOISE_FACTORS = {torch.float64: 30.0, torch.float32: 30.0, torch.bfloat16: 4.0, torch.float16: 4.0}
# Shares of lr by which a layout's weight may miss what a sign of -1, 0 or 1 leads to.
LEGAL = 0.1


@dataclass(frozen=True)
class Noise:
    """Effect of rounding on one parameter's gradient, measured on the oracle: its gradient again, from weights that are rounded
    differently."""

    # The largest change of an element.
    size: float
    # Bool, of the gradient's shape: False in rows of a matrix whose gradient is exactly zero however it is rounded (a token that
    # does not occur).
    is_live: Tensor


def measure_noise(gradient: Tensor, perturbed: Sequence[Tensor], dtype: torch.dtype) -> Noise:
    """The noise of a gradient. perturbed: the same gradient, rounded differently; dtype: that of forward and backward."""
    size = max(float((each - gradient).abs().max()) for each in perturbed) if gradient.numel() else 0.0
    return Noise(NOISE_FACTORS[dtype] * size, torch.stack([_find_live(each) for each in (gradient, *perturbed)]).any(0))


def _find_live(gradient: Tensor) -> Tensor:
    is_live = gradient != 0
    if gradient.ndim < 2:
        # A vector has no rows. An element of it may be zero because its terms cancel (a key's bias, in sequences of two tokens),
        # and ranks that add them in another order do not find zero.
        return is_live.any().expand_as(gradient)
    return is_live.flatten(1).any(1).view(-1, *[1] * (gradient.ndim - 1))


class PlainLion(torch.optim.Optimizer):
    """Lion as its paper's algorithm 2 states it, one parameter at a time: torch has none to compare with.

    Lion updates by sign(d), d = beta1 m + (1 - beta1) g. Where d is zero up to rounding, plus and minus are equally right, and
    two correct runs diverge: weights by 2 lr, then the next step's loss and gradients. For those elements the oracle takes the
    layout's sign, if the layout's weight is one that Lion can produce; else it keeps its own, and the difference shows. So
    every weight is compared, and both sides remain one training run.

    State of a parameter: `m`; `noise`, the largest part of m that is rounding; `undecided`, bool, where rounding decided a sign.
    """

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        """Make one update by the signs of its own gradients."""
        self.follow({}, {})

    @torch.no_grad()
    def follow(self, noise: Mapping[Tensor, Noise], layout: Mapping[Tensor, Tensor]) -> None:
        """Make one update. noise: of each gradient, where known; layout: these parameters after this step of the layout."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                moment = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                direction = beta1 * moment + (1 - beta1) * parameter.grad
                sign = direction.sign()
                if parameter in noise:
                    is_undecided = self._find_undecided(parameter, direction, noise[parameter], beta1, beta2)
                    sign = torch.where(is_undecided, _read_signs(parameter, layout[parameter], group, sign), sign)
                parameter -= group["lr"] * (sign + group["weight_decay"] * parameter)
                moment.copy_(beta2 * moment + (1 - beta2) * parameter.grad)

    def _find_undecided(self, parameter: Tensor, direction: Tensor, noise: Noise, beta1: float, beta2: float) -> Tensor:
        state = self.state[parameter]
        of_moment, of_gradient = state.get("noise", 0.0), noise.size
        is_live = noise.is_live | (state["m"] != 0)
        is_undecided = is_live & (direction.abs() <= beta1 * of_moment + (1 - beta1) * of_gradient)
        state["noise"] = beta2 * of_moment + (1 - beta2) * of_gradient
        state["undecided"] = is_undecided | state.get("undecided", is_undecided)
        return is_undecided


def _read_signs(before: Tensor, after: Tensor, group: Mapping[str, float], otherwise: Tensor) -> Tensor:
    """The signs by which Lion gets from `before` to `after`; `otherwise` where no sign does."""
    if group["lr"] == 0:
        return otherwise
    read = ((1 - group["lr"] * group["weight_decay"]) * before - after.to(before)) / group["lr"]
    is_legal = ((read - read.round()).abs() < LEGAL) & (read.round().abs() <= 1)
    return torch.where(is_legal, read.round(), otherwise)


# --- Muon

# Returns the matrices packed in a weight as (dim, indices along it) each.
Pieces = list[tuple[int, Tensor]]
# Projections of queries, keys and values in one.
FUSED = ("qkv_proj", "c_attn", "Wqkv", "query_key_value")
# Projections to gates and to what they gate, in halves.
IN_HALVES = ("gate_up_proj", "Wi", "input_linear")
# Families of which tensor parallelism knows too little: their weights are matrices as they are.
WHOLE = ("minimax", "zamba2")
# Experts with code of their own are AdamW's.
STOCK_EXPERTS = ("DbrxExpertGLU", "JetMoeParallelExperts")
# Projections that have equally many features for each head: to queries, keys and values, and from what heads return.
PLAIN = {"q_proj", "k_proj", "v_proj", "Wqkv", "Wq", "Wk", "Wv", "query", "key", "value", "g_proj"}
TO_HEADS = {*FUSED, *PLAIN, "q_b_proj", "kv_b_proj", "q_gate_proj"}
FROM_HEADS = {"o_proj", "out_proj", "dense", "c_proj", "Wo"}


def find_matrices(model: nn.Module, config: PretrainedConfig, optim: Optim) -> dict[str, Pieces]:
    """The weights of layers that Muon updates, and the matrices in each. model: a stock one."""
    found = {}
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        group = next((each for each in optim.groups.values() if re.search(each.pattern, name)), None)
        layer = re.match(r".*?\.\d+(?=\.)", name)
        is_layer = layer and any(True for _ in model.get_submodule(layer[0]).children())
        is_layer = is_layer and not isinstance(owner, nn.Embedding) and type(owner).__name__ not in STOCK_EXPERTS
        is_weight = parameter.ndim == 2 or (parameter.ndim == 3 and ".experts." in name)
        is_bias = re.search(r"(^|\.|_)bias$|(^|\.)(A_log|D)$", name)
        if is_layer and is_weight and not is_bias and (group is None or group.optimizer != "adamw"):
            text = config.get_text_config()
            heads = list(_heads(name, parameter, model, text)) if optim.muon.heads else []
            found[name] = heads or list(_pieces(name, parameter, model, text))
    return found


def _heads(name: str, weight: Tensor, model: nn.Module, config: Any) -> Iterator[tuple[int, Tensor]]:
    path = name.removesuffix(".weight")
    around, _, last = path.removesuffix(".linear").rpartition(".")
    attention = model.get_submodule(around)
    own = vars(attention)  # layers may differ from the config
    if "att" not in f"{around} {type(attention).__name__}".lower() or last not in TO_HEADS | FROM_HEADS:
        return
    dim = int(isinstance(model.get_submodule(path), Conv1D) == (last in TO_HEADS))
    width, latent = own.get("head_dim"), own.get("qk_nope_head_dim", 0)
    if latent:
        width = latent + own["qk_rope_head_dim"]
    elif width is None:
        width = config.hidden_size // config.num_attention_heads
    first = {"kv_b_proj": latent, "q_gate_proj": width}.get(last, 0)  # of two matrices in a head
    if first or last in {"v_proj", "o_proj", "g_proj"}:
        width = first + own.get("v_head_dim", width)
    if last == "g_proj" and len(weight) == (own.get("num_heads") or config.num_attention_heads):
        return  # a number for each head
    for head in torch.arange(weight.shape[dim]).split(width):
        for each in head.split([first, width - first]) if first else (head,):
            yield dim, each


def _pieces(name: str, weight: Tensor, model: nn.Module, config: Any) -> Iterator[tuple[int, Tensor]]:
    path, owner = name.removesuffix(".weight"), model.get_submodule(name.rpartition(".")[0])
    around, _, last = path.rpartition(".")
    parent = model.get_submodule(around)
    is_transposed = isinstance(owner, Conv1D) or getattr(owner, "is_transposed", "Llama4" in type(owner).__name__)
    outputs = weight.ndim - (1 if is_transposed else 2)
    numbers = torch.arange(weight.shape[outputs])
    # Mamba-1 multiplies the one half by what the other one, behind a convolution, has been made.
    is_gated = (last == "in_proj" and hasattr(parent, "x_proj")) or (last == "fc1" and config.model_type == "moshi")
    if config.model_type in WHOLE and weight.ndim == 2:
        pieces: Iterable[Tensor] = (numbers,)
    elif last in IN_HALVES or is_gated:
        in_halves = getattr(owner, "is_concatenated", True)
        pieces = numbers.chunk(2) if in_halves else (numbers[::2], numbers[1::2])
    elif last in FUSED:
        pieces = _split_fused(numbers, parent, config)
    else:
        pieces = (numbers,)
    for each in pieces:
        yield outputs, each


def _split_fused(rows: Tensor, attention: nn.Module, config: Any) -> tuple[Tensor, ...]:
    """The rows of queries, keys and values, as the family's attention takes them apart."""
    family, heads = config.model_type, config.num_attention_heads
    kv = getattr(attention, "num_key_value_heads", getattr(config, "num_key_value_heads", None)) or heads
    if family == "codegen":  # four times queries, values, keys
        return tuple(each.flatten() for each in rows.view(4, 3, -1).unbind(1))
    if family == "falcon" and config.new_decoder_architecture:  # each key and value behind its queries
        groups = rows.view(config.num_kv_heads, heads // config.num_kv_heads + 2, -1)
        return groups[:, :-2].flatten(), groups[:, -2].flatten(), groups[:, -1].flatten()
    if family in ("falcon", "gpt_bigcode") and config.multi_query:
        kv = 1
    elif family in ("falcon", "gpt_bigcode") or hasattr(attention, "query_key_value"):  # by head
        return tuple(each.flatten() for each in rows.view(heads, 3, -1).unbind(1))
    unit = len(rows) // (heads + 2 * kv)
    return rows.split([heads * unit, kv * unit, kv * unit])


class PlainMuon(torch.optim.Optimizer):
    """Muon of the matrices of groups that say `pieces`, and AdamW of the others."""

    def __init__(self, groups: Iterable[dict[str, Any]], optim: Optim):
        super().__init__(groups, {"pieces": None})
        self._optim, rest = optim, [dict(group) for group in self.param_groups if group["pieces"] is None]
        self._adamw = torch.optim.AdamW(rest, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one update."""
        rest = (group for group in self.param_groups if group["pieces"] is None)
        for theirs, group in zip(self._adamw.param_groups, rest, strict=True):
            theirs["lr"] = group["lr"]
        self._adamw.step()
        for group in self.param_groups:
            for weight in group["params"] if group["pieces"] is not None else ():
                if weight.grad is not None:
                    self._update(weight, weight.grad, group)
        return None

    def _update(self, weight: Tensor, gradient: Tensor, group: Mapping[str, Any]) -> None:
        b = self._optim.momentum
        moment = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
        moment.copy_(b * moment + (1 - b) * gradient)
        update = b * moment + (1 - b) * gradient
        weight *= 1 - group["lr"] * group["weight_decay"]
        experts = update.view(-1, *update.shape[-2:])
        for number, matrix in enumerate(experts):
            target = weight.view_as(experts)[number]
            for dim, indices in ((dim - update.ndim + 2, each.to(update.device)) for dim, each in group["pieces"]):
                piece = self._iterate(matrix.index_select(dim, indices))
                target.index_add_(dim, indices, piece.to(target.dtype), alpha=-group["lr"] * self._scale(piece))

    def _iterate(self, matrix: Tensor) -> Tensor:
        x = matrix.bfloat16() if self._optim.muon.dtype == "bf16" else matrix
        if x.shape[0] > x.shape[1]:
            return self._iterate(matrix.T).T
        x = x / x.norm().clamp(min=1e-7)
        for _ in range(self._optim.muon.steps):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return x

    def _scale(self, matrix: Tensor) -> float:
        rows, columns = matrix.shape
        return 0.2 * sqrt(max(rows, columns)) if self._optim.muon.scale == "adamw" else sqrt(max(1, rows / columns))
