"""The three matmuls of a linear layer: one `Matmul` per layer, one `StackedMatmul` per stack of experts.

    Y = X W^T + b        dX = dY W        dW += dY^T X        db = sum dY

Shapes: [..., K] features in, [..., N] features out; W is [N, K], or [K, N] where a layer holds it transposed (GPT-2's Conv1D).
Nothing here communicates: `parallel/tensor` and `parallel/zero` call it between their collectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.comm.transfer import upload_values
from framework.model.kept_outputs import KeptOutputs
from framework.model.opaque import Numbered

# (view [M, N], left [K, M], right [K, N], is_first): view = left^T right if it is the first, else that is added.
Accumulate = Callable[[Tensor, Tensor, Tensor, bool], None]


class GradView(Protocol):
    """The main gradient of one weight: a view of the buffer in which it is summed over microbatches."""

    parameter: nn.Parameter

    @property
    def is_deferred(self) -> bool:
        """Whether gradients that are added now arrive later; their factors are kept until then."""

    def add(self, gradient: Tensor) -> None:
        """Add a gradient of the weight's own shape."""

    def add_matmul(self, left: Tensor, right: Tensor, accumulate: Accumulate = ...) -> None:
        """Add left^T @ right.  left: [k, m]; right: [k, n]; any strides; the view: [m, n] of the master dtype.

        accumulate: computes it; `accumulate_matmul` by default.
        """

    def add_stacked_matmul(self, left: Tensor, right: Tensor, groups: "RowGroups") -> None:
        """Add left^T @ right of each group's rows.  left: [R, m]; right: [R, n]; the view: [E, m, n] of the master dtype."""


class LayerWeight:
    """One weight of a layer, and the destination of its gradient. name: of the layer's parameter.

    It is looked up in the layer at the time of use, in forward and again in backward, so it may move in between.
    """

    def __init__(self, layer: nn.Module, name: str, is_transposed: bool) -> None:
        self.name, self.is_transposed = name, is_transposed
        self._layer = layer
        self.grad_view: GradView | None = None
        self.tick: Tensor | None = None
        self.kept: KeptOutputs | None = None
        self._operation = ""

    def keep_outputs(self, kept: KeptOutputs, operation: str) -> None:
        """Keep outputs from now on, as the layer is recomputed in backward. operation: the name of this output in recipes."""
        self.kept = kept
        self._operation = operation

    def save(self, ctx: Any, x: Tensor) -> None:
        """Save x, of any shape, for the backward of the function that calls `compute`."""
        if self.kept is None:
            ctx.save_for_backward(x)
        else:
            self.kept.save(ctx, x)

    def compute(self, compute: Callable[..., Tensor], *args: Any) -> Tensor:
        """The output of the layer's matmul, [..., N]: computed from `args`, or taken over from the layer's forward."""
        if self.kept is None:
            return compute(*args)
        return self.kept.compute(self._operation, partial(compute, *args))

    def invalidate(self) -> None:
        """Forget what was found of the weight's values, which are about to change."""

    def give_number(self) -> None:
        """Give a layer whose weight is not trained the number by which operators find it."""
        self.tick = WEIGHTS.number(self)

    def write_gradient_to(self, grad_view: GradView) -> None:
        """Have `weight_gradient` add to the main gradient from now on; autograd gets none."""
        self.grad_view = grad_view
        # One scalar for the whole run: a new one in each call would cost an allocation. Its value is for `opaque_linear.py`.
        self.tick = WEIGHTS.number(self).requires_grad_()

    @property
    def weight(self) -> Tensor:
        """The layer's parameter, as it holds it: [N, K], or [K, N]; of a stack [E, N, K], or [E, K, N]."""
        weight: Tensor = getattr(self._layer, self.name)
        return weight

    @property
    def graph_input(self) -> Tensor:
        """The stand-in for the weight in autograd's graph: the weight, or, where its gradient is written directly, `tick`.

        The scalar requires a gradient, so that backward runs even where nothing else does.
        """
        return self.weight if self.grad_view is None or self.tick is None else self.tick


# Keyed by the numbers that are their ticks.
WEIGHTS: Numbered[LayerWeight] = Numbered()


def find_matmul(tick: Tensor) -> "Matmul":
    """The linear layer's matmul of which this is the `tick`."""
    found = WEIGHTS.find(tick)
    assert isinstance(found, Matmul), "the tick of a stack of weights"
    return found


