"""A stage on this rank: a part of the model with its parameters, gradients and hooks, as the executor drives it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge

from framework.model.stage import StageModel
from framework.parallel.pipeline.execute import Tensors
from framework.parallel.zero.buffers import DeferredGradients, UnitBuffer
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


Compute = Callable[[Stage, int, Tensors], Tensors]


@dataclass(frozen=True)
class StageOfStep:
    """A stage with what a step asks of it. compute: (stage, microbatch, received) -> what the next stage receives or, of the
    last, the loss; evaluate: the same of a microbatch of validation."""

    stage: Stage
    compute: Compute
    evaluate: Compute

    def forward(self, microbatch: int, received: Tensors) -> Tensors:
        self._switch(trains=True)
        return self.compute(self.stage, microbatch, received)

    def validate(self, microbatch: int, received: Tensors) -> Tensors:
        self._switch(trains=False)
        return self.evaluate(self.stage, microbatch, received)

    def _switch(self, trains: bool) -> None:
        """Dropout on or off, where it is not yet."""
        model = self.stage.model.model
        if model.training != trains:
            model.train(trains)

    def backward(self, outputs: Sequence[GradientEdge], gradients: Tensors, is_last: bool) -> None:
        self.stage.gradients.start_backward(is_last)
        self._backward(outputs, gradients)

    def backward_input(self, outputs: Sequence[GradientEdge], gradients: Tensors) -> DeferredGradients:
        self.stage.gradients.start_input_backward()
        self._backward(outputs, gradients)
        return self.stage.gradients.end_input_backward()

    def backward_weights(self, left: DeferredGradients, is_last: bool) -> None:
        self.stage.gradients.backward_weights(left, is_last)

    def unshard(self, is_forward: bool) -> None:
        """Start to gather what computation meets first; the rest follows as it goes on."""
        has_parameters = [index for index, buffers in enumerate(self.stage.parameters.units) if buffers]
        self.stage.parameters.start_unshard(has_parameters[0 if is_forward else -1])

    def reshard(self) -> None:
        self.stage.parameters.reshard_transient()

    def wait_reduce(self) -> None:
        self.stage.gradients.wait_for_reductions()

    def _backward(self, outputs: Sequence[GradientEdge], gradients: Tensors) -> None:
        if outputs:
            torch.autograd.backward(outputs, gradients or None)
        self.stage.hooks.end_backward()
