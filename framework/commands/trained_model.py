"""The model of a run's checkpoint: loaded here, or exported as a folder that Hugging Face's `from_pretrained` loads,
adapters merged or by themselves."""

import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from framework.checkpoint.commit import list_checkpoints, locate, newest_checkpoint, step_of
from framework.checkpoint.load import Reader
from framework.checkpoint.staging import Entry
from framework.data.chat import Chat
from framework.data.tokenize import INFO_FILE, hash_file, load_tokenizer
from framework.errors import RunError
from framework.launch.directory import RunDirectory
from framework.launch.identity import verify_identity
from framework.mesh.layout import Box, Layout
from framework.model.adapters import find_coded, merge_all
from framework.model.generate import add_end, find_end, find_token_ids, set_token_ids
from framework.model.hub import CONFIG, find_again, find_base, list_processors, read_generation
from framework.model.initial import build_buffers, draw_unit, persistent_buffers, set_buffers
from framework.model.load import build_meta, is_part, load_config
from framework.model.peft import add_adapters, write_adapter
from framework.model.precision import DTYPES
from framework.model.units import Unit, find_units, set_parameter, tied_names
from framework.model.weights import read_weights, write_into, write_weights, writing_folder
from framework.object_store import Place
from framework.optim.after_update import AVERAGE
from framework.parallel.zero.row_codes import round_rows
from framework.recipe.compose import load_recipe
from framework.recipe.keys import TOKEN_IDS
from framework.recipe.plugins import import_plugins
from framework.recipe.schema import Model, Recipe
from framework.recipe.stages import stage_of

# Kinds of entries: the weights, and the averages of those that are trained.
TRAINED, AVERAGED = "weight/", f"{AVERAGE}/"


def export_model(
    run: Path,
    to: Path,
    *,
    best: bool = False,
    step: int | None = None,
    name: Path | None = None,
    merged: bool = False,
    averaged: bool = False,
    dtype: str | None = None,
    text: bool = False,
) -> None:
    """Write the newest checkpoint of `run`, or the best, or that of a step, to the folder `to`, with its tokenizer. Needs memory
    for one unit.

    Where the run has trained the text model of a vision-language checkpoint, the folder is that checkpoint with its weights in
    place of the old ones, and in their dtypes; with text, the text model alone.

    Weights keep the dtype in which the optimizer updated them, so nothing is lost, unless `dtype`, a key of DTYPES, names
    another. Of a run with an adapter the folder has that alone, in PEFT's format, or, merged or without pretrained weights, the
    whole model in their dtype. The folder appears whole or not at all. averaged: the average of the weights (train.ema) in their
    place. name: the name of `to` afterwards, if it is renamed.
    Raises RunError when the run has no such checkpoint, ModelError when `to` has content already, CheckpointError when the
    checkpoint is damaged.
    """
    directory = RunDirectory.open(run)
    recipe, reader = read_settings(directory, choose_checkpoint(directory, best=best, step=step))
    if merged and not recipe.adapter.is_used:
        raise RunError(f"{run} has no adapter to merge (adapter.kind=none): export it without --merged")
    if averaged and not any(name.startswith(AVERAGED) for name in reader.manifest.entries):
        raise RunError(f"{run} has no average of its weights (train.ema=null): export it without --average")
    # Weights that a seed drew lie in no folder that PEFT could load an adapter beside.
    merged = merged or (recipe.adapter.is_used and recipe.model.weights is None)
    if dtype is not None and recipe.adapter.is_used and not merged:
        raise RunError(f"{run} has an adapter, which keeps the dtype of its training: --dtype goes with --merged")
    kind = AVERAGED if averaged else TRAINED
    model = _plan_model(directory, recipe)
    tokenizer = [path for path in sorted(directory.tokenizer.iterdir()) if path.name != INFO_FILE]
    if recipe.adapter.is_used and not merged:
        _export_adapter(to, model, recipe, reader, tokenizer, kind)
    else:
        units = UnitReader(recipe, model, reader, kind)
        if not text and is_part(model, directory.pretrained):
            if dtype is not None:
                raise RunError(f"{run} is exported into its vision-language checkpoint: --dtype goes with --text")
            if changed := [key for key in recipe.model.config if key not in TOKEN_IDS]:
                raise RunError(
                    f"{run} is exported into its vision-language checkpoint, whose config.json stays as it is: without the values"
                    f" of model.config ({', '.join(changed)}) it would be another model. Add --text"
                )
            has_own = recipe.model.tokenizer is not None or recipe.data.chat_template is not None
            whole = find_again(recipe.model, "the checkpoint of the text model", ", or export this alone with --text")
            write_into(to, whole, model, units.read_all(), tokenizer if has_own else ())
        else:
            kept = units.dtype if dtype is None else DTYPES[dtype]
            write_weights(to, model, units.read_all(), kept, [*tokenizer, *list_processors(directory.pretrained)])
    template = directory.tokenizer / "chat_template.jinja"
    chat = f", with the chat template {hash_file(template)[:16]}" if template.is_file() else ""
    print(f"exported step {reader.manifest.step:,} of {run} to {name or to}{chat}")


