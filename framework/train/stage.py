"""A stage on this rank: a part of the model with its parameters, gradients and hooks, as the executor drives it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from framework.model.stage import StageModel
from framework.parallel.zero.buffers import Deferred, UnitBuffer
from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.hooks import UnitHooks
from framework.parallel.zero.parameters import ParameterSync


@dataclass(frozen=True)
class Stage:
    """Lives as long as the run."""

    model: StageModel
    buffers: list[UnitBuffer]
    parameters: ParameterSync
    gradients: GradientSync
    hooks: UnitHooks


@dataclass(frozen=True)
class StageOfStep:
    """A stage with what a step asks of it. compute: (stage, microbatch, received) -> hidden states or, of the last, the loss."""

    stage: Stage
    compute: Callable[[Stage, int, Tensor | None], Tensor]

    def forward(self, microbatch: int, received: Tensor | None) -> Tensor:
        return self.compute(self.stage, microbatch, received)

    def backward(self, output: GradientEdge | None, gradient: Tensor | None, is_last: bool) -> None:
        self.stage.gradients.start_backward(is_last)
        self._backward(output, gradient)

    def backward_input(self, output: GradientEdge | None, gradient: Tensor | None) -> Deferred:
        self.stage.gradients.start_input_backward()
        self._backward(output, gradient)
        return self.stage.gradients.end_input_backward()

    def backward_weights(self, left: Deferred, is_last: bool) -> None:
        self.stage.gradients.backward_weights(left, is_last)

    def unshard(self, is_forward: bool) -> None:
        """Start to gather what computation meets first; the rest follows as it goes on."""
        has_parameters = [index for index, buffers in enumerate(self.stage.parameters.units) if buffers]
        self.stage.parameters.start_gather(has_parameters[0 if is_forward else -1])

    def reshard(self) -> None:
        self.stage.parameters.release_transient()

    def reduce(self) -> None:
        self.stage.gradients.settle()

    def _backward(self, output: GradientEdge | None, gradient: Tensor | None) -> None:
        if output is not None:
            torch.autograd.backward(output, gradient)
        self.stage.hooks.end_backward()
