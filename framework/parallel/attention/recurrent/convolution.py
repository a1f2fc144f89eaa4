"""The short convolution of a mixer: depthwise and causal, over the last K tokens.

    y_t = f( b + sum_{j < K} w_j x_{t-j} )        x_{t-j} = 0 in front of the token's document

for each channel alone. The first tokens of a piece read the last K - 1 of the piece before.

    B sequences of T tokens on this rank, in P pieces of N; D channels
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from framework.parallel.attention.recurrent.pieces import Pieces


def convolve(
    pieces: Pieces,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_others: Any,
) -> Tensor:
    """Called as transformers' `causal_conv1d_fn`: hidden_states [B, D, T], weight [D, K], bias [D] -> [B, D, T]."""
    length = weight.shape[-1] - 1
    x = pieces.cut(hidden_states.transpose(1, 2)).to(weight.dtype)
    # [B, P, D, K - 1 + N]
    x = torch.cat([pieces.window(x, length), x], dim=2).transpose(2, 3)
    starts = pieces.starts(x.device)
    if starts is None:
        y = F.conv1d(x.flatten(0, 1), weight[:, None], bias, groups=len(weight)).unflatten(0, x.shape[:2])
    else:
        y = _convolve_documents(x, weight, bias, starts)
    y = y if activation is None else ACT2FN[activation](y)
    return pieces.join(y.transpose(2, 3)).transpose(1, 2).to(hidden_states.dtype)


def _convolve_documents(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor) -> Tensor:
    """x: [B, P, D, K - 1 + N], weight [D, K], bias [D], starts [B or 1, P, N] -> [B, P, D, N]."""
    taps, tokens = weight.shape[-1], starts.shape[-1]
    places = torch.arange(tokens, device=x.device)
    y = weight[:, -1:] * x[..., taps - 1 :]
    # Left out and not taken back: the sum has exactly what a document's own tokens give.
    for back in range(1, taps):
        is_own = (starts <= places - back)[:, :, None]
        y = y + weight[:, taps - 1 - back, None] * x[..., taps - 1 - back : taps - 1 - back + tokens].where(is_own, 0)
    return y if bias is None else y + bias[:, None]
