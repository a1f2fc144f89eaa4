"""Context parallelism in numbers: what a method sends for a layer's attention, what it holds meanwhile, and how long both take.

cp = u r ranks divide every sequence, by Ulysses over u of them and by a ring, or a gather, over r. A rank has T tokens of a
microbatch; with heads exchanged u T tokens of 1/u of its query heads and of the key-value heads that these need. In bytes, with
e of a value, s = max(e, 4) of a sum, and Q, O, K, V elements of a rank's queries, outputs, keys, values with heads exchanged:

                   forward                                   backward
    Ulysses        (u-1)/u (Q + K + V) e, (u-1)/u O e        the same, of gradients
    ring           n (K + V) e                               n (K + V) (e + s);  n = r - 1 steps, fewer behind a window
    gather         (r-1) (K + V) e                           (r-1) (K + V) (e + s)

FLOPs are what is computed: the causal half, or the window. A step of the ring is hidden where it takes no longer than the
attention of a step, 1/r of the rank's. What Ulysses exchanges is exposed; of a gather what takes longer than one block, and all
of it in backward. Merging blocks costs passes over memory, which Ulysses alone has none of.
"""

from dataclasses import astuple, dataclass
from functools import cached_property
from itertools import cycle
from math import gcd

import torch
from transformers import PretrainedConfig

from framework.mesh.context import ContextSlices
from framework.model.flops import attention_reach
from framework.model.load import layer_configs
from framework.parallel.context.blocks import find_steps
from framework.parallel.context.key_values import KeyValues, count_portions, group_heads
from framework.parallel.context.ulysses import share_heads
from framework.parallel.tensor import count_kv_heads
from framework.plan.cluster import Cluster, DeviceLink
from framework.recipe.context_rules import ulysses_degrees

# Of a first row, which travels with Ulysses where documents are packed.
ROW_BYTES = 8


