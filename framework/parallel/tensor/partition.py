"""Partition: how the indices along one dim of a weight divide among the tensor-parallel ranks; how many heads an attention has,
and the numbers by which its unmodified forward knows.

An arrangement says what lies along the dim. A rank takes the same heads everywhere, so the parts of one attention fit together:

    ""                  a row of features, divided anywhere (sizes differ by at most one)
    pair, triple        gate | up, or any two halves, or three thirds, used together
    heads               query heads
    kv_heads            key-value heads; fewer of them than ranks are held by several ranks each
    qkv                 all query heads | all key heads | all value heads
    per_head            q k v of head 0 | q k v of head 1 | ...
    groups              the queries of group 0, its key, its value | group 1 | ...   (one group per key-value head)
    block_qvk           the queries, the values, the keys of block 0 | of block 1 | ...
    linear_key_heads, linear_value_heads       the heads of a recurrent mixer
    linear_channels                            all its queries | all its keys | all its values
    state_rows, state_channels                 of a state space, z | x | B | C | dt and x | B | C

Heads may come in blocks, of each of which every rank takes its part: pairs (h, h + H/2) in differential attention.

SplitParameters holds what this rank takes of each parameter of a model on meta, and the layouts that say so: every parameter is
taken (this rank's part of it, with shards over `tp`), replicated (whole on all ranks of `tp`), or kept. Layouts are refined,
never replaced: the global shape and what earlier transforms have sharded stay.
"""

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.comm.communicator import Communicator
from framework.errors import ModelError, TopologyError
from framework.mesh.layout import Layout, Shard, part
from framework.mesh.topology import Axis
from framework.model import units
from framework.model.load import layer_configs
from framework.model.units import find_mixers, form_of_mixer, linear_heads
from framework.parallel.tensor.regions import change_argument, select_heads
from framework.parallel.tensor.rules import (
    HEAD_BIASES,
    HEAD_BLOCKS,
    HEAD_DIMS,
    HEAD_NUMBERS,
    HEAD_WIDTHS,
    KV_NUMBERS,
    KV_WIDTHS,
    LINEAR_NUMBERS,
    holder,
)

if TYPE_CHECKING:
    from framework.parallel.tensor.find_regions import RegionPlan

# Kinds of features that divide anywhere.
FEATURES = ("", "pair", "triple")


@dataclass(frozen=True)
class PartitionedDim:
    """`shards`: of the dim, outermost first. `copied`: how many of the local indices, the last ones, other ranks hold as
    well; 0, all, or the keys and values of a packed weight. `over`: the axis of these ranks."""

    shards: tuple[Shard, ...]
    copied: int
    over: str = "kv"


@dataclass(frozen=True)
class Counts:
    """The numbers of heads of an attention. q, kv: heads, in so many `blocks`; linear: sizes of the arrangements of recurrent
    mixers, by name; shared: how many of these, the last ones, all ranks hold where there are more ranks than kv."""

    q: int
    kv: int
    blocks: int = 1
    linear: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    shared: Mapping[str, int] = field(default_factory=dict)

    def check(self, degree: int, where: str) -> None:
        """Raises TopologyError when the heads do not divide among `degree` ranks, with the degrees that do."""
        if not self.divides(degree):
            legal = [each for each in range(1, self.q + 1) if self.divides(each)]
            raise TopologyError(
                f"parallel.tp={degree} does not divide the {self._describe()} of {where}: use parallel.tp in {legal}"
            )

    def _describe(self) -> str:
        if self.linear:
            return ", ".join(f"{name.replace('_', ' ')} {list(sizes)}" for name, sizes in self.linear.items())
        blocks = f" in {self.blocks} blocks" if self.blocks > 1 else ""
        heads = f"{self.q} heads (num_attention_heads)"
        return f"{heads} with {self.kv} key-value heads (num_key_value_heads){blocks}"

    def divides(self, degree: int) -> bool:
        """Every rank gets equally many heads, and whole key-value heads."""
        kv = self.kv // self.blocks
        return (
            self.q % (self.blocks * degree) == 0
            and (kv % degree == 0 or degree % kv == 0)
            and all(
                size % degree == 0
                for name, sizes in self.linear.items()
                for size in sizes[: len(sizes) - self.count_whole(name, degree)]
            )
        )

    def count_whole(self, arrangement: str, degree: int) -> int:
        """Number of segments of an arrangement, the last ones, that each of `degree` ranks holds whole."""
        return self.shared.get(arrangement, 0) if self.kv % degree else 0

    def copies(self, degree: int) -> int:
        """Number of ranks, of `degree`, that hold the same key-value heads."""
        kv = self.kv // self.blocks
        return degree // kv if degree % kv == 0 else 1


