"""The numbers that follow from a recipe and are therefore not in it: dp, accumulation, tokens, nodes.

world = dp tp pp cp, and ep divides dp cp tp / expert_tp; under SLURM world = nodes ranks_per_node. One optimizer step consumes
    sequences_per_step = dp * accumulation * sequences_per_microbatch,   tokens_per_step = sequences_per_step * context.
The user states the left side and the microbatch; dp and accumulation follow.

With `launch.nodes: [least, most]` data parallelism fills the nodes there are; tp, pp, cp and ep stay, and so does the batch of
one optimizer step: with fewer ranks each takes more microbatches, and smaller ones where its share would not be whole ones.
Which sample comes when is a function of the seed (`data/order.py`), so every number of nodes is the same training run.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from framework.errors import RecipeError
from framework.recipe.problem import Problem, render_problems
from framework.recipe.schema import Batch, Launch, Parallel, Pipeline, Recipe

# Schedules with more stages than one on each rank, and how many unless the recipe says; the first takes any number from 2 on.
VIRTUAL_STAGES: dict[str, int] = {"interleaved": 2, "zbv": 2, "dualpipe_v": 2}
# Schedules that split a backward in two, the second half of which is weights' gradients alone.
SPLIT_BACKWARDS = ("zb_h1", "zbv", "dualpipe_v")


@dataclass(frozen=True)
class Derived:
    world: int  # ranks
    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    expert_tp: int  # ranks that slice each expert
    sequences_per_step: int
    tokens_per_step: int
    sequences_per_microbatch: int
    accumulation: int  # microbatches of one rank in one step
    context: int  # tokens in a sequence
    total_tokens: int  # of the whole run
    nodes: int = 1
    ranks_per_node: int = 1  # ranks on each node, at most launch.ranks_per_node
    ulysses: int = 1  # ranks of cp that exchange heads, neighbours
    ring: int = 1  # ranks of cp among which keys and values travel: cp / ulysses
    epochs: float | None = None  # where steps and total_tokens are still to follow from the data

    @property
    def tokens_of_rank(self) -> float:
        """Tokens of a step that go through one rank, without padding: ranks of dp and of cp have others."""
        return self.tokens_per_step / (self.dp * self.cp)

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees for display: expert_tp only where it differs from its default beside ep and tp."""
        is_default = self.expert_tp == (1 if self.ep > 1 else self.tp)
        return {
            axis: getattr(self, axis) for axis in ("pp", "dp", "cp", "tp", "ep", *([] if is_default else ["expert_tp"]))
        }


def compiles(recipe: Recipe) -> bool:
    """Whether layers are compiled."""
    return recipe.memory.compile == "always" or (recipe.memory.compile == "auto" and not explain_not_compiled(recipe))


def explain_not_compiled(recipe: Recipe) -> str:
    """The reason why `memory.compile=auto` compiles no layer; "" where it does."""
    parallel, adapter = recipe.parallel, recipe.adapter
    if parallel.expert_overlap:
        return "layers compute in halves by turns (parallel.expert_overlap)"
    if obstacle := find_compile_obstacle(recipe):
        return f"outputs are kept by name, and with {obstacle} graphs end at tp's regions"
    if adapter.dropout > 0:
        return "which elements of its input an adapter drops is not known to a compiled layer (adapter.dropout)"
    if adapter.is_used and max(parallel.tp, parallel.cp, parallel.ep) > 1:
        return "adapters lie beside weights that ranks divide (parallel.tp, cp or ep)"
    return "" if recipe.launch.device == "cuda" else "it does not pay on CPUs, where runs are short"


def find_compile_obstacle(recipe: Recipe) -> str | None:
    """The key and value with which a layer that keeps outputs by name cannot be compiled; None where there is none.

    What is kept is chosen within one graph, and where messages travel under matmuls a graph ends.
    """
    chooses = recipe.memory.activation_checkpointing in ("selective", "auto")
    return "parallel.overlap=always" if chooses and overlaps_matmuls(recipe) else None


def overlaps_matmuls(recipe: Recipe) -> bool:
    """Whether messages of tensor parallelism travel under matmuls."""
    parallel = recipe.parallel
    return parallel.tp > 1 and parallel.sequence and parallel.overlap == "always"


def derive(recipe: Recipe) -> Derived:
    """The numbers that follow from a recipe: computed once for each Recipe object, which keeps them.

    RecipeError if the degrees do not fit the ranks or the batch does not divide.
    """
    known = vars(recipe).get("derived")  # kept as `functools.cached_property` keeps its value
    if known is None:
        known = vars(recipe)["derived"] = _compute(recipe)
    found: Derived = known
    return found


