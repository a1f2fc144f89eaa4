"""Placement: on which nodes the ranks of each axis lie. Integers only.

Nodes take ranks in order, so many each. Because tp is innermost in the numbering of ranks and pp outermost
(`topology.py`), those who talk most share a node and those who talk least are on different ones, as far as degrees allow.

Nodes themselves lie in blocks: what NVLink or a leaf switch connects. A group of tp or ep that needs several nodes stays within
one block if the nodes come in an order that gives it nodes of one block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from framework.errors import TopologyError
from framework.mesh.topology import Topology
from framework.recipe.derive import Derived

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
