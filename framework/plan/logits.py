"""Whether a run's loss is computed in chunks (`memory.chunked_loss`), decided on the whole model, equal on every rank."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from framework.errors import ModelError
from framework.model.logit_map import LogitMap, find_logit_map
from framework.model.precision import DTYPES
from framework.recipe.derive import derive
from framework.recipe.schema import Recipe

# Memory that a rank is taken to have: a plan is pure, and made where there may be no such device. The GPUs that models of this
# size are trained on have 80 GB or more; a CPU rank is one of several on its host.
DEVICE_BYTES = {"cuda": 80 * 2**30, "cpu": 16 * 2**30}
# Of that, whose excess by the logits of a microbatch in compute dtype turns `auto` on. Beside them a plain loss holds them in
# fp32, their softmax and their gradient: in bf16 some 7 times as much at once, all in the moment when activations are most too.
# Below 7% of the device it is not worth the fourth matmul of the head, 1% of a step where the head is 3% of the model.
SHARE = 0.01


def resolve_chunked_loss(recipe: Recipe, whole: PreTrainedModel) -> tuple[Recipe, LogitMap | None]:
    """The recipe with memory.chunked_loss true or false, and where it is true what stands between head and logits.

    whole: on meta. Raises ModelError for a family whose loss cannot be chunked, if that is asked for; `auto` leaves it whole.
    """
    asked = recipe.memory.chunked_loss
    found = None
    if asked is True or (asked == "auto" and _are_large(recipe, whole)):
        try:
            found = find_logit_map(whole, DTYPES[recipe.precision.compute])
        except ModelError:
            if asked is True:
                raise
    return replace(recipe, memory=replace(recipe.memory, chunked_loss=found is not None)), found


def logits_bytes(recipe: Recipe, vocabulary: int) -> int:
    """Bytes of the logits of a microbatch on one rank, in compute dtype."""
    derived, dtype = derive(recipe), DTYPES[recipe.precision.compute]
    return derived.sequences_per_microbatch * derived.context * -(-vocabulary // derived.tp) * dtype.itemsize


def _are_large(recipe: Recipe, whole: PreTrainedModel) -> bool:
    device = torch.device(recipe.launch.device).type
    return logits_bytes(recipe, whole.get_output_embeddings().weight.shape[0]) > SHARE * DEVICE_BYTES[device]
