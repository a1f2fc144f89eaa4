"""The split of a model's layers into stages such that the slowest stage, or rank, is as fast as possible."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, permutations

# Halvings of what is not known of the slowest stage's cost: to a part in a hundred thousand of the whole model's.
STEPS = 20


def split_evenly(num_layers: int, num_stages: int) -> list[int]:
    """Number of layers of each stage; where the division leaves a rest, the first stages have one more."""
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


def split_by_cost(layers: Sequence[float], first: float, last: float, num_stages: int) -> list[int]:
    """Number of layers of each stage, at least one, that minimises the largest cost of a stage; among equals the one with the
    least sum of squares, that is the most even one.

    layers: cost of each layer, in order. first, last: additional cost of the first stage (embedding) and the last (head).
    """
    # Dynamic programming over (stages so far, layers so far): at most S L^2 steps, whereas the number of splits is exponential.
    # No stage of the best split costs more than the slowest one of a split that is known, so most steps are left out.
    sums = [0.0, *accumulate(layers)]
    num_layers = len(layers)
    assert num_stages <= num_layers, f"{num_stages} stages of {num_layers} layers"

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (stage == 0) + last * (stage == num_stages - 1)

    most = _slowest_of_greedy(cost, num_layers, num_stages, sums[-1] + first + last)
    # best[stop]: (largest cost, sum of squares, split) of the stages so far over the first `stop` layers.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        rest = num_stages - 1 - stage
        for start, (largest, squares, split) in best.items():
            for stop in range(start + 1, num_layers - rest + 1):
                own = cost(stage, start, stop)
                if own > most:
                    break
                # Tuples compare by the largest cost, then by squares, then by the split itself: all ranks find the same one.
                found = (max(largest, own), squares + own * own, (*split, stop - start))
                if stop not in after or found < after[stop]:
                    after[stop] = found
        best = after
    return list(best[num_layers][2])


def _slowest_of_greedy(cost: Callable[[int, int, int], float], num_layers: int, num_stages: int, high: float) -> float:
    """The cost of the slowest stage of a split that is nearly the best. cost: of a stage over layers [start, stop); high: of all
    in one stage."""

    def fill(limit: float) -> list[float] | None:
        """Costs of stages that take as many layers as the limit lets them; None where some are left over."""
        costs, start = [], 0
        for stage in range(num_stages):
            end = num_layers - (num_stages - 1 - stage)
            stop = start + 1
            while stop < end and cost(stage, start, stop + 1) <= limit:
                stop += 1
            costs.append(cost(stage, start, stop))
            start = stop
        return costs if start == num_layers and max(costs) <= limit else None

    slowest, low = high, 0.0
    for _ in range(STEPS):
        limit = (low + slowest) / 2
        costs = fill(limit)
        low, slowest = (low, max(costs)) if costs is not None else (limit, slowest)
    return slowest


def balance_ranks(
    counts: Sequence[int], layers: Sequence[float], first: float, last: float, rank_of_stage: Sequence[int]
) -> list[int]:
    """The split `counts` with layers moved between stages as long as the slowest rank gets faster, or all get more even.

    A rank runs its virtual stages in turn, so its cost is their sum. In a V embedding and head are on one rank: stages that are
    even make that rank the slowest.
    """
    sums = [0.0, *accumulate(layers)]

    def slowness(split: Sequence[int]) -> tuple[float, float, float]:
        ends = [0, *accumulate(split)]
        costs = [sums[stop] - sums[start] for start, stop in pairwise(ends)]
        costs[0] += first
        costs[-1] += last
        ranks = [0.0] * (max(rank_of_stage) + 1)
        for rank, cost in zip(rank_of_stage, costs, strict=True):
            ranks[rank] += cost
        return max(ranks), sum(cost * cost for cost in ranks), max(costs)

    # Single moves of one layer, until none helps: few, because the stages are even already.
    best = list(counts)
    while True:
        moves = [
            [count - (stage == source) + (stage == target) for stage, count in enumerate(best)]
            for source, target in permutations(range(len(best)), 2)
            if best[source] > 1
        ]
        found = min(moves, key=slowness, default=best)
        if slowness(found) >= slowness(best):
            return best
        best = found
