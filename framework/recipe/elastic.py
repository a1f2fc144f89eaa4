"""A range of nodes: what a recipe with `launch.nodes: [least, most]` is on each number of them.

Data parallelism takes what nodes there are; tp, pp, cp and ep stay, and so does the batch of one optimizer step: a rank takes
more microbatches where there are fewer ranks, and smaller ones where its share would not be whole ones. Which sample comes
when is a function of the seed (`data/order.py`), so every number of nodes is the same training run.
"""

from collections.abc import Iterator
from dataclasses import replace

from framework.recipe.derive import count_nodes, derive, most_nodes
from framework.recipe.problem import Problem
from framework.recipe.schema import Launch, Recipe


def node_counts(recipe: Recipe) -> tuple[int, ...]:
    """The numbers of nodes that the recipe allows, in order; one that says none has the one that follows from it."""
    nodes = recipe.launch.nodes
    return (count_nodes(recipe),) if nodes is None or isinstance(nodes, int) else tuple(range(nodes[0], nodes[1] + 1))


def can_move(recipe: Recipe) -> bool:
    """Whether the ranks can go on within the job when a node is lost: on a spare one, or on fewer."""
    return recipe.launch.kind == "slurm" and (recipe.launch.spares > 0 or has_range(recipe.launch))


def has_range(launch: Launch) -> bool:
    """Whether the number of nodes is known only once a job has them."""
    return isinstance(launch.nodes, tuple) and launch.nodes[0] < launch.nodes[1]


def at_nodes(recipe: Recipe, nodes: int) -> Recipe:
    """The recipe of a start on so many of its nodes; one without a range is what it says, wherever it is started.

    Where the batch is not whole microbatches on every rank they become the largest smaller ones that make it so. Any other
    contradiction is left to the rules.
    """
    if recipe.launch.nodes is None or isinstance(recipe.launch.nodes, int):
        return recipe
    most = derive(replace(recipe, launch=replace(recipe.launch, nodes=most_nodes(recipe.launch.nodes))))
    narrowed = replace(recipe, launch=replace(recipe.launch, nodes=nodes))
    inner, ranks = most.tp * most.pp * most.cp, nodes * recipe.launch.ranks_per_node
    share, rest = divmod(most.sequences_per_step, max(1, ranks // inner))
    if rest:
        return narrowed
    size = next(size for size in range(most.sequences_per_microbatch, 0, -1) if share % size == 0)
    return replace(narrowed, batch=replace(recipe.batch, sequences_per_microbatch=size))


def find_range_problems(recipe: Recipe) -> Iterator[Problem]:
    """What contradicts a range of nodes, or spare ones. Whether each number of nodes can be laid out `submit` finds out."""
    launch, parallel = recipe.launch, recipe.parallel
    if launch.spares and launch.kind == "local":
        message = "spare nodes are SLURM's, and launch.kind=local trains on this machine"
        yield Problem(
            "launch.spares", launch.spares, message, "launch.spares=0; or launch=slurm and `meshwright submit`"
        )
    if launch.nodes is None or isinstance(launch.nodes, int):
        return
    least, most = launch.nodes
    shown = [least, most]
    if launch.kind == "local":
        message = "nodes are SLURM's, and launch.kind=local trains on this machine"
        yield Problem("launch.nodes", shown, message, "launch.nodes=null; or launch=slurm and `meshwright submit`")
    elif least > most:
        yield Problem("launch.nodes", shown, "the least number of nodes comes first", f"launch.nodes=[{most},{least}]")
    elif least < most:
        for key, value in (("launch.ranks", launch.ranks), ("parallel.dp", parallel.dp)):
            if value is not None:
                message = f"one number, and launch.nodes=[{least},{most}] has as many ranks as there are nodes"
                yield Problem(key, value, message, f"{key}=null, which follows; or launch.nodes=one number")
