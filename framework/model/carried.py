"""Small files of a pretrained folder that a run keeps and its exports carry on: how to generate, and how to process images or
sounds. Tokenizers save their own files, chat templates among them."""

import shutil
from pathlib import Path

from transformers import GenerationConfig, PreTrainedModel

from framework.errors import ModelError

CONFIG, GENERATION = "config.json", "generation_config.json"
# Processors, which transformers loads beside a tokenizer. No part of training reads them.
PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
)


def keep_files(weights: Path, folder: Path) -> None:
    """Copy what exports carry on, and the config, from the weights' folder to a new one."""
    folder.mkdir()
    for name in (CONFIG, GENERATION, *PROCESSORS):
        if (weights / name).is_file():
            shutil.copy(weights / name, folder)


def list_processors(folder: Path) -> list[Path]:
    """Files that an export has as they are."""
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
