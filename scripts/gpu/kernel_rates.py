"""Kernels as the framework calls them: equal to the CPU's where that is claimed, and how fast. 45 s.

    python scripts/gpu/kernel_rates.py          --tiny: on a CPU, which shows only that it runs

Shapes are those of a layer of Llama 3.1 8B at 8,192 tokens: T tokens, D width, I of the MLP, V words.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from rows import Rows
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from framework.comm.fused import Fused
from framework.mesh.layout import Box
from framework.model.loss import LARGEST_FUSED_CHUNK, LOSS, LocalSums, TorchLoss
from framework.model.matmul import accumulate_matmul
from framework.optim.bit_kernels import BITS, TorchBits
from framework.optim.low_bit import BLOCK, UNSIGNED, decode, encode
from framework.optim.states import CHUNK_DEVICE
from framework.optim.stochastic_rounding import round_to_bf16
from framework.parallel.zero.replicas import BitHash

TINY = "--tiny" in sys.argv
CPU = torch.device("cpu")
DEVICE = CPU if TINY else torch.device("cuda")
T, D, I, V = (64, 32, 48, 97) if TINY else (8192, 4096, 14336, 128_256)  # noqa: E741
HEADS, KV_HEADS, HEAD_DIM = (4, 2, 16) if TINY else (32, 8, 128)
LOSS_TOKENS = LARGEST_FUSED_CHUNK
ELEMENTS = 1 << (12 if TINY else 28)


def draw(*shape: int) -> Tensor:
    """Normal numbers in bf16 on the device."""
    return torch.randn(shape, device=DEVICE).bfloat16()


def time_ms(work: Callable[[], Any], count: int = 10) -> float:
    """Milliseconds of the device for one call, behind two that warm up."""
    for _ in range(2):
        work()
    if TINY:
        return 0.0
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    before.record()
    for _ in range(count):
        work()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / count


def rate(flops: float, work: Callable[[], Any], count: int = 10) -> float:
    """TFLOP/s of a call."""
    taken_ms = time_ms(work, count)
    return flops / taken_ms / 1e9 if taken_ms else 0.0


def has_equal_hash() -> bool:
    """Whether the device hashes as the CPU does, by which replicas are compared."""
    x = torch.randn(3 << 20)
    return int(BitHash(CPU).hash([x])) == int(BitHash(DEVICE).hash([x.to(DEVICE)]))


def has_equal_moments() -> bool:
    """Whether int8 moments and stochastic rounding have the CPU's bits."""
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), dtype=torch.int32)
    values = torch.randn(1 << 20).square()
    found = []
    for device in (CPU, DEVICE):
        codes = torch.zeros(len(values), dtype=torch.uint8, device=device)
        exponents = torch.zeros(len(values) // BLOCK, dtype=torch.uint8, device=device)
        here, chance = values.to(device), bits.to(device)
        encode(here, chance, codes, exponents, UNSIGNED)
        found.append((decode(codes, exponents, UNSIGNED).cpu(), round_to_bf16(here, chance).cpu()))
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def measure_matmuls(rows: Rows) -> None:
    """The three matmuls of a linear layer; and what a weight costs that starts off a boundary."""
    x, weight, gradient = draw(T, D), draw(I, D), draw(T, I)
    main, flops = torch.zeros(I, D, device=DEVICE), 2.0 * T * D * I
    off = torch.zeros(I * D + 8, dtype=torch.bfloat16, device=DEVICE)[1 : 1 + I * D].view(I, D)
    for name, work in {
        "forward": lambda: F.linear(x, weight),
        "forward, weight 2 bytes off a boundary": lambda: F.linear(x, off),
        "input gradient": lambda: torch.mm(gradient, weight),
        "weight gradient in bf16": lambda: torch.mm(gradient.t(), x),
        "weight gradient in fp32, written": lambda: accumulate_matmul(main, gradient, x, True),
        "weight gradient in fp32, added": lambda: accumulate_matmul(main, gradient, x, False),
    }.items():
        rows.attempt(f"matmul, {name}", partial(rate, flops, work), "TFLOP/s")


def measure_attention(rows: Rows) -> None:
    """Attention with its backward, as causal and with documents of 512 tokens."""
    q, k, v = (draw(1, heads, T, HEAD_DIM).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS))
    wide = [x.detach().repeat_interleave(HEADS // KV_HEADS, 1).requires_grad_() for x in (k, v)]
    mask = torch.ones(T, T, dtype=torch.bool, device=DEVICE).tril_()[None, None]
    flops = 3.5 * 4.0 * HEADS * HEAD_DIM * T * T / 2

    def causal() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    def masked() -> Tensor:
        return F.scaled_dot_product_attention(q, *wide, attn_mask=mask)

    def with_backward(forward: Callable[[], Tensor], backend: SDPBackend | None) -> float:
        with sdpa_kernel(backend) if backend is not None else torch.enable_grad():
            return rate(flops, lambda: torch.autograd.grad(forward(), [q], torch.ones_like(q)), 5)

    flash, cudnn = SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION
    for name, forward, backend in (
        ("causal, torch's choice", causal, None),
        ("causal, flash", causal, flash),
        ("causal, cuDNN", causal, cudnn),
        ("a mask, heads repeated", masked, None),
        ("a mask, cuDNN", masked, cudnn),
    ):
        if not (TINY and backend is cudnn):
            rows.attempt(f"attention, {name}", partial(with_backward, forward, backend), "TFLOP/s")
    if not TINY:
        rows.attempt("attention, documents of 512, varlen, forward", lambda: time_varlen(q, *wide), "ms")


def time_varlen(*heads: Tensor) -> float:
    """Milliseconds of torch's kernel for packed documents. heads: q, k, v, each [1, H, T, E]."""
    from torch.nn.attention.varlen import varlen_attn  # not in torch 2.9

    ends = torch.arange(0, T + 1, 512, dtype=torch.int32, device=DEVICE)
    flat = [x.detach()[0].transpose(0, 1).contiguous() for x in heads]
    # A causal window, which torch 2.10 still called a flag.
    is_named = "is_causal" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"is_causal": True} if is_named else {"window_size": (-1, 0)}
    return time_ms(lambda: varlen_attn(*flat, ends, ends, 512, 512, **causal), 5)


def measure_norms(rows: Rows) -> None:
    """RMS norm with its backward: transformers', torch's, compiled."""
    norm, x = LlamaRMSNorm(D).to(DEVICE, torch.bfloat16), draw(1, T, D).requires_grad_()
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "transformers'": norm,
        "F.rms_norm": lambda x: F.rms_norm(x, (D,), norm.weight, 1e-6),
    }
    if not TINY:
        calls["compiled"] = torch.compile(norm, dynamic=False)
    for name, call in calls.items():

        def work(call: Callable[[Tensor], Tensor] = call) -> Any:
            return torch.autograd.grad(call(x), [x, norm.weight], torch.ones_like(x))

        rows.attempt(f"RMS norm, {name}", partial(time_ms, work), "ms")


