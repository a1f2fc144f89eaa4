"""Adapters by name: the weights of a model that get one, chosen by the targets of a recipe, and folders in PEFT's format.

A folder has adapter_config.json and adapter_model.safetensors.

ours                                 PEFT's, behind `base_model.model.`
X.lora_A, X.lora_B                   X.lora_A.weight, X.lora_B.weight
X.lora_magnitude_vector              the same
X.down_proj_lora_A [E, r, K]         X.lora_A.weight [E r, K]; X.base_layer.lora_A.weight where another weight of X follows
X.down_proj_lora_B [E, N, r]         X.lora_B.weight [N, r E], or below base_layer
a parameter that is trained whole    the same name
"""

import difflib
import inspect
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn
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
    find_adapted,
    find_linears,
    find_trained,
    holds_transposed,
    is_adapter,
    name_beside,
    weight_of,
)
from framework.model.experts import find_experts
from framework.model.probe import draw_tokens, small_copy
from framework.model.safetensors_files import ADAPTER
from framework.recipe.schema import Adapter, Model


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


WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Values of a config that change what an adapter computes, and those with which it is one of ours. Others are of training alone.
NEUTRAL = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "lora_bias": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None, False),
    **dict.fromkeys(("arrow_config", "kasa_config", "monteclora_config", "velora_config"), (None,)),
}
# Initial values of A and B, in lower case, that leave the base as it is. The others (pissa, olora, corda, loftq, lora_ga) take
# s B A out of it, in training and again when PEFT loads the adapter: it is one of another base.
KEEPS_BASE = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")


def read_adapter(folder: Path, model: PreTrainedModel, adapter: Adapter) -> dict[str, Tensor]:
    """The tensors of an adapter, whole by the names in our model. model: on meta, with the recipe's adapters. Raises ModelError
    where the folder has other adapters than the recipe says."""
    key = f"adapter.weights={adapter.weights}"
    try:
        config = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(
            f"{key}: no adapter as PEFT's save_pretrained writes it, {ADAPTER} and {WEIGHTS}: {error}"
        ) from error
    for name, values in NEUTRAL.items():
        if config.get(name, values[0]) not in values:
            raise ModelError(
                f"{key}: its {name}={config[name]!r} is of a form that cannot be trained here: use {values[0]!r}"
            )
    if str(initial := config.get("init_lora_weights", True)).lower() not in KEEPS_BASE:
        raise ModelError(
            f"{key}: its init_lora_weights={initial!r} has changed the base that it was trained beside: convert it by PEFT's"
            " save_pretrained(..., path_initial_model_for_weight_conversion=FOLDER of the untrained adapter); or, if"
            f" model.weights has that changed base itself, write true for it in {ADAPTER}"
        )
    stated = {"r": ("rank", 8), "lora_alpha": ("alpha", 8), "use_rslora": ("rank_stabilized", False)}
    pairs = {ours: (config.get(theirs, default), getattr(adapter, ours)) for theirs, (ours, default) in stated.items()}
    pairs["kind"] = ("dora" if config.get("use_dora") else "lora", adapter.kind)
    if wrong := {name: found for name, (found, own) in pairs.items() if found != own}:
        fix = " ".join(f"adapter.{name}={found}" for name, found in wrong.items())
        raise ModelError(f"{key}: that adapter is another than the recipe's; set {fix}")
    names = _names(model, adapter)
    missing, superfluous = names.values() - tensors.keys(), tensors.keys() - names.values() - _tied(model, names).keys()
    if missing or superfluous:
        shown = [
            *(f"missing: {each}" for each in sorted(missing)[:3]),
            *(f"not of this model: {each}" for each in sorted(superfluous)[:3]),
        ]
        raise ModelError(
            f"{key}: its tensors are not those of adapter.targets and adapter.train ({'; '.join(shown)}): its config has"
            f" target_modules={config.get('target_modules')}, target_parameters={config.get('target_parameters')},"
            f" modules_to_save={config.get('modules_to_save')}"
        )
    found = {}
    for name, theirs in names.items():
        shape = tuple(model.get_parameter(name).shape)
        if tensors[theirs].shape != _to_peft(name, model.get_parameter(name)).shape:
            raise ModelError(
                f"{key}: {theirs} has the shape {list(tensors[theirs].shape)}, for {name} of {list(shape)}"
            )
        found[name] = _from_peft(name, tensors[theirs], shape)
    return found


