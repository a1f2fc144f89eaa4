"""The only file that uses transformers' private loading code; tested with 5.17 and 5.23.

On disk a Mixtral expert is three matrices; in the model all experts of a layer are two stacked tensors. Hugging Face
describes such differences as renamings and converters; here they become `Assembly` values: which keys of a folder make
which entries of a model's state dict.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)


@dataclass(frozen=True)
class Assembly:
    """Keys of a folder that together make one entry of the state dict, or several where one stored tensor is split.

    `sources`: (pattern of the converter, key in the folder) in the order in which they are joined.
    `converter`: transformers' recipe for joining; None when the only source is the entry itself.
    """

    targets: tuple[str, ...]
    sources: tuple[tuple[str, str], ...]
    converter: WeightConverter | None = None

    @property
    def stacks_rows(self) -> bool:
        """Whether row i of the only target is made of the i-th source of each pattern alone (experts stacked along dim 0)."""
        if self.converter is None or len(self.targets) != 1:
            return False
        first, *others = self.converter.operations
        stacked = isinstance(first, MergeModulelist) and first.dim == 0
        return stacked and all(isinstance(other, Concatenate) and other.dim > 0 for other in others)

    def rows(self, start: int, stop: int) -> "Assembly":
        """The assembly of rows [start, stop) of a target that `stacks_rows`."""
        by_pattern: dict[str, list[tuple[str, str]]] = {}
        for pattern, key in self.sources:
            by_pattern.setdefault(pattern, []).append((pattern, key))
        kept = [source for sources in by_pattern.values() for source in sources[start:stop]]
        return Assembly(self.targets, tuple(kept), self.converter)


def match_keys(model: PreTrainedModel, keys: Iterable[str], tower: str = "") -> tuple[dict[str, Assembly], list[str]]:
    """The assembly of each entry of the model's state dict from keys of a folder, by entry; and the keys that no entry uses.

    A prefix that only one side has ("model.") is added or dropped. Keys that the family declares superfluous are not
    reported: old rotary tables, the layers of a multi-token prediction head. tower: the part of a name that only keys of this
    model have, in a folder of a larger model (`find_tower`); keys without it that no entry uses are not reported.
    """
    entries = model.state_dict()
    transforms: list[Any] = get_model_conversion_mapping(model)
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    renamings = [transform for transform in transforms if not isinstance(transform, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    sources: dict[str, list[tuple[str, str]]] = {}
    unwanted: set[str] = set()
    for key in sorted(keys, key=dot_natural_key):
        plain = _without_tower(key, tower)
        name, pattern = rename_source_key(plain, renamings, converters, model.base_model_prefix, entries)
        if name not in entries and key in entries:  # a renaming for old checkpoints caught a key of a new one
            name, pattern = key, None
        if name in entries:
            sources.setdefault(name, []).append((pattern or "", key))
        elif not tower or plain != key:
            unwanted.add(key)

    assemblies: dict[str, Assembly] = {}
    for name, made_of in sources.items():
        converter = by_pattern.get(made_of[0][0])
        targets = (name,) if converter is None else _targets(name, converter)
        assemblies |= dict.fromkeys(targets, Assembly(targets, tuple(made_of), converter))
    return assemblies, _without_superfluous(model, unwanted)


def find_tower(model: PreTrainedModel, keys: Iterable[str]) -> str:
    """The part of a name, `language_model`, without which a key of a larger model's folder names this text model's embedding of
    tokens; empty where no key does."""
    embedding = model.get_input_embeddings().weight
    names = [name for name, each in model.named_parameters(remove_duplicate=False) if each is embedding]
    parts = ((key, part) for key in keys for part in key.split(".")[:2])
    return next((part for key, part in parts if key not in names and _without_tower(key, part) in names), "")


def _without_tower(key: str, tower: str) -> str:
    """A name without its first part `tower`: model.language_model.norm, language_model.model.norm -> model.norm."""
    return ".".join(part for index, part in enumerate(key.split(".")) if index > 1 or part != tower)


def assemble(model: PreTrainedModel, assembly: Assembly, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """The targets of `assembly` by name, made from the tensors that `read(key)` returns; meta tensors give the shapes alone.

    Raises what the operation raises when the sources do not fit together (RuntimeError, ValueError).
    """
    if assembly.converter is None:
        return {assembly.targets[0]: read(assembly.sources[0][1])}
    converter: Any = deepcopy(assembly.converter)
    for pattern, key in assembly.sources:
        converter.add_tensor(assembly.targets[0], key, pattern, read(key))
    made = converter.convert(assembly.targets[0], model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def to_checkpoint(model: PreTrainedModel, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Entries of the state dict as `save_pretrained` names and splits them.

    Shapes and dtypes are those of the entries. A part of the state dict may be given if it holds all entries that one conversion
    joins, as a layer does.
    """
    return revert_weight_conversion(model, tensors)


def kept_dtype(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], torch.dtype]:
    """The dtype of each entry in a model of `dtype`: fp32 where the family insists on it (a router's bias, norms)."""
    plan = model._get_dtype_plan(dtype)
    if not plan:
        return lambda name: dtype
    pattern, _, _ = build_glob_alternation(list(plan))
    return lambda name: torch.float32 if pattern.search(name) else dtype


def dropped_on_save(model: PreTrainedModel) -> set[str]:
    """Entries that a checkpoint does not hold: the further names of tied weights, and what the family leaves out."""
    return set(model.all_tied_weights_keys) | set(model._keys_to_ignore_on_save or ())


def _targets(first: str, converter: WeightConverter) -> tuple[str, ...]:
    """Names of all entries that a conversion makes, given the first one's."""
    patterns = converter.target_patterns
    return tuple(first.replace(patterns[0], pattern) for pattern in patterns)


def _without_superfluous(model: PreTrainedModel, unwanted: set[str]) -> list[str]:
    report: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=unwanted)
    model._adjust_missing_and_unexpected_keys(report)
    return sorted(report.unexpected_keys, key=dot_natural_key)
