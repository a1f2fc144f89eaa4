"""Layers that hold a rank's part of a weight under the names, and in the orientation, that the model gave it.

    column:  Y_r = X W_r^T + b_r              dX = sum_r dY_r W_r    dW_r = dY_r^T X
    row:     Y = sum_r X_r W_r^T + b          dX_r = dY W_r          dW_r = dY^T X_r

The sums over ranks are the borders of the region (`borders`), the matmuls are the layer's `Matmul`.

State-space mixers are divided as attention's heads are: heads of Mamba-2, channels of Mamba-1.

    Mamba-2    in_proj -> z | x | B | C | dt, conv1d over x | B | C, scan, gated norm, out_proj
    Mamba-1    in_proj -> x | z, conv1d over x, x_proj -> dt | B | C of all channels, dt_proj, scan, out_proj

Heads lie in groups, each with a B and a C of its own. Groups divide over `tp`, or there are fewer of them than ranks. Then each
rank has the rows of `in_proj` for all B, C and dt, which stand at its end and are counted and summed as shared key-value heads
are; it goes on with those of its group and heads. The convolution's rows for B and C have their gradient summed, a few numbers.
The gated norm's mean square over a group on several ranks is one sum over `tp`. The family's forward stays: it reads numbers of
heads, which are divided, and weights, some of which are lent for a call.

    ... sequences and tokens, K features in, N features out; K_r, N_r: those of this rank; V_r: its rows of the vocabulary
    B sequences, T tokens, D features of this rank, G groups of a mixer
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.comm import collectives, duals
from framework.comm.communicator import Communicator
from framework.mesh.layout import part
from framework.model.matmul import MatmulLinear
from framework.model.opaque_linear import linear
from framework.model.precision import sums_dtype
from framework.parallel.tensor.async_tp import AsyncGatherTensor
from framework.parallel.tensor.borders import column_in_graph, leave_in_graph
from framework.parallel.tensor.partition import Counts
from framework.parallel.tensor.regions import Region, RegionCall, lend, take_back


class ColumnLinear(MatmulLinear):
    """x: [..., K], all tokens -> [..., N_r], this rank's features, in x's dtype. Sends nothing but for `copied`.

    weight: [N_r, K], or transposed as GPT-2's Conv1D is; bias: [N_r]. copied: the last features are computed by all ranks of the
    `kv` axis from the same rows of the weight; their gradient is summed over that axis (keys and values of a packed projection).
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
        super().__init__(weight, bias, is_transposed)
        self.region, self.kv, self.copied = region, kv, copied
        self.index = len(region.columns)
        region.columns.append(self)
        if copied:
            region.has_operators = False

    @property
    def input_call(self) -> RegionCall:
        """The region's call that handed out the input."""
        return self.region.call

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling() and self.region.has_operators:
            return column_in_graph(x, self, self.index)
        return self._compute(x)

    # Not traced, here and in RowLinear: a write into a main gradient or a region's call is an effect that no graph shows.
    @torch.compiler.disable
    def _compute(self, x: Tensor) -> Tensor:
        return _Column.apply(x, self.matmul.graph_input, self.bias, self, self.region.call)

    def sum_copied(self, dy: Tensor) -> Tensor:
        """dY: [..., N_r] of which the copied features are summed over `kv`: all who computed them."""
        if not self.copied:
            return dy
        # A copy: autograd may give the same dy to others, for whom it is not summed.
        dy = dy.clone(memory_format=torch.contiguous_format)
        total = dy[..., -self.copied :].contiguous()
        collectives.all_reduce(total, self.kv)
        dy[..., -self.copied :] = total
        return dy


