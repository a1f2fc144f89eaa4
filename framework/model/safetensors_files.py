"""Weights on disk: the safetensors files of a folder, read lazily, and written tensor by tensor at positions that are planned
first; and which of their keys make which entries of a model's state dict.

On disk a Mixtral expert is three matrices; in the model all experts of a layer are two stacked tensors. Hugging Face describes
such differences as renamings and converters; here they become `Assembly` values. No other file uses transformers' private loading
code; tested with 5.17 and 5.23.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
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

from framework.errors import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG, ADAPTER = "config.json", "adapter_config.json"
# Pieces of each file by which weights are known again.
SAMPLES, SAMPLE_BYTES = 64, 1 << 16

# safetensors' names of the dtypes that parameters and buffers have.
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class LazyFiles:
    """The tensors of a folder by key, in files that `stack` closes: headers are read at once, a tensor's bytes when asked for.

    Of a key that several files hold, the last file's tensor counts, as in `from_pretrained`.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._opened = {file: stack.enter_context(_open(folder, file)) for file in find_files(folder)}
        self._file_of = {key: file for file, opened in self._opened.items() for key in list(opened.keys())}

    def keys(self) -> list[str]:
        return list(self._file_of)

    def slice(self, key: str) -> Any:
        """safetensors' lazy tensor: `get_shape()` reads no weights, an index reads the bytes that it covers."""
        file = self._file_of[key]
        try:
            return self._opened[file].get_slice(key)
        except SafetensorError as error:
            raise ModelError(
                f"{self.folder / file} has no readable {key} ({error}): download or copy it again"
            ) from error

    def read(self, key: str, where: Any = ...) -> Tensor:
        """The elements `where` of a tensor. Raises ModelError if one of them is NaN or infinite."""
        tensor: Tensor = self.slice(key)[where]
        if not _is_finite(tensor):
            raise ModelError(
                f"{self.folder / self._file_of[key]} has NaN or infinite values in {key}: no training mends them, and every loss"
                " would be NaN. Download the file again, or take weights from before they diverged"
            )
        return tensor


def fingerprint_files(folder: Path) -> str:
    """A fingerprint of a folder's weights: the headers of its files, with names, shapes and places of all tensors, and SAMPLES
    pieces of each file, evenly spread. So a model of any size takes a second."""
    found = hashlib.blake2b(digest_size=16)
    for name in find_files(folder):
        path = folder / name
        size = path.stat().st_size
        with path.open("rb") as file:
            header = file.read(8)
            found.update(header + file.read(int.from_bytes(header, "little")))
            for index in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                found.update(file.read(SAMPLE_BYTES))
    return found.hexdigest()


def find_files(folder: Path) -> list[str]:
    """Names of the files that hold a folder's weights, in the order in which `from_pretrained` reads them.

    Raises ModelError where there are none, or where the config or an index names a file outside the folder.
    """
    if (folder / ADAPTER).is_file():
        raise ModelError(
            f"{folder} has an adapter ({ADAPTER}) beside the weights, and from_pretrained applies it where peft is installed:"
            " merge it with peft's merge_and_unload and save that, or move the adapter's files elsewhere"
        )
    config = _read_json(folder / CONFIG, "config") if (folder / CONFIG).is_file() else {}
    if named := str(config.get("transformers_weights") or ""):
        _refuse_outside(folder, named, CONFIG)
        return _named_by_index(folder, named) if named.endswith(".index.json") else [named]
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).is_file():
        return _named_by_index(folder, INDEX)
    held = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".safetensors"})
    raise ModelError(
        f"{folder} has neither {SINGLE} nor {INDEX}, but {', '.join(held) or 'no weights'}: "
        "load it with transformers' from_pretrained, write it with save_pretrained, and give that folder"
    )


