"""Pretrained weights in and out: a Hugging Face folder is read by boxes and written one unit at a time.

Reading: a rank asks for boxes and only their bytes are read, except where the folder stores a parameter in other pieces
than the model has (experts one by one); then the pieces that the boxes' rows need are joined first.
Writing: the meta model tells every tensor's file and place, so units are written as they come and memory holds one.
"""

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import PreTrainedModel

from framework.errors import ModelError
from framework.files import sync, sync_tree
from framework.mesh.layout import Box
from framework.model.hub import GENERATION, copy_model
from framework.model.load import is_part
from framework.model.safetensors_files import (
    Assembly,
    FilePosition,
    LazyFiles,
    assemble,
    dropped_on_save,
    find_positions,
    find_tower,
    kept_dtype,
    match_keys,
    plan_files,
    to_checkpoint,
)

# Names shown per kind of difference: an error stays on one screen even when not one of 40,000 experts' keys matches.
SHOWN = 20
# (name, shape in the folder, shape in the model)
Shapes = tuple[str, tuple[int, ...], tuple[int, ...]]


def read_weights(
    folder: Path, model_meta: PreTrainedModel, wanted: Mapping[str, list[Box]]
) -> Iterator[tuple[str, Box, Tensor]]:
    """Boxes of a Hugging Face folder: (name, box, CPU tensor of box.sizes in the folder's dtype), in any order.

    wanted: by entry of the model's state dict, the boxes of the global tensor that this rank needs. A tied weight may
    be asked for under any of its names and be stored under any of them.
    A tensor may be a view of the file or of a joined tensor: copy it out before taking the next.
    Raises ModelError, before any weight is read, with the names that are missing, superfluous or of another shape.
    """
    _refuse_quantized(folder)
    with ExitStack() as stack:
        files = LazyFiles(folder, stack)
        found = _match(model_meta, files, wanted)
        asked: dict[str, list[tuple[str, Box]]] = {}
        for name, names in found.stored.items():
            _refuse_untied(files, [found.assemblies[other] for other in names], wanted[name])
            asked.setdefault(names[0], []).extend((name, box) for box in wanted[name])
        for assembly in found.needed:
            boxes = [(target, name, box) for target in assembly.targets for name, box in asked.get(target, ())]
            yield from _read_assembly(model_meta, files, assembly, boxes)


def refuse_other_weights(folder: Path, model_meta: PreTrainedModel, names: Iterable[str]) -> None:
    """Raises ModelError where a folder does not hold the entries `names` of the model's state dict, as `read_weights` would.
    Reads the files' headers."""
    _refuse_quantized(folder)
    with ExitStack() as stack:
        _match(model_meta, LazyFiles(folder, stack), names)


@dataclass(frozen=True)
class _Match:
    """The assemblies that make the entries that are asked for."""

    assemblies: Mapping[str, Assembly]  # by the name of an entry
    stored: Mapping[str, list[str]]  # by each name asked for, the names under which the folder has it
    needed: list[Assembly]  # once each


def _match(model_meta: PreTrainedModel, files: LazyFiles, names: Iterable[str]) -> _Match:
    tower = find_tower(model_meta, files.keys()) if is_part(model_meta, files.folder) else ""
    assemblies, unexpected = match_keys(model_meta, files.keys(), tower)
    stored = {name: _stored_names(model_meta, name, assemblies) for name in names}
    needed = list(dict.fromkeys(assemblies[name] for names in stored.values() for name in names))
    missing, shapes = [name for name, names in stored.items() if not names], [*_find_shapes(model_meta, needed, files)]
    if missing or unexpected or shapes:
        differences = _explain(model_meta, missing, unexpected, shapes)
        raise ModelError(f"{files.folder} does not hold the weights of this model\n{differences}")
    return _Match(assemblies, stored, needed)


def refuse_unwritable_configs(model: PreTrainedModel) -> None:
    """Raise ModelError where an export would fail because transformers does not save the model's config."""
    with TemporaryDirectory() as folder:
        try:
            _write_configs(Path(folder), model, torch.float32)
        except (ValueError, TypeError, AttributeError, LookupError) as error:
            raise ModelError(
                f"transformers does not save the config of this {model.config.model_type} model, so no export would succeed:"
                f" {error}. Correct the values of model.config, or config.json in model.weights"
            ) from error


