"""The oracle: a stock Hugging Face model, stock optimizers, one process, a plain loop.

It imports nothing from `parallel/`, `comm/` or `train/`, so that its agreement is independent. Where the true result is undecided
(Lion's sign of a gradient that is rounding), it follows the layout: see `lion.py`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.model.capacity import capacity_of
from framework.model.load import FORWARD_ERRORS, choose_experts
from framework.model.loss import IGNORE
from framework.model.materialize import kept_in_fp32
from framework.model.precision import DTYPES
from framework.optim.groups import group_parameters
from framework.optim.schedules import learning_rate
from framework.recipe.schema import Optim, Recipe
from framework.verify.double import keep_double
from framework.verify.evidence import Evidence, NothingToCompare, TokenBatch, perturb
from framework.verify.lion import Noise, PlainLion, measure_noise
from framework.verify.plain_bias import PlainBiases
from framework.verify.plain_capacity import drop_beyond_capacity
from framework.verify.plain_fp8 import multiply_in_fp8
from framework.verify.plain_loss_scale import PlainLossScale
from framework.verify.plain_masters import has_no_master, round_master
from framework.verify.plain_moments import PlainMoments

CPU = torch.device("cpu")
# For Lion: how many more times each step's gradients are computed, from weights that are rounded differently.
NUM_PERTURBED = 3


def run_oracle(
    recipe: Recipe,
    config: PretrainedConfig,
    weights: dict[str, Tensor],
    batches: Sequence[TokenBatch],
    dtype: torch.dtype,
    device: torch.device = CPU,
    layout: Evidence | None = None,
) -> Evidence:
    """Train from `weights` on the batches, microbatch after microbatch in one process; forward and backward in `dtype`.

    This is textbook mixed precision: master weights in at least fp32, copied to the model's weights in `dtype`, and gradients
    summed in the masters' dtype. layout: evidence of the layout, for an optimizer that follows its weights or needs its blocks.

    Raises NothingToCompare where stock transformers does not build the model, or does not run it forward or backward.
    """
    layout = layout or Evidence((), (), {}, {})
    oracle = _Oracle(recipe, config, weights, dtype, device, layout.blocks)
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches):
        oracle.set_rate(step)
        losses.append(oracle.find_gradients(batch))
        norms.append(oracle.clip())
        if step == 0:
            gradients = oracle.gradients()
        oracle.update(batch, layout.by_step[step] if layout.by_step else {}, step)
    final = {name: weight.detach().cpu() for name, weight in oracle.weights().items()}
    return Evidence(tuple(losses), tuple(norms), gradients, final, undecided=oracle.count_undecided())


class _Oracle:
    """A model in `dtype`, the masters of its parameters by name, and their optimizer."""

    def __init__(
        self,
        recipe: Recipe,
        config: PretrainedConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        blocks: Mapping[str, Tensor],
    ):
        self._recipe, self._dtype = recipe, dtype
        self._model = _stock_model(recipe, config, dtype, device)
        wide = torch.promote_types(dtype, torch.float32)
        # Without masters a weight is what the model computes with, from the beginning.
        kept_in = {name: each.dtype for name, each in self._model.named_parameters() if has_no_master(recipe.precision)}
        self.masters = {
            name: nn.Parameter(
                weights[name].to(device, kept_in.get(name, wide)).to(wide, copy=True), parameter.requires_grad
            )
            for name, parameter in self._model.named_parameters()
        }
        self._in_bf16 = [name for name, kept in kept_in.items() if kept == torch.bfloat16]
        self._optimizer = _stock_optimizer(recipe.optim, self.masters)
        self._biases = PlainBiases(self._model, recipe.model)
        self._scale = PlainLossScale(recipe.precision)
        self._moments = PlainMoments(recipe.optim, recipe.precision.moments, recipe.train.seed, blocks)

    def set_rate(self, step: int) -> None:
        rate = learning_rate(step, self._recipe.optim.schedule, self._recipe.optim.lr, self._recipe.train.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_ratio"]

    def find_gradients(self, batch: TokenBatch) -> float:
        """Compute the masters' gradients of the batch's loss, and return the loss."""
        for name, parameter in self._model.named_parameters():
            parameter.data.copy_(self.masters[name])
            self.masters[name].grad = None
        self._biases.start()
        with keep_double(self._dtype):
            loss = sum(self._accumulate(batch))
        self._scale.unscale(self.masters.values())
        return loss

    def clip(self) -> float:
        """Clip the gradients as the recipe says, and return their norm before that."""
        limit = self._recipe.optim.clip_norm
        return float(nn.utils.clip_grad_norm_(self.masters.values(), float("inf") if limit is None else limit))

    def gradients(self) -> dict[str, Tensor]:
        """The masters' gradients by name, on the CPU; zeros where a parameter has none."""
        found = {name: torch.zeros_like(m) if m.grad is None else m.grad for name, m in self.masters.items()}
        return {name: gradient.detach().to("cpu", copy=True) for name, gradient in found.items()}

    def weights(self) -> dict[str, Tensor]:
        """The masters, and the correction biases of routers that are buffers, by name."""
        buffers = dict(self._model.named_buffers())
        return self.masters | {name: buffers[name] for name in self._biases.names() if name in buffers}

    def update(self, batch: TokenBatch, layout: Mapping[str, Tensor], step: int) -> None:
        """One step of the optimizer, and of the biases of routers, if the gradients are finite. layout: the layout's weights
        after it, if they are known."""
        loads = self._biases.take()  # before gradients are computed again, which would count tokens, too
        if not self._scale.take():
            return
        if isinstance(self._optimizer, PlainLion) and layout:
            noise = self._measure_noise(batch)
            self._optimizer.follow(noise, {master: layout[name] for name, master in self.masters.items()})
        else:
            self._optimizer.step()
        self._moments.round(self._optimizer, self.masters, step)
        for name in self._in_bf16:
            round_master(self.masters[name], (self._recipe.train.seed, "master", step, name))
        # Last: with biases that have moved, routers would choose other experts, which is no rounding.
        self._biases.move(self.weights(), loads)

    def count_undecided(self) -> dict[str, int]:
        """By name, the number of elements whose update rounding decided in some step."""
        masks = {name: self._optimizer.state[master].get("undecided") for name, master in self.masters.items()}
        return {name: int(mask.sum()) for name, mask in masks.items() if mask is not None and mask.any()}

    def _accumulate(self, batch: TokenBatch) -> Iterator[float]:
        """Add each microbatch's gradients to the masters', and yield its part of the loss."""
        device = self._model.device
        rows, num_tokens = self._recipe.batch.sequences_per_microbatch, int((batch.labels != IGNORE).sum())
        inputs, labels = batch.input_ids.split(rows), batch.labels.split(rows)
        positions = [None] * len(inputs) if batch.position_ids is None else batch.position_ids.split(rows)
        for input_ids, target, position_ids in zip(inputs, labels, positions, strict=True):
            packed = {} if position_ids is None else {"position_ids": position_ids.to(device)}
            with _telling_of_stock(self._model.config, self._dtype):
                output = self._model(input_ids=input_ids.to(device), **packed)
            logits, target = output.logits.flatten(0, 1), target.flatten().to(device)
            loss = F.cross_entropy(_widen(logits), target, ignore_index=IGNORE, reduction="sum") / num_tokens
            if getattr(self._model.config, "output_router_logits", False):
                loss = loss + self._model.config.router_aux_loss_coef * output.aux_loss / len(inputs)
            with _telling_of_stock(self._model.config, self._dtype):
                (loss * self._scale.value).backward()
            for name, parameter in self._model.named_parameters():
                if parameter.grad is not None:
                    master = self.masters[name]
                    gradient = parameter.grad.to(master.dtype)
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    parameter.grad = None
            yield loss.item()

    def _measure_noise(self, batch: TokenBatch) -> dict[Tensor, Noise]:
        """The effect of rounding on the gradients of this step, by master; the gradients are left as they were."""
        masters = self.masters.values()
        own = [(master.detach().clone(), master.grad) for master in masters]
        perturbed: list[list[Tensor | None]] = []
        for seed in range(NUM_PERTURBED):
            for master, (weight, _) in zip(masters, own, strict=True):
                master.data = perturb(weight, self._dtype, seed)
            self.find_gradients(batch)
            self.clip()
            perturbed.append([master.grad for master in masters])
        noise = {}
        for master, (weight, gradient), *others in zip(masters, own, *perturbed, strict=True):
            master.data, master.grad = weight, gradient
            if gradient is not None:
                noise[master] = measure_noise(gradient, [each for each in others if each is not None], self._dtype)
        return noise


