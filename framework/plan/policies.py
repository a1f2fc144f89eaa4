"""Policies of activation checkpointing: what a stage's layers keep and compute again with each, and which of them `auto` takes.

A stage's layers are alike, so a choice is a number of layers for each policy. From front to back they stand in the order sqrt,
full, selective, none: backward comes to the last ones first, and what these have kept is gone when a layer further in front is
computed again.

`auto` is a knapsack with one weight (bytes) and one price (FLOPs). For every number of layers with sqrt and with full it finds
the most layers with none that the budget has room for, the rest being selective: bytes never fall and FLOPs never rise with one
more. So it is exact, and the uniform policies are among what it compares.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from framework.model.kept_outputs import Policy
from framework.parallel.activation_checkpointing import count_groups, group_size

# In the order of a stage's layers.
POLICIES: tuple[Policy, ...] = ("sqrt", "full", "selective", "none")
Counts = tuple[int, int, int, int]


@dataclass(frozen=True)
class PolicyCost:
    """One layer and one microbatch. kept: bytes from forward to backward; recomputed: bytes that are there beside them while the
    layer is computed again; flops: of a token, in what is."""

    kept: int
    recomputed: int
    flops: float


@dataclass(frozen=True)
class PolicyCosts:
    """Of all policies. input_bytes: of a layer's input; forward_flops: of a token, in its forward."""

    by_policy: Mapping[Policy, PolicyCost]
    input_bytes: int
    forward_flops: float

    def kept(self, counts: Counts, more: Sequence[int] = ()) -> int:
        """Bytes that a stage of so many layers keeps. more: of each layer, what its forward has beside what others' have."""
        grouped, whole = counts[0], sum(counts) - counts[-1]
        sizes = (count * self._ordered[index].kept for index, count in enumerate(counts))
        # Of a group one layer's input is kept; what else a layer keeps (a router's choice) is kept of all.
        return sum(sizes) - (grouped - count_groups(grouped)) * self.input_bytes + sum(more[whole:])

    def recomputed(self, counts: Counts, more: Sequence[int] = ()) -> int:
        """The most bytes beside those that the stage keeps, while one of its layers is computed again. more: as of `kept`."""
        most, behind, stop = 0, 0, sum(counts)
        for index in reversed(range(len(POLICIES))):
            start = stop - counts[index]
            of_layers, stop = more[start:stop], start
            is_whole = POLICIES[index] == "none"
            if counts[index]:
                again = self._ordered[index].recomputed + (0 if is_whole else max(of_layers, default=0))
                most = max(most, again + self._inputs_of_group(index, counts) - behind)
            behind += counts[index] * self._ordered[index].kept + (sum(of_layers) if is_whole else 0)
        return most

    def flops(self, counts: Counts) -> float:
        """FLOPs of a token in what is computed again."""
        total = sum(count * self._ordered[index].flops for index, count in enumerate(counts))
        return total + (counts[0] - count_groups(counts[0])) * self.forward_flops

    def _inputs_of_group(self, index: int, counts: Counts) -> int:
        return (group_size(counts[0]) - 1) * self.input_bytes if POLICIES[index] == "sqrt" else 0

    @cached_property
    def _ordered(self) -> list[PolicyCost]:
        return [self.by_policy[policy] for policy in POLICIES]


def uniform(policy: Policy, num_layers: int) -> Counts:
    """All layers of a stage alike."""
    first, second, third, fourth = (num_layers if each == policy else 0 for each in POLICIES)
    return first, second, third, fourth


def spell(counts: Counts) -> list[Policy]:
    """The policy of each layer of a stage, from front to back."""
    return [policy for policy, count in zip(POLICIES, counts, strict=True) for _ in range(count)]


def shorten(counts: Counts, num_layers: int) -> Counts:
    """The choice of a stage's first `num_layers`."""
    kept = spell(counts)[:num_layers]
    first, second, third, fourth = (kept.count(policy) for policy in POLICIES)
    return first, second, third, fourth


def count_forwards(counts: Counts, position: int) -> int:
    """How often the forward of a stage's layer runs for one microbatch. position: of the layer in the stage."""
    policy, grouped = spell(counts)[position], counts[0]
    if policy != "sqrt":
        return 1 if policy == "none" else 2
    # The last of a group gives no other layer's input.
    return 2 if (position + 1) % group_size(grouped) == 0 or position + 1 == grouped else 3


def choose_counts(
    num_layers: int, bytes_of: Callable[[Counts], int], flops_of: Callable[[Counts], float], budget: int
) -> Counts | None:
    """The choice of fewest FLOPs, and among those of fewest bytes, that fits the budget in bytes; None where nothing does."""
    found = []
    for grouped in range(num_layers + 1):
        for full in range(num_layers + 1 - grouped):
            rest = num_layers - grouped - full
            counts = _most_whole(grouped, full, rest, bytes_of, budget)
            if counts is not None:
                found.append((flops_of(counts), bytes_of(counts), counts))
    return min(found)[2] if found else None


def _most_whole(grouped: int, full: int, rest: int, bytes_of: Callable[[Counts], int], budget: int) -> Counts | None:
    """Of the rest as many layers without checkpointing as fit, the others selective."""

    def fits(whole: int) -> bool:
        return bytes_of((grouped, full, rest - whole, whole)) <= budget

    if fits(rest):  # one layer alone needs less when it is not computed again
        return grouped, full, 0, rest
    whole = bisect_left(range(rest), True, key=lambda count: not fits(count)) - 1
    return None if whole < 0 else (grouped, full, rest - whole, whole)


def least_bytes(num_layers: int, bytes_of: Callable[[Counts], int]) -> int:
    """The fewest bytes that any choice needs."""
    pairs = [(grouped, full) for grouped in range(num_layers + 1) for full in range(num_layers + 1 - grouped)]
    rests = [(grouped, full, num_layers - grouped - full) for grouped, full in pairs]
    return min(min(bytes_of((a, b, rest, 0)), bytes_of((a, b, 0, rest))) for a, b, rest in rests)
