"""Borders of a region: what ranks exchange where hidden states enter and leave it, and the adjoint of each exchange.

    outside             class              border in                    border out       bytes of both, one direction
    tokens replicated   Border             x; dx all-reduced            all-reduce       2 (n-1)/n A
    tokens sharded      ShardedBorder      gather; dx reduce-scattered  reduce-scatter   the same
    tokens sharded      AsyncBorder        both in pieces, under the matmuls beside them (`async_tp`)

for n ranks of `tp` and A bytes of hidden states [B, S, D]: B sequences, S tokens of a sequence, s of them on a rank where they
are sharded, D hidden features. A region is given one of the three when the model is split, and never asks which it is.

In a compiled layer borders are operators of torch's: a compiler puts them into the layer's graph and does not look inside.

    border in     `enter`: all tokens of x, and a slot for each column layer    backward: the sum over ranks of dX; under it dW
    border out    `map` (`model/opaque.py`): the sum over ranks of y            backward: all tokens of dY

No message may be on its way between two operators. So what a sum of dX covers, the weight gradients of the region's column
layers, is computed in the same operator. The dY that they need come there as the gradient of a *slot*, [..., N_r] for N_r
features out, an output of `enter` without elements of its own, which a layer's `linear` takes in and does not read.

The slots hang on the tensor that the model is given. A layer whose input is another one (families flatten sequences) has no
slot, and computes its weight's gradient where it stands.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from framework.comm import collectives, duals
from framework.comm.collectives import Pending
from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.mesh.token_layout import TokenLayout
from framework.model.matmul import Matmul, MatmulLinear, find_matmul
from framework.model.opaque import MAPS, apply_map
from framework.model.opaque_linear import linear, write_weight_gradient
from framework.parallel.tensor.async_tp import AsyncGather, AsyncGatherTensor, matmul_reduce_scatter

# The dim of tokens in hidden states [B, S, D]; all but the last two dims are batch.
TOKEN_DIM = -2


def make_border(tokens: TokenLayout, tp: Communicator, overlaps: bool) -> "Border":
    """The border for tokens that are laid out so. overlaps: communicate in pieces under matmuls; only what is gathered can."""
    if tokens.num_parts == 1:
        return Border(tp)
    return AsyncBorder(tokens, tp) if overlaps else ShardedBorder(tokens, tp)


class Border:
    """Both borders of a region, where all ranks of `tp` hold all tokens outside: nothing to gather, sums are all-reduced.

    In subclasses x is [B, s, D] outside, and inside [B, S, D]; or rows, with B in the dim of tokens.
    """

    def __init__(self, axis: Communicator) -> None:
        self.axis = axis
        # The number under which operators of compiled layers find it; a tensor, so given once there is memory.
        self.number: Tensor | None = None

    def enter_apart(self, x: Tensor) -> Tensor:
        """`enter` into memory of its own."""
        whole = self.enter(x)
        return whole.clone() if whole.data_ptr() == x.data_ptr() else whole

    def map(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], is_adjoint: bool) -> list[Tensor]:
        """`leave` of one tensor, or its adjoint."""
        (x,) = tensors
        if is_adjoint:
            return [self.enter_apart(x)]
        out, pending = self.start_enter_adjoint(x)
        pending.wait()
        return [out]

    def count_inside(self, x: Tensor) -> int:
        """Tokens inside the region, per sequence or all of them, of x as it is outside: [B, s, D], or rows [B * s, D]."""
        return x.shape[TOKEN_DIM]

    def count_outside(self, x: Tensor) -> int:
        """Tokens outside the region of x as it is inside: [B, S, D], or rows."""
        return x.shape[TOKEN_DIM]

    def enter(self, x: Tensor) -> Tensor:
        """All tokens of x, for ranks that use them in their own ways. Not differentiable: see `start_enter_adjoint`.

        [B, S, D], detached and so no view: models write to activations in place, which autograd forbids on views made in a
        function of ours, and `RegionCall` knows the model's views of it by their base.
        """
        return x.detach()

    def start_enter_adjoint(self, dx: Tensor) -> tuple[Tensor, Pending]:
        """Start the sum over `tp` of all ranks' dx: [B, S, D], as it is outside: the gradient of `enter`'s input."""
        # A copy: autograd may hand the same dx to others, who must not see the sum.
        out = dx.clone(memory_format=torch.contiguous_format)
        return out, collectives.start_all_reduce(out, self.axis, label="gradient of a region")

    def leave(self, y: Tensor) -> Tensor:
        """The sum over `tp` of all ranks' y: [B, S, D], as it is outside. Differentiable."""
        return duals.reduce_from(y, self.axis)

    def leave_matmul(self, x: Tensor, matmul: Matmul) -> Tensor:
        """`leave` with X W^T, the last matmul inside; x: [B, S, K_r]. Not differentiable: see `leave_matmul_adjoint`."""
        # In place: the partial sum is nobody else's, and a second [B, S, N] would be the largest activation here.
        y = matmul.forward(x)
        collectives.all_reduce(y, self.axis)
        return y

    def leave_matmul_adjoint(self, dy: Tensor, matmul: Matmul, needs_dx: bool) -> tuple[Tensor | None, Tensor]:
        """dX = dY W, [B, S, K_r], if it is needed, and all tokens of dY; dy: as it is outside."""
        # The gradient of a replicated sum is replicated: every rank has the whole dY already.
        return matmul.input_gradient(dy) if needs_dx else None, dy

    def start_gather(self, x: Tensor) -> tuple[Tensor, Pending]:
        """Start to bring all tokens of x, [B, s, D], what entered here, once more; `join` makes them of what has come."""
        return x, Pending()

    def join(self, gathered: Tensor) -> Tensor:
        """All tokens, [B, S, D], of what `start_gather` gave."""
        return gathered


