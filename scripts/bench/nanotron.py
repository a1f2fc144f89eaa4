"""nanotron, as of winter 2024/25, as an implementation beside ours: what it holds and how long its steps take, in closed forms.

Described so that forecasts can be compared with runs that others published (`scripts/bench/foresight.py`). Read off its code, not
fitted:

    states        weights and gradients in bf16, gradients, master and two moments in fp32: 20 bytes a parameter, of which ZeRO 1
                  shards master and moments over dp
    stages        layers cost 4 h^2 + 3 h f, the head V h, all else nothing; a block goes to the next stage once the cost before
                  it has passed that stage's share. So the last of many stages may have no parameter, or no block at all
    schedule      1F1B: stage s holds min(pp - s, ga) microbatches
    tp            with sequence parallelism: a layer has 4 collectives in forward and 6 in backward, of T h elements
    logits        of all tokens at once, in fp32 twice: before and behind the softmax; a third time where the host is ahead of the
                  device, which has the last microbatch's still to free
    dp            one all-reduce of fp32 gradients behind the last backward, with ZeRO 1 an all-gather of bf16 weights behind it

Symbols: T tokens of a microbatch, h hidden features, f features inside the MLP, n layers of a stage, V rows of the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from math import ceil, inf

from framework.plan.candidate import Candidate
from framework.plan.cluster import ClusterRates
from framework.plan.forecast_memory import MemoryForecast, StageMemory
from framework.plan.shape import ModelShape
from framework.plan.time import TimeForecast

GIB = 2**30
# Bytes that a layer keeps of a token for backward. For each hidden feature: both norms' inputs and outputs 8, queries, keys and
# values as one tensor 6, rotated queries 2, rotated keys and values 4, attention's output and its copy 4. For each feature inside
# the MLP: gate and up 4, the activated gate 2, their product 2.
KEPT_HIDDEN = 24.0
KEPT_INNER = 8.0
# Unsharded hidden states: the two buffers into which tp gathers, and what a reduce-scatter takes.
GATHERED = 3.0
BUCKET_BYTES = 25e6
# GiB, the forecast's own error: a run that misses the limit by less may have been made.
MARGIN = 2
# With a pipeline: share of the time of slow rings from which on a layer's kernels keep the device behind the host.
AHEAD_SHARE = 0.8
# cuBLAS on Hopper: 32 MiB for each pair of handle and stream; forward and backward, beside and inside of collectives.
MATMUL_WORKSPACE = 4 * 32 * 2**20
# Of a layer and microbatch: all-gathers and reduce-scatters of tp; and bytes that elementwise kernels read and write of a token,
# for each hidden feature, each feature inside the MLP, and each logit.
LAYER_COLLECTIVES = 10
HIDDEN_PASSES = 120.0
INNER_PASSES = 30.0
LOGIT_PASSES = 52.0


@dataclass(frozen=True)
class Fitted:
    """Constants that are fitted to published runs. UNITS says what each one is."""

    host_layer_s: float = 5.1e-3
    passes: float = 2.75
    ring_step_s: float = 0.041e-3
    slow_step_s: float = 0.24e-3
    node_step_s: float = 0.035e-3
    message_s: float = 0.46
    ahead: float = 43.0
    reserve_gib: float = 11.0
    bucket_s: float = 0.43e-3
    far_s: float = 0.45
    repeated: float = 5e9


# Of each the unit, and what it is.
UNITS: Mapping[str, tuple[str, str]] = {
    "host_layer_s": ("s", "of the host, to launch the kernels of a layer's forward and backward"),
    "passes": ("", "elementwise passes over memory, over those that are counted"),
    "ring_step_s": ("s", "of one step of a ring over nodes, in collectives of tp without a pipeline"),
    "slow_step_s": (
        "s",
        "of one step of a ring inside of a node, in collectives of tp beside a pipeline or of the first campaign",
    ),
    "node_step_s": ("s", "of such a step, more for each further node that the ring passes"),
    "message_s": ("s", "per microbatch and neighbour in the pipeline, of the first campaign's messages between stages"),
    "ahead": (
        "tensors",
        "of unsharded hidden states, more where the host is ahead of the device: outputs of queued collectives",
    ),
    "reserve_gib": ("GiB", "of what the driver leaves that tensors never get: NCCL's buffers, fragments"),
    "bucket_s": ("s", "of each of DDP's buckets of 25 MB and each node, where rings are slow"),
    "far_s": ("s", "of a step on more than 32 nodes, more than all else"),
    "repeated": ("", "parameters up to which the second campaign repeated all runs of pipelines on 32 nodes"),
}
assert set(UNITS) == {field.name for field in fields(Fitted)}


@dataclass(frozen=True)
class Blocks:
    """The parts of a model on one stage. layers: how many; others: embedding, norm, head, cast (of logits to fp32), loss."""

    layers: int
    others: tuple[str, ...]

    def has(self, name: str) -> bool:
        """Whether a block is here."""
        return name in self.others

    @property
    def has_parameters(self) -> bool:
        """Whether anything is to be trained here."""
        return self.layers > 0 or any(self.has(name) for name in ("embedding", "norm", "head"))


@dataclass(frozen=True)
class Llama:
    """A Llama without grouped heads, as numbers."""

    hidden: int
    inner: int
    layers: int
    heads: int
    vocabulary: int
    is_tied: bool
    parameters: int
    flops_per_token: float

    @classmethod
    def of(cls, shape: ModelShape, context: int) -> "Llama":
        """The model of a shape. flops_per_token: as for runs of ours, at so many tokens of a sequence."""
        text = shape.text
        return cls(
            text.hidden_size,
            text.intermediate_size,
            shape.num_layers,
            text.num_attention_heads,
            shape.vocabulary,
            text.tie_word_embeddings,
            shape.size.total,
            shape.flops_per_token(context),
        )

    @property
    def layer_numel(self) -> int:
        """Parameters of a layer."""
        return 4 * self.hidden**2 + 3 * self.hidden * self.inner + 2 * self.hidden

    def numel(self, blocks: Blocks, pp: int) -> int:
        """Parameters of a stage, before tp. Tied ends are one tensor where they are on one rank."""
        ends = blocks.has("embedding") + blocks.has("head")
        ends = min(ends, 1) if self.is_tied and pp == 1 else ends
        return blocks.layers * self.layer_numel + ends * self.vocabulary * self.hidden

    def attention_flops(self, tokens: int, context: int) -> float:
        """FLOPs of attention's forward of one layer: each token meets half of its sequence."""
        return 2.0 * tokens * context * self.hidden


