"""Policies of activation checkpointing: what a stage's layers keep and compute again with each, and which of them `auto` takes.

A stage's layers are alike, so a choice is a number of layers for each policy. From front to back they stand in the order sqrt,
full, selective, none: backward comes to the last ones first, and what these have kept is gone when a layer further in front is
computed again.

`auto` is a knapsack with one weight (bytes) and one price (FLOPs). For every number of layers with sqrt and with full it finds
the most layers with none that the budget has room for, the rest being selective: bytes never fall and FLOPs never rise with one
more. So it is exact, and the uniform policies are among what it compares.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.errors import ModelError, RecipeError
from framework.mesh.token_layout import ContextSlices
from framework.model.chunked_loss import LogitMap, find_logit_map
from framework.model.experts import find_experts
from framework.model.kept_outputs import ATTENTION, EXPERTS, Policy
from framework.model.load import build_meta
from framework.model.loss import is_fused
from framework.model.precision import DTYPES
from framework.model.units import find_layers
from framework.parallel.activation_checkpointing import count_groups, group_size
from framework.plan.candidate import resolve_target
from framework.recipe.derive import carry_derived, derive
from framework.recipe.schema import KEPT_OPERATIONS, Memory, Recipe

# In the order of a stage's layers.
POLICIES: tuple[Policy, ...] = ("sqrt", "full", "selective", "none")
Counts = tuple[int, int, int, int]
# Memory that a rank is taken to have: a plan is pure, and made where there may be no such device. GPUs that large models are
# trained on have 80 GB or more; a rank on a CPU is one of several on its host.
DEVICE_BYTES = {"cuda": 80 * 2**30, "cpu": 16 * 2**30}
# Where the logits of a microbatch, in compute dtype, are more than this share of it, `auto` is on. By torch's operations a whole
# loss has 5 times as much at once in bf16 (logits, softmax and its gradient in fp32, their gradient), 5% of the device; by
# kernels the logits, and what a family's own operations make of them. Below that the fourth matmul of the head, 2% of a step for
# Llama 3 8B, is the larger loss.
SHARE, FUSED_SHARE = 0.01, 0.03


class StageActivations(NamedTuple):
    """Bytes of a stage's activations."""

    # Bytes of each microbatch between forward and backward: kept by layers, kept behind them, logits.
    kept: int
    head: int
    logits: int
    # Factors of deferred weight gradients, for each microbatch that has some.
    left: int
    # While one layer computes in backward.
    recomputed: int
    transient: int
    # While a chunk of the loss is computed.
    chunk: int
    # Hidden states between two stages.
    hidden: int = 0


@dataclass(frozen=True)
class PolicyCost:
    """One layer and one microbatch. kept: bytes from forward to backward; recomputed: bytes that are there beside them while the
    layer is computed again; flops: of a token, in what is."""

    kept: int
    recomputed: int
    flops: float


@dataclass(frozen=True)
class PolicyCosts:
    """Cost of each policy for one layer. input_bytes: of a layer's input; forward_flops: of a token, in its forward."""

    by_policy: Mapping[Policy, PolicyCost]
    input_bytes: int
    forward_flops: float

    def kept(self, counts: Counts, more: Sequence[int] = ()) -> int:
        """Bytes that a stage of so many layers keeps. more: of each layer, what its forward has beside what others' have."""
        grouped, whole = counts[0], sum(counts) - counts[-1]
        sizes = (count * self._ordered[index].kept for index, count in enumerate(counts))
        # A group keeps one layer's input; whatever else a layer keeps (a router's choice) stays for all.
        return sum(sizes) - (grouped - count_groups(grouped)) * self.input_bytes + sum(more[whole:])

    def recomputed(self, counts: Counts, more: Sequence[int] = ()) -> int:
        """The most bytes beside those that the stage keeps, while one of its layers is computed again. more: as of `kept`."""
        most, behind, stop = 0, 0, sum(counts)
        for index in reversed(range(len(POLICIES))):
            start = stop - counts[index]
            of_layers, stop = more[start:stop], start
            is_whole = POLICIES[index] == "none"
            if counts[index]:
                again = self._ordered[index].recomputed + (0 if is_whole else max(of_layers, default=0))
                inputs = (group_size(counts[0]) - 1) * self.input_bytes if POLICIES[index] == "sqrt" else 0
                most = max(most, again + inputs - behind)
            behind += counts[index] * self._ordered[index].kept + (sum(of_layers) if is_whole else 0)
        return most

    def flops(self, counts: Counts) -> float:
        """FLOPs of a token in what is computed again."""
        total = sum(count * self._ordered[index].flops for index, count in enumerate(counts))
        return total + (counts[0] - count_groups(counts[0])) * self.forward_flops

    @cached_property
    def _ordered(self) -> list[PolicyCost]:
        return [self.by_policy[policy] for policy in POLICIES]


