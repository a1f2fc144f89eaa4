"""Bytes of context parallelism: what a method sends for a layer's attention, and what a rank holds for it.

cp = u r ranks divide every sequence, by Ulysses over u of them and by a ring, or a gather, over r. A rank has T tokens of a
microbatch; with heads exchanged u T tokens of 1/u of its query heads and of the key-value heads that these need. In bytes, with
e of a value, s = max(e, 4) of a sum, and Q, O, K, V elements of a rank's queries, outputs, keys, values with heads exchanged:

                   forward                                   backward
    Ulysses        (u-1)/u (Q + K + V) e, (u-1)/u O e        the same, of gradients
    ring           n (K + V) e                               n (K + V) (e + s);  n = r - 1 steps, fewer behind a window
    gather         (r-1) (K + V) e                           (r-1) (K + V) (e + s)

Its seconds are those of the time model (exposure.py), which `plan` compares for all methods.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, pairwise
from math import gcd

import torch
from transformers import PretrainedConfig

from framework.mesh.token_layout import ContextSlices
from framework.model.flops import attention_reach
from framework.model.load import layer_configs
from framework.parallel.attention.blocks import KeyValues, count_portions, find_steps, group_heads
from framework.parallel.attention.ulysses import share_heads
from framework.parallel.tensor.partition import count_kv_heads
from framework.plan.candidate import Candidate
from framework.recipe.derive import ulysses_degrees


@dataclass(frozen=True)
class AttentionShape:
    """Attention of a layer on a rank of tp."""

    heads: int
    kv_heads: int
    key_dim: int
    """Features of a head's queries and keys."""
    value_dim: int
    reach: int
    """Tokens that a query sees at the most, itself included."""
    is_windowed: bool = False
    """Whether these are the last ones."""

    def pairs(self, context: int) -> int:
        """Pairs of a query and a key that it sees, in a sequence of `context` tokens."""
        reach = min(self.reach, context)
        return reach * context - reach * (reach - 1) // 2


def attention_shapes(config: PretrainedConfig, tp: int, context: int) -> list[AttentionShape | None]:
    """The attention of each layer, None for one without. config: of the text model."""
    reaches, layers = attention_reach(config, context), cycle(layer_configs(config))
    # Chunks are documents to us: what lies before one is known to be unseen only when rows have come.
    windowed = [kind != "chunked_attention" for kind in getattr(config, "layer_types", None) or reaches]
    return [
        _read_shape(layer, tp, reach, is_windowed and reach < context)
        for layer, reach, is_windowed in zip(layers, reaches, windowed, strict=False)
    ]


def _read_shape(config: PretrainedConfig, tp: int, reach: int, is_windowed: bool) -> AttentionShape | None:
    if not reach or not getattr(config, "num_attention_heads", None):
        return None
    heads, kv_heads = config.num_attention_heads, count_kv_heads(config)
    key_dim = value_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if getattr(config, "kv_lora_rank", None):  # latent attention: keys and values of every head are made before it
        key_dim, value_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    return AttentionShape(heads // tp, kv_heads // min(tp, kv_heads), key_dim, value_dim, reach, is_windowed)


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
