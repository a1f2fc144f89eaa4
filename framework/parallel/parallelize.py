"""All that is done to a model to make it a parallel one, in the one order that works: two lists.

TRANSFORMS lay a stage's model out on meta. A transform takes the model, the layout of each of its parameters, and the StagePlan.
It changes the model in place and returns refined layouts. It keeps every global shape, knows no other transform, and is the
identity where its axes have size 1. It owns no memory and sends no byte, so a laptop can plan thousands of ranks.

ATTACH adds what a stage's model needs once it has memory, so that gradients arrive in their buffers and units come and go.

A new parallelism is one file and one line in TRANSFORMS.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from framework.comm.algorithms import ExposedCommunication
from framework.errors import ModelError
from framework.mesh.layout import Layout
from framework.model.adapters import AdapterSwitch, find_coded
from framework.model.chunked_loss import LogitMap, make_loss
from framework.model.experts import find_experts, find_stock_experts
from framework.model.kept_outputs import EXPERTS, KeepsOutputs
from framework.model.load import choose_experts, kept_in_fp32
from framework.model.loss import Loss
from framework.model.matmul import Matmul
from framework.model.mixtures import ExpertLoad
from framework.model.opaque import OpaqueExperts, find_opaque_experts, replace_forward
from framework.model.opaque_linear import keep_named
from framework.model.precision import DTYPES
from framework.model.routers import find_routers
from framework.model.stage import find_shared, hollow_out
from framework.model.units import find_mixers
from framework.parallel.activation_checkpointing import checkpoint_layers
from framework.parallel.activation_offload import ActivationOffload, offload_activations
from framework.parallel.attention import (
    find_context_attentions,
    is_operator,
    select_sequences,
    split_context,
    watch_logits,
)
from framework.parallel.attention.attention import LogitMaxima
from framework.parallel.experts.dispatch import report_dropped, write_stacked_gradients
from framework.parallel.experts.halves import Turns, halve_layer
from framework.parallel.experts.split import split_experts
from framework.parallel.layer_matmuls import AdaptMatmuls, find_fp8_linears, gather_in_fp8, make_matmul, place_adapters
from framework.parallel.stage_plan import StagePlan
from framework.parallel.tensor.borders import number_border
from framework.parallel.tensor.regions import Region, find_regions_of, uses_rng_in_training
from framework.parallel.tensor.split import split_over_tp
from framework.parallel.zero.buffers import MainGradView, UnitBuffer
from framework.parallel.zero.gradients import GradientSync, write_embedding_gradients, write_gradients_directly
from framework.parallel.zero.hooks import UnitHooks
from framework.parallel.zero.parameters import ParameterSync
from framework.parallel.zero.plan_buffers import shard_over_batch
from framework.recipe.derive import compiles
from framework.recipe.schema import Recipe
from framework.torch_private import allow_graphs, compiler_config

# Graphs of one layer: in training and in validation, each with an attention mask and without (rows of one document each).
GRAPHS_PER_LAYER = 4

Layouts = Mapping[str, Layout]
Transform = Callable[[PreTrainedModel, Layouts, StagePlan], Layouts]


def select_experts_kernel(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Choose how stacked experts are multiplied (`model.experts`)."""
    choose_experts(model, plan.recipe.model.experts, plan.compute_dtype)
    return layouts


