"""Hugging Face configs and unmodified models on the meta device, from a recipe: structure without memory."""

import difflib
import inspect
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from framework.errors import ModelError
from framework.model.experts import find_experts
from framework.model.hub import CONFIG, fetch_config
from framework.recipe.keys import TOKEN_IDS
from framework.recipe.schema import STOCK_ATTENTION, Model

# Errors of Hugging Face for config values that it does not take, or that do not fit one another (a list of layers' kinds).
REFUSALS = (ValueError, TypeError, LookupError, StrictDataclassError, RecursionError)
# Alignment of rows that PyTorch's grouped matmuls require.
GROUPED_ROW_BYTES = 16
# Errors of models, built or run, that need more than they get: other inputs, or a value that the config leaves open.
FORWARD_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ImportError)
# Arguments of the model that are False wherever it takes them. With a cache, packed positions would be ignored and documents
# would see one another; a load-balancing loss of the model's own would be of the layers of one stage.
DISABLED = ("use_cache", "output_router_logits")


def load_config(model: Model, locate: Callable[[str, str | None], Path] = fetch_config) -> PretrainedConfig:
    """The Hugging Face config of the recipe: the pretrained one where `model.weights` is set, that of `model.config_file`, or the
    family's, with `model.config` on top.

    locate: the folder of hub weights at a revision; ranks pass `find_folder`, which never asks the hub. No weights are fetched.
    Raises ModelError for an unknown family and for a key that the family's config does not have, with the nearest names.
    """
    if model.weights is not None:
        return for_training(_load_pretrained_config(model, locate(model.weights, model.revision)))
    if model.config_file is not None:
        config = load_config_file(Path(model.config_file).expanduser())
        _refuse_unknown_keys(config, model)
        try:
            config.update(model.config)
        except REFUSALS as error:
            raise ModelError(f"model.config is refused by {config.model_type}: {_reason(error)}") from error
        return for_training(config)
    if model.family not in CONFIG_MAPPING:
        near = difflib.get_close_matches(model.family, list(CONFIG_MAPPING), n=3)
        raise ModelError(
            f"model.family={model.family} is no Hugging Face model type; nearest: {', '.join(near) or 'none'}"
        )
    known = CONFIG_MAPPING[model.family]()
    _refuse_unknown_keys(known, model)
    # A family's default ids are those of another tokenizer; the launcher adds this one's to model.config.
    unset = {name: None for name in TOKEN_IDS if name in known.to_dict()}
    try:
        config = AutoConfig.for_model(model.family, **(unset | _without_nulls(model.config)))
    except REFUSALS as error:
        raise ModelError(f"model.config is refused by {model.family}: {_reason(error)}") from error
    return for_training(config)


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    """Values of a config whose rope has no null in it, by which a recipe takes back what another one has set: transformers would
    warn of it as of a key that it does not know, and export it."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict):
        return values
    return values | {"rope_parameters": {name: value for name, value in rope.items() if value is not None}}


def _load_pretrained_config(model: Model, folder: Path) -> PretrainedConfig:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"model.weights={model.weights}: {folder} has no config.json, so it is no model that Hugging Face saved. Give the"
            " folder that holds config.json and the safetensors files"
        )
    try:
        whole = read_config(folder / "config.json")
        _refuse_other_family(whole, model)
        config = _choose_trained(whole)
        _refuse_unknown_keys(config, model)
        config.update(model.config)
    except (OSError, *REFUSALS) as error:
        raise ModelError(f"model.weights={model.weights}: its config.json cannot be used: {_reason(error)}") from error
    return config


def read_config(file: Path) -> PretrainedConfig:
    """The config in a config.json, of a class of the installed transformers. No code of the folder is run.

    Raises ModelError where only code of the folder could read it, and transformers' own errors for any other file.
    """
    values = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(values, dict) and values.get("auto_map") and values.get("model_type") not in CONFIG_MAPPING:
        raise ModelError(
            f"{file.parent} is of the model type {values.get('model_type')}, which only code of its own describes (auto_map in"
            " its config.json). Meshwright runs no code that comes with weights: take weights of a family that the installed"
            " transformers has, or a transformers version that has this one"
        )
    return _without_code(AutoConfig.from_pretrained(file, trust_remote_code=False))


def is_part(model: PreTrainedModel, folder: Path) -> bool:
    """Whether the folder's config.json is of a larger model, vision-language as a rule, of which this one is the text model."""
    if not (folder / CONFIG).is_file():
        return False
    whole = read_config(folder / CONFIG)
    return type(whole.get_text_config()) is type(model.config) is not type(whole)


