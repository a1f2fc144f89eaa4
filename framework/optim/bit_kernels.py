"""The passes over optimizer states in few bits: torch's operations, or on CUDA kernels that read and write each element once.

    draw          random words of elements                     `stochastic_rounding`
    round         fp32 -> bf16, stochastically                 `stochastic_rounding`
    encode        fp32 -> codes and exponents of blocks        `low_bit`
    decode        codes and exponents -> fp32

All is integer arithmetic: both forms give the same bits. A word has 32 bits: `shift` says which 16 of them a rounding takes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from framework.comm.fused import Fused
from framework.mesh.layout import Box
from framework.optim import low_bit
from framework.optim.low_bit import BLOCK, SIGNED, UNSIGNED, CodeRange
from framework.optim.stochastic_rounding import ROUNDING_BITS, Key, draw_bits, round_to_bf16


class TorchBits:
    """Passes over flat tensors of one device, by torch's operations."""

    def draw(self, key: Key, boxes: Sequence[Box], shape: Sequence[int], out: Tensor) -> None:
        """`stochastic_rounding.draw_bits`."""
        draw_bits(key, boxes, shape, out)

    def round(self, values: Tensor, bits: Tensor, shift: int, out: Tensor) -> None:
        """Round `values`, fp32 [n], to `out`, bf16 [n], by the 16 of `bits`, int32 [n], that `shift` leaves lowest."""
        out.copy_(round_to_bf16(values, bits >> shift if shift else bits))

    def encode(
        self, values: Tensor, bits: Tensor, shift: int, codes: Tensor, exponents: Tensor, kind: CodeRange
    ) -> None:
        """Write the codes of `values`, fp32 [blocks * BLOCK], rounded as above, and the exponents of their blocks."""
        low_bit.encode(values, bits >> shift if shift else bits, codes, exponents, kind)

    def decode(self, codes: Tensor, exponents: Tensor, kind: CodeRange, out: Tensor) -> None:
        """Write the numbers of codes to `out` [blocks * BLOCK]."""
        out.copy_(low_bit.decode(codes, exponents, kind))


def _load_triton() -> Any:
    from framework.optim.triton_bits import TritonBits

    return TritonBits()


def _compute_example(kernel: TorchBits, device: torch.device) -> list[Tensor]:
    """Words of a slice of a stack; codes, numbers and roundings of values over 40 octaves, with zeros among them."""
    box, shape = Box((3, 1, 5), (4, 48, 5)), (1 << 20, 50, 70)
    words = torch.empty(box.numel, dtype=torch.int32, device=device)
    kernel.draw((7, "moments", 3, "w"), [box], shape, words)
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(-40 * torch.rand(box.numel, generator=generator)) * torch.randn(box.numel, generator=generator)
    values = values.masked_fill(torch.rand(box.numel, generator=generator) < 0.1, 0).to(device)
    rounded = torch.empty(box.numel, dtype=torch.bfloat16, device=device)
    kernel.round(values, words, ROUNDING_BITS, rounded)
    found = [words, rounded]
    for kind, each in ((SIGNED, values), (UNSIGNED, values.abs())):
        codes = torch.empty(box.numel, dtype=kind.dtype, device=device)
        exponents = torch.empty(box.numel // BLOCK, dtype=torch.uint8, device=device)
        numbers = torch.empty(box.numel, device=device)
        kernel.encode(each, words, 0, codes, exponents, kind)
        kernel.decode(codes, exponents, kind, numbers)
        found += [codes, exponents, numbers]
    return found


BITS = Fused("optimizer states in few bits", TorchBits(), _load_triton, _compute_example, is_exact=True)
