"""Compile each kernel in Triton for an A100 and an H100, as a program: no GPU is needed, only that nothing interprets kernels."""

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from framework.comm import triton_codec
from framework.model import triton_kernels
from framework.model.fp8 import E4M3, E5M2
from framework.optim import triton_bits
from framework.optim.low_bit import BLOCK, FACTORS, SHIFTS, SIGNED, UNSIGNED

AMPERE, HOPPER = 80, 90
FP8 = {E4M3: "*fp8e4nv", E5M2: "*fp8e5"}


def compile_for_gpus(
    kernel: Any, pointers: dict[str, str], constants: dict[str, Any], warps: int = 4, needs_fp8: bool = False
) -> None:
    """Print the kernel's name and bytes of machine code, for each GPU. What is neither pointer nor constant is an int32."""
    signature = dict.fromkeys(kernel.arg_names, "i32") | pointers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature={name: signature[name] for name in kernel.arg_names}, constexprs=constants)
    for capability in (HOPPER,) if needs_fp8 else (AMPERE, HOPPER):
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
        print(kernel.__name__, capability, len(made.asm["cubin"]))


def main() -> None:
    """All kernels, each in its forms: one line for each."""
    rows = {"labels": "*i64", "logits": "*bf16"}
    block, warps = {"BLOCK": triton_kernels.WORDS_BLOCK}, triton_kernels.NUM_WARPS
    sums = dict.fromkeys(("maxima", "sums", "targets"), "*fp32")
    compile_for_gpus(triton_kernels._read_row, rows | sums, {"VOCABULARY": 128_256, **block}, warps)
    given = dict.fromkeys(("log_sums", "weights", "scales"), "*fp32") | {"out": "*bf16"}
    for has_scales in (True, False):
        compile_for_gpus(triton_kernels._differentiate_block, rows | given, {"HAS_SCALES": has_scales, **block}, warps)
    for by_row in (True, False):
        sizes = {"BY_ROW": by_row, **triton_kernels.TILE}
        compile_for_gpus(
            triton_kernels._find_largest, {"x": "*bf16", "largest": "*i32"}, sizes, triton_kernels.NUM_WARPS
        )
        for dtype, of_numbers in FP8.items():
            info = torch.finfo(dtype)
            scales = dict.fromkeys(("largest", "scales"), "*fp32")
            pointers = {"x": "*bf16", "numbers": of_numbers, "turned": of_numbers, **scales}
            least = info.smallest_normal * info.eps
            constants = {"TURNS": not by_row, "END": info.max, "SPACING": info.eps, "LEAST_SPACING": least}
            compile_for_gpus(triton_kernels._cast_tile, pointers, sizes | constants, triton_kernels.NUM_WARPS, True)
    factors = {f"FACTOR_{index}": factor for index, factor in enumerate(FACTORS)}
    shifts = {f"SHIFT_{index}": shift for index, shift in enumerate(SHIFTS)}
    elements = {"ELEMENTS": triton_bits.ELEMENTS}
    compile_for_gpus(triton_bits._draw_box, {"out": "*i32"}, factors | shifts | elements)
    flat = {"values": "*fp32", "bits": "*i32"}
    compile_for_gpus(triton_bits._round_elements, flat | {"out": "*bf16"}, elements)
    for kind, of_codes in ((SIGNED, "*i8"), (UNSIGNED, "*u8")):
        codes = {"codes": of_codes, "exponents": "*u8"}
        sizes = {"COUNT": kind.count, "MANTISSA": kind.mantissa_bits, "BLOCK": BLOCK, "BLOCKS": triton_bits.BLOCKS}
        compile_for_gpus(triton_bits._encode_blocks, flat | codes, {"SIGNED": kind is SIGNED, **sizes})
        compile_for_gpus(triton_bits._decode_blocks, codes | {"out": "*fp32"}, sizes)
    for codec_kind in ("fp8", "int8", "int4"):
        codes = {"KIND": codec_kind, "BLOCK": 256}
        options, needs_fp8 = codes | {"LARGEST": 127.0}, codec_kind == "fp8"
        compile_for_gpus(triton_codec._encode, {"x": "*bf16", "message": "*u8"}, options, needs_fp8=needs_fp8)
        compile_for_gpus(triton_codec._decode_sum, {"messages": "*u8", "out": "*bf16"}, codes, needs_fp8=needs_fp8)
    rows = {"table": "*fp32", "codes": "*u8", "scales": "*fp32", "columns": "*i64", "out": "*bf16"}
    for is_nf4 in (True, False):
        compile_for_gpus(triton_codec._decode_rows, rows, {"IS_NF4": is_nf4, "ELEMENTS": triton_codec.ELEMENTS})


if __name__ == "__main__":
    main()
