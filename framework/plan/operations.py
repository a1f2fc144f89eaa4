"""The operations of a model's layers whose outputs can be kept for backward (`memory.kept_operations`)."""

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.errors import RecipeError
from framework.model.experts import find_experts
from framework.model.kept_outputs import ATTENTION, EXPERTS
from framework.model.units import find_layers
from framework.recipe.schema import KEPT_OPERATIONS, Memory


def refuse_unknown_operations(memory: Memory, model: PreTrainedModel) -> None:
    """RecipeError where the recipe names an operation that the model's layers do not have. The default names many families'."""
    known = find_operations(model)
    unknown = [name for name in memory.kept_operations if name not in {*known, *KEPT_OPERATIONS}]
    if unknown:
        raise RecipeError(
            f"memory.kept_operations: the layers of {model.config.model_type} have no operation {unknown[0]!r}:"
            f" name some of {', '.join(known)}"
        )


def find_operations(model: PreTrainedModel) -> list[str]:
    """Names of what can be kept of the model's layers, each once."""
    found = find_layers(model)
    names = [ATTENTION]
    for layer in [] if found is None else found[1]:
        names += [EXPERTS for _ in find_experts(layer)]
        linears = [path for path, module in layer.named_modules() if type(module) in (nn.Linear, Conv1D)]
        names += [path.rpartition(".")[2] for path in linears]
    return list(dict.fromkeys(names))