class Matmul(LayerWeight):
    """The three matmuls of one linear layer. No method is differentiable: autograd functions call them.

    Another kind of matmul (fp8, int8) is a subclass, with its scales and their history as attributes. It lives as long as the
    layer, and callers stay as they are.
    """

    def __init__(self, layer: nn.Module, is_transposed: bool) -> None:
        """layer: has the `weight`, [N, K], or [K, N] if it `is_transposed`."""
        super().__init__(layer, "weight", is_transposed)

    def begin(self, x: Tensor) -> "Matmul":
        """The matmuls of one passage of x, [..., K], through the layer, forward and backward: these, unless something
        of it is kept."""
        return self

    @property
    def matrix(self) -> Tensor:
        """The weight as [N, K], out of autograd."""
        weight = self.weight.data
        return weight.t() if self.is_transposed else weight

    def forward(self, x: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Y = X W^T + b.  x: [..., K]; bias: [N]; returns [..., N] of x's dtype, in `out` if that is given."""
        return F.linear(x, self.matrix, bias) if out is None else matmul_into(out, x, self.matrix, bias)

    def input_gradient(self, dy: Tensor, out: Tensor | None = None) -> Tensor:
        """dX = dY W.  dy: [..., N]; returns [..., K], in `out` if that is given."""
        matrix = self.matrix
        if out is not None:
            return matmul_into(out, dy, matrix.t())
        rows = torch.mm(dy.reshape(-1, dy.shape[-1]), matrix)
        return rows.view(*dy.shape[:-1], matrix.shape[1])

    def weight_gradient(self, x: Tensor, dy: Tensor) -> Tensor | None:
        """dW = dY^T X in the weight's orientation, summed over all leading dims.  x: [..., K]; dy: [..., N].

        None where it has been added to the main gradient, in the master dtype, without a tensor between if the dtypes agree.
        """
        x_rows, dy_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        left, right = (x_rows, dy_rows) if self.is_transposed else (dy_rows, x_rows)
        if self.grad_view is None:
            return torch.mm(left.t(), right)
        self.grad_view.add_matmul(left, right)
        return None


class WeightGradientSum:
    """dW = sum_i dY_i^T X_i over parts of the rows, one after another; no factor is kept.

    Parts go to the main gradient at once. Where that takes gradients later (a backward that leaves weights for later) their sum
    is kept instead, [N, K] in at least fp32: the factors together would be as large as all of dY.
    """

    def __init__(self, matmul: Matmul) -> None:
        self.matmul, self.total = matmul, None
        if matmul.grad_view is None or matmul.grad_view.is_deferred:
            wide_dtype = torch.promote_types(matmul.weight.dtype, torch.float32)
            self.total = torch.zeros(matmul.matrix.shape, dtype=wide_dtype, device=matmul.weight.device)

    def add(self, x: Tensor, dy: Tensor) -> None:
        """Add the gradient of some rows.  x: [n, K]; dy: [n, N]."""
        if self.total is None:
            self.matmul.weight_gradient(x, dy)
        else:
            accumulate_matmul(self.total, dy, x, is_first=False)

    def end(self) -> Tensor | None:
        """dW in the weight's orientation; None where it is, or will be, in the main gradient."""
        if self.total is None:
            return None
        total = self.total.t() if self.matmul.is_transposed else self.total
        if self.matmul.grad_view is None:
            return total.to(self.matmul.weight.dtype)
        self.matmul.grad_view.add(total)
        return None


@dataclass(frozen=True)
class RowGroups:
    """Rows [R, .] in groups, one for each matrix of a stack. offsets: [E] int32 on the device, where each group ends; sizes: rows
    of each, all R of them; None: only the device knows, and rows behind the last group are padding."""

    offsets: Tensor
    sizes: tuple[int, ...] | None = None

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> "RowGroups":
        """Groups of so many rows each."""
        return cls(upload_values(tuple(accumulate(counts)), torch.int32, device), tuple(counts))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Rows of each group. Where only a GPU knows, the host waits for it: matmuls of groups one by one ask, which are those of
        `_multiplies_groups` being false. A CPU's memory is the host's."""
        return self.sizes or tuple(torch.diff(self.offsets, prepend=self.offsets.new_zeros(1)).tolist())

    def split(self, x: Tensor) -> Sequence[Tensor]:
        """The rows of each group.  x: [R, ...]."""
        # One call for all: a slice for each group would be as much Python as its matmul's.
        return x.split_with_sizes((*self.counts, len(x) - sum(self.counts)))[:-1]

    def clear_padding(self, x: Tensor) -> Tensor:
        """x with zeros in the rows of no group, which kernels leave as memory was, in place.  x: [R, N]."""
        if self.sizes is not None:
            return x
        is_padding = torch.arange(len(x), device=x.device) >= self.offsets[-1]
        return x.masked_fill_(is_padding.unsqueeze(1), 0.0)

    def clear_empty(self, gradient: Tensor) -> None:
        """Write zeros for groups without a row, in place.  gradient: [E, ...]."""
        if self.sizes is None:
            is_empty = torch.diff(self.offsets, prepend=self.offsets.new_zeros(1)) == 0
            gradient.masked_fill_(is_empty.view(-1, 1, 1), 0.0)
            return
        for group, count in enumerate(self.sizes):
            if count == 0:
                gradient[group].zero_()

    def padded(self, count: int) -> "RowGroups":
        """The groups, followed by empty ones up to `count`: for matrices at the end of a stack without rows."""
        missing = count - len(self.offsets)
        if missing == 0:
            return self
        offsets = torch.cat([self.offsets, self.offsets[-1:].expand(missing)])
        return RowGroups(offsets, None if self.sizes is None else self.sizes + (0,) * missing)


class StackedMatmul(LayerWeight):
    """The three matmuls of a stack of weights [E, N, K], or [E, K, N] if it `is_transposed`, with rows in groups: as `Matmul`,
    each group with its own matrix."""

    def __call__(self, x: Tensor, groups: RowGroups) -> Tensor:
        """Y = X W_e^T for the rows of each group e.  x: [R, K] -> [R, N]. Differentiable."""
        return _Stacked.apply(x, self.graph_input, self, groups)

    def forward(self, x: Tensor, groups: RowGroups) -> Tensor:
        """`__call__`, not differentiable."""
        return stacked_matmul(x, self._matrices, groups)

    def input_gradient(self, dy: Tensor, groups: RowGroups) -> Tensor:
        """dX = dY W_e.  dy: [R, N] -> [R, K]."""
        return stacked_matmul(dy, self._matrices.transpose(1, 2), groups)

    def weight_gradient(self, x: Tensor, dy: Tensor, groups: RowGroups) -> Tensor | None:
        """dW_e = dY^T X of the rows of each group, in the weight's orientation; zeros where a group is empty. None where it has
        been added to the main gradient.  x: [R, K]; dy: [R, N]."""
        left, right = (x, dy) if self.is_transposed else (dy, x)
        if self.grad_view is not None:
            self.grad_view.add_stacked_matmul(left, right, groups)
            return None
        gradient = torch.empty_like(self.weight, memory_format=torch.contiguous_format)
        accumulate_stacked_matmul(gradient, left, right, groups, is_first=True)
        return gradient

    @property
    def _matrices(self) -> Tensor:
        """[E, N, K], out of autograd."""
        weight = self.weight.data
        return weight.transpose(1, 2) if self.is_transposed else weight


class _Stacked(torch.autograd.Function):
    """Autograd function of a stacked matmul. `source` stands for the weight in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, stacked: StackedMatmul, groups: RowGroups) -> Tensor:
        ctx.stacked, ctx.groups = stacked, groups
        stacked.save(ctx, x)
        return stacked.compute(stacked.forward, x, groups)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = ctx.stacked.input_gradient(dy, ctx.groups) if ctx.needs_input_grad[0] else None
        is_asked = ctx.needs_input_grad[1]
        return dx, ctx.stacked.weight_gradient(x, dy, ctx.groups) if is_asked else None, None, None


