"""Plan: everything that is known of a run's layout before a device is touched. Made once, by `make_plan`, equal on every rank.

Whoever asks a question about a layout asks the Plan: `meshwright plan`, `submit`, `doctor`, `build`, `verify`, the run's
description, benchmarks.
It owns no memory and sends no byte; its model is on meta. What differs between ranks is asked of it by the rank's number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import ceil, floor, log10
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from framework.comm.communicator import Communicator
from framework.errors import ModelError, RecipeError
from framework.mesh.context import ContextSlices
from framework.mesh.layout import Layout
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Topology, count_expert_shards, count_node_neighbours, shards_within_node
from framework.model.flops import (
    ModelSize,
    experts_per_token,
    flops_per_token,
    measure_model,
    unit_flops,
)
from framework.model.kept_outputs import ATTENTION, Policy
from framework.model.load import build_meta
from framework.model.logit_map import LogitMap
from framework.model.mixtures import Mixture, find_mixtures, refuse_bias_rate
from framework.model.precision import DTYPES
from framework.model.probe import find_layer_outputs, find_load_balancing_loss
from framework.model.routers import LoadBalancingLoss
from framework.model.stage import StageBounds, copy_stage, refuse_shared_layers
from framework.model.units import Unit, find_units, tied_names
from framework.optim.groups import GroupAssignment, group_trained
from framework.optim.optimizers import state_names
from framework.parallel.context import refuse_undivided_context
from framework.parallel.experts import check_experts
from framework.parallel.pipeline.actions import Schedule
from framework.parallel.pipeline.lower import SENDS, LiveMoment, live_moments
from framework.parallel.pipeline.pipeline import PipelinePlan, plan_pipeline
from framework.parallel.pipeline.schedules import SCHEDULES, rank_of_stage, read_table
from framework.parallel.pipeline.simulate import peak_live
from framework.parallel.stage_plan import StagePlan
from framework.parallel.tensor import ranks_per_kv_head
from framework.parallel.zero.plan_buffers import BufferPlan
from framework.plan.activation_peaks import find_peaks
from framework.plan.activations import Activations
from framework.plan.context import ContextCost, ContextMethod, Passes, attention_shapes
from framework.plan.layer_widths import layer_widths, mixture_widths, read_masks
from framework.plan.logits import resolve_chunked_loss
from framework.plan.memory import RankMemory, bytes_held, bytes_on_disk, bytes_on_host
from framework.plan.operations import refuse_unknown_operations
from framework.plan.policies import Counts, choose_counts, count_forwards, least_bytes, shorten, spell, uniform
from framework.plan.stage import PlannedStage, lay_out_stage
from framework.plan.target import resolve_target
from framework.plan.traffic import bytes_sent, expert_bytes_sent
from framework.recipe import schema
from framework.recipe.derive import Derived, count_virtual_stages, derive
from framework.recipe.schema import Recipe

# The unit of memory.budget_gb: as the page of `plan` counts.
GB = 2**30

# Families whose layers call torch.seed(), which reads the clock, in each forward: reversible layers replay their dropout by it.
FRESH_SEEDS = ("reformer",)


@dataclass(frozen=True, eq=False)
class Plan:
    """The layout of a run.

    recipe: with the device and the compute dtype of where it will run, and whether the loss is chunked. whole: the model on
    meta, as Hugging Face builds it; stages are copies of parts of it. units: its parts in order of computation. ties: under the
    name that a parameter has in its unit, all its names. groups: what the optimizer does with each trained parameter of the whole
    model. returns_tuple: whether layers return tuples (only known of a cut model). load_balancing: the routers' auxiliary loss,
    None without one. mixtures: of experts, in order. logit_map: what stands between head and logits where the loss is chunked,
    else None. device: where ranks compute; the index of a GPU is not known.
    """

    recipe: Recipe
    config: PretrainedConfig
    derived: Derived
    topology: Topology
    device: torch.device
    whole: PreTrainedModel
    units: tuple[Unit, ...]
    ties: Mapping[str, tuple[str, ...]]
    groups: tuple[GroupAssignment, ...]
    pipeline: PipelinePlan
    returns_tuple: bool
    load_balancing: LoadBalancingLoss | None
    mixtures: tuple[Mixture, ...]
    logit_map: LogitMap | None
    _ranks: dict[int, "RankPlan"] = field(default_factory=dict, repr=False)
    _chosen: dict[int, Mapping[int, Counts]] = field(default_factory=dict, repr=False)

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of forward and backward."""
        return DTYPES[self.recipe.precision.compute]

    @cached_property
    def size(self) -> ModelSize:
        """Numbers of parameters of the whole model."""
        return measure_model(self.whole)

    @property
    def title(self) -> str:
        """Model and layout in a line, for pictures."""
        degrees = [f"{axis}={size}" for axis, size in self.derived.degrees.items() if size > 1]
        layout = ", ".join([" ".join(degrees) or "one rank", f"zero {self.recipe.zero.stage}"])
        batch = f"{self.derived.accumulation} microbatches of {self.derived.sequences_per_microbatch} x {self.derived.context}"
        return f"{self.config.model_type}, {self.size.total:,} parameters; {layout}; {batch} tokens"

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward, of the whole model."""
        return flops_per_token(self.whole, self.derived.context)

    @property
    def vocabulary_size(self) -> int:
        """Rows of the output embedding."""
        return self.whole.get_output_embeddings().weight.shape[0]

    def of_rank(self, rank: int) -> "RankPlan":
        """What the rank will hold: its stages, laid out on meta. Laid out once; axes have no process groups."""
        if rank not in self._ranks:
            self._ranks[rank] = self.lay_out(rank, unconnected(self.topology, rank), self.device)
        return self._ranks[rank]

    def lay_out(self, rank: int, axes: Mapping[str, Communicator], device: torch.device) -> "RankPlan":
        """`of_rank` over the axes of a connected mesh and this rank's own device: what is then given memory and trained."""
        stages = self._lay_out_stages(rank, axes, device, self.policies(rank))
        return RankPlan(rank, tuple(stages), self.token_layout(rank))

    def _lay_out_stages(
        self, rank: int, axes: Mapping[str, Communicator], device: torch.device, policies: Mapping[str, Policy]
    ) -> list[PlannedStage]:
        tokens = self.token_layout(rank)
        plans = [self._stage(bounds, axes, tokens, device) for bounds in self._own_stages(rank)]
        return [lay_out_stage(self._copy(each.bounds), replace(each, policies=policies)) for each in plans]

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
    def activations(self) -> Activations:
        """Bytes of activations, which all ranks hold alike."""
        text, derived = self.config.get_text_config(), self.derived
        return Activations(
            self.token_layout(0),
            text.hidden_size,
            text.vocab_size,
            self.compute_dtype.itemsize,
            layer_widths(self.whole),
            self._layer_flops,
            self.recipe.memory,
            derived.expert_tp,
            mixture_widths(self.whole, text),
            tuple({cost: None for cost in self.context_costs(0) if cost is not None}),
            self.recipe.data.pack == "documents",
            read_masks(self.recipe, text, derived.cp, derived.context),
            derived.ep > 1 or derived.expert_tp < derived.tp or self.recipe.model.expert_capacity is not None,
        )

    def context_costs(self, rank: int) -> list[ContextCost | None]:
        """What cp costs a rank for each layer of the model and microbatch; empty where no sequence is divided."""
        if self.derived.cp == 1:
            return []
        method = ContextMethod(self.derived.ulysses, self.derived.ring, self.recipe.parallel.context == "gather")
        return self.costs_of_method(method, self.topology.index("ulysses", rank))

    def costs_of_method(self, method: ContextMethod, index: int = 0) -> list[ContextCost | None]:
        """`context_costs` of another method. index: of the rank along Ulysses."""
        shapes = attention_shapes(self.config.get_text_config(), self.derived.tp, self.derived.context)
        batch, packs = self.recipe.batch, self.recipe.data.pack == "documents"
        lengths = batch.sequences_per_microbatch, batch.context, self.compute_dtype.itemsize
        return [None if shape is None else ContextCost(method, shape, *lengths, packs, index) for shape in shapes]

    @cached_property
    def _layer_flops(self) -> float:
        """FLOPs of a token in a layer's forward, the mean of all."""
        flops = unit_flops(self.whole, self.units, self.derived.context)
        layers = [flops[unit.name] for unit in self.units if unit.is_layer]
        return sum(layers) / len(layers)

    def memory(self, rank: int) -> RankMemory:
        """Bytes that the rank holds at the most. Ranks that differ in other coordinates than `pp` hold as much where heads and
        vocabulary divide."""
        place, schedule = self.topology.index("pp", rank), self.pipeline.make(self.derived.accumulation)
        on_the_way = max(map(self.activations.transfer_bytes, self._own_stages(rank)))
        in_flight = live_moments(self.pipeline.lowered(self.derived.accumulation), place)
        activations = self._activation_bytes(in_flight, self.checkpointing(rank)) + on_the_way
        buffers, states = self.of_rank(rank).buffers, state_names(self.recipe.optim)
        moments = self.recipe.precision.moments
        held = bytes_held(buffers, states, moments) | {"activations": activations}
        on_host = bytes_on_host(buffers, states, moments, self.device.type == "cuda")
        on_host["activations"] = self._offloaded_bytes(schedule, rank)
        return RankMemory(held, peak_live(schedule)[place], on_host, bytes_on_disk(buffers, states))

    def _offloaded_bytes(self, schedule: Schedule, rank: int) -> int:
        """Activations on the host at the most. Each stage of the rank has blocks of its own."""
        total = 0
        for stage in self._own_stages(rank):
            sizes = [self.activations.offloaded_bytes(each) * (each is stage) for each in self.pipeline.stages]
            total += peak_live(schedule, sizes)[self.topology.index("pp", rank)]
        return total

    def _activation_bytes(self, moments: Sequence[LiveMoment], chosen: Mapping[int, Counts]) -> int:
        """The most activations of a rank. chosen: layers of each of its stages, by policy."""
        stages = {
            index: self.activations.of_stage(self.pipeline.stages[index], counts) for index, counts in chosen.items()
        }
        return max(peak.total for peak in find_peaks(moments, stages).values())

    def checkpointing(self, rank: int) -> Mapping[int, Counts]:
        """Layers of each of the rank's stages, by its index, with each policy of activation checkpointing.

        RecipeError where `auto` finds none that fits memory.budget_gb, with what would.
        """
        policy, own = self.recipe.memory.activation_checkpointing, self._own_stages(rank)
        sizes = {bounds.index: bounds.stop - bounds.start for bounds in own}
        if policy != "auto":
            return {index: uniform(policy, size) for index, size in sizes.items()}
        # By a stage's first rank: those who share a stage compute its layers again together, whatever uneven heads make of their
        # bytes.
        first = self.topology.ranks("pp", 0)[self.topology.index("pp", rank)]
        if first not in self._chosen:
            self._chosen[first] = self._choose(first, sizes)
        return self._chosen[first]

    def _choose(self, rank: int, sizes: Mapping[int, int]) -> Mapping[int, Counts]:
        """The cheapest that fits. Of stages of unlike sizes the smaller ones have the first layers of the largest."""
        largest, budget_gb = max(sizes.values()), self.recipe.memory.budget_gb or 0.0
        _, bytes_of = self._bytes_by_choice(rank, sizes)

        def flops_of(counts: Counts) -> float:
            return sum(self.activations.costs.flops(shorten(counts, size)) for size in sizes.values())

        found = choose_counts(largest, bytes_of, flops_of, int(budget_gb * GB))
        if found is None:
            raise self._refuse_budget()
        return {index: shorten(found, size) for index, size in sizes.items()}

    def _bytes_by_choice(self, rank: int, sizes: Mapping[int, int]) -> tuple[int, Callable[[Counts], int]]:
        """(bytes of the rank that no choice changes, all of its bytes by the choice for the largest of its stages)."""
        place = self.topology.index("pp", rank)
        # Its buffers do not depend on what is chosen here.
        stages = self._lay_out_stages(rank, unconnected(self.topology, rank), self.device, {})
        buffers = [buffer for stage in stages for buffer in stage.buffers]
        states, moments = state_names(self.recipe.optim), self.recipe.precision.moments
        lasting = sum(bytes_held(buffers, states, moments).values())
        in_flight = live_moments(self.pipeline.lowered(self.derived.accumulation), place)

        def bytes_of(counts: Counts) -> int:
            chosen = {index: shorten(counts, size) for index, size in sizes.items()}
            return lasting + self._activation_bytes(in_flight, chosen)

        return lasting, bytes_of

    def _refuse_budget(self) -> RecipeError:
        """With the least that all ranks can do with: what one needs would not do for a later stage."""
        needs = []
        for rank in self.topology.ranks("pp", 0):
            sizes = {bounds.index: bounds.stop - bounds.start for bounds in self._own_stages(rank)}
            lasting, bytes_of = self._bytes_by_choice(rank, sizes)
            needs.append((least_bytes(max(sizes.values()), bytes_of), lasting, rank))
        least, lasting, rank = max(needs)
        # Four significant digits, rounded up: what the message asks for is enough, also where a model is tiny.
        decimals = max(0, 3 - floor(log10(least / GB)))
        enough = ceil(least / GB * 10**decimals) / 10**decimals
        return RecipeError(
            f"memory.budget_gb={self.recipe.memory.budget_gb:g} is less than the {enough:.{decimals}f} GB that rank {rank}"
            f" needs with any choice of memory.activation_checkpointing, {lasting / GB:.{decimals}f} GB of them for"
            f" parameters, gradients and optimizer: set memory.budget_gb={enough:.{decimals}f} or more, zero.stage=3, or"
            " smaller microbatches"
        )

    def policies(self, rank: int) -> dict[str, Policy]:
        """The policy of each of the rank's layers, by the name of its unit."""
        chosen, layers = self.checkpointing(rank), [unit.name for unit in self.units if unit.is_layer]
        return {
            name: policy
            for bounds in self._own_stages(rank)
            for name, policy in zip(layers[bounds.start : bounds.stop], spell(chosen[bounds.index]), strict=True)
        }

    def traffic(self, rank: int) -> dict[str, int]:
        """Bytes that the rank sends in a step: parameters (`gathers`), gradients (`reductions to shards`, `to replicas`), hidden
        states over `tp` and over `pp`, keys and values or heads over `cp`, and over `ep` with equally many tokens for each
        expert."""
        place, accumulation = self.topology.index("pp", rank), self.derived.accumulation
        messages = sum(action.kind in SENDS for action in self.pipeline.lowered(accumulation).ranks[place])
        num_layers = sum(bounds.stop - bounds.start for bounds in self._own_stages(rank))
        sent = bytes_sent(self.of_rank(rank).buffers, accumulation, DTYPES[self.recipe.precision.reduce])
        return sent | {
            "tp": self.activations.sent_per_layer * accumulation * num_layers,
            "pp": self.activations.hidden_bytes * messages,
            "cp": self._context_traffic(rank) * accumulation,
            "ep": sum(map(self.expert_traffic, self.mixtures_of(rank))) * accumulation,
        }

    def _context_traffic(self, rank: int) -> int:
        """Bytes of one microbatch that the rank sends over Ulysses and ring."""
        costs, total = self.context_costs(rank), 0
        for number in (each for bounds in self._own_stages(rank) for each in range(bounds.start, bounds.stop)):
            if costs and (cost := costs[number]) is not None:
                total += cost.sent(self.passes_of_layer(number))
        return total

    def expert_traffic(self, mixture: Mixture) -> int:
        """Bytes that a rank sends over `ep` for one mixture and one microbatch, with equally many tokens for each expert.

        Ranks of `tp` that have whole experts route a part of the tokens each; those that slice experts all route the same."""
        activations = self.activations
        num_rows = activations.rows_in_experts(experts_per_token(self.config.get_text_config()) or 1)
        counts = mixture.num_experts * (2 if self.recipe.parallel.expert_overlap else 1)
        hops = [self.topology.size(axis) for axis in ("ep_inner", "ep_outer")]
        row_bytes = activations.width * activations.itemsize
        return expert_bytes_sent(num_rows * row_bytes, counts, hops, self.forwards_of(mixture))

    def forwards_of(self, mixture: Mixture) -> int:
        """How often the mixture's forward runs for one microbatch."""
        layers = [unit.name for unit in self.units if unit.is_layer]
        return self.passes_of_layer(layers.index(mixture.layer)).forwards

    def passes_of_layer(self, number: int) -> Passes:
        """How often a layer runs for one microbatch, and its attention."""
        bounds = next(each for each in self.pipeline.stages if each.start <= number < each.stop)
        rank = self.topology.ranks("pp", 0)[self.pipeline.rank_of_stage[bounds.index]]
        counts, position = self.checkpointing(rank)[bounds.index], number - bounds.start
        forwards = count_forwards(counts, position)
        is_kept = spell(counts)[position] == "selective" and ATTENTION in self.recipe.memory.kept_operations
        return Passes(forwards, 1 if is_kept else forwards)

    def mixtures_of(self, rank: int) -> list[Mixture]:
        """The mixtures of the rank's stages, in order."""
        own = {unit.name for stage in self.of_rank(rank).stages for unit in stage.units}
        return [mixture for mixture in self.mixtures if mixture.layer in own]

    def _own_stages(self, rank: int) -> list[StageBounds]:
        """The stages of the rank, in order of computation."""
        place, owners = self.topology.index("pp", rank), self.pipeline.rank_of_stage
        return [bounds for bounds in self.pipeline.stages if owners[bounds.index] == place]

    def _copy(self, bounds: StageBounds) -> PreTrainedModel:
        return copy_stage(self.whole, self.units, bounds, self.returns_tuple)

    def _stage(
        self, bounds: StageBounds, axes: Mapping[str, Communicator], tokens: TokenLayout, device: torch.device
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
            returns_tuple=self.returns_tuple,
            load_balancing=self.load_balancing,
        )


