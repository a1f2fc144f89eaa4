"""Modules that mix tokens by code of their own, in models whose sequences ranks of `cp` divide: they get the tokens of all ranks.

    model         all tokens, as in one process: masks, positions and biases of distance are the family's own
    first layer   hidden states of this rank's tokens
    a mixer       those of all ranks; of its output this rank's rows
    final norm    those of this rank in their places among all, for code that reads the sequence's shape behind it
    head          this rank's

Nothing of the family's code is known but which modules mix tokens, so it is exact for any of them. What it costs: each mixer's
hidden states are gathered, and the gradients come back to their ranks as sums; a mixer's own work and activations are not
divided. All else of the model is: mlps, experts, the head, the loss.

    B sequences, C tokens of each on this rank, S of the whole sequence, D features
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.comm import duals
from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.mesh.token_layout import ContextSlices
from framework.model.load import FORWARD_ERRORS
from framework.model.units import find_last_module, find_layers
from framework.torch_private import tree_leaves, tree_map

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class WholeTokens:
    """The ways between a rank's tokens and all. local: C; total: S; gather: [B, C, ...] -> [B, S, ...] of all ranks; take: this
    rank's rows of [B, S, ...]; place: [B, C, D] -> [B, S, D] with this rank's rows in their places."""

    local: int
    total: int
    gather: Map
    take: Map
    place: Map

    def compute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A mixer's forward, on all tokens."""
        given = tree_leaves((args, kwargs))
        hidden = next(x for x in given if isinstance(x, Tensor) and x.is_floating_point() and x.ndim > 1)
        # Within another mixer tokens are all there already.
        if hidden.shape[1] != self.local:
            return forward(*args, **kwargs)
        shape = hidden.shape

        def gather(x: Any) -> Any:
            return self.gather(x) if isinstance(x, Tensor) and x.shape == shape else x

        args, kwargs = tree_map(gather, (args, kwargs))
        output = forward(*args, **kwargs)
        # A state beside it (xlstm's) is of the whole sequence, and has no rows of tokens.
        return tree_map(lambda x: self.take(x) if self._has_all(x) and x.ndim == len(shape) else x, output)

    def take_ids(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """In front of a module that computes on this rank's tokens: of integers for each token, [B, S], which the model hands to
        its layers (deepseek_v4 chooses experts by them), this rank's."""

        def take(x: Any) -> Any:
            return self.take(x) if self._has_all(x) and x.ndim == 2 and not x.is_floating_point() else x

        return tree_map(take, (args, kwargs))  # type: ignore[no-any-return]

    def _has_all(self, x: Any) -> bool:
        return isinstance(x, Tensor) and x.shape[1:2] == (self.total,)


def tokens_of(slices: ContextSlices, cp: Communicator) -> WholeTokens:
    """Between ranks of `cp`."""
    starts = [start for rank in range(slices.ranks) for start, _ in slices.of_rank(rank).intervals]
    # The ranks' parts, one rank behind the other, by their places in the sequence. Parts are views: rows by index would have the
    # host wait for the device, in each mixer.
    order = sorted(range(len(starts)), key=starts.__getitem__)

    def arrange(parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([parts[number] for number in order], 1)[:, : slices.context].contiguous()

    def gather(x: Tensor) -> Tensor:
        return arrange(duals.gather(x.contiguous(), cp, 1).split(slices.part, 1))

    def take(x: Tensor) -> Tensor:
        # Padding is no token of the sequence: any row will do.
        padding = x[:, -1:].expand(-1, slices.tokens_local - slices.valid_local, *x.shape[2:])
        return torch.cat([*(x[:, start:stop] for start, stop in slices.intervals), padding], 1)

    def place(x: Tensor) -> Tensor:
        parts = [x.new_zeros(()).expand(len(x), slices.part, *x.shape[2:])] * len(starts)
        first = slices.rank * slices.chunks
        parts[first : first + slices.chunks] = x.split(slices.part, 1)
        return arrange(parts)

    return WholeTokens(slices.tokens_local, slices.context, gather, take, place)


def refuse_sequence(config: PretrainedConfig, mixers: Collection[str]) -> NoReturn:
    """Raise the ModelError of layouts that divide the same tokens over tp."""
    raise ModelError(
        f"parallel.sequence=true: {' and '.join(sorted(mixers))} of {config.model_type} models get the tokens of all ranks of"
        " cp, and tp would divide them: set parallel.sequence=false"
    )


def hook_whole(model: PreTrainedModel, mixers: Collection[str], tokens: WholeTokens, has_documents: bool) -> None:
    """Have the model compute on all tokens what `mixers`, names of classes, say, and on this rank's all else. has_documents:
    positions restart within rows, and the model is told them; else it counts them itself."""
    found = find_layers(model)
    assert found is not None, "its mixers were found in layers"
    for layer in found[1]:
        _hook_parts(layer, mixers, tokens)
    model.register_forward_pre_hook(partial(_give_all, tokens, has_documents), with_kwargs=True)
    found[1][0].register_forward_pre_hook(partial(_take_input, tokens), with_kwargs=True)
    find_last_module(model).register_forward_hook(partial(_place_output, tokens))
    head: Any = model.get_output_embeddings()
    head.register_forward_pre_hook(lambda module, args: (tokens.take(args[0]), *args[1:]))


def _hook_parts(module: nn.Module, mixers: Collection[str], tokens: WholeTokens) -> None:
    """Hook the outermost modules within that are mixers, and those around none."""
    for part in module.children():
        if type(part).__name__ in mixers:
            part.forward = partial(tokens.compute, part.forward)
        elif isinstance(part, nn.ModuleList) or any(type(each).__name__ in mixers for each in part.modules()):
            _hook_parts(part, mixers, tokens)
        else:
            part.register_forward_pre_hook(tokens.take_ids, with_kwargs=True)


def _give_all(tokens: WholeTokens, has_documents: bool, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    kwargs = {name: each for name, each in kwargs.items() if name != "attention_mask"}
    positions = kwargs.pop("position_ids", None)
    kwargs["input_ids"] = tokens.gather(kwargs["input_ids"])
    if has_documents and positions is not None:
        kwargs["position_ids"] = tokens.gather(positions)
    return args, kwargs


def _place_output(tokens: WholeTokens, module: nn.Module, args: Any, output: Any) -> Any:
    # A layer, where there is no final norm, may hand on more than hidden states.
    return tree_map(
        lambda x: tokens.place(x) if isinstance(x, Tensor) and x.shape[1:2] == (tokens.local,) else x, output
    )


def _take_input(tokens: WholeTokens, layer: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if "hidden_states" in kwargs:
        return args, kwargs | {"hidden_states": _take_rows(tokens, kwargs["hidden_states"])}
    return (_take_rows(tokens, args[0]), *args[1:]), kwargs


def _take_rows(tokens: WholeTokens, x: Tensor) -> Tensor:
    # A stage behind the first gets this rank's tokens from the one before.
    return x if x.shape[1] == tokens.local else tokens.take(x)


def find_whole_mixers(model: PreTrainedModel, tokens: Tensor) -> dict[str, str]:
    """The outermost modules within layers that mix tokens: of which another row of the hidden states that they get changes more
    rows than its own. Their classes, each with the path of the first; where the model fails, of what ran before. model: a small
    copy; tokens: [1, T]."""
    found, calls = find_layers(model), dict[nn.Module, tuple[Any, ...]]()
    if found is None:
        return {}

    def note(module: nn.Module, *call: Any) -> None:
        calls.setdefault(module, call)

    handles = [module.register_forward_hook(note, with_kwargs=True) for layer in found[1] for module in layer.modules()]
    try:
        model(input_ids=tokens)
    except FORWARD_ERRORS:
        pass  # what ran before may tell
    finally:
        for handle in handles:
            handle.remove()
    length = tokens.shape[1]

    mixers: dict[str, str] = {}

    def visit(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            if child in calls and _mixes(child, calls[child], length):
                mixers.setdefault(type(child).__name__, f"{path}.{name}")
            else:
                visit(f"{path}.{name}", child)

    for index, layer in enumerate(found[1]):
        visit(f"{found[0]}.{index}", layer)
    return mixers


def _mixes(module: nn.Module, call: tuple[Any, ...], length: int) -> bool:
    args, kwargs, output = call

    def change(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != 3 or x.shape[:2] != (1, length):
            return x
        changed = x.clone()
        changed[:, 0] += 1
        return changed

    try:
        again = module(*tree_map(change, args), **tree_map(change, kwargs))
    except FORWARD_ERRORS:
        return False
    pairs = zip(tree_leaves(output), tree_leaves(again), strict=False)
    rows = [
        (one[:, 1:], other[:, 1:]) for one, other in pairs if isinstance(one, Tensor) and one.shape[:2] == (1, length)
    ]
    return any(not torch.allclose(one, other, atol=1e-6) for one, other in rows)