def write_weights(
    folder: Path,
    model_meta: PreTrainedModel,
    tensors: Iterable[dict[str, Tensor]],
    dtype: torch.dtype,
    beside: Iterable[Path] = (),
    max_shard_bytes: int = 5_000_000_000,
) -> Path:
    """Write a model as a folder that `from_pretrained` loads, with the keys and values of `save_pretrained`.

    tensors: full CPU tensors, in the shapes of the whole model, by entry of the state dict, one dict per unit; together all
    entries, a tied weight under any of its names. Floating-point tensors are stored in `dtype`, or in fp32 where the family
    keeps that.
    beside: files and folders, as of a tokenizer, that get a copy there.
    Memory: one unit and its converted copy. The folder appears complete or not at all.
    Raises ModelError if the folder has content already or the disk too little room.
    """
    dropped, to_dtype = dropped_on_save(model_meta), kept_dtype(model_meta, dtype)

    def to_folder(entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named = {model_meta.all_tied_weights_keys.get(name, name): tensor for name, tensor in entries.items()}
        kept = {name: tensor for name, tensor in named.items() if name not in dropped}
        cast = {name: t.to(to_dtype(name)) if t.is_floating_point() else t for name, t in kept.items()}
        return to_checkpoint(model_meta, cast)

    with writing_folder(folder) as partial:
        places = plan_files(partial, to_folder(model_meta.state_dict()), max_shard_bytes)
        written: set[str] = set()
        for unit in tensors:
            written |= _write_places(places, to_folder(unit))
            del unit  # or it would live on while the iterator gathers the next one
        assert written == set(places), f"no unit holds {sorted(set(places) - written)}"
        _write_configs(partial, model_meta, dtype)
        _copy(beside, partial)
    return folder


def _copy(paths: Iterable[Path], folder: Path) -> None:
    for path in paths:
        shutil.copytree(path, folder / path.name) if path.is_dir() else shutil.copy(path, folder)


def write_into(
    folder: Path,
    whole: Path,
    model_meta: PreTrainedModel,
    tensors: Iterable[dict[str, Tensor]],
    beside: Iterable[Path] = (),
) -> None:
    """Write a text model into a copy of the larger model's folder, `whole`, that it came from. All else stays as it is there to
    the bit: names and dtypes of the text model, other towers' weights, configs, processors.

    tensors, beside: as of `write_weights`. Raises ModelError as that does, and where `whole` holds another model.
    """
    refuse_other_weights(whole, model_meta, model_meta.state_dict())
    with writing_folder(folder) as partial:
        copy_model(whole, partial)
        places = find_positions(partial)
        stored, _ = match_keys(model_meta, places, find_tower(model_meta, places))
        saved, _ = match_keys(model_meta, to_checkpoint(model_meta, dict(model_meta.state_dict())))
        for unit in tensors:
            pieces = to_checkpoint(model_meta, unit)
            entries = {own: name for name in unit for own in _stored_names(model_meta, name, stored)}
            for own, name in entries.items():
                if stored[own].converter is None:
                    named = {stored[own].sources[0][1]: unit[name]}
                else:
                    named = {key: pieces[piece] for key, piece in _pair(stored[own], saved[own])}
                for key, tensor in named.items():
                    position, dtype = places[key]
                    if dtype is None or dtype.is_floating_point != tensor.is_floating_point():
                        raise ModelError(
                            f"{whole} stores {key} as codes or in a dtype that is not written ({dtype or 'unknown'}): export the"
                            " text model alone with --text"
                        )
                    position.write(tensor.to(dtype))
        _copy(beside, partial)


def _pair(stored: Assembly, saved: Assembly) -> Iterator[tuple[str, str]]:
    """The keys of a folder's pieces of an entry, each with the key that transformers gives it today."""
    ours, theirs = (sorted(each.sources, key=lambda source: source[0]) for each in (stored, saved))
    for (pattern, key), (other, piece) in zip(ours, theirs, strict=True):
        assert pattern == other, f"{key} and {piece} are pieces of other converters"
        yield key, piece


@contextmanager
def writing_folder(folder: Path) -> Iterator[Path]:
    """A new folder that takes the place of `folder` when the context ends without an error. ModelError if that has content."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists already: choose another folder or remove it")
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        sync_tree(partial)
        os.replace(partial, folder)
        sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _explain(
    model: PreTrainedModel, missing: Sequence[str], unexpected: Sequence[str], shapes: Sequence[Shapes]
) -> str:
    """The differences between a folder's weights and a model's, and the fix; another vocabulary size has a fix of its own."""
    lines = [*_shown("missing", missing), *_shown("not of this model", unexpected)]
    lines += _shown(
        "of another shape", [f"{name}: {list(stored)}, the model has {list(own)}" for name, stored, own in shapes]
    )
    rows = {s[0] for name, s, own in shapes if name in _vocabulary_entries(model) and s[1:] == own[1:]}
    if rows:
        lines.append(
            f"The vocabularies differ: set model.config.vocab_size={rows.pop()}, which the weights have, or remove it. A"
            " tokenizer with more entries needs other weights: resize_token_embeddings of transformers' model, then"
            " save_pretrained"
        )
    else:
        lines.append(
            "Remove the values of model.config that contradict the folder's config.json, or give another folder"
        )
    return "\n".join(lines)


def _shown(title: str, names: Sequence[str]) -> list[str]:
    more = [f"    ... and {len(names) - SHOWN} more"] if len(names) > SHOWN else []
    return [f"  {title} ({len(names)}):", *(f"    {name}" for name in names[:SHOWN]), *more] if names else []


def _vocabulary_entries(model: PreTrainedModel) -> set[str]:
    ends = [module for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module is not None]
    weights = [end.weight for end in ends]
    return {name for name, p in model.named_parameters(remove_duplicate=False) if any(p is w for w in weights)}


def _stored_names(model: PreTrainedModel, name: str, assemblies: Mapping[str, Assembly]) -> list[str]:
    """The names under which the folder has this weight: its own first, then those of the weights tied to it."""
    ties = model.all_tied_weights_keys
    source = ties.get(name, name)
    tied = [other for other, other_source in ties.items() if other_source == source]
    return [candidate for candidate in dict.fromkeys([name, source, *tied]) if candidate in assemblies]


def _find_shapes(model: PreTrainedModel, assemblies: Iterable[Assembly], files: LazyFiles) -> Iterator[Shapes]:
    """The shapes that differ, from the files' headers alone."""
    own = {name: tuple(entry.shape) for name, entry in model.state_dict().items()}
    for assembly in assemblies:
        try:
            made = assemble(model, assembly, lambda key: torch.empty(files.slice(key).get_shape(), device="meta"))
        except (RuntimeError, ValueError) as error:
            keys = ", ".join(key for _, key in assembly.sources[:SHOWN])
            raise ModelError(f"{files.folder}: {keys} do not join to {assembly.targets[0]}: {error}") from error
        yield from ((name, tuple(t.shape), own[name]) for name, t in made.items() if tuple(t.shape) != own[name])


def _read_assembly(
    model: PreTrainedModel, files: LazyFiles, assembly: Assembly, asked: list[tuple[str, str, Box]]
) -> Iterator[tuple[str, Box, Tensor]]:
    """The boxes of one assembly's targets; asked: (target, name under which it was asked for, box)."""
    if not asked:
        return
    if assembly.converter is None:
        key = assembly.sources[0][1]
        yield from ((name, box, files.read(key, box.slices())) for _, name, box in asked)
        return
    first_row = 0
    if assembly.stacks_rows:
        first_row = min(box.offsets[0] for _, _, box in asked)
        assembly = assembly.rows(first_row, max(box.offsets[0] + box.sizes[0] for _, _, box in asked))
    made = assemble(model, assembly, files.read)
    for target, name, box in asked:
        joined = made[target]
        origin = Box((first_row, *[0] * joined.ndim)[: joined.ndim], tuple(joined.shape))
        yield name, box, joined[box.relative_to(origin).slices()]


def _refuse_untied(files: LazyFiles, copies: list[Assembly], boxes: list[Box]) -> None:
    """Raise ModelError where a folder holds a tied weight several times with different values."""
    keys = [assembly.sources[0][1] for assembly in copies]
    for box in boxes if len(keys) > 1 else ():
        first, *others = (files.slice(key)[box.slices()] for key in keys)
        if not all(torch.equal(first, other) for other in others):
            raise ModelError(
                f"{' and '.join(keys)} are one weight of the model (tied), but differ in {files.folder}: "
                "set model.config.tie_word_embeddings=false"
            )


def _refuse_quantized(folder: Path) -> None:
    config = folder / "config.json"
    values = json.loads(config.read_text()) if config.is_file() else {}
    if quantization := values.get("quantization_config"):
        raise ModelError(
            f"{folder} holds weights quantized by {quantization.get('quant_method', 'an unnamed method')}, which cannot "
            "be trained: give a bf16 folder of the model, or dequantize it with transformers and save that"
        )


def _write_places(places: Mapping[str, FilePosition], tensors: Mapping[str, Tensor]) -> set[str]:
    for key, tensor in tensors.items():
        places[key].write(tensor)
    return set(tensors)


def _write_configs(folder: Path, model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Write config.json and generation_config.json, with the key-value cache that training has switched off.

    Values of a generation config are those of the pretrained folder, which transformers writes again although it warns of them.
    """
    config, generation = deepcopy(model.config), deepcopy(model.generation_config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    for switched_off in (config, config.get_text_config(), generation):
        if getattr(switched_off, "use_cache", None) is False:
            switched_off.use_cache = True
    config.save_pretrained(folder)
    if model.can_generate():
        generation.to_json_file(folder / GENERATION, use_diff=True, keys_to_pop=["compile_config"])
