"""ChunkedLoss: the head and its cross-entropy in one, in chunks of tokens, so that no more logits exist than those of a chunk.

    forward   for each chunk: Z = map(X W^T + b); of each token  max z, sum exp(z - max z), z[label]
              over tp: log sum_v exp z_v of all tokens, as in `model/loss.py`; what is kept is X and one number for each token
    backward  for each chunk: Z again, dZ = g (softmax(z) - onehot), dY = map'(dZ), dX = dY W, dW += dY^T X

That is a fourth matmul of the head's size beside three. Gradients computed in forward (Hsu et al. 2024, Liger) save it, but there
dW has no place to go to: its unit's main gradient may be on its way to other ranks, or sharded again, or belong to the backward
of another microbatch, and a copy of dW for each microbatch in flight is as large as the logits were.

It stands where the head stands, as the head's own forward: hooks unshard its weight once and reduce its gradient as for any
module, and the border of a tensor-parallel region gathers hidden states once. The model goes on with logits of an empty
vocabulary.

The map is the LogitMap, found by running the model's own code without memory: its operations between head and logits.

    hidden states --head--> y = X W^T + b --map--> logits

Families scale logits (cohere, granite), soft-cap them (gemma2) or cast them. A loss that computes logits in chunks of tokens has
to do the same to each chunk. The model's forward is run on meta with its backbone answering for hidden states, and what happens
to the head's output until it is returned as logits is recorded. Operations on single elements are taken over; whatever else a
family does there (other tokens, a mask of the vocabulary, a write in place) is refused by name.

    B sequences, T tokens of each, N = B T; D hidden features; V the vocabulary size, V_r a rank's part of it
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.mesh.layout import part
from framework.model.load import DISABLED, FORWARD_ERRORS, accepted_arguments
from framework.model.loss import (
    IGNORE,
    LocalSums,
    Loss,
    TokenLoss,
    choose_likeliest,
    chunk_size,
    find_kernel,
    find_largest,
    is_fused,
    softmax_scale,
)
from framework.model.matmul import GradView, InputCall, Matmul, MatmulLinear, WeightGradientSum
from framework.model.units import find_layers
from framework.torch_private import TO_COPY, TorchDispatchMode, schema_of

# Tokens of the sequence that the model is run on.
NUM_TOKENS = 3

aten = torch.ops.aten


@dataclass(frozen=True)
class LogitMap:
    """Elementwise operations, one after another. Without any, the logits are the head's output."""

    operations: tuple[Callable[[Tensor], Tensor], ...]
    names: tuple[str, ...]

    def __call__(self, y: Tensor) -> Tensor:
        """Logits of the head's output, of any shape. Differentiable."""
        for operation in self.operations:
            y = operation(y)
        return y


def find_logit_map(model: PreTrainedModel, dtype: torch.dtype) -> LogitMap:
    """The map from the head's output to the logits of a model on meta, computing in `dtype`.

    Nothing is allocated, and the model stays as it is. Raises ModelError for a family whose logits are no elementwise function of
    its linear head's output.
    """
    head, found = model.get_output_embeddings(), find_layers(model)
    if type(head) is not nn.Linear or found is None:
        raise _refuse(model, f"its head is no plain linear layer ({type(head).__name__})")
    hidden = torch.empty(1, NUM_TOKENS, head.in_features, dtype=dtype, device="meta")
    recorder = _Recorder()
    forwards: dict[nn.Module, Callable[..., Any]] = dict.fromkeys(
        _backbones(model, found[0]), lambda *args, **kwargs: _Outputs((hidden,))
    )
    with _answering({**forwards, head: partial(recorder.start, head.out_features)}):
        logits = _run(model, recorder)
    if recorder.refused is not None:
        raise _refuse(model, recorder.refused)
    if recorder.newest is None or logits is not recorder.newest or recorder.num_calls != 1:
        raise _refuse(model, "its logits are not made from one call of its head")
    return LogitMap(tuple(recorder.operations), tuple(recorder.names))


