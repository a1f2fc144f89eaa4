"""The oracle: a stock Hugging Face model, stock optimizers, one process, a ten-line loop.

It imports nothing from `parallel/`, `comm/` or `train/`: what it agrees with, it agrees with independently.
"""

import re
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.model.load import choose_experts
from framework.model.loss import IGNORE
from framework.optim.groups import group_parameters
from framework.optim.schedules import learning_rate
from framework.recipe.schema import Optim, Recipe
from framework.verify.double import keep_double
from framework.verify.evidence import Evidence, TokenBatch

# Sums of a few hundred terms err by some multiple of the dtype's eps, relative to the largest.
NOISE_EPS = 100


def run_oracle(
    recipe: Recipe,
    config: PretrainedConfig,
    weights: dict[str, Tensor],
    batches: Sequence[TokenBatch],
    dtype: torch.dtype,
) -> Evidence:
    """Train from `weights` on the batches, microbatch after microbatch on one process; parameters in `dtype`."""
    model = _stock_model(recipe, config, weights, dtype)
    optimizer = _stock_optimizer(recipe.optim, model)
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches):
        for group in optimizer.param_groups:
            rate = learning_rate(step, recipe.optim.schedule, recipe.optim.lr, recipe.train.steps)
            group["lr"] = rate * group["lr_ratio"]
        optimizer.zero_grad()
        with keep_double(dtype):
            losses.append(_accumulate(model, batch, recipe.batch.sequences_per_microbatch))
        limit = float("inf") if recipe.optim.clip_norm is None else recipe.optim.clip_norm
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), limit)))
        if step == 0:
            zeros = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
            gradients = zeros | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    final = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    states = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    undecided = {name: state["undecided"] for name, state in states.items() if "undecided" in state}
    return Evidence(tuple(losses), tuple(norms), gradients, final, undecided)


def _accumulate(model: PreTrainedModel, batch: TokenBatch, sequences_per_microbatch: int) -> float:
    num_tokens = (batch.labels != IGNORE).sum()
    inputs, labels = batch.input_ids.split(sequences_per_microbatch), batch.labels.split(sequences_per_microbatch)
    total = 0.0
    for input_ids, target in zip(inputs, labels, strict=True):
        output = model(input_ids=input_ids)
        loss = F.cross_entropy(output.logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="sum")
        loss = loss / num_tokens
        if getattr(model.config, "output_router_logits", False):
            loss = loss + model.config.router_aux_loss_coef * output.aux_loss / len(inputs)
        loss.backward()
        total += loss.item()
    return total


def _stock_model(
    recipe: Recipe, config: PretrainedConfig, weights: dict[str, Tensor], dtype: torch.dtype
) -> PreTrainedModel:
    chosen = {} if recipe.model.attention == "auto" else {"attn_implementation": recipe.model.attention}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen)
    choose_experts(model, recipe.model.experts, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].to(dtype, copy=True)
        parameter.requires_grad_(not any(re.search(pattern, name) for pattern in recipe.model.freeze))
    return model.train()


def _stock_optimizer(optim: Optim, model: torch.nn.Module) -> torch.optim.Optimizer:
    named = dict(model.named_parameters())
    shapes = [(name, tuple(parameter.shape), parameter.requires_grad) for name, parameter in named.items()]
    groups = [
        {"params": [named[each.parameter]], "lr_ratio": each.lr_ratio, "weight_decay": each.weight_decay}
        for each in group_parameters(shapes, optim)
    ]
    match optim.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False)
        case "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, foreach=False)
        case "lion":
            return PlainLion(groups, {"lr": optim.lr, "betas": optim.betas})


class PlainLion(torch.optim.Optimizer):
    """Lion as its paper's algorithm 2 states it, one parameter at a time: torch has none to compare with.

    `undecided` marks elements that were ever updated by the sign of rounding noise: where the true gradient is zero (a key
    bias: softmax does not see a shift) plus and minus are equally right.
    """

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        directions: dict[Tensor, Tensor] = {}
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    moment = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                    directions[parameter] = beta1 * moment + (1 - beta1) * parameter.grad
                    parameter -= group["lr"] * (directions[parameter].sign() + group["weight_decay"] * parameter)
                    moment.copy_(beta2 * moment + (1 - beta2) * parameter.grad)
        largest = max(float(direction.abs().max()) for direction in directions.values())
        for parameter, direction in directions.items():
            is_noise = (direction != 0) & (direction.abs() < NOISE_EPS * torch.finfo(direction.dtype).eps * largest)
            self.state[parameter]["undecided"] = self.state[parameter].get("undecided", is_noise) | is_noise