@dataclass(frozen=True)
class RankPlan:
    """What one rank holds. stages: in order of computation; tokens: of each microbatch."""

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
    if derived.cp > 1:
        slices = ContextSlices(derived.context, derived.ulysses, derived.ring)
        refuse_undivided_context(config, slices, recipe.data.pack == "documents")
    check_experts(whole, derived.ep, recipe.model.expert_capacity, derived.expert_tp < derived.tp)
    units = tuple(find_units(whole))
    load_balancing, mixtures = find_load_balancing_loss(whole), find_mixtures(whole, units)
    refuse_bias_rate(recipe.model, whole, mixtures)
    refuse_unknown_operations(recipe.memory, whole)
    ties = tied_names(whole)
    recipe, logit_map = resolve_chunked_loss(recipe, whole)
    if derived.pp > 1:
        refuse_shared_layers(config, units, ties)
    costs = unit_flops(whole, units, derived.context)
    pipeline = plan_pipeline(recipe.pipeline, derived.pp, derived.accumulation, costs, recipe.zero)
    return Plan(
        recipe,
        config,
        derived,
        topology,
        torch.device(recipe.launch.device),
        whole,
        units,
        ties,
        tuple(group_parameters_of(recipe, whole, units)),
        pipeline,
        len(pipeline.stages) > 1 and find_layer_outputs(config),
        load_balancing,
        mixtures,
        logit_map,
    )


