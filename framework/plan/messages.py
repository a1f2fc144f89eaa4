"""Bytes of a layer's messages in closed form: what a rank sends over `tp`, over `cp` and over `ep`, and holds for it.

**Over tp** hidden states cross the borders of a layer's regions, and some is summed within them. Bytes that one of n ranks
sends for each token in forward and backward, with D hidden features, e bytes of a value, max(e, 4) of a sum, counted in units
of 4 (n-1)/n, an all-reduce either way, or a gather and a reduce-scatter:

    region              D e                   attention, recurrent mixer, mlp, mixture, shared experts
    joined mixture      D e / 2               whole experts, tokens not divided: results are gathered, and gradients
    summed layer        N e                   N outputs that all ranks go on with within a region (x_proj of Mamba-1)
    shared rows         N e / 2               N outputs that ranks have alike (B, C, dt of Mamba-2): gradients are summed
    norm                G max(e, 4)           over features of several ranks; G groups of them, 1 but for a gated norm

**Over cp** u r ranks divide every sequence, by Ulysses over u of them and by a ring, or a gather, over r. A rank has T tokens
of a microbatch; with heads exchanged u T tokens of 1/u of its query heads and of the key-value heads that these need. In
bytes, with e of a value, s = max(e, 4) of a sum, and Q, O, K, V elements of a rank's queries, outputs, keys, values with
heads exchanged:

                   forward                                   backward
    Ulysses        (u-1)/u (Q + K + V) e, (u-1)/u O e        the same, of gradients
    ring           n (K + V) e                               n (K + V) (e + s);  n = r - 1 steps, fewer behind a window
    gather         (r-1) (K + V) e                           (r-1) (K + V) (e + s)

**Over ep** a token goes to its experts and back in both hops of `parallel/experts/route.py`: N p rows over the outer one, k
over the inner one (`model/experts.py`), each part of the ranks' own included; in padded buffers as many as these have
room for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from math import gcd

import torch
from transformers import PreTrainedModel

from framework.errors import ModelError
from framework.mesh.token_layout import ContextSlices, TokenLayout
from framework.model.experts import Router, capacity_of, count_all_experts, find_room
from framework.model.units import Unit
from framework.parallel.attention.blocks import KeyValues, count_portions, find_steps, group_heads
from framework.parallel.attention.ulysses import share_heads
from framework.parallel.experts.rows import ROW_CODEC, packed_bytes
from framework.parallel.tensor.find_regions import find_regions
from framework.parallel.tensor.partition import FEATURES, count_heads
from framework.parallel.tensor.split import NO_HEADS
from framework.plan.candidate import Candidate
from framework.plan.layer_widths import AttentionShape
from framework.recipe.derive import ulysses_degrees
from framework.recipe.schema import Recipe


@dataclass(frozen=True)
class TensorMessages:
    """A layer's regions, mixtures of whole experts, outputs of summed layers, shared rows, and groups of norms."""

    regions: int
    mixtures: int = 0
    summed: int = 0
    shared: int = 0
    normed: int = 0

    def sent(self, tokens: TokenLayout, width: int, itemsize: int) -> int:
        """Bytes that a rank sends for one microbatch, without recomputation. width: D."""
        joined = self.mixtures / 2 if tokens.num_parts == 1 else 0.0
        of_token = ((self.regions + joined) * width + self.summed + self.shared / 2) * itemsize + self.normed * max(
            itemsize, 4
        )
        return int(4 * (tokens.tp.size - 1) * tokens.sequences * tokens.context * of_token) // tokens.tp.size


# Messages of a layer that no rule of tensor parallelism knows: one each for attention and mlp.
USUAL = TensorMessages(2)