def _choose_trained(whole: PretrainedConfig) -> PretrainedConfig:
    """The config itself, or that of its text model where transformers has a causal model for that alone."""
    text = whole.get_text_config()
    if type(whole) in MODEL_FOR_CAUSAL_LM_MAPPING or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return whole
    text.tie_word_embeddings = whole.tie_word_embeddings  # the whole model's counts
    return text


def load_config_file(path: Path) -> PretrainedConfig:
    """The config in a `config.json`, or in that of a folder. Raises ModelError for any other file."""
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ModelError(f"{path}: there is no such config.json, which transformers writes beside a model")
    try:
        return for_training(read_config(file))
    except (OSError, *REFUSALS) as error:
        raise ModelError(f"{path} is no readable Hugging Face config with a model_type: {_reason(error)}") from error


def inline_config_file(model: Model) -> Model:
    """The model with the contents of its config_file as family and config, so that a run does not change with the file.

    Values that the family neither declares nor reads are left out.
    """
    if model.config_file is None:
        return model
    config = load_config(model)
    known = CONFIG_MAPPING[config.model_type]()
    values = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name in set(known.to_dict()) | _read_by_model(known)
    }
    for name in ("model_type", "transformers_version", "architectures", "dtype", "_name_or_path", "use_cache"):
        values.pop(name, None)
    return replace(model, family=config.model_type, config=values | model.config, config_file=None)


def _without_code(config: PretrainedConfig) -> PretrainedConfig:
    """The config without the code that its file names: classes in the folder, and kernels, which transformers would fetch from
    the hub when the model is built. The recipe alone chooses the kernels of attention and experts."""
    config._attn_implementation = config._experts_implementation = None
    for each in (config, *(getattr(config, name, None) for name in config.sub_configs)):
        if each is not None:
            vars(each).pop("auto_map", None)
    return config


def build_meta(
    config: PretrainedConfig, attention: str = "auto", dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """The causal language model of `config` on meta: every parameter has a shape, none has memory.

    `attention`: `model.attention`; auto: the implementation that the model prefers. dtype: that of parameters,
    and of buffers that state none (gemma's scale of its embedding).
    """
    if attention == "sdpa" and _has_soft_caps(config):
        raise ModelError(
            f"model.attention=sdpa would drop the soft caps of {config.model_type}'s scores: use model.attention=auto or eager"
        )
    chosen = {} if attention == "auto" else {"attn_implementation": STOCK_ATTENTION.get(attention, attention)}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, **chosen)
    except (ImportError, AssertionError, AttributeError, *REFUSALS) as error:
        raise ModelError(
            f"the {config.model_type} model cannot be built from model.config: {_reason(error)}"
        ) from error


def kept_in_fp32(model: PreTrainedModel, compute: torch.dtype) -> set[str]:
    """Names of the parameters that the family keeps in fp32 beside a lower compute dtype (routers' biases, some norms)."""
    patterns = [pattern for pattern, dtype in model._get_dtype_plan(compute).items() if dtype == torch.float32]
    return {
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if any(f".{pattern.strip('.')}." in f".{name}." for pattern in patterns)
    }


def accepted_arguments(model: PreTrainedModel) -> set[str]:
    """Names that the model's forward declares."""
    return set(inspect.signature(model.forward).parameters)


def choose_experts(model: PreTrainedModel, implementation: str, compute: torch.dtype) -> None:
    """Select the implementation of stacked experts' matmuls. `auto` keeps the family's, except in fp64, which has no grouped
    matmul."""
    if not any(form.has_kernels for _, _, form in find_experts(model)):
        return
    if implementation == "auto" and compute == torch.float64:
        implementation = "eager"
    if implementation != "auto":
        model.set_experts_implementation(implementation)


def refuse_unaligned_experts(model: PreTrainedModel, compute: torch.dtype) -> None:
    """Raises ModelError where the family multiplies its stacked experts by grouped matmuls, which cannot take their widths: each
    row is of whole 16 bytes."""
    multiple = GROUPED_ROW_BYTES // compute.itemsize
    for name, experts, form in find_experts(model):
        implementation = getattr(getattr(experts, "config", None), "_experts_implementation", None)
        if not form.has_kernels or implementation != "grouped_mm":
            continue
        sizes = {size for weight in (form.first, form.last) for size in experts.get_parameter(weight).shape[1:]}
        uneven = sorted(size for size in sizes if size % multiple)
        if uneven:
            raise ModelError(
                f"{name} has experts of {' and '.join(map(str, uneven))} features on a rank, and grouped matmuls in"
                f" {str(compute).removeprefix('torch.')} want multiples of {multiple}: use model.experts=eager, or other widths"
            )