def partition(arrangement: str, dim: int, size: int, counts: Counts, index: int, degree: int) -> PartitionedDim:
    """The part of a dim of `size` indices that rank `index` of `degree` takes. TopologyError when they do not divide."""
    # One shard cannot say it: ranks of one group have the same key and value, and other queries.
    if arrangement == "groups" and degree > counts.kv:
        return _partition_within_groups(dim, size, counts, index, degree)
    parts = _parts(arrangement, size, counts, degree)
    total = sum(heads for heads, _ in parts)
    # Features divide anywhere; heads must come whole, or an attention would mix halves of two.
    if size % total or (arrangement not in FEATURES and any(heads % pieces for heads, pieces in parts)):
        raise TopologyError(
            f"parallel.tp={degree} does not divide {size} indices arranged as {arrangement or 'features'} of {counts.q} heads and"
            f" {counts.kv} key-value heads: use a smaller parallel.tp"
        )
    unit = size // total
    pieces = tuple(each for _, each in parts)
    # A shard's own words for the usual case, so that layouts of equal meaning compare equal.
    is_whole = all(each == degree for each in pieces)
    shard = Shard(
        "tp",
        dim,
        index,
        degree,
        tuple(heads * unit for heads, _ in parts) if len(parts) > 1 else (),
        () if is_whole else pieces,
    )
    copied = sum(heads // each * unit for heads, each in parts if each < degree)
    return PartitionedDim((shard,), copied, "tp" if arrangement in counts.shared else "kv")


def _parts(arrangement: str, size: int, counts: Counts, degree: int) -> list[tuple[int, int]]:
    """(units, pieces) of each segment of the dim."""
    # In (heads, pieces). Key-value heads that are fewer than ranks fall into as many pieces as there are heads.
    q, kv = counts.q // counts.blocks, counts.kv // counts.blocks
    queries, keys = (q, degree), (kv, min(degree, kv))
    match arrangement:
        case "":
            return [(size, degree)]
        case "pair":
            return [(size // 2, degree)] * 2
        case "triple":
            return [(size // 3, degree)] * 3
        case "heads" | "per_head":
            return [queries] * counts.blocks
        case "kv_heads" | "groups":
            return [keys] * counts.blocks
        case "qkv":
            return [queries, keys, keys]
        case "block_qvk":
            return [queries] * (3 * counts.blocks)
    sizes = counts.linear[arrangement]
    divided = len(sizes) - counts.count_whole(arrangement, degree)
    return [(units, degree if number < divided else 1) for number, units in enumerate(sizes)]


def _partition_within_groups(dim: int, size: int, counts: Counts, index: int, degree: int) -> PartitionedDim:
    """Several ranks share a group: each has part of its queries, and all have its key and its value."""
    # The outer shard picks the group, its neighbours the same one; the inner divides the group's queries and copies the rest.
    copies = degree // counts.kv
    queries = counts.q // counts.kv
    unit = size // counts.kv // (queries + 2)
    group = Shard("tp", dim, index, degree, (), (counts.kv,))
    within = Shard("tp", dim, index % copies, copies, (queries * unit, unit, unit), (copies, 1, 1))
    return PartitionedDim((group, within), 2 * unit)


class SplitParameters:
    """Parameters are known by identity, so a tied one is dealt with once, under whichever name comes first."""

    def __init__(self, layouts: Mapping[str, Layout], tp: Communicator, kv: Communicator) -> None:
        """layouts: of every parameter, under each of its names."""
        self.tp = tp
        self._holders = {"tp": tp, "kv": kv}
        self._given = layouts
        self._local: dict[nn.Parameter, nn.Parameter] = {}
        self._refined: dict[nn.Parameter, Layout] = {}

    def take(self, name: str, whole: Any, dim: PartitionedDim) -> nn.Parameter:
        """This rank's part of the parameter `name`, on meta, with whole's dtype."""
        if whole not in self._local:
            given = self._given[name]
            layout = self._count(replace(given, shards=(*given.shards, *dim.shards)), dim)
            empty = torch.empty(layout.shape_local, dtype=whole.dtype, device="meta")
            self._add(whole, nn.Parameter(empty, requires_grad=whole.requires_grad), layout)
        return self._local[whole]

    def replicate(self, name: str, whole: nn.Parameter, is_partial: bool) -> nn.Parameter:
        """The whole parameter on all ranks. is_partial: each rank's gradient is one part of a sum over `tp`."""
        given = self._given[name]
        # An equal interval each: the norm counts every element once, whoever holds it.
        interval = part(given.numel_local, self.tp.rank, self.tp.size)
        partial = (*given.partial, "tp") if is_partial else given.partial
        layout = replace(given, replicated=(*given.replicated, "tp"), partial=partial, interval=interval)
        return self._add(whole, whole, layout)

    def keep(self, name: str, whole: nn.Parameter) -> nn.Parameter:
        """The parameter as it was given: an earlier transform has said what this rank has of it."""
        return self._add(whole, whole, self._given[name])

    def replicate_rest(self, parameters: Iterable[tuple[str, nn.Parameter]], is_partial: Callable[[str], bool]) -> None:
        """Replicate those of the named parameters that nobody has dealt with."""
        done = set(self._local.values())
        for name, parameter in parameters:
            if parameter not in done:
                self.replicate(name, parameter, is_partial(name))

    def layouts(self, model: nn.Module) -> dict[str, Layout]:
        """The layout of every parameter, under each of its names; of those that the model lacks, as they were given."""
        names = model.named_parameters(remove_duplicate=False)
        return {**self._given, **{name: self._refined[parameter] for name, parameter in names}}

    def _add(self, whole: nn.Parameter, local: nn.Parameter, layout: Layout) -> nn.Parameter:
        self._local[whole], self._refined[local] = local, layout
        return local

    def _count(self, held: Layout, dim: PartitionedDim) -> Layout:
        """The layout with what this rank counts of its part, and over which axis the gradient is partial."""
        if not dim.copied:
            return held
        axis, holders = dim.shards[0].dim, self._holders[dim.over]
        rows = held.shape_local[axis]
        if dim.copied == rows:
            interval = part(held.numel_local, holders.rank, holders.size)
            return replace(
                held, replicated=(*held.replicated, dim.over), partial=(*held.partial, dim.over), interval=interval
            )
        # An interval of the flattened part can leave out the last rows only if they lie together.
        assert axis == 0, f"a packed weight with shared keys is split along dim 0, not {axis}"
        # No layout says that some rows are replicated: backward sums their output's gradient (`ColumnLinear.sum_copied`), and
        # the first of those who share them counts them.
        counted = rows if holders.rank == 0 else rows - dim.copied
        return replace(held, interval=(0, counted * (held.numel_local // rows)))


def ranks_per_kv_head(config: PretrainedConfig, tp: int) -> int:
    """Number of ranks, of `tp`, that hold the same key-value heads: 1 unless there are fewer heads than ranks."""
    layers = layer_configs(config.get_text_config())
    # No attention: a topology is made for every family, also for those that splitting refuses later.
    counts = [_count_in_config(layer) for layer in layers if getattr(layer, "num_attention_heads", None) is not None]
    copies = {each.copies(tp) for each in counts} or {1}
    if len(copies) > 1:
        heads = " and ".join(str(number) for number in sorted({each.kv for each in counts}))
        raise ModelError(
            f"parallel.tp={tp}: layers have {heads} key-value heads, so ranks would share heads in some layers and not in others:"
            f" use parallel.tp={min(each.kv for each in counts)} or less"
        )
    return copies.pop()


def _count_in_config(config: PretrainedConfig) -> Counts:
    return Counts(config.num_attention_heads, count_kv_heads(config), HEAD_BLOCKS.get(config.model_type, 1))


def count_heads(model: PreTrainedModel, plan: "RegionPlan") -> Counts:
    """From the config; layers may differ from it (laguna), so before it come the attention's own number, and the shape of its
    projection to keys. A recurrent mixer says itself how many it has."""
    mixer = next((module for _, module in find_mixers(model.get_submodule(plan.name))), None)
    if mixer is not None:
        return _count_linear_heads(mixer)
    layers = layer_configs(model.config.get_text_config())
    number = next((int(part) for part in plan.name.split(".") if part.isdigit()), 0)
    counts = _count_in_config(layers[number % len(layers)])
    q, kv = counts.q, counts.kv
    # An indexer has heads of its own, which all ranks hold.
    for name in (name for name, role in plan.roles.items() if role.kind not in ("replicated", "outside")):
        attention = vars(model.get_submodule(holder(name)))
        q = next((attention[word] for word in HEAD_NUMBERS if word in attention), q)
        if name.endswith(".k_proj") and (head_dim := attention.get("head_dim")):
            kv = model.get_parameter(f"{name}.weight").shape[0] // head_dim
    return replace(counts, q=q, kv=kv)


def _count_linear_heads(mixer: Any) -> Counts:
    match form_of_mixer(mixer):
        case units.STATE_OF_CHANNELS:
            channels = mixer.D.shape[0]
            return Counts(channels, channels, linear={"linear_value_heads": (channels,)})
        case units.STATE_OF_HEADS:
            heads, inner, states = mixer.num_heads, mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
            segments = {"state_rows": (inner, inner, states, states, heads), "state_channels": (inner, states, states)}
            shared = {"state_rows": 3, "state_channels": 2}
            return Counts(heads, mixer.n_groups, linear={"linear_value_heads": (heads,), **segments}, shared=shared)
    heads = linear_heads(mixer)
    keys, values = heads.keys * heads.key_dim, heads.values * heads.value_dim
    sizes = {
        "linear_key_heads": (heads.keys,),
        "linear_value_heads": (heads.values,),
        "linear_channels": (keys, keys, values),
    }
    return Counts(heads.values, heads.values, linear=sizes)


def divide_numbers(attention: Any, counts: Counts, tp: Axis) -> None:
    """Tell an attention how many heads it has here: attributes, a config of its own if it reads heads there, and arguments
    with something for every head."""
    # With fewer key-value heads than ranks each rank has one of every block, which others have as well.
    q_local, kv_local = counts.q // tp.size, counts.kv // min(tp.size, counts.kv // counts.blocks)
    head_dim = next((getattr(attention, word) for word in HEAD_DIMS if hasattr(attention, word)), None)
    for name, value in list(vars(attention).items()):
        if name in HEAD_NUMBERS:
            setattr(attention, name, q_local)
        elif name in KV_NUMBERS:
            setattr(attention, name, kv_local)
        elif name == "num_key_value_groups":
            setattr(attention, name, q_local // kv_local)
        # The value decides: hidden_size may as well be the model's, which stays whole.
        elif name in HEAD_WIDTHS and head_dim is not None and value == counts.q * head_dim:
            setattr(attention, name, q_local * head_dim)
        # Openai-gpt's, whose attention has no other word for its heads' width.
        elif name == "split_size" and head_dim is None:
            setattr(attention, name, value // counts.q * q_local)
        elif name in KV_WIDTHS:
            setattr(attention, name, value // counts.kv * kv_local)
        elif name in LINEAR_NUMBERS and counts.linear:
            setattr(attention, name, value // tp.size)
    if _reads_heads_from_config(type(attention)):
        # All modules share one config: this one gets a copy.
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads, attention.config.num_key_value_heads = q_local, kv_local
    _select_head_arguments(attention, counts, tp)


def refuse_fixed_attention(model: PreTrainedModel, name: str) -> None:
    """Raise ModelError for an attention that cannot be told of this rank's heads: its model puts another in its place, or its
    forward takes their width from its input. Read off the source, since nothing else tells."""
    attention, config = model.get_submodule(name), model.config.get_text_config()
    kind, around = type(attention), model.get_submodule(name.rpartition(".")[0])
    if hasattr(around, "set_attention_type") and getattr(config, "attention_type", "") != "original_full":
        raise ModelError(
            f"parallel.tp: the first forward of {config.model_type} models puts another attention in the place of {name}"
            f" ({kind.__name__}): set model.config.attention_type=original_full, or use parallel.tp=1"
        )
    source = inspect.getsource(kind.forward) if kind.__module__.startswith("transformers.") else ""
    width = re.search(r"\w+, \w+, (\w+) = hidden_states\.(?:size\(\)|shape)", source)
    if width is not None and re.search(rf"(?:view|reshape)\([^()]*\b{width[1]}\)", source):
        raise ModelError(
            f"parallel.tp: {name} ({kind.__name__}) takes the width of its heads from its input, which is that of all heads:"
            " use parallel.tp=1"
        )


def _select_head_arguments(attention: nn.Module, counts: Counts, tp: Axis) -> None:
    # The model computes biases (ALiBi) once for all heads and all layers, and hands them to an attention that has a few of them.
    arguments = list(inspect.signature(attention.forward).parameters)
    if not any(bias in arguments for bias in HEAD_BIASES):
        return
    for argument in (*HEAD_BIASES, "attention_mask"):
        if argument in arguments:
            hook = partial(change_argument, partial(select_heads, counts.q, tp), argument, arguments.index(argument))
            attention.register_forward_pre_hook(hook, with_kwargs=True)


def count_kv_heads(config: PretrainedConfig) -> int:
    """Key-value heads of the whole model. config: of the text model."""
    # Falcon's and GPT-BigCode's word for one key-value head; Falcon's new architecture ignores it.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    numbers = (getattr(config, name, None) for name in ("num_key_value_heads", "num_kv_heads", "num_attention_heads"))
    return next(number for number in numbers if isinstance(number, int))


def _reads_heads_from_config(attention: type) -> bool:
    # Read off the source, since nothing else tells: whether a forward reads the config is no attribute of the module.
    methods = (each for name, each in vars(attention).items() if inspect.isfunction(each) and name != "__init__")
    return any(re.search(r"self\.config\.num_(attention|key_value)_heads", inspect.getsource(each)) for each in methods)