def forms_of(rows: Rows, kernels: Fused[Any]) -> dict[str, Any]:
    """torch's operations and, where they agree with these, the kernels in Triton: a row says which this device runs."""
    forms = {"torch": kernels.plain}

    def choose() -> str:
        forms["fused"] = kernels.on(DEVICE)
        return type(forms["fused"]).__name__

    rows.attempt(f"{kernels.name}, equal to torch's", choose)
    return forms


def measure_head(rows: Rows) -> None:
    """Head and loss of a chunk of tokens, and the embedding's gradient."""
    x, head = draw(min(LOSS_TOKENS, T), D), draw(V, D) * 0.02
    labels, main = torch.randint(0, V, (len(x),), device=DEVICE), torch.zeros(V, D, device=DEVICE)
    logits, ones = F.linear(x, head), torch.ones(len(x), device=DEVICE)
    sums = LocalSums.make(labels, x)
    ids, gradient = torch.randint(0, V, (T,), device=DEVICE), torch.randn(T, D, device=DEVICE)
    work: dict[str, Callable[[], Any]] = {
        "logits": lambda: F.linear(x, head),
        "weight gradient added": lambda: accumulate_matmul(main, logits, x, False),
        "embedding gradient of all tokens": lambda: main.index_put_((ids,), gradient, accumulate=True),
    }
    for form, kernel in forms_of(rows, LOSS).items():

        def read(kernel: TorchLoss = kernel) -> None:
            kernel.read(logits, labels, 0, sums.of(slice(None)))

        def differentiate(kernel: TorchLoss = kernel) -> None:
            kernel.differentiate(logits, labels, 0, ones * 20, ones, logits)

        work |= {f"softmax statistics, {form}": read, f"gradient of logits, {form}": differentiate}
    for name, each in work.items():
        rows.attempt(f"head, {len(x)} tokens, {name}", partial(time_ms, each), "ms")


