"""muP: initial values and learning rates of a wider model from those of a base model, so that the best rate carries over (Yang et
al. 2022, arXiv 2203.03466, table 3, for Adam and its like).

With r = inputs of a matrix over those in the base model:

    hidden matrices, whose outputs grow too     deviation / sqrt(r)     rate / r
    head and routers, whose outputs do not      deviation / r           rate / r
    embeddings, norms, biases                   as in the base model

The base model itself is as without muP. No multipliers: what is trained and exported is the family's own model.
"""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.errors import ModelError
from framework.model.experts import find_experts
from framework.model.load import build_meta
from framework.model.units import tied_names

# Attributes of an attention by which logits are scaled.
HEAD_SIZES = ("head_dim", "head_size", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class WidthScale(NamedTuple):
    """Factors of a parameter's initial deviation and of its learning rate."""

    initial: float
    rate: float


SAME = WidthScale(1.0, 1.0)


def find_scales(whole: PreTrainedModel, base_values: Mapping[str, Any]) -> dict[str, WidthScale]:
    """The factors of each parameter, by all of its names; none without a base model. base_values: of its config.

    Raises ModelError where the models differ in more than widths, or where a parameter would have to be two things."""
    if not base_values:
        return {}
    base = build_meta(_with_values(whole.config, base_values))
    shapes, of_base = ({name: tuple(p.shape) for name, p in each.named_parameters()} for each in (whole, base))
    if shapes.keys() != of_base.keys():
        raise _refuse(whole, f"only one model has {min(shapes.keys() ^ of_base.keys())}: only widths may differ")
    for name, module in base.named_modules():
        for size in (each for each in HEAD_SIZES if each in vars(module)):
            if vars(module)[size] != vars(whole.get_submodule(name))[size]:
                raise _refuse(
                    whole, f"heads are scaled by their size, which differs ({size} of {name}): let their number grow"
                )
    head, embedding = whole.get_output_embeddings(), whole.get_input_embeddings()
    if head.weight is embedding.weight:
        raise _refuse(
            whole, "embedding and head are one weight, of which they need two scales: tie_word_embeddings=false"
        )
    transposed = {
        f"{name}.{weight}"
        for name, _, form in find_experts(whole)
        if form.is_transposed
        for weight in (form.first, form.last)
    }
    found = {}
    for aliases in tied_names(whole).values():
        for name in aliases:
            module = whole.get_submodule(name.rpartition(".")[0])
            is_transposed = isinstance(module, Conv1D) or name in transposed
            is_matrix = len(shapes.get(name, ())) > 1 and not isinstance(module, nn.Embedding)
            found[name] = _scale(shapes[name], of_base[name], is_transposed) if is_matrix else SAME
    return found


def _scale(shape: tuple[int, ...], base: tuple[int, ...], is_transposed: bool) -> WidthScale:
    rows, columns = (own / before for own, before in zip(shape[-2:], base[-2:], strict=True))
    inputs, outputs = (rows, columns) if is_transposed else (columns, rows)
    return WidthScale(1 / inputs if outputs == 1 else inputs**-0.5, 1 / inputs)


def _with_values(config: PretrainedConfig, values: Mapping[str, Any]) -> PretrainedConfig:
    made = deepcopy(config)
    for name, value in values.items():
        if not hasattr(made, name):
            raise ModelError(f"model.mup_base.{name}: a {config.model_type} config has no such value")
        setattr(made, name, value)
    return made


def _refuse(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(f"model.mup_base: no base model of this {model.config.model_type}: {reason}")
