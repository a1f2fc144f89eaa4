"""Dtypes, groups of parameters and learning rates, written for the oracle from the recipe's words.

Norms are told by the stock model's classes here, and by names in `optim/groups.py`: two ways to one set.
"""

import math
import re
from collections.abc import Iterator

import torch
from torch import nn

from framework.recipe.schema import LearningRateSchedule, Optim

# fp8 is of matmuls only: what goes in and comes out is bf16.
DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


def decay_nothing(model: nn.Module) -> set[str]:
    """Names of the parameters that do not decay by themselves: biases, those of norms, those of fewer than two dims, Mamba's
    A_log and D, and those that transformers marks. model: fresh from its constructor, which marks them."""
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2
        or re.search(r"(^|\.|_)bias$|(^|\.)(A_log|D)$", name)
        or "Norm" in type(model.get_submodule(name.rpartition(".")[0])).__name__
        or getattr(parameter, "_no_weight_decay", False)
    }


def find_groups(names: list[str], undecayed: set[str], optim: Optim) -> Iterator[tuple[str, float, float]]:
    """(name, share of the learning rate, weight decay) of each parameter: of the first group whose pattern its name has."""
    for name in names:
        own = next((each for each in optim.groups.values() if re.search(each.pattern, name)), None)
        decay = 0.0 if name in undecayed else optim.weight_decay
        if own is not None and own.weight_decay is not None:
            decay = own.weight_decay
        yield name, own.lr_ratio if own is not None else 1.0, decay


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