@dataclass(frozen=True)
class AttentionShape:
    """Attention of a layer on a rank of tp. heads, kv_heads: its own; key_dim, value_dim: of a head; reach: tokens that a query
    sees at the most, itself included; is_windowed: these are the last ones."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    reach: int
    is_windowed: bool = False

    def pairs(self, context: int) -> int:
        """Pairs of a query and a key that it sees, of a sequence."""
        reach = min(self.reach, context)
        return reach * context - reach * (reach - 1) // 2


def attention_shapes(config: PretrainedConfig, tp: int, context: int) -> list[AttentionShape | None]:
    """Of each layer, None of one without attention. config: of the text model."""
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


@dataclass(frozen=True)
class Method:
    """How cp is divided: ranks by Ulysses, ranks by a ring, and whether these gather instead."""

    ulysses: int
    ring: int
    gathers: bool = False

    @property
    def name(self) -> str:
        """As parallel.context says it."""
        if self.gathers:
            return "gather"
        if 1 in (self.ulysses, self.ring):
            return "ring" if self.ulysses == 1 else "ulysses"
        return f"[{self.ulysses},{self.ring}]"


def find_methods(cp: int, heads: int) -> list[Method]:
    """Those that divide the heads of a rank of tp."""
    return [*(Method(each, cp // each) for each in ulysses_degrees(cp, heads)), Method(1, cp, gathers=True)]


@dataclass(frozen=True)
class Links:
    """What the ranks of cp compute with and send over. stride: of its ranks, tp; ranks_per_node: neighbours of a node; dtype: of
    attention."""

    cluster: Cluster
    stride: int
    ranks_per_node: int
    dtype: str = "bf16"

    def stays(self, method: Method) -> bool:
        """Whether all ranks of a ring are on one node."""
        return self.stride * method.ulysses * method.ring <= self.ranks_per_node

    def of_ring(self, method: Method) -> DeviceLink:
        """The slowest of a ring's: between nodes where any of its ranks is on another."""
        return self.cluster.device_link(1 if self.stays(method) else 2)

    def attention_s(self, flops: float, *, backward: bool = False) -> float:
        """Seconds of so many FLOPs of attention."""
        return self.cluster.attention_seconds(flops, self.dtype, backward=backward)

    def exchange_s(self, method: Method, num_bytes: float) -> float:
        """Seconds of an all-to-all over Ulysses' ranks: of its bytes a share stays in the node, beside the others."""
        size = method.ulysses
        here = min(size, max(1, self.ranks_per_node // self.stride))
        outside = num_bytes * (size - here) / (size - 1) if size > 1 else 0
        near, far = self.cluster.device_link(1), self.cluster.device_link(2)
        return max(near.seconds(num_bytes - outside), far.seconds(outside))


@dataclass(frozen=True)
class Times:
    """Seconds of a layer's attention: computing; waiting for messages that nothing hides; passes over memory that one rank would
    not make."""

    attention_s: float
    exposed_s: float
    memory_s: float

    @property
    def total_s(self) -> float:
        return self.attention_s + self.exposed_s + self.memory_s

    def __add__(self, other: "Times") -> "Times":
        return Times(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __rmul__(self, times: float) -> "Times":
        return Times(*(times * each for each in astuple(self)))


@dataclass(frozen=True)
class Passes:
    """How often a layer runs for a microbatch before its backward. forwards: 1 without recomputation; attentions: as often, or
    once where what attention gives is kept (memory.kept_operations): heads are still exchanged each time."""

    forwards: int = 1
    attentions: int = 1


@dataclass(frozen=True)
class ContextCost:
    """A method for a layer's attention, of one rank and one microbatch. sequences: of it; context: tokens of a sequence, of all
    ranks. itemsize: bytes of a value. packs: documents are kept apart. index: of the rank along Ulysses."""

    method: Method
    shape: AttentionShape
    sequences: int
    context: int
    itemsize: int
    packs: bool = False
    index: int = 0

    @cached_property
    def slices(self) -> ContextSlices:
        return ContextSlices(self.context, self.method.ulysses, self.method.ring)

    @property
    def tokens(self) -> int:
        """T: tokens of a rank, padding included."""
        return self.sequences * self.slices.tokens_local

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
        return self.tokens * self.method.ulysses * self._kv_heads_inside * (self.shape.key_dim + self.shape.value_dim)

    @property
    def _kv_heads_inside(self) -> int:
        """Key-value heads once heads are exchanged; where query heads use them unevenly, each as often as makes it even."""
        group, own = self.shape.heads // self.shape.kv_heads, self.shape.heads // self.method.ulysses
        return own // gcd(group, own)

    @cached_property
    def num_steps(self) -> int:
        """Steps of the ring with a message; those behind a window have none."""
        return len(find_steps(self.slices, self.shape.reach if self.shape.is_windowed else None))

    @property
    def step_bytes(self) -> tuple[int, int]:
        """What a step of the ring sends, in forward and in backward."""
        return self.keys_values * self.itemsize, self.keys_values * (self.itemsize + self.sum_size)

    @property
    def exchanged_bytes(self) -> tuple[int, int]:
        """What Ulysses sends in forward and in backward."""
        u, shape = self.method.ulysses, self.shape
        if u == 1:
            return 0, 0
        widths = [self._width(share) for share in share_heads(shape.heads, shape.kv_heads, u)]
        out = (u - 1) * self.outputs // u * self.itemsize
        there = self.tokens * (sum(widths) - widths[self.index]) * self.itemsize
        rows = (u - 1) * self.tokens * ROW_BYTES if self.packs else 0
        return there + out + rows, (u - 1) * self.tokens * widths[self.index] * self.itemsize + out

    def _width(self, share: tuple[tuple[int, int], ...]) -> int:
        """Elements of a token in the heads of q, k and v that a rank gets."""
        dims = (self.shape.key_dim, self.shape.key_dim, self.shape.value_dim)
        return sum((stop - start) * dim for (start, stop), dim in zip(share, dims, strict=True))

    @property
    def travelling_bytes(self) -> tuple[int, int]:
        """What ring or gather send in forward and in backward."""
        messages = self.method.ring - 1 if self.method.gathers else self.num_steps
        forward, backward = (messages * each for each in self.step_bytes)
        return forward, backward

    def sent(self, passes: Passes) -> int:
        """What a rank sends for one microbatch."""
        (there, back), (forward, backward) = self.exchanged_bytes, self.travelling_bytes
        return passes.forwards * there + passes.attentions * forward + back + backward

    @property
    def kept_bytes(self) -> int:
        """What is kept for backward beside what a layer of one rank keeps of its tokens: with heads exchanged the output a second
        time, key-value heads that several ranks have, and the first rows of all tokens."""
        u, shape = self.method.ulysses, self.shape
        if u == 1:
            return 0
        own = self.tokens * shape.kv_heads * (shape.key_dim + shape.value_dim)
        rows = u * self.tokens * ROW_BYTES if self.packs else 0
        return (self.outputs + self.keys_values - own) * self.itemsize + rows

    @cached_property
    def portions(self) -> tuple[int, int]:
        """(groups of key-value heads that are attended to one after another, messages in which K/V travel)."""
        tokens = self.slices.tokens_local * self.method.ulysses
        keys = torch.empty(1, self._kv_heads_inside, tokens, 1, device="meta")
        wanted = count_portions(tokens) if self.method.ring > 1 else 1
        groups = group_heads(KeyValues(keys, keys), self.slices.chunks, wanted)
        return len(groups), sum(len(group.portions) for group in groups)

    @property
    def transient_bytes(self) -> int:
        """What is there beside what is kept while the attention computes, the most in backward: messages of K/V, held and
        arriving, and of their sums, added to, leaving and arriving, or all that were gathered, whose sums take their place where
        they are as wide; the sums of a group of heads at home; gradients of queries, keys and values, and of the output. While
        heads are exchanged there is less: two messages, and tensors outside, some of whose counterparts are not yet or no longer
        there."""
        e, s, keys_values, (groups, messages) = self.itemsize, self.sum_size, self.keys_values, self.portions
        if self.method.gathers:
            travelling = self.method.ring * keys_values * (s if s == e else e + s)
        else:
            travelling = keys_values * (2 * e + 3 * s) * (self.num_steps > 0)
        sums = (keys_values * s + self.queries * (s + e)) // groups
        return travelling // messages + sums + (self.queries + keys_values + self.outputs) * e

    @property
    def flops(self) -> tuple[float, float]:
        """Of a rank's attention, forward and backward: two matmuls, and five with the scores that are computed again."""
        pairs = 2.0 * self.sequences * self.shape.heads * self.shape.pairs(self.context) / self.slices.ranks
        key, value = self.shape.key_dim, self.shape.value_dim
        return pairs * (key + value), pairs * (3 * key + 2 * value)

    def step_s(self, links: Links) -> tuple[tuple[float, float], tuple[float, float]]:
        """(seconds of a ring step's messages, of its attention), in forward and in backward, where sums leave beside K/V."""
        link, steps, (_, messages) = links.of_ring(self.method), self.num_steps + 1, self.portions
        forward, backward = (
            (link.seconds(sent, messages), links.attention_s(flops / steps, backward=back))
            for sent, flops, back in zip(self.step_bytes, self.flops, (False, True), strict=True)
        )
        return forward, backward

    def times(self, links: Links, passes: Passes) -> Times:
        """Of all forwards and the backward of a microbatch."""
        there, back = (self._exchange_times(links, each) for each in self.exchanged_bytes)
        forward, backward = self._forward_times(links), self._backward_times(links)
        return passes.forwards * there + passes.attentions * forward + back + backward

    def _exchange_times(self, links: Links, num_bytes: int) -> Times:
        # A message is packed and unpacked: read and written, twice.
        copied = 4 * (self.queries + self.keys_values + self.outputs) * self.itemsize * (self.method.ulysses > 1)
        return Times(0.0, links.exchange_s(self.method, num_bytes), links.cluster.memory_seconds(copied))

    def _forward_times(self, links: Links) -> Times:
        (message_s, block_s), _ = self.step_s(links)
        late = self._late_gather_s(links, block_s) if self.method.gathers else self.num_steps * (message_s - block_s)
        # A block's output is widened, and interpolated into the sum.
        merged = self.num_steps * self.outputs * (self.itemsize + 4 * self.sum_size)
        return Times((self.num_steps + 1) * block_s, max(late, 0.0), links.cluster.memory_seconds(merged))

    def _backward_times(self, links: Links) -> Times:
        _, (message_s, block_s) = self.step_s(links)
        n, link, (_, messages) = self.num_steps, links.of_ring(self.method), self.portions
        if self.method.gathers:  # and nothing hides where sums are scattered
            sums = (self.method.ring - 1) * self.keys_values * self.sum_size
            late = self._late_gather_s(links, block_s) + link.seconds(sums, messages)
        else:  # nor the first keys and values: the rank's own block comes last, under the last sums on their way home
            late = link.seconds(self.step_bytes[0] * (n > 0) / messages) + n * max(0.0, message_s - block_s)
        # Gradients are read, and added to theirs.
        added = n * (self.queries + self.keys_values) * (self.itemsize + 2 * self.sum_size)
        return Times((n + 1) * block_s, late, links.cluster.memory_seconds(added))

    def _late_gather_s(self, links: Links, block_s: float) -> float:
        """What is not hidden of a gather: of each group of heads, the first message is under the block of the rank's own keys."""
        groups, messages = self.portions
        sent_s = links.of_ring(self.method).seconds((self.method.ring - 1) * self.step_bytes[0], messages)
        return sent_s - min(sent_s * groups / messages, block_s)

    def hidden_from(self, links: Links) -> int:
        """The fewest tokens of a rank and sequence from which on a step of the ring is hidden, forward and backward, without
        latencies: bytes grow with them, FLOPs with their square. Without a window."""
        key, value = self.shape.key_dim, self.shape.value_dim
        # Of a rank and step with n tokens, u n with heads exchanged: 2 (u n)^2 / 2 pairs of H/u heads, and u n keys.
        heads = self.shape.heads * self.method.ulysses
        per_pair, per_pair_back = (heads * links.attention_s(1e15, backward=back) / 1e15 for back in (False, True))
        per_token = self.keys_values / self.tokens / links.of_ring(self.method).rate
        forward = per_token * self.itemsize / (per_pair * (key + value))
        backward = per_token * (self.itemsize + self.sum_size) / (per_pair_back * (3 * key + 2 * value))
        return round(max(forward, backward))
