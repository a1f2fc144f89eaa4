"""The mixtures of experts of a model, found by structure: their experts, the router that Hugging Face records, and the bias that
corrects the router's choice, if it has one.

A mixture's experts are one module of stacked matrices. Most are called with the chosen experts of each token; llama4's are called
with all tokens for each expert, weighted by its router's scores, which are zero where an expert was not chosen.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from transformers import PreTrainedModel

from framework.errors import ModelError
from framework.model.experts import ExpertsForm, count_experts, form_of
from framework.model.load_balancing import find_routers
from framework.model.units import Unit
from framework.recipe.schema import Model

# Added to a router's scores when it chooses experts, and to nothing else: no gradient reaches it.
CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True)
class Mixture:
    """One mixture of experts. layer: the name of its unit; experts, router: paths of modules, the router's "" where Hugging Face
    records none; logits: their index in its output; form: of the experts; bias: the full name
    of the correction bias, a buffer or a parameter of num_experts elements, "" for none."""

    layer: str
    experts: str
    num_experts: int
    router: str
    logits: int
    form: ExpertsForm
    bias: str


def find_mixtures(model: PreTrainedModel, units: Sequence[Unit]) -> tuple[Mixture, ...]:
    """All mixtures of the model's layers, in order; none for a dense model. units: of the whole model."""
    paths = {module: path for path, module in model.named_modules()}
    routers = {paths[module]: logits for module, logits in find_routers(model)}
    sizes = {name: each.numel() for name, each in chain(model.named_parameters(), model.named_buffers())}
    biases = {name: size for name, size in sizes.items() if name.rpartition(".")[2] in CORRECTION_BIASES}
    found = []
    for unit in (unit for unit in units if unit.is_layer):
        for path in unit.modules:
            module = model.get_submodule(path)
            if (form := form_of(module)) is None:
                continue
            block, count = f"{path.rpartition('.')[0]}.", count_experts(module)
            router = next((each for each in routers if each.startswith(block)), "")
            bias = next((name for name, size in biases.items() if name.startswith(block) and size == count), "")
            found.append(Mixture(unit.name, path, count, router, routers.get(router, 0), form, bias))
    return tuple(found)


def refuse_bias_rate(settings: Model, model: PreTrainedModel, mixtures: Sequence[Mixture]) -> None:
    """Raise ModelError where the recipe moves biases that the model does not have, or that it freezes."""
    if not settings.router_bias_rate:
        return
    key = f"model.router_bias_rate={settings.router_bias_rate:g}"
    biases = [each.bias for each in mixtures if each.bias]
    if not biases:
        what = "routers without a correction bias of one number for each expert" if mixtures else "no experts"
        other = "; or take their auxiliary loss, model.config.output_router_logits=true" if mixtures else ""
        raise ModelError(
            f"{key} moves the bias with which routers correct their choice of experts, but {model.config.model_type} models have"
            f" {what}: set model.router_bias_rate=0{other}"
        )
    trained = [name for name, _ in model.named_parameters() if name in biases]  # freezing says nothing of buffers
    frozen = next((pattern for pattern in settings.freeze if any(re.search(pattern, name) for name in trained)), None)
    if frozen is not None:
        raise ModelError(
            f"{key} moves {trained[0]}, which model.freeze={frozen!r} leaves as it is: set model.router_bias_rate=0, or take a"
            " pattern that matches no bias of routers"
        )