def for_training(config: PretrainedConfig) -> PretrainedConfig:
    """The config without key-value cache, with which a model ignores packed positions silently (docs/models.md), and with an
    attention that knows soft caps where it has them."""
    for layer in layer_configs(config.get_text_config()):
        _refuse_uneven_heads(layer)
    config.use_cache = False
    config.get_text_config().use_cache = False
    if _has_soft_caps(config):
        config._attn_implementation = (
            "eager"  # transformers 5.17 chooses sdpa for gemma 2, which drops caps without a word
        )
    return config


def _has_soft_caps(config: PretrainedConfig) -> bool:
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


def layer_configs(config: PretrainedConfig) -> Sequence[PretrainedConfig]:
    """The config of each layer where layers have sizes of their own, which the common config then lacks; else the one config."""
    if not getattr(config, "is_heterogeneous", False):
        return [config]
    return [config.per_layer_config[index] for index in range(config.num_hidden_layers)]


def _refuse_uneven_heads(config: PretrainedConfig) -> None:
    # Such a model is built without a word, and fails in the first attention.
    heads, kv = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(kv, int) and (kv < 1 or heads % kv):
        legal = " or ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ModelError(
            f"model.config.num_key_value_heads={kv} does not divide model.config.num_attention_heads={heads}, and each key-value"
            f" head serves equally many heads: model.config.num_key_value_heads={legal}"
        )


def _reason(error: Exception) -> str:
    """Hugging Face's message, without the kind of the error and the name of its validator in the line above."""
    if isinstance(error, KeyError):
        return f"{error} is not known"
    if isinstance(error, StrictDataclassError):
        return re.sub(r"^\w+Error: ", "", str(error).strip().splitlines()[-1].strip())
    return str(error)


def _refuse_other_family(config: PretrainedConfig, model: Model) -> None:
    """Raise ModelError where the recipe states another family than that of the weights."""
    if model.family not in (Model().family, config.model_type):
        raise ModelError(
            f"model.family={model.family} contradicts model.weights={model.weights}, whose config.json says"
            f" {config.model_type}: leave the family out, and the recipe of a model (model=...; '~model' takes back that of an"
            " experiment), or give other weights"
        )


def _refuse_unknown_keys(known: PretrainedConfig, model: Model) -> None:
    names = set(known.to_dict()) | set(getattr(known, "attribute_map", {})) | set(vars(known)) | _read_by_model(known)
    unknown = [name for name in model.config if name not in names or name.startswith("_")]
    if unknown:
        lines = [
            f"model.config.{name} is not a value of {type(known).__name__}; nearest: "
            f"{', '.join(difflib.get_close_matches(name, list(names), n=3)) or 'none'}"
            for name in unknown
        ]
        raise ModelError("\n".join(lines))


def _read_by_model(config: PretrainedConfig) -> set[str]:
    """Names that the family's model reads from its config although the config does not declare them (qwen3_moe's head_dim)."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    source = inspect.getsource(sys.modules[model.__module__]) if model is not None else ""
    return set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', source))


# Families whose layers call torch.seed(), which reads the clock, in each forward: reversible layers replay their dropout by it.
FRESH_SEEDS = ("reformer",)


def refuse_dropped_layers(config: PretrainedConfig, pp: int, tp: int) -> None:
    """Raises ModelError where ranks would drop other layers than one process: the model draws in front of a layer, in a stream
    that depends on where it is cut, and a stage whose first layer is dropped would not read what it has received."""
    degrees = {"pp": pp, "tp": tp}
    found = {key: value for key, value in config.to_dict().items() if "layerdrop" in key and value}
    for key, value in found.items():
        if max(degrees.values()) > 1:
            split = " and ".join(f"parallel.{axis}={degree}" for axis, degree in degrees.items() if degree > 1)
            raise ModelError(
                f"model.config.{key}={value} leaves out whole layers at random, which {split} cannot do alike on all ranks:"
                f" set model.config.{key}=0.0, or use data parallelism and ZeRO"
            )


def refuse_fresh_seeds(config: PretrainedConfig) -> None:
    """Raises ModelError for a family that seeds torch's generator anew, in each forward of its training; and for one that has no
    number of decoder layers, of which units, stages and a small copy are made."""
    text = config.get_text_config()
    if all(getattr(text, name, None) is None for name in ("num_hidden_layers", "layer_types")):
        raise ModelError(
            f"model.family={config.model_type}: its config has no num_hidden_layers, and so no one list of decoder layers that"
            " could be sharded, cut or counted (blt is four models within one another): choose another family"
        )
    if config.model_type in FRESH_SEEDS:
        raise ModelError(
            f"model.family={config.model_type} takes a new random seed in every forward, so that no run of it could be"
            " repeated, resumed or verified: choose another family"
        )
