"""Whether a run's loss is computed in chunks (`memory.chunked_loss`), decided on the whole model, equal on every rank."""

from dataclasses import replace

import torch
from transformers import PretrainedConfig, PreTrainedModel

from framework.errors import ModelError
from framework.mesh.context import ContextSlices
from framework.model.load import build_meta
from framework.model.logit_map import LogitMap, find_logit_map
from framework.model.precision import DTYPES
from framework.plan.target import resolve_target
from framework.recipe.derive import carry_derived, derive
from framework.recipe.schema import Recipe

# Memory that a rank is taken to have: a plan is pure, and made where there may be no such device. GPUs that large models are
# trained on have 80 GB or more; a rank on a CPU is one of several on its host.
DEVICE_BYTES = {"cuda": 80 * 2**30, "cpu": 16 * 2**30}
# Where the logits of a microbatch, in compute dtype, are more than this share of it, `auto` is on. A whole loss has 5 times as
# much at once in bf16 (logits, softmax and its gradient in fp32, their gradient): 5% of the device. Below that the fourth matmul
# of the head, 2% of a step for Llama 3 8B, is the larger loss.
SHARE = 0.01


def resolve_chunked_loss(recipe: Recipe, whole: PreTrainedModel) -> tuple[Recipe, LogitMap | None]:
    """The recipe with memory.chunked_loss true or false, and where it is true what stands between head and logits.

    whole: on meta. Raises ModelError for a family whose loss cannot be chunked, if that is asked for; `auto` leaves it whole.
    """
    asked = recipe.memory.chunked_loss
    found = None
    if asked is True or (asked == "auto" and are_logits_large(recipe, whole.get_output_embeddings().weight.shape[0])):
        try:
            found = find_logit_map(whole, DTYPES[recipe.precision.compute])
        except ModelError:
            if asked is True:
                raise
    resolved = replace(recipe, memory=replace(recipe.memory, chunked_loss=found is not None))
    return carry_derived(recipe, resolved), found


def is_large(tokens: int, vocabulary: int, tp: int, itemsize: int, device: str) -> bool:
    """Whether the logits of a microbatch on a rank, in compute dtype, are so large that `auto` is on. tokens: of a microbatch,
    of a rank of cp."""
    return tokens * -(-vocabulary // tp) * itemsize > SHARE * DEVICE_BYTES[device]


def keep_chunked_loss(recipe: Recipe, config: PretrainedConfig) -> Recipe:
    """The recipe for a smaller model in place of that of `config`: memory.chunked_loss=true where `auto` means that for it."""
    vocabulary = config.get_text_config().vocab_size
    if recipe.memory.chunked_loss != "auto" or not are_logits_large(resolve_target(recipe), vocabulary):
        return recipe
    resolved, _ = resolve_chunked_loss(resolve_target(recipe), build_meta(config))
    return replace(recipe, memory=resolved.memory)


def are_logits_large(recipe: Recipe, vocabulary: int) -> bool:
    """Whether `auto` is on, for a recipe with a device and a compute dtype."""
    derived, dtype = derive(recipe), DTYPES[recipe.precision.compute]
    slices = ContextSlices(derived.context, derived.ulysses, derived.ring)
    tokens = derived.sequences_per_microbatch * slices.tokens_local
    return is_large(tokens, vocabulary, derived.tp, dtype.itemsize, torch.device(recipe.launch.device).type)
