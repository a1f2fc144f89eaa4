"""nanotron, as of winter 2024/25, as an implementation beside ours: what it holds and how long its steps take, in closed forms.

Described so that forecasts can be compared with runs that others published (`scripts/bench/foresight.py`). Read off its code, not
fitted:

    states        weights and gradients in bf16, gradients, master and two moments in fp32: 20 bytes a parameter, of which ZeRO 1
                  shards master and moments over dp
    stages        layers cost 4 h^2 + 3 h f, the head V h, all else nothing; a block goes to the next stage once the cost before
                  it has passed that stage's share. So the last of many stages may have no parameter, or no block at all
    schedule      1F1B: stage s holds min(pp - s, ga) microbatches
    tp            with sequence parallelism: a layer has 4 collectives in forward and 6 in backward, of T h elements; some run
                  beside matmuls (`exposed_seconds`)
    logits        of all tokens at once, in fp32 twice: before and behind the softmax; a third time where the host is ahead of the
                  device, which has the last microbatch's still to free
    dp            one all-reduce of fp32 gradients behind the last backward, with ZeRO 1 an all-gather of bf16 weights behind it

Symbols: T tokens of a microbatch, h hidden features, f features inside the MLP, n layers of a stage, V rows of the vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil, inf

from framework.plan.candidate import Candidate
from framework.plan.cluster import ClusterRates
from framework.plan.forecast_memory import MemoryForecast, StageMemory
from framework.plan.shape import ModelShape
from framework.plan.time import TimeForecast

GIB = 2**30
# Bytes that a layer keeps of a token for backward. For each hidden feature: both norms' inputs and outputs 8, queries 2, rotated
# queries 2, attention's output and its copy 4. For each of keys: keys and values 4, rotated keys and values 4. For each feature
# inside the MLP: gate and up 4, the activated gate 2, their product 2.
KEPT_HIDDEN = 16.0
KEPT_KEYS = 8.0
KEPT_INNER = 8.0
# Unsharded hidden states: the two buffers into which tp gathers, and what a reduce-scatter takes.
GATHERED = 3.0
BUCKET_BYTES = 25e6
# GiB, the forecast's own error: a run that misses the limit by less may have been made.
MARGIN = 2
# Parameters above which a model is the largest; tokens of a step of all but a few runs.
LARGEST = 50e9
STEP_TOKENS = 2**20
# Nodes of the largest runs.
FAR_NODES = 64
# With a pipeline: share of the host's time for a layer, slow rings included, from which on its kernels keep the device behind.
AHEAD_SHARE = 0.8
# cuBLAS on Hopper: 32 MiB for each pair of handle and stream; forward and backward, beside and inside of collectives.
MATMUL_WORKSPACE = 4 * 32 * 2**20
# Of a layer and microbatch: all-gathers and reduce-scatters of tp; and bytes that elementwise kernels read and write of a token,
# for each hidden feature, each feature inside the MLP, and each logit.
LAYER_COLLECTIVES = 10
# Bytes at which the cluster's file has its bus bandwidths; NCCL's latencies of these runs were part of what was measured.
MEASURED_BYTES = 256e6
# Seconds of the first campaign's messages of a microbatch between two stages: hidden states, mask and gradient, each announced by
# two messages, whose ends a loop awaits that sleeps for 0.1 s (nanotron 67c5ebb6, parallel/pipeline_parallel/p2p.py).
POLLED_S = 3 * 2 * 0.1
HIDDEN_PASSES = 120.0
INNER_PASSES = 30.0
LOGIT_PASSES = 52.0


@dataclass(frozen=True)
class Fitted:
    """Constants that are fitted to published runs. UNITS says what each one is."""

    host_layer_s: float = 4.56e-3
    passes: float = 3.22
    ring_step_s: float = 0.0481e-3
    slow_step_s: float = 0.264e-3
    ahead: float = 43.0
    reserve_gib: float = 11.0
    bucket_s: float = 0.368e-3
    far_s: float = 0.352
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
    "ahead": (
        "tensors",
        "of unsharded hidden states, more where the host is ahead of the device: outputs of queued collectives",
    ),
    "reserve_gib": ("GiB", "of what the driver leaves that tensors never get: NCCL's buffers, fragments"),
    "bucket_s": ("s", "of each of DDP's buckets of 25 MB and each node, where rings are slow"),
    "far_s": ("s", "of a step on 64 nodes, more than all else; of fewer as the square of their number"),
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
    """A Llama as numbers. keys: features of all heads' keys, as many as of values."""

    hidden: int
    keys: int
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
            text.hidden_size * text.num_key_value_heads // text.num_attention_heads,
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
        """Parameters of a layer's linears."""
        return self.hidden * (2 * self.hidden + 2 * self.keys + 3 * self.inner)

    def numel(self, blocks: Blocks, pp: int) -> int:
        """Parameters of a stage, before tp. Tied ends are one tensor where they are on one rank."""
        ends = blocks.has("embedding") + blocks.has("head")
        ends = min(ends, 1) if self.is_tied and pp == 1 else ends
        return blocks.layers * (self.layer_numel + 2 * self.hidden) + ends * self.vocabulary * self.hidden

    def attention_flops(self, tokens: int, context: int) -> float:
        """FLOPs of attention's forward of one layer: each token meets half of its sequence."""
        return 2.0 * tokens * context * self.hidden


