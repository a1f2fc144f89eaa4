"""Settings: the keys of a recipe that memory depends on and no search changes; and the candidate of a planned recipe."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil
from typing import Any

import torch

from framework.model.precision import DTYPES
from framework.optim.optimizers import state_names
from framework.plan.candidate import OFFLOADED, Candidate, candidate_of
from framework.plan.target import resolve_target
from framework.recipe.derive import carry_derived
from framework.recipe.schema import Memory, Offload, Recipe, Zero


@dataclass(frozen=True, eq=False)
class Settings:
    """A recipe without its layout: precision, optimizer, options of memory and ZeRO that are not searched. Compared by identity:
    what is remembered of a search is of one of them."""

    recipe: Recipe
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, recipe: Recipe) -> "Settings":
        """The settings of a recipe, with the device and the dtype of where it will run."""
        return cls(resolve_target(recipe))

    @cached_property
    def compute(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return DTYPES[self.recipe.precision.compute]

    @cached_property
    def master(self) -> torch.dtype | None:
        """The dtype of what the optimizer updates; None: that of each buffer."""
        return DTYPES.get(self.recipe.precision.master)

    @cached_property
    def states(self) -> tuple[str, ...]:
        """The optimizer's states."""
        return state_names(self.recipe.optim)

    def remember(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make`, made once for each key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @property
    def device(self) -> str:
        """The kind of device of the ranks."""
        return self.recipe.launch.device

    def layers(self, candidate: Candidate) -> tuple[int, ...] | None:
        """The recipe's layers of each stage, where the candidate has as many: of others `let_rest_follow` leaves them out."""
        layers = self.recipe.pipeline.layers
        return tuple(layers) if layers is not None and len(layers) == candidate.pp * candidate.virtual else None

    def zero(self, candidate: Candidate) -> Zero:
        """The recipe's group `zero` with the candidate's stage."""
        return replace(self.recipe.zero, stage=candidate.zero)

    def offload(self, candidate: Candidate) -> Offload:
        """The recipe's fractions of what the candidate offloads; all of it where the recipe has none."""
        given = self.recipe.memory.offload
        optimizer, parameters, activations = (
            (getattr(given, name) or 1.0) if name in candidate.offload else 0.0 for name in OFFLOADED
        )
        return replace(given, optimizer=optimizer, parameters=parameters, activations=activations)

    def memory(self, candidate: Candidate, is_chunked: bool) -> Memory:
        """The recipe's group `memory` with the candidate's choices. is_chunked: what memory.chunked_loss means for it."""
        return replace(
            self.recipe.memory,
            activation_checkpointing=candidate.checkpointing,
            offload=self.offload(candidate),
            chunked_loss=is_chunked,
        )


def planned_candidate(recipe: Recipe) -> Candidate:
    """The candidate of a planned recipe, also where no candidate states all that the recipe does: of what is offloaded in part
    `Settings` has the fraction, memory.activation_checkpointing=auto is chosen beside it (`Plan.chosen`), and the stages of a
    pipeline.table are the Plan's; times are those of 1f1b in its place."""
    memory, offload = recipe.memory, recipe.memory.offload
    whole = replace(
        offload,
        optimizer=ceil(offload.optimizer),
        parameters=ceil(offload.parameters),
        activations=ceil(offload.activations),
    )
    policy = memory.activation_checkpointing
    memory = replace(memory, offload=whole, activation_checkpointing="none" if policy == "auto" else policy)
    pipeline = recipe.pipeline
    if pipeline.table is not None:
        pipeline = replace(pipeline, table=None, schedule="1f1b", virtual_stages=None)
    return candidate_of(carry_derived(recipe, replace(recipe, memory=memory, pipeline=pipeline)))