def refuse_dropped_layers(config: PretrainedConfig, pp: int, tp: int) -> None:
    """Raises ModelError where ranks would drop other layers than one process: the model draws in front of a layer, in a stream
    that depends on where it is cut, and a stage whose first layer is dropped would not read what it has received."""
    degrees = {"pp": pp, "tp": tp}
    found = {key: value for key, value in config.to_dict().items() if "layerdrop" in key and value}
    for key, value in found.items():
        if max(degrees.values()) > 1:
            split = " and ".join(f"parallel.{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
            raise ModelError(
                f"model.config.{key}={value} leaves out whole layers at random, which {split} cannot do alike on all ranks:"
                f" set model.config.{key}=0.0, or use data parallelism and ZeRO"
            )


def refuse_fresh_seeds(config: PretrainedConfig) -> None:
    """Raises ModelError for a family that seeds torch's generator anew, in each forward of its training."""
    if config.model_type in FRESH_SEEDS:
        raise ModelError(
            f"model.family={config.model_type} takes a new random seed in every forward, so that no run of it could be"
            " repeated, resumed or verified: choose another family"
        )


def make_topology(recipe: Recipe, config: PretrainedConfig) -> Topology:
    """The recipe's degrees as axes. Stage 0 shards over one rank; `zero.shard_within=null` is everyone."""
    derived = derive(recipe)
    batch, within = derived.dp * derived.cp, recipe.zero.shard_within
    if within == "node":
        within = shards_within_node(derived.world, batch, derived.tp, derived.ranks_per_node, derived.nodes)
    shard = 1 if recipe.zero.stage == 0 else within or batch
    expert_shard = 1
    if recipe.zero.stage:
        expert_shard = count_expert_shards(shard, derived.tp, derived.ep, derived.expert_tp, batch)
    inner = recipe.parallel.expert_hierarchical
    if inner == "node":
        inner = count_node_neighbours(derived.ep, derived.expert_tp, derived.ranks_per_node)
    return Topology(
        pp=derived.pp,
        dp=derived.dp,
        cp=derived.cp,
        tp=derived.tp,
        ep=derived.ep,
        kv=ranks_per_kv_head(config, derived.tp),
        shard=shard,
        expert_tp=derived.expert_tp,
        expert_shard=expert_shard,
        ep_inner=inner,
        embedding_ranks=_find_embedding_ranks(recipe.pipeline, derived),
        ulysses=derived.ulysses,
    )


def _find_embedding_ranks(settings: schema.Pipeline, derived: Derived) -> tuple[int, int]:
    """Ranks of the pipeline with the first and the last stage: one rank twice where the schedule goes there and back."""
    if settings.table is not None:
        ranks = read_table(Path(settings.table), derived.pp, derived.accumulation).rank_of_stage
    else:
        ranks = rank_of_stage(derived.pp, count_virtual_stages(settings), SCHEDULES[settings.schedule].is_v)
    return ranks[0], ranks[-1]


def unconnected(topology: Topology, rank: int) -> dict[str, Communicator]:
    """The axes as a rank will see them, before anyone is connected."""
    return {name: Communicator(axis) for name, axis in topology.axes(rank).items()}


def group_parameters_of(recipe: Recipe, whole: PreTrainedModel, units: tuple[Unit, ...]) -> list[GroupAssignment]:
    """Decided on the whole model, so that every rank agrees."""
    parameters = {name: whole.get_parameter(name) for unit in units for name in unit.parameters}
    marked = {name for name, each in parameters.items() if getattr(each, "_no_weight_decay", False)}
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    return group_trained(shapes, recipe.model.freeze, recipe.optim, marked)
