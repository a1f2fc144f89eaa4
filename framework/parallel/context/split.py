"""split_context: a transform that lets a model on meta attend across the ranks that divide its sequences.

Parameters stay whole: context parallelism divides tokens, and ZeRO takes `cp` for data. What changes is attention, the one place
of a decoder where tokens meet: every attention module is given a Hook, and the model's config the name of the function that asks
for it. That nothing else mixes tokens the probe has shown on a small copy.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from framework.errors import TopologyError
from framework.mesh.context import ContextSlices
from framework.mesh.layout import Layout
from framework.model.block_attention import BlockAttention
from framework.model.load import layer_configs
from framework.parallel.context.attention import ContextAttention
from framework.parallel.context.family_forwards import METHODS, give_mask, replace_method
from framework.parallel.context.hook import IMPLEMENTATION, Hook
from framework.parallel.stage_plan import StagePlan
from framework.recipe.layout_rules import find_uneven_heads
from framework.recipe.schema import Parallel


def split_context(model: PreTrainedModel, layouts: Mapping[str, Layout], plan: StagePlan) -> Mapping[str, Layout]:
    """Have every attention of the model attend across `ulysses` and `ring`. Layouts stay. On one rank of `cp` nothing changes.

    model: on meta, its heads divided over `tp` already. Raises TopologyError where a rank's heads do not divide over `ulysses`.
    """
    if plan.axes["cp"].size == 1:
        return layouts
    ulysses, ring, slices = plan.axes["ulysses"], plan.axes["ring"], plan.tokens.slices
    assert slices is not None, "tokens of a rank of cp without their rows"
    refuse_uneven_heads(layer_configs(model.config), plan.recipe.parallel)
    method: Literal["ring", "gather"] = "gather" if plan.recipe.parallel.context == "gather" else "ring"
    block = BlockAttention()  # one, which compares a device's kernels once

    def make_hook() -> Hook:
        return Hook(ContextAttention(slices, ulysses, ring, method, block), lambda device: rows_of(slices, device))

    hook_attentions(model, make_hook)
    return layouts


def find_context_attentions(model: nn.Module) -> dict[nn.Module, tuple[ContextAttention]]:
    """By the module that calls it, each attention of the model over the ranks of `cp`."""
    hooks = ((module, vars(module).get("context_hook")) for module in model.modules())
    attentions = ((module, hook.attention) for module, hook in hooks if isinstance(hook, Hook))
    return {module: (each,) for module, each in attentions if isinstance(each, ContextAttention)}


def rows_of(slices: ContextSlices, device: torch.device) -> Tensor:
    """The global rows of a rank's tokens, [C] int64, padding counted on."""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in slices.intervals])


def hook_attentions(model: PreTrainedModel, make_hook: Callable[[], Hook]) -> None:
    """Give a hook of its own to every attention of the model, and have the model call them by it."""
    for module in find_attentions(model):
        module.context_hook = make_hook()
        if type(module).__name__ in METHODS:
            replace_method(module)
    # Tensor parallelism gives some modules a config of their own.
    for module in model.modules():
        config = vars(module).get("config")
        if isinstance(config, PretrainedConfig):
            config._attn_implementation = IMPLEMENTATION
    give_mask(model)


def find_attentions(model: nn.Module) -> Iterator[Any]:
    """The modules that ask Hugging Face's registry for an attention function, and those whose code has a replacement."""
    asks: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        kind = type(module)
        if kind not in asks:
            asks[kind] = kind.__name__ in METHODS or _asks_registry(kind)
        if asks[kind]:
            yield module


def _asks_registry(kind: type[nn.Module]) -> bool:
    # By source, since nothing else tells before the module is called.
    forward = inspect.unwrap(kind.forward)
    return kind.__module__.startswith("transformers.") and "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(forward)


def refuse_uneven_heads(layers: Iterable[PretrainedConfig], parallel: Parallel) -> None:
    """Raises TopologyError where the heads of a layer do not divide over Ulysses' ranks. layers: the config of each kind of
    layer."""
    for config in layers:
        for problem in find_uneven_heads(parallel, config.get_text_config().num_attention_heads):
            raise TopologyError(f"{problem.key}: {problem.message}, of a {config.model_type} model: use {problem.fix}")
