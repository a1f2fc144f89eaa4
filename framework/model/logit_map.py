"""LogitMap: the operations of a model between its head and its logits, found by running its own code without memory.

    hidden states --head--> y = X W^T + b --map--> logits

Families scale logits (cohere, granite), soft-cap them (gemma2) or cast them. A loss that computes logits in chunks of tokens has
to do the same to each chunk. The model's forward is run on meta with its backbone answering for hidden states, and what happens
to the head's output until it is returned as logits is recorded. Operations on single elements are taken over; whatever else a
family does there (other tokens, a mask of the vocabulary, a write in place) is refused by name.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.errors import ModelError
from framework.model.load import DISABLED, FORWARD_ERRORS, accepted_arguments
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
