"""Safetensors files of a folder: read lazily, and written tensor by tensor at positions that are planned first."""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from torch import Tensor

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


def find_positions(folder: Path) -> dict[str, tuple[FilePosition, torch.dtype]]:
    """Position and dtype of each tensor of a folder, from the headers of its files."""
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    found: dict[str, tuple[FilePosition, torch.dtype]] = {}
    for path in (folder / name for name in find_files(folder)):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        found |= {
            key: (FilePosition(path, 8 + length + entry["data_offsets"][0]), dtypes.get(entry["dtype"], torch.uint8))
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
