"""Systems of published runs: the machine, the profile, and what their configurations recompute, shard and overlap.

Read off their sources: Megatron-Bridge's scripts/performance/configs at the tag of each release (v0.2.0 is 25.11, v0.3.0 26.02,
v0.3.1 26.02.01, v0.4.0 26.04, v0.4.1 26.04.01, v0.5.0 26.06) and src/megatron/bridge/perf_recipes for 26.08; llm-foundry's
scripts/train/benchmarking/sweep.sh and submit_benchmarks.py. `FITTED` is all that is fitted to published runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from framework.plan.candidate import Checkpointing
from framework.plan.cluster import ClusterRates
from framework.plan.profile import (
    FUSED_LOSS,
    FUSED_LOSS_GRADIENT,
    NCCL_STOLEN,
    Kernels,
    Profile,
)
from framework.plan.shape import DEFAULT
from framework.recipe.machines import read_shipped
from framework.recipe.schema import Recipe
from scripts.bench.profiles import AUTOMODEL, MEGATRON

CLUSTERS = {
    "DGX-H100": "h100_ib",
    "DGX-B200": "b200_ib",
    "DGX-B300": "b300_ib",
    "DGX-GB200": "gb200_nvl72",
    "DGX-GB300": "gb300_nvl72",
    "h100_80gb": "h100_ib",
    "a100_80gb": "a100_ib",
    "a100_40gb": "a100_ib",
}


@dataclass(frozen=True)
class Fitted:
    """Constants fitted to the fitting half of the runs (`scripts/bench/published.py --fit`). UNITS says what each one is."""

    foundry_a100: float = 0.84
    foundry_h100: float = 0.81
    grouped: float = 0.755
    fused: float = 0.925
    mixture_ms: float = 4.36
    expert_us: float = 46.0
    graphs: float = 0.65


UNITS: Mapping[str, str] = {
    "foundry_h100": "share of h100_ib's matmul rates that CUDA 11.8's cuBLAS reaches, with which llm-foundry measured",
    "foundry_a100": "share of a100_ib's matmul rates that it reached",
    "grouped": "share of matmul rates that grouped matmuls of experts reach in Transformer Engine",
    "fused": "the same with the fused ones that came with 26.06's CUDA graphs of whole iterations",
    "mixture_ms": "ms in which Megatron's host launches the forward of a layer with experts; backward twice as much",
    "expert_us": "us of it for each expert that the rank has, more",
    "graphs": "share of it that is left with Transformer Engine's CUDA graphs of attention and router",
}
FITTED = Fitted()
UNFITTED = Fitted(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0)

# llm-foundry v0.0.4: LayerNorm in bf16 and GELU as torch's kernels, FlashAttention's kernel in Triton, flash-attn's fused loss,
# FSDP with gradients summed in bf16 (mixed_precision PURE), Composer's optimizer in several kernels. Transformer Engine's fp8
# with delayed scaling: one kernel writes a tensor and its transpose.
FOUNDRY = Profile(
    "llm-foundry",
    kernel="flash1",
    norm=Kernels(2, 2, 1),
    activation=Kernels(2, 2, 1),
    loss=FUSED_LOSS,
    loss_gradient=FUSED_LOSS_GRADIENT,
    cast=Kernels(2, 0, 1),
    casts_once=True,
    gradient_bytes=0.0,
    gather_copies=2.0,
    reduce_copies=2.0,
    optimizer_passes=20 / 7,
    stolen=NCCL_STOLEN,
)
# Casts of Transformer Engine in passes of two bytes, its autocast less its pre-quantised times on a B300 (docs/examples/
# gemm_profiling) over 2,482 million elements: 2.34, 1.82 and 2.69 ms. A tensor is cast once for both directions.
CASTS = {"fp8": Kernels(3.3, 0, 2), "mxfp8": Kernels(2.6, 0, 1), "nvfp4": Kernels(3.8, 0, 3)}
# Biases of experts: the first matmul adds its own, the last one's are added an expert at a time (TEGroupedMLP._apply_bias): b p
# in fp32, the sum with it, all of them joined, to bf16. 14 passes of two bytes in forward, 18 in backward, and 3 for the
# gradients of both biases.
LAST_BIAS = Kernels(35 / 3, 0, 4)
# bias_dropout_fusion=False of GPT-OSS: bias, dropout and residual by themselves.
APART = Kernels(7.5, 0, 3)
BRIDGE = replace(
    MEGATRON,
    first_bias=None,
    last_bias=LAST_BIAS,
    name="Megatron-Bridge",
    narrows_experts=True,
    casts_once=True,
    loss=Kernels(3, 3, 2),
    loss_gradient=FUSED_LOSS_GRADIENT,
)


@dataclass(frozen=True)
class System:
    """The making of a run, as far as its source tells."""

    cluster: ClusterRates
    profile: Profile
    settings: Recipe
    zero: int
    checkpointing: Checkpointing = "none"


@cache
def read_cluster(name: str) -> ClusterRates:
    """The rates of a shipped file."""
    return ClusterRates.from_group(read_shipped(name))


def find_system(cells: Mapping[str, str], fitted: Fitted = FITTED) -> System:
    """The system of a run of the file."""
    source = {"llm-foundry": _foundry, "Automodel": _automodel, "Megatron-Bridge": _bridge}
    return source[cells["source"]](cells, read_cluster(CLUSTERS[cells["system"]]), fitted)


def _settings(compute: str, reduce: str = "fp32", kept: tuple[str, ...] = ()) -> Recipe:
    precision = replace(DEFAULT.precision, compute=compute, reduce=reduce)  # type: ignore[arg-type]
    memory = replace(DEFAULT.memory, compile="never", kept_operations=list(kept) or DEFAULT.memory.kept_operations)
    return replace(DEFAULT, precision=precision, memory=memory)


def _foundry(cells: Mapping[str, str], cluster: ClusterRates, fitted: Fitted) -> System:
    note, profile = cells["note"], FOUNDRY
    profile = replace(profile, matmul=fitted.foundry_h100 if cells["system"] == "h100_80gb" else fitted.foundry_a100)
    if cells["system"] == "a100_40gb":
        cluster = replace(cluster, memory_rate=cluster.memory_rate * 1555 / 2039)  # by NVIDIA's data sheet
    settings = _settings("fp8" if "fp8" in cells["precision"] else "bf16", "bf16")
    recomputes = "Activation Checkpointing=True" in note
    return System(cluster, profile, settings, 3 if "FULL_SHARD" in note else 2, "full" if recomputes else "none")


def _automodel(cells: Mapping[str, str], cluster: ClusterRates, fitted: Fitted) -> System:
    # By examples/benchmark/configs: each block is recomputed (activation_checkpointing), but those of GPT-OSS.
    profile = replace(
        AUTOMODEL,
        kernel="cudnn",
        dispatch="once" if "DeepEP" in cells["note"] else "rows",
        row_passes=2.0,
        grouped=fitted.grouped,
    )
    return System(cluster, profile, _settings("bf16"), 3, "none" if "GPT-OSS" in cells["model"] else "full")


def _bridge(cells: Mapping[str, str], cluster: ClusterRates, fitted: Fitted) -> System:
    precision = cells["precision"].lower()
    narrow = "nvfp4" if "nvfp4" in precision else "mxfp8" if "mx" in precision else "fp8"
    graphs = find_graphs(cells)
    share = {"none": 1.0, "te": fitted.graphs, "full": 0.0}[graphs]
    profile = replace(
        BRIDGE,
        narrow=narrow,
        cast=CASTS[narrow],
        mixture_s=1e-3 * share * fitted.mixture_ms,
        expert_s=1e-6 * (graphs != "full") * fitted.expert_us,
        groups_experts=graphs == "full",
        hides_ep=float(hides_dispatch(cells)),
        dispatch="once" if sends_once(cells) else "rows",
        row_passes=2.0 if sends_once(cells) else 4.0,
        grouped=fitted.fused if graphs == "full" else fitted.grouped,
    )
    if cells["model"].startswith("GPT OSS"):
        profile = replace(profile, residual=APART, last_bias=None if graphs == "full" else LAST_BIAS)
    kept, policy = find_kept(cells)
    settings = _settings("bf16" if "bf16" in precision else "fp8", "bf16", kept)
    return System(cluster, profile, settings, 3 if cells["fsdp"] not in ("", "0") else 1, policy)


# --- what the configurations of each release say

# Releases in order.
RELEASES = ("25.09", "25.11", "26.02", "26.02.01", "26.04", "26.04.01", "26.06", "26.06.01", "26.08")


def _since(cells: Mapping[str, str], release: str) -> bool:
    return RELEASES.index(cells["release"]) >= RELEASES.index(release)


def find_graphs(cells: Mapping[str, str]) -> str:
    """CUDA graphs of a run: none, te (attention, router and what is before dispatch), full (whole iterations)."""
    model, gpu, precision = cells["model"], cells["system"].removeprefix("DGX-"), cells["precision"].lower()
    mx = "mx" in precision
    if model == "LLAMA3_8B":
        return "full" if gpu != "H100" else "none"
    if model.startswith("LLAMA"):
        return "te" if cells["task"] != "Pre-Training" and gpu.startswith("GB") else "none"
    if model.startswith("Nemotron"):
        return "none" if model == "Nemotron_3_Super" and gpu == "B200" and mx else "te"
    if model.startswith("Qwen3"):
        if gpu.startswith("GB") or (model == "Qwen3_30B_a3B" and gpu == "B300"):
            return "full" if _since(cells, "26.06") and mx else "te"
        return "te" if gpu == "B200" and model == "Qwen3_30B_a3B" else "none"
    if model == "GPT OSS 120B":
        if _since(cells, "26.06") and mx and gpu.startswith("GB"):
            return "full"
        return "te" if gpu in ("GB300", "B300") else "none"
    if model == "DeepSeekV3":
        if _since(cells, "26.06") and gpu.startswith("GB") and mx:
            return "full"
        return "te" if gpu == "GB200" or (gpu == "GB300" and not _since(cells, "26.02")) else "none"
    return "none"


def hides_dispatch(cells: Mapping[str, str]) -> bool:
    """Whether rows travel under another microbatch's computation (overlap_moe_expert_parallel_comm)."""
    model, gpu = cells["model"], cells["system"].removeprefix("DGX-")
    if find_graphs(cells) == "full":
        return cells["pp"] != "1"
    if model == "Qwen3_235B_a22B":
        return gpu == "H100" or (gpu == "B300" and not _since(cells, "26.04"))
    if model == "GPT OSS 120B":
        return gpu == "GB200" and _since(cells, "26.04")
    if model != "DeepSeekV3":
        return False
    return _since(cells, "26.04.01") if gpu == "B200" else gpu == "H100" and not _since(cells, "26.02")


