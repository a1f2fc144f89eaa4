"""`meshwright verify`: the recipe's layout against stock Hugging Face in one process."""

import argparse
from pathlib import Path

from framework.commands.arguments import at_least, compose_recipe
from framework.imports import loading_libraries


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--model-config", type=Path, metavar="FILE", help="a config.json instead of the recipe's model")
    parser.add_argument(
        "--dtype",
        choices=["fp64", "fp32", "bf16", "fp16", "fp8"],
        help="dtype of the comparison: fp64 to 1e-9, fp32 (default) to 1e-5, others to measured bounds; or --fp64, --bf16",
    )
    parser.add_argument("--fp64", dest="dtype", action="store_const", const="fp64", help=argparse.SUPPRESS)
    parser.add_argument("--bf16", dest="dtype", action="store_const", const="bf16", help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=at_least(1), default=3, metavar="N", help="steps to compare (default: 3)")
    parser.add_argument("--ranks", type=at_least(1), metavar="N", help="ranks (default: as few as the layout needs)")
    parser.add_argument(
        "--device",
        choices=["cpu", "cuda"],
        default="cpu",
        help="cuda: NCCL, or gloo on shared GPUs (default: cpu)",
    )
    parser.add_argument("--strict", action="store_true", help="compare the recipe in its own sizes, or refuse")
    parser.add_argument(
        "--coordinates",
        type=Path,
        metavar="PNG",
        help="draw sizes of outputs by width (model.mup_base)",
    )
    parser.add_argument(
        "--widths", type=at_least(2), default=5, metavar="N", help="with --coordinates: widths (default: 5)"
    )
    parser.add_argument(
        "--end-to-end", action="store_true", help="compare a whole run with a plain loop, text to export"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare, and print the evidence."""
    recipe = compose_recipe(arguments)
    with loading_libraries():
        from framework.verify.command import verify
        from framework.verify.prepare import VerifyOptions

    names = ("model_config", "dtype", "steps", "ranks", "device", "strict")
    options = VerifyOptions(**{name: getattr(arguments, name) for name in names})
    if arguments.coordinates is not None:
        from framework.verify.command import check_coordinates

        return check_coordinates(
            recipe, picture=arguments.coordinates, steps=arguments.steps, num_widths=arguments.widths
        )
    if arguments.end_to_end:
        from framework.verify.end_to_end import verify_end_to_end

        return verify_end_to_end(recipe, options, command=arguments.main)
    return verify(recipe, options)
