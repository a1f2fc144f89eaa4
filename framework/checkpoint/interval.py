"""How often to save, from what a save costs and how often the run fails.

Too seldom loses work at a failure, too often loses it to saving. Daly (2006, "A higher order estimate of the optimum checkpoint
interval for restart dumps", equation 37), whose first term is Young's (1974):

    T = sqrt(2 cost MTBF) (1 + sqrt(cost / (2 MTBF)) / 3 + cost / (18 MTBF)) - cost      where cost < 2 MTBF, else T = MTBF

cost: seconds of training that a save takes. Of one that runs behind training that is what it holds the loop up, not its length.
"""

from math import sqrt

# Until a save has been measured.
ASSUMED_COST_S = 1.0
# A save also takes cores, network and disk from others: it is under way for one part in so many of the time at most.
SPARED = 4.0


def find_interval_s(mtbf_s: float, num_saves: int, stalled_s: float, longest_s: float) -> float:
    """Seconds from the beginning of one save to that of the next. stalled_s: for which `num_saves` have held training up so far;
    longest_s: how long the longest took."""
    cost_s = stalled_s / num_saves if num_saves else ASSUMED_COST_S
    return max(daly_interval_s(cost_s, mtbf_s), SPARED * longest_s)


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """The interval that loses least."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    share = cost_s / (2 * mtbf_s)
    return sqrt(2 * cost_s * mtbf_s) * (1 + sqrt(share) / 3 + share / 9) - cost_s
