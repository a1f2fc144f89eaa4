"""Plan: everything that is known of a run's layout before a device is touched. Made once, by `make_plan`, equal on every rank.

Whoever asks a question about a layout asks the Plan: `meshwright plan`, `submit`, `doctor`, `build`, `verify`, the run's
description, benchmarks.
It owns no memory and sends no byte; its model is on meta. What differs between ranks is asked of it by the rank's number.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, floor, log10
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from framework.comm.communicator import Communicator, link_levels
from framework.errors import RecipeError
from framework.mesh.layout import Layout
from framework.mesh.token_layout import ContextSlices, TokenLayout
from framework.mesh.topology import Topology
from framework.model.borders import Border
from framework.model.chunked_loss import LogitMap
from framework.model.flops import (
    ModelSize,
    measure_model,
    unit_flops,
)
from framework.model.kept_outputs import Policy
from framework.model.load import build_meta, refuse_dropped_layers, refuse_fresh_seeds
from framework.model.mixtures import Mixture, find_mixtures, refuse_bias_rate
from framework.model.peft import add_adapters
from framework.model.precision import DTYPES
from framework.model.probe import LayerCalls, find_layer_calls, find_routers_loss
from framework.model.routers import LoadBalancingLoss, Routers
from framework.model.stage import (
    StageBounds,
    StageModel,
    copy_stage,
    own_ties,
    refuse_following_starts,
    refuse_shared_layers,
    refuse_sliced_values,
)
from framework.model.units import Unit, find_units, tied_names
from framework.optim.groups import GroupAssignment, group_parameters_of
from framework.optim.qk_clip import QkRows, find_qk_rows
from framework.parallel.attention import find_stock_attention, find_whole, refuse_sequence, refuse_undivided_context
from framework.parallel.experts.split import check_experts
from framework.parallel.parallelize import refuse_halves
from framework.parallel.pipeline.pipeline import PipelinePlan, plan_pipeline, read_unit_times
from framework.parallel.pipeline.schedules import SCHEDULES, rank_of_stage, read_table
from framework.parallel.stage_plan import StagePlan
from framework.parallel.tensor.partition import ranks_per_kv_head
from framework.parallel.tensor.regions import mask_of, uses_rng_in_training
from framework.parallel.zero.buffer_plan import BufferPlan, lifetimes_of
from framework.parallel.zero.plan_buffers import choose_homes
from framework.plan.activations import Activations
from framework.plan.candidate import Candidate, full_topology, planned_candidate, remember, resolve_target
from framework.plan.forecast_memory import MemoryModel, StageMemory
from framework.plan.messages import find_tensor_messages
from framework.plan.policies import Counts, refuse_unknown_operations, resolve_chunked_loss, spell, uniform
from framework.plan.shape import ModelShape, lay_out_parameters
from framework.recipe import schema
from framework.recipe.derive import Derived, count_virtual_stages, derive
from framework.recipe.schema import Recipe

# The unit of memory.budget_gb: as the page of `plan` counts.
GB = 2**30


@dataclass(frozen=True)
class PlannedStage:
    """ties: all names of each of the stage's parameters in its model; buffers: without memory."""

    plan: StagePlan
    model: StageModel
    ties: Mapping[str, tuple[str, ...]]
    buffers: list[BufferPlan]

    @property
    def units(self) -> tuple[Unit, ...]:
        """Units that are whole or in part this stage's."""
        return self.plan.own_units


def lay_out_stage(model: PreTrainedModel, plan: StagePlan) -> PlannedStage:
    """Apply the transforms to a copy of the model on meta, and plan its buffers."""
    parameters = lay_out_parameters(model, plan)
    routers, is_random = None, uses_rng_in_training(model)
    if plan.load_balancing is not None:
        routers = Routers(model, plan.load_balancing, plan.compute_dtype, plan.device, plan.routed_tokens)
    borders = plan.received, plan.sent
    stage = StageModel(model, plan.own_units, plan.bounds, *borders, mask_of(plan.tokens), routers, is_random)
    lifetimes = lifetimes_of(plan.recipe.zero)
    buffers = parameters.plan_buffers(plan.own_units, plan.master_dtype, lifetimes, plan.axes)
    placed = choose_homes(buffers, plan.recipe.memory.offload)
    return PlannedStage(plan, stage, own_ties(model, plan.ties), placed)