def measure_fp8(rows: Rows) -> None:
    """An fp8 matmul of a layer, and the casts of its factors."""
    try:
        from framework.model.fp8 import CASTS, E4M3, E5M2, TorchCast, multiply_factors
    except ImportError as error:  # torchao is an optional dependency
        rows.attempt("fp8", partial(str, error))
        return
    x, weight = draw(T, D), draw(I, D)
    for form, kernel in forms_of(rows, CASTS).items():

        def cast(kernel: TorchCast = kernel) -> Any:
            return kernel.cast(x, kernel.find_largest(x, False), E4M3)

        def cast_both(kernel: TorchCast = kernel) -> Any:
            return kernel.cast_both(x, kernel.find_largest(x, False), E5M2)

        rows.attempt(f"fp8, a factor of {T} x {D}, {form}", partial(time_ms, cast), "ms")
        rows.attempt(f"fp8, a factor and its transpose, {form}", partial(time_ms, cast_both), "ms")
    left, right = (CASTS.on(DEVICE).cast(each, each.abs().amax().float(), E4M3) for each in (x, weight))
    multiply = partial(multiply_factors, left, right, torch.bfloat16, is_fast=True)
    rows.attempt("fp8, matmul of factors, forward", partial(rate, 2.0 * T * D * I, multiply), "TFLOP/s")


def measure_states(rows: Rows) -> None:
    """An int8 moment of a chunk of elements, brought to fp32 and back; bits that round it, and a value in bf16."""
    numel = min(CHUNK_DEVICE, ELEMENTS)
    values, words = torch.rand(numel, device=DEVICE), torch.zeros(numel, dtype=torch.int32, device=DEVICE)
    codes = torch.zeros(numel, dtype=torch.uint8, device=DEVICE)
    exponents = torch.zeros(numel // BLOCK, dtype=torch.uint8, device=DEVICE)
    weight = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    box, shape = Box((3, 0), (numel // 64, 64)), (ELEMENTS, 64)
    for form, kernel in forms_of(rows, BITS).items():

        def work(kernel: TorchBits = kernel) -> None:
            kernel.decode(codes, exponents, UNSIGNED, values)
            kernel.draw((7, "moments", 3, "w"), [box], shape, words)
            kernel.encode(values, words, 0, codes, exponents, UNSIGNED)
            kernel.round(values, words, 16, weight)

        # Decoded 1 + 4, drawn 4, encoded 4 + 4 + 1, rounded 4 + 4 + 2.
        rows.attempt(f"states in few bits, a chunk, {form}", partial(rate, 28.0 * numel / 1e3, work), "GB/s")


def measure_update(rows: Rows) -> None:
    """Fused AdamW on flat shards that start at a boundary of 16 bytes, and 4 bytes off it."""
    settings = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    one, zero = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)
    for off in (0, 1):
        flat = [[torch.zeros(ELEMENTS + 8, device=DEVICE)[off : off + ELEMENTS]] for _ in range(4)]
        count = torch.ones((), device=DEVICE)

        def work(flat: Any = flat, count: Tensor = count) -> None:
            torch._fused_adamw_(
                *flat, [], [count], **settings, amsgrad=False, maximize=False, grad_scale=one, found_inf=zero
            )

        rows.attempt(f"AdamW, {4 * off} bytes off a boundary", partial(rate, 28.0 * ELEMENTS, work, 5), "TB/s")


def main() -> None:
    """All of it, as rows."""
    rows = Rows("kernels")
    rows.attempt("hashes are the CPU's", has_equal_hash)
    rows.attempt("int8 moments and stochastic rounding are the CPU's", has_equal_moments)
    for measure in (
        measure_matmuls,
        measure_attention,
        measure_norms,
        measure_head,
        measure_fp8,
        measure_states,
        measure_update,
    ):
        measure(rows)


if __name__ == "__main__":
    main()
