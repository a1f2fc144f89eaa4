"""`meshwright generate`: a text continued, or a question answered, by a run's newest checkpoint or by an exported folder."""

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from framework.checkpoint.commit import newest_checkpoint
from framework.commands.arguments import at_least
from framework.errors import EXIT_DONE, ModelError
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory, find_run

EXPORT_FOLDER = "export"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", metavar="RUN", help="a run's id or folder, or an exported folder")
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue; with --chat, what to answer")
    parser.add_argument(
        "--chat", action="store_true", help="answer by the chat template, line by line of stdin if there is no --prompt"
    )
    parser.add_argument("--system", metavar="TEXT", help="with --chat, the system's message")
    parser.add_argument(
        "--max-new-tokens", type=at_least(1), default=100, metavar="N", help="most tokens to add (default: 100)"
    )
    parser.add_argument(
        "--temperature",
        type=at_least(0, float),
        default=0.8,
        metavar="T",
        help="0: always the likeliest token (default: 0.8)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the sampling (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Print the prompt and its continuation, or answers."""
    if arguments.prompt is None and not arguments.chat:
        raise ModelError("nothing to continue: give --prompt TEXT, or --chat to talk")
    names = ("prompt", "max_new_tokens", "temperature", "seed", "chat", "system")
    return generate_command(find_run(arguments.run), **{name: getattr(arguments, name) for name in names})


def generate_command(
    run_or_folder: Path,
    prompt: str | None,
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    seed: int = 0,
    chat: bool = False,
    system: str | None = None,
) -> int:
    """Print `prompt` and a continuation by the newest checkpoint of a run, or by a Hugging Face folder. chat: print an answer to
    it, or to each line of stdin."""
    with loading_libraries():
        import torch

        from framework.commands.trained_model import load_model
        from framework.data.chat import Chat
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
    continue_text = partial(
        generate, model, tokenizer, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
    )
    if not chat:
        print(f"{prompt}{continue_text(prompt or '')}")
        return EXIT_DONE
    if tokenizer.chat_template is None:
        raise ModelError(
            f"{run_or_folder} has a tokenizer without a chat template: leave --chat out to continue a text"
        )
    template = Chat(tokenizer)
    messages = [] if system is None else [{"role": "system", "content": system}]
    for said in _read_prompts() if prompt is None else [prompt]:
        messages.append({"role": "user", "content": said})
        answer = continue_text(template.prompt(messages), end=template.turn_end)
        messages.append({"role": "assistant", "content": answer})
        print(f"{said if prompt is not None else ''}\n{answer.strip()}\n".lstrip("\n"), flush=True)
    return EXIT_DONE


def _read_prompts() -> Iterator[str]:
    """The lines of stdin that have text, asked for on a terminal."""
    while True:
        try:
            said = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if said.strip():
            yield said


def _find_folder(run_or_folder: Path) -> Path | None:
    """The Hugging Face folder to load; None where it is a run with checkpoints, which are never older than its export."""
    run = RunDirectory(run_or_folder)
    if any((run_or_folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return run_or_folder
    if run.recipe.is_file() and newest_checkpoint(run.checkpoints) is not None:
        return None
    if (run_or_folder / EXPORT_FOLDER / "config.json").is_file():
        return run_or_folder / EXPORT_FOLDER
    if run.recipe.is_file():
        raise ModelError(f"{run_or_folder} has no whole checkpoint yet: nothing to generate with")
    raise ModelError(f"{run_or_folder} is neither a run nor a Hugging Face folder (no recipe.yaml, no config.json)")