@contextmanager
def _telling_of_stock(config: PretrainedConfig, dtype: torch.dtype) -> Iterator[None]:
    """Around what the stock model does, and none of our own code: what it raises is no fault of the oracle's."""
    try:
        yield
    except FORWARD_ERRORS as error:
        word = next(word for word, each in DTYPES.items() if each == dtype)
        raise NothingToCompare(
            f"there is nothing to compare with: stock transformers {transformers.__version__} does not train the"
            f" {config.model_type} in {word}: {error}"
        ) from error


def _widen(logits: Tensor) -> Tensor:
    """Logits in at least fp32: the loss is not computed in bf16."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _stock_model(recipe: Recipe, config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    chosen = {} if recipe.model.attention == "auto" else {"attn_implementation": recipe.model.attention}
    with _telling_of_stock(config, dtype):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **chosen)
    choose_experts(model, recipe.model.experts, dtype)
    if (capacity := capacity_of(recipe.model)) is not None:
        drop_beyond_capacity(model, capacity, recipe.batch.context)
    wide = kept_in_fp32(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.to(torch.float32 if name in wide else dtype)
        parameter.requires_grad_(not any(re.search(pattern, name) for pattern in recipe.model.freeze))
    if recipe.precision.compute == "fp8":
        multiply_in_fp8(model, recipe.precision.fp8_scaling, device)
    return model.to(device).train()


def _stock_optimizer(optim: Optim, masters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    shapes = [(name, tuple(master.shape), master.requires_grad) for name, master in masters.items()]
    groups = [
        {"params": [masters[each.parameter]], "lr_ratio": each.lr_ratio, "weight_decay": each.weight_decay}
        for each in group_parameters(shapes, optim)
    ]
    match optim.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False)
        case "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, foreach=False)
        case "lion":
            return PlainLion(groups, {"lr": optim.lr, "betas": optim.betas})
