"""Layers that hold a rank's part of a weight under the names, and in the orientation, that the model gave it.

    column:  Y_r = X W_r^T + b_r              dX = sum_r dY_r W_r    dW_r = dY_r^T X
    row:     Y = sum_r X_r W_r^T + b          dX_r = dY W_r          dW_r = dY^T X_r

The sums over ranks are the borders of the region (`regions`).
"""

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from framework.comm import collectives, duals
from framework.comm.communicator import Communicator
from framework.model.matmul import matmul
from framework.parallel.tensor.async_tp import AsyncGatherTensor
from framework.parallel.tensor.regions import Region


class GradView(Protocol):
    """Where a weight's gradient is collected: what `write_gradients_directly` gives a layer."""

    parameter: nn.Parameter

    def add_matmul(self, left: Tensor, right: Tensor) -> None:
        """Add left @ right^T."""


class SplitLinear(nn.Linear):
    """A linear layer of which this rank holds the part `weight` (and `bias`), transposed as GPT-2's Conv1D is or not.

    grad_view: if set, the weight's gradient is written there, and autograd gets none.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, is_transposed: bool, region: Region) -> None:
        outputs, inputs = weight.shape[::-1] if is_transposed else weight.shape
        super().__init__(inputs, outputs, bias=False, device="meta")
        self.weight = weight
        self.register_parameter("bias", bias)
        self.is_transposed, self.region = is_transposed, region
        self.grad_view: GradView | None = None

    @property
    def matrix(self) -> Tensor:
        """The local weight as [outputs, inputs], out of autograd."""
        weight = self.weight.data
        return weight.t() if self.is_transposed else weight

    def source(self, x: Tensor) -> Tensor:
        """What stands for the weight in autograd's graph: itself, or, where it does not ask for a gradient, a scalar."""
        if self.grad_view is None:
            return self.weight
        # Not `new_zeros`, which would be an operation on what may still be arriving.
        return torch.zeros((), dtype=x.dtype, device=x.device, requires_grad=torch.is_grad_enabled())

    def operands(self, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
        """left, right with dW = left @ right^T in the weight's orientation."""
        x_rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        left, right = (x_rows, dy_rows) if self.is_transposed else (dy_rows, x_rows)
        return left.t(), right.t()


class ColumnLinear(SplitLinear):
    """x: [..., K] whole -> [..., N_r] this rank's features.

    `copied`: the last features are computed by all ranks of the `kv` axis from the same rows of the weight; their gradient
    is summed over that axis (keys and values of a packed projection).
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        is_transposed: bool,
        region: Region,
        kv: Communicator,
        copied: int = 0,
    ) -> None:
        super().__init__(weight, bias, is_transposed, region)
        self.kv, self.copied = kv, copied

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return _Column.apply(x, self.source(x), self.bias, self)

    def sum_copied(self, dy: Tensor) -> Tensor:
        """dY of which the copied features are summed over those who computed them."""
        if not self.copied:
            return dy
        dy = dy.clone(memory_format=torch.contiguous_format)
        total = dy[..., -self.copied :].contiguous()
        collectives.all_reduce(total, self.kv)
        dy[..., -self.copied :] = total
        return dy


class RowLinear(SplitLinear):
    """x: [..., K_r] this rank's features -> [..., N], where the region is left: the sum over ranks; else this rank's part.

    The bias counts once: it is added to the sum, or a part of it to each rank's part.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, is_transposed: bool, region: Region, leaves: bool
    ) -> None:
        super().__init__(weight, bias, is_transposed, region)
        self.leaves = leaves

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        y = _Row.apply(x, self.source(x), self)
        if self.bias is None:
            return y
        return y + (self.bias if self.leaves else self.bias / self.region.axis.size)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, bias: Tensor | None, layer: ColumnLinear) -> Tensor:
        call = layer.region.call
        shard = call.kept_input(x)
        ctx.layer, ctx.call, ctx.is_shard = layer, call, shard is not None
        if isinstance(x, AsyncGatherTensor):
            y = x.arrival.multiply(layer.matrix, bias)
            ctx.save_for_backward(x.arrival.whole() if shard is None else shard)
            return y
        ctx.save_for_backward(x if shard is None else shard)
        return matmul(x, layer.matrix, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        layer, call, tokens = ctx.layer, ctx.call, ctx.layer.region.tokens
        (kept,) = ctx.saved_tensors
        if ctx.is_shard:
            call.start_gather(kept, tokens)
        dx = matmul(dy, layer.matrix.t()) if ctx.needs_input_grad[0] else None
        dy = layer.sum_copied(dy)
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None

        def operands() -> tuple[Tensor, Tensor]:
            return layer.operands(call.gathered(tokens) if ctx.is_shard else kept, dy)

        if layer.grad_view is not None:
            call.deferred.append(lambda: layer.grad_view.add_matmul(*operands()))
            return dx, None, db, None
        dw = torch.mm(*_transpose_second(*operands())) if ctx.needs_input_grad[1] else None
        return dx, dw, db, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, layer: RowLinear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer.region.leave_by(x, layer.matrix) if layer.leaves else matmul(x, layer.matrix)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        layer = ctx.layer
        (x,) = ctx.saved_tensors
        matrix = layer.matrix.t() if ctx.needs_input_grad[0] else None
        if layer.leaves:
            dx, dy = layer.region.spread(dy, matrix)
        else:
            dx = None if matrix is None else matmul(dy, matrix)
        if layer.grad_view is not None:
            layer.grad_view.add_matmul(*layer.operands(x, dy))
            return dx, None, None
        dw = torch.mm(*_transpose_second(*layer.operands(x, dy))) if ctx.needs_input_grad[1] else None
        return dx, dw, None


def _transpose_second(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return left, right.t()


class SplitRMSNorm(nn.Module):
    """RMS norm over features that are split: the mean square is over all ranks' features.

    y_r = x_r / sqrt(sum_s |x_s|^2 / (copies * N) + eps) * w_r. `num_features`: N; `copies`: ranks that hold each feature.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        eps: float,
        num_features: int,
        copies: int,
        weight_before_cast: bool,
        axis: Communicator,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.variance_epsilon, self.num_features, self.copies = eps, num_features, copies
        self.weight_before_cast, self.axis = weight_before_cast, axis

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Summed for ranks that go on with it each in its own way: so is its gradient.
        total = duals.copy_to(duals.reduce_from(wide.square().sum(-1, keepdim=True), self.axis), self.axis)
        normed = wide * torch.rsqrt(total / (self.copies * self.num_features) + self.variance_epsilon)
        if self.weight_before_cast:
            return (self.weight * normed).to(x.dtype)
        return self.weight * normed.to(x.dtype)


def look_up_locally(embedding: nn.Embedding, start: int, stop: int, axis: Communicator) -> None:
    """Make an embedding that holds rows [start, stop) of the vocabulary give what the whole one gives.

    Ids of other ranks' rows give zeros, and the ranks' results are summed. The model's own forward does the lookup, so
    whatever scale the family applies to it stays.
    """
    padding = embedding.padding_idx
    embedding.num_embeddings = stop - start
    embedding.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    embedding.forward = partial(_look_up, embedding.forward, start, stop, axis)  # type: ignore[method-assign]


def _look_up(whole: Any, start: int, stop: int, axis: Communicator, ids: Tensor) -> Tensor:
    elsewhere = (ids < start) | (ids >= stop)
    rows = whole((ids - start).masked_fill(elsewhere, 0))
    return duals.reduce_from(rows.masked_fill(elsewhere.unsqueeze(-1), 0), axis)