@dataclass(frozen=True, eq=False)
class Plan:
    """The layout of a run: a frozen value. Properties are computed when they are first read."""

    # With the device and the compute dtype of where it will run, and whether the loss is chunked.
    recipe: Recipe
    config: PretrainedConfig
    derived: Derived
    topology: Topology
    # Where ranks compute; the index of a GPU is not known.
    device: torch.device
    # The model on meta, as Hugging Face builds it; stages are copies of parts of it.
    whole: PreTrainedModel
    # Its parts in order of computation.
    units: tuple[Unit, ...]
    # All names of a parameter, by its name in its unit.
    ties: Mapping[str, tuple[str, ...]]
    # The optimizer's group of each trained parameter of the whole model.
    groups: tuple[GroupAssignment, ...]
    pipeline: PipelinePlan
    # Number of outputs of a layer that returns a tuple; 0: a tensor. Known only where the model is cut into stages.
    num_outputs: int
    # The values that each stage receives, by its index: none of the first.
    borders: tuple[Border, ...]
    # The routers' auxiliary losses; None without one.
    load_balancing: LoadBalancingLoss | None
    # Mixtures of experts, in order.
    mixtures: tuple[Mixture, ...]
    # Operations between head and logits where the loss is chunked, else None.
    logit_map: LogitMap | None
    # The reason why layers attend by transformers' attention; None: they attend by Meshwright's.
    stock_attention: str | None
    # Classes of modules that get the tokens of all ranks of cp, because no attention of ours divides what they do.
    whole_mixers: frozenset[str]
    # Rows of queries and keys, which QK-clip scales, by parameter.
    qk_rows: Mapping[str, QkRows]

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return DTYPES[self.recipe.precision.compute]

    @cached_property
    def size(self) -> ModelSize:
        """Numbers of parameters of the whole model."""
        return measure_model(self.whole)

    @cached_property
    def initial_scales(self) -> Mapping[str, float]:
        """Factors of initial values by a parameter's name, where a base model has others (`model.mup_base`)."""
        return {each.parameter: each.initial for each in self.groups if each.initial != 1.0}

    @property
    def title(self) -> str:
        """Model and layout in a line, for pictures."""
        degrees = [f"{axis}={size}" for axis, size in self.derived.degrees.items() if size > 1]
        layout = ", ".join([" ".join(degrees) or "one rank", f"zero {self.recipe.zero.stage}"])
        count = self.derived.accumulation
        batch = f"{count} microbatch{'es' * (count != 1)} of {self.derived.sequences_per_microbatch} x {self.derived.context}"
        return f"{self.config.model_type}, {self.size.total:,} parameters; {layout}; {batch} tokens"

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward, of the whole model."""
        return self.shape.flops_per_token(self.derived.context)

    @property
    def vocabulary_size(self) -> int:
        """Rows of the output embedding."""
        return self.whole.get_output_embeddings().weight.shape[0]

    @remember()
    def of_rank(self, rank: int) -> "RankPlan":
        """The rank's stages, laid out on meta once. Axes have no process groups."""
        return self.lay_out(rank, unconnected(self.topology, rank), self.device)

    def lay_out(self, rank: int, axes: Mapping[str, Communicator], device: torch.device) -> "RankPlan":
        """`of_rank` over the axes of a connected mesh and this rank's own device: what is then given memory and trained."""
        tokens, policies = self.token_layout(rank), self.policies(rank)
        plans = [self._stage(bounds, axes, tokens, device, policies) for bounds in self.own_stages(rank)]
        stages = [
            lay_out_stage(copy_stage(self.whole, self.units, each.bounds, self.num_outputs), each) for each in plans
        ]
        return RankPlan(rank, tuple(stages), tokens)

    def token_layout(self, rank: int) -> TokenLayout:
        """The tokens that the rank holds of each microbatch; lays nothing out."""
        batch, tp, slices = self.recipe.batch, self.topology.axes(rank)["tp"], self.context_slices(rank)
        is_sharded = self.recipe.parallel.sequence
        return TokenLayout(batch.sequences_per_microbatch, slices.tokens_local, tp, is_sharded, slices)

    def context_slices(self, rank: int) -> ContextSlices:
        """The rows of every sequence that the rank holds: all without context parallelism."""
        derived = self.derived
        return ContextSlices(derived.context, derived.ulysses, derived.ring, self.topology.index("cp", rank))

    @cached_property
    def shape(self) -> ModelShape:
        """The model as numbers, by which bytes and seconds are forecast."""
        groups = {each.parameter: each.key for each in self.groups}
        return ModelShape(self.recipe, self.config, self.whole, self.units, self.ties, groups, self.mixtures)

    @cached_property
    def candidate(self) -> Candidate:
        """The layout as numbers."""
        return planned_candidate(self.recipe)

    @cached_property
    def memory_model(self) -> MemoryModel:
        """The bytes of this plan's ranks."""
        return MemoryModel.of(self.shape, self.recipe, self.pipeline)

    @cached_property
    def activations(self) -> Activations:
        """Bytes of activations, which all ranks hold alike."""
        return self.memory_model.activations.of_microbatch(self.candidate)

    @cached_property
    def tensor_bytes(self) -> list[int]:
        """Bytes that a rank sends over tp for each layer of the model and microbatch."""
        sizes, tp = self.activations, self.derived.tp
        if tp == 1:
            return [0] * sum(unit.is_layer for unit in self.units)
        slices_experts = self.topology.size("expert_tp") == tp
        messages = find_tensor_messages(self.whole, self.units, self.recipe.model.tp_plan, tp, slices_experts)
        return [each.sent(sizes.tokens, sizes.width, sizes.itemsize) for each in messages]

    def memory(self, rank: int) -> StageMemory:
        """Bytes that the rank needs at the most: those of the first rank at its place of the pipeline, which holds no less than
        others where heads or vocabulary do not divide."""
        return self._memories[self.topology.index("pp", rank)]

    @cached_property
    def _memories(self) -> tuple[StageMemory, ...]:
        return self.memory_model.stages(self.candidate, self.chosen)

    @cached_property
    def chosen(self) -> Mapping[int, Counts]:
        """Layers of each stage of the pipeline, by its index, with each policy of activation checkpointing.

        RecipeError where `auto` finds no choice that fits memory.budget_gb, with what would.
        """
        policy, budget_gb = self.recipe.memory.activation_checkpointing, self.recipe.memory.budget_gb or 0.0
        if policy != "auto":
            return {each.index: uniform(policy, each.stop - each.start) for each in self.pipeline.stages}
        places = [
            self.memory_model.choose(self.candidate, place, int(budget_gb * GB)) for place in range(self.derived.pp)
        ]
        if any(each is None for each in places):
            raise self._refuse_budget()
        return {index: counts for each in places if each is not None for index, counts in each.items()}

    def checkpointing(self, rank: int) -> Mapping[int, Counts]:
        """`chosen` of the rank's stages."""
        return {bounds.index: self.chosen[bounds.index] for bounds in self.own_stages(rank)}

    def _refuse_budget(self) -> RecipeError:
        """The error names the least with which all ranks do: what one needs would not do for another."""
        needs = [(*self.memory_model.least_by_choice(self.candidate, place), place) for place in range(self.derived.pp)]
        least, states, place = max(needs)
        rank = self.topology.ranks("pp", 0)[place]
        # Four significant digits, rounded up: what the message asks for is enough, also where a model is tiny.
        decimals = max(0, 3 - floor(log10(least / GB)))
        enough = ceil(least / GB * 10**decimals) / 10**decimals
        return RecipeError(
            f"memory.budget_gb={self.recipe.memory.budget_gb:g} is less than the {enough:.{decimals}f} GB that rank {rank}"
            f" needs with any choice of memory.activation_checkpointing, {states / GB:.{decimals}f} GB of them for"
            f" parameters, gradients and optimizer: set memory.budget_gb={enough:.{decimals}f} or more, zero.stage=3, or"
            " smaller microbatches"
        )

    def policies(self, rank: int) -> dict[str, Policy]:
        """The policy of each of the rank's layers, by the name of its unit."""
        chosen, layers = self.checkpointing(rank), [unit.name for unit in self.units if unit.is_layer]
        return {
            name: policy
            for bounds in self.own_stages(rank)
            for name, policy in zip(layers[bounds.start : bounds.stop], spell(chosen[bounds.index]), strict=True)
        }

    def own_stages(self, rank: int) -> list[StageBounds]:
        """The stages of the rank, in order of computation."""
        place, owners = self.topology.index("pp", rank), self.pipeline.rank_of_stage
        return [bounds for bounds in self.pipeline.stages if owners[bounds.index] == place]

    def _stage(
        self,
        bounds: StageBounds,
        axes: Mapping[str, Communicator],
        tokens: TokenLayout,
        device: torch.device,
        policies: Mapping[str, Policy],
    ) -> StagePlan:
        return StagePlan(
            recipe=self.recipe,
            axes=axes,
            bounds=bounds,
            tokens=tokens,
            units=self.units,
            ties=self.ties,
            groups={each.parameter: each.key for each in self.groups},
            compute_dtype=self.compute_dtype,
            master_dtype=DTYPES.get(self.recipe.precision.master),
            device=device,
            owns_attention=self.stock_attention is None,
            whole_mixers=self.whole_mixers,
            received=self.borders[bounds.index],
            sent=self.borders[bounds.index + 1],
            load_balancing=self.load_balancing,
            policies=policies,
        )