def carry_derived(recipe: Recipe, changed: Recipe) -> Recipe:
    """`changed` with the derived numbers of `recipe`, from which it differs only in keys that they do not depend on."""
    if "derived" in vars(recipe):
        vars(changed)["derived"] = vars(recipe)["derived"]
    return changed


def _compute(recipe: Recipe) -> Derived:
    problems = (
        list(find_node_problems(recipe)) or list(find_world_problems(recipe)) or list(find_batch_problems(recipe))
    )
    if problems:
        raise RecipeError(render_problems(problems))
    parallel, batch = recipe.parallel, recipe.batch
    dp = count_dp(recipe)
    sequences = count_sequences(batch)
    return Derived(
        world=count_ranks(recipe),
        dp=dp,
        tp=parallel.tp,
        pp=parallel.pp,
        cp=parallel.cp,
        ep=parallel.ep,
        expert_tp=count_expert_slices(parallel),
        sequences_per_step=sequences,
        tokens_per_step=sequences * batch.context,
        sequences_per_microbatch=batch.sequences_per_microbatch,
        accumulation=sequences // (dp * batch.sequences_per_microbatch),
        context=batch.context,
        total_tokens=sequences * batch.context * recipe.train.steps,
        nodes=count_nodes(recipe),
        ranks_per_node=count_ranks(recipe) // count_nodes(recipe),
        ulysses=context_degrees(parallel)[0],
        ring=context_degrees(parallel)[1],
        epochs=recipe.train.epochs,
    )


def context_degrees(parallel: Parallel) -> tuple[int, int]:
    """(Ulysses degree, ring degree) that parallel.context means; gather is a ring without steps. Their product is cp in a
    checked recipe."""
    if isinstance(parallel.context, list):
        ulysses, ring = parallel.context
        return ulysses, ring
    return (parallel.cp, 1) if parallel.context == "ulysses" else (1, parallel.cp)


def count_context_parts(ulysses: int, ring: int) -> int:
    """Parts into which a sequence is cut: each rank has one, or with a ring two, from the front and from the back."""
    return (2 if ring > 1 else 1) * ulysses * ring


