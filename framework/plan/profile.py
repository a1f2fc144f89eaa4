"""Implementation profiles: overlap, fusion and overheads of a training system, beside the rates of the machine.

A cluster says how fast kernels and links are; a profile, which kernels a system launches and what it overlaps. Another system is
another value of the same dataclass. `OURS` is read off this repository's executor.
"""

from dataclasses import dataclass, replace
from typing import Literal

from framework.plan.cluster import ClusterRates


@dataclass(frozen=True)
class Kernels:
    """The elementwise kernels of one operation. passes: how often each of its elements is read or written, in units of the
    compute dtype: x + y is three; wide: the same in fp32, where nothing is cast on the way. launches: of kernels."""

    passes: float
    wide: float
    launches: int

    def bytes(self, itemsize: int) -> float:
        """Bytes that are moved for one element of so many bytes."""
        return (self.passes if itemsize < 4 else self.wide) * itemsize


# One kernel for each operation that transformers writes. RMS norm: to fp32, square, mean, scale, to the dtype, times its weight.
EAGER_NORM = Kernels(18, 7, 8)
# Rope of queries and keys: two products, the halves turned and joined, a sum.
EAGER_ROPE = Kernels(9, 9, 10)
# silu(gate) and its product with up, in passes over the features between the mlp's matmuls.
EAGER_ACTIVATION = Kernels(5, 5, 2)
RESIDUAL = Kernels(3, 3, 1)
# A block's part of attention's outputs, taken in by weights of each query (parallel/attention/passes.py).
MERGE = Kernels(3, 3, 4)
# The biases of a row's expert, taken by its number and added (parallel/experts/dispatch.py).
EXPERT_BIAS = Kernels(4, 4, 2)
# To fp32, logarithm of the softmax, the loss of the labels; in passes over the logits.
EAGER_LOSS = Kernels(7, 3, 4)
# A matmul's factor to fp8: its largest absolute value, the scaled and clamped values, the cast.
EAGER_CAST = Kernels(8.5, 0, 6)
# The kernels that torch.compile makes of a norm, of rope, of an activation and of a cast: each element is read and written once;
# a cast reads it twice, because the scale is known after the first pass.
FUSED_NORM, FUSED_ROPE, FUSED_ACTIVATION = Kernels(3, 3, 1), Kernels(2, 2, 1), Kernels(3, 3, 1)
FUSED_CAST = Kernels(2.5, 0, 2)
# Kernels in Triton: statistics of the softmax read logits once, their gradient is written where they were.
FUSED_LOSS, FUSED_LOSS_GRADIENT = Kernels(1, 1, 1), Kernels(2, 2, 1)


@dataclass(frozen=True)
class Profile:
    """A training system's way to run a step: shares of rates, kernels, overlap, overheads."""

    name: str
    matmul: float = 1.0
    """Share of the cluster's rate that matmuls reach inside a step (clocks, layouts of factors)."""
    kernel: str = ""
    """Attention's kernel in the cluster's file: flash1, flash2, flash3, cudnn; "": what the file states for all."""
    norm: Kernels = EAGER_NORM
    rope: Kernels = EAGER_ROPE
    activation: Kernels = EAGER_ACTIVATION
    residual: Kernels = RESIDUAL
    repeats_heads: bool = False
    """Whether attention gets copies of keys and values for each of the query heads that share them."""
    merge: Kernels = MERGE
    first_bias: Kernels | None = EXPERT_BIAS
    """Kernels that add biases of experts behind their first matmuls, `last_bias` behind the last; None: the matmuls do."""
    last_bias: Kernels | None = EXPERT_BIAS
    loss: Kernels = EAGER_LOSS
    loss_gradient: Kernels = EAGER_LOSS
    cast: Kernels = EAGER_CAST
    """Kernels that cast each factor of an fp8 matmul."""
    casts_once: bool = False
    """Whether a tensor is cast once for all its matmuls, and weights are kept narrow between microbatches."""
    narrow: str = "fp8"
    """The dtype of matmuls where the recipe says fp8: fp8, mxfp8, nvfp4."""
    grouped: float = 1.0
    """Share of a matmul's rate that grouped matmuls of experts reach."""
    groups_experts: bool = True
    """Whether one launch multiplies the rows of all of a rank's experts."""
    narrows_experts: bool = False
    """Whether experts are multiplied in fp8 as linear layers are."""
    gradient_bytes: float = 8.0
    """Moved for each weight and microbatch to add to its main gradient, beside the matmul itself."""
    optimizer_passes: float = 1.0
    """Passes of the update over all states; 1: one kernel does all of it."""
    hides_gathers: float = 1.0
    """Share of the computation under which gathers of the next unit's parameters run; `hides_reductions` likewise."""
    hides_reductions: float = 1.0
    gather_copies: float = 0.0
    """Passes over memory of a gathered unit, to copy it out of the collective's buffer; `reduce_copies`: into it."""
    reduce_copies: float = 0.0
    hides_tp: float = 0.0
    """Share of the borders' collectives under matmuls."""
    hides_tp_gradient: float = 1.0
    """Share of the weight gradients under which the sum of a region's input gradient travels."""
    hides_ep: float = 0.0
    """Share of a layer's computation, of another microbatch, under which rows travel."""
    dispatch: Literal["hops", "rows", "once"] = "hops"
    """Ways of rows to experts: our two hops; a row for each expert; once to each rank that has experts of a token, as DeepEP."""
    row_bytes: float = 1.0
    """Bytes of a row that travels over those in the compute dtype."""
    row_passes: float = 4.0
    """Passes that read and write all rows: spread, sorted on arrival, sorted back, summed by token."""
    imbalance: float = 1.0
    """Rows of the fullest rank's experts over the mean rank's."""
    layer_s: float = 0.0
    """Host time to launch a layer's forward; its backward takes twice as long. `mixture_s`: of one with experts, and
    `expert_s` of each of a rank's experts."""
    mixture_s: float = 0.0
    expert_s: float = 0.0
    stolen: float = 0.0
    """Share of the compute device that a collective beside it takes, such as a GPU's multiprocessors."""

    def launch_s(self, experts: int | None) -> float:
        """Host time to launch a layer's forward. experts: of the rank; None: the layer has none."""
        return self.layer_s if experts is None else self.mixture_s + self.expert_s * max(1, experts)

    def fused(self) -> "Profile":
        """The profile with torch.compile over each layer."""
        fused = {"norm": FUSED_NORM, "rope": FUSED_ROPE, "activation": FUSED_ACTIVATION, "cast": FUSED_CAST}
        return replace(self, name=f"{self.name}, compiled", **fused)  # type: ignore[arg-type]