def _run(model: PreTrainedModel, recorder: "_Recorder") -> Tensor:
    tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), recorder:
            return model(input_ids=tokens, **dict.fromkeys(set(DISABLED) & accepted_arguments(model), False)).logits
    except FORWARD_ERRORS as error:
        raise _refuse(model, f"its code around the head does not run alone ({error})") from error


def _backbones(model: nn.Module, layers: str) -> Iterator[nn.Module]:
    """The modules around the list of layers, but for the model itself; the outermost one that is called answers."""
    parts = layers.split(".")
    yield from (model.get_submodule(".".join(parts[:depth])) for depth in range(1, len(parts)))


@contextmanager
def _answering(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace forwards of modules for a while, in the module's own dict, which Python reads before its class."""
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]


class _Outputs(tuple):
    """The output of a backbone, by index and by name. Of all that families ask for it has hidden states only."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


class _Recorder(TorchDispatchMode):
    """Records operations on the head's output. newest: their result so far; refused: why chunks are not possible."""

    def __init__(self) -> None:
        super().__init__()
        self.newest: Tensor | None = None
        self.refused: str | None = None
        self.num_calls = 0
        self.operations: list[Callable[[Tensor], Tensor]] = []
        self.names: list[str] = []

    def start(self, vocabulary: int, x: Tensor) -> Tensor:
        """The head's forward: its output, without a matmul."""
        if x.shape[:-1] != (1, NUM_TOKENS):
            self.refused = f"its head gets hidden states of the shape {tuple(x.shape)}"
        self.num_calls += 1
        # Not `x.new_empty`, which would be recorded as an operation of the model's.
        self.newest = torch.empty(*x.shape[:-1], vocabulary, dtype=x.dtype, device="meta")
        return self.newest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        if self.newest is None or not any(each is self.newest for each in tensors):
            return result
        operation = _operation(func, args, kwargs, len(tensors), result)
        if operation is None:
            self.refused = self.refused or f"it does {func} to what its head gives"
        else:
            self.names.append(str(func))
            self.operations.append(operation)
        self.newest = result if isinstance(result, Tensor) else None
        return result


def _operation(func: Any, args: Any, kwargs: Any, num_tensors: int, result: Any) -> Callable[[Tensor], Tensor] | None:
    """The call as a function of its one tensor; None where it is no function of single elements."""
    is_plain = num_tensors == 1 and isinstance(args[0], Tensor) and not schema_of(func).is_mutable
    if not is_plain or not isinstance(result, Tensor) or result.shape != args[0].shape:
        return None
    if func in (aten.slice.Tensor, aten.alias.default, aten.clone.default, aten.detach.default):
        return _keep  # of this shape a slice is the whole
    if func is TO_COPY:
        return partial(_cast, dtype=result.dtype)
    if torch.Tag.pointwise not in func.tags:
        return None
    return partial(_apply, func=func, args=args[1:], kwargs=kwargs)


def _keep(y: Tensor) -> Tensor:
    return y


def _cast(y: Tensor, dtype: torch.dtype) -> Tensor:
    # Models widen to fp32 here. In fp64 that would narrow, and nothing of the loss needs it.
    return y if y.dtype == torch.float64 else y.to(dtype)


def _apply(y: Tensor, func: Any, args: Any, kwargs: Any) -> Tensor:
    return func(y, *args, **kwargs)


def _refuse(model: PreTrainedModel, reason: str) -> ModelError:
    return ModelError(
        f"memory.chunked_loss=true: the logits of {model.config.model_type} cannot be computed in chunks of tokens: {reason}."
        " Use memory.chunked_loss=false"
    )


