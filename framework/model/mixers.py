"""Recurrent mixers: modules that carry a state, or a window of a convolution, from token to token.

transformers' mixers of any family call functions of a few common names, each with one meaning: `causal_conv1d_fn` is the short
convolution, `torch_chunk_gated_delta_rule` the delta rule with a decay for each head, `mamba2_chunk_scan` a state space of heads.
Which of them a forward calls is what the mixer is, and a mixer computes by other functions if it is given a namespace that has
them.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import FunctionType
from typing import Any

from torch import nn

CONVOLUTION, DELTA_RULE, CHANNEL_DELTA_RULE = (
    "causal_conv1d_fn",
    "torch_chunk_gated_delta_rule",
    "chunk_kimi_delta_attention",
)
STATE_OF_HEADS, STATE_OF_CHANNELS = "mamba2_chunk_scan", "mamba_selective_scan"
# Names of kernels for a whole mixer. Without a kernel they return None, and the mixer calls the functions above.
WHOLE_MIXERS = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
# Takes padding out by a mask.
MASK = "apply_mask_to_padding_states"
# The functions that mix tokens, those that carry a state first.
MIXING = (DELTA_RULE, CHANNEL_DELTA_RULE, STATE_OF_HEADS, STATE_OF_CHANNELS, CONVOLUTION)


def find_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The recurrent mixers of a model, with their names."""
    yield from ((name, module) for name, module in model.named_modules() if form_of_mixer(module) is not None)


def form_of_mixer(module: nn.Module) -> str | None:
    """The function by which a mixer carries its state, or its convolution where it has nothing else; None: it is no mixer."""
    names = called_names(module)
    form = next((each for each in MIXING if each in names), None)
    # Decays of its own: it carries a state as well, by code that nobody here knows.
    return None if form == CONVOLUTION and any(True for _ in module.parameters(recurse=False)) else form


@dataclass(frozen=True)
class LinearHeads:
    """The heads of a mixer whose state is a matrix for each: their numbers, of keys and of values, and features of a head."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


def linear_heads(mixer: Any) -> LinearHeads:
    """The heads of a delta rule, of as many as the mixer has here: numbers of their own for keys and values, or one."""
    if hasattr(mixer, "num_k_heads"):
        return LinearHeads(mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim)
    return LinearHeads(mixer.num_heads, mixer.num_heads, mixer.head_dim, mixer.head_dim)


def count_state(module: nn.Module) -> int:
    """The multiplications by which a mixer itself reads, corrects and writes its state for a token, beside those with weights."""
    if has_state_space(module):
        return 3 * count_state_elements(module)  # it decays, is added to, and read
    if form_of_mixer(module) not in (DELTA_RULE, CHANNEL_DELTA_RULE):
        return 0
    heads = linear_heads(module)
    return 3 * heads.values * heads.key_dim * heads.value_dim


def count_map(mixer: nn.Module) -> int:
    """Elements of what takes a mixer's state across tokens, however many: a matrix for the state, or its decays, and what they
    add."""
    if has_state_space(mixer):
        return count_state_elements(mixer) + mixer.get_parameter("A_log").numel()
    if form_of_mixer(mixer) not in (DELTA_RULE, CHANNEL_DELTA_RULE):
        return 0
    heads = linear_heads(mixer)
    return heads.values * heads.key_dim * (heads.key_dim + heads.value_dim)


def count_channels(mixer: Any, channels: int, tp: int) -> int:
    """Channels of the convolution on a rank of `tp`, of so many in all; ranks of one group of heads all have its states."""
    if form_of_mixer(mixer) != STATE_OF_HEADS:
        return channels // tp
    states: int = 2 * mixer.n_groups * mixer.ssm_state_size
    return (channels - states) // tp + states // min(tp, mixer.n_groups)


def has_state_space(module: nn.Module) -> bool:
    """Whether a mixer's state is decayed, by heads or by channels, and nothing else."""
    return form_of_mixer(module) in (STATE_OF_HEADS, STATE_OF_CHANNELS)


def count_state_elements(mixer: Any) -> int:
    """Elements of the state of a state space: for each of its features as many as it has states."""
    elements: int = mixer.intermediate_size * mixer.ssm_state_size
    return elements


def called_names(module: nn.Module) -> frozenset[str]:
    """The names that the forward of a module of transformers reads from its file, functions among them; none of another's."""
    kind = type(module)
    return _read_names(kind.forward) if kind.__module__.startswith("transformers.") else frozenset()


@cache
def _read_names(forward: Callable[..., Any]) -> frozenset[str]:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return frozenset() if code is None else frozenset(code.co_names)


def call_by(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Have the forward of this one module, which stays as it is written, find these functions by their names."""
    # A function of the same code in a namespace of its own: the family's file, and every other module of it, stay untouched.
    forward: Any = inspect.unwrap(type(module).forward)
    own = FunctionType(
        forward.__code__, forward.__globals__ | functions, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = partial(own, module)
