"""`meshwright export`: the weights of a run's checkpoint as a folder that Hugging Face's `from_pretrained` loads."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PreTrainedModel

from framework.checkpoint.commit import list_checkpoints, locate, newest_checkpoint, step_of
from framework.checkpoint.entry import Entry
from framework.checkpoint.load import Reader
from framework.checkpoint.place import Place
from framework.data.tokenize import load_tokenizer
from framework.errors import EXIT_DONE, RunError
from framework.launch.directory import RunDirectory
from framework.mesh.layout import Layout
from framework.model.added_bias import prepare_mixtures
from framework.model.load import build_meta, load_config
from framework.model.materialize import initialize_unit, persistent_buffers, set_parameter
from framework.model.special_tokens import find_token_ids, set_token_ids
from framework.model.units import Unit, find_units, tied_names
from framework.model.weights import write_weights
from framework.recipe.compose import load_recipe
from framework.recipe.describe import caution_of_export
from framework.recipe.schema import Model


def export_command(
    run: Path, to: Path, *, best: bool = False, step: int | None = None, name: Path | None = None
) -> int:
    """Write the newest checkpoint of `run`, or the best, or that of a step, to the folder `to`, with its tokenizer. Needs memory
    for one unit.

    Weights keep the dtype in which the optimizer updated them, so nothing is lost. The folder appears whole or not at all. name:
    what `to` is called afterwards, if otherwise. Raises RunError when the run has no such checkpoint, ModelError when `to` has
    content already, CheckpointError when the checkpoint is damaged.
    """
    directory = RunDirectory.open(run)
    settings = load_recipe(directory.recipe).model
    model, reader = _plan_model(directory, settings, _choose_checkpoint(directory, best=best, step=step))
    units = find_units(model)
    dtype = getattr(torch, reader.manifest.entries[f"weight/{units[0].parameters[0]}"].dtype)
    write_weights(to, model, _read_units(reader, model, units), dtype, _tokenizer_files(directory))
    print(f"exported step {reader.manifest.step:,} of {run} to {name or to}")
    if caution := caution_of_export(settings):
        print(f"note: {caution}")
    return EXIT_DONE


def load_model(run: Path) -> tuple[PreTrainedModel, int]:
    """The model of the newest checkpoint of `run`, on the CPU and in the dtype of its weights, and the checkpoint's step.

    Raises what `export_command` raises.
    """
    directory = RunDirectory.open(run)
    settings = load_recipe(directory.recipe).model
    model, reader = _plan_model(directory, settings, _choose_checkpoint(directory))
    units, ties = find_units(model), tied_names(model)
    prepare_mixtures(settings, model, units)  # the run's own model chooses experts with the bias that was added
    for unit in units:  # rotary tables and masks, which no checkpoint holds; before any weight that it would overwrite
        initialize_unit(model, unit, seed=0, names=())
    for unit in units:
        for name, weight in _read(reader, "weight/", unit.parameters).items():
            set_parameter(model, ties[name], Parameter(weight, requires_grad=False))
    if buffers := persistent_buffers(model):
        for name, value in _read(reader, "buffer/", buffers).items():
            path, _, name = name.rpartition(".")
            model.get_submodule(path)._buffers[name] = value
    return model, reader.manifest.step


def _choose_checkpoint(directory: RunDirectory, *, best: bool = False, step: int | None = None) -> Place:
    """The newest whole checkpoint, the best, or that of a step."""
    root = directory.checkpoints
    if step is not None:
        if (found := locate(root, step)) is not None:
            return found
        steps = ", ".join(f"{step_of(each):,}" for each in list_checkpoints(root)) or "none"
        raise RunError(f"{directory.path} has no checkpoint of step {step:,}; it has those of steps: {steps}")
    newest = newest_checkpoint(root)
    if newest is None:
        raise RunError(f"{directory.path} has no whole checkpoint yet: nothing to export")
    return find_best(directory, newest) if best else newest


def _tokenizer_files(directory: RunDirectory) -> list[Path]:
    return [path for path in sorted(directory.tokenizer.iterdir()) if path.name != "info.json"]


def _plan_model(directory: RunDirectory, settings: Model, checkpoint: Place) -> tuple[PreTrainedModel, Reader]:
    """The run's model on meta as Hugging Face has it, with its tokenizer's special tokens, and its checkpoint. settings: the
    recipe's."""
    model = build_meta(load_config(settings), settings.attention)
    # Runs of older versions have the family's ids in their recipes, not the tokenizer's.
    tokenizer = load_tokenizer(str(directory.tokenizer))
    set_token_ids(model, find_token_ids(model.config, tokenizer, settings.weights is not None))
    return model, Reader(checkpoint)


def find_best(run: RunDirectory, newest: Place) -> Place:
    """The checkpoint with the lowest validation loss, as the newest one knows it. Raises RunError where none was kept as such."""
    step = Reader(newest).manifest.state.get("best_step")
    if step is None:
        raise RunError(
            f"{run.path} has kept no best checkpoint: checkpoint.keep_best=true does from now on. Leave --best out for step"
            f" {step_of(newest):,}, the newest"
        )
    found = locate(run.checkpoints, step)
    if found is None:
        raise RunError(f"{run.path} has lost its best checkpoint, of step {step:,}")
    return found


def _read_units(reader: Reader, model: PreTrainedModel, units: list[Unit]) -> Iterator[dict[str, Tensor]]:
    """Full tensors by name, unit after unit; then the buffers that belong to the model's state."""
    for unit in units:
        yield _read(reader, "weight/", unit.parameters)
    buffers = persistent_buffers(model)
    if buffers:
        yield _read(reader, "buffer/", buffers)


def _read(reader: Reader, kind: str, names: Iterable[str]) -> dict[str, Tensor]:
    """Full tensors by name, read together."""
    entries, tensors = [], {}
    for name in names:
        record = reader.manifest.entries[kind + name]
        tensors[name] = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        entries.append(Entry(kind + name, Layout(record.shape), tensors[name].view(-1)))
    reader.fill(entries)
    return tensors