def find_tensor_messages(
    model: PreTrainedModel, units: Sequence[Unit], tp_plan: Mapping[str, str], tp: int, slices_experts: bool
) -> list[TensorMessages]:
    """The messages of each layer on ranks of `tp`; `USUAL` ones in a model that they do not split. tp_plan: the recipe's."""
    names = [name for unit in units for name in unit.modules]
    layers = [unit for unit in units if unit.is_layer]
    try:
        regions = find_regions(model, tp_plan, names, not slices_experts)
    except ModelError:
        return [USUAL] * len(layers)
    found = []
    for layer in layers:
        own = [each for each in regions if each.name.startswith(f"{layer.root}.")]
        summed = shared = normed = 0
        for region in own:
            has_heads = any(role.arrangement not in FEATURES for role in region.roles.values())
            counts = count_heads(model, region) if has_heads else NO_HEADS
            for name, role in region.roles.items():
                weight = getattr(model.get_submodule(name), "weight", None)
                if role.kind == "sum" and weight is not None:
                    summed += len(weight)
                elif role.kind == "column" and weight is not None and weight.ndim == 2:
                    segments = counts.count_whole(role.arrangement, tp)
                    shared += sum(counts.linear[role.arrangement][-segments:]) if segments else 0
                elif role.kind == "norm" and weight is not None and weight.ndim == 1:
                    groups = counts.kv if role.arrangement == "linear_value_heads" else 1
                    normed += groups * (groups % tp > 0)
        mixtures = 0 if slices_experts else len(count_all_experts(model.get_submodule(layer.root)))
        found.append(TensorMessages(len(own), mixtures, summed, shared, normed))
    return found


def find_methods(c: Candidate, heads: int) -> list[Candidate]:
    """The layout with each method whose Ulysses degree divides the heads of a rank of tp."""
    found = [{"ulysses": degree, "is_gather": False} for degree in ulysses_degrees(c.cp, heads)]
    return [c.changed(each) for each in (*found, {"ulysses": 1, "is_gather": True})]


