"""Weight gradients on a GPU: factors of 16 bits are added in fp32, without a rounding in between. And kernels in Triton."""

import pytest
import torch

from framework.model.loss import LOSS
from framework.model.matmul import accumulate_matmul
from framework.optim.bit_kernels import BITS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_of_16_bits_are_added_in_fp32(device: torch.device, dtype: torch.dtype) -> None:
    factors = [(torch.randn(512, 96).to(dtype), torch.randn(512, 64).to(dtype)) for _ in range(8)]
    view = torch.full((96, 64), torch.nan, device=device)
    for number, (left, right) in enumerate(factors):
        accumulate_matmul(view, left.to(device), right.to(device), is_first=number == 0)
    expected = sum(left.double().t() @ right.double() for left, right in factors)
    assert isinstance(expected, torch.Tensor)
    error = (view.cpu().double() - expected).norm() / expected.norm()
    assert error < 1e-5, f"{error:.1e}; rounded once in each matmul it would be 2e-3 in bf16, 2e-4 in fp16"


def test_kernels_in_triton_give_what_torch_gives(device: torch.device) -> None:
    """As each is asked before its first use: then a difference ends the run."""
    for kernels in (LOSS, BITS):
        assert kernels.find_fault(kernels.load(), device) is None
        assert kernels.on(device) is not kernels.plain


def test_casts_to_fp8_in_triton_give_what_torch_gives(device: torch.device) -> None:
    pytest.importorskip("torchao")
    from framework.model.fp8 import CASTS

    assert CASTS.find_fault(CASTS.load(), device) is None