def uniform(policy: Policy, num_layers: int) -> Counts:
    """All layers of a stage alike."""
    return cast(Counts, tuple(num_layers if each == policy else 0 for each in POLICIES))


def spell(counts: Counts) -> list[Policy]:
    """The policy of each layer of a stage, from front to back."""
    return [policy for policy, count in zip(POLICIES, counts, strict=True) for _ in range(count)]


def shorten(counts: Counts, num_layers: int) -> Counts:
    """The choice of a stage's first `num_layers`."""
    kept = spell(counts)[:num_layers]
    return cast(Counts, tuple(map(kept.count, POLICIES)))


def count_forwards(counts: Counts, position: int) -> int:
    """Number of times that the forward of a stage's layer runs for one microbatch. position: of the layer in the stage."""
    policy, grouped = spell(counts)[position], counts[0]
    if policy != "sqrt":
        return 1 if policy == "none" else 2
    # The last of a group gives no other layer's input.
    return 2 if (position + 1) % group_size(grouped) == 0 or position + 1 == grouped else 3


def choose_counts(
    num_layers: int, bytes_of: Callable[[Counts], int], flops_of: Callable[[Counts], float], budget: int
) -> Counts | None:
    """The choice of fewest FLOPs, and among those of fewest bytes, that fits the budget in bytes; None where nothing does."""
    found = []
    for grouped in range(num_layers + 1):
        for full in range(num_layers + 1 - grouped):
            rest = num_layers - grouped - full
            counts = _most_whole(grouped, full, rest, bytes_of, budget)
            if counts is not None:
                found.append((flops_of(counts), bytes_of(counts), counts))
    return min(found)[2] if found else None


def _most_whole(grouped: int, full: int, rest: int, bytes_of: Callable[[Counts], int], budget: int) -> Counts | None:
    """Leave as many of the rest as fit without checkpointing, and make the others selective."""

    def fits(whole: int) -> bool:
        return bytes_of((grouped, full, rest - whole, whole)) <= budget

    if fits(rest):  # one layer alone needs less when it is not computed again
        return grouped, full, 0, rest
    whole = bisect_left(range(rest), True, key=lambda count: not fits(count)) - 1
    return None if whole < 0 else (grouped, full, rest - whole, whole)


def least_bytes(num_layers: int, bytes_of: Callable[[Counts], int]) -> int:
    """The fewest bytes that any choice needs."""
    pairs = [(grouped, full) for grouped in range(num_layers + 1) for full in range(num_layers + 1 - grouped)]
    rests = [(grouped, full, num_layers - grouped - full) for grouped, full in pairs]
    return min(min(bytes_of((a, b, rest, 0)), bytes_of((a, b, 0, rest))) for a, b, rest in rests)


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
    share = FUSED_SHARE if is_fused(device, itemsize) else SHARE
    return tokens * -(-vocabulary // tp) * itemsize > share * DEVICE_BYTES[device]


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
