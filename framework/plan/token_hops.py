"""Bytes of a token on its way to experts and back, over both hops of `parallel/experts/route.py`.

Of E experts a node has E/N. A router that chooses k of them, any as likely as another, leaves a node out with probability

    C(E - E/N, k) / C(E, k)

and a token reaches it with the rest, p: N p rows for a token go over the outer hop, k over the inner one, each part of the ranks'
own included. A router that is limited to some of G groups of experts chooses those groups first: a node has the experts of some
whole groups, or a part of one, and is reached by fewer tokens.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import comb

from framework.parallel.experts.exchange import ROW_CODEC, packed_bytes

# Bytes of an expert's index, which travels with each row, and of a number of rows, which is sent first.
INDEX_BYTES, COUNT_BYTES = 4, 8


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
class HopBytes:
    """Bytes of a token over one hop, the rank's own part included: in forward to its experts and back; in backward the gradient
    of what came back, which takes as many bytes, and that of what was sent."""

    there: Fraction = Fraction(0)
    back: Fraction = Fraction(0)
    gradient: Fraction = Fraction(0)

    def all_of(self, forwards: int) -> Fraction:
        """Sum of so many forwards and a backward."""
        return forwards * (self.there + self.back) + self.back + self.gradient


@dataclass(frozen=True)
class TokenHops:
    """A layer's hops. nodes, ranks: sizes of the outer and of the inner one. width: features of hidden states, of `itemsize`
    bytes each."""

    router: Router
    nodes: int
    ranks: int
    width: int
    itemsize: int
    narrows: bool = False
    """Whether rows go to experts as fp8 codes (parallel.expert_dispatch)."""

    @property
    def _row(self) -> int:
        """Bytes of hidden states on their way to experts."""
        return ROW_CODEC.message_bytes(self.width) if self.narrows else self.width * self.itemsize

    @property
    def outer(self) -> HopBytes:
        """Bytes of a token between nodes."""
        if self.nodes == 1:
            return HopBytes()
        rows, hidden = self.nodes * self.router.reach(self.nodes), self.width * self.itemsize
        # Weights travel as they are multiplied, in fp32 or wider.
        weights, ids = self.router.top_k * max(self.itemsize, 4), self.router.top_k * INDEX_BYTES
        return HopBytes(
            rows * packed_bytes([self._row, weights, ids]), rows * hidden, rows * packed_bytes([hidden, weights])
        )

    @property
    def inner(self) -> HopBytes:
        """Bytes of a token within its nodes."""
        if self.ranks == 1:
            return HopBytes()
        rows = Fraction(self.router.top_k * self.width * self.itemsize)
        return HopBytes(Fraction(self.router.top_k * self._row), rows, rows)

    def sent(self, tokens: Fraction, forwards: int, parts: int) -> tuple[int, int]:
        """Bytes that a rank with so many tokens sends over the outer and the inner hop, numbers of rows included."""

        def of(hop: HopBytes, size: int, numbers: int) -> int:
            rows, ahead = tokens * hop.all_of(forwards), forwards * parts * numbers * COUNT_BYTES
            return int(rows * (size - 1) / size) + ahead * (size - 1)

        on_node = self.router.experts // self.nodes
        return of(self.outer, self.nodes, 1 + on_node), of(self.inner, self.ranks, on_node // self.ranks)
