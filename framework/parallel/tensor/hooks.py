"""Hooks by which regions and tokens attach to modules that are Hugging Face's own."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from framework.errors import ModelError
from framework.mesh.axis import Axis
from framework.mesh.layout import part
from framework.parallel.tensor.regions import Region, TokenShard


@torch.compiler.disable
def enter(region: Region, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """The input enters the region: the first argument, or `hidden_states`."""
    return _on_input(region.enter, args, kwargs)


def scatter(tokens: TokenShard, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
    return _on_input(tokens.scatter, args, kwargs)


def _on_input(change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]):
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}


def gather_behind(region: Region, tokens: TokenShard, module: nn.Module, args: Any, output: Any):
    """Behind the module, the final norm, the tokens come together: what follows is a region."""
    if not tokens.is_sharded:
        # NanoChat normalises the embedding by its final norm, too. With a weight that would be two kinds of gradient.
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise ModelError(
                f"{type(module).__name__} is used before and behind the layers: use parallel.sequence=false"
            )
        return output
    gathered = _on_output(region.enter, output)
    tokens.end()
    return gathered


def end_tokens(tokens: TokenShard, model: nn.Module, args: Any, output: Any) -> None:
    """The model has run. A part of it without the final norm hands its tokens on as they are."""
    tokens.end()


@torch.compiler.disable
def leave(region: Region, module: nn.Module, args: Any, output: Any):
    """The output leaves the region: the tensor, or the first of several."""
    return _on_output(region.leave, output)


def _on_output(change: Callable[[Tensor], Tensor], output: Any):
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def select_heads(
    argument: str,
    position: int,
    heads: int,
    axis: Axis,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
):
    """Of an argument with something for each head, what this rank's heads need: [B, heads, ...], else [B * heads, ., .]."""
    start, stop = part(heads, axis.rank, axis.size)

    def select(x: Any) -> Any:
        if not isinstance(x, Tensor) or (x.ndim == 4 and x.shape[1] != heads):
            return x
        return x[:, start:stop] if x.ndim == 4 else x.unflatten(0, (-1, heads))[:, start:stop].flatten(0, 1)

    if argument in kwargs:
        return args, kwargs | {argument: select(kwargs[argument])}
    if len(args) > position:
        return (*args[:position], select(args[position]), *args[position + 1 :]), kwargs
    return args, kwargs


def lend_bias(degree: int, experts: Any, args: Any) -> None:
    """For one forward pass a rank's part of the bias stands before the parameter: the ranks' outputs are summed."""
    experts.__dict__["down_proj_bias"] = experts._parameters["down_proj_bias"] / degree


def return_bias(experts: nn.Module, args: Any, output: Any) -> None:
    del experts.__dict__["down_proj_bias"]