@dataclass(frozen=True)
class MixerCost:
    """Bytes that a rank sends for a recurrent mixer and one microbatch, whatever the length of a sequence: in forward the windows
    of its pieces to who has the next ones, and the maps of all its pieces to all ranks; in backward as many of gradients."""

    slices: ContextSlices
    sequences: int
    channels: int
    """Channels of the convolution on a rank of tp."""
    taps: int
    state: int
    """Elements of the map of a piece."""
    itemsize: int

    def sent(self, passes: "Passes") -> int:
        """Bytes that a rank sends."""
        maps = (self.slices.ranks - 1) * self.slices.chunks * self.state * max(self.itemsize, 4)
        window = min(self.taps - 1, self.slices.part) * self.channels * self.itemsize
        forward, backward = self._messages
        return self.sequences * (passes.forwards * (forward * window + maps) + backward * window + maps)

    @property
    def _messages(self) -> tuple[int, int]:
        """Pieces whose window goes to another rank, and those whose window has come from one: as often as it spans pieces."""
        slices = self.slices
        held = sorted((each, rank) for rank in range(slices.ranks) for each in slices.of_rank(rank).intervals)
        crossings = [(one, other) for (_, one), (_, other) in pairwise(held) if one != other]
        hops = -(-(self.taps - 1) // slices.part)
        leaving, coming = (sum(pair[end] == slices.rank for pair in crossings) for end in (0, 1))
        return hops * leaving, hops * coming


@dataclass(frozen=True)
class Passes:
    """Forwards of a layer for a microbatch. forwards: 1 without recomputation; attentions: as many, or 1 where attention's output
    is kept (memory.kept_operations): heads are still exchanged each time."""

    forwards: int = 1
    attentions: int = 1


@dataclass(frozen=True)
class ContextCost:
    """Bytes of a layout's method for a layer's attention, of one rank and one microbatch. c: its sequences are cut by cp."""

    c: Candidate
    shape: AttentionShape
    itemsize: int
    index: int = 0
    """Index of the rank along Ulysses."""

    @cached_property
    def slices(self) -> ContextSlices:
        return ContextSlices(self.c.context, self.c.ulysses, self.c.ring)

    @property
    def tokens(self) -> int:
        """T: tokens of a rank, padding included."""
        return self.c.sequences * self.slices.tokens_local

    @property
    def sum_size(self) -> int:
        """Bytes of a number that is summed over blocks or ranks."""
        return max(self.itemsize, 4)

    @property
    def queries(self) -> int:
        """Q, in elements."""
        return self.tokens * self.shape.heads * self.shape.key_dim

    @property
    def outputs(self) -> int:
        """O, in elements."""
        return self.tokens * self.shape.heads * self.shape.value_dim

    @property
    def keys_values(self) -> int:
        """K + V, in elements: of the heads that the rank's queries use."""
        return self.tokens * self.c.ulysses * self._kv_heads_inside * (self.shape.key_dim + self.shape.value_dim)

    @property
    def _kv_heads_inside(self) -> int:
        """Key-value heads once heads are exchanged; where query heads use them unevenly, each as often as makes it even."""
        group, own = self.shape.heads // self.shape.kv_heads, self.shape.heads // self.c.ulysses
        return own // gcd(group, own)

    @cached_property
    def num_steps(self) -> int:
        """Steps of the ring with a message; those behind a window have none."""
        return len(find_steps(self.slices, self.shape.reach if self.shape.is_windowed else None))

    @property
    def step_bytes(self) -> tuple[int, int]:
        """Bytes that a step of the ring sends, in forward and in backward."""
        return self.keys_values * self.itemsize, self.keys_values * (self.itemsize + self.sum_size)

    @property
    def exchanged_bytes(self) -> tuple[int, int]:
        """Bytes that Ulysses sends in forward and in backward."""
        u, shape = self.c.ulysses, self.shape
        if u == 1:
            return 0, 0
        widths = [self._width(share) for share in share_heads(shape.heads, shape.kv_heads, u)]
        out = (u - 1) * self.outputs // u * self.itemsize
        there = self.tokens * (sum(widths) - widths[self.index]) * self.itemsize
        return there + out, (u - 1) * self.tokens * widths[self.index] * self.itemsize + out

    def _width(self, share: tuple[tuple[int, int], ...]) -> int:
        """Elements of a token in the heads of q, k and v that a rank gets."""
        dims = (self.shape.key_dim, self.shape.key_dim, self.shape.value_dim)
        return sum((stop - start) * dim for (start, stop), dim in zip(share, dims, strict=True))

    @property
    def travelling_bytes(self) -> tuple[int, int]:
        """Bytes that a ring or a gather sends in forward and in backward."""
        messages = self.c.ring - 1 if self.c.is_gather else self.num_steps
        forward, backward = (messages * each for each in self.step_bytes)
        return forward, backward

    def sent(self, passes: Passes) -> int:
        """Bytes that a rank sends for one microbatch."""
        (there, back), (forward, backward) = self.exchanged_bytes, self.travelling_bytes
        return passes.forwards * there + passes.attentions * forward + back + backward

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for backward beyond what a layer without cp keeps of its tokens: with heads exchanged the output a second
        time, and key-value heads that several ranks have."""
        u, shape = self.c.ulysses, self.shape
        if u == 1:
            return 0
        own = self.tokens * shape.kv_heads * (shape.key_dim + shape.value_dim)
        return (self.outputs + self.keys_values - own) * self.itemsize

    @cached_property
    def portions(self) -> tuple[int, int]:
        """(groups of key-value heads that are attended to one after another, messages in which K/V travel)."""
        tokens = self.slices.tokens_local * self.c.ulysses
        keys = torch.empty(1, self._kv_heads_inside, tokens, 1, device="meta")
        wanted = count_portions(tokens) if self.c.ring > 1 else 1
        groups = group_heads(KeyValues(keys, keys), self.slices.chunks, wanted)
        return len(groups), sum(len(group.portions) for group in groups)

    @property
    def transient_bytes(self) -> int:
        """Peak bytes beside the kept ones while attention computes, in backward: messages of K/V, held and
        arriving, and of their sums, added to, leaving and arriving, or all that were gathered, whose sums take their place where
        they are as wide; the sums of a group of heads at home; gradients of queries, keys and values, and of the output. While
        heads are exchanged there is less: two messages, and tensors outside, some of whose counterparts are not yet or no longer
        there."""
        e, s, keys_values, (groups, messages) = self.itemsize, self.sum_size, self.keys_values, self.portions
        if self.c.is_gather:
            travelling = self.c.ring * keys_values * (s if s == e else e + s)
        else:
            travelling = keys_values * (2 * e + 3 * s) * (self.num_steps > 0)
        sums = (keys_values * s + self.queries * (s + e)) // groups
        return travelling // messages + sums + (self.queries + keys_values + self.outputs) * e


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