class ShardedBorder(Border):
    """The tokens of every sequence are divided among the ranks of `tp` outside (sequence parallelism): they are gathered on the
    way in, sums are reduce-scattered.

    Between the first layer and the final norm of a model each rank holds x: [B, s, D], s = ceil(S / tp), the last ranks' filled
    up with zeros. Some families flatten hidden states to rows [B * S, D] within a layer; what is gathered from rows keeps the
    padding, because rows of several sequences cannot be told apart any more, and only the way back to sequences takes it away.

    It has no state: what is sharded, a tensor's shape tells.
    """

    def __init__(self, layout: TokenLayout, axis: Communicator) -> None:
        """axis: the ranks of layout.tp, connected."""
        super().__init__(axis)
        self.layout = layout
        # Asked for at every border, where the layout would compute them anew.
        self._tokens_local, self._padding = layout.tokens_local, layout.padding

    def count_inside(self, x: Tensor) -> int:
        self._check_sharded(x)
        return self.layout.context if x.ndim == 3 else x.shape[TOKEN_DIM] * self.axis.size

    def count_outside(self, x: Tensor) -> int:
        return self._tokens_local if self._has_all_tokens(x) else x.shape[TOKEN_DIM] // self.axis.size

    def scatter(self, x: Tensor) -> Tensor:
        """This rank's tokens [B, s, D] of the replicated x: [B, S, D]. Its gradient is gathered over `tp`.

        ModelError if x has not as many tokens as the layout.
        """
        if x.shape[TOKEN_DIM] != self.layout.context:
            raise ModelError(
                f"the first layer gets {x.shape[TOKEN_DIM]} tokens of a sequence, batch.context is {self.layout.context}:"
                " use parallel.sequence=false"
            )
        return duals.scatter(self.pad(x), self.axis, TOKEN_DIM)

    def is_whole(self, x: Tensor) -> bool:
        """Whether x: [B, ., D] has all tokens: it comes from outside the layers. One token is never taken for a whole."""
        return x.shape[TOKEN_DIM] == self.layout.context != self.layout.tokens_local

    def pad(self, x: Tensor) -> Tensor:
        """Zeros behind the tokens of x: [B, S, D], up to s * tp. Rows [B * s * tp, D] are left alone: they hold the padding
        already."""
        # Zeros add nothing to a sum over ranks, and their own gradient is thrown away with them.
        missing = self._padding
        return F.pad(x, (0, 0, 0, missing)) if missing and self._has_all_tokens(x) else x

    def strip(self, x: Tensor) -> Tensor:
        """Undo `pad`: [B, s * tp, D] to [B, S, D], contiguous."""
        if not self._padding:
            return x.contiguous()
        # Contiguous even where nothing is cut off: families call .view() on their layer's input.
        return x[:, : self.layout.context].contiguous() if x.ndim == 3 else x

    def gather(self, x: Tensor) -> Tensor:
        """All ranks' tokens: x: [B, s, D] to [B, S, D], over `tp`. Not differentiable."""
        gathered, pending = self.start_gather(x)
        pending.wait()
        return self.join(gathered)

    def enter(self, x: Tensor) -> Tensor:
        # The joined tensor is a view where nothing was padded.
        return self.gather(x).detach()

    def start_enter_adjoint(self, dx: Tensor) -> tuple[Tensor, Pending]:
        """Start summing all ranks' dx: [B, S, D] over `tp`; each rank gets the sum of its own tokens, [B, s, D]."""
        x = self.pad(dx)
        *batch, tokens, width = x.shape
        out = x.new_empty(*batch, tokens // self.axis.size, width)
        # One part per rank in front, each contiguous: what reduce-scatter divides is the flattened tensor. Of one sequence they
        # are.
        if x.numel() > tokens * width:
            x = x.unflatten(TOKEN_DIM, (self.axis.size, -1)).movedim(TOKEN_DIM - 1, 0)
        return out, collectives.start_reduce_scatter(out, x.contiguous(), self.axis, "tokens of a region")

    def leave(self, y: Tensor) -> Tensor:
        # Padded inside autograd, so that the gradient of y has y's own tokens again.
        return duals.reduce_scatter(self.pad(y), self.axis, TOKEN_DIM)

    def leave_matmul(self, x: Tensor, matmul: Matmul) -> Tensor:
        out, pending = self.start_enter_adjoint(matmul.forward(x))
        pending.wait()
        return out

    def leave_matmul_adjoint(self, dy: Tensor, matmul: Matmul, needs_dx: bool) -> tuple[Tensor | None, Tensor]:
        # The weight's gradient needs all tokens, so dY is gathered once for both.
        dy = self.gather(dy)
        return matmul.input_gradient(dy) if needs_dx else None, dy

    def start_gather(self, x: Tensor) -> tuple[Tensor, Pending]:
        self._check_sharded(x)
        gathered = x.new_empty(self.axis.size, *x.shape)
        return gathered, collectives.start_all_gather(gathered, x.contiguous(), self.axis, "tokens of a region")

    def join(self, gathered: Tensor) -> Tensor:
        """[tp, B, s, D] to [B, S, D]; of rows [tp, B * s, D] to [tp * B * s, D]."""
        ranks, *batch, tokens, width = gathered.shape
        if gathered.numel() == ranks * tokens * width:  # one sequence: its parts lie side by side
            return self.strip(gathered.view(*batch, ranks * tokens, width))
        return self.strip(gathered.movedim(0, TOKEN_DIM - 1).flatten(TOKEN_DIM - 1, TOKEN_DIM))

    def _has_all_tokens(self, x: Tensor) -> bool:
        return x.ndim == 3 and x.shape[TOKEN_DIM] == self.layout.context

    def _check_sharded(self, x: Tensor) -> None:
        """A family that calls its layers in an order of its own would gather what was never scattered."""
        if x.ndim == 3 and x.shape[TOKEN_DIM] != self._tokens_local:
            raise ModelError(
                "a layer runs before the first one, where tokens are scattered: use parallel.sequence=false"
            )


class AsyncBorder(ShardedBorder):
    """A ShardedBorder whose gathers and sums travel in pieces, each under the matmul of another piece."""

    def enter(self, x: Tensor) -> Tensor:
        return AsyncGatherTensor(self._start_async_gather(x), x)

    def leave_matmul(self, x: Tensor, matmul: Matmul) -> Tensor:
        return matmul_reduce_scatter(x, matmul, self.axis)

    def leave_matmul_adjoint(self, dy: Tensor, matmul: Matmul, needs_dx: bool) -> tuple[Tensor | None, Tensor]:
        arrival = self._start_async_gather(dy)
        dx = arrival.multiply(matmul.input_gradient, matmul.matrix.shape[1]) if needs_dx else None
        # Asked for last: by now the pieces that were waited for one by one make the whole without another wait.
        return dx, arrival.whole()

    def _start_async_gather(self, x: Tensor) -> AsyncGather:
        """Start gathering x: [B, s, D], one exchange of tokens with each other rank."""
        self._check_sharded(x)
        is_rows = x.ndim != 3
        return AsyncGather(x, self.axis.size * x.shape[TOKEN_DIM] if is_rows else self.layout.context, self.axis)


def number_border(border: Border) -> None:
    """Give it a number, as compiled layers need."""
    if border.number is None:
        border.number = MAPS.number(border)


def _find_border(number: Tensor) -> Border:
    found = MAPS.find(number)
    assert isinstance(found, Border), "the number of another map"
    return found


def enter_in_graph(border: Border, x: Tensor, columns: Sequence[MatmulLinear], regathers: bool) -> Tensor:
    """All tokens of x, differentiable, for code that is being compiled.  x: [B, s, D] or replicated -> [B, S, D].

    columns: the region's column layers; regathers: x is kept for their weight gradients and gathered again.
    """
    # Widths are read off the layers: their weights' memory may have been given back.
    widths, ticks = [each.out_features for each in columns], [each.matmul.tick for each in columns]
    found, *slots = _enter(x, border.number, ticks, widths, border.count_inside(x), regathers)
    # Dynamo lets attributes be set on what an operation of its own returns, not on one of an operator's list.
    whole: Any = found.view(found.shape)
    whole.slots = slots
    return whole


def column_in_graph(x: Tensor, layer: MatmulLinear, index: int) -> Tensor:
    """X W_r^T + b_r of a region's column layer, differentiable, for code that is being compiled.  x: [..., K] -> [..., N_r].

    index: of the layer among the region's.
    """
    slots = getattr(x, "slots", None)
    slot = None if slots is None else slots[index]
    return linear(x, layer.matmul, layer.bias, layer.out_features, layer.operation, slot)


def leave_in_graph(border: Border, y: Tensor, leading: Sequence[int] = (), operation: str = "") -> Tensor:
    """The sum over ranks of y, differentiable, for code that is being compiled.  y: [B, S, D], or rows of as many tokens ->
    [B, s, D]. leading: (B, S) where rows are to be sequences again; operation: the name in `memory.kept_operations`."""
    if y.ndim <= len(leading):
        y = y.unflatten(0, leading)
    shape = (*y.shape[:-2], border.count_outside(y), y.shape[-1])
    return apply_map(border, [y], [shape], operation)[0]


@torch.library.custom_op("meshwright::enter", mutates_args=())
def _enter(
    x: Tensor, border: Tensor, ticks: Sequence[Tensor], widths: Sequence[int], tokens: int, regathers: bool
) -> list[Tensor]:
    whole = _find_border(border).enter_apart(x)
    return [whole, *_make_slots(whole, widths)]


@_enter.register_fake
def _(x: Tensor, border: Tensor, ticks: Any, widths: Sequence[int], tokens: int, regathers: bool) -> list[Tensor]:
    whole = _like(x, tokens, x.shape[-1])
    return [whole, *_make_slots(whole, widths)]


def _make_slots(whole: Tensor, widths: Sequence[int]) -> list[Tensor]:
    return [whole.new_empty(()).expand(*whole.shape[:-1], width) for width in widths]


@torch.library.custom_op("meshwright::enter_backward", mutates_args=())
def _enter_backward(
    dwhole: Tensor | None,
    kept: Tensor,
    dys: Sequence[Tensor | None],
    border: Tensor,
    ticks: Sequence[Tensor],
    tokens: int,
    regathers: bool,
) -> tuple[Tensor, Tensor]:
    """(dX, [B, s, D], or nothing where nobody asks; the gradient of every tick: zero). kept: [B, s, D] if it regathers, else
    [B, S, D]; tokens: of dX."""
    at = _find_border(border)
    matmuls = zip(map(find_matmul, ticks), dys, strict=True)
    trained = [(matmul, dy) for matmul, dy in matmuls if dy is not None and matmul.grad_view is not None]
    gathering = at.start_gather(kept) if regathers and trained else None
    dx, summing = (kept.new_empty(0), None) if dwhole is None else at.start_enter_adjoint(dwhole)
    whole = kept
    if gathering is not None:
        gathering[1].wait()
        whole = at.join(gathering[0])
    for matmul, dy in trained:
        write_weight_gradient(matmul, whole, dy)
    if summing is not None:
        summing.wait()
    return dx, torch.zeros_like(border)


@_enter_backward.register_fake
def _(
    dwhole: Tensor | None, kept: Tensor, dys: Any, border: Tensor, ticks: Any, tokens: int, regathers: bool
) -> tuple[Tensor, Tensor]:
    dx = kept.new_empty(0) if dwhole is None else _like(dwhole, tokens, dwhole.shape[-1])
    return dx, torch.empty_like(border)


def _save_enter(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, border, ticks, _, _, ctx.regathers = inputs
    ctx.tokens = x.shape[-2]
    # A layer without a slot gives no gradient of it, and zeros would be as large as its output.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if ctx.regathers else output[0], border, *ticks)


def _differentiate_enter(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    kept, border, *ticks = ctx.saved_tensors
    dwhole, *dys = gradients
    needs_dx = ctx.needs_input_grad[0]
    dx, zero = _enter_backward(dwhole if needs_dx else None, kept, dys, border, ticks, ctx.tokens, ctx.regathers)
    is_empty = not needs_dx or dwhole is None
    # torch wants a list in the place of an empty one.
    return None if is_empty else dx, None, [zero] * len(ticks), None if ticks else [], None, None


_enter.register_autograd(_differentiate_enter, setup_context=_save_enter)


def _like(x: Tensor, tokens: int, width: int) -> Tensor:
    return x.new_empty(*x.shape[:-2], tokens, width)
