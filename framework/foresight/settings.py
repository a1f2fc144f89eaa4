"""Settings: what of a recipe a forecast depends on and no search changes; and the candidate that a recipe describes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from framework.foresight.candidate import Candidate
from framework.model.precision import DTYPES
from framework.optim.optimizers import state_names
from framework.plan.plan import Plan
from framework.plan.target import resolve_target
from framework.recipe.derive import count_virtual_stages
from framework.recipe.schema import Memory, Offload, Recipe, Zero

OFFLOADED = ("optimizer", "parameters", "activations")


@dataclass(frozen=True, eq=False)
class Settings:
    """A recipe without its layout: precision, optimizer, options of memory and ZeRO that are not searched. Compared by identity:
    what is remembered of a search is of one of them."""

    recipe: Recipe
    _known: dict[Any, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, recipe: Recipe) -> "Settings":
        """Those of a recipe, with the device and the dtype of where it will run."""
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
        """What `make` returns, made once for each key."""
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @property
    def device(self) -> str:
        """The kind of device of the ranks."""
        return self.recipe.launch.device

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


def candidate_of(plan: Plan, ranks_per_node: int | None = None) -> Candidate:
    """The candidate that a plan is of. Where memory.activation_checkpointing=auto chooses by layer it says none: what was chosen
    is given to `forecast_memory` beside it."""
    derived, recipe, topology = plan.derived, plan.recipe, plan.topology
    policy, offload = recipe.memory.activation_checkpointing, recipe.memory.offload
    return Candidate(
        dp=derived.dp,
        cp=derived.cp,
        tp=derived.tp,
        pp=derived.pp,
        ep=derived.ep,
        sequence=recipe.parallel.sequence,
        ulysses=derived.ulysses,
        is_gather=recipe.parallel.context == "gather",
        expert_tp=derived.expert_tp,
        schedule=recipe.pipeline.schedule,
        virtual=count_virtual_stages(recipe.pipeline),
        zero=recipe.zero.stage,
        shard=topology.size("shard"),
        checkpointing="none" if policy == "auto" else policy,
        offload=frozenset(name for name in OFFLOADED if getattr(offload, name)),
        sequences=derived.sequences_per_microbatch,
        accumulation=derived.accumulation,
        context=derived.context,
        ranks_per_node=ranks_per_node or derived.ranks_per_node,
    )


def chosen_counts(plan: Plan) -> Mapping[int, tuple[int, int, int, int]] | None:
    """Of each stage the layers by policy, where the recipe has them chosen; else None."""
    if plan.recipe.memory.activation_checkpointing != "auto":
        return None
    return {
        index: counts for rank in plan.topology.ranks("pp", 0) for index, counts in plan.checkpointing(rank).items()
    }
