"""The norm of the global gradient, every element counted once, and what clipping divides by."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

# torch.nn.utils.clip_grad_norm_ adds this to the norm; kept so that clipping is the same to the last digits.
CLIP_EPSILON = 1e-6
# Elements whose squares are added in the gradient's dtype; such sums are added in fp64. On CPUs torch adds a long vector with a
# few running sums: of 4M fp32 elements the square of the norm was off by 6e-5, and in rows of 4,096 by 3e-9, in the same time.
ROW = 4096


def norm_rows(owned: Iterable[Tensor]) -> list[Tensor]:
    """The rows that `squared_norm` adds up of what this rank owns: views, [rows, ROW] of each tensor and [1, n] of its rest."""
    return [rows for each in owned for rows in _rows_of(each.view(-1))]


def squared_norm(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over what this rank owns, fp64 scalar; summed over the world it is the global gradient's.

    rows: of the gradients, as `norm_rows` gives them. Law 2: owned intervals partition every parameter, so nothing is counted
    twice and no axis is special.
    """
    norms = [torch.linalg.vector_norm(each, dim=1) for each in rows]
    return torch.cat(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def _rows_of(flat: Tensor) -> Iterator[Tensor]:
    whole = flat.numel() // ROW * ROW
    if whole:
        yield flat[:whole].view(-1, ROW)
    if whole < flat.numel():
        yield flat[whole:].view(1, -1)


def clip_divisor(norm: Tensor, clip_norm: float | None) -> Tensor:
    """max(1, norm / clip_norm), fp64 scalar: gradients divided by it have at most the norm `clip_norm`."""
    if clip_norm is None:
        return torch.ones_like(norm)
    return ((norm + CLIP_EPSILON) / clip_norm).clamp(min=1.0)
