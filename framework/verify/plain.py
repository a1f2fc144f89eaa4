"""The oracle's parts, written from the recipe's words in plain torch: parameter groups, learning rates, the loss scale,
rounding of moments and weights, fp8 layers, and mixtures of experts.

Nothing here is shared with the layouts under test. Norms are found by the stock model's classes here, and by names in
`optim/groups.py`: two ways to one set.
"""

import hashlib
import inspect
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.recipe.schema import Adapter, LearningRateSchedule, Model, Optim, Precision, Recipe

# fp8 is of matmuls only: their inputs and outputs are bf16.
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}

INITIAL, GROWTH_STEPS = 65536.0, 2000
SECOND = "exp_avg_sq"
LEAST_EXPONENT = -126  # of normal fp32 numbers
BLOCK = 64  # elements that share an exponent in int8
MASK = 0xFFFFFFFF
# Rounds of the hash `triple32`: (shift, factor) each, then a last shift.
ROUNDS, LAST_SHIFT = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)), 14
# Alignment that torchao's layers require.
ALIGNMENT = 16
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
    """The rate of the step, counted from 0. Warm-up is a line from 0 at step -1 to the peak at step w; decay reaches final_ratio
    of the peak at step `steps`, which no run of so many steps takes."""
    w, least = schedule.warmup_steps, schedule.final_ratio * peak
    if step < w:
        return (step + 1) * peak / (w + 1)
    begin = w
    if schedule.name == "wsd":
        length = math.ceil(steps / 10) if schedule.decay_steps is None else schedule.decay_steps
        begin = max(w, steps - length)
    if step < begin or schedule.name == "constant":
        return peak
    passed = (step - begin) / (steps - begin) if step < steps else 1.0
    if schedule.name == "cosine":
        return least + (peak - least) * math.cos(math.pi * passed / 2) ** 2
    return least + (peak - least) * (1 - passed)


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


def draw_words(numel: int, key: tuple[int | str, ...]) -> Tensor:
    """Random words of a parameter's elements in row-major order, int64 [numel] in [0, 2^32).

    triple32 of an element's number, with a word of the key's digest added before each of its rounds.
    """
    assert numel <= MASK, "numbers of elements are 32 bits here"
    digest = hashlib.blake2b("/".join(map(str, (*key, 0))).encode(), digest_size=12).digest()
    words = torch.arange(numel)
    for at, (shift, factor) in enumerate(ROUNDS):
        words = (words + int.from_bytes(digest[4 * at : 4 * at + 4], "little")) & MASK
        words = ((words ^ (words >> shift)) * factor) & MASK
    return words ^ (words >> LAST_SHIFT)


def has_no_master(precision: Precision) -> bool:
    """Whether the optimizer updates the weights that are computed with."""
    return precision.master == "none" and precision.compute == "bf16"


@torch.no_grad()
def round_master(master: Tensor, key: tuple[int | str, ...]) -> None:
    """Round a parameter, fp32 of any shape, in place: to the bf16 number on its side of zero, or with the probability of the
    distance to the next one."""
    words = draw_words(master.numel(), key).to(master.device)
    exact = master.flatten().double()
    nearest = exact.bfloat16()
    is_beyond = nearest.double().abs() > exact.abs()
    below = torch.where(is_beyond, torch.nextafter(nearest, torch.zeros_like(nearest)), nearest)
    above = torch.nextafter(below, torch.full_like(below, torch.inf).copysign(master.flatten().bfloat16()))
    share = (exact - below.double()) / (above.double() - below.double())
    chosen = torch.where(share + (words & 0xFFFF).double() / 65536 >= 1.0, above, below)
    master.copy_(chosen.view_as(master))


