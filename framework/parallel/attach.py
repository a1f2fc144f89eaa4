"""Attach: what a stage's model gets once it has memory, so that gradients arrive in their buffers and units come and go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn
from transformers import PreTrainedModel

from framework.model.kept_outputs import KeepsOutputs
from framework.model.precision import DTYPES
from framework.parallel.activation_checkpointing import checkpoint_layers
from framework.parallel.activation_offload import ActivationOffload, offload_activations
from framework.parallel.compilation import compiled_layers
from framework.parallel.context.hook import find_context_attentions
from framework.parallel.experts import write_stacked_gradients
from framework.parallel.fp8_layers import find_fp8_linears, make_matmul
from framework.parallel.stage_plan import StagePlan
from framework.parallel.tensor import uses_rng_in_training
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.embedding_gradient import write_embedding_gradients
from framework.parallel.zero.exposed_communication import ExposedCommunication
from framework.parallel.zero.gradients import GradientSync
from framework.parallel.zero.hooks import UnitHooks
from framework.parallel.zero.linear import write_gradients_directly
from framework.parallel.zero.parameters import ParameterSync


@dataclass(frozen=True)
class Attached:
    """What unshards a stage's parameters, what reduces its gradients, and the hooks that tell both where the model is; and what
    takes activations to the host, if anything does."""

    parameters: ParameterSync
    gradients: GradientSync
    hooks: UnitHooks
    offload: ActivationOffload | None


def attach(
    model: PreTrainedModel,
    plan: StagePlan,
    ties: Mapping[str, tuple[str, ...]],
    buffers: Sequence[UnitBuffer],
    waits: ExposedCommunication,
) -> Attached:
    """Gradient views for linear layers and embeddings, the hooks through which units are unsharded and reduced; around layers
    what computes them again in backward, and around that what takes their activations to the host.

    ties: all names of each parameter in the stage's model. buffers: allocated.
    """
    grad_views = {name: view for buffer in buffers for name, view in buffer.grad_views.items()}
    compiled = {module for layer in compiled_layers(model, plan) for module in layer.modules()}
    fp8 = set(find_fp8_linears(model, plan).values())
    linears = write_gradients_directly(model, grad_views, compiled, partial(make_matmul, fp8=fp8, plan=plan))
    operations: dict[nn.Module, Sequence[KeepsOutputs]] = {module: (matmul,) for module, matmul in linears.items()}
    operations |= write_stacked_gradients(model, grad_views)
    operations |= find_context_attentions(model)
    write_embedding_gradients(model, grad_views, compiled)
    gradients = GradientSync(buffers, waits, DTYPES[plan.recipe.precision.reduce])
    by_unit = [[buffer for buffer in buffers if buffer.plan.unit == unit.name] for unit in plan.own_units]
    parameters = ParameterSync(by_unit, waits)
    prefetch_units = plan.recipe.zero.prefetch_units
    hooks = UnitHooks(model, plan.own_units, ties, parameters, gradients, prefetch_units, plan.trains_below)
    checkpoint_layers(
        {unit.name: model.get_submodule(unit.root) for unit in plan.own_units if unit.name in plan.policies},
        plan.policies,
        plan.recipe.memory.kept_operations,
        operations,
        compiled,
        hooks.unsharded_for,
        uses_rng_in_training(model),
    )
    offload = offload_activations(model, plan, [buffer.full for buffer in buffers])
    return Attached(parameters, gradients, hooks, offload)