def sends_once(cells: Mapping[str, str]) -> bool:
    """Whether DeepEP or HybridEP dispatch rows (moe_flex_dispatcher_backend), in place of an all-to-all."""
    model, gpu = cells["model"], cells["system"].removeprefix("DGX-")
    if model == "Qwen3_235B_a22B":
        return gpu.startswith("GB") or (gpu == "B300" and _since(cells, "26.04"))
    if model == "Qwen3_30B_a3B":
        return gpu != "B200"
    if model == "GPT OSS 120B":
        return find_graphs(cells) == "full" or (gpu == "B300" and cells["ep"] == "8")
    return not (model == "DeepSeekV3" and gpu == "B200" and not _since(cells, "26.02"))


LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj", "down_proj"),
    *("in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj"),
)
UP = ("q_b_proj", "kv_b_proj")


def find_kept(cells: Mapping[str, str]) -> tuple[tuple[str, ...], Checkpointing]:
    """(operations whose outputs are kept, the policy): recompute_modules and recompute_num_layers of the configurations."""
    model, gpu = cells["model"], cells["system"].removeprefix("DGX-")
    everything = ("attention", "experts", *LINEARS, *UP)
    if model in ("DeepSeekV3", "Kimi_K2"):
        if find_graphs(cells) == "full":
            return (), "none"
        return tuple(each for each in everything if each not in UP), "selective"
    if model == "GPT OSS 120B" and gpu in ("GB200", "B200", "H100") and find_graphs(cells) != "full":
        return everything, "selective"
    if model == "Nemotron_3_Super" and gpu in ("B200", "B300") and "nvfp4" in cells["precision"].lower():
        return everything, "selective"
    if model == "Nemotron_3_Nano" and gpu == "H100":
        return tuple(each for each in everything if each not in ("attention", "experts")), "selective"
    return (), "none"
