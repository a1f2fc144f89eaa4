"""Matmuls of stacked weights: each group of rows with its own matrix, on any kernel."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from framework.model import matmul
from framework.model.matmul import (
    RowGroups,
    accumulate_stacked_matmul,
    stacked_matmul,
    takes_grouped_matmul,
)

COUNTS = (3, 0, 5, 1)
CPU = torch.device("cpu")


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """left^T right of each group."""
    rows = zip(left.split(COUNTS), right.split(COUNTS), strict=True)
    return torch.stack([x.t() @ y for x, y in rows])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_each_group_has_its_own_matrix_and_an_empty_one_none(is_transposed: bool) -> None:
    x, weights = torch.randn(9, 5, dtype=torch.float64), torch.randn(4, 7, 5, dtype=torch.float64)
    given = weights.transpose(1, 2).contiguous().transpose(1, 2) if is_transposed else weights
    found = stacked_matmul(x, given, RowGroups.of(COUNTS, CPU))
    expected = torch.cat([rows @ w.t() for rows, w in zip(x.split(COUNTS), weights, strict=True)])
    torch.testing.assert_close(found, expected)
    assert stacked_matmul(x[:0], weights, RowGroups.of((0, 0, 0, 0), CPU)).shape == (0, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_grouped_kernel_and_the_loop_agree_in_every_bit(dtype: torch.dtype) -> None:
    """One is taken or the other by how rows lie: a run must not depend on it."""
    x, weights = torch.randn(9, 16, dtype=dtype), torch.randn(4, 24, 16).to(dtype)
    groups = RowGroups.of(COUNTS, CPU)
    grouped = F.grouped_mm(x, weights.transpose(1, 2), offs=groups.offsets)
    assert torch.equal(stacked_matmul(x, weights, groups), grouped)


def test_gradients_of_weights_are_written_first_and_then_added() -> None:
    left, right = torch.randn(9, 5), torch.randn(9, 7)
    groups, view = RowGroups.of(COUNTS, CPU), torch.full((4, 5, 7), torch.nan)
    for times in (1, 2):
        accumulate_stacked_matmul(view, left, right, groups, is_first=times == 1)
        torch.testing.assert_close(view, times * multiply(left, right))
    assert not view[1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [8, 16, 24, 12, 10, 7])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_what_is_sent_to_the_grouped_kernel_is_what_it_takes(
    dtype: torch.dtype, features: int, is_transposed: bool
) -> None:
    """F.grouped_mm refuses rows that do not start at 16 bytes, on CPUs by the same check as on GPUs."""
    x, weights = torch.randn(9, features, dtype=dtype), torch.randn(4, features, features, dtype=dtype)
    factor = weights if is_transposed else weights.transpose(1, 2)
    offsets = RowGroups.of(COUNTS, CPU).offsets
    is_taken = features * dtype.itemsize % 16 == 0
    assert takes_grouped_matmul(x) == takes_grouped_matmul(factor) == is_taken
    if is_taken:
        F.grouped_mm(x, factor, offs=offsets)
        F.grouped_mm(x.t(), x, offs=offsets)
    else:
        with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
            F.grouped_mm(x, factor, offs=offsets)


def test_memory_that_starts_between_16_bytes_and_no_rows_are_left_to_the_loop() -> None:
    memory = torch.zeros(4 * 8 * 8 + 1, dtype=torch.bfloat16)
    assert takes_grouped_matmul(memory[:-1].view(4, 8, 8))
    assert not takes_grouped_matmul(memory[1:].view(4, 8, 8))
    assert not takes_grouped_matmul(memory[:0].view(0, 8))


@pytest.mark.parametrize(
    ("capability", "is_fused"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), False)]
)
def test_torchs_grouped_kernel_is_called_where_there_is_one(
    capability: tuple[int, int], is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere it is a loop that waits for the sizes in each matmul."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    x: Any = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda"))
    assert matmul._multiplies_groups(x) == is_fused