def load_model(run: Path) -> tuple[PreTrainedModel, int]:
    """The model of the newest checkpoint of `run`, on the CPU and in the dtype of its weights, and the checkpoint's step.

    Raises what `export_model` raises.
    """
    directory = RunDirectory.open(run)
    recipe, reader = read_settings(directory, choose_checkpoint(directory))
    model = _plan_model(directory, recipe)
    ties, weights = tied_names(model), UnitReader(recipe, model, reader)
    # Rotary tables and masks are in no checkpoint.
    set_buffers(model, build_buffers(_load_config(directory, recipe.model)), torch.device("cpu"))
    for unit in weights.units:
        for name, weight in weights.read(unit).items():
            set_parameter(model, ties[name], Parameter(weight, requires_grad=False))
    if buffers := persistent_buffers(model):
        for name, value in _read(reader, "buffer/", buffers).items():
            path, _, name = name.rpartition(".")
            setattr(model.get_submodule(path), name, value)
    return model, reader.manifest.step


def choose_checkpoint(directory: RunDirectory, *, best: bool = False, step: int | None = None) -> Place:
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


def _export_adapter(
    to: Path, model: PreTrainedModel, recipe: Recipe, reader: Reader, beside: Sequence[Path], kind: str
) -> None:
    """Write the folder of an adapter, whole or not at all. model: without adapters."""
    add_adapters(model, recipe.adapter)
    names = [name.removeprefix("weight/") for name in reader.manifest.entries if name.startswith("weight/")]
    with writing_folder(to) as folder:
        write_adapter(folder, model, recipe.adapter, recipe.model, _read(reader, kind, names))
        for path in beside:
            shutil.copy(path, folder)


