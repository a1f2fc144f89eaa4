"""The product of a linear layer is torch's, in whatever form it is computed."""

import pytest
import torch
import torch.nn.functional as F

from framework.model.matmul import SMALL_MATMUL, accumulate_matmul, matmul


@pytest.fixture(params=[True, False], ids=["mkl", "onednn"], autouse=True)
def on_either_processor(request, monkeypatch):
    monkeypatch.setattr("framework.model.matmul.MKL_IS_FAST", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_the_product_is_torchs_for_any_size_and_dtype(dtype, rows, bias):
    x, w = torch.randn(2, rows, 64, dtype=dtype), torch.randn(97, 64, dtype=dtype)
    b = torch.randn(97, dtype=dtype) if bias else None
    assert (x.numel() * 97 >= SMALL_MATMUL) == (rows == 300)
    y = matmul(x, w, b)
    assert y.shape == (2, rows, 97)
    torch.testing.assert_close(y, F.linear(x, w, b), rtol=1e-5 if dtype != torch.bfloat16 else 2e-2, atol=1e-4)


def test_strides_do_not_matter():
    left, right = torch.randn(300, 97).t(), torch.randn(300, 64).t()
    torch.testing.assert_close(matmul(left, right), left @ right.t(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_collected_in_their_place(dtype):
    left, right = torch.randn(300, 97, dtype=dtype).t(), torch.randn(300, 64, dtype=dtype).t()
    place = torch.full((97, 64), torch.nan, dtype=dtype)
    accumulate_matmul(place, left, right, is_first=True)
    accumulate_matmul(place, left, right, is_first=False)
    torch.testing.assert_close(place, 2 * (left @ right.t()), rtol=1e-4, atol=1e-4)
