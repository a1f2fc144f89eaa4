"""Activations of a decoder layer, in closed form: what it keeps for backward, and what it sends over `tp`.

Korthikanti et al. 2022 count 34 sbh bytes for GPT's layer in 16 bits, of which tensor and sequence parallelism leave 1/t. The
layer that most models have now keeps other tensors. For T tokens on t ranks, of which each holds T' outside of attention and mlp
(T/t with parallel.sequence, else T), hidden size h, q and k features of all queries and of all keys on a rank, a heads on a
rank, i features of the mlp on a rank, e bytes of an activation:

    two RMS norms       2 T' (h (4 + e) + 4)   the input in fp32, what it was normalised to, 1/rms
    inputs of regions   2 T h e                gathered; T' h e each with memory.gathered_inputs=regather
    attention           T (2 q + 2 k) e        queries and keys after rope, values, and what the output projection reads
                        T 4 a                  the logarithm of each softmax's sum, in fp32
    mlp                 T 4 i e                gate, silu(gate), up, and what the down projection reads

An activation-checkpointed layer keeps its input, T' h e. What stands behind the last layer keeps, for v words on a rank:

    norm and head       T' (h (4 + e) + 4) + T h e
    logits              T v e with a divided vocabulary or memory.chunked_loss, else T v 4: logarithms of softmax in fp32
"""

from dataclasses import dataclass
from math import prod

from torch import nn
from transformers import PreTrainedModel

from framework.mesh.token_layout import TokenLayout
from framework.model.stage import StageBounds
from framework.model.units import find_layers
from framework.recipe.schema import Memory

# Hidden values that a layer of another form is taken to keep: GPT's in 16 bits, without the matrix of its attention
# (Korthikanti et al. 2022, section 4: 34 s b h bytes).
ESTIMATED_VALUES = 17

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}


@dataclass(frozen=True)
class LayerWidths:
    """Features of a whole layer of Llama's form. kv_heads: of key-value heads."""

    hidden: int
    q: int
    kv: int
    heads: int
    kv_heads: int
    inner: int


def layer_widths(model: PreTrainedModel) -> LayerWidths | None:
    """From the shapes of the first layer; None if it is not two RMS norms, a softmax attention and a gated mlp."""
    found = find_layers(model)
    if found is None:
        return None
    parts = {
        name: module
        for name, module in found[1][0].named_modules()
        if any(True for _ in module.parameters(recurse=False))
    }
    linears = {name.rpartition(".")[2]: module for name, module in parts.items() if isinstance(module, nn.Linear)}
    norms = [type(module).__name__ for name, module in parts.items() if not isinstance(module, nn.Linear)]
    if set(linears) != ATTENTION | MLP or len(norms) != 2 or not all("RMSNorm" in norm for norm in norms):
        return None
    config = model.config.get_text_config()
    outputs = {name: linear.out_features for name, linear in linears.items()}
    return LayerWidths(
        hidden=linears["q_proj"].in_features,
        q=outputs["q_proj"],
        kv=outputs["k_proj"],
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        inner=outputs["up_proj"],
    )


@dataclass(frozen=True)
class Activations:
    """Bytes of activations of one rank, of one microbatch. All ranks of a run hold as many in a layer.

    tokens: the rank's. width: of hidden states. vocabulary: of the whole model. itemsize: bytes of an activation. layer: the
    form of a layer, None where it has no formula: then its bytes are an estimate. memory: the recipe's.
    """

    tokens: TokenLayout
    width: int
    vocabulary: int
    itemsize: int
    layer: LayerWidths | None
    memory: Memory

    @property
    def hidden_bytes(self) -> int:
        """Hidden states between two layers."""
        return prod(self.tokens.hidden_shape(self.width)) * self.itemsize

    @property
    def layer_bytes(self) -> int:
        """What is kept for the backward of one layer."""
        return self.hidden_bytes if self.is_checkpointed else self._all_of_layer

    @property
    def recomputed_bytes(self) -> int:
        """What is there beside that while a checkpointed layer is computed again."""
        return self._all_of_layer if self.is_checkpointed else 0

    @property
    def is_checkpointed(self) -> bool:
        """Whether layers keep their input only."""
        return self.memory.activation_checkpointing == "full"

    def stage_bytes(self, stage: StageBounds) -> int:
        """What is kept for the backward of a stage."""
        return self.layer_bytes * (stage.stop - stage.start) + self._head_bytes * stage.is_last

    @property
    def sent_per_layer(self) -> int:
        """What a rank sends over `tp` for one layer.

        With A bytes of hidden states and n ranks, each of two regions (attention and mlp) moves 2 (n-1)/n A in forward and again
        in backward: an all-reduce, or with parallel.sequence a gather and a reduce-scatter, which are the same bytes.
        """
        n = self.tokens.tp.size
        return 2 * 2 * 2 * (n - 1) * self._num_tokens * self.width * self.itemsize // n

    @property
    def _num_tokens(self) -> int:
        return self.tokens.sequences * self.tokens.context

    @property
    def _all_of_layer(self) -> int:
        """What a layer keeps without checkpointing, by the formulas above."""
        if self.layer is None:
            return self.hidden_bytes * ESTIMATED_VALUES
        widths, e, t = self.layer, self.itemsize, self.tokens.tp.size
        tokens, shard = self._num_tokens, self.tokens.sequences * self.tokens.tokens_local
        norms = 2 * shard * (widths.hidden * (4 + e) + 4)
        regathers = self.memory.gathered_inputs == "regather"
        inputs = 2 * (shard if regathers else tokens) * widths.hidden * e
        kv = widths.kv // min(t, widths.kv_heads)
        attention = tokens * (2 * (widths.q // t + kv) * e + 4 * widths.heads // t)
        mlp = tokens * 4 * -(-widths.inner // t) * e
        return norms + inputs + attention + mlp

    @property
    def _head_bytes(self) -> int:
        tokens, shard = self._num_tokens, self.tokens.sequences * self.tokens.tokens_local
        e, t = self.itemsize, self.tokens.tp.size
        kept_logit = e if t > 1 or self.memory.chunked_loss else max(e, 4)
        hidden = shard * (self.width * (4 + e) + 4) + tokens * self.width * e
        return hidden + tokens * -(-self.vocabulary // t) * kept_logit
