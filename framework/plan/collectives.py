"""Where the axes of a candidate lie, and how long their collectives take: the order of axes decides who shares a node.

A rank's number is ((pp * DP + dp) * CP + cp) * TP + tp, and nodes take ranks in order (mesh/topology.py, mesh/placement.py).
"""

from dataclasses import dataclass

from framework.mesh.topology import count_expert_shards
from framework.plan.candidate import Candidate
from framework.plan.cluster import Cluster, Collective


@dataclass(frozen=True)
class Group:
    """Ranks that talk to each other. size; stride: between their numbers; nodes: on which they lie."""

    size: int
    stride: int
    nodes: int


def place_group(size: int, stride: int, ranks_per_node: int, world: int) -> Group:
    """A group of the mesh: so many ranks, so far apart."""
    if size == 1 or world <= ranks_per_node:
        return Group(size, stride, 1)
    return Group(size, stride, min(size, -(-size * stride // ranks_per_node)))


@dataclass(frozen=True)
class Groups:
    """The groups of a candidate by axis, as the names of mesh/topology.py have them."""

    tp: Group
    ulysses: Group
    ring: Group
    ep: Group
    pp: Group
    shard: Group
    replica: Group
    expert_shard: Group
    expert_replica: Group
    world: Group


def place_groups(c: Candidate) -> Groups:
    """The groups of all axes."""
    batch = c.dp * c.cp
    copies = batch * c.tp // (c.expert_tp * c.ep)
    expert_shard = count_expert_shards(c.shard, c.tp, c.ep, c.expert_tp, batch) if c.shard > 1 else 1
    experts = c.expert_tp * c.ep

    def place(size: int, stride: int) -> Group:
        return place_group(size, stride, c.ranks_per_node, c.world)

    return Groups(
        tp=place(c.tp, 1),
        ulysses=place(c.ulysses, c.tp),
        ring=place(c.cp // c.ulysses, c.ulysses * c.tp),
        ep=place(c.ep, c.expert_tp),
        pp=place(c.pp, batch * c.tp),
        shard=place(c.shard, c.tp),
        replica=place(batch // c.shard, c.shard * c.tp),
        expert_shard=place(expert_shard, experts),
        expert_replica=place(copies // expert_shard, experts * expert_shard),
        world=place(c.world, 1),
    )


@dataclass(frozen=True)
class Links:
    """Seconds of messages on a cluster. itemsize: bytes of an activation."""

    cluster: Cluster
    itemsize: int

    def collective(self, kind: Collective, num_bytes: float, group: Group) -> float:
        """Of a collective of so many bytes in all, by the convention of `Cluster.collective_seconds`."""
        if group.size == 1 or not num_bytes:
            return 0.0
        return self.cluster.collective_seconds(kind, num_bytes, group.size, group.nodes)

    def message(self, num_bytes: float, group: Group) -> float:
        """Of a message to a neighbour: of a pipeline the slowest, which leaves its node where any does."""
        return self.cluster.collective_seconds("send", num_bytes, 2, min(group.nodes, 2)) if num_bytes else 0.0
