"""Choose the weights of a model that get an adapter, by the names that a recipe gives, and register its parameters."""

import difflib
import inspect
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from framework.errors import ModelError
from framework.model.adapters import (
    ALL_LINEAR,
    DROPOUT,
    LINEARS,
    MAGNITUDE,
    A,
    AdapterDropout,
    B,
    ends_with,
    find_linears,
    holds_transposed,
    name_beside,
)
from framework.model.experts import find_experts
from framework.model.probe import draw_tokens, small_copy
from framework.recipe.schema import Adapter


def add_adapters(model: PreTrainedModel, adapter: Adapter) -> None:
    """Give a model on meta the adapters of the recipe, without memory. Raises ModelError for targets that fit nothing."""
    if not adapter.is_used:
        return
    for weight in find_targets(model, adapter):
        path, _, own_name = weight.rpartition(".")
        module = model.get_submodule(path)
        stack, (outputs, inputs) = _sizes(module, own_name)
        shapes = {A: (*stack, adapter.rank, inputs), B: (*stack, outputs, adapter.rank)}
        if adapter.kind == "dora":
            shapes[MAGNITUDE] = (outputs,)
        for part, shape in shapes.items():
            empty = torch.empty(shape, dtype=module.get_parameter(own_name).dtype, device="meta")
            module.register_parameter(name_beside(f".{own_name}", part)[1:], nn.Parameter(empty))
        if adapter.dropout:
            module.add_module(DROPOUT, AdapterDropout(adapter.dropout))


def _sizes(module: nn.Module, weight: str) -> tuple[tuple[int, ...], tuple[int, int]]:
    """(E,) or (), and (N, K), of a module's weight."""
    *stack, first, second = module.get_parameter(weight).shape
    return tuple(stack), (second, first) if holds_transposed(module) else (first, second)


def find_targets(model: PreTrainedModel, adapter: Adapter) -> list[str]:
    """The weights that get an adapter, by full name. Raises ModelError with what there is for targets that fit nothing."""
    head, linears = model.get_output_embeddings(), find_linears(model)
    passed_by, shared = _find_passed_by(model, linears), _find_shared(linears)
    stacked = {f"{path}.{each}": path for path, _, form in find_experts(model) for each in (form.first, form.last)}
    found: set[str] = set()
    for target in adapter.targets:
        if target == ALL_LINEAR:
            left_out = passed_by | shared
            fits = {f"{path}.weight" for path, each in linears.items() if each is not head and path not in left_out}
        else:
            fits = {f"{path}.weight" for path in linears if ends_with(path, target)}
            # Match the module's name, or the weight's with something of its module: `down_proj` alone is an mlp's.
            fits |= {
                name
                for name, path in stacked.items()
                if ends_with(path, target) or ("." in target and ends_with(name, target))
            }
        if not fits:
            raise ModelError(_explain_target(model, target, [*linears, *stacked]))
        found |= fits
    if (
        of_head := [name for name in found if model.get_submodule(name.rpartition(".")[0]) is head]
    ) and head is not None:
        raise ModelError(
            f"adapter.targets: {of_head[0]} is the head, of which losses in chunks and a tied embedding know no adapter: train"
            f" it whole, adapter.train=[{of_head[0].removesuffix('.weight')}], or leave it out"
        )
    if adapter.kind == "dora" or adapter.dropout:
        key = "kind=dora" if adapter.kind == "dora" else "dropout"
        if of_experts := sorted(found & stacked.keys()):
            raise ModelError(
                f"adapter.{key} is not for stacked experts ({of_experts[0]}), as in PEFT: use lora, without dropout"
            )
    if of_others := [path for path in passed_by if f"{path}.weight" in found]:
        raise ModelError(
            f"adapter.targets: the weight of {of_others[0]} is read by the module around it, past the layer, where an adapter has"
            " no effect: leave it out"
        )
    if of_several := [path for path in linears if path in shared and f"{path}.weight" in found]:
        raise ModelError(
            f"adapter.targets: layers share the weight of {of_several[0]}, and beside it each would train an adapter of its own,"
            " which no merged model can hold: leave it out"
        )
    for path in (path for path in linears if f"{path}.weight" in found and not _is_plain(linears[path])):
        kind = type(linears[path]).__name__
        raise ModelError(f"adapter.targets: {path} ({kind}) computes more than a linear layer: leave it out")
    return [name for name, _ in model.named_parameters(remove_duplicate=False) if name in found]


def _is_plain(linear: nn.Module) -> bool:
    """Whether a layer computes what its base class does, also if that is written anew (falcon's)."""
    plain, x = nn.Linear(3, 2), torch.ones(1, 3)
    try:
        return type(linear) in LINEARS or torch.allclose(type(linear).forward(plain, x), plain(x))  # type: ignore[arg-type]
    except (AttributeError, TypeError, RuntimeError):
        return False


def _find_shared(linears: Mapping[str, Any]) -> set[str]:
    """The linear layers whose weight is also that of another one, as zamba's attentions have one weight."""
    counts = Counter(module.weight for module in linears.values())
    return {path for path, module in linears.items() if counts[module.weight] > 1}


def _find_passed_by(model: PreTrainedModel, linears: Mapping[str, nn.Module]) -> set[str]:
    """The linear layers that a forward in training never calls, for the module around them computes with their weight, as Mamba's
    with dt_proj. A small copy of the model is run where the source of a module says that it might."""

    def key(owner: nn.Module, path: str) -> tuple[type, str]:
        parent, _, name = path.rpartition(".")
        return type(owner.get_submodule(parent)), name

    suspects = {path for path in linears if _reads_weight(*key(model, path))}
    if not suspects:
        return set()
    called: set[tuple[type, str]] = set()
    with small_copy(model.config) as small:
        for path, module in find_linears(small).items():
            module.register_forward_hook(partial(_note, called, key(small, path)))
        small.train()(draw_tokens(small, 1, 8))
    return {path for path in suspects if key(model, path) not in called}


def _note(called: set[tuple[type, str]], key: tuple[type, str], *_: Any) -> None:
    called.add(key)


@cache
def _reads_weight(kind: type, name: str) -> bool:
    """Whether a method of a module of this kind reads the values of its layer `name`'s weight."""
    reads = re.compile(rf"\.{name}\.weight\b(?!\.(dtype|device|shape))")
    methods = [each for key, each in vars(kind).items() if inspect.isfunction(each) and "init" not in key]
    return any(reads.search(inspect.getsource(inspect.unwrap(each))) for each in methods)


def _explain_target(model: PreTrainedModel, target: str, places: Iterable[str]) -> str:
    others = [
        path
        for path, module in model.named_modules()
        if ends_with(path, target) and any(True for _ in module.parameters())
    ]
    if others:
        return (
            f"adapter.targets: {others[0]} ({type(model.get_submodule(others[0])).__name__}) is no linear layer, and no stack of"
            f" experts: train it whole, adapter.train=[{target}], or leave it out"
        )
    names = sorted(
        {path.rpartition(".")[2] if "experts" not in path else ".".join(path.split(".")[-2:]) for path in places}
    )
    near = difflib.get_close_matches(target, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    known = f"Those of {model.config.model_type}: {', '.join(names)}"
    return f"adapter.targets: no module's name ends with {target}{hint or '.'} {known}"
