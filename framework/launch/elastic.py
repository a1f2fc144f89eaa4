"""Numbers of nodes on which a run with `launch.nodes: [least, most]` can be laid out. Each is planned before the job waits in
the queue."""

from collections.abc import Sequence
from dataclasses import dataclass

from framework.errors import MeshwrightError, RecipeError
from framework.imports import loading_libraries
from framework.recipe.check import check_recipe
from framework.recipe.derive import at_nodes, has_range, node_counts
from framework.recipe.schema import Recipe

# Keys that may name more nodes or ranks than a start on fewer nodes has: it keeps as many copies as it can, with a note, and
# profiles the ranks that there are.
MADE_SMALLER = ("checkpoint.neighbor_copies", "track.profile_ranks")


@dataclass(frozen=True)
class NodeCount:
    """One number of nodes, with the layout of the run there, or the reason why there is none."""

    nodes: int
    layout: str
    # Empty where the run can be laid out.
    refusal: str = ""

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
        return NodeCount(nodes, "", str(error).splitlines()[0])
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
