"""Rows that tokens become on their way to experts: how many an even router makes, and how many a padded buffer has room for.

Of E experts a node has E/N. A router that chooses k of them, any as likely as another, leaves a node out with probability

    C(E - E/N, k) / C(E, k)

and a token reaches it with the rest, p. A router that is limited to some of several groups of experts chooses those groups first:
a node has the experts of some whole groups, or a part of one, and is reached by fewer tokens. So T tokens become T p rows for
each of N nodes, and a rank, one of G on a node, passes on T k / G rows to each of these.

Padded buffers have room for so many rows times a factor, whatever the router chooses. No more can come than T rows for a node,
than min(k, e) pairs of each row for the e experts of a rank, and than those experts' capacity, where they have one.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import ceil, comb


@dataclass(frozen=True)
class Router:
    """A router that chooses `top_k` of `experts`, out of the best `kept` of `groups` of them."""

    experts: int
    top_k: int
    groups: int = 1
    kept: int = 1

    def reach(self, nodes: int) -> Fraction:
        """Probability that a token has an expert on one of so many nodes."""
        return _reach(self, nodes)


@cache
def _reach(router: Router, nodes: int) -> Fraction:
    own, size, choices = router.experts // nodes, router.experts // router.groups, comb(router.groups, router.kept)
    if router.kept == router.groups or (own % size and size % own):
        return 1 - _miss(router.experts, own, router.top_k)
    missed, inside = Fraction(0), max(1, own // size)
    # Some of the node's groups are chosen; it holds all of their experts, or a part.
    for chosen in range(min(inside, router.kept) + 1):
        ways = comb(inside, chosen) * comb(router.groups - inside, router.kept - chosen)
        missed += Fraction(ways, choices) * _miss(router.kept * size, chosen * min(own, size), router.top_k)
    return 1 - missed


def _miss(experts: int, own: int, top_k: int) -> Fraction:
    """Probability that none of `own` experts is among the chosen."""
    return Fraction(comb(experts - own, top_k), comb(experts, top_k))


@dataclass(frozen=True)
class Room:
    """Rows that a rank's padded buffers hold for each node and for each rank of a node, and as many as an even router sends."""

    outer: int
    inner: int
    even: tuple[float, float]


def find_room(
    tokens: int, router: Router, nodes: int, ranks: int, factor: float | None, most: int | None
) -> Room | None:
    """The room for so many tokens of a rank; None where nothing bounds their rows before they are counted, or the bound would
    have more bytes cross nodes than are needed. factor: parallel.expert_padding; most: pairs that the experts of one rank take
    of a rank's tokens at most, by their capacity."""
    if factor is None and (most is None or nodes > 1):
        return None
    outer, inner = tokens * router.reach(nodes), Fraction(tokens * router.top_k, ranks)
    # The decimal that the recipe has: no float is 1.1, and 30 rows would have room for 34.
    stated = Fraction(factor or 0).limit_denominator(10**6)
    room = min(tokens, ceil(stated * outer)) if stated else tokens
    limits = [nodes * room * min(router.top_k, router.experts // (nodes * ranks))]
    if stated:
        limits.append(ceil(stated * inner))
    if most is not None:
        limits.append(nodes * most)
    return Room(room, min(limits), (float(outer), float(inner)))
