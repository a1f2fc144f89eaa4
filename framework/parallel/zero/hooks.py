"""Hooks that tell where forward and backward of an unmodified model are; `order.py` decides what follows from it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import accumulate
from operator import or_
from typing import Any

import torch
from torch import Tensor, nn

from framework.model.units import Unit
from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.order import UnitOrder, UnitUse
from framework.parallel.zero.parameters import ParameterSync


class UnitHooks:
    """Hooks on each unit's entry modules, through which its parameters are read: a layer as a whole, elsewhere each module that
    holds a parameter. None where a stage's units are not unsharded, nor reduced before backward ends. ties: all names of each
    parameter in the model. trains_below: a stage before this one trains something."""

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
        self.parameters, self._gradients = parameters, gradients
        # Nobody asks where the computation is when there is no message to start meanwhile.
        self._is_needed = not (parameters.sends_nothing and gradients.reduces_behind_backward)
        entry_modules = [_find_entry_modules(unit, units, ties) for unit in units]
        self._uses = _find_uses(model, units, ties, entry_modules, trains_below)
        self.order = UnitOrder(self._uses, parameters, gradients, prefetch_units)
        if not self._is_needed:
            return  # the step's last `end_backward` goes over all units
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
        if self._is_needed or self._gradients.is_last_backward:
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