@dataclass(frozen=True)
class RankPlan:
    """The stages of one rank, in order of computation, and its tokens of each microbatch."""

    rank: int
    stages: tuple[PlannedStage, ...]
    tokens: TokenLayout

    @property
    def buffers(self) -> list[BufferPlan]:
        """The unit buffers of all stages, in order, without memory."""
        return [buffer for stage in self.stages for buffer in stage.buffers]

    @property
    def layouts(self) -> dict[str, Layout]:
        """The layout of each parameter of the rank, by its name in its unit, before ZeRO divides it."""
        return {slot.name: slot.layout for buffer in self.buffers for slot in buffer.slots}


def make_plan(recipe: Recipe, config: PretrainedConfig) -> Plan:
    """The plan of a checked recipe for the model of `config`. Pure: no process group, no memory, no device, equal on all ranks.

    Only what the recipe leaves to `auto` may depend on this machine (`resolve_target`); ranks read recipes that leave nothing.
    Raises what does not fit: ModelError, RecipeError, TopologyError, ScheduleError.
    """
    recipe = resolve_target(recipe)
    derived = derive(recipe)
    topology = make_topology(recipe, config)
    refuse_dropped_layers(config, derived.pp, derived.tp)
    refuse_fresh_seeds(config)
    # Beside 16 bits buffers stay in fp32: models cast them to what they are multiplied with.
    wide = torch.promote_types(DTYPES[recipe.precision.compute], torch.float32)
    whole = build_meta(config, recipe.model.attention, wide)
    add_adapters(whole, recipe.adapter)
    has_documents = recipe.data.isolates
    whole_mixers = find_whole(config, recipe) if derived.cp > 1 else frozenset()
    if whole_mixers and derived.tp > 1 and recipe.parallel.sequence:
        refuse_sequence(config, whole_mixers)
    if derived.cp > 1 and not whole_mixers:
        refuse_undivided_context(config, ContextSlices(derived.context, derived.ulysses, derived.ring), has_documents)
    check_experts(whole, derived.ep, recipe.model.expert_capacity, derived.expert_tp < derived.tp)
    refuse_halves(whole, recipe)
    units = tuple(find_units(whole))
    load_balancing, mixtures = find_routers_loss(whole, recipe.train.router_z_loss), find_mixtures(whole, units)
    refuse_bias_rate(recipe.model, whole, mixtures)
    refuse_unknown_operations(recipe.memory, whole)
    ties = tied_names(whole)
    recipe, logit_map = resolve_chunked_loss(recipe, whole)
    costs = unit_flops(whole, units, derived.context)
    named, times = recipe.pipeline.layers, None
    if isinstance(named, str):
        times = read_unit_times(named, config.model_type, measure_model(whole).total, [unit.name for unit in units])
    pipeline = plan_pipeline(recipe.pipeline, derived.pp, derived.accumulation, costs, recipe.zero, times)
    if times is not None:  # what forecasts read as well
        layers = [each.stop - each.start for each in pipeline.stages]
        recipe = replace(recipe, pipeline=replace(recipe.pipeline, layers=layers))
    refuse_shared_layers(config, units, ties, pipeline.stages)
    starts = [each.start for each in pipeline.stages[1:]]
    refuse_following_starts(config, whole, units, starts)
    calls = find_layer_calls(config, starts, DTYPES[recipe.precision.compute]) if starts else LayerCalls()
    if not calls.is_plain:
        refuse_sliced_values(config, derived.tp)
    stock_attention = None if derived.cp > 1 else find_stock_attention(config, recipe)
    if whole_mixers:
        stock_attention = f"{' and '.join(sorted(whole_mixers))} mix tokens, and get those of all ranks of cp"
    groups = tuple(group_parameters_of(recipe, whole, units))
    qk_rows = find_qk_rows(recipe, whole, units, {each.parameter for each in groups}, stock_attention)
    plan = Plan(
        recipe,
        config,
        derived,
        topology,
        torch.device(recipe.launch.device),
        whole,
        units,
        ties,
        groups,
        pipeline,
        calls.num_outputs,
        ((), *calls.borders.values(), ()),
        load_balancing,
        mixtures,
        logit_map,
        stock_attention,
        whole_mixers,
        qk_rows,
    )
    shared = plan.shape.sharing(plan.candidate)[0] if recipe.optim.name == "muon" else 1
    return plan if shared == topology.matrix else replace(plan, topology=replace(topology, matrix=shared))


