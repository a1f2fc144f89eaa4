"""The norm of the global gradient, every element counted once, and what clipping divides by."""

from collections.abc import Iterable

import torch
from torch import Tensor

# torch.nn.utils.clip_grad_norm_ adds this to the norm; kept so that clipping is the same to the last digits.
CLIP_EPSILON = 1e-6


def squared_norm(owned: Iterable[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over what this rank owns, fp64 scalar; summed over the world it is the global gradient's.

    Law 2: owned intervals partition every parameter, so nothing is counted twice and no axis is special.
    """
    norms = [torch.linalg.vector_norm(gradient).double() for gradient in owned if gradient.numel()]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def clip_divisor(norm: Tensor, clip_norm: float | None) -> Tensor:
    """max(1, norm / clip_norm), fp64 scalar: gradients divided by it have at most the norm `clip_norm`."""
    if clip_norm is None:
        return torch.ones_like(norm)
    return ((norm + CLIP_EPSILON) / clip_norm).clamp(min=1.0)
