"""Safetensors files of a folder: read lazily, and written tensor by tensor at positions that are planned first."""

import json
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
    """The tensors of a folder by key; a file is opened when its first key is read, and closed by `stack`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self._opened: dict[str, Any] = {}
        self._file_of = self._find_keys()

    def keys(self) -> list[str]:
        return list(self._file_of)

    def slice(self, key: str) -> Any:
        """safetensors' lazy tensor: `get_shape()` reads no weights, an index reads the bytes that it covers."""
        file = self._file_of[key]
        try:
            return self._open(file).get_slice(key)
        except SafetensorError as error:
            raise ModelError(
                f"{self.folder / file} has no readable {key} ({error}): download or copy it again"
            ) from error

    def _find_keys(self) -> dict[str, str]:
        index = self.folder / INDEX
        if index.is_file():
            try:
                return dict(json.loads(index.read_text())["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ModelError(f"{index} is no index of safetensors files ({error!r}): download it again") from error
        if (self.folder / SINGLE).is_file():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        held = sorted(p.name for p in self.folder.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".safetensors"})
        raise ModelError(
            f"{self.folder} has neither {SINGLE} nor {INDEX}, but {', '.join(held) or 'no weights'}: "
            "load it with transformers' from_pretrained, write it with save_pretrained, and give that folder"
        )

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            path = self.folder / file
            try:
                self._opened[file] = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} is missing or damaged ({error}): download or copy it again") from error
        return self._opened[file]


@dataclass(frozen=True)
class FilePosition:
    """The position of one tensor's data: `offset` bytes into the file `path`."""

    path: Path
    offset: int

    def write(self, tensor: Tensor) -> None:
        with self.path.open("r+b") as file:
            file.seek(self.offset)
            file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def plan_files(folder: Path, tensors: Mapping[str, Tensor], max_file_bytes: int) -> dict[str, FilePosition]:
    """Create the files that will hold `tensors` (meta), in full size but without content, and return each tensor's position.

    tensors: by name, in the shapes and dtypes of the files.

    More than one file comes with an index. Raises ModelError if the disk has too little room.
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