# FLOPs of attention's backward over its forward's, five matmuls for two; bytes of elementwise backwards over forwards'.
ATTENTION_BACKWARD, BACKWARD_PASSES = 2.5, 2.0
# NCCL's kernels hold some 16 of an H100's 132 multiprocessors while they run (its default of 16 channels, a block each).
NCCL_STOLEN = 16 / 132
OURS = Profile("meshwright", stolen=NCCL_STOLEN)
OURS_ON_GPUS = replace(OURS, loss=FUSED_LOSS, loss_gradient=FUSED_LOSS_GRADIENT, cast=FUSED_CAST)
# A scan in chunks of states of 64 takes as long as FlashAttention-2 over 2,048 tokens (Dao and Gu 2024, Mamba-2, section 9.3): a
# FLOP of the one (33,000 of a token and head of 64) as long as eight of the other (262,000).
SCAN_FLOPS, SCAN_SHAPE = 8.0, (2048, 64)


@dataclass(frozen=True)
class Rates:
    """Seconds of kernels on a cluster, by a profile. dtype: of the matmuls; itemsize: of an activation."""

    cluster: ClusterRates
    profile: Profile
    dtype: str
    itemsize: int

    @property
    def peak(self) -> float:
        """FLOP/s over which MFU is counted: of bf16, or of a wider compute dtype."""
        rates = self.cluster.peak_flops
        return rates["bf16" if self.itemsize == 2 and "bf16" in rates else self.dtype]

    def matmul(self, rows: float, inner: int, columns: int, narrow: bool = True) -> float:
        """Seconds of [rows, inner] times [inner, columns]. narrow: in fp8 where the recipe says so, with the casts of both
        factors; else in bf16 then."""
        if rows <= 0:
            return 0.0
        dtype, is_narrow = self._choose(narrow)
        seconds = self.cluster.matmul_seconds(max(1, round(rows)), inner, columns, dtype) / self.profile.matmul
        cast = inner * (rows + (0 if self.profile.casts_once else columns))
        return seconds + (self.elementwise(cast, self.profile.cast) if is_narrow else 0.0)

    def gradient(self, rows: float, inner: int, columns: int, added_bytes: float, narrow: bool) -> float:
        """Seconds of the weight gradient of so many tokens, which moves `added_bytes` to be added. narrow: as of `matmul`."""
        if rows <= 0:
            return 0.0
        dtype, is_narrow = self._choose(narrow)
        seconds = self.cluster.gradient_seconds(max(1, round(rows)), inner, columns, added_bytes, dtype)
        casts = is_narrow and not self.profile.casts_once
        cast_s = self.elementwise(rows * (inner + columns), self.profile.cast) if casts else 0.0
        return seconds / self.profile.matmul + cast_s

    def _choose(self, narrow: bool) -> tuple[str, bool]:
        """(the dtype of a matmul, whether its factors are cast to it)."""
        if self.dtype != "fp8":
            return self.dtype, False
        return (self.profile.narrow, True) if narrow else ("bf16", False)

    def attention(self, flops: float, shape: tuple[int, int], *, backward: bool = False) -> float:
        """Seconds of so many FLOPs in an attention's kernel. shape: tokens of a sequence, features of a head."""
        dtype, _ = self._choose(narrow=False)
        return self.cluster.attention_seconds(flops, dtype, backward=backward, shape=shape, kernel=self.profile.kernel)

    def scan(self, flops: float, *, backward: bool = False) -> float:
        """Seconds of so many FLOPs of a recurrent mixer, in chunks."""
        flops *= SCAN_FLOPS * (ATTENTION_BACKWARD if backward else 1.0)
        dtype, _ = self._choose(narrow=False)
        return self.cluster.attention_seconds(flops, dtype, backward=backward, shape=SCAN_SHAPE, kernel="flash2")

    def elementwise(self, elements: float, kernels: Kernels, times: float = 1.0) -> float:
        """Seconds of an operation's kernels over so many elements, which move equally much each. times: backward's bytes over
        forward's."""
        launches = kernels.launches * times
        return launches * self.cluster.memory_seconds(elements * kernels.bytes(self.itemsize) * times / launches)

    def moved(self, num_bytes: float) -> float:
        """Seconds of one pass that reads and writes so many bytes in all."""
        return self.cluster.memory_seconds(num_bytes)
