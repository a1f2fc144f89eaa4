"""`row_codes` in Triton: numbers of codes in one pass, which reads half a byte or one for each number and writes it."""

import triton
import triton.language as tl
from torch import Tensor

# Numbers of a program, and of a launch: places within it are of 32 bits.
ELEMENTS, LARGEST_LAUNCH = 1024, 2**30
_WHERE = ["here", "count", "width", "numel"]


@triton.jit(do_not_specialize=_WHERE)
def _decode_rows(
    table, codes, scales, columns, out, here, count, width, numel, IS_NF4: tl.constexpr, ELEMENTS: tl.constexpr
):  # fmt: skip
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    is_in = element < numel
    place = here.to(tl.int64) + element
    if IS_NF4:
        pair = tl.load(codes + place // 2, mask=is_in, other=0).to(tl.int32)
        code = (pair >> (4 * (place % 2).to(tl.int32))) & 0xF
    else:
        code = tl.load(codes + place, mask=is_in, other=0).to(tl.int32)
    row = element // width
    within = tl.load(columns + element % width, mask=is_in, other=0) - tl.load(columns)
    scale = tl.load(scales + row.to(tl.int64) * count + within, mask=is_in, other=0.0)
    number = tl.load(table + code, mask=is_in, other=0.0) * scale
    if out.dtype.element_ty == tl.bfloat16:
        # Half to even by integers, as the interpreter has no such cast.
        words = number.to(tl.int32, bitcast=True)
        rounded = (words + 0x7FFF + ((words >> 16) & 1)) >> 16
        tl.store(out + element, rounded.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=is_in)
    else:
        tl.store(out + element, number.to(out.dtype.element_ty), mask=is_in)


class TritonRows:
    """`row_codes.TorchRows` in Triton."""

    chunk = LARGEST_LAUNCH

    def decode(self, table: Tensor, codes: Tensor, here: int, scales: Tensor, columns: Tensor, out: Tensor) -> None:
        numel = out.numel()
        where = (here, scales.shape[1], out.shape[1], numel)
        _decode_rows[(triton.cdiv(numel, ELEMENTS),)](
            table, codes, scales, columns, out, *where, IS_NF4=len(table) == 16, ELEMENTS=ELEMENTS
        )
