"""A pipeline stage of this rank for the executor: part of the model, its parameters, gradients and hooks."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from framework.comm.algorithms import Pending
from framework.data.pack import Microbatch
from framework.model.load import DISABLED, accepted_arguments
from framework.model.objective import LOSSES, Statistics
from framework.model.stage import StageModel
from framework.parallel.parallelize import AttachedStage
from framework.parallel.pipeline.execute import Tensors
from framework.parallel.zero.buffers import DeferredGradients


@dataclass(frozen=True)
class StepInputs:
    """The inputs of one step for the stages of a rank."""

    microbatches: Sequence[Microbatch]  # on the device; first those to train on, then those of validation
    seeds: Sequence[tuple[int | str, ...]]  # of the dropout of each microbatch to train on
    # int64 scalar: loss tokens of the whole batch, or pairs, which divide the loss once `counting` has ended.
    num_tokens: Tensor
    num_microbatches: int  # of the whole batch, over which load-balancing losses are averaged
    loss_scale: Tensor  # scalar of the loss's dtype: the gradient of the loss from which backward starts
    counting: Pending = field(default_factory=Pending)


class RankStage:
    """A stage of this rank, for the whole run. `start_step` gives the inputs of the executor's calls that follow."""

    def __init__(self, model: StageModel, attached: AttachedStage):
        self.model, self.buffers, self.trains_below = model, attached.buffers, attached.plan.trains_below
        self.parameters, self.gradients, self.hooks = attached.parameters, attached.gradients, attached.hooks
        self.offload, self._owns_attention = attached.offload, attached.plan.owns_attention
        self._loss, self._load, self._maxima = attached.loss, attached.load, attached.maxima
        self._settings, self._z_loss = attached.plan.recipe.loss, attached.plan.recipe.train.z_loss
        self._objective, self._cp = LOSSES[self._settings.name], attached.plan.axes["cp"]
        num_sources = len(attached.plan.recipe.data.read)
        self._sources = torch.arange(num_sources, device=attached.plan.device)
        self.adapters = attached.adapters
        # Metrics of the step and losses of sources: sums, and the number of terms of each.
        columns = len(self._objective.metrics) + num_sources
        self.metrics = torch.zeros(2, columns, dtype=torch.float64, device=attached.plan.device)
        self._disabled = dict.fromkeys(set(DISABLED) & accepted_arguments(model.model), False)
        self._inputs: StepInputs | None = None

    def start_step(self, inputs: StepInputs) -> None:
        """Take the inputs of the microbatches that come next."""
        self._inputs = inputs
        self.metrics.zero_()

    @property
    def inputs(self) -> StepInputs:
        """The inputs of the step that is under way."""
        assert self._inputs is not None, "no step was started"
        return self._inputs

    def forward(self, microbatch: int, received: Tensors) -> Tensors:
        """received: hidden states [B, T, D] of the stage before, none on the first. Returns those for the next stage or, on
        the last stage, this rank's part of the batch's loss, a scalar."""
        self._set_dropout(is_on=True)
        with self._load.counting(), self._maxima.counting() if self._maxima is not None else nullcontext():
            outputs = self._compute(microbatch, received, self.inputs.seeds[microbatch])
        return (self._part_of_loss(microbatch, *outputs),) if self.model.bounds.is_last else outputs

    def validate(self, microbatch: int, received: Tensors) -> Tensors:
        """Forward without dropout: hidden states [B, T, D], or on the last stage the result that the microbatch asks for."""
        self._set_dropout(is_on=False)
        outputs = self._compute(microbatch, received, None)
        if not self.model.bounds.is_last:
            return outputs
        statistics = self._find_statistics(microbatch, outputs[0])
        match self.inputs.microbatches[microbatch].asks:
            case "answers":
                return (statistics.answers.log_p.flatten(1),)
            case "documents":
                return (statistics.score_documents(),)
        return (self._objective.compute(statistics, self._settings).loss.sum(),)

    def backward(self, outputs: Sequence[GradientEdge], gradients: Tensors, is_last: bool) -> None:
        """Reduce what is complete. gradients: [B, T, D] each, of `outputs`; none of the loss. See the executor's protocol."""
        self.gradients.start_backward(is_last)
        self._run_backward(outputs, gradients)

    def backward_input(self, outputs: Sequence[GradientEdge], gradients: Tensors) -> DeferredGradients:
        """The gradients of activations, [B, T, D]; returns the calls that bring those of weights."""
        self.gradients.start_input_backward()
        self._run_backward(outputs, gradients)
        return self.gradients.end_input_backward()

    def backward_weights(self, left: DeferredGradients, is_last: bool) -> None:
        """left: what `backward_input` has returned."""
        self.gradients.backward_weights(left, is_last)

    def unshard(self, is_forward: bool) -> None:
        """Start to unshard the unit that computation meets first; the others follow as it goes on."""
        self.hooks.order.unshard_ahead(is_forward)

    def reshard(self) -> None:
        """Give back the memory of full parameters that do not stay."""
        self.parameters.reshard_transient()

    def wait_reduce(self) -> None:
        """Wait for the reductions under way."""
        self.gradients.wait_for_reductions()

    def _compute(self, microbatch: int, received: Tensors, seed: tuple[int | str, ...] | None) -> tuple[Any, ...]:
        inputs = self.inputs.microbatches[microbatch]
        # A validation, which has no seed, is of the loss per token alone.
        self._loss.expect(inputs.labels, self._z_loss if seed is not None else 0.0, inputs.asks == "documents")
        # No mask else: with one, stock attention would ignore packed positions.
        packed = {} if inputs.position_ids is None else {"position_ids": inputs.position_ids}
        if inputs.documents is not None and self._owns_attention:
            packed["attention_mask"] = inputs.documents.on_mask(inputs.input_ids)
        return self.model(received, seed, input_ids=inputs.input_ids, **packed, **self._disabled)

    def _part_of_loss(self, microbatch: int, output: Any, *sums: Tensor) -> Tensor:
        """sums: of routers, over all layers."""
        inputs = self.inputs
        inputs.counting.wait()
        terms = self._objective.compute(self._find_statistics(microbatch, output, self._z_loss), self._settings)
        for index, name in enumerate(self._objective.metrics):
            self.metrics[:, index] += torch.stack([each.to(torch.float64) for each in terms.metrics[name]])
        if terms.loss.dim() and inputs.microbatches[microbatch].sources is not None:
            self._add_sources(inputs.microbatches[microbatch], terms.loss.detach())
        loss = terms.loss.sum() / inputs.num_tokens.clamp(min=1)
        if self.model.routers is not None:
            loss = loss + self.model.routers.compute_loss(*sums) / inputs.num_microbatches
        return loss

    def _add_sources(self, microbatch: Microbatch, losses: Tensor) -> None:
        """Add the losses of rows, [B], to those of their sources."""
        assert microbatch.sources is not None, "rows of a blend"
        values = torch.stack([losses.double(), self._objective.count(microbatch.labels, microbatch.pairs).double()])
        # A mask and a sum: what is not finite in one source is nothing to the others, and the order is fixed on a GPU, too.
        is_own = microbatch.sources == self._sources[:, None]
        self.metrics[:, -len(self._sources) :] += values[:, None].where(is_own, 0.0).sum(-1)

    def _find_statistics(self, microbatch: int, output: Any, z_loss: float = 0.0) -> Statistics:
        inputs = self.inputs.microbatches[microbatch]
        by_row = inputs.sources is not None
        return Statistics(self._loss, output.logits, inputs.labels, inputs.pairs, self._cp, z_loss, by_row)

    def _run_backward(self, outputs: Sequence[GradientEdge], gradients: Tensors) -> None:
        if outputs:
            # A validation in a bubble may have come since the forward; what is computed again must drop what that dropped.
            self._set_dropout(is_on=True)
            # None come with the loss. All of it is scaled here, a router's part too, and once, whatever stages lie before.
            torch.autograd.backward(outputs, gradients or (self.inputs.loss_scale,))
        self.hooks.end_backward()

    def _set_dropout(self, is_on: bool) -> None:
        model = self.model.model
        if model.training != is_on:  # `train` walks all modules
            model.train(is_on)
