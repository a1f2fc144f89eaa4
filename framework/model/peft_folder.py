"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors.

ours                                 PEFT's, behind `base_model.model.`
X.lora_A, X.lora_B                   X.lora_A.weight, X.lora_B.weight
X.lora_magnitude_vector              the same
X.down_proj_lora_A [E, r, K]         X.lora_A.weight [E r, K]; X.base_layer.lora_A.weight where another weight of X follows
X.down_proj_lora_B [E, N, r]         X.lora_B.weight [N, r E], or below base_layer
a parameter that is trained whole    the same name
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor
from transformers import PreTrainedModel

from framework.errors import ModelError
from framework.model.adapters import LINEARS, MAGNITUDE, A, B, find_adapted, find_trained, is_adapter, weight_of
from framework.model.safetensors_files import ADAPTER
from framework.recipe.schema import Adapter, Model

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
    **dict.fromkeys(("arrow_config", "kasa_config", "velora_config"), (None,)),
}


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
        found[name] = tensor = _from_peft(name, tensors[theirs], shape)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{key}: {theirs} has the shape {list(tensors[theirs].shape)}, for {name} of {list(shape)}"
            )
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
