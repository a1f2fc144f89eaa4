"""Implementation profiles of other systems, described from their documentation, beside ours (framework/plan/profile.py)."""

from dataclasses import replace

from framework.plan.profile import (
    FUSED_ACTIVATION,
    FUSED_CAST,
    FUSED_NORM,
    FUSED_ROPE,
    NCCL_STOLEN,
    Kernels,
    Profile,
)

# torchtitan with FSDP2 at 9dec370, end of 2024: rms_norm (its models/norms.py, written as transformers writes it) and rope (in
# fp32, as complex numbers) are several kernels unless compiled; keys and values are copied for each query head, compiled or not
# (models/llama/model.py: repeat_kv, in front of sdpa without enable_gqa), and copied again when recomputed; the loss is
# computed of fp32 logits, by kernels that read rows of this length three times, and in backward both inputs twice
# (ATen/native/cuda/SoftMax.cu). A gather is issued a unit ahead, a reduction under the next unit's backward; both copy, a
# parameter at a time, out of and into one buffer. TP's borders are waited for. AdamW is fused only where --optimizer.fused is
# given: else one kernel for each operation of it, 20 passes over fp32 states where one kernel has 7.
TORCHTITAN = Profile(
    "torchtitan",
    dispatch="rows",
    kernel="flash2",
    rope=Kernels(10, 6, 6),
    repeats_heads=True,
    loss=Kernels(11, 4, 4),
    loss_gradient=Kernels(15, 6, 4),
    gather_copies=2.0,
    reduce_copies=2.0,
    hides_tp_gradient=0.0,
    optimizer_passes=20 / 7,
    stolen=NCCL_STOLEN,
)
# The same with async TP: pieces over symmetric memory, by copy engines, under the matmuls beside them.
TORCHTITAN_ASYNC = replace(TORCHTITAN, name="torchtitan, async TP", hides_tp=1.0)
# Megatron-Core with Transformer Engine: fused norms and activations, a cross-entropy over divided logits in several kernels
# (some 19 passes forward and 7 backward), cuDNN's attention (the FlashAttention-3 paper measures it at 1.6 times
# FlashAttention-2), weight gradients added inside of the matmul, --tp-comm-overlap, and gathers and reductions under
# computation.
MEGATRON = Profile(
    "Megatron-Core",
    dispatch="rows",
    kernel="cudnn",
    norm=FUSED_NORM,
    rope=FUSED_ROPE,
    activation=FUSED_ACTIVATION,
    loss=Kernels(13, 7, 8),
    cast=FUSED_CAST,
    hides_tp=1.0,
    stolen=NCCL_STOLEN,
)
# NeMo AutoModel: FSDP2 with prefetching, transformers' models, whose sdpa shares heads, with Transformer Engine's optimizer and
# torch.compile.
AUTOMODEL = replace(TORCHTITAN, name="AutoModel", optimizer_passes=1.0, repeats_heads=False).fused()
# DeepSeek's own framework, by its report: all-to-alls between nodes are hidden behind another microbatch's attention and experts
# (DualPipe), with 20 of 132 multiprocessors set aside for them.
DEEPSEEK = replace(
    MEGATRON,
    name="DeepSeek",
    narrows_experts=True,
    hides_ep=1.0,
    dispatch="once",
    row_bytes=3 / 4,
    hides_tp=0.0,
    stolen=20 / 132,
)
