"""Published throughput beside what is predicted of it: anchors of the time forecast, none of which anything is fitted to.

    python scripts/bench/anchors.py [--parts]

Each anchor is a run that others have published, as a model, a layout, the machine and the implementation profile of their
system (profiles.py). What they do not print is assumed, and said in the last column. Tokens per second and GPU
are compared, or TFLOP/s and MFU by the FLOPs that they count.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from profiles import AUTOMODEL, DEEPSEEK, MEGATRON, TORCHTITAN, TORCHTITAN_ASYNC
from published_models import deepseek, llama
from transformers import AutoConfig, PretrainedConfig

from framework.plan.candidate import Candidate
from framework.plan.cluster import ClusterRates, Grid
from framework.plan.profile import Profile
from framework.plan.shape import DEFAULT, ModelShape, make_shape
from framework.plan.time import TimeForecast, TimeModel
from framework.recipe.machines import read_shipped
from framework.recipe.schema import Memory, Recipe, Zero

H100 = ClusterRates.from_group(read_shipped("h100_ib"))
# Meta's nodes, as torchtitan's page describes them: HBM2e at 2.4 TB/s, of which large copies reach as much as of HBM3, and a
# limit of 500 W in place of 700. Power goes with the clock and the square of the voltage, and near its limit the voltage with
# the clock's root at least: the clock falls by the square root of the power.
CLOCK_AT_500W = (500 / 700) ** 0.5


def slower(rates: Grid) -> Grid:
    """Rates at that clock."""
    return replace(rates, values=tuple(CLOCK_AT_500W * each for each in rates.values))


GRAND_TETON = replace(
    H100,
    name="h100_500w",
    memory_rate=2.4e12 * H100.memory_rate / 3.35e12,
    matmul_rate={dtype: rate * CLOCK_AT_500W for dtype, rate in H100.matmul_rate.items()},
    attention_curves={
        kernel: (slower(forward), slower(backward)) for kernel, (forward, backward) in H100.attention_curves.items()
    },
)
H800 = ClusterRates.from_group(read_shipped("h800_ib"))


def gpt(layers: int, hidden: int, heads: int) -> PretrainedConfig:
    """A GPT of Megatron's table: untied, as its numbers of parameters say."""
    return AutoConfig.for_model(
        "gpt2",
        vocab_size=131072,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        n_positions=4096,
        tie_word_embeddings=False,
    )


MODELS: dict[str, Callable[[], PretrainedConfig]] = {
    "Llama 3.1 8B": lambda: llama(32, 4096, 14336, 32),
    "Llama 3.1 70B": lambda: llama(80, 8192, 28672, 64),
    "Llama 3.1 405B": lambda: llama(126, 16384, 53248, 128),
    "GPT 1.7B": lambda: gpt(24, 2048, 16),
    "GPT 7.1B": lambda: gpt(30, 4096, 32),
    "GPT 16B": lambda: gpt(32, 6144, 48),
    "GPT 32B": lambda: gpt(48, 7168, 56),
    "GPT 70B": lambda: gpt(84, 8192, 64),
    "GPT 119B": lambda: gpt(92, 10240, 80),
    "GPT 177B": lambda: gpt(96, 12288, 96),
    "GPT 314B": lambda: gpt(96, 16384, 128),
    "GPT 462B": lambda: gpt(112, 18432, 144),
    # Without the module that predicts a second token.
    "DeepSeek-V3": lambda: deepseek(128, 256, 3, 129280, False, 8, 4),
}

# torchtitan's selective policy "op" keeps attention and every second matmul.
EVERY_SECOND = Memory(kept_operations=["attention", "q_proj", "v_proj", "gate_proj", "down_proj"])
# With a pipeline its FSDP keeps gathered parameters, and reduces gradients in the last backward. It cuts the batch into as many
# microbatches as pipeline ranks unless told otherwise (pipelining_utils.py at the commit that the page names).
KEPT = Zero(stage=3, keep_gathered=True, accumulate="local")
# Gradients of 32B parameters over tp=8, 48 replicas and one 400 Gb/s adapter a GPU take 0.4 s in fp32, of a step of 0.9: what is
# printed leaves no room for that.
BF16_SUMS = replace(DEFAULT, precision=replace(DEFAULT.precision, reduce="bf16"))
FP8 = replace(DEFAULT, precision=replace(DEFAULT.precision, compute="fp8"))


@dataclass(frozen=True)
class Anchor:
    """A published run. printed: tokens per second and GPU, or with `tflops` TFLOP/s of a GPU by the system's own FLOPs of a
    token: `useful` of a shape. assumed: what its page does not say."""

    source: str
    name: str
    model: str
    printed: float
    candidate: Candidate
    cluster: ClusterRates
    profile: Profile
    settings: Recipe = DEFAULT
    assumed: str = ""
    is_tflops: bool = False