class RowLinear(MatmulLinear):
    """x: [..., K_r], this rank's features -> [..., N], where the region is left: the sum over `tp`; else this rank's part.

    weight: [N, K_r], or transposed; bias: [N]. The bias counts once: it is added to the sum, or a part of it to each rank's part.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, is_transposed: bool, region: Region, leaves: bool
    ) -> None:
        super().__init__(weight, bias, is_transposed)
        self.region, self.leaves = region, leaves

    def forward(self, x: Tensor) -> Tensor:
        y = self._multiply(x)
        if self.bias is None:
            return y
        # Added to each rank's part it would be counted once per rank by the sum at the region's end.
        return y + (self.bias if self.leaves else self.bias / self.region.axis.size)

    def _multiply(self, x: Tensor) -> Tensor:
        """`forward` without the bias."""
        if not torch.compiler.is_compiling() or not self.region.has_operators:
            return self._compute(x)
        if not self.leaves:
            return linear(x, self.matmul, None, self.out_features, self.operation)
        # The sum is kept: this rank's tokens of it.
        y = linear(x, self.matmul, None, self.out_features, "")
        return leave_in_graph(self.region.border, y, operation=self.operation)

    @torch.compiler.disable
    def _compute(self, x: Tensor) -> Tensor:
        return _Row.apply(x, self.matmul.graph_input, self)


class _Column(torch.autograd.Function):
    """`source` stands for the weight in autograd's graph (`Matmul.graph_input`)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: Tensor, bias: Tensor | None, layer: ColumnLinear, call: RegionCall
    ) -> Tensor:
        matmul, kept = layer.matmul.begin(x), call.find_kept(x)
        ctx.layer, ctx.matmul, ctx.call = layer, matmul, call
        ctx.regathers, ctx.defers = kept is not None, call.is_open
        if isinstance(x, AsyncGatherTensor):
            forward = partial(matmul.forward, bias=bias)
            y = matmul.compute(x.arrival.multiply, forward, matmul.matrix.shape[0])
            # Where y was taken over: a message must not land in memory that has been given back.
            x.arrival.wait()
            # Saving x itself would save a tensor without memory, and with it all pieces. The whole is there when they have come.
            matmul.save(ctx, x.arrival.whole() if kept is None else kept)
            return y
        matmul.save(ctx, x if kept is None else kept)
        return matmul.compute(matmul.forward, x, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        layer, call, matmul, regathers = ctx.layer, ctx.call, ctx.matmul, ctx.regathers
        (kept,) = ctx.saved_tensors
        needs_dw = matmul.grad_view is not None or ctx.needs_input_grad[1]
        # Before the matmul below, which covers the gather. Not for a frozen weight: of the inputs that are kept so, only weight
        # gradients ask for the whole, and a gather that nobody waits for would write into memory that has been given back.
        if regathers and needs_dw:
            call.start_gather(kept)
        dx = matmul.input_gradient(dy) if ctx.needs_input_grad[0] else None
        # After dX, which the region's border sums: summed copies would count there once for each of their holders.
        dy = layer.sum_copied(dy)
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None

        def compute() -> Tensor | None:
            return matmul.weight_gradient(call.gathered() if regathers else kept, dy)

        # Left for the sum of the region's input gradient to cover (`regions`): nobody waits for a weight's gradient so early.
        if matmul.grad_view is not None and ctx.defers:
            call.deferred.append(compute)
            return dx, None, db, None, None
        return dx, compute() if needs_dw else None, db, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, layer: RowLinear) -> Tensor:
        ctx.layer, ctx.matmul = layer, layer.matmul.begin(x)
        matmul = ctx.matmul
        matmul.save(ctx, x)
        if not layer.leaves:
            return matmul.compute(matmul.forward, x)
        # Also where the sum over ranks is taken over, and what of it is kept is this rank's tokens.
        layer.region.end(x)
        return matmul.compute(layer.region.border.leave_matmul, x, matmul)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        layer, matmul, needs_dx = ctx.layer, ctx.matmul, ctx.needs_input_grad[0]
        (x,) = ctx.saved_tensors
        if layer.leaves:
            dx, dy = layer.region.border.leave_matmul_adjoint(dy, matmul, needs_dx)
        else:
            dx = matmul.input_gradient(dy) if needs_dx else None
        if matmul.grad_view is None and not ctx.needs_input_grad[1]:
            return dx, None, None
        return dx, matmul.weight_gradient(x, dy), None