def has_tokens_everywhere(context: int, ulysses: int, ring: int) -> bool:
    """Whether each rank's first part, of ceil(context / parts) tokens, begins before the end of the sequence."""
    part = -(-context // count_context_parts(ulysses, ring))
    return (ulysses * ring - 1) * part < context


def unpadded_lengths(context: int, ulysses: int, ring: int) -> tuple[int, ...]:
    """Lengths next to `context`, below and above, whose parts need no padding on any rank; `context` alone where it is one."""
    parts = count_context_parts(ulysses, ring)
    below = context // parts * parts
    return (context,) if below == context else (below, below + parts)[below == 0 :]


def ulysses_degrees(cp: int, heads: int) -> list[int]:
    """Divisors of cp that divide the heads of a rank of tp."""
    return [degree for degree in divisors(cp) if heads % degree == 0]


def count_expert_slices(parallel: Parallel) -> int:
    """Ranks that slice each expert: parallel.expert_tp; else 1 with ep > 1, or all of tp."""
    if parallel.expert_tp is not None:
        return parallel.expert_tp
    return 1 if parallel.ep > 1 else parallel.tp


def count_secondary(within: int | str | None, shard: int, tp: int, ranks_per_node: int) -> int:
    """The degree `secondary` that zero.secondary_shard means; 1 where its ranks would be all of `shard`, or not divide them."""
    degree = max(1, ranks_per_node // tp) if within == "node" else int(within or 1)
    return degree if degree < shard and shard % degree == 0 else 1


def count_ranks(recipe: Recipe) -> int:
    """Ranks of the world: launch.ranks, else nodes x ranks_per_node, else the product of the degrees."""
    launch, parallel, stated = recipe.launch, recipe.parallel, node_range(recipe.launch)
    if launch.ranks is not None:
        return launch.ranks
    if launch.kind == "slurm" and stated is not None:
        return stated[1] * launch.ranks_per_node
    return (parallel.dp or 1) * parallel.tp * parallel.pp * parallel.cp


def count_nodes(recipe: Recipe) -> int:
    """Nodes of the run: launch.nodes, of a range the most; else as few as hold the ranks. One with launch.kind=local."""
    launch, stated = recipe.launch, node_range(recipe.launch)
    if launch.kind == "local":
        return 1
    if stated is not None:
        return stated[1]
    return math.ceil(count_ranks(recipe) / launch.ranks_per_node)


def node_range(launch: Launch) -> tuple[int, int] | None:
    """(least, most) of launch.nodes: a recipe is planned for the most, and `at_nodes` makes it one for fewer."""
    return (launch.nodes, launch.nodes) if isinstance(launch.nodes, int) else launch.nodes


def find_node_problems(recipe: Recipe) -> Iterator[Problem]:
    """Under SLURM the ranks fill the nodes: nodes * ranks_per_node, or a part of one node."""
    launch, ranks, nodes = recipe.launch, count_ranks(recipe), count_nodes(recipe)
    if launch.kind == "local" or (launch.nodes is None and ranks <= launch.ranks_per_node):
        return
    held = nodes * launch.ranks_per_node
    if held == ranks:
        return
    if launch.nodes is None:
        message = f"{ranks} ranks do not fill nodes of launch.ranks_per_node={launch.ranks_per_node}"
        fix = f"launch.ranks={_listed(_multiples(ranks, launch.ranks_per_node))}"
        yield Problem(
            "launch.ranks",
            launch.ranks,
            message,
            f"{fix}; or launch.ranks_per_node={_listed(_divisors(ranks, launch.ranks_per_node))}",
        )
        return
    message = f"nodes * ranks_per_node = {nodes} * {launch.ranks_per_node} = {held}, but there are {ranks} ranks"
    ways = [f"launch.ranks={held} (or null)"]
    if ranks % nodes == 0:
        ways.append(f"launch.ranks_per_node={ranks // nodes}")
    yield Problem("launch.nodes", launch.nodes, message, "; or ".join([*ways, "launch.nodes=null, which follows"]))


def count_virtual_stages(pipeline: Pipeline) -> int:
    """Stages on each rank."""
    if pipeline.virtual_stages is not None:
        return pipeline.virtual_stages
    return VIRTUAL_STAGES.get(pipeline.schedule, 1)


def find_world_problems(recipe: Recipe) -> Iterator[Problem]:
    """The degrees multiply to the number of ranks."""
    parallel, ranks = recipe.parallel, count_ranks(recipe)
    inner = parallel.tp * parallel.pp * parallel.cp
    if parallel.dp is None and ranks % inner:
        message = (
            f"tp * pp * cp = {parallel.tp} * {parallel.pp} * {parallel.cp} = {inner} does not divide the {ranks} ranks"
        )
        yield Problem("launch.ranks", ranks, message, f"launch.ranks={_listed(_multiples(ranks, inner))}")
        return
    if parallel.dp is not None and parallel.dp * inner != ranks:
        message = (
            f"dp * tp * pp * cp = {parallel.dp} * {parallel.tp} * {parallel.pp} * {parallel.cp} = {parallel.dp * inner}, "
            f"but there are {ranks} ranks"
        )
        ways = [f"launch.ranks={parallel.dp * inner}"]
        if ranks % inner == 0:
            ways += [f"parallel.dp={ranks // inner}", "parallel.dp=null, which fills the ranks"]
        yield Problem("parallel.dp", parallel.dp, message, "; or ".join(ways))
        return
    slices = count_expert_slices(parallel)
    if slices not in (1, parallel.tp):
        message = f"an expert is whole, or sliced by all parallel.tp={parallel.tp} ranks"
        yield Problem(
            "parallel.expert_tp", slices, message, f"parallel.expert_tp={_listed(sorted({1, parallel.tp}))}, or null"
        )
        return
    expert_ranks = count_dp(recipe) * parallel.cp * parallel.tp // slices
    if expert_ranks % parallel.ep:
        message = f"ep divides dp * cp * tp / expert_tp = {expert_ranks}, and {parallel.ep} does not"
        yield Problem(
            "parallel.ep", parallel.ep, message, f"parallel.ep={_listed(_divisors(expert_ranks, parallel.ep))}"
        )


def find_batch_problems(recipe: Recipe) -> Iterator[Problem]:
    """The batch is stated once, and is whole microbatches on every rank. Reads sound degrees only."""
    batch, problems = recipe.batch, list(find_statement_problems(recipe))
    if problems:
        yield from problems
    elif batch.sequences_per_step is not None:
        yield from _undivided(recipe, "batch.sequences_per_step", batch.sequences_per_step, tokens_each=1)
    elif batch.tokens_per_step is not None:
        yield from _undivided(recipe, "batch.tokens_per_step", batch.tokens_per_step, tokens_each=batch.context)


def find_statement_problems(recipe: Recipe) -> Iterator[Problem]:
    """The batch of a step is stated once, whatever the layout is."""
    batch = recipe.batch
    if batch.sequences_per_step is not None and batch.tokens_per_step is not None:
        message = f"the batch is stated twice: batch.tokens_per_step={batch.tokens_per_step} as well"
        fix = "keep one: batch.tokens_per_step=null, or batch.sequences_per_step=null"
        yield Problem("batch.sequences_per_step", batch.sequences_per_step, message, fix)
    elif batch.sequences_per_step is None and batch.tokens_per_step is None:
        fix = "batch.sequences_per_step=32, or batch.tokens_per_step=..."
        yield Problem("batch.sequences_per_step", None, "the batch of one step is not stated", fix)


def _undivided(recipe: Recipe, key: str, amount: int, tokens_each: int) -> Iterator[Problem]:
    """`amount` in units of `tokens_each` is whole microbatches on every rank, or the ways to make it so."""
    dp, microbatch = count_dp(recipe), recipe.batch.sequences_per_microbatch
    unit = dp * microbatch * tokens_each
    if amount % unit == 0:
        return
    factors = f"{dp} dp ranks * {microbatch} sequences per microbatch"
    if tokens_each > 1:
        factors += f" * {tokens_each} tokens per sequence"
    ways = [f"{key}={_listed(_multiples(amount, unit))}"]
    sequences, rest = divmod(amount, tokens_each)
    if rest == 0:
        if sequences % dp == 0:
            ways.append(f"batch.sequences_per_microbatch={_listed(_divisors(sequences // dp, microbatch))}")
        if sequences % microbatch == 0:
            ways += _ways_by_ranks(recipe, sequences // microbatch)
    yield Problem(key, amount, f"not a multiple of {factors} = {unit}", "; or ".join(ways))


def _ways_by_ranks(recipe: Recipe, microbatches: int) -> list[str]:
    """Numbers of ranks, or a range of nodes, among which so many microbatches can be divided."""
    dp, nodes = count_dp(recipe), recipe.launch.nodes
    inner = count_ranks(recipe) // dp
    if isinstance(nodes, tuple):
        degrees = {count: count * recipe.launch.ranks_per_node // inner for count in range(nodes[0], nodes[1])}
        fewer = [count for count, degree in degrees.items() if degree and microbatches % degree == 0]
        return [f"launch.nodes=[{nodes[0]},{fewer[-1]}]"] if fewer else []
    ranks = [d * inner for d in _divisors(microbatches, dp)]
    return [f"launch.ranks={_listed(ranks)}" + (" with parallel.dp=null" if recipe.parallel.dp else "")]


def count_dp(recipe: Recipe) -> int:
    """Data-parallel degree; the degrees must fit the ranks."""
    parallel = recipe.parallel
    return parallel.dp or count_ranks(recipe) // (parallel.tp * parallel.pp * parallel.cp)


def count_sequences(batch: Batch) -> int:
    """Sequences of one optimizer step."""
    if batch.sequences_per_step is not None:
        return batch.sequences_per_step
    assert batch.tokens_per_step is not None, "find_batch_problems lets no recipe without a batch pass"
    return batch.tokens_per_step // batch.context


def _multiples(amount: int, unit: int) -> list[int]:
    """The multiples of `unit` next to `amount`, below and above."""
    below = amount // unit * unit
    return [below, below + unit] if below else [unit]


def divisors(amount: int) -> list[int]:
    """All divisors, in order."""
    return [each for each in range(1, amount + 1) if amount % each == 0]


def _divisors(amount: int, near: int, count: int = 3) -> list[int]:
    """The divisors of `amount` nearest to `near`, in order."""
    return sorted(sorted(divisors(amount), key=lambda each: abs(each - near))[:count])


def _listed(numbers: list[int]) -> str:
    return " or ".join(str(number) for number in numbers)


def node_counts(recipe: Recipe) -> tuple[int, ...]:
    """Numbers of nodes that the recipe allows, in order; a recipe that states none has the one that follows from it."""
    least, most = node_range(recipe.launch) or (count_nodes(recipe), count_nodes(recipe))
    return tuple(range(least, most + 1))


def can_move(recipe: Recipe) -> bool:
    """Whether the ranks can go on within the job when a node is lost: on a spare one, or on fewer."""
    return recipe.launch.kind == "slurm" and (recipe.launch.spares > 0 or has_range(recipe.launch))


def has_range(launch: Launch) -> bool:
    """Whether the number of nodes is known only once a job has them."""
    least, most = node_range(launch) or (0, 0)
    return least < most


def at_nodes(recipe: Recipe, nodes: int) -> Recipe:
    """The recipe of a start on so many of its nodes; a recipe without a range does not change.

    Where the batch is not whole microbatches on every rank they become the largest smaller ones that make it so. Any other
    contradiction is left to the rules.
    """
    if not isinstance(recipe.launch.nodes, tuple):
        return recipe
    most = derive(recipe)
    narrowed = replace(recipe, launch=replace(recipe.launch, nodes=nodes))
    inner, ranks = most.tp * most.pp * most.cp, nodes * recipe.launch.ranks_per_node
    share, rest = divmod(most.sequences_per_step, max(1, ranks // inner))
    if rest:
        return narrowed
    size = next(size for size in range(most.sequences_per_microbatch, 0, -1) if share % size == 0)
    return replace(narrowed, batch=replace(recipe.batch, sequences_per_microbatch=size))
