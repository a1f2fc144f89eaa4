"""The oracle's correction biases of routers: loads counted over whole batches on a stock model, and one line of update.

A bias that the recipe adds to routers without one (`model.router_bias: added`) changes a token's experts where their ranks by
score and bias are not those by score; every other token keeps what the stock router gave.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.model.added_bias import RouterForm, add_biases, find_router_form
from framework.model.mixtures import ADDED_BIAS, Mixture, find_mixtures
from framework.model.units import find_units
from framework.recipe.schema import Model


class PlainBiases:
    """Counts loads from `start` to `take`, and moves biases by them. settings: what is added, and the rate of one step."""

    def __init__(self, model: PreTrainedModel, settings: Model):
        self._rate = settings.router_bias_rate
        if settings.router_bias == "added":
            _add_biases(model)
        self._mixtures = [each for each in find_mixtures(model, find_units(model)) if each.bias]
        self._loads: dict[str, Tensor] = {}
        for mixture in self._mixtures:
            model.get_submodule(mixture.experts).register_forward_pre_hook(partial(self._count, mixture))

    def names(self) -> list[str]:
        """Full names of the biases, buffers or parameters."""
        return [each.bias for each in self._mixtures]

    def start(self) -> None:
        """Forget what was counted."""
        self._loads = {each.bias: torch.zeros(each.num_experts, dtype=torch.int64) for each in self._mixtures}

    def take(self) -> dict[str, Tensor]:
        """What was counted: tokens of each expert, [E] int64, by the bias's full name."""
        return self._loads

    def move(self, biases: Mapping[str, Tensor], loads: Mapping[str, Tensor]) -> None:
        """One step, in place. biases: by full name; loads: those of `take`."""
        for mixture in self._mixtures:
            load, bias = loads[mixture.bias].to(torch.float64), biases[mixture.bias]
            bias.data.add_((self._rate * (load.mean() - load).sign()).to(bias).view_as(bias))

    def _count(self, mixture: Mixture, experts: nn.Module, args: tuple[Any, ...]) -> None:
        self._loads[mixture.bias] += torch.bincount(args[1].flatten().cpu(), minlength=mixture.num_experts)


def _add_biases(model: PreTrainedModel) -> None:
    form = find_router_form(model.config)
    for name in add_biases(model, find_mixtures(model, find_units(model))):
        model.get_submodule(name).register_forward_hook(partial(_choose, form))


def _choose(form: RouterForm, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The router's output, with other experts for the tokens whose choice its bias changes."""
    logits, weights, index = output[form.logits], output[form.weights].clone(), output[form.index].clone()
    wide = logits if logits.dtype == torch.float64 else logits.float()
    scores = torch.sigmoid(wide) if form.is_sigmoid else torch.softmax(wide, dim=1)
    # torch's choice of equal scores, which a row of zeros has (a padding token's), is the stock router's.
    biased = (scores.detach() + router.get_buffer(ADDED_BIAS)).topk(index.shape[1], dim=1).indices
    for token, chosen in enumerate(biased.tolist()):
        if set(chosen) == set(index[token].tolist()):
            continue
        own = torch.stack([scores[token, expert] for expert in chosen])
        weights[token] = form.scale * (own / own.sum() if form.is_normalised else own)
        index[token] = torch.tensor(chosen)
    replaced = dict(enumerate(output)) | {form.weights: weights, form.index: index}
    return tuple(replaced.values())
