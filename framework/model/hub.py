"""Folders of pretrained models: local, or of the hub, fetched once by the launcher at a commit that the recipe keeps.

`resolve_folder` may ask the hub, `find_folder` never does: thousands of ranks that ask are refused, and two of them may get
different commits. A run keeps some small files of the folder, which its exports carry on.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import httpx
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import GenerationConfig, PreTrainedModel

from framework.errors import ModelError
from framework.model.safetensors_files import find_files, fingerprint_files
from framework.output import first_line
from framework.recipe.schema import Model

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken")
FILES = ("*.safetensors", *TOKENIZER_FILES)
# Processors, which transformers loads beside a tokenizer. No part of training reads them.
PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def resolve_folder(
    name_or_path: str, revision: str | None = None, files: Sequence[str] = FILES, key: str = "model.weights"
) -> Path:
    """The local folder of a model: `name_or_path` itself if it is one, else the snapshot of that Hugging Face hub name.

    Of a hub repository only `files` of its top folder are fetched, once. revision: a commit, branch or tag; None: the newest.
    key: the recipe's, which names it. Raises ModelError when there is neither such a folder nor a hub model that can be reached.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    try:
        return _snapshot(name_or_path, revision, files, is_offline=False)
    except HFValidationError as error:
        raise ModelError(
            f"{key}={name_or_path} is no folder here and no hub name (owner/name): correct the path"
        ) from error
    except (LocalEntryNotFoundError, httpx.TransportError) as error:
        raise ModelError(
            f"{key}={_at(name_or_path, revision)} is no folder here, no whole snapshot of it is in the hub cache, and the hub"
            f" cannot be reached: run `{_download(name_or_path, revision, files)}` where there is internet, or give the path of"
            " a local folder"
        ) from error
    except HfHubHTTPError as error:
        raise ModelError(
            f"{key}={_at(name_or_path, revision)} is no folder here and the hub refuses it"
            f" ({first_line(error)}): correct the name or the revision; for a gated or private model accept its terms"
            " and run `hf auth login`"
        ) from error


def find_folder(name_or_path: str, revision: str | None = None) -> Path:
    """The folder of a model that is on this machine; never asks the hub. Raises ModelError where it is not in the hub cache."""
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    try:
        return _snapshot(name_or_path, revision, FILES, is_offline=True)
    except (LocalEntryNotFoundError, HFValidationError) as error:
        raise ModelError(
            f"model.weights={_at(name_or_path, revision)} is not in the hub cache that this rank sees ({constants.HF_HUB_CACHE}),"
            f" and ranks do not ask the hub. The launching process fetched it: set HF_HOME to a folder that all nodes share, or"
            f" run `{_download(name_or_path, revision)}` on every node"
        ) from error


def fetch_config(name_or_path: str, revision: str | None = None) -> Path:
    """The folder of a model with its configuration, as `resolve_folder`. Fetches no weights."""
    return resolve_folder(name_or_path, revision, (CONFIG,))


def pin_revision(model: Model) -> Model:
    """The model with the commit of its hub weights in `revision`, once they are on this machine; others as they are.

    Weights that are here whole, at the commit that the recipe names, are not asked for again.
    """
    if model.weights is None:
        return model
    if Path(model.weights).expanduser().is_dir():
        if model.revision is not None:
            raise ModelError(
                f"model.revision={model.revision} is a commit of the hub, and model.weights={model.weights} is a folder here:"
                " set model.revision=null"
            )
        return model
    folder = find_weights(model) if model.revision is not None else None
    if folder is None or folder.name != model.revision:  # a branch moves; a commit does not
        folder = resolve_folder(model.weights, model.revision)
    return replace(model, revision=folder.name)  # the cache names a snapshot's folder by its commit


def find_weights(model: Model) -> Path | None:
    """The folder of `model.weights`; None without any, and for those of the hub that are not on this machine whole. The hub is
    not asked."""
    if model.weights is None:
        return None
    try:
        folder = find_folder(model.weights, model.revision)
    except ModelError:
        return None
    return folder if Path(model.weights).expanduser().is_dir() or _has_weights(folder) else None


def fingerprint_base(model: Model) -> str:
    """The fingerprint of the pretrained weights; empty without any, where the recipe alone says what the values are."""
    return "" if model.weights is None else fingerprint_files(find_folder(model.weights, model.revision))


def find_again(model: Model, what: str, otherwise: str = "") -> Path:
    """The folder of the pretrained weights once more. ModelError, with what they were to the run, where it is no longer there."""
    try:
        return find_folder(str(model.weights), model.revision)
    except ModelError as error:
        raise ModelError(
            f"{what} is not at model.weights={model.weights}, from which the run has read it: put it back, or a link to it in its"
            f" place{otherwise} ({error})"
        ) from error


def find_base(model: Model, fingerprint: str) -> Path | None:
    """The folder of the pretrained weights beside which an adapter was trained; None without any. Raises ModelError where it has
    others now, or is no longer there."""
    if model.weights is None:
        return None
    folder = find_again(model, "the frozen model beside the adapter")
    if fingerprint and (found := fingerprint_base(model)) != fingerprint:
        raise ModelError(
            f"the adapter was trained beside other weights than model.weights={model.weights} has now (fingerprint {found}, was"
            f" {fingerprint}): restore that folder; or start a new run with adapter.weights=FOLDER, an export of this one"
        )
    return folder


def _has_weights(folder: Path) -> bool:
    """Whether all files of weights are there: an interrupted download, or one of the configuration alone, leaves a folder too."""
    try:
        return all((folder / file).exists() for file in find_files(folder))
    except ModelError:
        return False


def _snapshot(name: str, revision: str | None, files: Sequence[str], is_offline: bool) -> Path:
    folder = snapshot_download(
        name,
        revision=revision,
        allow_patterns=list(files),
        ignore_patterns=["*/*", "consolidated*"],
        local_files_only=is_offline,
    )
    return Path(folder)


def _at(name: str, revision: str | None) -> str:
    return name if revision is None else f"{name} at {revision}"


def _download(name: str, revision: str | None, files: Sequence[str] = FILES) -> str:
    """The command that fetches a model, or of it the one file that is asked for."""
    only = f" {CONFIG}" if tuple(files) == (CONFIG,) else ""
    return f"hf download {name}{only}" + (f" --revision {revision}" if revision else "")


def keep_files(weights: Path, folder: Path) -> None:
    """Copy what exports carry on, and the config, from the weights' folder to a new one."""
    folder.mkdir()
    for name in (CONFIG, GENERATION, *PROCESSORS):
        if (weights / name).is_file():
            shutil.copy(weights / name, folder)


def copy_model(folder: Path, to: Path) -> None:
    """Copy the files of a model's top folder, those that would be fetched of a hub repository."""
    for path in folder.iterdir():
        if path.is_file() and any(path.match(pattern) for pattern in FILES) and not path.match("consolidated*"):
            shutil.copyfile(path, to / path.name)  # without its mode: a shared model's files may be read-only


def list_processors(folder: Path) -> list[Path]:
    """Files that an export copies as they are."""
    return [folder / name for name in PROCESSORS if (folder / name).is_file()]


def read_generation(model: PreTrainedModel, folder: Path) -> GenerationConfig | None:
    """The folder's generation config, of the kind that the model has; None where there is none.

    Raises ModelError for a file that transformers does not read.
    """
    if not model.can_generate() or not (folder / GENERATION).is_file():
        return None
    try:
        return type(model.generation_config).from_pretrained(folder)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{folder / GENERATION} is no generation config that transformers reads ({error}): download or correct it, or remove"
            " it if the model needs none"
        ) from error
