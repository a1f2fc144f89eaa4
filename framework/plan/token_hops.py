"""Bytes of a token on its way to experts and back, over both hops of `parallel/experts/route.py`.

N p rows for a token go over the outer hop, k over the inner one (`model/expert_rows.py`), each part of the ranks' own included;
in padded buffers as many as these have room for.
"""

from dataclasses import dataclass
from fractions import Fraction

from framework.model.expert_rows import Router, find_room
from framework.model.experts import capacity_of
from framework.parallel.experts.exchange import ROW_CODEC, packed_bytes
from framework.plan.candidate import Candidate
from framework.recipe.schema import Recipe

# Bytes of an expert's index, which travels with each row, and of a number of rows, which is sent first.
INDEX_BYTES, COUNT_BYTES = 4, 8


def rows_of_token(c: Candidate, recipe: Recipe, router: Router, nodes: int, ranks: int) -> tuple[Fraction, Fraction]:
    """Rows of a token over the outer and the inner hop, each part of the ranks' own included: as an even router makes, or as many
    as padded buffers have room for. nodes, ranks: sizes of the hops."""
    parts, is_region = 2 if recipe.parallel.expert_overlap else 1, c.expert_tp == c.tp
    if recipe.parallel.expert_backend == "deepep":  # once to each rank, of those on another node by one of that node's
        return nodes * router.reach(nodes), nodes * ranks * router.reach(nodes * ranks)
    tokens, most = max(1, c.tokens // (1 if is_region else c.tp) // parts), None
    capacity = capacity_of(recipe.model)
    if capacity is not None and c.cp == 1 and is_region:
        taken = capacity.room(c.context, router.top_k, router.experts)
        most = taken * max(1, c.sequences // parts) * (router.experts // (nodes * ranks))
    room = find_room(tokens, router, nodes, ranks, recipe.parallel.expert_padding, most)
    if room is None:
        return nodes * router.reach(nodes), Fraction(router.top_k)
    return Fraction(nodes * room.outer, tokens), Fraction(ranks * room.inner, tokens)


@dataclass(frozen=True)
class HopBytes:
    """Bytes of a token over one hop, the rank's own part included: in forward to its experts and back; in backward the gradient
    of what came back, and that of what was sent."""

    there: Fraction = Fraction(0)
    back: Fraction = Fraction(0)
    gradient_there: Fraction = Fraction(0)
    gradient_back: Fraction = Fraction(0)

    def all_of(self, forwards: int) -> Fraction:
        """Sum of so many forwards and a backward."""
        return forwards * (self.there + self.back) + self.gradient_there + self.gradient_back


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
    """Whether rows go to experts, and gradients to other nodes, as fp8 codes (parallel.expert_dispatch)."""
    rows: tuple[Fraction, Fraction] | None = None
    """`rows_of_token`; None: of an even router."""

    @property
    def _row(self) -> int:
        """Bytes of hidden states on their way to experts, and of their results' gradient between nodes."""
        return ROW_CODEC.message_bytes(self.width) if self.narrows else self.width * self.itemsize

    @property
    def outer(self) -> HopBytes:
        """Bytes of a token between nodes."""
        if self.nodes == 1:
            return HopBytes()
        rows = self.nodes * self.router.reach(self.nodes) if self.rows is None else self.rows[0]
        hidden = self.width * self.itemsize
        # Weights travel as they are multiplied, in fp32 or wider.
        weights, ids = self.router.top_k * max(self.itemsize, 4), self.router.top_k * INDEX_BYTES
        return HopBytes(
            rows * packed_bytes([self._row, weights, ids]),
            rows * hidden,
            rows * self._row,
            rows * packed_bytes([hidden, weights]),
        )

    @property
    def inner(self) -> HopBytes:
        """Bytes of a token within its nodes."""
        if self.ranks == 1:
            return HopBytes()
        rows = Fraction(self.router.top_k if self.rows is None else self.rows[1])
        hidden = rows * self.width * self.itemsize
        return HopBytes(rows * self._row, hidden, hidden, hidden)

    def sent(self, tokens: Fraction, forwards: int, parts: int) -> tuple[int, int]:
        """Bytes that a rank with so many tokens sends over the outer and the inner hop, numbers of rows included."""

        def of(hop: HopBytes, size: int, numbers: int) -> int:
            rows, ahead = tokens * hop.all_of(forwards), forwards * parts * numbers * COUNT_BYTES
            return int(rows * (size - 1) / size) + ahead * (size - 1)

        on_node = self.router.experts // self.nodes
        return of(self.outer, self.nodes, 1 + on_node), of(self.inner, self.ranks, on_node // self.ranks)
