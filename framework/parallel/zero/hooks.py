"""Hooks that tell where forward and backward are, and the order in which they have units unsharded, resharded and reduced.

The order is a function of positions alone, equal on all ranks. A rank tells where its computation is. From there everything
follows, also for units that this rank's computation left out (a layer that is skipped for its data): they take their turn, too,
because other ranks may not have left them out, and collectives of different units must never meet.
DeepSpeed records a trace of modules instead and drops it when data takes another path; ranks whose traces differ hang.

    forward enters unit p     those behind it are resharded, p and the next ones are unsharded
    forward ends              all units have been entered; without a backward to come all are resharded
    backward enters unit p    those behind it (p+1, ...) are resharded, p and the ones before it are unsharded, p+1 is reduced
    backward ends             all units have been entered and left
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from framework.model.units import Unit
from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.parameters import ParameterSync


@dataclass(frozen=True)
class UnitUse:
    """Facts about a unit that are known before anything runs.

    is_kept: read again further on in forward (its weight is tied to a later unit), so kept until backward leaves it.
    is_read_in_backward: not an embedding, whose gradient needs no weight, and not above frozen units only.
    """

    name: str
    is_kept: bool
    is_read_in_backward: bool


class UnitOrder:
    """Positions of forward and of backward, and what they have set off. prefetch_units: units unsharded ahead of the one in use,
    in forward and in backward (Zhao et al. 2023, section 3.3)."""

    def __init__(
        self, uses: Sequence[UnitUse], parameters: ParameterSync, gradients: GradientSync, prefetch_units: int
    ):
        self._uses, self._parameters, self._gradients = uses, parameters, gradients
        self._prefetch_units = prefetch_units
        self._with_parameters = [index for index, buffers in enumerate(parameters.units) if buffers]
        self._last = len(uses) - 1
        self._forward = -1
        self._backward = len(uses)

    @property
    def position(self) -> int:
        """The furthest unit that this forward has entered."""
        return self._forward

    def unshard_ahead(self, is_forward: bool) -> None:
        """Start to unshard the unit that computation meets first; the others follow as it goes on."""
        index = self._with_parameters[0 if is_forward else -1]
        if is_forward or self._uses[index].is_read_in_backward:
            self._parameters.start_unshard(index)

    def start_forward(self) -> None:
        """Begin a forward, before the first unit."""
        self._forward = -1

    def enter_forward(self, position: int) -> None:
        """Enter unit `position` and those before it, if forward has not yet: reshard what is behind, unshard what comes."""
        # One unit at a time, also over those that this rank skipped: ranks that did not skip them start the same collectives
        # in the same order.
        while self._forward < position:
            # Before the unshard: its memory may be taken from what is resharded, which is what bounds the peak.
            self._reshard(
                each for each in self._parameters.transient if each <= self._forward and not self._uses[each].is_kept
            )
            self._forward += 1
            for each in range(self._forward, min(self._forward + self._prefetch_units, self._last) + 1):
                self._parameters.start_unshard(each)

    def end_forward(self, has_backward: bool) -> None:
        """Finish a forward: all units have been entered, and without a backward to come all are resharded."""
        self.enter_forward(self._last)
        # The last unit stays for a backward: it is the first that backward reads, at once.
        if not has_backward:
            self._reshard(self._parameters.transient)
            # Units that stay, of which this forward has left some out: nothing may be under way behind a validation.
            self._parameters.wait_for_unshards()

    def enter_backward(self, position: int) -> None:
        """Begin the backward of unit `position` and of those behind it, if it has not begun: reshard, unshard, reduce."""
        while self._backward > position:
            self._backward -= 1
            self._reshard(each for each in self._parameters.transient if each > self._backward)
            for each in range(self._backward, max(self._backward - self._prefetch_units, 0) - 1, -1):
                if self._uses[each].is_read_in_backward:
                    self._parameters.start_unshard(each)
            # After the unshards: backward waits for these within a unit's time, nobody waits for a reduction so soon, and on one
            # communicator what is started first is sent first.
            self._reduce(self._backward + 1)

    def end_backward(self) -> None:
        """Finish a backward: every unit has been entered, left and reduced."""
        self.enter_backward(0)
        self._reshard(self._parameters.transient)
        # Not before: gradients of the first unit may arrive until autograd has returned.
        self._reduce(0)
        self._backward = self._last + 1

    def _reshard(self, indices: Iterable[int]) -> None:
        for index in list(indices):  # a copy: resharding takes the unit out of `transient`
            self._parameters.reshard(index)

    def _reduce(self, index: int) -> None:
        if index <= self._last:
            self._gradients.reduce(self._uses[index].name)


class UnitHooks:
    """Hooks on each unit's entry modules, through which its parameters are read: a layer as a whole, elsewhere each module that
    holds a parameter. ties: all names of each parameter in the model. trains_below: a stage before this one trains something."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        ties: Mapping[str, tuple[str, ...]],
        parameters: ParameterSync,
        gradients: GradientSync,
        prefetch_units: int,
        trains_below: bool,
    ):
        self.parameters = parameters
        entry_modules = [_find_entry_modules(unit, units, ties) for unit in units]
        self._uses = _find_uses(model, units, ties, entry_modules, trains_below)
        self.order = UnitOrder(self._uses, parameters, gradients, prefetch_units)
        for index, positions in enumerate(entry_modules):
            for name, position in positions.items():
                module = model.get_submodule(name)
                module.register_forward_pre_hook(partial(self._before_forward, index, position))
                module.register_forward_hook(partial(self._after_forward, index))
        model.register_forward_pre_hook(self._before_model)
        model.register_forward_hook(self._after_model)

    def unsharded_for(self, unit: str) -> AbstractContextManager[None]:
        """A context in which a unit's parameters can be read, in the middle of another's backward."""
        index = next(index for index, use in enumerate(self._uses) if use.name == unit)
        return self.parameters.unsharded_for(index)

    def end_backward(self) -> None:
        """Finish the backward of a microbatch, after autograd has returned: reduce and reshard what is left."""
        self.order.end_backward()

    def _before_model(self, module: nn.Module, args: Any) -> None:
        self.order.start_forward()

    def _before_forward(self, index: int, position: int, module: nn.Module, args: Any) -> None:
        # First the collectives of all units up to here, in the order of all ranks; only then this unit's, which has been
        # started among them unless the model comes back to a unit that it has left.
        self.order.enter_forward(position)
        self.parameters.unshard(index)

    def _after_forward(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        # On the outputs and not as a backward hook of the module: torch's wraps inputs in a function of autograd, which forbids
        # changes in place that some models make. The gradient of an output comes before anything of the module runs backward.
        if torch.is_grad_enabled():
            before_backward = partial(self._before_backward, index, self.order.position)
            for tensor in _find_tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(before_backward)

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        self.order.end_forward(has_backward=torch.is_grad_enabled())

    def _before_backward(self, index: int, position: int, gradient: Tensor) -> None:
        """Enter the unit's backward. position: where forward was when the module ran, perhaps behind that unit."""
        self.order.enter_backward(position)
        if self._uses[index].is_read_in_backward:
            self.parameters.unshard(index)


def _find_entry_modules(unit: Unit, units: Sequence[Unit], ties: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
    """The modules through which the unit's parameters are read, each with the position of the unit that it stands in: a
    later one if the parameter is tied."""
    holders = {alias.rpartition(".")[0] for name in unit.parameters for alias in ties[name]}
    if unit.is_layer:
        holders = {unit.root if holder in unit.modules else holder for holder in holders}
    return {holder: next(i for i, other in enumerate(units) if holder in other.modules) for holder in sorted(holders)}


def _find_uses(
    model: nn.Module,
    units: Sequence[Unit],
    ties: Mapping[str, tuple[str, ...]],
    entry_modules: Sequence[Mapping[str, int]],
    trains_below: bool,
) -> list[UnitUse]:
    """The use of each unit, before anything runs: the same on all ranks."""
    trains = [any(model.get_parameter(ties[name][0]).requires_grad for name in unit.parameters) for unit in units]
    # Autograd goes no further back than the first trained parameter: below it a backward never comes, and an unshard for it
    # would be bytes for nothing. By position: a frozen embedding may be the head's weight.
    is_above_trained = list(accumulate(trains, or_, initial=trains_below))[1:]
    uses = []
    for index, unit in enumerate(units):
        is_kept = any(position > index for position in entry_modules[index].values())
        is_read = any(
            is_above_trained[position] and not isinstance(model.get_submodule(name), nn.Embedding)
            for name, position in entry_modules[index].items()
        )
        uses.append(UnitUse(unit.name, is_kept, is_read))
    return uses


def _find_tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output: itself, or in tuples, lists, dicts and model outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _find_tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _find_tensors(each)
