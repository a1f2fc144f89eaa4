"""Recurrent mixers: modules that carry a state, or a window of a convolution, from token to token.

transformers' mixers of any family call functions of a few common names, each with one meaning: `causal_conv1d_fn` is the short
convolution, `torch_chunk_gated_delta_rule` the delta rule with a decay for each head. Which of them a forward calls is what the
mixer is, and a mixer computes by other functions if it is given a namespace that has them.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType
from typing import Any

from torch import nn

CONVOLUTION, DELTA_RULE, CHANNEL_DELTA_RULE = (
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
)
# The functions that mix tokens. A mixer that calls others beside these mixes tokens by code that nobody here knows.
MIXING = (CONVOLUTION, DELTA_RULE, CHANNEL_DELTA_RULE)


def find_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The recurrent mixers of a model, with their names."""
    kinds: dict[type[nn.Module], bool] = {}
    for name, module in model.named_modules():
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = any(each in called_names(module) for each in MIXING)
        if kinds[kind]:
            yield name, module


def called_names(module: nn.Module) -> frozenset[str]:
    """The names that the forward of transformers' module reads from its file, functions among them; none of another's."""
    kind = type(module)
    if not kind.__module__.startswith("transformers."):
        return frozenset()
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def stock_function(module: nn.Module, name: str) -> Callable[..., Any]:
    """The function that the module's forward calls by this name."""
    found: Callable[..., Any] = inspect.unwrap(type(module).forward).__globals__[name]
    return found


def call_by(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Have the forward of this one module, which stays as it is written, find these functions by their names."""
    # A function of the same code in a namespace of its own: the family's file, and every other module of it, stay untouched.
    forward: Any = inspect.unwrap(type(module).forward)
    own = FunctionType(
        forward.__code__, forward.__globals__ | functions, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = partial(own, module)