def torchtitan() -> list[Anchor]:
    """torchtitan's benchmarks/llama3_h100_202412_torchtitan.md, and 2D from asyncTP_llama3_h100_2025-06_torchtitan.md."""
    kept = replace(DEFAULT, memory=EVERY_SECOND)
    base = Candidate(zero=3, context=8192, checkpointing="selective", sequences=2)
    full = replace(base, checkpointing="full")
    place = {"cluster": GRAND_TETON}
    eager, compiled = {"profile": TORCHTITAN, "settings": kept}, {"profile": TORCHTITAN.fused(), "settings": kept}
    asynchronous = {"profile": TORCHTITAN_ASYNC.fused()}
    float8 = {"settings": replace(FP8, memory=EVERY_SECOND)}
    one, many = replace(base, dp=8, shard=8), replace(base, dp=128, shard=128)
    wide = replace(full, dp=32, tp=8, shard=32, sequence=True, sequences=16)
    deep = replace(full, dp=8, tp=8, pp=8, shard=8, sequence=True, sequences=4, accumulation=8)
    small = replace(base, dp=8, tp=8, shard=8, sequence=True, sequences=12)
    looped = replace(deep, schedule="interleaved", virtual=2)
    pipelined = asynchronous | {"settings": replace(FP8, zero=KEPT)}
    source, note = "torchtitan", "fp8 of layers, not of the head"
    rows: list[tuple[str, str, float, Candidate, dict[str, Any], str]] = [
        ("8 GPUs, FSDP, eager", "Llama 3.1 8B", 5762, one, eager, ""),
        ("8 GPUs, FSDP, compiled", "Llama 3.1 8B", 6667, one, compiled, ""),
        ("8 GPUs, FSDP, compiled, fp8", "Llama 3.1 8B", 8532, one, compiled | float8, note),
        ("128 GPUs, FSDP, eager", "Llama 3.1 8B", 5605, many, eager, ""),
        ("128 GPUs, FSDP, compiled", "Llama 3.1 8B", 6514, many, compiled, ""),
        ("64 GPUs, 2D 8 x 8", "Llama 3.1 8B", 4378, small, compiled, ""),
        ("64 GPUs, 2D 8 x 8, async TP", "Llama 3.1 8B", 4809, small, asynchronous | {"settings": kept}, ""),
        ("256 GPUs, 2D 32 x 8", "Llama 3.1 70B", 597, wide, {"profile": TORCHTITAN.fused()}, ""),
        ("256 GPUs, 2D 32 x 8, async TP", "Llama 3.1 70B", 652, wide, asynchronous, ""),
        ("256 GPUs, 2D 32 x 8, fp8", "Llama 3.1 70B", 829, wide, {"profile": TORCHTITAN.fused(), "settings": FP8}, note),
        ("256 GPUs, 2D, async TP, fp8", "Llama 3.1 70B", 876, wide, asynchronous | {"settings": FP8}, note),
        ("512 GPUs, 3D, 1F1B, fp8", "Llama 3.1 405B", 100, deep, pipelined, f"{note}; 8 microbatches"),
        ("512 GPUs, 3D, interleaved, fp8", "Llama 3.1 405B", 128, looped, pipelined, f"{note}; 8 microbatches, 2 stages a rank"),
    ]  # fmt: skip
    return [
        Anchor(source, name, model, printed, candidate, **place, **options, assumed=assumed)
        for name, model, printed, candidate, options, assumed in rows
    ]


def megatron() -> list[Anchor]:
    """Megatron-LM's README, weak scaling on H100s (images/model_table.png, Megatron-Core 0.8): sequences of 4,096, 48
    replicas."""
    rows = [
        ("GPT 1.7B", 408.8, 1, 1, 192, 1),
        ("GPT 7.1B", 465.9, 2, 1, 192, 1),
        ("GPT 16B", 489.1, 4, 1, 192, 1),
        ("GPT 32B", 459.6, 8, 1, 192, 1),
        ("GPT 70B", 419.7, 8, 2, 384, 42),
        ("GPT 119B", 420.5, 8, 4, 768, 23),
        ("GPT 177B", 432.8, 8, 6, 1152, 16),
        ("GPT 314B", 474.4, 8, 8, 1536, 12),
        ("GPT 462B", 459.9, 8, 16, 3072, 7),
    ]
    assumed = "microbatch 1, distributed optimizer, gradients summed in bf16"
    return [
        Anchor(
            "Megatron-LM",
            f"{48 * tp * pp} GPUs, tp {tp}, pp {pp}",
            model,
            tflops,
            Candidate(
                dp=48,
                tp=tp,
                pp=pp,
                sequence=tp > 1,
                zero=1,
                shard=48,
                schedule="interleaved" if virtual > 1 else "1f1b",
                virtual=virtual,
                accumulation=batch // 48,
            ),
            H100,
            MEGATRON,
            BF16_SUMS,
            assumed=assumed + (f"; interleaved, one layer a stage ({virtual} stages a rank)" if virtual > 1 else ""),
            is_tflops=True,
        )
        for model, tflops, tp, pp, batch, virtual in rows
    ]


