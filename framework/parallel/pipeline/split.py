"""The split of a model's layers into stages such that the slowest stage, or rank, is as fast as possible."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

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
    sums, num_ranks = np.array([0.0, *accumulate(layers)]), max(rank_of_stage) + 1

    def measure(splits: np.ndarray) -> np.ndarray:
        """(largest cost of a rank, sum of squares, largest of a stage) of each split [splits, stages]."""
        stops = np.cumsum(splits, axis=1)
        costs = sums[stops] - sums[stops - splits]
        costs[:, 0] += first
        costs[:, -1] += last
        ranks, squares = np.zeros((len(splits), num_ranks)), np.zeros(len(splits))
        # One after another, and not by a sum of numpy's, whose order would round otherwise for other numbers of stages.
        for stage, rank in enumerate(rank_of_stage):
            ranks[:, rank] += costs[:, stage]
        for rank in range(num_ranks):
            squares += ranks[:, rank] * ranks[:, rank]
        return np.stack([ranks.max(axis=1), squares, costs.max(axis=1)], axis=1)

    # Single moves of one layer, until none helps: few, because the stages are even already.
    best = np.array(counts)
    slowness = measure(best[None])[0].tolist()
    while True:
        sources, targets = np.nonzero((best > 1)[:, None] & ~np.eye(len(best), dtype=bool))
        if not len(sources):
            return best.tolist()
        moves = np.tile(best, (len(sources), 1))
        rows = np.arange(len(sources))
        moves[rows, sources] -= 1
        moves[rows, targets] += 1
        measured = measure(moves)
        # Of equals the first.
        found = np.lexsort(measured.T[::-1])[0]
        if measured[found].tolist() >= slowness:
            return best.tolist()
        best, slowness = moves[found], measured[found].tolist()