class InputCall(Protocol):
    """An input that a layer need not keep whole for backward, such as that of a tensor-parallel region."""

    def find_kept(self, x: Tensor) -> Tensor | None:
        """Return the tensor to keep instead of x, or None to keep x."""

    def start_gather(self, kept: Tensor) -> None:
        """Start to gather x from the tensor that was kept."""

    def gathered(self) -> Tensor:
        """Wait for x, and return it."""


class MatmulLinear(nn.Linear):
    """A linear layer whose forward goes through its `matmul`, which also gets the layer's main gradient.

    weight: [N, K], or [K, N] if it is_transposed; bias: [N].
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, is_transposed: bool) -> None:
        outputs, inputs = weight.shape[::-1] if is_transposed else weight.shape
        # On meta: the stock weight that the constructor makes is thrown away in the next line.
        super().__init__(inputs, outputs, bias=False, device="meta")
        self.weight = weight
        self.register_parameter("bias", bias)
        self.matmul = Matmul(self, is_transposed)
        # The layer's name in `memory.kept_operations`.
        self.operation = ""

    @property
    def input_call(self) -> InputCall | None:
        """The input that the layer has just got, if it need not be kept whole."""
        return None


def matmul_into(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """out = x W^T + b.  x: [..., K]; weight: [N, K], any strides; bias: [N]; out: [..., N], rows of a larger tensor. Returns out.

    In place where the rows of `out` follow one another.
    """
    if not out.is_contiguous():
        return out.copy_(F.linear(x, weight, bias))
    rows, out_rows = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=out_rows)
    else:
        torch.addmm(bias, rows, weight.t(), out=out_rows)
    return out


def accumulate_matmul(view: Tensor, left: Tensor, right: Tensor, is_first: bool, scale: float = 1.0) -> None:
    """view = s left^T right if it is the first, else view += s left^T right.  left: [K, M]; right: [K, N]; any strides; s: scale.

    In place, without a tensor between, where the dtypes agree. Factors of 16 bits, whose products a kernel adds in fp32,
    reach an fp32 view unrounded where the device can: on NVIDIA's GPUs. Elsewhere each matmul is rounded to their dtype first.
    """
    rows = left.t()
    if left.dtype == view.dtype:
        view.addmm_(rows, right, beta=0 if is_first else 1, alpha=scale)
    elif is_first:
        if _writes_fp32(left, view):
            torch.mm(rows, right, out_dtype=view.dtype, out=view)
        else:
            view.copy_(torch.mm(rows, right))
        if scale != 1:
            view.mul_(scale)
    elif _writes_fp32(left, view):
        torch.addmm(view, rows, right, alpha=scale, out_dtype=view.dtype, out=view)
    else:
        view.add_(torch.mm(rows, right), alpha=scale)


def stacked_matmul(x: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
    """y = x W_e^T for the rows of each group e.  x: [R, K]; weights: [E, N, K], any strides -> [R, N]. Not differentiable."""
    if _multiplies_groups(x) and takes_grouped_matmul(x) and takes_grouped_matmul(weights):
        return groups.clear_padding(F.grouped_mm(x, weights.transpose(1, 2), offs=groups.offsets))
    out = x.new_empty(x.shape[0], weights.shape[1])
    for y, rows, weight in zip(groups.split(out), groups.split(x), weights.unbind(), strict=True):
        if len(rows):
            matmul_into(y, rows, weight)
    return groups.clear_padding(out)


def accumulate_stacked_matmul(view: Tensor, left: Tensor, right: Tensor, groups: RowGroups, is_first: bool) -> None:
    """view[e] = left^T right of the rows of group e if it is the first, else added.  view: [E, M, N]; left: [R, M]; right:
    [R, N]. An empty group's is zero."""
    if _multiplies_groups(left) and takes_grouped_matmul(left) and takes_grouped_matmul(right):
        gradient = F.grouped_mm(left.t(), right, offs=groups.offsets)
        # torch's own tests of this kernel leave out the gradient of an empty group: do not rely on it.
        groups.clear_empty(gradient)
        view.copy_(gradient) if is_first else view.add_(gradient)
        return
    for matrix, rows, others in zip(view.unbind(), groups.split(left), groups.split(right), strict=True):
        if len(rows):
            accumulate_matmul(matrix, rows, others, is_first)
        elif is_first:
            matrix.zero_()


def _writes_fp32(factor: Tensor, view: Tensor) -> bool:
    """Whether torch's kernel takes factors of 16 bits and leaves sums in fp32. On CPUs it does not, and to widen the factors
    first costs four times the matmul where the processor multiplies bf16 (docs/memory.md)."""
    if not view.is_cuda or torch.version.hip is not None:
        return False
    return factor.dtype in (torch.bfloat16, torch.float16) and view.dtype == torch.float32


def _multiplies_groups(x: Tensor) -> bool:
    """Whether the device has a kernel for all groups at once, whatever their sizes: bf16 on Hopper and on Blackwell's data-centre
    GPUs. On others torch waits for the sizes in each matmul and loops over groups (pytorch PR 194227)."""
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def takes_grouped_matmul(x: Tensor) -> bool:
    """Whether F.grouped_mm takes a factor, on any device: there are rows, and memory that starts at 16 bytes, as do all its rows
    or columns. Of contiguous ones K and N are then multiples of 8 in bf16."""
    lines = max(x.stride()[-2:])
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and lines * x.element_size() % 16 == 0
