"""`meshwright export`: the weights of a run's checkpoint as a folder that Hugging Face's `from_pretrained` loads."""

import argparse
from pathlib import Path

from framework.commands.arguments import add_checkpoint, add_run
from framework.errors import EXIT_DONE
from framework.imports import loading_libraries
from framework.launch.directory import find_run
from framework.launch.places import explain_errors


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run(parser)
    parser.add_argument("--to", type=Path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument(
        "--merged",
        action="store_true",
        help="of a run with an adapter: the whole model with it, not PEFT's folder of the adapter",
    )
    parser.add_argument(
        "--average", action="store_true", help="with train.ema: the average of the weights, in their place"
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="of a run that has trained the text model of a vision-language checkpoint: that alone, not the checkpoint with it",
    )
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="the dtype of the weights; else the one that was trained"
    )
    add_checkpoint(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder. It appears whole or not at all."""
    path = find_run(arguments.run)
    with loading_libraries():
        from framework.commands.trained_model import export_model

    which = {"best": arguments.best, "step": arguments.step, "averaged": arguments.average, "dtype": arguments.dtype}
    with explain_errors(arguments.to, "--to"):
        export_model(path, to=arguments.to, merged=arguments.merged, text=arguments.text, **which)
    return EXIT_DONE
