"""How far numbers that travelled as codes may be off, by the table at the top of `comm/codec.py`."""

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm.codec import BlockCodec


def error_bound(codec: BlockCodec, x: Tensor) -> Tensor:
    """Bounds of the numbers' errors when they arrive in fp32 or wider.  x: [..., n] -> [..., n]."""
    n, block = x.shape[-1], codec.block
    wide = F.pad(x.to(torch.promote_types(x.dtype, torch.float32)), (0, -n % block))
    blocks = (codec._rotate(wide) if codec.is_rotated else wide).unflatten(-1, (-1, block))
    scale = codec.scale(blocks).unsqueeze(-1)
    # Codes, scales and products are rounded to fp32, each by 2^-24 of a block's largest number at most.
    rounding = scale * codec.largest * 2**-22
    step = torch.maximum(blocks.abs() / 16, scale / 1024) if codec.kind == "fp8" else scale / 2
    bound = (step + rounding) * (isqrt(block) if codec.is_rotated else 1)
    return bound.expand_as(blocks).flatten(-2)[..., :n].to(x.dtype)
