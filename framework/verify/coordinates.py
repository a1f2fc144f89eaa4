"""Coordinate check of muP: whether outputs of modules change as much in a wide model as in a narrow one, step after step.

Models of 1, 2, 4 ... times the widths of `model.mup_base` are trained for some steps by the oracle's plain loop, on equal tokens.
Under muP the mean change of an output since the first step is about equal at all widths; with initial values and rates that do
not follow the width, it grows with it (Yang et al. 2022, arXiv 2203.03466, appendix D.1).

Logits are apart: to what the head has learned, (W_t - W_0) x_t, initial values add W_0 (x_t - x_0), a sum of random terms that
shrinks with the width under muP. The former is `head`, and flat; logits must not grow.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import log2
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from framework.errors import EXIT_DONE, EXIT_FAILED, RecipeError
from framework.model.hub import find_folder
from framework.model.load import load_config
from framework.recipe.schema import Recipe
from framework.verify.evidence import make_batches
from framework.verify.layout import initial_weights
from framework.verify.oracle import CPU, Oracle

# Small, for 16 times the base's width is to be trained on a CPU.
SEQUENCES, CONTEXT, VOCABULARY = 4, 32, 256
# The largest exponent of the width, up or down, of a change that counts as flat.
FLAT = 0.15
# Mean change of each output, by width and then by step.
Changes = dict[int, list[dict[str, float]]]
Outputs = dict[str, list[Tensor]]


def check_coordinates(recipe: Recipe, picture: Path, steps: int, num_widths: int) -> int:
    """Train all widths with muP and without it, print how outputs grow, draw them, and return the exit code: 0 if they are flat
    with it. RecipeError without a base model."""
    if not recipe.model.mup_base:
        raise RecipeError("--coordinates checks muP: set model.mup_base to the widths of a base model")
    found = {}
    for name, base in (("muP", recipe.model.mup_base), ("without", {})):
        own = replace(recipe, model=replace(recipe.model, mup_base=base))
        factors = [2**power for power in range(num_widths)]
        found[name] = {
            width: list(changes) for width, changes in (_train(own, recipe.model.mup_base, f, steps) for f in factors)
        }
    growth = {name: _growth(each) for name, each in found.items()}
    widths = list(found["muP"])
    print(
        f"exponent of the width, {widths[0]} to {widths[-1]}, with which the change of outputs in {steps} steps grows"
    )
    print(f"{'output':<12} {'muP':>8} {'without':>8}")
    for output in growth["muP"]:
        print(f"{output:<12} {growth['muP'][output]:>8.2f} {growth['without'][output]:>8.2f}")
    _draw(found, picture)
    shrinks = growth["muP"].pop("logits")
    is_flat = max(shrinks, *map(abs, growth["muP"].values())) <= FLAT
    print(f"{'flat' if is_flat else f'NOT flat: beyond {FLAT}'}: {picture}")
    return EXIT_DONE if is_flat else EXIT_FAILED


def _train(recipe: Recipe, base: Mapping[str, Any], factor: int, steps: int) -> tuple[int, Iterator[dict[str, float]]]:
    """The width of a model of `factor` times the base's, and the changes of its outputs in each step."""
    config = load_config(recipe.model, find_folder)
    config.update(
        {name: value * factor for name, value in base.items()} | {"vocab_size": VOCABULARY, "use_cache": False}
    )
    schedule = replace(recipe.optim.schedule, name="constant", warmup_steps=0)
    settings: dict[str, Any] = {"optim": replace(recipe.optim, schedule=schedule)}
    settings["batch"] = replace(recipe.batch, sequences_per_step=SEQUENCES, sequences_per_microbatch=SEQUENCES)
    settings["precision"] = replace(recipe.precision, compute="fp32", master="fp32")
    return config.get_text_config().hidden_size, _steps(replace(recipe, **settings), config, steps)


def _steps(recipe: Recipe, config: PretrainedConfig, steps: int) -> Iterator[dict[str, float]]:
    weights = initial_weights(config, recipe.train.seed)
    oracle = Oracle(recipe, config, weights, torch.float32, CPU)
    batch = make_batches(config, 1, SEQUENCES, CONTEXT, recipe.train.seed)[0]
    first: Outputs | None = None
    head = oracle.model.get_output_embeddings().weight.detach().clone()
    for step in range(steps + 1):
        with _reading(oracle.model, head) as outputs:
            oracle.set_rate(recipe.optim.lr)
            oracle.find_gradients(batch)
        if first is None:
            first = outputs
        else:
            yield {name: _mean_change(own, first[name]) for name, own in outputs.items()}
        oracle.clip()
        oracle.update(batch, {}, step)


def _mean_change(outputs: Sequence[Tensor], first: Sequence[Tensor]) -> float:
    return sum(float((a - b).abs().mean()) for a, b in zip(outputs, first, strict=True)) / len(outputs)


@contextmanager
def _reading(model: Any, head: Tensor) -> Iterator[Outputs]:
    """The outputs in a forward of the embedding, each attention and mlp, and the head, and of the head without its initial
    weight."""
    found: Outputs = {}

    def note(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        found.setdefault(name, []).append((output[0] if isinstance(output, tuple) else output).detach())

    def note_learned(module: nn.Module, args: Any, _output: Any) -> None:
        found["head"] = [nn.functional.linear(args[0].detach(), module.get_parameter("weight").detach() - head)]

    kinds = {"attention": ("self_attn", "attn", "attention"), "mlp": ("mlp", "feed_forward")}
    modules = [("embedding", model.get_input_embeddings()), ("logits", model.get_output_embeddings())]
    for path, module in model.named_modules():
        modules += [(kind, module) for kind, names in kinds.items() if path.rpartition(".")[2] in names]
    handles = [module.register_forward_hook(partial(note, name)) for name, module in modules]
    handles.append(model.get_output_embeddings().register_forward_hook(note_learned))
    yield found
    for handle in handles:
        handle.remove()


def _growth(changes: Changes) -> dict[str, float]:
    """The exponent with which each output has grown from the narrowest model to the widest, after the last step."""
    widths = sorted(changes)
    first, last = (changes[width][-1] for width in (widths[0], widths[-1]))
    return {name: log2(last[name] / first[name]) / log2(widths[-1] / widths[0]) for name in first}


def _draw(found: Mapping[str, Changes], picture: Path) -> None:
    """A row for each way, a panel for each output, a line for each step."""
    from matplotlib.figure import Figure

    outputs: Sequence[str] = list(next(iter(found["muP"].values()))[0])
    figure = Figure(figsize=(3 * len(outputs), 5.4), layout="constrained")
    panels = figure.subplots(len(found), len(outputs), sharey="col")
    for own, (way, changes) in zip(panels, found.items(), strict=True):
        num_steps = len(next(iter(changes.values())))
        for axes, output in zip(own, outputs, strict=True):
            for step in range(num_steps):
                values = [changes[width][step][output] for width in changes]
                axes.plot(list(changes), values, color="#3b6fb6", alpha=0.3 + 0.7 * step / num_steps, marker=".")
            axes.set(title=f"{output}, {way}", xscale="log", yscale="log", xlabel="width", ylabel="mean change")
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