def make_loss(
    model: PreTrainedModel,
    grad_views: Iterable[GradView],
    logit_map: LogitMap | None,
    axis: Communicator,
    vocabulary: int,
) -> Loss:
    """The loss of a stage: from its logits, or, with a map, computed by the model's head in their place."""
    if logit_map is None:
        return TokenLoss(axis, vocabulary)
    return ChunkedLoss(model.get_output_embeddings(), grad_views, logit_map, axis, vocabulary)


class ChunkedLoss:
    """The loss of a stage whose head computes it (`model.loss.Loss`); lives as long as the stage.

    head: the stage's own, whose forward becomes this; attached already, so that hooks of others see the loss as its output.
    grad_views: of trained parameters. logit_map: what the model does behind its head. axis, vocabulary: as of `TokenLoss`.
    tokens: those of a chunk, None: `chunk_size`.
    """

    def __init__(
        self,
        head: nn.Linear,
        grad_views: Iterable[GradView],
        logit_map: LogitMap,
        axis: Communicator,
        vocabulary: int,
        tokens: int | None = None,
    ) -> None:
        self.map, self.axis, self.tokens = logit_map, axis, tokens
        self.start, stop = part(vocabulary, axis.rank, axis.size)
        self.matmul = head.matmul if isinstance(head, MatmulLinear) else _make_matmul(head, grad_views)
        assert self.matmul.matrix.shape[0] == stop - self.start, f"{self.matmul.matrix.shape} of [{self.start}, {stop})"
        self._head = head
        self._labels: Tensor | None = None
        self._z_loss = 0.0
        self._losses: Tensor | None = None
        self.largest: list[tuple[Tensor, Tensor]] | None = None  # of each chunk, where the forward is to find them
        head.forward = self._compute  # type: ignore[method-assign, assignment]
        head.register_forward_hook(self._keep)

    def expect(self, labels: Tensor, z_loss: float = 0.0, finds_likeliest: bool = False) -> None:
        self._labels, self._z_loss = labels, z_loss
        self.largest = [] if finds_likeliest else None

    def __call__(self, logits: Tensor, labels: Tensor, num_tokens: Tensor, z_loss: float = 0.0) -> Tensor:
        """The loss of the last forward, a scalar in at least fp32.  logits: [B, T, 0], of an empty vocabulary."""
        return self.of_tokens(logits, labels).sum() / num_tokens.clamp(min=1)

    def of_tokens(self, logits: Tensor, labels: Tensor, z_loss: float = 0.0) -> Tensor:
        """The losses of the last forward's tokens, [B, T] in at least fp32, 0 without a label."""
        losses, self._losses, self._labels = self._losses, None, None
        assert losses is not None, "the model did not call its head"
        assert not logits.numel(), f"logits {tuple(logits.shape)} that the head did not give"
        return losses.view(labels.shape)

    def likeliest(self, logits: Tensor) -> Tensor:
        """The likeliest next token of each of the last forward, [B, T]. logits: [B, T, 0]."""
        assert self.largest, "the forward was not to find them"
        largest, ids = (torch.cat(parts) for parts in zip(*self.largest, strict=True))
        self.largest = None
        return choose_likeliest(largest, ids, self.axis).view(logits.shape[:-1])

    def chunks(self, rows: Tensor) -> Iterator[slice]:
        """The tokens of `rows`, [N, D], one chunk after another."""
        row_bytes = self.matmul.matrix.shape[0] * rows.itemsize
        step = self.tokens or chunk_size(len(rows), row_bytes, is_fused(rows.device.type, rows.itemsize))
        return (slice(first, first + step) for first in range(0, len(rows), step))

    # The head's forward, and a hook behind all others that wait for its output.

    def _compute(self, x: Tensor) -> Tensor:
        labels, head = self._labels, self._head
        assert labels is not None, "a head was called whose labels nobody expects"
        assert x.shape[:-1] == labels.shape, f"hidden states {tuple(x.shape)} for labels {tuple(labels.shape)}"
        call = head.input_call if isinstance(head, MatmulLinear) else None
        return _LinearCrossEntropy.apply(
            x, self.matmul.graph_input, head.bias, labels.flatten(), self, self._z_loss, call
        )

    def _keep(self, head: nn.Module, args: tuple[Tensor, ...], losses: Tensor) -> Tensor:
        self._losses = losses
        return args[0].new_empty(*args[0].shape[:-1], 0)


