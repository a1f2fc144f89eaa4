"""A correction bias for routers that have none (`model.router_bias: added`).

    s = softmax(logits) or sigmoid(logits)      in at least fp32, [T, E]
    chosen = top-k of s + b                     b: the bias, [E]; no gradient reaches it
    weights = s[chosen]                         over their sum where the family does that, times the family's factor

The bias is a buffer of the router's module, in the model's state dict, and zero at first: checkpoints, pipeline stages and what
moves it see a correction bias like any other. A hook on the router computes the choice again from its logits. How a family makes
weights of logits is found by running its routers in a small copy: with a bias of zero this must be what the router gives. A
Hugging Face model of the exported weights has no such bias and chooses without it.

    T tokens, k experts per token, E experts
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.errors import ModelError
from framework.model.load import FORWARD_ERRORS, choose_experts
from framework.model.materialize import seed_rng
from framework.model.mixtures import ADDED_BIAS, Mixture, find_mixtures, refuse_bias_rate
from framework.model.shrink import shrink
from framework.model.units import Unit, find_units
from framework.recipe.schema import Model

# Relative: above the rounding of fp32, below the difference that another formula makes.
LARGEST_DIFFERENCE = 1e-5
# Sequences and tokens of the trial: enough that groups of experts, noise and thresholds would show.
TRIAL = (4, 16)


@dataclass(frozen=True)
class RouterForm:
    """How a router makes weights of logits. weights, index: their places in its output, both [T, k], beside the logits'."""

    logits: int
    weights: int
    index: int
    is_sigmoid: bool
    is_normalised: bool
    scale: float

    def score(self, logits: Tensor) -> Tensor:
        """What experts are chosen by, [..., E], in at least fp32."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return wide.sigmoid() if self.is_sigmoid else wide.softmax(-1)

    def weigh(self, scores: Tensor, index: Tensor) -> Tensor:
        """The weights of the chosen experts.  scores: [T, E]; index: [T, k] -> [T, k]."""
        chosen = scores.gather(-1, index)
        return self.scale * (chosen / chosen.sum(-1, keepdim=True) if self.is_normalised else chosen)


def prepare_mixtures(settings: Model, model: PreTrainedModel, units: Sequence[Unit]) -> tuple[Mixture, ...]:
    """The mixtures of a whole model, after its routers have got the bias that the recipe adds.

    Raises ModelError where the recipe adds or moves biases that this model cannot have, or freezes.
    """
    mixtures = find_mixtures(model, units)
    if settings.router_bias == "added":
        if not mixtures:
            raise _refuse(model.config, "it has no stacked experts")
        form = find_router_form(model.config)
        for name in add_biases(model, mixtures):
            model.get_submodule(name).register_forward_hook(partial(_choose_again, form))
        mixtures = find_mixtures(model, units)
    refuse_bias_rate(settings, model, mixtures)
    return mixtures


def add_biases(model: PreTrainedModel, mixtures: Sequence[Mixture]) -> list[str]:
    """Give each mixture's router a bias of zeros, fp32, where its weights are; the routers' names."""
    for mixture in mixtures:
        router = model.get_submodule(mixture.router)
        device = next(router.parameters()).device
        router.register_buffer(ADDED_BIAS, torch.zeros(mixture.num_experts, dtype=torch.float32, device=device))
    return [mixture.router for mixture in mixtures]


def _choose_again(form: RouterForm, router: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    scores, given = form.score(output[form.logits]), output[form.weights]
    index = (scores.detach() + router.get_buffer(ADDED_BIAS)).topk(given.shape[-1], -1).indices
    replaced = list(output)
    replaced[form.weights] = form.weigh(scores, index).to(given.dtype)
    replaced[form.index] = index
    return tuple(replaced)


def find_router_form(config: PretrainedConfig) -> RouterForm:
    """The form of a family's routers, from a small copy in fp32.

    Raises ModelError for a family whose routers have a bias of their own, or do anything else than take the k largest of their
    scores."""
    small = shrink(config)
    small.use_cache = small.get_text_config().use_cache = False
    small.output_router_logits = False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        seed_rng(0)
        # As in training: some routers draw random numbers there.
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).train()
        choose_experts(model, "eager", torch.float32)  # takes experts of any size
        mixtures = find_mixtures(model, find_units(model))
        _refuse_own_biases(config, mixtures)
        outputs = _run_routers(config, model, mixtures)
    factor = small.get_text_config().to_dict().get("routed_scaling_factor") or 1.0
    forms = [
        form
        for is_sigmoid, is_normalised, scale in product((False, True), (True, False), (1.0, float(factor)))
        if (form := _place(mixtures[0], outputs[0], is_sigmoid, is_normalised, scale)) is not None
        and all(_agrees(form, mixture, output) for mixture, output in zip(mixtures, outputs, strict=True))
    ]
    if not forms:
        raise _refuse(config, "its routers do something else than weight the k largest of their scores")
    return forms[0]


def _refuse_own_biases(config: PretrainedConfig, mixtures: Sequence[Mixture]) -> None:
    own = next((mixture.bias for mixture in mixtures if mixture.bias), "")
    if own:
        raise _refuse(
            config, f"its routers have a correction bias of their own ({own}), moved with model.router_bias=own"
        )
    if not all(mixture.router for mixture in mixtures):
        raise _refuse(config, "transformers does not say which modules are its routers")


def _run_routers(config: PretrainedConfig, model: PreTrainedModel, mixtures: Sequence[Mixture]) -> list[Any]:
    """What each mixture's router gives in a forward of random tokens."""
    found: dict[str, Any] = {}

    def note(name: str, router: nn.Module, args: Any, output: Any) -> None:
        found[name] = output

    for mixture in mixtures:
        router = model.get_submodule(mixture.router)
        router.register_forward_hook(partial(note, mixture.router))
        for parameter in router.parameters():
            # Initial weights leave scores nearly even, where one formula is much like another.
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    try:
        model(input_ids=torch.randint(0, model.config.get_text_config().vocab_size, TRIAL))
    except FORWARD_ERRORS as error:
        raise _refuse(config, f"it does not run on token ids alone ({error})") from error
    return [found.get(mixture.router) for mixture in mixtures]


