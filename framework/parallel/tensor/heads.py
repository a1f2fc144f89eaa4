"""Heads: how many an attention has, and the numbers by which its unmodified forward knows."""

import copy
import inspect
import re
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.errors import ModelError
from framework.mesh.topology import Axis
from framework.model import units
from framework.model.load import layer_configs
from framework.model.units import find_mixers, form_of_mixer, linear_heads
from framework.parallel.tensor.find_regions import RegionPlan, holder
from framework.parallel.tensor.partition import Counts
from framework.parallel.tensor.regions import change_argument, select_heads
from framework.parallel.tensor.rules import (
    HEAD_BIASES,
    HEAD_BLOCKS,
    HEAD_DIMS,
    HEAD_NUMBERS,
    HEAD_WIDTHS,
    KV_NUMBERS,
    KV_WIDTHS,
    LINEAR_NUMBERS,
)


def ranks_per_kv_head(config: PretrainedConfig, tp: int) -> int:
    """Number of ranks, of `tp`, that hold the same key-value heads: 1 unless there are fewer heads than ranks."""
    layers = layer_configs(config.get_text_config())
    # No attention: a topology is made for every family, also for those that splitting refuses later.
    counts = [_count_in_config(layer) for layer in layers if getattr(layer, "num_attention_heads", None) is not None]
    copies = {each.copies(tp) for each in counts} or {1}
    if len(copies) > 1:
        heads = " and ".join(str(number) for number in sorted({each.kv for each in counts}))
        raise ModelError(
            f"parallel.tp={tp}: layers have {heads} key-value heads, so ranks would share heads in some layers and not in others:"
            f" use parallel.tp={min(each.kv for each in counts)} or less"
        )
    return copies.pop()


def _count_in_config(config: PretrainedConfig) -> Counts:
    return Counts(config.num_attention_heads, count_kv_heads(config), HEAD_BLOCKS.get(config.model_type, 1))


def count_heads(model: PreTrainedModel, plan: RegionPlan) -> Counts:
    """From the config; layers may differ from it (laguna), so before it come the attention's own number, and the shape of its
    projection to keys. A recurrent mixer says itself how many it has."""
    mixer = next((module for _, module in find_mixers(model.get_submodule(plan.name))), None)
    if mixer is not None:
        return _count_linear_heads(mixer)
    layers = layer_configs(model.config.get_text_config())
    number = next((int(part) for part in plan.name.split(".") if part.isdigit()), 0)
    counts = _count_in_config(layers[number % len(layers)])
    q, kv = counts.q, counts.kv
    for name in plan.roles:
        attention = vars(model.get_submodule(holder(name)))
        q = next((attention[word] for word in HEAD_NUMBERS if word in attention), q)
        if name.endswith(".k_proj") and (head_dim := attention.get("head_dim")):
            kv = model.get_parameter(f"{name}.weight").shape[0] // head_dim
    return replace(counts, q=q, kv=kv)


def _count_linear_heads(mixer: Any) -> Counts:
    match form_of_mixer(mixer):
        case units.STATE_OF_CHANNELS:
            channels = mixer.D.shape[0]
            return Counts(channels, channels, linear={"linear_value_heads": (channels,)})
        case units.STATE_OF_HEADS:
            heads, inner, states = mixer.num_heads, mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
            segments = {"state_rows": (inner, inner, states, states, heads), "state_channels": (inner, states, states)}
            shared = {"state_rows": 3, "state_channels": 2}
            return Counts(heads, mixer.n_groups, linear={"linear_value_heads": (heads,), **segments}, shared=shared)
    heads = linear_heads(mixer)
    keys, values = heads.keys * heads.key_dim, heads.values * heads.value_dim
    sizes = {
        "linear_key_heads": (heads.keys,),
        "linear_value_heads": (heads.values,),
        "linear_channels": (keys, keys, values),
    }
    return Counts(heads.values, heads.values, linear=sizes)


