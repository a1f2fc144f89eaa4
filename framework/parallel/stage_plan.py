"""StagePlan: the facts about one pipeline stage on one rank that the transforms of `parallelize` may ask for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

import torch

from framework.comm.communicator import Communicator
from framework.mesh.token_layout import TokenLayout
from framework.model.borders import Border
from framework.model.kept_outputs import Policy
from framework.model.routers import LoadBalancingLoss, RoutedTokens
from framework.model.stage import StageBounds, own_units
from framework.model.units import Unit
from framework.recipe.schema import Recipe


@dataclass(frozen=True)
class StagePlan:
    """One stage on one rank; a value, equal on all ranks but for `axes` and `tokens`."""

    recipe: Recipe
    axes: Mapping[str, Communicator]
    """The mesh's, as this rank sees them."""
    bounds: StageBounds
    """The stage's layers."""
    tokens: TokenLayout
    units: tuple[Unit, ...]
    """The whole model's, in order of computation."""
    ties: Mapping[str, tuple[str, ...]]
    """All names of a parameter in the whole model, by its name in its unit."""
    groups: Mapping[str, str]
    """The key of each trained parameter's optimizer group."""
    compute_dtype: torch.dtype
    master_dtype: torch.dtype | None
    device: torch.device
    owns_attention: bool = False
    """Whether layers attend by Meshwright's attention, not by transformers'."""
    whole_mixers: frozenset[str] = frozenset()
    """Classes of modules that get the tokens of all ranks of `cp`; none where our attention divides them."""
    received: Border = ()
    """The values that the stage before hands on; none on the first."""
    sent: Border = ()
    """The values for the next stage; none on the last."""
    load_balancing: LoadBalancingLoss | None = None
    policies: Mapping[str, Policy] = field(default_factory=dict)
    """Activation-checkpointing policy by the unit of a layer."""

    @cached_property
    def own_units(self) -> tuple[Unit, ...]:
        """The units of which the stage computes anything, in order; their parameters are those that the stage has."""
        return tuple(own_units(self.units, self.ties, self.bounds))

    @cached_property
    def trains_below(self) -> bool:
        """Whether a stage before this one trains anything, and so needs the gradient of what this one receives."""
        below = takewhile(lambda unit: not self.bounds.owns(unit), self.units)
        return any(name in self.groups for unit in below for name in unit.parameters)

    @cached_property
    def routed_tokens(self) -> RoutedTokens:
        """The tokens that routers see: all, inside the region that a mixture of sliced experts is; those outside of regions where
        experts are whole."""
        is_region = self.axes["expert_tp"].size > 1
        return (RoutedTokens.whole if is_region else RoutedTokens.outside)(self.tokens, self.axes)
