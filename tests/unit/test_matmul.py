"""The matmuls of a linear layer are torch's, wherever their results go."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from framework.model.matmul import MatmulLinear, accumulate_matmul, matmul_into


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_matmuls_add_up_in_a_view(dtype):
    left, right = torch.randn(300, 97, dtype=dtype).t(), torch.randn(300, 64, dtype=dtype).t()
    view = torch.full((97, 64), torch.nan, dtype=dtype)
    accumulate_matmul(view, left.t(), right.t(), is_first=True)
    accumulate_matmul(view, left.t(), right.t(), is_first=False, scale=0.3)
    torch.testing.assert_close(view, 1.3 * (left @ right.t()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_of_16_bits_are_added_in_fp32_unrounded_where_the_kernel_does(dtype, monkeypatch):
    """Only GPUs have these operators: here stand-ins with their signatures."""
    monkeypatch.setattr("framework.model.matmul._writes_fp32", lambda factor, view: True)

    def mm(self, mat2, out_dtype, *, out):
        return out.copy_(self.to(out_dtype) @ mat2.to(out_dtype))

    def addmm(self, mat1, mat2, out_dtype, *, beta=1, alpha=1, out):
        return out.copy_(beta * self + alpha * (mat1.to(out_dtype) @ mat2.to(out_dtype)))

    factors = [(torch.randn(300, 97).to(dtype), torch.randn(300, 64).to(dtype)) for _ in range(3)]
    view = torch.full((97, 64), torch.nan)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype_out", mm, "CPU")
        library.impl("addmm.dtype_out", addmm, "CPU")
        for number, (left, right) in enumerate(factors):
            accumulate_matmul(view, left, right, is_first=number == 0, scale=0.5)
    expected = 0.5 * sum(left.double().t() @ right.double() for left, right in factors)
    torch.testing.assert_close(view.double(), expected, rtol=0, atol=1e-6 * expected.abs().max())


class Sum:
    """A main gradient, as a unit buffer gives one to a layer."""

    def __init__(self, parameter):
        self.parameter, self.sum = parameter, torch.zeros_like(parameter, dtype=torch.float64)

    def add_matmul(self, left, right):
        self.sum += (left.t() @ right).detach()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_layers_three_matmuls_are_autograds(is_transposed):
    weight = nn.Parameter(torch.randn(97, 64, dtype=torch.float64))
    layer = MatmulLinear(
        nn.Parameter(weight.detach().t().contiguous()) if is_transposed else weight, None, is_transposed
    )
    x, dy = torch.randn(2, 30, 64, dtype=torch.float64, requires_grad=True), torch.randn(2, 30, 97, dtype=torch.float64)
    y = F.linear(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), dy)
    x = x.detach()
    torch.testing.assert_close(layer.matmul.forward(x), y.detach())
    torch.testing.assert_close(layer.matmul.input_gradient(dy), dx)
    torch.testing.assert_close(layer.matmul.weight_gradient(x, dy), dw.t() if is_transposed else dw)
    assert layer.matmul.graph_input is layer.weight
    main = Sum(layer.weight)
    layer.matmul.write_gradient_to(main)
    assert layer.matmul.graph_input.requires_grad
    assert layer.matmul.graph_input is not layer.weight
    assert [layer.matmul.weight_gradient(x, dy) for _ in range(2)] == [None, None]
    torch.testing.assert_close(main.sum, 2 * (dw.t() if is_transposed else dw))


@pytest.mark.parametrize("rows", [3, 300])
def test_a_matmul_into_rows_of_a_larger_tensor_is_the_same(rows):
    x, w, b = torch.randn(2, rows, 64), torch.randn(97, 64), torch.randn(97)
    whole = torch.zeros(2, rows + 1, 97)
    for bias in (b, None):
        torch.testing.assert_close(matmul_into(whole[:, :rows], x, w, bias), F.linear(x, w, bias), rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(
            matmul_into(whole[:1, :rows], x[:1], w, bias), F.linear(x[:1], w, bias), rtol=1e-5, atol=1e-4
        )
    assert not whole[:, rows].any()