def _make_matmul(head: nn.Linear, grad_views: Iterable[GradView]) -> Matmul:
    matmul = Matmul(head, is_transposed=False)
    for view in grad_views:
        if view.parameter is head.weight:
            matmul.write_gradient_to(view)
    return matmul


class _LinearCrossEntropy(torch.autograd.Function):
    """x: [B, T, D], labels: [N] -> the losses, [N]. `source` stands for the weight in autograd's graph (`Matmul.graph_input`).
    call: gathers x again in backward, if x is not kept whole."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss: ChunkedLoss,
        z_loss: float,
        call: InputCall | None,
    ) -> Tensor:
        kept = None if call is None else call.find_kept(x)
        rows = x.reshape(-1, x.shape[-1])
        sums = LocalSums.make(labels, rows)
        for chunk in loss.chunks(rows):
            logits = loss.map(loss.matmul.forward(rows[chunk], bias))
            find_kernel(logits).read(logits, labels[chunk], loss.start, sums.of(chunk))
            if loss.largest is not None:
                loss.largest.append(find_largest(logits, loss.start))
        log_sum, losses = sums.combine(loss.axis, z_loss)
        ctx.z_loss, ctx.loss, ctx.call, ctx.regathers = z_loss, loss, call, kept is not None
        ctx.save_for_backward(x if kept is None else kept, bias, labels, log_sum)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, labels, log_sum = ctx.saved_tensors
        loss: ChunkedLoss = ctx.loss
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        if ctx.regathers:
            ctx.call.start_gather(x)
            x = ctx.call.gathered()
        rows, weight = x.reshape(-1, x.shape[-1]), gradient * (labels != IGNORE)
        dx = torch.empty_like(rows) if needs_dx else None
        dw = WeightGradientSum(loss.matmul) if needs_dw else None
        db = torch.zeros_like(bias, dtype=log_sum.dtype) if needs_db else None
        for chunk in loss.chunks(rows):
            dy = _output_gradient(loss, rows[chunk], bias, (labels[chunk], log_sum[chunk], weight[chunk]), ctx.z_loss)
            if dx is not None:
                loss.matmul.input_gradient(dy, out=dx[chunk])
            if dw is not None:
                dw.add(rows[chunk], dy)
            if db is not None:
                db += dy.sum(0, dtype=db.dtype)
            del dy
        dx = None if dx is None else dx.view(x.shape)
        return dx, None if dw is None else dw.end(), None if db is None else db.to(bias.dtype), None, None, None, None


def _output_gradient(
    loss: ChunkedLoss, rows: Tensor, bias: Tensor | None, sums: tuple[Tensor, Tensor, Tensor], z_loss: float
) -> Tensor:
    """The gradient of the head's output for a chunk, whose logits are computed again.  rows: [n, D] -> [n, V_r].

    sums: labels, log sum exp z, and the weight of each token.
    """
    labels, log_sum, weight = sums
    scale = softmax_scale(log_sum, z_loss)
    y = loss.matmul.forward(rows, bias)
    kernel = find_kernel(y)
    if not loss.map.operations:
        # In place: a second tensor would be as large as all that a chunk has.
        kernel.differentiate(y, labels, loss.start, log_sum, weight, y, scale)
        return y
    with torch.enable_grad():
        logits = loss.map(y.requires_grad_())
    dz = torch.empty_like(logits)  # the map's own backward may read the logits
    kernel.differentiate(logits.detach(), labels, loss.start, log_sum, weight, dz, scale)
    return torch.autograd.grad(logits, y, dz)[0]