class UnitReader:
    """The weights of a checkpoint, unit after unit. Beside an adapter it has the trained ones alone: the others are read from
    where the run has them, and merged with theirs. model: on meta, without adapters. kind: of the entries to read."""

    def __init__(self, recipe: Recipe, model: PreTrainedModel, reader: Reader, kind: str = TRAINED) -> None:
        self.units = find_units(model)
        self._recipe, self._model, self._reader, self._kind = recipe, model, reader, kind
        self._folder: Path | None = None
        if recipe.adapter.is_used:
            self._adapted = build_meta(model.config)
            add_adapters(self._adapted, recipe.adapter)
            self._folder = find_base(recipe.model, str(reader.manifest.state.get("base", "")))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of a parameter that is frozen, if there is one."""
        frozen = [name for unit in self.units for name in unit.parameters if f"weight/{name}" not in self._entries]
        if not frozen:
            return getattr(torch, self._entries[f"weight/{self.units[0].parameters[0]}"].dtype)
        return next(iter(self._read_base(self.units[0], frozen[:1]).values())).dtype

    @property
    def _entries(self) -> Mapping[str, Any]:
        return self._reader.manifest.entries

    def read(self, unit: Unit) -> dict[str, Tensor]:
        """The full tensors of a unit, by name."""
        frozen = [name for name in unit.parameters if f"weight/{name}" not in self._entries]
        if not frozen:
            return _read(self._reader, self._kind, unit.parameters)
        trained = [name for name in unit.parameters if name not in frozen]
        tensors = {**_read(self._reader, self._kind, trained), **self._read_base(unit, frozen)}
        kind = self._recipe.adapter.base
        if kind != "bf16":
            # The numbers that the adapter was trained beside.
            coded = find_coded(self._model, [unit], trained)
            tensors |= {name: round_rows(kind, tensors[name]) for name in coded}

        def read(name: str) -> Tensor:
            return _read(self._reader, self._kind, [name])[name]

        return merge_all(self._adapted, self._recipe.adapter, tensors, read)

    def read_all(self) -> Iterator[dict[str, Tensor]]:
        """The tensors of each unit; then the buffers that belong to the model's state."""
        for unit in self.units:
            yield self.read(unit)
        buffers = persistent_buffers(self._model)
        if buffers:
            yield _read(self._reader, "buffer/", buffers)

    def _read_base(self, unit: Unit, names: Sequence[str]) -> dict[str, Tensor]:
        """Frozen tensors by name, from the pretrained weights, or drawn as the run drew them."""
        if self._folder is None:
            # Use a model that stays on meta: an initialiser would write to a tied weight that the caller has been given.
            drawn = draw_unit(self._adapted, unit, self._recipe.train.seed, torch.device("cpu"))
            return {name: drawn[name] for name in names}
        shapes = {name: tuple(self._model.get_parameter(name).shape) for name in names}
        wanted = {name: [Box((0,) * len(shape), shape)] for name, shape in shapes.items()}
        return {name: values.clone() for name, _, values in read_weights(self._folder, self._model, wanted)}


def read_settings(directory: RunDirectory, checkpoint: Place) -> tuple[Recipe, Reader]:
    """The recipe of the checkpoint's stage, and the checkpoint, which says whether run and tokenizer are still its own."""
    recipe, reader = load_recipe(directory.recipe), Reader(checkpoint)
    if recipe.plugins:  # code that somebody else may have written
        print(
            f"plugins  {', '.join(recipe.plugins)}: imported, as {directory.recipe} says", file=sys.stderr, flush=True
        )
    import_plugins(recipe.plugins)
    verify_identity(directory, recipe, reader.manifest.state)
    return stage_of(recipe, reader.manifest.step).recipe, reader


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
    """The checkpoint of the best weights, as the newest one knows it. Raises RunError where none was kept as such."""
    step = Reader(newest).manifest.state.get("best_step")
    if step is None:
        why = "checkpoint.keep_best=true does from now on"
        if run.recipe.is_file() and load_recipe(run.recipe).checkpoint.keep_best:
            why = "none of its present data and branch was validated by then"
        raise RunError(
            f"{run.path} has kept no best checkpoint as of step {step_of(newest):,}: {why}. Leave --best out for"
            " that step, the newest"
        )
    found = locate(run.checkpoints, step)
    if found is None:
        raise RunError(f"{run.path} has lost its best checkpoint, of step {step:,}")
    return found


def _read(reader: Reader, kind: str, names: Iterable[str]) -> dict[str, Tensor]:
    """Full tensors by name, read together. A weight that is not trained has no average."""
    entries, tensors = [], {}
    for name in names:
        entry = kind + name if kind != AVERAGED or kind + name in reader.manifest.entries else TRAINED + name
        record = reader.manifest.entries[entry]
        tensors[name] = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        entries.append(Entry(entry, Layout(record.shape), tensors[name].view(-1)))
    reader.fill(entries)
    return tensors