def make_topology(recipe: Recipe, config: PretrainedConfig) -> Topology:
    """The recipe's degrees as axes, with the nodes that they lie on. `matrix` is 1 where the recipe leaves it to the plan."""
    derived, shared = derive(recipe), recipe.optim.muon.ranks_per_matrix
    ends = _find_embedding_ranks(recipe.pipeline, derived)
    matrix = shared if recipe.optim.name == "muon" and shared != "auto" else 1
    return full_topology(recipe, planned_candidate(recipe), ends, ranks_per_kv_head(config, derived.tp), matrix)


def _find_embedding_ranks(settings: schema.Pipeline, derived: Derived) -> tuple[int, int]:
    """Ranks of the pipeline with the first and the last stage: one rank twice where the schedule goes there and back."""
    if settings.table is not None:
        ranks = read_table(Path(settings.table), derived.pp, derived.accumulation).rank_of_stage
    else:
        ranks = rank_of_stage(derived.pp, count_virtual_stages(settings), SCHEDULES[settings.schedule].is_v)
    return ranks[0], ranks[-1]


def unconnected(topology: Topology, rank: int) -> dict[str, Communicator]:
    """The axes as a rank will see them, before anyone is connected."""
    return link_levels({name: Communicator(axis) for name, axis in topology.axes(rank).items()})
