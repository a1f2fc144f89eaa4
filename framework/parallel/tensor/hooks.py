"""Hooks by which regions and tokens attach to modules that are Hugging Face's own.

B sequences, S tokens of a whole sequence, s of them on this rank where they are sharded, D hidden features
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from framework.errors import ModelError
from framework.mesh.axis import Axis
from framework.mesh.layout import part
from framework.parallel.tensor.regions import Region
from framework.parallel.tensor.rng import RngStreams
from framework.parallel.tensor.sharded_tokens import ShardedTokens


# Not traced: what is a region's call changes with every microbatch, and the compiler would guard on it.
@torch.compiler.disable
def enter(region: Region, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """The input enters the region, [B, s, D] or replicated to [B, S, D]: the first argument, or `hidden_states`."""
    return _on_input(region.enter, args, kwargs)


def scatter(tokens: ShardedTokens, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]):
    """In front of the first layer each rank goes on with its tokens: [B, S, D] to [B, s, D]."""
    return _on_input(tokens.scatter, args, kwargs)


def start_outside(rng: RngStreams, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """From the first layer on ranks hold different tokens."""
    rng.start_outside(args[0] if args else kwargs["hidden_states"])


def end_outside(rng: RngStreams, model: nn.Module, args: Any, output: Any) -> None:
    """The tokens have come together, or the model, part of a pipeline, has run: what follows is computed alike again."""
    rng.end_outside()


def _on_input(change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]):
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}


def gather_behind(region: Region, tokens: ShardedTokens, module: nn.Module, args: Any, output: Any):
    """Behind the module, the final norm, the tokens come together, [B, s, D] to [B, S, D]: what follows is a region.

    ModelError if the module is called in front of the layers as well, and has weights.
    """
    if tokens.is_whole(output[0] if isinstance(output, tuple) else output):
        # NanoChat normalises the embedding by its final norm, too. With a weight that would be two kinds of gradient.
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise ModelError(
                f"{type(module).__name__} is used before and behind the layers: use parallel.sequence=false"
            )
        return output
    return _on_output(region.enter, output)


def end_region(region: Region, module: nn.Module, args: Any, output: Tensor) -> None:
    """Behind a module that ends a region without a border out, the head: the logits, [B, S, V_r], stay divided."""
    region.end(output)


# Not traced, as `enter`: beside the sum it ends the region's stream of random numbers, a state that no graph shows.
@torch.compiler.disable
def leave(region: Region, module: nn.Module, args: Any, output: Any):
    """The output leaves the region, [B, S, D] to [B, s, D] or replicated: the tensor, or the first of several."""
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
        # A mask that is the same for all heads, [B, 1, S, S] or none, serves this rank's heads as it is.
        if not isinstance(x, Tensor) or (x.ndim == 4 and x.shape[1] != heads):
            return x
        return x[:, start:stop] if x.ndim == 4 else x.unflatten(0, (-1, heads))[:, start:stop].flatten(0, 1)

    # Families differ in how they call their attention: by keyword, by position, or without the argument.
    if argument in kwargs:
        return args, kwargs | {argument: select(kwargs[argument])}
    if len(args) > position:
        return (*args[:position], select(args[position]), *args[position + 1 :]), kwargs
    return args, kwargs


def lend_bias(degree: int, experts: Any, args: Any) -> None:
    """For one forward pass a rank's part of the bias stands before the parameter: the ranks' outputs are summed."""
    # An instance's own attribute is found before __getattr__ asks for parameters: the unmodified forward reads this one. Divided
    # anew in each pass, so the gradient reaches the parameter, and is one rank's part like everything inside.
    experts.__dict__["down_proj_bias"] = experts._parameters["down_proj_bias"] / degree


def return_bias(experts: nn.Module, args: Any, output: Any) -> None:
    del experts.__dict__["down_proj_bias"]
