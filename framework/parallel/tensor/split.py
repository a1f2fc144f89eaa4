"""Split a model on meta over the tensor-parallel ranks: its weights become this rank's parts, under the same names."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.comm.communicator import Communicator
from framework.errors import ModelError, TopologyError
from framework.mesh.layout import Layout, part
from framework.model.units import FINAL_NORMS, find_layers, find_units
from framework.parallel.tensor.find_regions import RegionPlan, make_plan
from framework.parallel.tensor.heads import count_heads, divide_numbers
from framework.parallel.tensor.hooks import (
    end_tokens,
    enter,
    gather_behind,
    leave,
    lend_bias,
    return_bias,
    scatter,
)
from framework.parallel.tensor.layers import ColumnLinear, RowLinear, SplitRMSNorm, look_up_locally
from framework.parallel.tensor.partition import Counts, PartitionedDim, partition
from framework.parallel.tensor.regions import Region, TokenShard
from framework.parallel.tensor.rng import RngStreams, uses_rng_in_training
from framework.parallel.tensor.rules import PARAMETERS, WEIGHT_BEFORE_CAST, Role

NO_HEADS = Counts(1, 1)
NO_PLAN: Mapping[str, str] = MappingProxyType({})


def split_over_tp(
    model: PreTrainedModel,
    tp: Communicator,
    kv: Communicator,
    sequence: bool,
    user_plan: Mapping[str, str] = NO_PLAN,
    regathers: bool = False,
    overlaps: bool = False,
) -> dict[str, Layout]:
    """Split every weight that can be; the layout of each parameter, under each of its names, over `tp` and `kv`.

    model: on meta and unmodified. kv: the part of `tp` that `ranks_per_kv_head` tells. sequence: the layers hold a part of
    the tokens outside attention and mlp. user_plan: `model.tp_plan`. regathers: with `sequence`, do not keep the gathered
    inputs of attention and mlp for backward. overlaps: with `sequence`, their borders communicate in pieces, under products.

    What several ranks hold is `replicated` over `tp` or `kv`, and `interval` is what of it this rank counts. Of a packed
    weight, `kv` may share the keys and values only: they get whole gradients in backward, and one rank's interval has them.
    Raises ModelError without a complete plan, TopologyError when heads do not divide.
    """
    if tp.size == 1:
        return {name: Layout(tuple(p.shape)) for name, p in model.named_parameters(remove_duplicate=False)}
    regions = make_plan(model, user_plan)
    draws = RngStreams(tp.axis, outside_differs=sequence) if uses_rng_in_training(model.config) else None
    surgery = _Surgery(model, tp, kv, TokenShard(tp, draws) if sequence else None, draws, regathers, overlaps)
    for region in regions:
        surgery.split_region(region)
    surgery.split_vocabulary()
    surgery.place_tokens()
    return surgery.finish()


@dataclass
class _Surgery:
    """The model under the knife. `local`: by identity of the model's parameters, this rank's; `layouts`: by name."""

    model: PreTrainedModel
    tp: Communicator
    kv: Communicator
    tokens: TokenShard | None
    draws: RngStreams | None
    regathers: bool
    overlaps: bool
    layouts: dict[str, Layout] = field(default_factory=dict)
    local: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config.get_text_config()

    @property
    def layers(self) -> tuple[str, nn.ModuleList]:
        found = find_layers(self.model)
        assert found is not None, "planned without layers"
        return found

    # --- regions

    def split_region(self, plan: RegionPlan) -> None:
        """Split the modules of one region, and give it its borders."""
        differs = not plan.is_block
        region = Region(self.tp, self.tokens, self.regathers, plan.name, self.draws, differs, self.overlaps)
        attentions = {name.rpartition(".")[0] for name, role in plan.roles.items() if role.form not in ("", "pair")}
        counts = self._count_heads(plan) if attentions else NO_HEADS
        for name in attentions:
            divide_numbers(self.model.get_submodule(name), counts, self.tp.axis)
            self._split_own_parameters(name, counts)
        for name, role in plan.roles.items():
            self._split_module(name, role, counts, region, leaves=not plan.is_block)
        for name in plan.experts:
            self._split_experts(name)
        entrance = self.model.get_submodule(plan.name)
        entrance.register_forward_pre_hook(partial(enter, region), with_kwargs=True)
        if plan.is_block:
            entrance.register_forward_hook(partial(leave, region))
        self._replicate_rest(entrance.named_parameters(plan.name), lambda name: True)

    def _count_heads(self, plan: RegionPlan) -> Counts:
        counts = count_heads(self.model, plan)
        counts.check(self.tp.size, f"{self.config.model_type} ({plan.name})")
        copies = counts.copies(self.tp.size)
        if copies not in (1, self.kv.size):
            raise TopologyError(
                f"{plan.name} has {counts.kv} key-value heads, other layers another number: parallel.tp={self.tp.size} is more"
                " than both; use a smaller parallel.tp"
            )
        return counts

    def _split_module(self, name: str, role: Role, counts: Counts, region: Region, leaves: bool) -> None:
        module: Any = self.model.get_submodule(name)
        if role.kind == "replicated":
            return
        if role.kind == "norm":
            self._split_norm(name, module, role, counts)
            return
        is_transposed = isinstance(module, Conv1D)
        dim = int(is_transposed) if role.kind == "column" else 1 - int(is_transposed)
        size = module.weight.shape[dim]
        found = partition(role.form, dim, size, counts, self.tp.rank, self.tp.size)
        weight = self._take(f"{name}.weight", module.weight, found)
        bias = getattr(module, "bias", None)
        if role.kind == "column":
            bias_cut = partition(role.form, 0, size, counts, self.tp.rank, self.tp.size)
            bias = None if bias is None else self._take(f"{name}.bias", bias, bias_cut)
            if isinstance(module, nn.Conv1d):
                module.weight, module.bias = weight, bias
                module.groups = module.in_channels = module.out_channels = weight.shape[0]
                return
            # Copies of a whole weight are settled with the other partial gradients, once a step.
            copied = found.copied if found.copied < weight.shape[dim] else 0
            self._put(name, ColumnLinear(weight, bias, is_transposed, region, self.kv, copied))
            return
        is_partial = not leaves or self.tokens is not None
        bias = None if bias is None else self._replicate(f"{name}.bias", bias, is_partial)
        self._put(name, RowLinear(weight, bias, is_transposed, region, leaves))

    def _split_norm(self, name: str, norm: Any, role: Role, counts: Counts) -> None:
        """Over all heads, or with a weight per head, which needs no other rank's features."""
        size = norm.weight.shape[0]
        found = partition(role.form, 0, size, counts, self.tp.rank, self.tp.size)
        if norm.weight.ndim == 2:
            norm.weight = self._take(f"{name}.weight", norm.weight, found)
            return
        weight = self._take(f"{name}.weight", norm.weight, found)
        eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        if eps is None:
            raise ModelError(f"{name} ({type(norm).__name__}) has no known epsilon: parallel.tp cannot split it")
        before = self.config.model_type in WEIGHT_BEFORE_CAST
        copies = self.kv.size if found.copied else 1
        self._put(name, SplitRMSNorm(weight, eps, size, copies, before, self.tp))

    def _split_experts(self, name: str) -> None:
        """Every expert is sliced: [experts, features, inputs] or transposed, gate and up in halves or interleaved."""
        experts: Any = self.model.get_submodule(name)
        if getattr(experts, "has_post_expert_norm", False):
            raise ModelError(f"{name} normalises each expert's output: parallel.tp cannot slice it")
        transposed = bool(experts.is_transposed)
        inner = experts.down_proj.shape[1 if transposed else 2]
        interleaved = experts.has_gate and not experts.is_concatenated
        if interleaved and inner % self.tp.size:
            raise TopologyError(f"parallel.tp={self.tp.size} does not divide the {inner} features of {name}")
        form = "pair" if experts.has_gate and experts.is_concatenated else ""
        first = "gate_up_proj" if experts.has_gate else "up_proj"
        for parameter, dim, its_form in (
            (first, 2 if transposed else 1, form),
            (f"{first}_bias", 1, form),
            ("down_proj", 1 if transposed else 2, ""),
        ):
            whole = getattr(experts, parameter, None)
            if whole is not None:
                found = partition(its_form, dim, whole.shape[dim], NO_HEADS, self.tp.rank, self.tp.size)
                setattr(experts, parameter, self._take(f"{name}.{parameter}", whole, found))
        mine = experts.down_proj.shape[1 if transposed else 2]
        for attribute, value in list(vars(experts).items()):
            if attribute in ("intermediate_dim", "intermediate_size", "expert_dim") and value == inner:
                setattr(experts, attribute, mine)
        if getattr(experts, "down_proj_bias", None) is not None:
            experts.register_forward_pre_hook(partial(lend_bias, self.tp.size))
            experts.register_forward_hook(return_bias)

    def _split_own_parameters(self, name: str, counts: Counts) -> None:
        """Parameters that the attention itself holds, one number per head."""
        attention = self.model.get_submodule(name)
        for parameter, whole in list(attention.named_parameters(recurse=False)):
            form = PARAMETERS[parameter]
            if form is not None:
                found = partition(form, 0, whole.shape[0], counts, self.tp.rank, self.tp.size)
                setattr(attention, parameter, self._take(f"{name}.{parameter}", whole, found))

    # --- the vocabulary

    def split_vocabulary(self) -> None:
        """The embedding's and the head's rows of the vocabulary, one parameter if they are tied."""
        embedding: Any = self.model.get_input_embeddings()
        head: Any = self.model.get_output_embeddings()
        names = {module: name for name, module in self.model.named_modules()}
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
            raise ModelError(f"{type(self.model).__name__}: parallel.tp needs an embedding and a linear head to split")
        rows = embedding.weight.shape[0]
        if head.weight.shape[0] != rows:
            raise ModelError(
                f"the head has {head.weight.shape[0]} rows, the embedding {rows}: parallel.tp splits both alike"
            )
        found = partition("", 0, rows, NO_HEADS, self.tp.rank, self.tp.size)
        start, stop = part(rows, self.tp.rank, self.tp.size)
        embedding.weight = self._take(f"{names[embedding]}.weight", embedding.weight, found)
        look_up_locally(embedding, start, stop, self.tp)
        weight = self._take(f"{names[head]}.weight", head.weight, found)
        bias = None if head.bias is None else self._take(f"{names[head]}.bias", head.bias, found)
        region = Region(self.tp, self.tokens, self.regathers)
        self._put(names[head], ColumnLinear(weight, bias, False, region, self.kv))
        # With sharded tokens the region begins where they are gathered: models read the sequence's shape before the head.
        if self.tokens is not None:
            self._last_module().register_forward_hook(partial(gather_behind, region, self.tokens))
        else:
            self.model.get_output_embeddings().register_forward_pre_hook(partial(enter, region), with_kwargs=True)

    def place_tokens(self) -> None:
        """Shard the tokens where the first layer begins. What stands before computes alike on all ranks, with whole gradients.

        Which layer is the first a pipeline decides later, so every layer asks; and a part of a model has no final norm.
        """
        if self.tokens is not None:
            for layer in self.layers[1]:
                layer.register_forward_pre_hook(partial(scatter, self.tokens), with_kwargs=True)
            self.model.register_forward_hook(partial(end_tokens, self.tokens))

    def _last_module(self) -> nn.Module:
        """The final norm, or the last layer if there is none."""
        name, layers = self.layers
        parent = self.model.get_submodule(name.rpartition(".")[0])
        norms, is_behind = [], False
        for child, module in parent.named_children():
            is_behind |= module is layers
            if child in FINAL_NORMS or (is_behind and "norm" in child):
                norms.append(module)
        return norms[-1] if norms else layers[-1]

    # --- parameters

    def finish(self) -> dict[str, Layout]:
        """Make what is left this rank's, too: replicated. Layouts of all parameters under all names."""
        units = {name: unit.name for unit in find_units(self.model) for name in unit.parameters}
        in_shard = self.tokens is not None
        self._replicate_rest(self.model.named_parameters(), lambda name: in_shard and units.get(name) != "embedding")
        by_parameter = {self.model.get_parameter(name): layout for name, layout in self.layouts.items()}
        names = self.model.named_parameters(remove_duplicate=False)
        return {name: by_parameter[parameter] for name, parameter in names}

    def _take(self, name: str, whole: Any, found: PartitionedDim) -> nn.Parameter:
        """This rank's part of a parameter."""
        if whole not in self.local:
            layout = self._owned(Layout(tuple(whole.shape), found.shards), found)
            self.layouts[name] = layout
            empty = torch.empty(layout.shape_local, dtype=whole.dtype, device="meta")
            self.local[whole] = nn.Parameter(empty, requires_grad=whole.requires_grad)
        return self.local[whole]

    def _owned(self, held: Layout, found: PartitionedDim) -> Layout:
        """What this rank counts of it, and over which axis the gradient is partial."""
        if not found.copied:
            return held
        dim = found.shards[0].dim
        rows = held.shape_local[dim]
        if found.copied == rows:
            interval = part(held.numel_local, self.kv.rank, self.kv.size)
            return replace(held, replicated=("kv",), partial=("kv",), interval=interval)
        assert dim == 0, f"a packed weight with shared keys is split along dim 0, not {dim}"
        counted = rows if self.kv.rank == 0 else rows - found.copied
        return replace(held, interval=(0, counted * (held.numel_local // rows)))

    def _replicate(self, name: str, whole: nn.Parameter, is_partial: bool) -> nn.Parameter:
        """The whole parameter on all ranks."""
        interval = part(whole.numel(), self.tp.rank, self.tp.size)
        self.layouts[name] = Layout(tuple(whole.shape), (), ("tp",), ("tp",) if is_partial else (), interval)
        self.local[whole] = whole
        return whole

    def _replicate_rest(
        self, parameters: Iterator[tuple[str, nn.Parameter]], is_partial: Callable[[str], bool]
    ) -> None:
        """Those of the parameters that nobody has dealt with."""
        done = set(self.local.values())
        for name, parameter in parameters:
            if parameter not in done:
                self._replicate(name, parameter, is_partial(name))

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, child = name.rpartition(".")
        setattr(self.model.get_submodule(parent), child, module)
