"""The nodes of a run: the numbers of them on which it can be laid out, and the order in which those of an allocation take ranks.

With `launch.nodes: [least, most]` each number is planned before the job waits in the queue.

The order is decided once for each start, before ranks connect. SLURM orders the nodes of a step by their place in its
configuration. Where a group of tp or ep needs several nodes, these are to share a block: an NVLink domain, else a leaf switch.
The job's script asks every node where it lies and gives all answers to all ranks in one variable, from which each computes the
same order. The first node stays first: with rank 0 it holds the store at MASTER_ADDR.

    SLURM_TOPOLOGY_ADDR             rack3.n7      root.leaf2.n7             n7
    SLURM_TOPOLOGY_ADDR_PATTERN     block.node    switch.switch.node        node
    block                           rack3         root.leaf2                by the name: what comes before its last number
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from framework.errors import MeshwrightError, RecipeError
from framework.imports import loading_libraries
from framework.mesh.topology import BLOCK_AXES, Placement, place
from framework.output import first_line
from framework.recipe.check import check_recipe
from framework.recipe.derive import Derived, at_nodes, has_range, node_counts
from framework.recipe.schema import Recipe

# The script's answers, one for each node in SLURM's order, separated by `;`: number, name, address, pattern.
NODES = "MESHWRIGHT_NODES"
# The part of a node's address, by its pattern, that says what connects it with its neighbours.
BLOCK_KINDS = ("block", "switch")
# Blocks shown in the run's header.
SHOWN = 8
# Keys that may name more nodes or ranks than a start on fewer nodes has: it keeps as many copies as it can, with a note, and
# profiles the ranks that there are.
MADE_SMALLER = ("checkpoint.neighbor_copies", "track.profile_ranks")


@dataclass(frozen=True)
class NodeCount:
    """One number of nodes, with the layout of the run there, or the reason why there is none."""

    nodes: int
    layout: str
    refusal: str = ""  # empty where the run can be laid out

    def describe(self) -> str:
        return f"{self.nodes:>3} node{'s' if self.nodes > 1 else ' '}  {self.layout or 'not: ' + self.refusal}"


def plan_counts(recipe: Recipe) -> list[NodeCount]:
    """All numbers of nodes of a range; none for a recipe without one.

    Raises RecipeError, ModelError and others where the most cannot be laid out: the recipe is planned for it.
    """
    if not has_range(recipe.launch):
        return []
    return [_plan_count(recipe, nodes, is_most=nodes == node_counts(recipe)[-1]) for nodes in node_counts(recipe)]


def legal_counts(recipe: Recipe, counts: Sequence[NodeCount]) -> tuple[int, ...]:
    """The numbers of nodes on which the run may start, in order."""
    return tuple(each.nodes for each in counts if not each.refusal) or node_counts(recipe)


def describe_counts(recipe: Recipe, counts: Sequence[NodeCount]) -> str:
    """Lines on the nodes that SLURM is asked for, and on each layout. Empty where the job has exactly the nodes that train."""
    spares, legal = recipe.launch.spares, legal_counts(recipe, counts)
    if not counts and not spares:
        return ""
    asked = " to ".join(str(each) for each in dict.fromkeys((legal[0] + spares, legal[-1] + spares)))
    kept = f", {spares} of them spare" if spares else ""
    verb = "is" if legal[0] == 1 else "are"
    lines = [
        f"elastic  SLURM is asked for {asked} nodes{kept}; the run goes on without lost ones while {legal[0]} {verb} left"
    ]
    return "\n".join([*lines, *(f"         {each.describe()}" for each in counts)])


def _plan_count(recipe: Recipe, nodes: int, is_most: bool) -> NodeCount:
    with loading_libraries():  # they take seconds, which only what is queued pays
        from framework.output import show_bytes
        from framework.plan.check import check_layout, most_bytes

    narrowed = at_nodes(recipe, nodes)
    problems = [each for each in check_recipe(narrowed, {}) if is_most or each.key not in MADE_SMALLER]
    if problems:
        return NodeCount(nodes, "", f"{problems[0].key}: {problems[0].message}")
    try:
        plan = check_layout(narrowed)
        need, there = most_bytes(plan), _bytes_of_rank(recipe)
        if there is not None and need > there:
            raise RecipeError(f"a rank would hold {show_bytes(need)}, and its device has {show_bytes(there)}")
    except MeshwrightError as error:
        if is_most:
            raise
        return NodeCount(nodes, "", first_line(error))
    derived = plan.derived
    batch = f"{derived.accumulation} x {derived.sequences_per_microbatch} sequences on a rank"
    return NodeCount(nodes, f"dp={derived.dp}, {batch}, at most {show_bytes(need)} each")


def _bytes_of_rank(recipe: Recipe) -> int | None:
    """Memory of a rank's device where the recipe tells: on a CPU the job's request, on a GPU by its name."""
    from framework.plan.candidate import target_device
    from framework.plan.cluster import ClusterRates

    launch = recipe.launch
    if target_device(launch) == "cpu":
        return None if launch.memory_per_rank_gb is None else int(launch.memory_per_rank_gb * 2**30)
    cluster = ClusterRates.from_recipe(recipe)
    return None if cluster.is_assumed else cluster.memory_bytes


@dataclass(frozen=True)
class NodeOrder:
    """names, blocks: of each node in SLURM's order. source: what the blocks are."""

    placement: Placement
    names: tuple[str, ...]
    blocks: tuple[str, ...]
    source: str

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """The node that takes ranks at each place, by its number of SLURM's."""
        return self.placement.order_nodes(self.blocks)

    @cached_property
    def cut(self) -> dict[str, int]:
        """Groups that lie in more than one block, by axis; axes without such are left out."""
        counts = {axis: self.placement.count_cut(axis, self.blocks, self.nodes) for axis in BLOCK_AXES}
        return {axis: count for axis, count in counts.items() if count}

    def rank_of(self, launched: int) -> int:
        """The rank of a process, by the number that SLURM or torchrun has given it."""
        node, local = divmod(launched, self.placement.ranks_per_node)
        return self.nodes.index(node) * self.placement.ranks_per_node + local

    def describe(self) -> str:
        """A line for the run's header: the nodes of each block in the order of their ranks."""
        runs = [(block, list(nodes)) for block, nodes in groupby(self.nodes, key=lambda node: self.blocks[node])]
        shown = [f"{block}: {' '.join(self.names[node] for node in nodes)}" for block, nodes in runs[:SHOWN]]
        more = [f"and {len(runs) - SHOWN} more"] if len(runs) > SHOWN else []
        moved = "reordered" if self.nodes != tuple(range(len(self.nodes))) else "SLURM's order"
        return f"nodes by {self.source}, {moved}: {'; '.join([*shown, *more])}"

    def describe_cut(self) -> str:
        """The groups that lie in more than one block, of which there are some."""
        world, size = self.placement.topology.world, self.placement.topology.size
        words = [f"{count} of {world // size(axis)} {axis} groups" for axis, count in self.cut.items()]
        return f"{' and '.join(words)} lie in more than one {self.source}"