def _place(mixture: Mixture, output: Any, is_sigmoid: bool, is_normalised: bool, scale: float) -> RouterForm | None:
    """The form with the places of weights and index in a router's output; None where these are not there."""
    if not isinstance(output, tuple) or len(output) != 3:
        return None
    index = next((place for place, each in enumerate(output) if each.dtype == torch.int64), mixture.logits)
    if index == mixture.logits:
        return None
    return RouterForm(mixture.logits, 3 - mixture.logits - index, index, is_sigmoid, is_normalised, scale)


def _agrees(form: RouterForm, mixture: Mixture, output: tuple[Tensor, ...]) -> bool:
    """Whether with a bias of zero the form gives a router's own choice and weights, in whatever order of its k experts."""
    logits, weights, index = output[form.logits], output[form.weights], output[form.index]
    if logits.shape[-1] != mixture.num_experts or weights.shape != index.shape or index.ndim != 2:
        return False
    scores = form.score(logits)
    own = scores.topk(index.shape[-1], -1).indices
    if not torch.equal(own.sort(-1).values, index.sort(-1).values):
        return False
    difference = (form.weigh(scores, index) - weights).abs().max() / weights.abs().max()
    return bool(difference <= LARGEST_DIFFERENCE)


def _refuse(config: PretrainedConfig, reason: str) -> ModelError:
    return ModelError(
        f"model.router_bias=added adds a bias to a router's choice of experts, which cannot be done for {config.model_type}:"
        f" {reason}. Leave model.router_bias and model.router_bias_rate out; where the family has an auxiliary loss,"
        " model.config.output_router_logits=true balances its experts"
    )
