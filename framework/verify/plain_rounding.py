"""The oracle's rounding in plain torch: masters and moments between steps, what travels as codes by the table of `docs/zero.md`
(gathered parameters, gradients that leave their node, rows on their way to experts), frozen weights in few bits (QLoRA, Dettmers
et al. 2023, arXiv 2305.14314), and matmuls in fp8."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.recipe.schema import Adapter, Optim, Precision, Recipe
from framework.verify.plain import find_experts

SECOND = "exp_avg_sq"
LEAST_EXPONENT = -126  # of normal fp32 numbers
BLOCK = 64  # elements that share an exponent in int8
MASK = 0xFFFFFFFF
# Rounds of the hash `triple32`: (shift, factor) each, then a last shift.
ROUNDS, LAST_SHIFT = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)), 14
# Alignment that torchao's layers require.
ALIGNMENT = 16
# Numbers of a row with one scale.
ROW_BLOCK = 256


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


class PlainCodes:
    """Rounding of numbers that travel as codes: the largest value of a block becomes the largest code, 127 of int8, 7 of int4, or
    at most fp8's 448 by a scale that is a power of two.

    Blocks are cut where ranks' shards are, so the oracle takes them from the layout. blocks: numbers of each tensor's elements by
    name, equal within a block, -1 where an element does not travel so.
    """

    def __init__(self, kind: str, blocks: Mapping[str, Tensor]):
        self._kind = kind
        self._blocks = {name: each.flatten().long() for name, each in blocks.items() if (each >= 0).any()}
        numbers = torch.cat([torch.empty(0, dtype=torch.int64), *self._blocks.values()])
        self._inverse = numbers.unique(return_inverse=True)[1]

    @torch.no_grad()
    def round(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values as which those of the tensors that travel as codes arrive, by name."""
        if not self._blocks:
            return {}
        values = torch.cat([tensors[name].detach().flatten() for name in self._blocks])
        inverse, is_int = self._inverse.to(values.device), self._kind != "fp8"
        largest = torch.zeros_like(values).scatter_reduce_(0, inverse, values.abs(), "amax").float()
        scales = (largest / {"int8": 127.0, "int4": 7.0, "fp8": 448.0}[self._kind]).clamp(min=2.0**-126)
        if not is_int:
            exponent = exponent_of(scales.double())
            scales = power_of_two(exponent + (power_of_two(exponent) < scales.double())).float()
        scales = scales[inverse]
        codes = values * (1.0 / scales)
        codes = codes.round() if is_int else codes.float().to(torch.float8_e4m3fn)
        parts = (codes.float() * scales).to(values.dtype).split([len(each) for each in self._blocks.values()])
        return {name: part.view_as(tensors[name]) for name, part in zip(self._blocks, parts, strict=True)}


