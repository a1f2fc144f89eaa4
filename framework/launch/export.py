"""`meshwright export`: a run's newest weights as a folder that Hugging Face's `from_pretrained` loads."""

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from framework.checkpoint.commit import newest_checkpoint
from framework.checkpoint.index import Entry
from framework.checkpoint.load import Reader
from framework.errors import EXIT_DONE, RunError
from framework.launch.directory import RunDirectory
from framework.mesh.layout import Layout
from framework.model.load import build_meta, load_config
from framework.model.materialize import persistent_buffers
from framework.model.units import Unit, find_units
from framework.model.weights import write_weights
from framework.recipe.compose import load_recipe


def export_command(run: Path, to: Path) -> int:
    """Write the newest checkpoint of `run` to the folder `to`, with its tokenizer. Needs memory for one unit.

    Weights keep the dtype in which the optimizer updated them, so nothing is lost. Raises RunError when the run has no
    checkpoint, ModelError when `to` has content already, CheckpointError when the checkpoint is damaged.
    """
    directory = RunDirectory.open(run)
    newest = newest_checkpoint(directory.checkpoints)
    if newest is None:
        raise RunError(f"{run} has no whole checkpoint yet: nothing to export")
    recipe, reader = load_recipe(directory.recipe), Reader(newest)
    model = build_meta(load_config(recipe.model), recipe.model.attention)
    units = find_units(model)
    dtype = getattr(torch, reader.manifest.entries[f"weight/{units[0].parameters[0]}"].dtype)
    write_weights(to, model, _read_units(reader, model, units), dtype)
    shutil.copytree(directory.tokenizer, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("info.json"))
    print(f"exported step {reader.manifest.step:,} of {run} to {to}")
    return EXIT_DONE


def _read_units(reader: Reader, model: PreTrainedModel, units: list[Unit]) -> Iterator[dict[str, Tensor]]:
    """Full tensors by name, unit after unit; then the buffers that belong to the model's state."""
    for unit in units:
        yield _read(reader, "weight/", unit.parameters)
    buffers = persistent_buffers(model)
    if buffers:
        yield _read(reader, "buffer/", buffers)


def _read(reader: Reader, kind: str, names: Iterable[str]) -> dict[str, Tensor]:
    """Full tensors by name, read together."""
    entries = []
    for name in names:
        record = reader.manifest.entries[kind + name]
        layout = Layout(record.shape)
        data = torch.empty(layout.numel_owned, dtype=getattr(torch, record.dtype))
        entries.append(Entry(kind + name, layout, data))
    reader.fill(entries)
    return {name: entry.data.view(entry.layout.shape) for name, entry in zip(names, entries, strict=True)}