def divide_numbers(attention: Any, counts: Counts, tp: Axis) -> None:
    """Tell an attention how many heads it has here: attributes, a config of its own if it reads heads there, and arguments
    with something for every head."""
    # With fewer key-value heads than ranks each rank has one of every block, which others have as well.
    q_local, kv_local = counts.q // tp.size, counts.kv // min(tp.size, counts.kv // counts.blocks)
    head_dim = next((getattr(attention, word) for word in HEAD_DIMS if hasattr(attention, word)), None)
    for name, value in list(vars(attention).items()):
        if name in HEAD_NUMBERS:
            setattr(attention, name, q_local)
        elif name in KV_NUMBERS:
            setattr(attention, name, kv_local)
        elif name == "num_key_value_groups":
            setattr(attention, name, q_local // kv_local)
        # The value decides: hidden_size may as well be the model's, which stays whole.
        elif name in HEAD_WIDTHS and head_dim is not None and value == counts.q * head_dim:
            setattr(attention, name, q_local * head_dim)
        # Openai-gpt's, whose attention has no other word for its heads' width.
        elif name == "split_size" and head_dim is None:
            setattr(attention, name, value // counts.q * q_local)
        elif name in KV_WIDTHS:
            setattr(attention, name, value // counts.kv * kv_local)
        elif name in LINEAR_NUMBERS and counts.linear:
            setattr(attention, name, value // tp.size)
    if _reads_heads_from_config(type(attention)):
        # All modules share one config: this one gets a copy.
        attention.config = copy.copy(attention.config)
        attention.config.num_attention_heads, attention.config.num_key_value_heads = q_local, kv_local
    _select_head_arguments(attention, counts, tp)


def refuse_fixed_attention(model: PreTrainedModel, name: str) -> None:
    """Raise ModelError for an attention that cannot be told of this rank's heads: its model puts another in its place, or its
    forward takes their width from its input. Read off the source, since nothing else tells."""
    attention, config = model.get_submodule(name), model.config.get_text_config()
    kind, around = type(attention), model.get_submodule(name.rpartition(".")[0])
    if hasattr(around, "set_attention_type") and getattr(config, "attention_type", "") != "original_full":
        raise ModelError(
            f"parallel.tp: the first forward of {config.model_type} models puts another attention in the place of {name}"
            f" ({kind.__name__}): set model.config.attention_type=original_full, or use parallel.tp=1"
        )
    source = inspect.getsource(kind.forward) if kind.__module__.startswith("transformers.") else ""
    width = re.search(r"\w+, \w+, (\w+) = hidden_states\.(?:size\(\)|shape)", source)
    if width is not None and re.search(rf"(?:view|reshape)\([^()]*\b{width[1]}\)", source):
        raise ModelError(
            f"parallel.tp: {name} ({kind.__name__}) takes the width of its heads from its input, which is that of all heads:"
            " use parallel.tp=1"
        )


def _select_head_arguments(attention: nn.Module, counts: Counts, tp: Axis) -> None:
    # The model computes biases (ALiBi) once for all heads and all layers, and hands them to an attention that has a few of them.
    arguments = list(inspect.signature(attention.forward).parameters)
    if not any(bias in arguments for bias in HEAD_BIASES):
        return
    for argument in (*HEAD_BIASES, "attention_mask"):
        if argument in arguments:
            hook = partial(change_argument, partial(select_heads, counts.q, tp), argument, arguments.index(argument))
            attention.register_forward_pre_hook(hook, with_kwargs=True)


def count_kv_heads(config: PretrainedConfig) -> int:
    """Key-value heads of the whole model. config: of the text model."""
    # Falcon's and GPT-BigCode's word for one key-value head; Falcon's new architecture ignores it.
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return 1
    numbers = (getattr(config, name, None) for name in ("num_key_value_heads", "num_kv_heads", "num_attention_heads"))
    return next(number for number in numbers if isinstance(number, int))


def _reads_heads_from_config(attention: type) -> bool:
    # Read off the source, since nothing else tells: whether a forward reads the config is no attribute of the module.
    methods = (each for name, each in vars(attention).items() if inspect.isfunction(each) and name != "__init__")
    return any(re.search(r"self\.config\.num_(attention|key_value)_heads", inspect.getsource(each)) for each in methods)