def write_adapter(
    folder: Path,
    model: PreTrainedModel,
    adapter: Adapter,
    base: Model,
    tensors: Mapping[str, Tensor],
) -> None:
    """Write an adapter to an existing folder. model: on meta, with the recipe's adapters; base: the recipe's model;
    tensors: whole, of all that is trained, by our names."""
    names = _names(model, adapter)
    tensors = {theirs: _to_peft(name, tensors[name]) for name, theirs in names.items()}
    # PEFT asks for a tied weight under each of its names. Copies: a file of safetensors shares no memory.
    tensors |= {theirs: tensors[names[name]].clone() for theirs, name in _tied(model, names).items()}
    (folder / WEIGHTS).write_bytes(save(tensors, {"format": "pt"}))
    config = {
        "base_model_name_or_path": _absolute(base.weights),
        "bias": "none",
        "fan_in_fan_out": _is_transposed(model, names),
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "modules_to_save": sorted(adapter.train) or None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "revision": base.revision,
        "target_modules": _target_modules(model, names),
        "target_parameters": sorted(each for each in find_adapted(names) if not each.endswith(".weight")) or None,
        "task_type": "CAUSAL_LM",
        "use_dora": adapter.kind == "dora",
        "use_rslora": adapter.rank_stabilized,
    }
    (folder / ADAPTER).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _names(model: PreTrainedModel, adapter: Adapter) -> dict[str, str]:
    """PEFT's name of each trained parameter, by ours."""
    all_names = [name for name, _ in model.named_parameters()]
    adapted = find_adapted(all_names)
    trained = find_trained(model, all_names, adapter)
    return {name: _name(name, adapted) if is_adapter(name) else PREFIX + name for name in all_names if name in trained}


def _absolute(weights: str | None) -> str | None:
    """A hub name, or the absolute path of a folder: who loads the adapter may be elsewhere."""
    return str(Path(weights).absolute()) if weights is not None and Path(weights).is_dir() else weights


def _tied(model: PreTrainedModel, names: Mapping[str, str]) -> dict[str, str]:
    """Our name of each trained weight that is tied, by PEFT's further names of it. names: as of `_names`."""
    first = {id(each): name for name, each in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {
        PREFIX + name: first[id(each)] for name, each in every if first[id(each)] in names and first[id(each)] != name
    }


def _name(name: str, adapted: Iterable[str]) -> str:
    weight = weight_of(name)
    if weight.endswith(".weight"):
        return PREFIX + name + ("" if name.endswith(MAGNITUDE) else ".weight")
    # A stack's adapters are wrapped around one another in the order of its weights: the last is the outermost.
    module = weight.rpartition(".")[0]
    of_module = [each for each in adapted if each.rpartition(".")[0] == module]
    depth = len(of_module) - 1 - of_module.index(weight)
    return f"{PREFIX}{module}{'.base_layer' * depth}.{A if name.endswith(A) else B}.weight"


def _is_stacked(name: str) -> bool:
    return is_adapter(name) and not weight_of(name).endswith(".weight")


def _from_peft(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if not _is_stacked(name):
        return tensor
    if name.endswith(A):
        return tensor.unflatten(0, (shape[0], -1))
    return tensor.unflatten(1, (-1, shape[0])).permute(2, 0, 1)


def _to_peft(name: str, tensor: Tensor) -> Tensor:
    if _is_stacked(name):
        tensor = tensor.flatten(0, 1) if name.endswith(A) else tensor.permute(1, 2, 0).flatten(1)
    return tensor.contiguous()


def _is_transposed(model: PreTrainedModel, names: Iterable[str]) -> bool:
    linears = [
        model.get_submodule(each.removesuffix(".weight")) for each in find_adapted(names) if each.endswith(".weight")
    ]
    return any(type(each) is LINEARS[1] for each in linears)


def _target_modules(model: PreTrainedModel, names: Iterable[str]) -> list[str]:
    """The last parts of the names of adapted modules; whole names where other linear layers have the same last part."""
    adapted = {each.removesuffix(".weight") for each in find_adapted(names) if each.endswith(".weight")}
    leaves = {path.rpartition(".")[2] for path in adapted}
    modules: dict[str, Any] = dict(model.named_modules())
    alike = {path for path, each in modules.items() if isinstance(each, LINEARS) and path.rpartition(".")[2] in leaves}
    return sorted(leaves if alike == adapted else adapted)
