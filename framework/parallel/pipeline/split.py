"""The split of a model's layers into stages such that the slowest stage, or rank, is as fast as possible."""

from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations


def split_evenly(num_layers: int, num_stages: int) -> list[int]:
    """Number of layers of each stage; where the division leaves a rest, the first stages have one more."""
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


def split_by_cost(layers: Sequence[float], first: float, last: float, num_stages: int) -> list[int]:
    """Number of layers of each stage, at least one, that minimises the largest cost of a stage; among equals the one with the
    least sum of squares, that is the most even one.

    layers: cost of each layer, in order. first, last: additional cost of the first stage (embedding) and the last (head).
    """
    # Dynamic programming over (stages so far, layers so far): S L^2 steps, 0.2 s for 16 stages of 128 layers, whereas the number
    # of splits is exponential.
    sums = [0.0, *accumulate(layers)]
    num_layers = len(layers)
    assert num_stages <= num_layers, f"{num_stages} stages of {num_layers} layers"

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (stage == 0) + last * (stage == num_stages - 1)

    # best[stop]: (largest cost, sum of squares, split) of the stages so far over the first `stop` layers.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        rest = num_stages - 1 - stage
        for start, (largest, squares, split) in best.items():
            for stop in range(start + 1, num_layers - rest + 1):
                own = cost(stage, start, stop)
                # Tuples compare by the largest cost, then by squares, then by the split itself: all ranks find the same one.
                found = (max(largest, own), squares + own * own, (*split, stop - start))
                if stop not in after or found < after[stop]:
                    after[stop] = found
        best = after
    return list(best[num_layers][2])


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
