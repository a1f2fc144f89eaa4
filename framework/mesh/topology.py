"""Topology: how the ranks of the world are numbered along the axes, and on which nodes they lie. Arithmetic only: no process
group, no torch.

rank = ((pp_index * dp + dp_index) * cp + cp_index) * tp + tp_index: tensor-parallel neighbours, who talk most, are
adjacent ranks (one node); pipeline stages, who talk least, are farthest apart. Because dp and cp are adjacent, every
axis but `embedding`, derived ones included, is a (size, stride) pair over this number:

    world         all ranks
    batch         dp x cp: who shares dense gradients and the ZeRO shards of dense parameters
    shard         the inner part of `batch`: who holds the ZeRO shards of the same dense parameters
    replica       what is left of `batch` after shard: who holds equal shards
    ulysses       the inner part of `cp`: who exchanges heads for tokens of the same sequences
    ring          what is left of `cp` after ulysses: among whom keys and values travel
    context_tp    cp x tp: who holds other tokens of the same sequences where tp divides tokens, too (sequence parallelism)
    kv            the inner part of `tp`: who holds the same key-value heads, where these are fewer than tp ranks
    pp            the ranks of a pipeline: who shares weights that its layers share
    embedding     of a pipeline the ranks with the first and the last stage: who shares what the embedding and the head share.
                  One rank where both stages are on it; of size 1 for the ranks between

Experts divide the dp x cp x tp ranks of a stage in a way of their own, from the inside:

    expert_tp       who holds slices of the same experts: all of `tp`, or one rank where experts are whole
    ep              who holds different experts
    ep_inner        the inner part of `ep`, those of a node: among whom tokens are passed on that have come to one of them
    ep_outer        what is left of `ep` after ep_inner: between nodes, over which a token goes once to each
    expert_batch    what is left: who shares the gradients of the same experts
    expert_shard    the inner part of `expert_batch`: who holds the ZeRO shards of the same experts
    expert_replica  what is left of `expert_batch` after expert_shard: who holds equal shards

With ZeRO's second copy of parameters (`zero.secondary_shard`), neighbours keep them all among themselves:

    secondary         the inner part of `shard`; of size 1 without such copies
    expert_secondary  the inner part of `expert_shard`, the same

Nodes take ranks in order. Each axis of ZeRO that spans nodes has two levels, of which collectives over it are composed:

    AXIS_inner      neighbours along it who share a node; one rank where it is not in two levels
    AXIS_outer      what is left: who holds the same place in another such group

Because tp is innermost in the numbering of ranks and pp outermost, those who talk most share a node and those who talk least
are on different ones, as far as degrees allow. Nodes themselves lie in blocks: what NVLink or a leaf switch connects. A group
of tp or ep that needs several nodes stays within one block if the nodes come in an order that gives it nodes of one block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import lcm

from framework.errors import TopologyError
from framework.recipe.derive import Derived, divisors


@dataclass(frozen=True)
class Axis:
    """The ranks that differ in one coordinate only. Size 1 is the identity: nobody to talk to.

    `rank` is the index of this process along the axis; `ranks` are the world ranks of the axis, in order. Planning may leave
    `ranks` out where nobody asks for them. `on_node`: how many neighbours along it share a node; None: all of them.
    """

    name: str
    size: int
    rank: int
    ranks: tuple[int, ...] = (0,)
    on_node: int | None = None

    @property
    def nodes(self) -> int:
        """Groups of neighbours that share a node; 1: messages never leave one."""
        return self.size // (self.on_node or self.size)


# Axes over which ZeRO sends parameters and gradients.
ZERO_AXES = ("shard", "replica", "expert_shard", "expert_replica")
# Axes over which stages of a pipeline share parameters.
SHARING_AXES = ("embedding", "pp")
LEVELS = tuple(f"{name}_{level}" for name in ZERO_AXES for level in ("inner", "outer"))
AXIS_NAMES = (
    *("world", "pp", "batch", "dp", "cp", "tp", "shard", "replica", "kv", "embedding"),
    *("ulysses", "ring", "context_tp"),
    *("expert_tp", "ep", "ep_inner", "ep_outer", "expert_batch", "expert_shard", "expert_replica"),
    *("secondary", "expert_secondary"),
    *LEVELS,
)


@dataclass(frozen=True)
class Topology:
    """The degrees of the parallelisms, which form a mesh, else AssertionError."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    shard: int = 1
    kv: int = 1
    """Ranks of `tp` that hold the same key-value heads."""
    expert_tp: int | None = None
    """Ranks that slice an expert, 1 or tp; None: tp."""
    expert_shard: int = 1
    ep_inner: int | None = None
    embedding_ranks: tuple[int, int] | None = None
    """Positions along `pp` of the first and of the last stage; None: the first rank and the last. Schedules that go through the
    ranks and back (zbv, dualpipe_v) have both stages on one rank."""
    ulysses: int = 1
    """Ranks of cp that exchange heads; the others are the ring."""
    secondary: int = 1
    expert_secondary: int = 1
    ranks_per_node: int | None = None
    """None: all ranks are on one node."""
    two_levels: bool = False
    """Whether ZeRO's axes that span nodes have an inner and an outer level."""

    def __post_init__(self) -> None:
        # Rules of the recipe (`layout_rules`) refuse what a user states wrong, with the fix.
        assert min(self.pp, self.dp, self.cp, self.tp, self.ep) >= 1, f"a degree is at least 1: {self}"
        assert self._slices in (1, self.tp), f"experts are whole, or sliced over all of tp: {self}"
        inside = {
            "ep": (self.ep, self._expert_ranks),
            "ep_inner": (self.ep_inner or self.ep, self.ep),
            "expert_shard": (self.expert_shard, self._expert_ranks // self.ep),
            "shard": (self.shard, self.dp * self.cp),
            "secondary": (self.secondary, self.shard),
            "expert_secondary": (self.expert_secondary, self.expert_shard),
            "ulysses": (self.ulysses, self.cp),
            "kv": (self.kv, self.tp),
        }
        for name, (degree, among) in inside.items():
            assert degree >= 1 and among % degree == 0, f"{name} does not divide {among} ranks: {self}"  # noqa: PT018
        assert all(0 <= position < self.pp for position in self._embedding_positions), f"no such ranks of pp: {self}"

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def _slices(self) -> int:
        """Ranks that hold slices of one expert."""
        return self.tp if self.expert_tp is None else self.expert_tp

    @property
    def _expert_ranks(self) -> int:
        """Ranks of a stage with slices of experts at the same place: those among whom experts are divided or copied."""
        return self.dp * self.cp * self.tp // self._slices

    def size(self, axis: str) -> int:
        """Number of ranks along an axis; of `embedding`, of those that have more than themselves on it."""
        return len(self._embedding_positions) if axis == "embedding" else self.size_stride(axis)[0]

    def index(self, axis: str, rank: int) -> int:
        """The position of a rank along an axis."""
        if axis == "embedding":
            return self._share_embedding(rank).index(rank)
        size, stride = self.size_stride(axis)
        assert 0 <= rank < self.world, f"rank {rank} of {self.world}"
        return rank // stride % size

    def ranks(self, axis: str, rank: int) -> tuple[int, ...]:
        """The ranks that differ from `rank` along `axis` only, `rank` among them, in the axis's order."""
        if axis == "embedding":
            return self._share_embedding(rank)
        size, stride = self.size_stride(axis)
        first = rank - self.index(axis, rank) * stride
        return tuple(range(first, first + size * stride, stride))

    def axes(self, rank: int) -> dict[str, Axis]:
        """Every axis as `rank` sees it."""
        members = {name: self.ranks(name, rank) for name in AXIS_NAMES}
        return {
            name: Axis(name, len(ranks), ranks.index(rank), ranks, self.on_node(name))
            for name, ranks in members.items()
        }

    def on_node(self, axis: str) -> int | None:
        """Neighbours along an axis who share a node; None: all of them. Groups that lie on nodes in several ways are cut alike:
        so many are always together."""
        if self.ranks_per_node is None or self.world <= self.ranks_per_node:
            return None
        if axis == "embedding":
            return 1 if self.size(axis) > 1 else None
        size, stride = self.size_stride(axis)
        return None if size == 1 else count_node_neighbours(size, stride, self.ranks_per_node)

    def outlines(self) -> dict[str, Axis]:
        """Every axis as rank 0 sees it, without its ranks: in their place (size, stride), alike for axes over the same ranks."""
        stride = self.size_stride("pp")[1] * max(self._embedding_positions)
        found = {name: self.size_stride(name) for name in AXIS_NAMES if name != "embedding"}
        found["embedding"] = (self.size("embedding"), stride) if 0 in self._embedding_positions else (1, 1)
        return {name: Axis(name, found[name][0], 0, found[name]) for name in AXIS_NAMES}

    @property
    def _embedding_positions(self) -> tuple[int, ...]:
        """Positions along `pp` of the first and the last stage, each once, in order."""
        return tuple(sorted(set(self.embedding_ranks or (0, self.pp - 1))))

    def _share_embedding(self, rank: int) -> tuple[int, ...]:
        """The ranks of the embedding axis as `rank` sees it: itself alone where it has neither the first nor the last stage."""
        pipeline = self.ranks("pp", rank)
        holders = tuple(pipeline[position] for position in self._embedding_positions)
        return holders if rank in holders else (rank,)

    def size_stride(self, axis: str) -> tuple[int, int]:
        """Number of ranks along an axis, and the distance of neighbours in the ranks' numbers; not of `embedding`."""
        if axis in LEVELS:
            of, _, level = axis.rpartition("_")
            (size, stride), inner = self.size_stride(of), self.on_node(of) if self.two_levels else None
            # In two levels only if both have somebody to talk to.
            inner = 1 if inner in (None, size) else inner
            outer = size // inner if inner > 1 else 1
            return (inner, stride) if level == "inner" else (outer, inner * stride)
        return self._sizes_strides[axis]

    @cached_property
    def _sizes_strides(self) -> dict[str, tuple[int, int]]:
        batch = self.dp * self.cp
        slices, copies, inner = self._slices, self._expert_ranks // self.ep, self.ep_inner or self.ep
        # A stride is the product of the degrees inside an axis, in the order of the rank's number: pp, dp, cp, tp.
        return {
            "world": (self.world, 1),
            "pp": (self.pp, batch * self.tp),
            "batch": (batch, self.tp),
            "dp": (self.dp, self.cp * self.tp),
            "cp": (self.cp, self.tp),
            "tp": (self.tp, 1),
            "shard": (self.shard, self.tp),
            "replica": (batch // self.shard, self.shard * self.tp),
            "kv": (self.kv, 1),
            "ulysses": (self.ulysses, self.tp),
            "ring": (self.cp // self.ulysses, self.ulysses * self.tp),
            "context_tp": (self.cp * self.tp, 1),
            "expert_tp": (slices, 1),
            "ep": (self.ep, slices),
            "ep_inner": (inner, slices),
            "ep_outer": (self.ep // inner, slices * inner),
            "expert_batch": (copies, slices * self.ep),
            "expert_shard": (self.expert_shard, slices * self.ep),
            "expert_replica": (copies // self.expert_shard, slices * self.ep * self.expert_shard),
            "secondary": (self.secondary, self.tp),
            "expert_secondary": (self.expert_secondary, slices * self.ep),
        }


def count_expert_shards(shard: int, tp: int, ep: int, expert_tp: int, batch: int) -> int:
    """The degree `expert_shard` where dense parameters are sharded over `shard` ranks: as many of the ranks that share experts as
    are among those shard * tp neighbours, so that experts' shards stay within a node where the others do."""
    copies = batch * tp // (expert_tp * ep)
    # Neighbours begin at multiples of their number, so it has to divide that of the others: else some lie across their border.
    return max(degree for degree in divisors(copies) if degree == 1 or shard * tp % (degree * ep * expert_tp) == 0)


def count_node_neighbours(size: int, stride: int, ranks_per_node: int) -> int:
    """Neighbours along an axis of so many ranks, `stride` apart, who are on one node, as far as nodes divide it."""
    return max(each for each in divisors(size) if each == 1 or ranks_per_node % (each * stride) == 0)


def count_passing(hierarchical: int | str | None, ep: int, expert_tp: int, ranks_per_node: int, world: int) -> int:
    """The degree `ep_inner` that parallel.expert_hierarchical means: neighbours among whom tokens are passed on. None: all of ep,
    to whom tokens go directly; so do they where the number does not divide ep."""
    if hierarchical == "node":
        return count_node_neighbours(ep, expert_tp, ranks_per_node) if world > ranks_per_node else ep
    return hierarchical if isinstance(hierarchical, int) and ep % hierarchical == 0 else ep


def shards_within_node(world: int, batch: int, tp: int, ranks_per_node: int, num_nodes: int) -> int:
    """The degree that zero.shard_within=node means: those of a node's ranks that share dense gradients. batch: ranks of dp x cp.

    Raises TopologyError where nodes differ, because then their ranks would mean different degrees.
    """
    if ranks_per_node * num_nodes != world:
        raise TopologyError(
            f"zero.shard_within=node needs equally many ranks on every node, but {world} ranks are on {num_nodes} nodes, of which"
            f" this one has {ranks_per_node}: start equally many on each, or set zero.shard_within to a degree or null"
        )
    if ranks_per_node % tp or (degree := min(batch, ranks_per_node // tp)) < 1 or batch % degree:
        raise TopologyError(
            f"zero.shard_within=node cannot divide dp x cp = {batch} ranks among nodes of {ranks_per_node} with"
            f" parallel.tp={tp}: set zero.shard_within to one of {divisors(batch)}, or null"
        )
    return degree


PLACED_AXES = ("tp", "cp", "ep", "dp", "pp")
# Axes whose groups are kept within a block, the one that counts most first.
BLOCK_AXES = ("tp", "ep")


@dataclass(frozen=True)
class Placement:
    """A topology on nodes of `ranks_per_node` ranks. Raises TopologyError when the ranks do not fill the nodes."""

    topology: Topology
    ranks_per_node: int

    def __post_init__(self) -> None:
        if self.topology.world % self.ranks_per_node:
            raise TopologyError(f"{self.topology.world} ranks do not fill nodes of {self.ranks_per_node}")

    @property
    def num_nodes(self) -> int:
        return self.topology.world // self.ranks_per_node

    def node(self, rank: int) -> int:
        """The node of a rank, counted from 0."""
        return rank // self.ranks_per_node

    def nodes_spanned(self, axis: str) -> int:
        """Nodes on which the widest group of the axis lies; 1: its messages never leave a node."""
        return max(map(len, self._groups(axis)))

    @property
    def units(self) -> tuple[int, ...]:
        """Numbers of neighbouring nodes that a block holds whole, the largest first: between any two such runs no group of tp
        and ep, then of tp alone, is cut. None where every such group is within a node."""
        found = [lcm(self._run(axis), self.ranks_per_node) // self.ranks_per_node for axis in BLOCK_AXES]
        return tuple(each for each in dict.fromkeys((lcm(*found), found[0])) if each > 1)

    def order_nodes(self, blocks: Sequence[str]) -> tuple[int, ...]:
        """The nodes in the order in which they take ranks, so that most groups of tp, then of ep, lie in one block. blocks: of
        each node. The first node stays first; the order is the given one where another keeps no more groups whole.

        No run of `units[0]` nodes can be divided without cutting a group, and each block holds at most so many whole ones as are
        taken here. What is left of the blocks fills the other runs, by whole groups of tp first.
        """
        of_block: dict[str, list[int]] = {}
        for node, block in enumerate(blocks):
            of_block.setdefault(block, []).append(node)
        assert len(blocks) == self.num_nodes, f"{len(blocks)} nodes for a placement on {self.num_nodes}"
        stated, packed = tuple(range(len(blocks))), tuple(_pack(list(of_block.values()), self.units))
        counts = [[self.count_cut(axis, blocks, order) for axis in BLOCK_AXES] for order in (stated, packed)]
        return packed if counts[1] < counts[0] else stated

    def count_cut(self, axis: str, blocks: Sequence[str], order: Sequence[int]) -> int:
        """Groups of an axis that lie in more than one block. order: the node that comes at each place."""
        return sum(len({blocks[order[node]] for node in nodes}) > 1 for nodes in self._groups(axis))

    def _groups(self, axis: str) -> Iterator[set[int]]:
        """Nodes of each group of the axis."""
        for first in range(self.topology.world):
            if self.topology.index(axis, first) == 0:
                yield {self.node(rank) for rank in self.topology.ranks(axis, first)}

    def _run(self, axis: str) -> int:
        """Neighbouring ranks that a group of the axis spreads over."""
        size, stride = self.topology.size_stride(axis)
        return size * stride if size > 1 else 1

    def advise_experts(self) -> str:
        """Advice where tokens leave their node on the way to experts; empty where they do not, or no degree helps."""
        ep, slices = self.topology.size("ep"), self.topology.size("expert_tp")
        nodes = self.nodes_spanned("ep")
        inner = [each for each in range(2, ep) if ep % each == 0 and self.ranks_per_node % (each * slices) == 0]
        if nodes == 1 or not inner:
            return ""
        return (
            f"tokens travel between {nodes} nodes in every layer: parallel.ep={inner[-1]} keeps them in a node, with"
            f" {ep // inner[-1]} times as many experts on a rank"
        )

    def describe(self) -> str:
        """A line for people: the nodes, and how many of them a group of each axis spans."""
        spans = {axis: self.nodes_spanned(axis) for axis in PLACED_AXES if self.topology.size(axis) > 1}
        words = [f"{axis} {'in a node' if nodes == 1 else f'over {nodes} nodes'}" for axis, nodes in spans.items()]
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes != 1 else ''} of {self.ranks_per_node}"
        return f"{nodes} rank{'s' if self.ranks_per_node != 1 else ''}" + (f": {', '.join(words)}" if words else "")


def _pack(blocks: Sequence[Sequence[int]], units: Sequence[int]) -> list[int]:
    """The nodes of all blocks, with whole runs of `units` within a block as long as there are any; node 0 first."""
    if not units:
        return [node for nodes in blocks for node in nodes]
    unit, *finer = units
    whole = [node for nodes in blocks for node in nodes[: len(nodes) - len(nodes) % unit]]
    rest = _pack([nodes[len(nodes) - len(nodes) % unit :] for nodes in blocks], finer)
    # Either part is a multiple of the unit, for all nodes are: runs stay where they begin at multiples of it.
    return rest + whole if 0 in rest else whole + rest


def make_grid(derived: Derived) -> Topology:
    """The topology of a recipe, as far as its degrees tell: without ZeRO's shards, which the model and the nodes decide too."""
    names = ("pp", "dp", "cp", "tp", "ep", "expert_tp", "ulysses")
    return Topology(**{name: getattr(derived, name) for name in names})


def place(derived: Derived) -> Placement:
    """Where the ranks of a recipe lie."""
    return Placement(make_grid(derived), derived.ranks_per_node)
