"""ModelShape: the sizes of a model, read once from one model on meta, for forecasts of thousands of layouts.

Layers of one kind (equal modules, parameters and heads) are laid out once for each set of degrees, by a run's transforms: what
these leave a rank of one layer it has of all of that kind. So a model of 80 equal layers costs as much as one of one layer.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, cycle, pairwise
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from framework.comm.communicator import Communicator
from framework.mesh.layout import Layout
from framework.mesh.token_layout import ContextSlices, TokenLayout
from framework.mesh.topology import Topology, count_node_neighbours
from framework.model.borders import message_width
from framework.model.flops import ModelSize, find_trained, flops_per_token, measure_model, unit_flops
from framework.model.load import build_meta, kept_in_fp32, layer_configs, refuse_fresh_seeds
from framework.model.mixtures import Mixture, find_mixtures, refuse_bias_rate
from framework.model.peft import add_adapters
from framework.model.precision import DTYPES
from framework.model.probe import LayerCalls, find_layer_calls
from framework.model.stage import StageBounds, copy_stage, is_of_layers, split_stages
from framework.model.units import Unit, find_units, tied_names
from framework.optim.groups import group_parameters_of, optimizer_of
from framework.optim.matrices import MatrixForm, find_matrices
from framework.optim.owners import measure_balance
from framework.parallel.parallelize import find_compute_dtypes, parallelize, whole_layouts
from framework.parallel.pipeline.pipeline import count_layers
from framework.parallel.pipeline.schedules import SCHEDULES, rank_of_stage
from framework.parallel.stage_plan import StagePlan
from framework.parallel.tensor.partition import ranks_per_kv_head
from framework.parallel.zero.buffer_plan import Lifetimes
from framework.parallel.zero.plan_buffers import FROZEN, BufferPlan, plan_buffers
from framework.plan.candidate import Candidate, remember, resolve_target
from framework.plan.layer_widths import (
    AttentionShape,
    LayerWidths,
    MixerBytes,
    MixtureWidths,
    attention_shapes,
    gated_mixture,
    layer_widths,
    measure_mixer,
)
from framework.recipe.derive import divisors
from framework.recipe.schema import Launch, Parallel, Pipeline, Precision, Recipe

# Fields of a candidate that a rank's parameters depend on before ZeRO.
DEGREES = ("tp", "ep", "expert_tp", "sequence")
# FLOPs of a matrix that several ranks share: about a millisecond of a GPU, in which dozens of small messages fit. And by how much
# work may differ where `optim.muon.ranks_per_matrix=auto` leaves each to one rank.
WORTH_SHARING, UNEVEN = 5e11, 1.1
# The recipe of a shape that is asked for without one: bf16 on GPUs.
DEFAULT = Recipe(precision=Precision(compute="bf16"), launch=Launch(device="cuda"))


@dataclass(frozen=True)
class RankParameters:
    """The parameters of a stage on one rank, by name: what their buffers follow from. groups: of the optimizer, in the order
    that buffers have them; dtypes: in which forward reads them."""

    layouts: Mapping[str, Layout]
    groups: Mapping[str, str]
    dtypes: Mapping[str, torch.dtype]

    def plan_buffers(
        self,
        units: Iterable[Unit],
        master_dtype: torch.dtype | None,
        lifetimes: Lifetimes,
        axes: Mapping[str, Communicator],
    ) -> list[BufferPlan]:
        """Their buffers, on the device."""
        return plan_buffers(units, self.layouts, self.groups, self.dtypes, master_dtype, lifetimes, axes)


def lay_out_parameters(model: PreTrainedModel, plan: StagePlan) -> RankParameters:
    """Apply the transforms to a copy of the model on meta; what they leave this rank of its parameters."""
    layouts = parallelize(model, whole_layouts(model), plan)
    groups = dict.fromkeys(layouts, FROZEN) | {name: key for name, key in plan.groups.items() if name in layouts}
    return RankParameters(layouts, groups, find_compute_dtypes(model, plan))


@dataclass(frozen=True, eq=False)
class RankUnit:
    """A unit as a rank holds it, before ZeRO. local: its parameters, and others of the stage that it was laid out in."""

    unit: Unit
    local: RankParameters

    @property
    def layouts(self) -> Mapping[str, Layout]:
        """Layouts of its parameters, by name."""
        return {name: self.local.layouts[name] for name in self.unit.parameters}

    @cached_property
    def numel(self) -> int:
        """Elements of its parameters on a rank."""
        return sum(layout.numel_local for layout in self.layouts.values())

    @cached_property
    def has_experts(self) -> bool:
        """Whether ranks divide experts of it in a way of their own."""
        return any(layout.shard_axis == "expert_shard" for layout in self.layouts.values())

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """The optimizer groups of its parameters, in the order of their first one."""
        return tuple(dict.fromkeys(self.local.groups[name] for name in self.unit.parameters))


@dataclass(frozen=True, eq=False)
class StageUnits:
    """The units of a stage as a rank holds them: embedding and head where they are its own, and its layers by kind, with the
    number of each. of_layers: of each layer its place in `layers`."""

    ends: tuple[RankUnit, ...]
    layers: tuple[tuple[RankUnit, int], ...]
    of_layers: tuple[int, ...]

    @cached_property
    def order(self) -> tuple[str, ...]:
        """The optimizer groups, as the stage's buffers have them."""
        return tuple(dict.fromkeys(group for _, each in self.in_order for group in each.groups))

    @property
    def counted(self) -> tuple[tuple[RankUnit, int], ...]:
        """All units, with how many are alike."""
        return (*((each, 1) for each in self.ends), *self.layers)

    @property
    def in_order(self) -> list[tuple[str, RankUnit]]:
        """Every unit in order of computation, by name; layers are numbered from the stage's first."""
        layers = [(f"layers.{number}", self.layers[place][0]) for number, place in enumerate(self.of_layers)]
        first = [(each.unit.name, each) for each in self.ends if each.unit.name == "embedding"]
        return [*first, *layers, *((each.unit.name, each) for each in self.ends if each.unit.name != "embedding")]


