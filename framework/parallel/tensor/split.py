"""split_over_tp: a transform that splits a model on meta over the tensor-parallel ranks.

Its weights become this rank's parts under the same names, and hooks put borders around what computes with them. Nothing has
memory yet, nothing communicates here.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.errors import ModelError, TopologyError
from framework.mesh.layout import Layout, Shard, part
from framework.model.experts import ExpertsForm, count_all_experts, form_of, stock_form_of
from framework.model.matmul import MatmulLinear
from framework.model.units import find_last_module, find_layers
from framework.parallel.stage_plan import StagePlan
from framework.parallel.tensor.borders import ShardedBorder, make_border
from framework.parallel.tensor.find_regions import RegionPlan, find_regions
from framework.parallel.tensor.layers import (
    ColumnLinear,
    RowLinear,
    SplitRMSNorm,
    StateColumn,
    SummedRowLinear,
    divide_mixer,
    look_up_locally,
    split_gated_norm,
)
from framework.parallel.tensor.partition import (
    FEATURES,
    Counts,
    PartitionedDim,
    SplitParameters,
    count_heads,
    divide_numbers,
    partition,
    refuse_fixed_attention,
)
from framework.parallel.tensor.regions import (
    Region,
    RngStreams,
    change_argument,
    end_outside,
    end_region,
    enter,
    gather_behind,
    leave,
    lend,
    scatter,
    start_outside,
    take_back,
    uses_rng_in_training,
)
from framework.parallel.tensor.rules import PARAMETERS, TOKEN_ARGUMENTS, WEIGHT_BEFORE_CAST, Role, holder

NO_HEADS = Counts(1, 1)


def _is_outside(parameter: str, modules: tuple[str, ...]) -> bool:
    return parameter.startswith(modules) or PARAMETERS.get(parameter.rpartition(".")[2]) == "outside"


def split_over_tp(model: PreTrainedModel, layouts: Mapping[str, Layout], plan: StagePlan) -> dict[str, Layout]:
    """Split every weight that can be over the axes `tp` and `kv`; the refined layouts. On one rank nothing changes.

    model: on meta; layers of other stages may be gone, embedding and head are whole. layouts: of each parameter, under each of
    its names. plan.axes["kv"]: the part of `tp` that `ranks_per_kv_head` tells. Of the recipe it reads `model.tp_plan`,
    `memory.gathered_inputs` and `parallel.overlap`; plan.tokens says whether ranks hold parts of the tokens between regions.

    What several ranks hold is `replicated` over `tp` or `kv`, and `interval` is what of it this rank counts. Of a packed
    weight, `kv` may share the keys and values only: they get whole gradients in backward, and one rank's interval has them.
    Raises ModelError where a module's role is unknown, TopologyError when heads do not divide.
    """
    if plan.axes["tp"].size == 1:
        return dict(layouts)
    modules = [name for unit in plan.units for name in unit.modules]
    regions = find_regions(model, plan.recipe.model.tp_plan, modules, plan.axes["expert_tp"].size == 1)
    splitter = _Splitter(model, plan, SplitParameters(layouts, plan.axes["tp"], plan.axes["kv"]))
    for region in regions:
        splitter.split_region(region)
    splitter.keep_whole_experts()
    splitter.place_tokens(splitter.split_vocabulary())
    return splitter.finish()


@dataclass
class _Splitter:
    """A model while it is split: its modules are replaced or hooked one after another, its parameters become `parameters`."""

    model: PreTrainedModel
    plan: StagePlan
    parameters: SplitParameters

    def __post_init__(self) -> None:
        plan, memory = self.plan, self.plan.recipe.memory
        self.tp, self.kv, self.tokens = plan.axes["tp"], plan.axes["kv"], plan.tokens
        self.rng = RngStreams(plan.tokens) if uses_rng_in_training(self.model) else None
        self.regathers = memory.gathered_inputs == "regather"
        self.border = make_border(plan.tokens, self.tp, overlaps=plan.recipe.parallel.overlap == "always")
        # The head's input is read before the head as a whole: its border has nothing to communicate under.
        self.head_border = make_border(plan.tokens, self.tp, overlaps=False)

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config.get_text_config()

    @property
    def layers(self) -> tuple[str, nn.ModuleList]:
        found = find_layers(self.model)
        assert found is not None, "regions were found without layers"
        return found

    # --- regions

    def split_region(self, found: RegionPlan) -> None:
        """Split the modules of one region, and give it its borders."""
        region = Region(self.border, self.regathers, self.rng, found.name, differs=not found.is_block)
        attentions = {holder(name) for name, role in found.roles.items() if role.arrangement not in FEATURES}
        counts = self._count_heads(found) if attentions else NO_HEADS
        for name in attentions:
            refuse_fixed_attention(self.model, name)
            attention = self.model.get_submodule(name)
            if "state_rows" in counts.linear:
                divide_mixer(attention, counts, self.tp)
            else:
                divide_numbers(attention, counts, self.tp.axis)
            self._split_own_parameters(name, counts)
        for name, role in found.roles.items():
            self._split_module(name, role, counts, region, leaves=not found.is_block)
        for name in found.experts:
            form = form_of(self.model.get_submodule(name))
            self._split_stock_experts(name) if form is None else self._split_experts(name, form)
        entrance: Any = self.model.get_submodule(found.name)
        entrance.region_hook = region
        entrance.register_forward_pre_hook(partial(enter, region), with_kwargs=True)
        if found.is_block:
            entrance.register_forward_hook(partial(leave, region), with_kwargs=True)
        if self.rng is not None:
            roles = (self.model.get_submodule(name) for name in found.roles)
            for module in (*entrance.modules(), *roles):
                module.stream_mask = self.rng.mask_inside(found.name, region.differs)
        # Whatever else is inside computes alike on all ranks, from a gradient that is one rank's part.
        outside = tuple(f"{name}." for name, role in found.roles.items() if role.kind == "outside")
        inside = (
            (name, each) for name, each in entrance.named_parameters(found.name) if not _is_outside(name, outside)
        )
        self.parameters.replicate_rest(inside, lambda name: True)

    def _count_heads(self, found: RegionPlan) -> Counts:
        counts = count_heads(self.model, found)
        counts.check(self.tp.size, f"{self.config.model_type} ({found.name})")
        copies = counts.copies(self.tp.size)
        if not counts.linear and copies not in (1, self.kv.size):
            raise TopologyError(
                f"{found.name} has {counts.kv} key-value heads, other layers another number: parallel.tp={self.tp.size} is more"
                " than both; use a smaller parallel.tp"
            )
        return counts

    def _split_module(self, name: str, role: Role, counts: Counts, region: Region, leaves: bool) -> None:
        match role.kind:
            case "column":
                self._split_column(name, role, counts, region)
            case "row":
                self._split_row(name, role, counts, region, leaves)
            case "sum":
                self._split_row(name, role, counts, region, leaves=False, layer=SummedRowLinear)
            case "norm":
                self._split_norm(name, role, counts)

    def _split_column(self, name: str, role: Role, counts: Counts, region: Region) -> None:
        """Along the outputs: [N, K] -> [N_r, K], transposed for GPT-2's Conv1D, and the bias with them."""
        module: Any = self.model.get_submodule(name)
        is_transposed = isinstance(module, Conv1D)
        dim = int(is_transposed)
        found = self._partition(role.arrangement, dim, module.weight.shape[dim], counts)
        weight = self.parameters.take(f"{name}.weight", module.weight, found)
        bias = getattr(module, "bias", None)
        if bias is not None:
            along_bias = self._partition(role.arrangement, 0, bias.shape[0], counts)
            bias = self.parameters.take(f"{name}.bias", bias, along_bias)
        if isinstance(module, nn.Conv1d):
            # Depthwise, a filter per channel: it stays the module that it is, with fewer channels.
            module.weight, module.bias = weight, bias
            module.groups = module.in_channels = module.out_channels = weight.shape[0]
            return
        # Copies of a whole weight are summed with the other partial gradients, once a step.
        copied = found.copied if found.copied < weight.shape[dim] else 0
        holders = self.plan.axes[found.over]
        if counts.count_whole(role.arrangement, self.tp.size):
            self._put(name, StateColumn(weight, bias, region, self.tp, counts))
        else:
            self._put(name, ColumnLinear(weight, bias, is_transposed, region, holders, copied))

    def _split_row(
        self, name: str, role: Role, counts: Counts, region: Region, leaves: bool, layer: type[RowLinear] = RowLinear
    ) -> None:
        """Along the inputs: [N, K] -> [N, K_r], transposed for GPT-2's Conv1D; the bias stays whole."""
        module: Any = self.model.get_submodule(name)
        is_transposed = isinstance(module, Conv1D)
        dim = 1 - int(is_transposed)
        found = self._partition(role.arrangement, dim, module.weight.shape[dim], counts)
        weight = self.parameters.take(f"{name}.weight", module.weight, found)
        # Added inside the region, or to this rank's tokens: either way its gradient is one rank's part.
        is_partial = not leaves or self.tokens.num_parts > 1
        bias = getattr(module, "bias", None)
        bias = None if bias is None else self.parameters.replicate(f"{name}.bias", bias, is_partial)
        self._put(name, layer(weight, bias, is_transposed, region, leaves))

    def _split_norm(self, name: str, role: Role, counts: Counts) -> None:
        """Over all heads, or with a weight per head, which needs no other rank's features."""
        norm: Any = self.model.get_submodule(name)
        size = norm.weight.shape[0]
        found = self._partition(role.arrangement, 0, size, counts)
        weight = self.parameters.take(f"{name}.weight", norm.weight, found)
        if norm.weight.ndim == 2:
            norm.weight = weight
            return
        if role.arrangement == "linear_value_heads":
            self._put(name, split_gated_norm(norm, weight, counts.kv, self.tp))
            return
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if eps is None:
            raise ModelError(f"{name} ({type(norm).__name__}) has no known epsilon: parallel.tp cannot split it")
        before = self.config.model_type in WEIGHT_BEFORE_CAST
        copies = self.kv.size if found.copied else 1
        self._put(name, SplitRMSNorm(weight, eps, size, copies, before, self.tp))

    def _split_experts(self, name: str, form: ExpertsForm) -> None:
        """Every expert is sliced: [experts, features, inputs] or transposed, gate and up in halves or interleaved."""
        experts: Any = self.model.get_submodule(name)
        if getattr(experts, "has_post_expert_norm", False):
            raise ModelError(
                f"{name} normalises each expert's output: parallel.tp cannot slice it; use parallel.expert_tp=1, which leaves"
                " experts whole"
            )
        along_inputs = 1 if form.is_transposed else 2
        inner = experts.down_proj.shape[along_inputs]
        # Gate and up in turn divide as pairs of neighbours, so an interval of features must hold whole pairs.
        if form.has_gate and not form.is_concatenated and inner % self.tp.size:
            raise TopologyError(
                f"parallel.tp={self.tp.size} does not divide the {inner} features of {name}: use parallel.expert_tp=1, which"
                " leaves experts whole"
            )
        arrangement = "pair" if form.has_gate and form.is_concatenated else ""
        self._take_of_experts(name, form.first, 3 - along_inputs, arrangement)
        self._take_of_experts(name, f"{form.first}_bias", 1, arrangement)
        self._take_of_experts(name, "down_proj", along_inputs, "")
        mine = experts.down_proj.shape[along_inputs]
        for attribute, value in list(vars(experts).items()):
            if attribute in ("intermediate_dim", "intermediate_size", "expert_dim") and value == inner:
                setattr(experts, attribute, mine)
        if getattr(experts, "down_proj_bias", None) is not None:
            # The ranks' outputs are summed, and the bias in them.
            lent = {(experts, "down_proj_bias"): partial(torch.div, other=self.tp.size)}
            hooks = experts.untraced_hooks = partial(lend, lent), partial(take_back, lent)
            experts.register_forward_pre_hook(hooks[0])
            experts.register_forward_hook(hooks[1])

    def _split_stock_experts(self, name: str) -> None:
        """An equal part of each expert's rows along dim 0. Their code goes by the number of an expert's features."""
        experts: Any = self.model.get_submodule(name)
        form = stock_form_of(experts)
        if form is None or form.is_grouped:
            raise ModelError(
                f"{name} ({type(experts).__name__}): parallel.tp does not slice such experts; use parallel.tp=1"
            )
        segments = (experts.ffn_hidden_size,) * experts.num_experts
        shard = Shard("tp", 0, self.tp.rank, self.tp.size, segments)
        for parameter, whole in list(experts.named_parameters()):
            holder, _, own = parameter.rpartition(".")
            sliced = self.parameters.take(f"{name}.{parameter}", whole, PartitionedDim((shard,), 0))
            setattr(experts.get_submodule(holder), own, sliced)
            experts.ffn_hidden_size = len(sliced) // experts.num_experts

    def _take_of_experts(self, name: str, parameter: str, dim: int, arrangement: str) -> None:
        experts = self.model.get_submodule(name)
        whole = getattr(experts, parameter, None)
        if whole is not None:
            found = self._partition(arrangement, dim, whole.shape[dim], NO_HEADS)
            setattr(experts, parameter, self.parameters.take(f"{name}.{parameter}", whole, found))

    def _split_own_parameters(self, name: str, counts: Counts) -> None:
        """Parameters that the attention itself holds, one number per head, or several."""
        attention = self.model.get_submodule(name)
        for parameter, whole in list(attention.named_parameters(recurse=False)):
            arrangement = PARAMETERS[parameter]
            if arrangement not in (None, "outside"):
                # Dims of size 1 stand beside that of the heads in some.
                dim = next((dim for dim, size in enumerate(whole.shape) if size > 1), 0)
                found = self._partition(arrangement, dim, whole.shape[dim], counts)
                setattr(attention, parameter, self.parameters.take(f"{name}.{parameter}", whole, found))

    def keep_whole_experts(self) -> None:
        """Experts that nobody slices are this rank's as they are: ranks of `tp` have different ones, or copies that learn from
        different tokens."""
        if self.plan.axes["expert_tp"].size == 1:
            for name in count_all_experts(self.model):
                for parameter, whole in self.model.get_submodule(name).named_parameters(name):
                    self.parameters.keep(parameter, whole)

    # --- the vocabulary and the tokens

    def split_vocabulary(self) -> Region:
        """The embedding's and the head's rows of the vocabulary, [V, D] -> [V_r, D], one parameter if they are tied. The head's
        region."""
        embedding: Any = self.model.get_input_embeddings()
        head: Any = self.model.get_output_embeddings()
        names = {module: name for name, module in self.model.named_modules()}
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
            raise ModelError(f"{type(self.model).__name__}: parallel.tp needs an embedding and a linear head to split")
        rows = embedding.weight.shape[0]
        found = self._partition("", 0, rows, NO_HEADS)
        embedding.weight = self.parameters.take(f"{names[embedding]}.weight", embedding.weight, found)
        look_up_locally(embedding, *part(rows, self.tp.rank, self.tp.size), self.tp)
        # The rows of images that an embedding may have beside the vocabulary are none of the head's (mllama).
        found = self._partition("", 0, head.weight.shape[0], NO_HEADS)
        weight = self.parameters.take(f"{names[head]}.weight", head.weight, found)
        bias = None if head.bias is None else self.parameters.take(f"{names[head]}.bias", head.bias, found)
        # BERT's heads have the bias under a name of their own, too.
        for module in self.model.modules():
            named = list(module.named_parameters(recurse=False, remove_duplicate=False))
            for name in [each for each, whole in named if bias is not None and whole is head.bias]:
                module.register_parameter(name, bias)
        region = Region(self.head_border, self.regathers)
        self._put(names[head], ColumnLinear(weight, bias, False, region, self.kv))
        return region

    def place_tokens(self, head_region: Region) -> None:
        """Hooks where tokens are scattered, in front of the first layer, and come together, at the head.

        Only the first stage scatters: the others receive sharded tokens in the place of their first layer's input, and are seeded
        by layer. What stands before computes alike on all ranks, with whole gradients.
        """
        head: Any = self.model.get_output_embeddings()
        # The logits stay divided: no border out closes the region.
        head.register_forward_hook(partial(end_region, head_region))
        if self.tokens.num_parts == 1:
            head.register_forward_pre_hook(partial(enter, head_region), with_kwargs=True)
            return
        border = self.head_border
        assert isinstance(border, ShardedBorder), "tokens in parts come together at a border"
        for layer in self.layers[1]:
            for name in TOKEN_ARGUMENTS:
                parameters = list(inspect.signature(layer.forward).parameters)
                if name in parameters:
                    hook = partial(change_argument, border.scatter, name, parameters.index(name))
                    layer.register_forward_pre_hook(hook, with_kwargs=True)
        if self.plan.bounds.is_first:
            first = self.layers[1][0]
            first.register_forward_pre_hook(partial(scatter, border), with_kwargs=True)
            if self.rng is not None:
                # Before a stage seeds its layers, whichever hook is registered first: that seed carries the rank's mask already.
                first.register_forward_pre_hook(partial(start_outside, self.rng), prepend=True, with_kwargs=True)
                self.model.register_forward_hook(partial(end_outside, self.rng))
        if self.plan.bounds.is_last:
            # Not in front of the head: models read the sequence's shape between the two.
            last = find_last_module(self.model)
            last.register_forward_hook(partial(gather_behind, head_region, border, last is self.layers[1][-1]))
            if self.rng is not None:
                # From here on ranks hold the same tokens again: a dropout in front of the head must drop the same elements.
                last.register_forward_hook(partial(end_outside, self.rng))

    # --- parameters

    def finish(self) -> dict[str, Layout]:
        """Make what is left this rank's, too: replicated. Layouts of all parameters under all names."""
        units = {name: unit.name for unit in self.plan.units for name in unit.parameters}
        # Modules behind the scatter see this rank's tokens only; the embedding unit stands in front of it.
        in_shard = self.tokens.num_parts > 1
        self.parameters.replicate_rest(
            self.model.named_parameters(), lambda name: in_shard and units.get(name) != "embedding"
        )
        return self.parameters.layouts(self.model)

    def _partition(self, arrangement: str, dim: int, size: int, counts: Counts) -> PartitionedDim:
        return partition(arrangement, dim, size, counts, self.tp.rank, self.tp.size)

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        if isinstance(module, MatmulLinear):
            module.operation = child
        setattr(self.model.get_submodule(parent), child, module)
