"""split_experts: a transform that divides a model's experts among the ranks of `ep`.

Every weight of a module of stacked experts is cut along its dim 0, and the module's forward becomes a dispatch. Routers, shared
experts and all else of the layer stay what they are. Where experts are whole, each is on as many ranks as `expert_batch` has;
where they are sliced over `tp` (parallel.expert_tp), `split_over_tp` cuts the slices from what is left here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from framework.comm.codec import BlockCodec
from framework.comm.communicator import Communicator
from framework.comm.deep_ep import DeepBuffer
from framework.errors import ModelError
from framework.mesh.layout import Layout, Shard, part
from framework.model.adapters import has_adapter
from framework.model.experts import (
    ExpertsForm,
    StockForm,
    capacity_of,
    count_all_experts,
    count_experts,
    find_experts,
    find_stock_experts,
    find_unknown_experts,
)
from framework.model.flops import expert_groups
from framework.model.opaque import replace_forward
from framework.parallel.experts.deep_rows import DeepRoute, refuse_deep_ep
from framework.parallel.experts.dispatch import ExpertDispatch, LocalExperts, StockExperts, stand_in
from framework.parallel.experts.route import ExpertRoute
from framework.parallel.experts.rows import ROW_CODEC
from framework.parallel.stage_plan import StagePlan
from framework.recipe.schema import Recipe


def split_experts(model: PreTrainedModel, layouts: Mapping[str, Layout], plan: StagePlan) -> Mapping[str, Layout]:
    """Divide the experts of every layer over the axis `ep`; the refined layouts. The identity where every rank that computes with
    an expert has its own slice of it (ep 1 without whole experts).

    model: on meta. Raises ModelError where ep does not divide a layer's experts.
    """
    refined, buffer = dict(layouts), None
    if plan.recipe.parallel.expert_backend == "deepep":
        refuse_deep_ep(plan, model.config.get_text_config().hidden_size)
        buffer = DeepBuffer(plan.axes["ep"])
    for name, experts, form in find_experts(model):
        # The stock forward knows no adapters.
        adapted = any(has_adapter(experts, weight) for weight in (form.first, form.last))
        # With slices, too, one rank has to add tokens that are routed to themselves, which the stock forward adds on all.
        if divides_experts(plan) or adapted or (form.has_identity and plan.axes["tp"].size > 1):
            refined |= _split(name, experts, layouts, plan.axes["ep"], count_experts(experts))
            _replace_forward(model, name, form, plan, buffer)
    for name, stock, stock_form in find_stock_experts(model) if divides_experts(plan) else ():
        own: Any = stock
        if buffer is not None and stock_form.is_grouped:
            # A projection's inputs go there, and its outputs come back.
            raise ModelError(
                f"parallel.expert_backend=deepep: rows of {name} ({type(stock).__name__}) have other widths than hidden states:"
                " use parallel.expert_backend=own"
            )
        refined |= _split(name, own, layouts, plan.axes["ep"])
        own.num_experts //= plan.axes["ep"].size
        _replace_forward(model, name, stock_form, plan, buffer)
    return refined


def divides_experts(plan: StagePlan) -> bool:
    """Whether rows have to be sent to experts: these are on several ranks, whole where ranks of `tp` share the rows, or drop what
    is beyond their capacity."""
    axes = plan.axes
    return (
        axes["ep"].size > 1 or axes["expert_tp"].size < axes["tp"].size or plan.recipe.model.expert_capacity is not None
    )


def check_experts(model: PreTrainedModel, degree: int, capacity: float | None = None, is_whole: bool = False) -> None:
    """Raises ModelError where the model has no experts to divide among `degree` ranks, or a layer's do not divide; and where a
    capacity is given to what has none. is_whole: parallel.expert_tp=1 leaves experts whole under tensor parallelism."""
    if degree == 1 and capacity is None and not is_whole:
        return
    kind = model.config.get_text_config().model_type
    asked = "parallel.expert_tp=1" if capacity is None else f"model.expert_capacity={capacity}"
    asked = f"parallel.ep={degree}" if degree > 1 else asked
    unknown = {type(experts).__name__: name for name, experts in find_unknown_experts(model)}
    if unknown:
        names = ", ".join(f"{name} ({form})" for form, name in unknown.items())
        raise ModelError(f"{asked}: {kind} holds experts in a form that cannot be divided, {names}: leave the key out")
    counts = count_all_experts(model)
    if not counts:
        raise ModelError(
            f"{asked}: {kind} has no stacked experts: leave the key out (the model is dense, or its experts are modules of"
            " their own)"
        )
    if capacity is not None and any(form.is_expert_major for _, _, form in find_experts(model)):
        raise ModelError(
            f"model.expert_capacity={capacity}: the experts of {kind} are told no weights to drop by; use null"
        )
    stock = next(find_stock_experts(model), None)
    if capacity is not None and stock is not None:
        raise ModelError(
            f"model.expert_capacity={capacity}: {stock[0]} of {kind} ({type(stock[1]).__name__}) computes by code of its own,"
            " which drops nothing; use null"
        )
    if capacity is not None and any(form.has_identity for _, _, form in find_experts(model)):
        raise ModelError(
            f"model.expert_capacity={capacity}: {kind} routes tokens to themselves, which nothing bounds; use null"
        )
    for name, count in counts.items():
        if count % degree:
            legal = ", ".join(str(each) for each in range(1, count + 1) if count % each == 0)
            raise ModelError(f"parallel.ep={degree} does not divide the {count} experts of {name}: use one of {legal}")


def _split(
    name: str, experts: nn.Module, layouts: Mapping[str, Layout], ep: Communicator, count: int | None = None
) -> dict[str, Layout]:
    """Cut the module's parameters along their dim 0. count: of matrices of its own; what its children have beside them (a norm of
    all experts' outputs) is copied. None: all parameters are experts' and nothing else."""
    refined = {}
    for parameter, whole in list(experts.named_parameters()):
        full = f"{name}.{parameter}"
        layout = replace(layouts[full], shard_axis="expert_shard", replica_axis="expert_replica")
        if count is not None and ("." in parameter or whole.shape[0] < count):
            refined[full] = _replicate(layout, ep)
            continue
        # Rows behind the experts' matrices are divided by themselves, or ranks would not have both matrices of one expert.
        segments = (count, whole.shape[0] - count) if count is not None and whole.shape[0] > count else ()
        layout = replace(layout, shards=(*layout.shards, Shard("ep", 0, ep.rank, ep.size, segments)))
        empty = torch.empty(layout.shape_local, dtype=whole.dtype, device="meta")
        holder, _, own = parameter.rpartition(".")
        setattr(experts.get_submodule(holder), own, nn.Parameter(empty, requires_grad=whole.requires_grad))
        refined[full] = layout
    return refined


def _replicate(layout: Layout, ep: Communicator) -> Layout:
    """The layout of a parameter that all experts share: each rank has the gradient of its own experts' rows, and counts an equal
    interval."""
    return replace(
        layout,
        replicated=(*layout.replicated, "ep"),
        partial=(*layout.partial, "ep"),
        interval=part(layout.numel_local, ep.rank, ep.size),
    )


def _codec_of(recipe: Recipe, name: str, form: ExpertsForm | StockForm) -> BlockCodec | None:
    """The codec of rows on their way to experts; None: they travel as they are."""
    if recipe.parallel.expert_dispatch == "bf16":
        return None
    if isinstance(form, StockForm):
        raise ModelError(
            f"parallel.expert_dispatch=fp8: {name} computes by code of its own, which rounds nothing; use bf16"
        )
    if form.has_identity:
        raise ModelError(
            "parallel.expert_dispatch=fp8: a token that is routed to itself would be rounded on no way; use bf16"
        )
    return ROW_CODEC


def _padding_of(recipe: Recipe, name: str, form: ExpertsForm | StockForm) -> float | None:
    """The factor of padded buffers; None: only a capacity bounds them."""
    padding = recipe.parallel.expert_padding
    if padding is not None and form.is_expert_major:
        reason = "is given every token for every expert, and buffers would have room for all of them"
        raise ModelError(f"parallel.expert_padding={padding}: {name} {reason}; use null")
    if padding is not None and isinstance(form, StockForm):
        reason = "computes by code of its own, which asks the host for the numbers of rows"
        raise ModelError(f"parallel.expert_padding={padding}: {name} {reason}; use null")
    return padding


def _replace_forward(
    model: PreTrainedModel, name: str, form: ExpertsForm | StockForm, plan: StagePlan, buffer: DeepBuffer | None
) -> None:
    experts: Any = model.get_submodule(name)
    axes, shared, codec = plan.axes, None, _codec_of(plan.recipe, name, form)
    padding, groups = _padding_of(plan.recipe, name, form), expert_groups(model.config.get_text_config())
    # On one node the ledger counts under `ep`.
    inner = axes["ep"] if axes["ep_outer"].size == 1 else axes["ep_inner"]
    parent, _, child = name.rpartition(".")
    # Looked for on meta: the mixture's own code runs once, without memory. Where slices of experts compute inside a region, it is
    # the region that computes shared experts.
    keeps_tokens = axes["expert_tp"].rank == 0
    local = StockExperts(experts, form) if isinstance(form, StockForm) else LocalExperts(experts, form, keeps_tokens)
    if axes["expert_tp"].size == 1 and isinstance(form, ExpertsForm):
        shared = stand_in(model.get_submodule(parent), child, model.config.get_text_config().hidden_size)
    if buffer is None:
        route = ExpertRoute(axes["ep_outer"], inner, codec, padding, groups)
    else:
        route = DeepRoute(axes["ep_outer"], inner, buffer)
    experts.dispatch = ExpertDispatch(
        local,
        count_experts(experts) * axes["ep"].size,
        route,
        plan.routed_tokens,
        shared,
        capacity_of(plan.recipe.model),
    )
    replace_forward(experts, experts.dispatch.opaque, experts.dispatch)
