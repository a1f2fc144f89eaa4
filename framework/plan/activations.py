"""Activations of a decoder layer, in closed form: what it keeps for backward.

Korthikanti et al. 2022 count 34 sbh bytes for GPT's layer in 16 bits, of which tensor and sequence parallelism leave 1/t. The
layer that most models have now keeps other tensors. For T tokens on t ranks, of which each holds T' outside of attention and mlp
(T/t with parallel.sequence, else T), hidden size h, q and k features of all queries and of all keys on a rank, a heads on a rank,
i features of the mlp on a rank, e bytes of an activation:

    two RMS norms       2 T' (h (4 + e) + 4)   the input in fp32, what it was normalised to, 1/rms
    inputs of regions   2 T h e                gathered; T' h e each with memory.gathered_inputs=regather, but for a router's
    attention           T (2 q + 2 k) e        queries and keys after rope, values, and what the output projection reads
                        T 4 a                  the logarithm of each softmax's sum, in fp32
    mlp                 T 4 i e                gate, silu(gate), up, and what the down projection reads

and norms of queries and keys, where it has them, T (q + k) (4 + e) + 8 T a. A mixture of E gated experts of i features each, of
which a router chooses k for each token, keeps instead of the mlp, for R rows in its experts:

    router              T" (4 E + 16 k)        softmax in fp32, the chosen experts and their weights
    rows                R (2 h e + 24)         what experts read, what of theirs has come back, and three orders of rows
    experts             R 4 i e                as an mlp

Where experts are whole the router sees T" = T' tokens, and R = T k / t: as many as the rank sends, and as its own experts receive
on average. That is for a uniform router: a rank whose experts get twice the mean holds twice the rows, which no layout tells.
Where experts are slices over tp, T" = T and R = T k. In padded buffers (parallel.expert_padding) R is their room.

While a mixture computes there is more than it keeps, the most in backward: experts narrower than h have their peak where
gradients come in, one more tensor of rows, weighted R/k at a time in fp32, and wide ones inside, where gate and up have their
gradients. In forward it is one more tensor of rows as well, while they are sorted to be sent back.

    transient           max(R h (e + c/k), R (2 i - h) e) + T' h e;  c = 8 where e < 4, else e

T' h e is the gradient of what the mixture gives; where experts are slices and T' < T it is gathered, T h e more. Over two hops it
is that of the rows which have come for a rank's node, N p T' h e (`messages`). With parallel.expert_overlap each half has half of
all this. Every mixture of gated experts has it, whatever else stands in its layer. That is so where rows are dispatched; on one
rank without `ep` transformers' own kernels compute, and hold a few tensors more.

Where no rank of cp divides a row of S tokens, SDPA is given a mask for documents that are kept apart in it (data.pack=documents)
and for a window that is no longer than it: each such layer keeps the mask in the dtype of activations, S e for each of its
tokens, and keys and values for all heads of queries (4 q e in the place of (2 q + 2 k) e). A stage whose layers are computed
again keeps the model's own mask for them, one byte a value: S S, of each sequence if documents are what it tells.

With the auxiliary loss that balances experts each layer keeps its softmax for that loss as well, T" E e, whatever is computed
again.

An activation-checkpointed layer keeps its input, T' h e, and a mixture's choice of experts, T" 4 k. With `selective` it keeps
beside that, of the operations that memory.kept_operations names:

    attention           T (q e + 4 a)          what the output projection reads, the logarithms of the softmax' sums
    q_proj ... up_proj  T q e, T k e, T i e    what they return
    o_proj, down_proj   T' h e                 the sum over ranks
    experts             R (2 i + h) e          what both matmuls of an expert return

and computes again, in matmuls of FLOPs 2 x inputs x outputs of a token, those that are not named; never the last, whose output
backward does not read. `sqrt` keeps the inputs of every g-th layer, and runs the forward of g - 1 of g layers once more.

What an offloaded one (memory.offload.activations) keeps lies in pinned memory of the host between forward and backward. Of all of
them the device then has one at a time, on its way or computing, and where neighbours are offloaded two. The first layer of a
later pipeline stage leaves on the device what the stage has received, T' h e, if it keeps that.

A recurrent mixer is counted (`layer_widths`). What stands beside it, like any layer of another form, is an estimate.

With context parallelism T is what a rank of cp has of the tokens, padding included, and an attention's FLOPs of a token are still
those of the whole context. Ulysses has a layer keep more, and while an attention computes there is more than it keeps: K/V of
other ranks, sums of their gradients (`messages`). By then backward has freed what stands behind the attention.

What stands behind the last layer keeps, for v words on a rank:

    norm and head       T' (h (4 + e) + 4) + T h e     T' h e with memory.gathered_inputs=regather
    logits              T v e with a divided vocabulary or kernels, else T v 4: logarithms of softmax in fp32

and with memory.chunked_loss, for c tokens of a chunk (`model.loss.chunk_size`), in the place of logits

    sums of softmax     T 4                    their logarithms, in fp32
    a chunk, at once    c v (e + max(e, 4))    logits and softmax in fp32, unless the device has kernels (`fuses_loss`): c v e
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, zip_longest
from math import prod

from framework.mesh.token_layout import TokenLayout
from framework.model.kept_outputs import EXPERTS, Policy
from framework.model.loss import chunk_bytes
from framework.model.stage import StageBounds
from framework.parallel.activation_offload import choose_offloaded
from framework.plan.layer_widths import ESTIMATED_BEHIND, ESTIMATED_VALUES, LayerWidths, MixtureWidths
from framework.plan.messages import ContextCost
from framework.plan.policies import POLICIES, Counts, PolicyCost, PolicyCosts, StageActivations
from framework.recipe.schema import Memory

# Share of such a layer that `selective` is assumed to keep, and of its forward that it saves: about Llama's.
SELECTIVE_SHARE = 0.4


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of one rank and one microbatch. All ranks of a run hold as many in a layer."""

    tokens: TokenLayout
    # Features of hidden states, rows of the whole model's output embedding, bytes of an activation.
    width: int
    vocabulary: int
    itemsize: int
    # The form of a layer; None where it has no formula: then its bytes are an estimate.
    layer: LayerWidths | None
    # FLOPs of a token in a layer's forward.
    layer_flops: float
    memory: Memory
    # Ranks of tp, each with a slice of every expert that it computes; 1: experts are whole.
    expert_slices: int
    # Mixture of layers of any form; None without one.
    mixture: MixtureWidths | None
    # The attentions of layers, those that differ, where cp divides sequences.
    contexts: Sequence[ContextCost] = ()
    packs: bool = False  # documents are kept apart, so that each sequence has positions of its own
    # The kind of mask that each layer of the model gives to SDPA, None for none; empty where no layer gives any.
    masks: tuple[str | None, ...] = ()
    dispatches: bool = False  # rows are sent to experts, or dropped
    fuses_loss: bool = False  # the device has kernels for it
    crossing: float = 1.0  # rows of a token that come to ranks for their nodes: N p over two hops
    padding: float = 1.0  # rows that buffers of experts have room for, over those that an even router sends
    # Bytes beside the estimate of each layer, which may be negative: those of its recurrent mixer.
    mixers: tuple[int, ...] = ()

    @cached_property
    def hidden_bytes(self) -> int:
        """Hidden states between two layers."""
        return prod(self.tokens.hidden_shape(self.width)) * self.itemsize

    @cached_property
    def layer_bytes(self) -> int:
        """Bytes that a layer by itself keeps for its backward, where all have one policy; without the mask of some."""
        reads_mask = self.policy == "none" and bool(self.masks) and None not in self.masks
        return self.cost_of(self.policy).kept + self._masked_bytes * reads_mask

    @property
    def policy(self) -> Policy:
        """The recipe's policy of all layers; `auto` chooses for each and has none."""
        policy = self.memory.activation_checkpointing
        assert policy != "auto", "auto is several policies"
        return policy

    def cost_of(self, policy: Policy) -> PolicyCost:
        """Cost of one policy for one layer, without a mask."""
        if policy == "none":
            return PolicyCost(self._all_of_layer, 0, 0.0)
        kept, flops = self._kept_outputs if policy == "selective" else (0, self._recomputed_flops(()))
        kept += self.hidden_bytes + self._choice_bytes + self._balance_bytes
        return PolicyCost(kept, self._all_of_layer - kept + self.hidden_bytes + self._choice_bytes, flops)

    @cached_property
    def costs(self) -> PolicyCosts:
        """Cost of each activation-checkpointing policy for one layer."""
        return PolicyCosts({each: self.cost_of(each) for each in POLICIES}, self.hidden_bytes, self.layer_flops)

    @cached_property
    def transient_bytes(self) -> int:
        """Bytes beside those, and beside what is kept, while a mixture computes or an attention whose keys and values
        travel, by the formulas above; 0 without either."""
        attention = max((each.transient_bytes for each in self.contexts), default=0)
        return max(self._mixture_transient, attention - self._behind_attention, 0)

    @property
    def _mixture_transient(self) -> int:
        if (mixture := self.mixture) is None:
            return 0
        e, rows, inner = self.itemsize, self.rows_in_experts(mixture.top_k), self._inner_of(mixture)
        weighted = rows // mixture.top_k * self.width * (8 if e < 4 else e)
        incoming = int(self.crossing * self.hidden_bytes)
        if self._slices_experts and self.tokens.num_parts > 1:
            incoming += self._num_tokens * self.width * e
        return max(rows * self.width * e + weighted, rows * (2 * inner - self.width) * e) + incoming

    def of_stage(self, stage: StageBounds, counts: Counts) -> "StageActivations":
        """Bytes of a stage on the device. counts: its layers by policy."""
        # The executor holds what a stage has received until its backward. In a narrower dtype a norm keeps a copy in fp32; else,
        # and where the layer is computed again, it is what the first layer keeps.
        num_layers, more = stage.stop - stage.start, self.more_of(stage)
        holds_input = not stage.is_first and counts[-1] == num_layers and self.itemsize < 4
        return StageActivations(
            kept=self.costs.kept(counts, more)
            - self.offloaded_bytes(stage)
            + self._table_bytes
            + self._model_masks(stage, counts)
            + holds_input * self.hidden_bytes,
            # The last norm, and what the head reads.
            head=(self._norm_bytes + self._gathered * self.width * self.itemsize) * stage.is_last,
            logits=self.logits_bytes * stage.is_last,
            left=self._factor_bytes * num_layers
            + self._embedding_factor_bytes * stage.is_first
            + self._head_factor_bytes * stage.is_last,
            recomputed=self.costs.recomputed(counts, more),
            transient=self.transient_bytes,
            chunk=self.chunk_bytes * stage.is_last,
            hidden=self.hidden_bytes,
        )

    def offloaded_bytes(self, stage: StageBounds) -> int:
        """Bytes kept on the host for the backward of a stage."""
        sizes = self._offloaded_layers(stage)
        if not any(sizes):
            return 0
        # The executor holds the input of its first layer on the device. In a narrower dtype a layer that is not checkpointed
        # keeps a copy of it in fp32, and that leaves.
        keeps_input = self.policy == "full" or self.itemsize >= 4
        return sum(sizes) - (self.hidden_bytes if keeps_input and not stage.is_first else 0)

    def transfer_bytes(self, stage: StageBounds) -> int:
        """Bytes of offloaded layers of a stage on the device at once, beside what stays there, while some layer computes."""
        return max(map(sum, pairwise((0, *self._offloaded_layers(stage)))), default=0)

    def _offloaded_layers(self, stage: StageBounds) -> tuple[int, ...]:
        """Bytes of each layer that is offloaded, 0 of others."""
        chosen = choose_offloaded(self.memory.offload.activations, stage.stop - stage.start)
        return tuple(self.bytes_of_layer(index) * each for index, each in enumerate(chosen, start=stage.start))

    def bytes_of_layer(self, index: int) -> int:
        """`layer_bytes` and, where it is not computed again, those of the layer's recurrent mixer. index: in the model."""
        has_mixers = self.policy == "none" and self.mixers
        return self.layer_bytes + (self.mixers[index] if has_mixers else 0)

    @cached_property
    def _num_tokens(self) -> int:
        """T."""
        return self.tokens.sequences * self.tokens.context

    @cached_property
    def _num_outside(self) -> int:
        """T', of tokens outside of attention and mlp."""
        return self.tokens.sequences * self.tokens.tokens_local

    @property
    def _kept_outputs(self) -> tuple[int, float]:
        """(bytes, FLOPs of a token) that `selective` keeps beside the input, and computes again."""
        # Where rows are not dispatched transformers' kernels multiply experts: none of our matmuls, and so not kept.
        kept = [name for name in self.memory.kept_operations if name != EXPERTS or self.dispatches]
        if self.layer is None:
            share = SELECTIVE_SHARE if kept else 0.0
            return int(share * self._all_of_layer), (1 - share) * self._recomputed_flops(())
        sizes = self._output_bytes(self.layer)
        return sum(sizes[name] for name in kept if name in sizes), self._recomputed_flops(kept)

    def _output_bytes(self, widths: LayerWidths) -> dict[str, int]:
        """Bytes that the operations of a layer return, by name."""
        e, tokens, outside = self.itemsize, self._num_tokens, self.hidden_bytes
        q, kv, heads = widths.of_rank(self.tokens.tp.size)
        sizes = {"q_proj": tokens * q * e, "o_proj": outside, **dict.fromkeys(("k_proj", "v_proj"), tokens * kv * e)}
        sizes["attention"] = tokens * (q * e + 4 * heads)
        if (mixture := widths.mixture) is not None:
            return sizes | {
                EXPERTS: self.rows_in_experts(mixture.top_k) * (2 * self._inner_of(mixture) + self.width) * e
            }
        return sizes | dict.fromkeys(("gate_proj", "up_proj"), tokens * self._mlp_inner * e) | {"down_proj": outside}

    def _recomputed_flops(self, kept: Collection[str]) -> float:
        """FLOPs of a token in the recomputed part of a layer; for a layer of another form, of its whole forward."""
        widths = self.layer
        if widths is None:
            return self.layer_flops
        h, mixture, slices = widths.hidden, widths.mixture, self.tokens.slices
        sequence_length = self.tokens.context if slices is None else slices.context  # of all ranks
        flops = {
            "q_proj": 2.0 * h * widths.q,
            "k_proj": 2.0 * h * widths.kv,
            "v_proj": 2.0 * h * widths.kv,
            "o_proj": 2.0 * widths.q * h,
            "attention": 4.0 * widths.q * sequence_length,
        }
        if mixture is None:
            flops |= dict.fromkeys(("gate_proj", "up_proj"), 2.0 * h * widths.inner)
        else:
            flops |= {EXPERTS: 6.0 * h * mixture.inner * mixture.top_k}
        return sum(size for name, size in flops.items() if name not in kept)

    @cached_property
    def _choice_bytes(self) -> int:
        """A mixture's choice of experts, which a recomputation takes over."""
        mixture = None if self.layer is None else self.layer.mixture
        return 0 if mixture is None else 4 * mixture.top_k * self._num_routed

    @cached_property
    def _balance_bytes(self) -> int:
        """Softmax of a router's logits, which the auxiliary loss keeps of each layer, whatever is computed again."""
        mixture = None if self.layer is None else self.layer.mixture
        return self._num_routed * mixture.experts * self.itemsize if mixture is not None and mixture.is_balanced else 0

    @property
    def _num_routed(self) -> int:
        """Tokens that a rank's router sees."""
        return self._num_tokens if self._slices_experts else self._num_outside

    @cached_property
    def _all_of_layer(self) -> int:
        """Bytes that a layer keeps without checkpointing, by the formulas above."""
        exchanged = max((each.kept_bytes for each in self.contexts), default=0)
        if self.layer is None:
            return self.hidden_bytes * ESTIMATED_VALUES + exchanged
        e, tokens, (q, kv, heads) = self.itemsize, self._num_tokens, self.layer.of_rank(self.tokens.tp.size)
        attention = self._gathered * self.width * e + tokens * (2 * (q + kv) * e + 4 * heads)
        if self.layer.has_qk_norms:
            attention += tokens * ((q + kv) * (4 + e) + 8 * heads)
        return self._norm_bytes + attention + exchanged + self._behind_attention

    @cached_property
    def _behind_attention(self) -> int:
        """The part of those bytes that the second norm and the mlp, or mixture, keep."""
        if self.layer is None:
            return self.hidden_bytes * ESTIMATED_BEHIND
        if self.layer.mixture is not None:
            return self._norm_bytes + self._mixture_bytes(self.layer.mixture)
        features = self._gathered * self.width + self._num_tokens * 4 * self._mlp_inner
        return self._norm_bytes + features * self.itemsize

    @property
    def _norm_bytes(self) -> int:
        return self._num_outside * (self.width * (4 + self.itemsize) + 4)

    @property
    def _gathered(self) -> int:
        """Tokens of a region's input that is kept."""
        return self._num_tokens if self.memory.gathered_inputs == "keep" else self._num_outside

    @property
    def _mlp_inner(self) -> int:
        """Features inside of a layer's mlp on a rank; 0 for a layer of another form."""
        return 0 if self.layer is None else -(-self.layer.inner // self.tokens.tp.size)

    def _inner_of(self, mixture: MixtureWidths) -> int:
        """Features inside of one expert on a rank."""
        return -(-mixture.inner // (self.tokens.tp.size if self._slices_experts else 1))

    def _mixture_bytes(self, mixture: MixtureWidths) -> int:
        """Bytes that a mixture keeps, its input included, where the router is uniform. The router keeps its input whole,
        also where others gather it again."""
        e, routed = self.itemsize, self._num_routed
        router = routed * (4 * mixture.experts + 16 * mixture.top_k)
        row = (2 * self.width + 4 * self._inner_of(mixture)) * e + 24
        return routed * self.width * e + router + self.rows_in_experts(mixture.top_k) * row + self._balance_bytes

    def rows_in_experts(self, top_k: int) -> int:
        """Rows in the buffers of a mixture's experts: those that a rank sends where the router is uniform, and padding."""
        return int(self.padding * self.rows_routed(top_k))

    def rows_routed(self, top_k: int) -> int:
        """Rows that a rank sends to a mixture's experts, and that its own compute where the router is uniform."""
        return self._num_tokens * top_k // (1 if self._slices_experts else self.tokens.tp.size)

    @property
    def _slices_experts(self) -> bool:
        """Whether each rank of `tp` has a slice of every expert that it computes, on the rows of all of them."""
        return self.expert_slices == self.tokens.tp.size

    @cached_property
    def _table_bytes(self) -> int:
        """Cosines and sines of the positions of a rank's tokens, computed once for all layers of a stage: by the model for whole
        sequences at once; for slices and packed documents, whose positions are given to it, of each sequence by itself."""
        if self.layer is None:
            return 0
        is_divided = self.tokens.slices is not None and self.tokens.slices.ranks > 1
        rows = self.tokens.sequences if is_divided or self.packs else 1
        return 2 * rows * self.tokens.context * (self.layer.q // self.layer.heads) * self.itemsize

    def more_of(self, stage: StageBounds) -> tuple[int, ...]:
        """Bytes that each layer of a stage keeps beside those of `cost_of`: for its mask, for its recurrent mixer."""
        masks = (self._masked_bytes * (mask is not None) for mask in self.masks[stage.start : stage.stop])
        return tuple(map(sum, zip_longest(masks, self.mixers[stage.start : stage.stop], fillvalue=0)))

    @property
    def _masked_bytes(self) -> int:
        """Bytes that a layer keeps for a mask: it, in the dtype of activations, and keys and values of all query heads."""
        q, kv, _ = (0, 0, 0) if self.layer is None else self.layer.of_rank(self.tokens.tp.size)
        return self._num_tokens * (self.tokens.context + 2 * (q - kv)) * self.itemsize

    def _model_masks(self, stage: StageBounds, counts: Counts) -> int:
        """The model's own masks, a byte for each value, which layers that are computed again keep: one for each kind of
        attention, of each sequence where documents differ."""
        kinds = set(self.masks[stage.start : stage.stop][: sum(counts[:-1])]) - {None}
        return len(kinds) * (self.tokens.sequences if self.packs else 1) * self.tokens.context**2

    @cached_property
    def _factor_bytes(self) -> int:
        """Factors of the matmuls of a layer's weight gradients: inputs of linear layers, gradients of outputs, of a region."""
        widths = self.layer
        if widths is None:
            return self._all_of_layer
        e, tokens, h, (q, kv, _) = self.itemsize, self._num_tokens, self.width, widths.of_rank(self.tokens.tp.size)
        attention = 2 * tokens * (h + q + kv)
        if (mixture := widths.mixture) is not None:
            inner = self._inner_of(mixture)
            # Gradients of stacked weights that autograd brings are there at once, whole.
            factors = self.rows_in_experts(mixture.top_k) * (2 * h + 3 * inner)
            return (attention + (factors if self.dispatches else mixture.experts * 3 * h * inner)) * e
        return (attention + tokens * (2 * h + 3 * self._mlp_inner)) * e

    @property
    def _embedding_factor_bytes(self) -> int:
        """The same for the embedding: gradients of its rows; with a divided vocabulary the gradient of the rank's part itself."""
        return (self._words if self.tokens.tp.size > 1 else self._num_tokens) * self.width * self.itemsize

    @cached_property
    def _head_factor_bytes(self) -> int:
        """The same for the head; where the loss is chunked, the sum of its weight's gradient over chunks."""
        of_all = self._num_tokens * (self.width + self._words) * self.itemsize
        return self._words * self.width * max(self.itemsize, 4) if self.memory.chunked_loss else of_all

    @cached_property
    def logits_bytes(self) -> int:
        """Bytes of logits, or of what the loss keeps in their place."""
        e, is_narrow = self.itemsize, self.tokens.tp.size > 1 or self.fuses_loss
        if self.memory.chunked_loss:
            return self._num_tokens * max(e, 4)
        return self._num_tokens * self._words * (e if is_narrow else max(e, 4))

    @property
    def _words(self) -> int:
        return -(-self.vocabulary // self.tokens.tp.size)

    @property
    def loss_temporaries(self) -> int:
        """Bytes beside those kept while the whole loss is computed by torch's operations: without a divided vocabulary logits, in
        compute dtype and if that is narrower in fp32; with it a copy in fp32. In chunks: `chunk_bytes`."""
        if self.memory.chunked_loss or self.fuses_loss:
            return 0
        e, is_divided = self.itemsize, self.tokens.tp.size > 1
        return self._num_tokens * self._words * (max(e, 4) + (0 if is_divided or e >= 4 else e))

    @property
    def forward_bytes(self) -> int:
        """The most bytes that a layer holds in a forward without autograd: in its mlp two factors and their product, the norm's
        output, and what is added behind the mlp. Of another form or with a mixture as much as it keeps."""
        if self.mixture is not None or self.layer is None:
            return self._all_of_layer + self.transient_bytes
        features = 3 * self._num_tokens * self._mlp_inner + self._gathered * self.width
        return features * self.itemsize + self.hidden_bytes

    @property
    def backward_temporaries(self) -> int:
        """Gradients inside of a layer, beside what the layer keeps and what of that has gone: of the mlp's features twice, and of
        hidden states. Of a mixture `transient_bytes` has them."""
        if self.mixture is not None or self.layer is None:
            return 0
        gathered = self.width * (self.tokens.num_parts > 1)
        return self._num_tokens * (2 * self._mlp_inner + gathered) * self.itemsize + self.hidden_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes beside those kept while a chunk of the loss is computed; 0 where it is not chunked."""
        sizes = self._num_tokens, self._words, self.itemsize
        return chunk_bytes(*sizes, self.fuses_loss) if self.memory.chunked_loss else 0
