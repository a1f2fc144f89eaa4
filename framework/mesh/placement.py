"""Placement: on which nodes the ranks of each axis lie. Integers only.

Nodes take ranks in order, so many each. Because tp is innermost in the numbering of ranks and pp outermost
(`topology.py`), those who talk most share a node and those who talk least are on different ones, as far as degrees allow.
"""

from dataclasses import dataclass

from framework.errors import TopologyError
from framework.mesh.topology import Topology
from framework.recipe.derive import Derived

PLACED_AXES = ("tp", "cp", "ep", "dp", "pp")


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
        firsts = (rank for rank in range(self.topology.world) if self.topology.index(axis, rank) == 0)
        return max(len({self.node(rank) for rank in self.topology.ranks(axis, first)}) for first in firsts)

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


def make_grid(derived: Derived) -> Topology:
    """The topology of a recipe, as far as its degrees tell: without ZeRO's shards, which the model and the nodes decide too."""
    names = ("pp", "dp", "cp", "tp", "ep", "expert_tp", "ulysses")
    return Topology(**{name: getattr(derived, name) for name in names})


def place(derived: Derived) -> Placement:
    """Where the ranks of a recipe lie."""
    return Placement(make_grid(derived), derived.ranks_per_node)