@lru_cache(maxsize=1024)
def split_blocks(llama: Llama, pp: int, is_first: bool = False) -> tuple[Blocks, ...]:
    """The stages of a pipeline. Those behind the last block are empty."""
    costs = [("embedding", 0), *(("layer", llama.layer_numel) for _ in range(llama.layers)), ("norm", 0)]
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
        """Choose what made a layout's row, as far as the layout tells: the campaign that had it, or the first where memory was
        short. Short of memory for queued outputs alone, a pipeline of the second came through: an allocator that runs out waits
        for their streams and takes them back. Without a pipeline, where nothing was repeated, the host then waits all along."""
        made = self._campaign(candidate)
        needed = made if candidate.pp == 1 else replace(made, forwards=0)
        return made if self.memory(candidate, needed).spare >= -MARGIN * GIB else Choice(True, 0)

    def fits(self, candidate: Candidate) -> bool:
        """Whether memory suffices on every rank, queued outputs included."""
        return self.memory(candidate, self._campaign(candidate)).spare >= 0

    def campaigns(self, candidate: Candidate) -> tuple[Choice, Choice]:
        """The first and the second campaign's run of a layout."""
        return Choice(True, 0), Choice(False, self._forwards_ahead(candidate))

    def _campaign(self, candidate: Candidate) -> Choice:
        first, second = self.campaigns(candidate)
        return first if self._is_first_only(candidate) else second

    def _forwards_ahead(self, candidate: Candidate) -> float:
        """In a pipeline the host waits for messages: it is ahead by the first stage's forwards before its first backward, but for
        the last two; by more where kernels rather than messages keep it waiting."""
        if candidate.pp == 1:
            return 1 if candidate.accumulation == 1 else inf
        if candidate.accumulation > candidate.pp and self._is_device_bound(candidate):
            return inf
        return candidate.pp - 2

    def _is_first_only(self, candidate: Candidate) -> bool:
        """Whether the second campaign left a layout out, as read off the fitting half: tp over four nodes with a pipeline; all
        else on 64 nodes but pipelines of few microbatches; without a pipeline steps of another size; on 16 nodes with DDP deep
        pipelines; on 32 nodes large models but for single sequences, and ZeRO 1 with more replicas than ranks in one. Of
        the largest model no pipeline on up to 32 nodes."""
        stages, tp = candidate.pp, candidate.tp
        has_few = candidate.accumulation < stages
        if tp > 2 * candidate.ranks_per_node:
            return stages > 1
        if candidate.nodes > 32:
            return not has_few
        if stages == 1:
            return candidate.tokens_per_step != STEP_TOKENS
        if self.llama.parameters > LARGEST:
            return False
        if candidate.zero == 0 and 1 < candidate.dp < 32:
            return candidate.nodes > 1
        if candidate.nodes <= 16:
            return False
        is_large = self.llama.parameters > self.fitted.repeated and candidate.sequences > 1
        is_spread = candidate.zero == 1 and candidate.dp > tp * stages and not has_few
        return is_large or is_spread

    def _is_device_bound(self, candidate: Candidate) -> bool:
        """Whether the host gets ahead where each collective of tp keeps it waiting."""
        host = self.fitted.host_layer_s + self.ring_seconds(candidate, Choice(True, 0))
        return self.device_seconds(candidate) > AHEAD_SHARE * host

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
        token_bytes = KEPT_HIDDEN * llama.hidden + KEPT_KEYS * llama.keys + KEPT_INNER * llama.inner
        kept = blocks.layers * tokens * token_bytes / tp
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
        message = neighbours * (POLLED_S if choice.is_first else 2 * self._send_seconds(candidate))
        slowest, further = max(seconds), candidate.accumulation - 1
        owners = candidate.dp if candidate.zero else 1
        parts = {
            "stages": candidate.accumulation * slowest,
            "bubble": sum(seconds) - slowest,
            "pp": further * message + (candidate.pp - 1) * message / max(neighbours, 1),
            "dp": self._dp_seconds(candidate, choice, max(numels)),
            "far": self.fitted.far_s * (candidate.nodes / FAR_NODES) ** 2,
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
        matmuls = 3 * sum(self._matmul_seconds(candidate))
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
            step_s = fitted.slow_step_s
        else:
            step_s = fitted.ring_step_s if nodes > 1 else 0.0
        return LAYER_COLLECTIVES * (tp - 1) * step_s

    @staticmethod
    def _has_slow_rings(candidate: Candidate, choice: Choice) -> bool:
        return (candidate.pp > 1 and candidate.nodes > 1) or choice.is_first

    def _layer_seconds(self, candidate: Candidate, choice: Choice) -> float:
        rings = self.ring_seconds(candidate, choice)
        if self._has_slow_rings(candidate, choice):
            # The host waits for each of them, and for nothing else: matmuls run meanwhile.
            device = self.device_seconds(candidate) + self.exposed_seconds(candidate, 0.0)
            return max(device, self.fitted.host_layer_s + rings)
        device = self.device_seconds(candidate) + self.exposed_seconds(candidate, rings / LAYER_COLLECTIVES)
        return max(device, self.fitted.host_layer_s)

    def _matmul_seconds(self, candidate: Candidate) -> tuple[float, float, float, float]:
        """Forward matmuls of a layer: queries, keys and values; attention's output; gate and up; down."""
        hidden, inner, tp = self.llama.hidden, self.llama.inner, candidate.tp
        columns = hidden + 2 * self.llama.keys
        shapes = ((hidden, columns // tp), (hidden // tp, hidden), (hidden, 2 * inner // tp), (inner // tp, hidden))
        first, second, third, fourth = (self.cluster.matmul_seconds(candidate.tokens, *each) for each in shapes)
        return first, second, third, fourth

    def exposed_seconds(self, candidate: Candidate, latency_s: float) -> float:
        """Seconds of a layer's collectives beyond the matmuls that run beside them (`tp_linear_async_communication`). A column
        linear gathers beside its own shard's matmul, gathers again beside the input gradient, and reduces beside the weight
        gradient. A row linear reduces beside nothing, and gathers beside its own shard's input gradient."""
        tp, nodes = candidate.tp, ceil(candidate.tp / candidate.ranks_per_node)
        if tp == 1:
            return 0.0
        carried = 2.0 * candidate.tokens * self.llama.hidden * (tp - 1) / tp
        gather, reduce = (
            latency_s + carried * self._byte_seconds(kind, nodes, latency_s)
            for kind in ("all_gather", "reduce_scatter")
        )
        exposed = 0.0
        for place, matmul in enumerate(self._matmul_seconds(candidate)):
            own = max(0.0, gather - matmul / tp)
            is_row = place % 2 == 1
            exposed += own + (reduce if is_row else max(0.0, gather - matmul) + max(0.0, reduce - matmul))
        return exposed

    def _byte_seconds(self, kind: str, nodes: int, latency_s: float) -> float:
        """Seconds of a byte that a rank's link carries: as measured, less the latencies that were measured along with it."""
        if nodes == 1 or not latency_s:
            return 1 / self._rate(kind, nodes)
        link, ranks = self.cluster.links[kind], nodes * self.cluster.ranks_per_node  # type: ignore[index]
        measured = MEASURED_BYTES * (ranks - 1) / ranks
        seconds = link.latency_s(kind, ranks, nodes) + measured / self._rate(kind, nodes)
        return (seconds - latency_s) / measured

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