@lru_cache(maxsize=1024)
def split_blocks(llama: Llama, pp: int, is_first: bool = False) -> tuple[Blocks, ...]:
    """The stages of a pipeline. Those behind the last block are empty."""
    layer = 4 * llama.hidden**2 + 3 * llama.hidden * llama.inner
    costs = [("embedding", 0), *(("layer", layer) for _ in range(llama.layers)), ("norm", 0)]
    costs += [("head", llama.vocabulary * llama.hidden), ("cast", 0), ("loss", 0)]
    total, passed, stage = sum(cost for _, cost in costs), 0, 0
    found: list[list[str]] = [[] for _ in range(pp)]
    for name, cost in costs:
        found[stage].append(name)
        passed += cost
        # At a tie, as the 1B model has, the first campaign's bytes are those of one layer more, as the code says, the second's
        # are not. The head's cost lies before blocks that cost nothing: each of these then goes one stage further.
        share = total * (stage + 1)
        is_full = passed * pp > share or (passed * pp == share and not is_first and stage + 1 < pp)
        if is_full:
            stage += 1
    return tuple(Blocks(each.count("layer"), tuple(name for name in each if name != "layer")) for each in found)


def find_refusal(llama: Llama, candidate: Candidate) -> str | None:
    """Why nanotron cannot run a layout at all, whatever memory there is; None where it can."""
    if llama.heads % candidate.tp:
        return f"tp={candidate.tp} does not divide {llama.heads} heads"
    if candidate.accumulation < candidate.pp - 1:
        return (
            f"{candidate.accumulation} microbatches are fewer than pp - 1 = {candidate.pp - 1}, which its 1F1B asks for"
        )
    stages = split_blocks(llama, candidate.pp)
    if any(not each.layers and not each.others for each in stages):
        return f"pp={candidate.pp} leaves a stage without any block"
    if candidate.zero == 0 and candidate.dp > 1 and not all(each.has_parameters for each in stages):
        return f"pp={candidate.pp} leaves a stage without parameters, which DDP refuses"
    return None


