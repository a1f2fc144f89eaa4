"""Where a model is cut into stages: so that the slowest is as fast as it can be."""

from collections.abc import Sequence
from itertools import accumulate, pairwise, permutations


def split_evenly(num_layers: int, num_stages: int) -> list[int]:
    """Layers of each stage, the first ones one more where they do not divide."""
    return [num_layers // num_stages + (stage < num_layers % num_stages) for stage in range(num_stages)]


def split_by_cost(layers: Sequence[float], first: float, last: float, num_stages: int) -> list[int]:
    """Layers of each stage, at least one, such that the largest sum of costs is least; of those cuts the one whose sums are
    most alike.

    layers: cost of each layer, in order. first, last: what the first stage has besides, the embedding, and the last, the head.
    """
    sums = [0.0, *accumulate(layers)]
    num_layers = len(layers)
    assert num_stages <= num_layers, f"{num_stages} stages of {num_layers} layers"

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (stage == 0) + last * (stage == num_stages - 1)

    # best[stop]: (largest sum, sum of squares, cut) of the stages so far over the first `stop` layers.
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(num_stages):
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        rest = num_stages - 1 - stage
        for start, (largest, squares, cut) in best.items():
            for stop in range(start + 1, num_layers - rest + 1):
                own = cost(stage, start, stop)
                found = (max(largest, own), squares + own * own, (*cut, stop - start))
                if stop not in after or found < after[stop]:
                    after[stop] = found
        best = after
    return list(best[num_layers][2])


def balance_ranks(
    counts: Sequence[int], layers: Sequence[float], first: float, last: float, rank_of_stage: Sequence[int]
) -> list[int]:
    """`counts` with layers moved from stage to stage as long as that makes the slowest rank faster, whose stages compute in
    turn, or all more alike."""
    sums = [0.0, *accumulate(layers)]

    def slowness(cut: Sequence[int]) -> tuple[float, float, float]:
        ends = [0, *accumulate(cut)]
        costs = [sums[stop] - sums[start] for start, stop in pairwise(ends)]
        costs[0] += first
        costs[-1] += last
        ranks = [0.0] * (max(rank_of_stage) + 1)
        for rank, cost in zip(rank_of_stage, costs, strict=True):
            ranks[rank] += cost
        return max(ranks), sum(cost * cost for cost in ranks), max(costs)

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
