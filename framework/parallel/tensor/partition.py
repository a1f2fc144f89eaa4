"""Partition: how the indices along one dim of a weight divide among the tensor-parallel ranks.

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

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from framework.comm.communicator import Communicator
from framework.errors import TopologyError
from framework.mesh.layout import Layout, Shard, part

ARRANGEMENTS = (
    "", "pair", "triple", "heads", "kv_heads", "qkv", "per_head", "groups", "block_qvk",
    "linear_key_heads", "linear_value_heads", "linear_channels", "state_rows", "state_channels",
)  # fmt: skip
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