@dataclass(frozen=True)
class Choice:
    """Properties of a run that the published file does not have. is_first: of the first of two campaigns, whose messages between
    stages and collectives of tp are slow. forwards: by which the host is ahead of the device, so that the outputs of their
    reduce-scatters are held."""

    is_first: bool
    forwards: float


@dataclass(frozen=True, eq=False)
class Nanotron:
    """Forecasts of one model's runs on one cluster."""

    llama: Llama
    cluster: ClusterRates
    fitted: Fitted = Fitted()

    def choose(self, candidate: Candidate) -> Choice:
        """Choose what made a layout's row, as far as the layout tells: the second campaign where it came as far, and fitted."""
        second, first = Choice(False, self._forwards_ahead(candidate)), Choice(True, 0)
        if self._is_first_only(candidate) or self.memory(candidate, second).spare < -MARGIN * GIB:
            return first
        return second

    def _forwards_ahead(self, candidate: Candidate) -> float:
        """In a pipeline the host waits for messages: it is ahead by the first stage's forwards before its first backward, but for
        the last two; by more where kernels rather than messages keep it waiting."""
        if candidate.pp == 1:
            return 1 if candidate.accumulation == 1 else inf
        if candidate.accumulation > candidate.pp and self._is_device_bound(candidate):
            return inf
        return candidate.pp - 2

    def _is_first_only(self, candidate: Candidate) -> bool:
        """Whether the second campaign left it out: on 64 nodes all but tp over four nodes; of pipelines tp over four nodes with
        more than two stages, with DDP what is on up to 16 nodes, and on 32 nodes large models but for single sequences."""
        is_wide = candidate.tp > 2 * candidate.ranks_per_node
        if candidate.nodes > 32 and not is_wide:
            return True
        if candidate.pp == 1:
            return False
        if is_wide:
            return candidate.pp > 2
        if candidate.nodes > 16:
            is_large = self.llama.parameters > self.fitted.repeated and candidate.sequences > 1
            return is_large or (candidate.zero == 1 and candidate.dp > candidate.tp * candidate.pp)
        return (
            candidate.zero == 0 and candidate.dp > 1 and candidate.pp > 2 and candidate.tp > 1 and candidate.nodes > 1
        )

    def _is_device_bound(self, candidate: Candidate) -> bool:
        """Whether the host gets ahead where each collective of tp keeps it waiting."""
        return self.device_seconds(candidate) > AHEAD_SHARE * self.ring_seconds(candidate, Choice(True, 0))

    # --- memory

    def limit(self) -> int:
        """Bytes of a device that allocations may use."""
        return int(self.cluster.memory_bytes - self.fitted.reserve_gib * GIB)

    def memory(self, candidate: Candidate, choice: Choice) -> MemoryForecast:
        """Bytes of a rank of each stage, at the end of the last forward before the first backward."""
        stages = split_blocks(self.llama, candidate.pp, choice.is_first)
        return MemoryForecast(
            tuple(self._stage_memory(candidate, choice, place, each) for place, each in enumerate(stages)), self.limit()
        )

    def first_stage(self, candidate: Candidate, choice: Choice) -> StageMemory:
        """Bytes of a rank of the first stage."""
        return self._stage_memory(candidate, choice, 0, split_blocks(self.llama, candidate.pp, choice.is_first)[0])

    def _stage_memory(self, candidate: Candidate, choice: Choice, place: int, blocks: Blocks) -> StageMemory:
        llama, fitted, tp = self.llama, self.fitted, candidate.tp
        numel = llama.numel(blocks, candidate.pp) / tp
        owners = candidate.dp if candidate.zero else 1
        queued = min(fitted.ahead, 2 * blocks.layers * choice.forwards) if blocks.layers else 0.0
        buffers = GATHERED + queued if tp > 1 else 0.0
        tokens, flying = candidate.tokens, min(candidate.pp - place, candidate.accumulation)
        kept = blocks.layers * tokens * (KEPT_HIDDEN * llama.hidden + KEPT_INNER * llama.inner) / tp
        held = {
            "parameters": 2 * numel,
            "gradients": 6 * numel,
            "master": 4 * numel / owners,
            "optimizer": 8 * numel / owners,
            "activations": flying * kept,
            "logits": tokens * llama.vocabulary / tp * self._logit_bytes(candidate, choice, blocks, flying),
            "workspace": 2.0 * tokens * llama.hidden * buffers + MATMUL_WORKSPACE,
        }
        counted = {kind: int(size) for kind, size in held.items()}
        return StageMemory(counted, 0, {"step": counted})

    def _logit_bytes(self, candidate: Candidate, choice: Choice, blocks: Blocks, flying: int) -> float:
        """Bytes of a logit that a stage holds."""
        if blocks.has("head") and blocks.has("loss"):
            is_ahead = choice.forwards > 0 and self._layer_seconds(candidate, choice) > self.fitted.host_layer_s
            return 8.0 + (4.0 if candidate.accumulation > 1 and is_ahead else 0.0)
        # Logits that travel between stages: in bf16 behind the head, in fp32 behind the cast.
        return flying * sum({"head": 2.0, "cast": 6.0, "loss": 8.0}.get(name, 0.0) for name in blocks.others)

    # --- time

    def time(self, candidate: Candidate, choice: Choice) -> TimeForecast:
        """Seconds of a step: every stage once, the slowest one for each further microbatch, then what nothing hides."""
        stages = split_blocks(self.llama, candidate.pp, choice.is_first)
        layer = self._layer_seconds(candidate, choice)
        head = self._head_seconds(candidate)
        # Embedding, head and loss have about as many collectives as a layer; most are the head's.
        rings = self.ring_seconds(candidate, choice)
        numels = [self.llama.numel(each, candidate.pp) / candidate.tp for each in stages]
        seconds = [
            each.layers * layer + each.has("head") * (head + rings) + self.cluster.memory_seconds(10 * numel)
            for each, numel in zip(stages, numels, strict=True)
        ]
        neighbours = min(candidate.pp - 1, 2)
        # An activation and a gradient.
        message = neighbours * (self.fitted.message_s if choice.is_first else 2 * self._send_seconds(candidate))
        slowest, further = max(seconds), candidate.accumulation - 1
        owners = candidate.dp if candidate.zero else 1
        parts = {
            "stages": candidate.accumulation * slowest,
            "bubble": sum(seconds) - slowest,
            "pp": further * message + (candidate.pp - 1) * message / max(neighbours, 1),
            "dp": self._dp_seconds(candidate, choice, max(numels)),
            "far": self.fitted.far_s * (candidate.nodes > 32),
            "optimizer": self.cluster.memory_seconds(max(numels) * (40 / owners + 12)),
        }
        step_s = sum(parts.values())
        per_rank = candidate.tokens_per_step / candidate.world
        mfu = self.llama.flops_per_token * per_rank / step_s / self.cluster.peak_flops["bf16"]
        return TimeForecast(parts, {}, candidate.tokens_per_step, candidate.world, mfu)

    def device_seconds(self, candidate: Candidate) -> float:
        """Seconds of a layer's kernels for one microbatch, forward and backward."""
        llama, cluster, tp = self.llama, self.cluster, candidate.tp
        tokens, hidden, inner = candidate.tokens, llama.hidden, llama.inner
        shapes = ((hidden, 3 * hidden // tp), (hidden // tp, hidden), (hidden, 2 * inner // tp), (inner // tp, hidden))
        matmuls = 3 * sum(cluster.matmul_seconds(tokens, rows, columns) for rows, columns in shapes)
        flops = llama.attention_flops(tokens, candidate.context) / tp
        attention = cluster.attention_seconds(flops) + cluster.attention_seconds(2.5 * flops, backward=True)
        # Norms, residual sums, rotation, copies of queries, keys and values; the gated activation and its backward.
        num_bytes = tokens / tp * (HIDDEN_PASSES * hidden + INNER_PASSES * inner)
        elementwise = self.fitted.passes * cluster.memory_seconds(num_bytes)
        return matmuls + attention + elementwise

    def ring_seconds(self, candidate: Candidate, choice: Choice) -> float:
        """Seconds of the latencies of a layer's collectives of tp."""
        tp, fitted = candidate.tp, self.fitted
        nodes = ceil(tp / candidate.ranks_per_node)
        if self._has_slow_rings(candidate, choice):
            step_s = fitted.slow_step_s + (nodes - 1) * fitted.node_step_s
        else:
            step_s = fitted.ring_step_s if nodes > 1 else 0.0
        return LAYER_COLLECTIVES * (tp - 1) * step_s

    @staticmethod
    def _has_slow_rings(candidate: Candidate, choice: Choice) -> bool:
        return (candidate.pp > 1 and candidate.nodes > 1) or choice.is_first

    def _layer_seconds(self, candidate: Candidate, choice: Choice) -> float:
        nodes = ceil(candidate.tp / candidate.ranks_per_node)
        carried = 2.0 * candidate.tokens * self.llama.hidden * (candidate.tp - 1) / candidate.tp
        passed = sum(carried / self._rate(kind, nodes) for kind in ("all_gather", "reduce_scatter"))
        device = self.device_seconds(candidate) + passed * LAYER_COLLECTIVES / 2
        rings = self.ring_seconds(candidate, choice)
        if self._has_slow_rings(candidate, choice):
            # The host waits for each of them, and for nothing else: matmuls run meanwhile.
            return max(device, self.fitted.host_layer_s + rings)
        return max(device + rings, self.fitted.host_layer_s)

    def _head_seconds(self, candidate: Candidate) -> float:
        llama, tp = self.llama, candidate.tp
        logits = candidate.tokens * llama.vocabulary / tp
        matmuls = 3 * self.cluster.matmul_seconds(candidate.tokens, llama.hidden, llama.vocabulary // tp)
        return matmuls + self.cluster.memory_seconds(LOGIT_PASSES * logits)

    def _send_seconds(self, candidate: Candidate) -> float:
        nodes = 2 if candidate.dp * candidate.tp >= candidate.ranks_per_node else 1
        return self.cluster.collective_seconds(
            "send", 2.0 * candidate.tokens * self.llama.hidden / candidate.tp, 2, nodes
        )

    def _dp_seconds(self, candidate: Candidate, choice: Choice, numel: float) -> float:
        dp = candidate.dp
        if dp == 1:
            return 0.0
        nodes = ceil(dp * candidate.tp / candidate.ranks_per_node)
        part = (dp - 1) / dp * numel
        seconds = 2 * 4 * part / self._rate("all_reduce", nodes)
        if candidate.zero:
            return seconds + 2 * part / self._rate("all_gather", nodes)
        is_slow = self._has_slow_rings(candidate, choice)
        return seconds + is_slow * self.fitted.bucket_s * nodes * 2 * numel / BUCKET_BYTES

    def _rate(self, kind: str, nodes: int) -> float:
        return self.cluster.links[kind].at(nodes).rate  # type: ignore[index]