class SplitRMSNorm(nn.Module):
    """RMS norm over features that are split, x: [..., N_r] -> [..., N_r]: the mean square is over all ranks' features.

    y_r = x_r / sqrt(sum_s |x_s|^2 / (copies * N) + eps) * w_r. weight: [N_r]; num_features: N; copies: ranks that hold each
    feature; axis: over which one number per token is summed, in fp32 or wider, forward and backward.
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
        # Computed like the stock norms: in bf16 a sum of thousands of squares would lose its last ones. fp64 stays what it is.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # Summed for ranks that go on with it each in its own way: so is its gradient.
        total = duals.copy_to(duals.reduce_from(wide.square().sum(-1, keepdim=True), self.axis), self.axis)
        normed = wide * torch.rsqrt(total / (self.copies * self.num_features) + self.variance_epsilon)
        # Where the family rounds is part of its numerics: stock norms have both orders.
        if self.weight_before_cast:
            return (self.weight * normed).to(x.dtype)
        return self.weight * normed.to(x.dtype)


def look_up_locally(embedding: nn.Embedding, start: int, stop: int, axis: Communicator) -> None:
    """Make an embedding that holds rows [start, stop) of the vocabulary, [V_r, D], give what the whole one gives: [B, S, D].

    Ids of other ranks' rows give zeros, and the results are summed over `axis`. The model's own forward does the lookup, so
    whatever scale the family applies to it stays.
    """
    padding = embedding.padding_idx
    embedding.num_embeddings = stop - start
    # The padding row gets no gradient; only the rank that has it may say so, in its own numbering.
    embedding.padding_idx = padding - start if padding is not None and start <= padding < stop else None
    embedding.forward = partial(_look_up, embedding.forward, start, stop, axis)  # type: ignore[method-assign]


def _look_up(whole: Any, start: int, stop: int, axis: Communicator, ids: Tensor) -> Tensor:
    elsewhere = (ids < start) | (ids >= stop)
    # Row 0 stands in for rows of other ranks: an index outside the table is an error, on a GPU one that ends the process.
    rows = whole((ids - start).masked_fill(elsewhere, 0))
    return duals.reduce_from(rows.masked_fill(elsewhere.unsqueeze(-1), 0), axis)


def divide_mixer(mixer: Any, counts: Counts, tp: Communicator) -> None:
    """Have a mixer of heads, whose weights are still whole, compute with those of this rank."""
    whole = counts.linear["state_rows"]
    own = find_own_rows(counts, tp)
    lent: dict[tuple[nn.Module, str], Callable[[Tensor], Tensor]] = {
        (mixer, name): partial(_select, sizes=whole, own=own)
        for name, each in mixer.named_buffers(recurse=False)
        if each.shape[-1] == sum(whole)
    }
    mixer.num_heads, mixer.intermediate_size = whole[4] // tp.size, whole[0] // tp.size
    mixer.n_groups = max(mixer.n_groups // tp.size, 1)
    mixer.conv_dim = mixer.intermediate_size + 2 * mixer.n_groups * mixer.ssm_state_size
    if counts.count_whole("state_channels", tp.size):
        share = partial(_share_channels, sizes=(mixer.intermediate_size, *whole[2:4]), own=own[2:4], tp=tp)
        lent |= {(mixer.conv1d, name): share for name, _ in mixer.conv1d.named_parameters()}
    if lent:
        mixer.register_forward_pre_hook(partial(lend, lent))
        mixer.register_forward_hook(partial(take_back, lent))


def find_own_rows(counts: Counts, tp: Communicator) -> list[slice]:
    """This rank's rows of each segment of a packed weight: z, x, B, C, dt. Ranks of one group have the same B and C."""
    inner, _, states, _, heads = counts.linear["state_rows"]
    divided = part(inner, tp.rank, tp.size)
    pieces = min(counts.kv, tp.size)
    of_group = part(states, tp.rank * pieces // tp.size, pieces)
    return [slice(*each) for each in (divided, divided, of_group, of_group, part(heads, tp.rank, tp.size))]


def _select(x: Tensor, sizes: Sequence[int], own: Sequence[slice], dim: int = -1) -> Tensor:
    """Some of the indices of each segment of x along a dim."""
    segments = zip(x.split(list(sizes), dim), own, strict=True)
    return torch.cat([each.narrow(dim, one.start, one.stop - one.start) for each, one in segments], dim)


def _share_channels(x: Tensor, sizes: Sequence[int], own: Sequence[slice], tp: Communicator) -> Tensor:
    """This rank's rows of a convolution's parameter: of those for all B and C, which all ranks have, the ones of its group."""
    divided, shared = x.split([sizes[0], sum(sizes[1:])])
    return torch.cat([divided, _select(duals.copy_to(shared, tp), sizes[1:], own, dim=0)])


class StateColumn(ColumnLinear):
    """x: [B, T, K] -> [B, T, z | x | B | C | dt], of this rank's heads and their group, whose B, C and dt all ranks compute."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, region: Region, tp: Communicator, counts: Counts
    ) -> None:
        inner, _, *shared = counts.linear["state_rows"]
        super().__init__(weight, bias, False, region, tp, sum(shared))
        self.sizes = (inner // tp.size, inner // tp.size, *shared)
        self.own = [slice(0, self.sizes[0])] * 2 + find_own_rows(counts, tp)[2:]

    def forward(self, x: Tensor) -> Tensor:
        return _select(super().forward(x), self.sizes, self.own)


class SummedRowLinear(RowLinear):
    """A row layer within a region: x: [..., K_r] -> [..., N], the sum over `tp`, of which each rank makes its own use."""

    def forward(self, x: Tensor) -> Tensor:
        return duals.copy_to(duals.reduce_from(super().forward(x), self.region.axis), self.region.axis)


class SplitGatedNorm(nn.Module):
    """A gated RMS norm over groups of features, each on several ranks: x, gate: [B, T, D] -> [B, T, D].

        u = x silu(gate)        y = u / sqrt(mean of u^2 over the group + eps) * w        or the gate behind the norm

    weight: w, [D]; groups: G, on all ranks. Sends G numbers per token, forward and backward.
    """

    def __init__(self, norm: Any, weight: nn.Parameter, groups: int, axis: Communicator) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, norm.variance_epsilon
        self.is_gated_last = getattr(norm, "norm_before_gate", False)
        self.groups, self.axis = groups, axis

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        x = hidden_states.to(sums_dtype(hidden_states.dtype))
        factor = F.silu(gate.to(x.dtype))
        x = x if self.is_gated_last else x * factor
        # A place for each group: ranks of the others fill theirs.
        group, ranks = self.groups * self.axis.rank // self.axis.size, self.axis.size // self.groups
        sums = F.pad(x.square().sum(-1, keepdim=True), (group, self.groups - 1 - group))
        total = duals.copy_to(duals.reduce_from(sums, self.axis), self.axis)[..., group : group + 1]
        x = self.weight * (x * torch.rsqrt(total / (ranks * x.shape[-1]) + self.variance_epsilon))
        return (x * factor if self.is_gated_last else x).to(hidden_states.dtype)


def split_gated_norm(norm: Any, weight: nn.Parameter, groups: int, axis: Communicator) -> nn.Module:
    """The norm with this rank's weight: itself where it has whole groups."""
    if groups % axis.size:
        return SplitGatedNorm(norm, weight, groups, axis)
    norm.weight = weight
    if hasattr(norm, "n_groups"):
        norm.n_groups = groups // axis.size
    return norm
