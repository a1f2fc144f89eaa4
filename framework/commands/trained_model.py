"""The model of a run's checkpoint: loaded here, or exported as a folder that Hugging Face's `from_pretrained` loads."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from framework.checkpoint.commit import list_checkpoints, locate, newest_checkpoint, step_of
from framework.checkpoint.load import Reader
from framework.checkpoint.staging import Entry
from framework.checkpoint.storage import Place
from framework.data.chat import Chat
from framework.data.tokenize import INFO_FILE, hash_file, load_tokenizer
from framework.errors import RunError
from framework.launch.directory import RunDirectory
from framework.launch.identity import verify_identity
from framework.mesh.layout import Layout
from framework.model.generate import add_end, find_end, find_token_ids, set_token_ids
from framework.model.hub import CONFIG, list_processors, read_generation
from framework.model.initial import build_buffers, persistent_buffers, set_buffers
from framework.model.load import build_meta, load_config
from framework.model.units import Unit, find_units, set_parameter, tied_names
from framework.model.weights import write_weights
from framework.recipe.compose import load_recipe
from framework.recipe.schema import Model, Recipe


def export_model(run: Path, to: Path, *, best: bool = False, step: int | None = None, name: Path | None = None) -> None:
    """Write the newest checkpoint of `run`, or the best, or that of a step, to the folder `to`, with its tokenizer. Needs memory
    for one unit.

    Weights keep the dtype in which the optimizer updated them, so nothing is lost. The folder appears whole or not at all. name:
    the name of `to` afterwards, if it is renamed. Raises RunError when the run has no such checkpoint, ModelError when `to` has
    content already, CheckpointError when the checkpoint is damaged.
    """
    directory = RunDirectory.open(run)
    recipe, reader = _read_settings(directory, _choose_checkpoint(directory, best=best, step=step))
    model = _plan_model(directory, recipe)
    units = find_units(model)
    dtype = getattr(torch, reader.manifest.entries[f"weight/{units[0].parameters[0]}"].dtype)
    tokenizer = [path for path in sorted(directory.tokenizer.iterdir()) if path.name != INFO_FILE]
    beside = [*tokenizer, *list_processors(directory.pretrained)]
    write_weights(to, model, _read_units(reader, model, units), dtype, beside)
    template = directory.tokenizer / "chat_template.jinja"
    chat = f", with the chat template {hash_file(template)[:16]}" if template.is_file() else ""
    print(f"exported step {reader.manifest.step:,} of {run} to {name or to}{chat}")


def load_model(run: Path) -> tuple[PreTrainedModel, int]:
    """The model of the newest checkpoint of `run`, on the CPU and in the dtype of its weights, and the checkpoint's step.

    Raises what `export_model` raises.
    """
    directory = RunDirectory.open(run)
    recipe, reader = _read_settings(directory, _choose_checkpoint(directory))
    model = _plan_model(directory, recipe)
    units, ties = find_units(model), tied_names(model)
    # Rotary tables and masks are in no checkpoint.
    set_buffers(model, build_buffers(_load_config(directory, recipe.model)), torch.device("cpu"))
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


def _read_settings(directory: RunDirectory, checkpoint: Place) -> tuple[Recipe, Reader]:
    """The recipe, and the checkpoint, which says whether its model and the tokenizer are still its own."""
    recipe, reader = load_recipe(directory.recipe), Reader(checkpoint)
    verify_identity(directory, recipe, reader.manifest.state)
    return recipe, reader


def _plan_model(directory: RunDirectory, recipe: Recipe) -> PreTrainedModel:
    """The run's model on meta as Hugging Face has it, with its tokenizer's special tokens."""
    settings = recipe.model
    model = build_meta(_load_config(directory, settings), settings.attention)
    # Runs of older versions have the family's ids in their recipes, not the tokenizer's.
    tokenizer = load_tokenizer(str(directory.tokenizer))
    set_token_ids(model, find_token_ids(model.config, tokenizer, settings.weights is not None))
    if settings.weights is not None:
        _carry_generation(model, directory.pretrained, tokenizer, settings.tokenizer is None)
    if recipe.data.has_conversations and len(end := Chat(tokenizer).turn_end) == 1:
        generation = model.generation_config
        generation.eos_token_id = add_end(generation.eos_token_id, end[0])
    return model


def _carry_generation(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerBase, has_own_tokenizer: bool
) -> None:
    """Give the model the generation config of its pretrained weights. The token that closes documents of the data ends a text,
    too; those of another tokenizer do not."""
    generation = read_generation(model, folder)
    if generation is not None:
        stated = generation.eos_token_id
        end = tokenizer.eos_token_id
        generation.eos_token_id = add_end(stated, end) if has_own_tokenizer else find_end(stated, tokenizer)
        model.generation_config = generation


def _load_config(directory: RunDirectory, settings: Model) -> PretrainedConfig:
    """The run's config, from its own copy of that of the pretrained weights. Runs of older versions have none."""
    if not (directory.pretrained / CONFIG).is_file():
        return load_config(settings)
    return load_config(settings, lambda weights, revision: directory.pretrained)


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