def read_order(derived: Derived, variables: Mapping[str, str] | None = None) -> NodeOrder | None:
    """The order that the script's answers mean; None where it has not asked, or not all nodes have answered: ranks then keep
    SLURM's numbers. variables: the environment, of this process unless given."""
    placement = place(derived)
    text = (os.environ if variables is None else variables).get(NODES, "")
    answers = [answer.split() for answer in text.split(";")]
    if len(answers) != placement.num_nodes or any(len(each) != 4 for each in answers):
        return None
    _, names, addresses, patterns = zip(*sorted(answers, key=lambda each: int(each[0])), strict=True)
    kinds = [pattern.split(".")[-2:-1] for pattern in patterns]
    known = next((kind for kind in BLOCK_KINDS if [kind] in kinds), None)
    if known is None:
        return NodeOrder(placement, names, _blocks_by_name(names), "name")
    # A node outside of the topology is a block of its own.
    pairs = zip(addresses, kinds, strict=True)
    blocks = tuple(address.rpartition(".")[0] if kind == [known] else address for address, kind in pairs)
    return NodeOrder(placement, names, blocks, known)


def find_rank(derived: Derived, launched: int, variables: Mapping[str, str] | None = None) -> int:
    """The rank of a process by the number with which it was launched. variables: as of `read_order`."""
    order = read_order(derived, variables)
    return launched if order is None else order.rank_of(launched)


def _blocks_by_name(names: tuple[str, ...]) -> tuple[str, ...]:
    """Names without their last numbers, as racks have them (r3n7); one block for all where that joins no two nodes."""
    blocks = tuple(name.rstrip("0123456789") for name in names)
    return blocks if max(Counter(blocks).values()) > 1 else ("",) * len(names)


def describe_nodes(order: NodeOrder | None, forecast: Callable[[int], tuple[float, float]]) -> Iterator[str]:
    """Lines of the run's header. forecast: by the plan, of a number of nodes on which groups lie, the seconds of a step and those
    that their messages take beyond what they would within one node."""
    if order is None:
        return
    yield order.describe()
    if order.cut:
        unit = order.placement.units[0]
        step_s, lost_s = forecast(unit)
        key = f"launch.segment={unit}" if order.source == "block" else "launch.switches=1"  # a tree has no segments
        yield (
            f"WARNING: {order.describe_cut()}: by the plan messages of tp and ep take {lost_s:.3g} s of a step's {step_s:.3g} s"
            f" more between nodes than within one. {key} asks SLURM for nodes that lie together (docs/slurm.md)"
        )