class PlainReduction:
    """Sums of gradients that leave their node as codes (`zero.quantize_reduce`): each rank's is rounded, then each node's sum.

    Microbatch i is that of rank i mod dp, and its gradients are summed at once unless ranks add up their own first. dp and nodes
    are the recipe's. blocks: as those of `PlainCodes`.
    """

    def __init__(self, recipe: Recipe, blocks: Mapping[str, Tensor]):
        launch, parallel, zero = recipe.launch, recipe.parallel, recipe.zero
        self._codes = PlainCodes(zero.quantize_reduce, blocks)
        self._dp = (launch.ranks or 1) // (parallel.tp * parallel.pp * parallel.cp)
        self._on_node = self._dp * (launch.ranks_per_node or 1) // (launch.ranks or 1)
        self._adds_first = zero.stage < 2 or zero.accumulate == "local"
        self._terms: dict[tuple[int, int], dict[str, Tensor]] = {}

    def add(self, number: int, name: str, gradient: Tensor) -> None:
        """Take the gradient of a microbatch, the `number`-th of the step."""
        turn, rank = (0 if self._adds_first else number // self._dp), number % self._dp
        of_rank = self._terms.setdefault((turn, rank), {})
        of_rank[name] = gradient + of_rank[name] if name in of_rank else gradient

    def take(self) -> dict[str, Tensor]:
        """The sums of the step by name, which ends."""
        of_nodes: dict[tuple[int, int], dict[str, Tensor]] = {}
        for (turn, rank), gradients in self._terms.items():
            _add_to(of_nodes.setdefault((turn, rank // self._on_node), {}), self._codes.round(gradients))
        total: dict[str, Tensor] = {}
        for gradients in of_nodes.values():
            _add_to(total, self._codes.round(gradients))
        self._terms = {}
        return total


def round_rows_of_experts(model: PreTrainedModel) -> None:
    """Let experts read their rows, and the gradients of what they return, as they arrive where these travel as fp8 codes. The
    gradient of rows is that of the rounded ones."""
    known = find_experts(model)
    for path, module in model.named_modules():
        # llama4's are given rows alone, already scaled.
        down = getattr(module, "down_proj", None)
        if path in known or (isinstance(down, nn.Parameter) and down.ndim == 3):
            module.register_forward_pre_hook(_round_rows)
            module.register_forward_hook(_round_gradient)


def _round_rows(experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[0] + (_round(args[0]) - args[0]).detach(), *args[1:]


def _round_gradient(_experts: nn.Module, _args: tuple[Any, ...], out: Tensor) -> None:
    if out.requires_grad:
        out.register_hook(_round)


def _round(x: Tensor) -> Tensor:
    """The numbers of fp8 codes of rows [T, H]."""
    rows, width = x.shape
    blocks = torch.arange(rows).unsqueeze(1) * (width // ROW_BLOCK + 1) + torch.arange(width) // ROW_BLOCK
    return PlainCodes("fp8", {"": blocks}).round({"": x})[""]


def _add_to(total: dict[str, Tensor], terms: Mapping[str, Tensor]) -> None:
    for name, each in terms.items():
        total[name] = total[name] + each if name in total else each


def round_base(model: nn.Module, adapter: Adapter, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with those of frozen linear layers and experts rounded as `adapter.base` says. model: stock, on meta."""
    frozen = [
        (path, module)
        for path, module in model.named_modules()
        if re.search(r"\.\d+\.", path) and not any(path.endswith(f".{target}") for target in adapter.train)
    ]
    names = {
        f"{path}.weight"
        for path, module in frozen
        if isinstance(module, nn.Linear | Conv1D) and not path.endswith((".gate", ".router"))
    }
    names |= {
        f"{path}.{name}"
        for path, module in frozen
        for name, each in module.named_parameters(recurse=False)
        if each.ndim == 3 and path.endswith("experts") and "lora_" not in name
    }
    coded = names & weights.keys() if adapter.base != "bf16" else set()
    return {name: _round(each, adapter.base == "nf4") if name in coded else each for name, each in weights.items()}


def _round(weight: Tensor, is_nf4: bool) -> Tensor:
    """Block after block of 64 numbers in each row."""
    pieces = []
    for block in weight.to(torch.float32).split(64, -1):
        scale = block.abs().amax(-1, keepdim=True)
        ratio = block / scale.where(scale > 0, 1)
        if is_nf4:
            # The nearest number of the table: as many borders are below.
            table = _make_nf4()
            borders = [(low + high) / 2 for low, high in pairwise(table)]
            number = table[sum((ratio > border).long() for border in borders)]
        else:
            number = (ratio * 448).to(torch.float8_e4m3fn).to(torch.float32) / 448
        pieces.append(number * scale)
    return torch.cat(pieces, -1).to(weight.dtype)


def _make_nf4() -> Tensor:
    """Quantiles of a normal distribution at 8 places on its positive side and 7 on the negative, the largest 1; and 0. [16]"""
    above, below = (torch.special.ndtri(torch.linspace(0.9677083, 0.5, n).double())[:-1] for n in (9, 8))
    quantiles = torch.cat([above, above.new_zeros(1), -below]).sort().values.float()
    return quantiles / quantiles.max()


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