@dataclass(frozen=True)
class PlainMoments:
    """Rounding of a stock optimizer's moments to bf16 or int8 after each step, in fp64 arithmetic.

    In int8 the smallest number of a block depends on its largest, and blocks are cut where ranks' shards are, so the oracle takes
    from the layout which elements share a block.
    """

    optim: Optim
    # precision.moments
    dtype: str
    seed: int
    # First element of each element's block, by parameter and in its shape. Empty: blocks of BLOCK elements.
    blocks: Mapping[str, Tensor]

    def round(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter], step: int) -> None:
        """Round the moments after a step, in place."""
        if self.dtype == "fp32":
            return
        for name, master in masters.items():
            moments = {key: optimizer.state[master][key] for key in self._retained() if key in optimizer.state[master]}
            words = draw_words(master.numel() if moments else 0, (self.seed, "moments", step, name)).to(master.device)
            for index, (key, moment) in enumerate(moments.items()):
                chance = ((words >> 16 * index) & 0xFFFF).double() / 65536
                if not self._is_drawn(key):
                    chance = torch.full_like(chance, 0.5)  # to nearest
                rounded = self._round(name, moment.detach().float().double().flatten(), chance, key)
                moment.copy_(rounded.view_as(moment))

    def _retained(self) -> dict[str, float]:
        """The states of stock optimizers and the share of each that a step retains, in the order in which they take their random
        bits: the lower half of a word, the upper."""
        betas = self.optim.betas
        names = {"adamw": ("exp_avg", SECOND), "lion": ("", "m"), "sgd": ("momentum_buffer",)}[self.optim.name]
        retained = (self.optim.momentum,) if self.optim.name == "sgd" else betas
        return {name: share for name, share in zip(names, retained, strict=True) if name}

    def _is_drawn(self, key: str) -> bool:
        """Whether a moment is rounded stochastically: a second one, and a first one that moves by less than half a spacing."""
        return key == SECOND or 1 - self._retained()[key] < 2.0 ** -(self._mantissa_bits(key) + 1)

    def _mantissa_bits(self, key: str) -> int:
        if self.dtype == "bf16":
            return 7
        return 4 if key == SECOND else 3

    def _round(self, name: str, values: Tensor, chance: Tensor, key: str) -> Tensor:
        rounded = _round_mantissa(values, chance, self._mantissa_bits(key))
        if self.dtype == "bf16":
            return rounded
        starts = self.blocks[name].flatten() if name in self.blocks else torch.arange(len(values)) // BLOCK * BLOCK
        starts = starts.to(values.device, torch.int64)
        largest = torch.zeros_like(values).scatter_reduce_(0, starts, rounded.abs(), "amax")[starts]
        smallest = _find_smallest(largest, self._mantissa_bits(key), 256 if key == SECOND else 128)
        is_kept = values > 0 if key == SECOND else values.abs() > chance * smallest
        return torch.where(values.abs() < smallest, is_kept * smallest * values.sign(), rounded)


def _round_mantissa(values: Tensor, chance: Tensor, bits: int) -> Tensor:
    """Numbers of so many mantissa bits: the one below in magnitude, or the next if `chance` carries the value over it."""
    spacing = power_of_two(exponent_of(values).clamp(min=LEAST_EXPONENT) - bits)
    return values.sign() * (values.abs() / spacing + chance).floor() * spacing


def _find_smallest(largest: Tensor, mantissa_bits: int, count: int) -> Tensor:
    """The smallest number of a block, by its largest: its fp32 bits begin with `base + 1`. count: magnitudes of a code."""
    exponent = exponent_of(largest).clamp(min=LEAST_EXPONENT - 1) - LEAST_EXPONENT + 1
    base = ((exponent + 1) * 2**mantissa_bits - count).clamp(min=0)
    return ((base + 1) << (23 - mantissa_bits)).int().view(torch.float32).double()


def exponent_of(values: Tensor) -> Tensor:
    """floor(log2 |x|), int64; far below all of fp32's for 0."""
    exponent = torch.frexp(values).exponent.long() - 1
    return torch.where(values == 0, 2 * LEAST_EXPONENT, exponent)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent in fp64, exact."""
    return ((exponent + 1023) << 52).view(torch.float64)


def multiply_in_fp8(model: PreTrainedModel, scaling: str, device: torch.device) -> None:
    """Replace the trained linear layers of the model's decoder layers by torchao's, emulated where the device has no fp8."""
    # torchao is an optional dependency, and takes two seconds to import.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    named = Float8LinearConfig.from_recipe_name(f"{scaling}wise")
    config = replace(named, round_scales_to_power_of_2=True, emulate=not _has_kernel(device))
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    # The decoder's layers: of a list of experts its layer has more.
    for layer in max(lists, key=lambda each: sum(one.numel() for one in each.parameters()), default=()):
        convert_to_float8_training(layer, config=config, module_filter_fn=_is_taken)
        for parent in list(layer.modules()):
            for name, module in parent.named_children():
                if type(module) is Conv1D and _fits(module):
                    setattr(parent, name, _Fp8Conv1D(module, config))


class _Fp8Conv1D(nn.Module):
    """transformers' Conv1D, a linear layer whose weight [K, N] is transposed, by torchao's layer. Keeps the parameters' names."""

    def __init__(self, conv: Conv1D, config: Any) -> None:
        from torchao.float8.float8_linear import Float8Linear

        super().__init__()
        self.weight, self.bias = conv.weight, conv.bias
        num_in, num_out = conv.weight.shape
        empty = nn.Linear(num_in, num_out, device="meta", dtype=conv.weight.dtype)
        # In a list: its own parameters are none of the model's.
        self._linear = [Float8Linear.from_float(empty, config)]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = functional_call(self._linear[0], {"weight": self.weight.t(), "bias": self.bias}, (x,))
        return found


def _is_taken(module: nn.Module, name: str) -> bool:
    return type(module) is nn.Linear and _fits(module)


def _fits(module: nn.Module) -> bool:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.requires_grad and all(size % ALIGNMENT == 0 for size in weight.shape)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


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
        room = ceil(factor * len(pairs) / _count_experts(experts))
        taken: dict[int, int] = {}
        dropped = []
        for pair in pairs:
            expert = int(index[pair])
            taken[expert] = taken.get(expert, 0) + 1
            if taken[expert] > room:
                dropped.append(pair)
        return dropped


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
    return next(
        (
            name
            for name, each in named.items()
            if name.startswith(block) and name.rpartition(".")[2] in CORRECTION_BIASES and each.numel() == count
        ),
        "",
    )
