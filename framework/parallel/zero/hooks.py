"""Forward and backward of an unmodified model tell the syncs which unit they are in.

    before a unit's forward    it is gathered, the next ones are on their way, those behind are released
    after it                   a layer is released; its outputs are watched for backward
    backward reaches a unit    it is gathered again, those before it are on their way; later units are reduced and released
    end of backward            what is left is reduced and released

The order is that of the model's code, so it is the same on all ranks.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from framework.model.plan import Unit
from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.parameters import ParameterSync


class UnitHooks:
    """Hooks on the modules through which each unit is entered: a layer as a whole, elsewhere each holder of a parameter."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        ties: Mapping[str, tuple[str, ...]],
        parameters: ParameterSync,
        gradients: GradientSync,
        prefetch_units: int,
    ):
        self.units, self.parameters, self.gradients = units, parameters, gradients
        self._depth = prefetch_units
        self._reached = 0  # the furthest unit that this forward has entered
        # Read again at the end of forward, by the head itself or through a tie: kept until backward is through with them.
        self._kept: set[int] = set()
        # An embedding's backward does not read its weight.
        self._read_in_backward: set[int] = set()
        first_layer = next((index for index, unit in enumerate(units) if unit.is_layer), len(units))
        for index, unit in enumerate(units):
            holders = [unit.root] if unit.is_layer else _holders(unit, ties)
            owners = {holder: next(i for i, other in enumerate(units) if holder in other.modules) for holder in holders}
            if (index > first_layer and not unit.is_layer) or any(owner > index for owner in owners.values()):
                self._kept.add(index)
            if not all(isinstance(model.get_submodule(holder), nn.Embedding) for holder in holders):
                self._read_in_backward.add(index)
            for holder, owner in owners.items():
                module = model.get_submodule(holder)
                module.register_forward_pre_hook(partial(self._before_forward, index, owner))
                module.register_forward_hook(partial(self._after_forward, index))
        model.register_forward_pre_hook(self._before_model)
        model.register_forward_hook(self._after_model)

    def end_backward(self) -> None:
        """The backward of a microbatch is over."""
        self.gradients.end_backward()
        self._release(range(len(self.units)))

    def _before_model(self, module: nn.Module, args: Any) -> None:
        self._reached = 0

    def _before_forward(self, index: int, owner: int, module: nn.Module, args: Any) -> None:
        """`owner`: the unit that the module stands in, a later one than `index` if its parameter is tied. A module that runs
        later than where it stands counts as where the computation is."""
        self._reached = max(self._reached, owner)
        self.parameters.use(index, range(index + 1, min(index + 1 + self._depth, len(self.units))))
        self._release(other for other in range(self._reached) if other != index and other not in self._kept)

    def _after_forward(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._before_backward, index, self._reached))
        if self.units[index].is_layer:
            self._release([index])

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.is_grad_enabled():
            self._release(range(len(self.units)))

    def _before_backward(self, index: int, position: int, gradient: Tensor) -> None:
        if index in self._read_in_backward:
            ahead = range(index - 1, max(index - 1 - self._depth, -1), -1)
            self.parameters.use(index, [other for other in ahead if other in self._read_in_backward])
        done = range(position + 1, len(self.units))
        self.gradients.pass_units({self.units[other].name for other in done})
        self._release(other for other in done if other != index)

    def _release(self, indices: Iterable[int]) -> None:
        for index in indices:
            self.parameters.release(index)


def _holders(unit: Unit, ties: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The modules that hold a parameter of the unit, under any of its names."""
    return {alias.rpartition(".")[0] for name in unit.parameters for alias in ties[name]}


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a module's output: itself, or in tuples, lists, dicts and model outputs."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