@dataclass(frozen=True)
class MatrixWork:
    """Muon's matrices: averages over all trained parameters of the model."""

    share: float
    """Share of the parameters that Muon updates; shared: of those that several ranks may share, of heads: that are heads."""
    shared: float
    of_heads: float
    flops: float
    """FLOPs of the iterations, on all ranks that share a matrix together."""
    grams: float
    """Elements of X X^T of what ranks may share."""
    dearest: float
    """FLOPs of each rank for the dearest weight, expert or head."""


@dataclass(frozen=True, eq=False)
class ModelShape:
    """A model as numbers. recipe: of which the model's keys, the optimizer's groups and the precision are read, none of a layout.

    whole: on meta. units: in order of computation; ties: under the name that a parameter has in its unit, all its names; groups:
    the optimizer's, by parameter.
    """

    recipe: Recipe
    config: PretrainedConfig
    whole: PreTrainedModel
    units: tuple[Unit, ...]
    ties: Mapping[str, tuple[str, ...]]
    groups: Mapping[str, str]
    mixtures: tuple[Mixture, ...]

    # --- sizes

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """The number of each layer's kind; layers of one kind are laid out alike."""
        numbers: dict[Any, int] = {}
        return tuple(numbers.setdefault(each, len(numbers)) for each in self._describe_layers())

    @cached_property
    def widths(self) -> LayerWidths | None:
        """A layer of Llama's form; None for a model of another form, whose activations are then estimated."""
        return layer_widths(self.whole)

    @cached_property
    def mixture(self) -> MixtureWidths | None:
        """Its gated experts; None for a model without."""
        return gated_mixture(self.whole, self.text)

    @cached_property
    def text(self) -> PretrainedConfig:
        """The config of the text model."""
        return self.config.get_text_config()

    @cached_property
    def hidden(self) -> int:
        """Features of hidden states."""
        return self.text.hidden_size

    @cached_property
    def layer_calls(self) -> LayerCalls:
        """The calls of its layers, with the border in the middle of the model."""
        return find_layer_calls(self.config, [self.num_layers // 2])

    @cached_property
    def message_width(self) -> int:
        """Features of a token in a message between stages, of one in the middle of the model."""
        (border,) = self.layer_calls.borders.values()
        return message_width(border)

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the output embedding."""
        return self.whole.get_output_embeddings().weight.shape[0]

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.kinds)

    @cached_property
    def size(self) -> ModelSize:
        """Numbers of parameters of the whole model."""
        return measure_model(self.whole)

    @cached_property
    def forms(self) -> Mapping[str, tuple[MatrixForm, torch.Size]]:
        """The weights that Muon updates, with their shapes, by name: others with matrices are frozen, or AdamW's."""
        optim, groups = self.recipe.optim, self.groups
        found = find_matrices(self.whole, self.units, self.recipe.model.tp_plan, optim).items()
        own = ((name, form) for name, form in found if optimizer_of(optim, groups.get(name, "")) == "muon")
        return {name: (form, self.whole.get_parameter(name).shape) for name, form in own}

    @remember()
    def matrices(self, ranks: int) -> MatrixWork:
        """The work of Muon where so many ranks share each matrix that is no expert's."""
        numel, shared, of_heads, flops, grams, dearest = 0, 0, 0, 0.0, 0.0, 0.0
        for form, shape in self.forms.values():
            size, count, among = shape.numel(), shape[:-2].numel() * form.blocks, ranks if len(shape) == 2 else 1
            own = form.flops(shape, self.recipe.optim.muon.steps, among)
            numel, of_heads = numel + size, of_heads + size * (form.blocks > 1)
            flops, dearest = flops + count * own * among, max(dearest, own)
            if len(shape) == 2:
                shared += size
                grams += count * sum(min(each) ** 2 for each in form.shapes(form.block(shape)))
        total = sum(self.whole.get_parameter(name).numel() for name in self.groups)
        return MatrixWork(numel / total, shared / total, of_heads / total, flops / total, grams / total, dearest)

    @remember("dp", "cp", "tp", "pp", "ep", "expert_tp", "shard", "ranks_per_node")
    def sharing(self, c: Candidate) -> tuple[int, float]:
        """Ranks that share a matrix which is no expert's, and the busiest owner's work over the mean, counted with equal stages.
        `auto`: as few neighbours on a node as leave no owner a tenth more work, or the least that any number leaves."""
        stated, owners, tp = self.recipe.optim.muon.ranks_per_matrix, c.shard * c.tp, c.tp
        layers = [unit.parameters for unit in self.units if unit.is_layer]
        bounds = [len(layers) * place // c.pp for place in range(c.pp + 1)]
        stages = [chain.from_iterable(layers[start:stop]) for start, stop in pairwise(bounds)]
        held = [[self.forms[name] for name in names if name in self.forms] for names in stages]
        near = owners if c.world <= c.ranks_per_node else count_node_neighbours(owners, 1, c.ranks_per_node)
        choices = [each for each in divisors(near) if each % tp == 0 or tp % each == 0]
        if stated != "auto" or self.matrices(1).dearest < WORTH_SHARING:
            choices = [1 if stated == "auto" else stated]
        balances: dict[int, float] = {}
        for ranks in choices:
            balances[ranks] = max(self._balance(stage, c, ranks) for stage in held)
            if balances[ranks] <= UNEVEN:
                break
        best = min(balances, key=lambda ranks: balances[ranks])
        return best, balances[best]

    def _balance(self, stage: Sequence[tuple[MatrixForm, torch.Size]], c: Candidate, ranks: int) -> float:
        """The busiest owner's work over the mean, of a stage with these weights."""
        steps = self.recipe.optim.muon.steps
        blocks = [(form, shape, block) for form, shape in stage if len(shape) == 2 for block in range(form.blocks)]
        costs = [form.flops(shape, steps, ranks) for form, shape, _ in blocks]
        # Ranks of tp with the block: one of them has several heads, or several have one.
        held = [(block * c.tp // form.blocks, (block + 1) * c.tp // form.blocks) for form, _, block in blocks]
        holders = [range(first, max(stop, first + 1)) for first, stop in held]
        experts = sum(form.flops(shape, steps) * shape[0] for form, shape in stage if len(shape) == 3)
        return measure_balance(costs, holders, c.shard * c.tp, c.tp, ranks, experts / c.ep, c.ep, c.expert_tp)

    @remember()
    def mixers(self, tokens: int, dtype: torch.dtype) -> Sequence[MixerBytes | None]:
        """The bytes of each layer's recurrent mixer for a sequence of so many tokens; None of a layer without."""
        layers = [self.whole.get_submodule(unit.root) for unit in self.units if unit.is_layer]
        kinds = dict(zip(self.kinds, layers, strict=True))
        found = {kind: measure_mixer(layer, self.hidden, tokens, dtype) for kind, layer in kinds.items()}
        return [found[kind] for kind in self.kinds]

    # --- computation

    @remember()
    def flops(self, context: int) -> Mapping[str, float]:
        """FLOPs of a token in the forward of each unit, by name, with sequences of so many tokens."""
        return unit_flops(self.whole, self.units, context)

    @remember()
    def layer_flops(self, context: int) -> Sequence[float]:
        """FLOPs of a token in the forward of each layer."""
        found = self.flops(context)
        return [found[unit.name] for unit in self.units if unit.is_layer]

    @remember()
    def flops_per_token(self, context: int) -> float:
        """FLOPs of a token in forward and backward of the whole model: what MFU counts."""
        return flops_per_token(self.whole, context, self.units, self.groups)

    @cached_property
    def trained(self) -> Mapping[str, tuple[float, bool]]:
        """(trained share of its parameters, does a backward come to it) of each unit, by name."""
        return find_trained(self.whole, self.units, self.groups)

    @remember()
    def attentions(self, tp: int, context: int) -> Sequence[AttentionShape | None]:
        """The attention of each layer on a rank of tp, None of one without."""
        return attention_shapes(self.text, tp, context)

    # --- stages

    @remember()
    def stages(
        self, pp: int, schedule: str, virtual: int, context: int, layers: tuple[int, ...] | None = None
    ) -> tuple[StageBounds, ...]:
        """The stages of a pipeline, in order of computation, cut as a run's are. layers: pipeline.layers. Raises RecipeError
        where there are more stages than layers."""
        flops, owners = self.flops(context), self.owners(pp, schedule, virtual)
        ends = flops.get("embedding", 0.0), flops.get("head", 0.0)
        settings = Pipeline(virtual_stages=virtual, layers=None if layers is None else list(layers))
        return tuple(split_stages(count_layers(settings, self.layer_flops(context), ends, owners)))

    @remember()
    def owners(self, pp: int, schedule: str, virtual: int) -> tuple[int, ...]:
        """The rank of each stage."""
        return rank_of_stage(pp, virtual, SCHEDULES[schedule].is_v)

    # --- parameters

    def stage_units(self, bounds: StageBounds, c: Candidate) -> StageUnits:
        """The units of a stage on a rank of a layout. Raises what the transforms raise for degrees that do not fit."""
        if self.num_layers > 1 and not self._shares_layers:
            return self._find_stage_units(c, self.kinds[bounds.start : bounds.stop], bounds.is_first, bounds.is_last)
        # No layer is another's equal.
        found = list(self._lay_out(c, bounds).values())
        alone = tuple((each, 1) for each in found if each.unit.is_layer)
        ends = tuple(each for each in found if not each.unit.is_layer)
        return StageUnits(ends, alone, tuple(range(len(alone))))

    @remember(*DEGREES)
    def _find_stage_units(self, c: Candidate, own: tuple[int, ...], is_first: bool, is_last: bool) -> StageUnits:
        """own: the kinds of its layers."""
        by_kind = {kind: self._layer(kind, c) for kind in dict.fromkeys(own)}
        is_shared = not (is_first and is_last)
        names = ["embedding"] * is_first + ["head"] * is_last
        ends = tuple(each for name in names if (each := self._end(name, is_shared, c)) is not None)
        layers = tuple((each, own.count(kind)) for kind, each in by_kind.items())
        return StageUnits(ends, layers, tuple(map(list(by_kind).index, own)))

    def _layer(self, kind: int, c: Candidate) -> RankUnit:
        number = self.kinds.index(kind)
        # The first layer comes with the embedding.
        bounds = StageBounds(0, 2, 0, 1) if number == 0 else StageBounds(1, 3, number, number + 1)
        return self._lay_out(c, bounds)[f"layers.{number}"]

    def _end(self, name: str, is_shared: bool, c: Candidate) -> RankUnit | None:
        """Embedding or head. Where one stage has both, what they share is no replica of another stage's. is_shared: over two."""
        last = self.num_layers
        bounds = StageBounds(0, 2, 0, 1) if name == "embedding" else StageBounds(1, 2, last - 1, last)
        # Neither has experts that ranks of ep divide.
        found = self._lay_out(c.changed({"ep": 1}), bounds).get(name)
        if found is None or is_shared:
            return found
        unit = next(each for each in self.units if each.name == name)
        alone = {key: _unshare(layout) for key, layout in found.local.layouts.items() if key in unit.parameters}
        return RankUnit(unit, replace(found.local, layouts=alone))

    def _describe_layers(self) -> Iterator[Any]:
        """All that a layer's layout on a rank may depend on, for each layer."""
        # Two layers of equal shapes may still be cut differently: by the heads that their configs say, and by a recipe's tp_plan,
        # whose patterns may name one layer.
        configs = cycle(layer_configs(self.text))
        types = getattr(self.text, "layer_types", None) or ()
        fp32 = kept_in_fp32(self.whole, DTYPES[self.recipe.precision.compute])
        names_layers = any(char.isdigit() for pattern in self.recipe.model.tp_plan for char in pattern)
        for number, unit in enumerate(each for each in self.units if each.is_layer):
            prefix, layer, get = len(unit.root), next(configs), self.whole.get_parameter
            parameters = [
                (name[prefix:], tuple(get(name).shape), self.groups.get(name), name in fp32, len(self.ties[name]))
                for name in unit.parameters
            ]
            modules = [(path[prefix:], type(self.whole.get_submodule(path))) for path in unit.modules]
            heads = [getattr(layer, name, None) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")]
            kind = types[number] if number < len(types) else None
            has_backward = self.trained[unit.name][1]
            yield tuple(parameters), tuple(modules), tuple(heads), kind, number if names_layers else 0, has_backward

    @cached_property
    def _shares_layers(self) -> bool:
        return any(len(names) > 1 and is_of_layers(self.units, names) for names in self.ties.values())

    @remember(*DEGREES)
    def _lay_out(self, c: Candidate, bounds: StageBounds) -> Mapping[str, RankUnit]:
        """Lay out a stage: its units that have parameters, by name."""
        plan = self._stage_plan(bounds, c)
        local = lay_out_parameters(copy_stage(self.whole, self.units, bounds, num_outputs=0), plan)
        return {unit.name: RankUnit(unit, local) for unit in plan.own_units if unit.parameters}

    def _stage_plan(self, bounds: StageBounds, c: Candidate) -> StagePlan:
        kv = ranks_per_kv_head(self.config, c.tp)
        topology = Topology(pp=bounds.count, dp=c.ep, tp=c.tp, ep=c.ep, kv=kv, expert_tp=c.expert_tp)
        axes = {name: Communicator(axis) for name, axis in topology.axes(0).items()}
        parallel = Parallel(**{name: getattr(c, name) for name in DEGREES})
        recipe = replace(self.recipe, parallel=parallel, memory=replace(self.recipe.memory, compile="never"))
        slices = ContextSlices(c.tp)
        return StagePlan(
            recipe=recipe,
            axes=axes,
            bounds=bounds,
            tokens=TokenLayout(1, slices.tokens_local, topology.axes(0)["tp"], c.sequence, slices),
            units=self.units,
            ties=self.ties,
            groups=self.groups,
            compute_dtype=DTYPES[recipe.precision.compute],
            master_dtype=DTYPES.get(recipe.precision.master),
            device=torch.device("cpu"),
        )


def make_shape(config: PretrainedConfig, recipe: Recipe = DEFAULT) -> ModelShape:
    """The shape of the model of `config`. Raises ModelError and RecipeError as `make_plan` does where the model itself is the
    reason."""
    recipe = resolve_target(recipe)
    refuse_fresh_seeds(config)
    whole = build_meta(config, recipe.model.attention)
    add_adapters(whole, recipe.adapter)
    units = tuple(find_units(whole))
    mixtures = find_mixtures(whole, units)
    refuse_bias_rate(recipe.model, whole, mixtures)
    ties = tied_names(whole)
    groups = {each.parameter: each.key for each in group_parameters_of(recipe, whole, units)}
    return ModelShape(recipe, config, whole, units, ties, groups, mixtures)


def _unshare(layout: Layout) -> Layout:
    """The layout of what another stage does not have."""
    replicated = tuple(axis for axis in layout.replicated if axis != "embedding")
    partial = tuple(axis for axis in layout.partial if axis != "embedding")
    return replace(layout, replicated=replicated, partial=partial)
