"""The norm of the gradient does not depend on how long the tensors are that hold it."""

import pytest
import torch

from framework.optim.optimizers import ROW, norm_rows, squared_norm


@pytest.mark.parametrize("numel", [1, ROW - 1, ROW, 3 * ROW + 5, 1 << 22])
def test_the_square_of_the_norm_is_exact_to_rounding_however_long_the_tensor(numel: int) -> None:
    gradient = 1e-3 * torch.randn(numel, generator=torch.Generator().manual_seed(0))
    gradient[: numel // 2] *= 0.01
    exact = float(gradient.double().square().sum())
    assert float(squared_norm(norm_rows([gradient]), gradient.device)) == pytest.approx(exact, rel=3e-7)


def test_an_empty_part_counts_nothing() -> None:
    assert float(squared_norm(norm_rows([torch.empty(0)]), torch.device("cpu"))) == 0.0
    assert float(squared_norm([], torch.device("cpu"))) == 0.0
