"""`meshwright generate`: a text continued by a run's newest checkpoint, or by an exported folder."""

import argparse
from pathlib import Path
from typing import Any

from framework.checkpoint.commit import newest_checkpoint
from framework.errors import EXIT_DONE, ModelError
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory, find_run

EXPORT_FOLDER = "export"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", metavar="RUN", help="a run's id or folder, or an exported folder")
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the text to continue")
    parser.add_argument(
        "--max-new-tokens", type=int, default=100, metavar="N", help="most tokens to add (default: 100)"
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest token (default: 0.8)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and its continuation."""
    names = ("prompt", "max_new_tokens", "temperature", "seed")
    return generate_command(find_run(arguments.run), **{name: getattr(arguments, name) for name in names})


def generate_command(
    run_or_folder: Path, prompt: str, *, max_new_tokens: int = 100, temperature: float = 0.8, seed: int = 0
) -> int:
    """Print `prompt` and a continuation by the newest checkpoint of a run, or by a Hugging Face folder."""
    with loading_libraries():
        import torch

        from framework.commands.trained_model import load_model
        from framework.data.tokenize import load_tokenizer
        from framework.model.generate import generate, load_folder

    model: Any
    folder = _find_folder(run_or_folder)
    if folder is None:
        model, _ = load_model(run_or_folder)
        tokenizer = load_tokenizer(str(RunDirectory(run_or_folder).tokenizer))
    else:
        model, tokenizer = load_folder(folder)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    print(prompt + generate(model, tokenizer, prompt, max_new_tokens, temperature, seed=seed))
    return EXIT_DONE


def _find_folder(run_or_folder: Path) -> Path | None:
    """The Hugging Face folder to load; None where it is a run with checkpoints, which are never older than its export."""
    run = RunDirectory(run_or_folder)
    if (run_or_folder / "config.json").is_file():
        return run_or_folder
    if run.recipe.is_file() and newest_checkpoint(run.checkpoints) is not None:
        return None
    if (run_or_folder / EXPORT_FOLDER / "config.json").is_file():
        return run_or_folder / EXPORT_FOLDER
    if run.recipe.is_file():
        raise ModelError(f"{run_or_folder} has no whole checkpoint yet: nothing to generate with")
    raise ModelError(f"{run_or_folder} is neither a run nor a Hugging Face folder (no recipe.yaml, no config.json)")
