"""Operators of a layer, the embedding and the head, and their seconds on one rank for one microbatch.

A layer is read off the model on meta: its linear layers with their roles under tensor parallelism, its attention, its stacked
experts, its norms. What it multiplies beyond these (a convolution, a state-space scan) is counted by the FLOPs of its unit
as one matmul: `estimated` is the share of the layer's FLOPs that is so.

    forward            Y = X W^T, attention, elementwise
    input gradient     dX = dY W, attention's backward, elementwise backward
    weight gradient    dW += dY^T X

T tokens of a rank and microbatch with all of tp inside of attention and mlp; T' of them outside (T/tp with sequence
parallelism); R rows in a rank's experts.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.model.adapters import is_adapter
from framework.model.experts import count_all_experts
from framework.model.flops import flops_per_token, unit_flops
from framework.model.units import Unit, find_mixers
from framework.parallel.tensor.rules import FAMILIES, ROLES
from framework.plan.candidate import Candidate, remember
from framework.plan.layer_widths import AttentionShape, MixtureWidths, attention_shapes, read_mixture
from framework.plan.messages import find_tensor_messages
from framework.plan.profile import ATTENTION_BACKWARD, BACKWARD_PASSES, Rates

# Below this share of a layer's FLOPs, FLOPs without shapes (a router) are not reported.
NEGLIGIBLE = 0.02


@dataclass(frozen=True)
class Linear:
    """Y = X W^T of every token. name: its module's, inside the layer. split: the dim that tp divides, `columns`, `rows` or "" for
    none. parts: into so many parts at the most, key-value heads; 0: into any number. is_shared: of shared experts."""

    name: str
    inner: int
    columns: int
    split: str = ""
    parts: int = 0
    is_shared: bool = False

    def of_rank(self, tp: int) -> tuple[int, int]:
        """(inner, columns) of a rank's part."""
        divisor = min(tp, self.parts) if self.parts else tp
        if self.split == "columns":
            return self.inner, -(-self.columns // divisor)
        return (-(-self.inner // divisor) if self.split == "rows" else self.inner), self.columns

    @property
    def numel(self) -> int:
        """Weights."""
        return self.inner * self.columns


@dataclass(frozen=True)
class LayerOperators:
    """A decoder layer. attention: of one rank of tp=1. norms: over hidden states. rotated: features of queries and keys that rope
    turns. activated: features between the mlp's matmuls. flops: of a token's forward, by `model.flops`; known: of its
    operators; is_recurrent: the rest is the scan of a recurrent mixer."""

    hidden: int
    linears: tuple[Linear, ...]
    attention: AttentionShape | None
    experts: MixtureWidths | None
    norms: int
    rotated: int
    activated: int
    flops: float
    known: float
    is_recurrent: bool = False
    regions: int = 2
    """Regions of tensor parallelism with slices of experts."""

    regions_beside: int = 1
    """The same with whole experts."""

    @property
    def estimated(self) -> float:
        """Share of the FLOPs that is counted without shapes."""
        rest = (self.flops - self.known) / self.flops if self.flops else 0.0
        return rest if rest > NEGLIGIBLE else 0.0


@dataclass(frozen=True)
class ModelOperators:
    """layers: of each, in order; equal layers are one object. head_flops: of a token in the head's forward. flops_per_token:
    forward and backward, of all. vocabulary: rows of the head. is_frozen: weights have no gradients, beside adapters."""

    layers: tuple[LayerOperators, ...]
    hidden: int
    vocabulary: int
    head_flops: float
    flops_per_token: float
    context: int
    is_frozen: bool = False

    @property
    def estimated(self) -> float:
        """Share of the layers' FLOPs that is counted without shapes."""
        total = sum(each.flops for each in self.layers)
        return sum(each.estimated * each.flops for each in self.layers) / total if total else 0.0


def read_operators(
    model: PreTrainedModel, units: Sequence[Unit], context: int, tp_plan: Mapping[str, str]
) -> ModelOperators:
    """The operators of a model on meta. context: tokens of a sequence; tp_plan: the recipe's."""
    config = model.config.get_text_config()
    flops = unit_flops(model, units, context)
    shapes = attention_shapes(config, 1, context)
    roles = _roles(config)
    find_messages = partial(find_tensor_messages, model, units, tp_plan, 2)
    sliced = whole = find_messages(slices_experts=True)
    if count_all_experts(model):
        whole = find_messages(slices_experts=False)
    seen: dict[LayerOperators, LayerOperators] = {}
    layers = []
    for number, unit in enumerate(each for each in units if each.is_layer):
        shape = shapes[number] if number < len(shapes) else None
        layer = _read_layer(model.get_submodule(unit.root), config, roles, shape, flops[unit.name])
        layer = replace(layer, regions=sliced[number].regions, regions_beside=whole[number].regions)
        layers.append(seen.setdefault(layer, layer))
    head = model.get_output_embeddings()
    return ModelOperators(
        tuple(layers),
        config.hidden_size,
        config.vocab_size if head is None else head.weight.shape[0],
        flops.get("head", 0.0),
        flops_per_token(model, context),
        context,
        any(is_adapter(name) for unit in units for name in unit.parameters),
    )


def _roles(config: PretrainedConfig) -> Mapping[str, str]:
    """The kind of each linear layer by the last part of its name: column, row or replicated."""
    own = {
        name: role if isinstance(role, str) else role(config)
        for name, role in FAMILIES.get(config.model_type, {}).items()
    }
    return {**ROLES, **own}


def _read_layer(
    layer: nn.Module, config: PretrainedConfig, roles: Mapping[str, str], attention: AttentionShape | None, flops: float
) -> LayerOperators:
    hidden, mixture = config.hidden_size, read_mixture(layer, config)
    linears = tuple(_find_linears(layer, roles, hidden, attention))
    known = sum(2.0 * each.numel for each in linears)
    if attention is not None:
        known += 2.0 * attention.heads * (attention.key_dim + attention.value_dim) * attention.reach
    if mixture is not None:
        known += 2.0 * mixture.top_k * (3 if mixture.has_gate else 2) * mixture.width * mixture.inner
    weights = [getattr(each, "weight", None) for each in layer.modules() if "Norm" in type(each).__name__]
    norms = sum(each is not None and each.numel() == hidden for each in weights)
    inner = [each.inner for each in linears if each.split == "rows"]
    # The first row layer is attention's output; what the others read has been activated.
    has_rope = hasattr(config, "rope_parameters") and attention is not None
    rotated = (attention.heads + attention.kv_heads) * attention.key_dim if has_rope and attention is not None else 0
    return LayerOperators(
        hidden,
        linears,
        attention,
        mixture,
        norms,
        rotated,
        sum(inner[1 if attention is not None else 0 :]),
        flops,
        known,
        any(True for _ in find_mixers(layer)),
    )


def _find_linears(
    layer: nn.Module, roles: Mapping[str, str], hidden: int, attention: AttentionShape | None
) -> Iterator[Linear]:
    for path, module in layer.named_modules():
        weight = getattr(module, "weight", None)
        is_conv1d = type(module).__name__ == "Conv1D"
        if weight is None or weight.ndim != 2 or not (isinstance(module, nn.Linear) or is_conv1d):
            continue
        inner, columns = weight.shape if is_conv1d else reversed(weight.shape)
        name = path.rpartition(".")[2]
        guess = "column" if inner == hidden else "row" if columns == hidden else "replicated"
        kind, _, arrangement = roles.get(name, guess).partition(":")
        split = {"column": "columns", "row": "rows"}.get(kind, "")
        parts = attention.kv_heads if arrangement == "kv_heads" and attention is not None else 0
        yield Linear(path, int(inner), int(columns), split, parts, "shared" in path)


@dataclass(frozen=True)
class Work:
    """Seconds of a rank, by kind. head: among `matmuls`."""

    matmuls: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all kinds."""
        return self.matmuls + self.attention + self.elementwise

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.matmuls + other.matmuls, self.attention + other.attention, self.elementwise + other.elementwise
        )

    def times(self, factor: float) -> "Work":
        """The work, repeated."""
        return Work(self.matmuls * factor, self.attention * factor, self.elementwise * factor)


@dataclass(frozen=True)
class UnitWork:
    """A unit's seconds for one microbatch on a rank. again: what activation checkpointing computes once more in backward.

    What hides messages. column: weight gradients of column layers; column_forward, row_forward: those layers' matmuls in forward,
    and the row layers'; inside: experts' matmuls in forward; shared: those of shared experts. uneven: of the matmuls what
    the mean rank's experts do not have."""

    forward: Work
    input: Work
    weight: Work
    again: Work
    column: float = 0.0
    column_forward: float = 0.0
    row_forward: float = 0.0
    inside: float = 0.0
    shared: float = 0.0
    uneven: float = 0.0

    def times(self, factor: float) -> "UnitWork":
        """The work, repeated."""
        own = {each.name: getattr(self, each.name) for each in fields(self)}
        times: Any = {name: x.times(factor) if isinstance(x, Work) else x * factor for name, x in own.items()}
        return UnitWork(**times)

    @cached_property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward.total + self.backward

    @property
    def backward(self) -> float:
        """Seconds of the whole backward."""
        return self.input.total + self.weight.total + self.again.total


# Assumptions. Tokens of a document in the mean: pages of the web have some 500 to 1,000. Sequences longer than LONG_CONTEXT are
# made for long documents, and are taken to be one each.
DOCUMENT_TOKENS, LONG_CONTEXT = 1024, 16_384


def typical_document(context: int) -> int | None:
    """Tokens of the document in which a token of a sequence of `context` tokens finds itself in the mean; None: the sequence.

    Where lengths are spread as exponentials are, it is twice the mean length: long documents have more of the tokens.
    """
    return 2 * DOCUMENT_TOKENS if context <= LONG_CONTEXT else None


class LayerTimes:
    """Seconds of units of one model on one cluster by one profile. document: tokens of the documents to which attention keeps;
    None: the whole sequence; 0: it computes all pairs, and masks."""

    def __init__(self, operators: ModelOperators, rates: Rates, kept: frozenset[str], document: int | None = None):
        self.operators, self.rates, self.kept = operators, rates, kept
        self._document = min(document or operators.context, operators.context)
        self._halves = document != 0

    @remember("tokens", "share", "ring", "tp", "sequence", "ep", "expert_tp", "checkpointing", "adds")
    def layer(self, c: Candidate, number: int) -> UnitWork:
        """Seconds of one layer, without what sqrt computes of other layers (`UnitTime.grouped`)."""
        layer = self.operators.layers[number]
        rates, profile, tokens = self.rates, self.rates.profile, c.tokens
        outside = tokens / c.tp if c.sequence else tokens
        matmuls = {each.name: rates.matmul(tokens, *each.of_rank(c.tp)) for each in layer.linears}
        gradients = {each.name: self._weight_gradient(tokens, *each.of_rank(c.tp), c.adds) for each in layer.linears}
        attention = self._attention_flops(layer, c)
        # A ring's kernels see its blocks alone.
        shape = max(1, self.operators.context // c.ring), layer.attention.key_dim if layer.attention is not None else 1
        experts, expert_gradient, routed = self._experts(layer, c)
        rest = layer.estimated * layer.flops * tokens / c.tp
        if rest and not layer.is_recurrent:
            # A square matmul of as many FLOPs: nobody knows its shape.
            side = round((rest / 2) ** (1 / 3)) or 1
            matmuls[""] = gradients[""] = rates.matmul(side, side, side)
        scanned = rest if layer.is_recurrent else 0.0
        spent = rates.attention(attention, shape) + rates.scan(scanned)
        elementwise = partial(self._elementwise, layer, c, outside)
        forward = Work(sum(matmuls.values()) + experts, spent, elementwise(1.0) + routed)
        backward_s = rates.attention(ATTENTION_BACKWARD * attention, shape, backward=True)
        backward_s += rates.scan(scanned, backward=True)
        inputs = Work(forward.matmuls, backward_s, elementwise(BACKWARD_PASSES) + routed * BACKWARD_PASSES)
        weights = Work(sum(gradients.values()) + expert_gradient)
        columns = [each.name for each in layer.linears if each.split == "columns"]
        return UnitWork(
            forward,
            inputs,
            weights,
            self._again(layer, forward, matmuls, experts, c.checkpointing),
            column=sum(map(gradients.__getitem__, columns)),
            column_forward=sum(map(matmuls.__getitem__, columns)),
            row_forward=sum(matmuls[each.name] for each in layer.linears if each.split == "rows"),
            inside=experts,
            uneven=(2 * experts + expert_gradient) * (1 - 1 / profile.imbalance) * (c.ep > 1),
            shared=sum(matmuls[each.name] for each in layer.linears if each.is_shared),
        )

    def _weight_gradient(self, rows: float, inner: int, columns: int, adds: bool, narrow: bool = True) -> float:
        if self.operators.is_frozen:
            return 0.0  # those of adapters are among what is estimated
        # The first of several microbatches only writes as well; that it is one of many is not worth another layer to remember.
        added = inner * columns * self.rates.profile.gradient_bytes * (1.0 if adds else 0.5)
        return self.rates.gradient(rows, inner, columns, added, narrow)

    def _attention_flops(self, layer: LayerOperators, c: Candidate) -> float:
        """FLOPs of a rank's attention in forward."""
        shape = layer.attention
        if shape is None:
            return 0.0
        context = self.operators.context
        pairs: float = context * context
        if self._halves:
            pairs = shape.pairs(self._document) * context / self._document
        heads = -(-shape.heads // c.tp)
        return c.share * (2.0 * pairs * heads * (shape.key_dim + shape.value_dim))

    def _experts(self, layer: LayerOperators, c: Candidate) -> tuple[float, float, float]:
        """Seconds of (experts' matmuls in forward, their weight gradients, sorting rows) with equally many tokens for each
        expert."""
        mixture, rates = layer.experts, self.rates
        if mixture is None:
            return 0.0, 0.0, 0.0
        rows = self.rows(layer, c) * (rates.profile.imbalance if c.ep > 1 else 1.0)
        local, inner = max(1, mixture.experts // c.ep), -(-mixture.inner // c.expert_tp)
        first = inner * (2 if mixture.has_gate else 1)
        each, adds, narrow = rows / local, c.adds, rates.profile.narrows_experts
        sizes = (mixture.width, first), (inner, mixture.width)
        times = local / rates.profile.grouped
        forward = times * sum(rates.matmul(each, *size, narrow) for size in sizes)
        weight = times * sum(self._weight_gradient(each, *size, adds, narrow) for size in sizes)
        activated = rates.elementwise(rows * inner, rates.profile.activation)
        biases = (first, rates.profile.first_bias), (mixture.width, rates.profile.last_bias)
        activated += sum(
            rates.elementwise(rows * size, kernels) for size, kernels in biases if kernels and mixture.has_biases
        )
        # Spread to rows, sorted on arrival, sorted back, summed by token: each reads and writes all rows.
        sorted_s = rates.profile.row_passes * rates.moved(2 * rows * mixture.width * rates.itemsize)
        launches = 2 * (local - 1) * rates.cluster.overhead_s * rates.profile.groups_experts
        return forward - launches, max(0.0, weight - launches), activated + sorted_s

    def rows(self, layer: LayerOperators, c: Candidate) -> float:
        """Rows in a rank's experts, and that it sends: each token's top-k, of all tokens where tp slices experts."""
        assert layer.experts is not None, "no mixture"
        return c.tokens * layer.experts.top_k / (1 if c.expert_tp == c.tp else c.tp)

    def _elementwise(self, layer: LayerOperators, c: Candidate, outside: float, times: float) -> float:
        rates, profile, tokens = self.rates, self.rates.profile, c.tokens
        hidden = outside * layer.hidden
        total = layer.norms * rates.elementwise(hidden, profile.norm, times)
        total += 2 * rates.elementwise(hidden, profile.residual, times)
        if c.ring > 1 and layer.attention is not None:
            # Each block but a chunk's first is merged: half of the queries meet one of the rank's own, and one of each other's.
            merged = tokens / 2 * layer.attention.heads * layer.attention.value_dim / c.tp
            total += c.ring * rates.elementwise(merged, profile.merge, times)
        if layer.rotated:
            total += rates.elementwise(tokens * layer.rotated / c.tp, profile.rope, times)
        shape = layer.attention
        if profile.repeats_heads and shape is not None and shape.heads > shape.kv_heads:
            # One kernel reads keys, or values, and writes the copies; in backward one adds the copies' gradients: as many bytes.
            copied = tokens * (shape.heads + shape.kv_heads) / c.tp * rates.itemsize
            total += rates.moved(copied * shape.key_dim) + rates.moved(copied * shape.value_dim)
        if layer.activated:
            total += rates.elementwise(tokens * layer.activated / c.tp, profile.activation, times)
        return total

    def _again(
        self, layer: LayerOperators, forward: Work, matmuls: Mapping[str, float], experts: float, policy: str
    ) -> Work:
        """Recomputation of a checkpointed layer: its forward but for the last matmul, whose output backward does not read; with
        selective, without the operations that are kept."""
        if policy == "none":
            return Work()
        kept = self.kept if policy == "selective" else frozenset()
        last = layer.linears[-1].name if layer.linears and layer.experts is None else ""
        spared = sum(
            seconds for name, seconds in matmuls.items() if name and (name.rpartition(".")[2] in kept or name == last)
        )
        spared += experts if "experts" in kept else 0.0
        attention = 0.0 if "attention" in kept else forward.attention
        return Work(max(forward.matmuls - spared, 0.0), attention, forward.elementwise)

    def embedding(self, candidate: Candidate) -> UnitWork:
        """Looking rows up, and adding their gradients."""
        outside = candidate.tokens / candidate.tp if candidate.sequence else candidate.tokens
        num_bytes = outside * self.operators.hidden * self.rates.itemsize
        return UnitWork(
            Work(elementwise=self.rates.moved(2 * num_bytes)),
            Work(),
            Work(elementwise=self.rates.moved(3 * num_bytes)),
            Work(),
        )

    @remember("tokens", "tp", "sequence", "adds")
    def head(self, c: Candidate, chunks_loss: bool) -> UnitWork:
        """The last norm, the output embedding and the loss; in chunks logits are computed again in backward."""
        rates, profile, hidden = self.rates, self.rates.profile, self.operators.hidden
        columns = -(-self.operators.vocabulary // c.tp)
        outside = c.tokens / c.tp if c.sequence else c.tokens
        norm = rates.elementwise(outside * hidden, profile.norm)
        least = rates.cluster.softmax_seconds(c.tokens * columns)
        loss, loss_gradient = (
            max(rates.elementwise(c.tokens * columns, each), least) for each in (profile.loss, profile.loss_gradient)
        )
        multiplied = rates.matmul(c.tokens, hidden, columns, narrow=False)
        again = Work(multiplied) if chunks_loss else Work()
        gradient = self._weight_gradient(c.tokens, hidden, columns, c.adds, narrow=False)
        return UnitWork(
            Work(multiplied, 0.0, norm + loss),
            Work(multiplied, 0.0, BACKWARD_PASSES * norm + loss_gradient),
            Work(gradient),
            again,
            gradient,
        )