def compile_layers(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Compile each layer's forward for the shapes that it meets, at its first call (`memory.compile: always`). Layouts stay.

    The forward is compiled and not the call: what this rank does on the way in and out (unshard the unit, seed its random
    numbers, scatter tokens) are hooks of the call, and stay outside. Within a layer, collectives, their waits and the borders of
    tensor-parallel regions are calls that the compiler leaves alone: `torch.compiler.disable` stands on each of them. So it never
    guards on what counts or changes from step to step, and one set of graphs serves all layers that are alike.
    """
    if layers := compiled_layers(model, plan):
        _prepare_compiler(GRAPHS_PER_LAYER * len(layers))
    for name, layer in layers.items():
        for _, module, form in find_experts(layer):
            experts: Any = module
            # Experts that dispatch are an operator as they are, and who gives them gradient views knows them by their forward.
            if "forward" in vars(module) or not form.has_kernels:
                continue
            # One expert after another (`model.experts: eager`): which have tokens, and how many, is known from the data only. The
            # compiler would make graphs for each number of tokens that it meets, until it gave up.
            if experts.config._experts_implementation == "eager" or "untraced_hooks" in vars(module):
                opaque = OpaqueExperts(experts, experts.forward)
                replace_forward(experts, opaque, opaque)
        forward: Any = layer.forward
        if plan.policies[name] == "selective":
            forward = keep_named(forward, _kept_in_graph(plan))
        layer.forward = torch.compile(forward, dynamic=False)  # type: ignore[method-assign]
    return layouts


def _kept_in_graph(plan: StagePlan) -> Sequence[str]:
    """The operations whose outputs compiled layers keep. Experts that drop tokens always: weights that are computed again may
    differ in their last bit, and another token would find no room."""
    drops = plan.recipe.model.expert_capacity is not None
    return (*plan.recipe.memory.kept_operations, *([EXPERTS] if drops else []))


def compiled_layers(model: PreTrainedModel, plan: StagePlan) -> dict[str, nn.Module]:
    """The layers of the stage that are compiled, by the names of their units."""
    if not compiles(plan.recipe):
        return {}
    layers = {unit.name: model.get_submodule(unit.root) for unit in plan.own_units if unit.is_layer}
    ends = find_eager_layers(model, plan)
    return {name: layer for name, layer in layers.items() if name not in ends}


def find_eager_layers(model: nn.Module, plan: StagePlan) -> dict[str, str]:
    """The layers of a stage that is compiled which stay eager, each with the reason: they have a recurrent mixer, or experts with
    code of their own, or what they keep by name is chosen within one graph, and they would be several."""
    if not compiles(plan.recipe):
        return {}
    layers = {unit.name: model.get_submodule(unit.root) for unit in plan.own_units if unit.is_layer}
    found = {name: _find_graph_end(layer, plan, plan.policies[name] == "selective") for name, layer in layers.items()}
    return {name: reason for name, reason in found.items() if reason is not None}


def _find_graph_end(layer: nn.Module, plan: StagePlan, keeps_named: bool) -> str | None:
    for _, mixer in find_mixers(layer):
        # Its loop over chunks would be unrolled, and documents and messages are the host's.
        return f"{type(mixer).__name__}, a recurrent mixer"
    for _, stock, _ in find_stock_experts(layer):
        return f"{type(stock).__name__}, experts that compute by code of their own"
    if not keeps_named:
        return None
    for module in layer.modules():
        region, kind = vars(module).get("region_hook"), type(module).__name__
        if isinstance(region, Region) and not region.has_operators:
            return f"tensor parallelism of {kind}, where it takes random numbers or packs shared keys"
        if "context_hook" in vars(module) and not is_operator(module):
            return f"{kind}, whose queries depend on their rows"
    for _, experts, form in find_experts(layer):
        if not form.has_kernels and "opaque" not in vars(experts):
            return f"{type(experts).__name__}, experts in a form of their own"
        if plan.load_balancing is not None:
            return "routers whose logits go into the load-balancing loss"
    return None


def _prepare_compiler(count: int) -> None:
    """Have torch keep a graph for each layer: they may differ in a number (diffllama's lambda_init)."""
    allow_graphs(count)
    # Slots hang on a region's input (`tensor/borders.py`), also within a graph's checkpoint.
    compiler_config().skip_fwd_side_effects_in_bwd_under_checkpoint = True


def cut_to_stage(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Replace what other pipeline stages compute, and keep the layouts of this stage's parameters, each under its one name.

    What stages share is one more replica (law 1): tied embeddings over the axis `embedding`, weights of several layers over `pp`.
    """
    hollow_out(model, plan.units, plan.bounds, plan.compute_dtype)
    shared = find_shared(plan.units, plan.ties, plan.bounds)
    # A layer that shares weights may be here under its own name for them alone.
    names = {
        name: next(each for each in plan.ties[name] if each in layouts)
        for unit in plan.own_units
        for name in unit.parameters
    }
    own = {name: layouts[there] for name, there in names.items()}
    return {name: _share(layout, shared[name]) if name in shared else layout for name, layout in own.items()}


def quantize_gathers(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Have large trained matrices travel as codes (`zero.quantize_gather`). Weights that a family keeps in fp32 stay exact, and
    tied ones, of which the other stage's copy would be cut into other blocks, and those that travel as fp8 anyway, which costs
    not one bit."""
    zero = plan.recipe.zero
    if zero.quantize_gather == "none":
        return layouts
    wide = kept_in_fp32(model, plan.compute_dtype)
    coded = {
        name
        for name in _find_coded(model, layouts, plan)
        if len(plan.ties[name]) == 1 and not wide & {*plan.ties[name]} and not layouts[name].gathered_in
    }
    form = f"{zero.quantize_gather} blocks"
    return {name: replace(each, gathered_in=form) if name in coded else each for name, each in layouts.items()}


def quantize_base(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Have the frozen weights beside an adapter be kept as codes (`adapter.base`)."""
    base = plan.recipe.adapter.base
    coded = find_coded(model, plan.own_units, plan.groups) if base != "bf16" else set()
    return {
        name: replace(each, gathered_in=f"{base} rows") if name in coded else each for name, each in layouts.items()
    }


def quantize_reductions(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Have gradients of large trained matrices leave their node as codes (`zero.quantize_reduce`)."""
    form = plan.recipe.zero.quantize_reduce
    if form == "none":
        return layouts
    coded = _find_coded(model, layouts, plan)
    return {name: replace(each, reduced_in=form) if name in coded else each for name, each in layouts.items()}


def _find_coded(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> set[str]:
    """The trained matrices of at least `zero.quantize_min_elements`. Vectors are few bytes, and of a block with others would get
    the others' errors; routers that are rounded would choose other experts; of rows that neighbours hold alike each would have
    codes in blocks with rows of its own, and their copies would drift apart."""
    routers = {id(each) for router, _ in find_routers(model) for each in router.parameters()}
    # Not each name of a tie is there on each stage.
    exact = {name for name, each in model.named_parameters(remove_duplicate=False) if id(each) in routers}
    least = plan.recipe.zero.quantize_min_elements
    return {
        name
        for name, each in layouts.items()
        if name in plan.groups
        and name not in exact
        and len(each.shape) > 1
        and prod(each.shape) >= least
        and not any(shard.pieces for shard in each.shards)
    }


def name_zero_axes(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Say over which axes ZeRO shards and replicates what no transform has said that of: all of dp x cp.

    Buffers divide among replicas what each of them counts, so an interval is left to what is shared in part only.
    """
    counted = {name: replace(each, interval=None) if each.replicated else each for name, each in layouts.items()}
    return shard_over_batch(counted)


TRANSFORMS: tuple[Transform, ...] = (
    select_experts_kernel,  # first: what follows may replace the module that asks for it
    split_experts,  # whole experts: of what is left of them tensor parallelism may take slices
    split_over_tp,  # weights of all that is here: vocabulary, layers, and the tokens between regions
    split_context,  # of the heads that are left to this rank
    cut_to_stage,  # then embedding and head may go: until here both are needed to split what they share
    place_adapters,  # beside what is left of their weights, whose layouts theirs follow; of this stage's modules alone
    gather_in_fp8,  # of the shapes that are left to this rank
    quantize_base,  # of the weights that are left to this rank, beside their adapters
    quantize_gathers,  # of what does not travel as fp8 already
    quantize_reductions,  # anywhere behind the cut: of the gradients that are this stage's
    compile_layers,  # of the layers as they are computed; around it they are checkpointed, once there is memory (ATTACH)
    name_zero_axes,  # last: ZeRO divides what all else has left to this rank
)


def _share(layout: Layout, axis: str) -> Layout:
    return replace(layout, replicated=(*layout.replicated, axis), partial=(*layout.partial, axis))


def parallelize(model: PreTrainedModel, layouts: Layouts, plan: StagePlan) -> Layouts:
    """Apply all transforms to a stage's model; the layouts of its parameters, by their names in their units."""
    for transform in TRANSFORMS:
        layouts = transform(model, layouts, plan)
    return layouts


def whole_layouts(model: PreTrainedModel) -> dict[str, Layout]:
    """The layouts that transforms begin with: every parameter whole, under each of its names."""
    return {name: Layout(tuple(p.shape)) for name, p in model.named_parameters(remove_duplicate=False)}


def find_compute_dtypes(model: PreTrainedModel, plan: StagePlan) -> dict[str, torch.dtype]:
    """The dtype in which forward reads each of the stage's parameters: some families keep some in fp32."""
    fp32 = kept_in_fp32(model, plan.compute_dtype)
    names = [name for unit in plan.own_units for name in unit.parameters]
    return {name: torch.float32 if fp32 & {*plan.ties[name]} else plan.compute_dtype for name in names}


@dataclass(eq=False)
class AttachedStage:
    """A stage that has memory, and what ATTACH has added to it so far; lives as long as the run."""

    model: PreTrainedModel
    plan: StagePlan
    ties: Mapping[str, tuple[str, ...]]
    """All names of each parameter in the stage's model."""
    buffers: Sequence[UnitBuffer]
    """Allocated."""
    exposed: ExposedCommunication
    load: ExpertLoad
    logit_map: LogitMap | None
    """The way from the head to the logits where the loss is computed in chunks, on the last stage; else None."""
    vocabulary_size: int
    maxima: LogitMaxima | None = None
    """Largest attention logits, where they are counted."""

    operations: dict[nn.Module, Sequence[KeepsOutputs]] = field(init=False, default_factory=dict)
    """The operations of each module whose outputs activation checkpointing may keep."""
    adapters: AdapterSwitch = field(init=False, default_factory=AdapterSwitch)
    matmuls: Sequence[Matmul] = field(init=False, default=())
    """The matmuls of its trained linear layers."""
    parameters: ParameterSync = field(init=False)
    gradients: GradientSync = field(init=False)
    hooks: UnitHooks = field(init=False)
    offload: ActivationOffload | None = field(init=False)
    loss: Loss = field(init=False)

    @cached_property
    def grad_views(self) -> dict[str, MainGradView]:
        """The main gradient of each trained parameter, by its name."""
        return {name: view for buffer in self.buffers for name, view in buffer.grad_views.items()}

    @cached_property
    def compiled(self) -> set[nn.Module]:
        """The modules within compiled layers."""
        return {module for layer in compiled_layers(self.model, self.plan).values() for module in layer.modules()}


def write_main_gradients(stage: AttachedStage) -> None:
    """Have linear layers, stacked experts and embeddings write their weights' gradients into the buffers."""
    model, views = stage.model, stage.grad_views
    fp8 = set(find_fp8_linears(model, stage.plan).values())
    adapt = AdaptMatmuls(stage.plan, views, stage.adapters)
    linears = write_gradients_directly(model, views, partial(make_matmul, fp8=fp8, plan=stage.plan), adapt.linear)
    stage.matmuls = tuple(linears.values())
    stage.operations |= {module: (matmul,) for module, matmul in linears.items()}
    stage.operations |= write_stacked_gradients(model, views, adapt.stacked)
    write_embedding_gradients(model, views, stage.compiled)


def number_operators(stage: AttachedStage) -> None:
    """Give borders of regions and experts the numbers by which operators of compiled layers find them."""
    for region in find_regions_of(stage.model):
        number_border(region.border)
    for experts in find_opaque_experts(stage.model):
        experts.give_number()


def attach_attentions(stage: AttachedStage) -> None:
    """Note attentions among the operations that may be kept, and give them the numbers by which operators find them."""
    attentions = find_context_attentions(stage.model)
    stage.operations |= attentions
    for (attention,) in attentions.values():
        attention.give_number()
    if stage.maxima is not None:
        watch_logits(stage.model, stage.plan, stage.maxima)


def hook_units(stage: AttachedStage) -> None:
    """Unshard parameters and reduce gradients as forward and backward reach the units that they are of."""
    plan, buffers = stage.plan, stage.buffers
    stage.gradients = GradientSync(buffers, stage.exposed, DTYPES[plan.recipe.precision.reduce])
    by_unit = [[buffer for buffer in buffers if buffer.plan.unit == unit.name] for unit in plan.own_units]
    stage.parameters = ParameterSync(by_unit, stage.exposed, [matmul.invalidate for matmul in stage.matmuls])
    prefetch, trains_below = plan.recipe.zero.prefetch_units, plan.trains_below
    stage.hooks = UnitHooks(
        stage.model, plan.own_units, stage.ties, stage.parameters, stage.gradients, prefetch, trains_below
    )


def halve_layers(stage: AttachedStage) -> None:
    """Have layers with experts compute a microbatch in halves by turns (`parallel.expert_overlap`)."""
    plan, model = stage.plan, stage.model
    if not plan.recipe.parallel.expert_overlap:
        return
    has_two_hops = min(plan.axes["ep_outer"].size, plan.axes["ep_inner"].size) > 1
    turns = Turns(plan.device, ahead=int(has_two_hops))
    for layer in (
        model.get_submodule(unit.root) for unit in plan.own_units if plan.bounds.owns(unit) and unit.is_layer
    ):
        regions = [(vars(region), name) for region in find_regions_of(layer) for name in ("call", "_outer")]
        halve_layer(layer, turns, regions, select_sequences)


def refuse_halves(model: PreTrainedModel, recipe: Recipe) -> None:
    """Raise ModelError where a microbatch cannot be computed in halves: random numbers would be drawn in another order."""
    if recipe.parallel.expert_overlap and uses_rng_in_training(model):
        raise ModelError(
            f"parallel.expert_overlap: {model.config.get_text_config().model_type} draws random numbers in training, which halves"
            " of a microbatch would draw in another order: set its dropout to 0 (model.config.*), or leave the key out"
        )


def checkpoint_activations(stage: AttachedStage) -> None:
    """Have layers compute their activations again in backward, each by its policy."""
    plan, model = stage.plan, stage.model
    checkpoint_layers(
        {unit.name: model.get_submodule(unit.root) for unit in plan.own_units if unit.name in plan.policies},
        plan.policies,
        plan.recipe.memory.kept_operations,
        stage.operations,
        stage.compiled,
        stage.hooks.unsharded_for,
        uses_rng_in_training(model),
    )


def offload_what_is_kept(stage: AttachedStage) -> None:
    """Take to the host what autograd keeps of layers, if the recipe asks for it."""
    stage.offload = offload_activations(stage.model, stage.plan, [buffer.full for buffer in stage.buffers])


def count_load(stage: AttachedStage) -> None:
    """Count the tokens that routers send to experts, and those that these drop."""
    plan = stage.plan
    layers = [unit.name for unit in plan.own_units if plan.bounds.owns(unit)]
    stage.load.watch(stage.model, layers, plan.routed_tokens)
    report_dropped(stage.model, stage.load.drop)


def compute_loss(stage: AttachedStage) -> None:
    """Compute the loss behind the head, or chunk by chunk in its place."""
    views = stage.grad_views.values()
    stage.loss = make_loss(stage.model, views, stage.logit_map, stage.plan.axes["tp"], stage.vocabulary_size)


ATTACH: tuple[Callable[[AttachedStage], None], ...] = (
    write_main_gradients,  # first: checkpointing wraps these forwards, and may keep what they give
    number_operators,  # anywhere
    attach_attentions,  # anywhere before checkpointing, which may keep what they give
    hook_units,  # of a layer's call, around its forward; checkpointing's `sqrt` unshards units through these
    halve_layers,  # of a layer's forward: what is computed again is so by turns
    checkpoint_activations,  # of a layer's forward, compiled or not
    offload_what_is_kept,  # of what checkpointing keeps
    count_load,  # anywhere: hooks of routers and experts alone
    compute_loss,  # last: it takes the head's place, and the units' hooks have to see what the head gives
)


def attach(stage: AttachedStage) -> None:
    """Do all of ATTACH to a stage."""
    for add in ATTACH:
        add(stage)