def others() -> list[Anchor]:
    """AutoModel's docs/performance-summary.mdx, with examples/llm_benchmark/llama3_3/
    custom_llama3_1_70b_pretrain_benchmark_8nodes.yaml; DeepSeek-V3's report (arXiv 2412.19437), sections 1, 3 and 4.2."""
    automodel = Candidate(
        dp=32, cp=2, zero=3, shard=64, checkpointing="full", sequences=1, accumulation=4, context=8192
    )
    # 15,360 sequences of 4,096 tokens a step; 2.664 million hours for 14.8 trillion tokens, the rest is for longer contexts.
    per_gpu = 14.8e12 / (2.664e6 * 3600)
    v3 = Candidate(
        dp=128, pp=16, ep=64, zero=1, shard=128, schedule="dualpipe_v", virtual=2, accumulation=120, context=4096
    )
    return [
        Anchor("AutoModel", "64 GPUs, FSDP 64, cp 2", "Llama 3.1 70B", 866.77, automodel, H100, AUTOMODEL),
        Anchor(
            "DeepSeek",
            "2,048 H800, pp 16, ep 64",
            "DeepSeek-V3",
            per_gpu,
            v3,
            H800,
            DEEPSEEK,
            FP8,
            "microbatch 1; DualPipeV for DualPipe; no second token; parts of a layer that they recompute left out",
        ),
    ]


@dataclass
class Shapes:
    """Shapes by the model's name, made once."""

    known: dict[str, ModelShape] = field(default_factory=dict)

    def of(self, model: str) -> ModelShape:
        """The shape of a model of `MODELS`."""
        if model not in self.known:
            self.known[model] = make_shape(MODELS[model]())
        return self.known[model]


def megatron_flops(shape: ModelShape, context: int) -> float:
    """FLOPs of a token as Megatron's papers count them (Narayanan et al. 2021, section 5.1): 72 l h^2 (1 + s / 6h + V / 12 l h),
    of forward and backward."""
    layers, hidden = shape.num_layers, shape.hidden
    return 72 * layers * hidden**2 * (1 + context / (6 * hidden) + shape.vocabulary / (12 * layers * hidden))


def compare(anchor: Anchor, shapes: Shapes) -> tuple[float, TimeForecast]:
    """(what is predicted in the unit that is printed, the forecast)."""
    shape = shapes.of(anchor.model)
    # A profile says itself whether its system compiles.
    settings = replace(anchor.settings, memory=replace(anchor.settings.memory, compile="never"))
    found = TimeModel(shape, settings, anchor.cluster, anchor.profile).forecast(anchor.candidate)
    rate = found.tokens_per_s_and_rank
    if anchor.is_tflops:
        rate *= megatron_flops(shape, anchor.candidate.context) / 1e12
    return rate, found


def print_table(anchors: Sequence[Anchor], shows_parts: bool) -> None:
    """A row for each anchor, and the median error of each source and of all."""
    shapes, errors = Shapes(), dict[str, list[float]]()
    print(
        "| source | model | run | printed | predicted | error | MFU predicted | assumed |\n|---|---|---|---|---|---|---|---|"
    )
    for anchor in anchors:
        rate, found = compare(anchor, shapes)
        error = rate / anchor.printed - 1
        errors.setdefault(anchor.source, []).append(abs(error))
        unit = " TFLOP/s" if anchor.is_tflops else " tok/s"
        row = [anchor.source, anchor.model, anchor.name, f"{anchor.printed:,.0f}{unit}", f"{rate:,.0f}"]
        print(f"| {' | '.join(row)} | {error:+.0%} | {found.mfu:.1%} | {anchor.assumed} |")
        if shows_parts:
            parts = sorted(found.parts.items(), key=lambda part: -part[1])
            print("    " + ", ".join(f"{name} {seconds / found.step_s:.1%}" for name, seconds in parts if seconds))
    print()
    for source, values in errors.items():
        print(f"{source}: median error {statistics.median(values):.0%}, largest {max(values):.0%} of {len(values)}")
    every = [value for values in errors.values() for value in values]
    print(f"all: median error {statistics.median(every):.0%}, largest {max(every):.0%} of {len(every)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", action="store_true", help="where the predicted time goes, below each row")
    print_table([*torchtitan(), *megatron(), *others()], parser.parse_args().parts)


if __name__ == "__main__":
    main()