def _named_by_index(folder: Path, index: str) -> list[str]:
    values = _read_json(folder / index, "index of safetensors files").get("weight_map")
    if not isinstance(values, dict) or not values:
        raise ModelError(f"{folder / index} is no index of safetensors files, it has no weight_map: download it again")
    files = sorted(set(map(str, values.values())))
    for file in files:
        _refuse_outside(folder, file, index)
    absent = [file for file in files if not (folder / file).is_file()]
    if absent:
        raise ModelError(
            f"{', '.join(absent)} is missing or damaged, and {folder / index} names it: download or copy the folder again, or"
            " remove the index if it is of other files"
        )
    return files


def _refuse_outside(folder: Path, file: str, named_by: str) -> None:
    """Raise ModelError unless `file` lies in the folder, or in the hub cache's blobs, to which its snapshots link."""
    if not file or "\0" in file:
        raise ModelError(f"{folder / named_by} names {file!r}, which is no file's name: download it again")
    root, target = Path(os.path.realpath(folder)), Path(os.path.realpath(folder / file))
    roots = [root, root.parents[1] / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(target.is_relative_to(each) for each in roots):
        raise ModelError(
            f"{folder / named_by} names {file!r}, which is {target}, outside of the folder: weights are read from the folder"
            " alone. Copy the file into it and name it there, or give the folder that holds all files"
        )


def _read_json(path: Path, kind: str) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} is no {kind} ({error!r}): download it again") from error


def _open(folder: Path, file: str) -> Any:
    try:
        return safe_open(folder / file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{folder / file} is missing or damaged ({error}): download or copy it again") from error


def _is_finite(tensor: Tensor) -> bool:
    """One pass over the tensor without a copy: NaN and infinities stay in the extremes."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    wide = tensor if tensor.itemsize > 1 else tensor.float()  # torch compares no fp8
    return all(extreme.isfinite() for extreme in torch.aminmax(wide))


@dataclass(frozen=True)
class FilePosition:
    """The position of one tensor's data: `offset` bytes into the file `path`."""

    path: Path
    offset: int

    def write(self, tensor: Tensor) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def find_positions(folder: Path) -> dict[str, tuple[FilePosition, torch.dtype | None]]:
    """Position and dtype of each tensor of a folder, from the headers of its files. None: a dtype that is not of `DTYPES`."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    found: dict[str, tuple[FilePosition, torch.dtype | None]] = {}
    for path in (folder / name for name in find_files(folder)):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        found |= {
            key: (FilePosition(path, 8 + length + entry["data_offsets"][0]), dtypes.get(entry["dtype"]))
            for key, entry in header.items()
            if key != "__metadata__"
        }
    return found


def plan_files(folder: Path, tensors: Mapping[str, Tensor], max_file_bytes: int) -> dict[str, FilePosition]:
    """Create the files that will hold `tensors` (meta), in full size but without content, and return each tensor's position.

    tensors: by name, in the shapes and dtypes of the files. More than one file comes with an index.
    Raises ModelError if the disk has too little room.
    """
    needed, free = sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise ModelError(
            f"{folder.parent} has {free:,} bytes free, the weights need {needed:,}: make room or go elsewhere"
        )
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: tensor.nbytes,
        get_storage_id=lambda tensor: None,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    places: dict[str, FilePosition] = {}
    for file, keys in split.filename_to_tensors.items():
        places |= _create_file(folder / file, {key: tensors[key] for key in keys})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return places


def _create_file(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, FilePosition]:
    """A safetensors file without its content: the header's length as uint64, the header in JSON, the data without gaps.

    safetensors itself writes a file only from tensors that are all in memory. Wide dtypes come first and the header is
    padded to 8 bytes, so that every tensor is aligned.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in sorted(tensors.items(), key=lambda item: -item[1].itemsize):
        start, end = end, end + tensor.nbytes
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    first = 8 + len(text)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(first + end)
    return {key: FilePosition(path, first + header[key]["data_offsets"][0]) for key in tensors}


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
