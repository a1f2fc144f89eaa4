"""`meshwright verify`: compare the recipe's layout, on ranks of this machine, with stock Hugging Face in one process; and with
`--coordinates` models of several widths with one another.

The coordinate check is of muP: whether outputs of modules change as much in a wide model as in a narrow one, step after step.
Models of 1, 2, 4 ... times the widths of `model.mup_base` are trained for some steps by the oracle's plain loop, on equal tokens.
Under muP the mean change of an output since the first step is about equal at all widths; with initial values and rates that do
not follow the width, it grows with it (Yang et al. 2022, arXiv 2203.03466, appendix D.1).

Logits are apart: to what the head has learned, (W_t - W_0) x_t, initial values add W_0 (x_t - x_0), a sum of random terms that
shrinks with the width under muP. The former is `head`, and flat; logits must not grow.
"""

import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import log2
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.utils.logging import set_verbosity_error

from framework.errors import EXIT_DONE, EXIT_FAILED, ModelError, RecipeError
from framework.model.hub import find_folder
from framework.model.initial import find_scales
from framework.model.load import build_meta, load_config
from framework.recipe.derive import derive
from framework.recipe.describe import describe_derived
from framework.recipe.schema import Precision, Recipe
from framework.verify.compare import (
    NUM_REFERENCES,
    TOLERANCES,
    compare,
    compare_initial,
    exceeds,
    find_bounds,
    find_loose,
    judge,
    render,
)
from framework.verify.evidence import Evidence, make_batches
from framework.verify.layout import choose_rank_device, compute_exactly, initial_weights
from framework.verify.oracle import CPU, Oracle
from framework.verify.pool import RankFailed
from framework.verify.prepare import Verification, VerifyOptions, prepare_stages
from framework.verify.sides import NARROW, Sides, describe_changes

# Share of all weights: where rounding decides the sign of more updates than this, Lion is hardly verified.
MANY_UNDECIDED = 0.05


def verify(recipe: Recipe, options: VerifyOptions) -> int:
    """Print a table of worst relative errors and return the exit code: 0 if all are within their limits, else 1.

    Raises MeshwrightError where the recipe, the model or the machine has to be changed first.
    """
    start_s = time.monotonic()
    options.check()
    set_verbosity_error()
    compute_exactly(torch.device(options.device))
    for stages, prepared in prepare_stages(recipe, options).items():
        print(describe(stages, prepared, options.steps), flush=True)
        try:
            code = run(prepared)
        except RankFailed as error:
            print(f"{error}\n\nA rank failed. {_how_to_report()}", file=sys.stderr)
            return EXIT_FAILED
        if code != EXIT_DONE:
            print(f"MISMATCH: the layout is another training run than one process. {_how_to_report()}")
            return code
    print(f"equal: this layout trains as one process does ({time.monotonic() - start_s:.0f} s)")
    return EXIT_DONE


def describe(stages: str, prepared: Verification, steps: int) -> str:
    """Text on a comparison and on what is left out. stages: their names, "" in a run without any."""
    sides = prepared.sides
    derived = derive(replace(sides.recipe, train=replace(sides.recipe.train, steps=steps)))
    lines = [
        *([f"stage         {stages}, from seeded weights"] if stages else []),
        f"model         {sides.config.model_type}, {prepared.num_parameters:,} parameters",
        describe_derived(derived),
        f"compared      {_describe_compared(sides)}",
        describe_changes(prepared.changes, steps),
        "",
    ]
    return "\n".join(lines)


def run(prepared: Verification) -> int:
    """Run both sides, print the comparison and return the exit code: 0 if they are equal, else 1.

    Raises NothingToCompare where stock transformers does not train the model, RankFailed, or an error that the ranks raised.
    """
    sides, num_parameters = prepared.sides, prepared.num_parameters
    dtype = _narrowest(sides.recipe.precision)
    found, expected = sides.run()
    if not _start_alike(sides):
        return EXIT_FAILED
    if dtype in NARROW:
        return _judge_narrow(sides, found, expected, num_parameters)
    rows = compare(found, expected)
    print(render(rows, TOLERANCES[dtype]))
    _report_undecided(expected, num_parameters)
    print()
    if not exceeds(rows, TOLERANCES[dtype]):
        return EXIT_DONE
    return _explain(sides, found, expected) if dtype == "fp32" else EXIT_FAILED


def _start_alike(sides: Sides) -> bool:
    """Whether the initial values of both sides are distributed as stock's own. Prints the parameters that are not."""
    errors = compare_initial(initial_weights(sides.config, sides.recipe.train.seed, sides.device), sides.config)
    wrong = [name for name, error in errors.items() if error > 1]
    if wrong:
        print(f"initial values of {len(wrong)} parameters are not distributed as stock's: {_shorten(wrong)}\n")
    return not wrong


def _judge_narrow(sides: Sides, found: Evidence, expected: Evidence, num_parameters: int) -> int:
    """Compare the layout with the oracle in fp32, within bounds that are measured on the oracle in the narrowest dtype."""
    dtype = _narrowest(sides.recipe.precision)
    # Its own precision where that is the narrowest: with its loss scale, and its way to keep weights.
    narrow = sides if sides.dtype == dtype else sides.in_dtype(dtype)
    truth = sides.in_dtype("fp32").run_oracle(found)
    first = expected if narrow is sides else narrow.run_oracle(found)
    references = [first, *(narrow.run_oracle(found, seed) for seed in range(1, NUM_REFERENCES))]
    rows = judge(found, references, truth, dtype)
    measured = f"each limit is measured: {NUM_REFERENCES} {dtype} runs of one process, rounded otherwise"
    print(f"beside one process in fp32; {measured}")
    print(render(rows, 0.0))
    _report_undecided(expected, num_parameters)
    loose = find_loose(find_bounds(references, truth, dtype))
    if loose:
        print(f"{dtype} says next to nothing of the gradients of {len(loose)} parameters: {_shorten(loose)}")
    print()
    return EXIT_FAILED if exceeds(rows, 0.0) else EXIT_DONE


def _explain(sides: Sides, found: Evidence, expected: Evidence) -> int:
    """Distinguish rounding from a fault where fp32 is beyond the tolerance; returns the exit code.

    It is rounding if fp64 is equal, and one process in fp32 is as far from fp64 as the layout is.
    """
    exact = sides.in_dtype("fp64")
    print("Beyond the tolerance in fp32. The same run in fp64, where rounding is 1e-16 and not 1e-7:")
    try:
        found_exact, truth = exact.run()
    except ModelError as error:
        print(f"it cannot be repeated, so that rounding and a fault are not told apart: {error}\n")
        return EXIT_FAILED
    rows = compare(found_exact, truth)
    print(f"{render(rows, TOLERANCES['fp64'])}\n")
    if exceeds(rows, TOLERANCES["fp64"]):
        return EXIT_FAILED
    references = [expected, *(sides.run_oracle(found, seed) for seed in range(1, NUM_REFERENCES))]
    spread = judge(found, references, truth, "fp32")
    if sides.recipe.precision.moments != "fp32":
        # 1e-7 may turn a rounding of a moment, for one weight of many and by a whole spacing: a few runs do not bound that.
        spread = [row for row in spread if row.quantity == "gradient, step 1"]
    print(
        f"Equal in fp64. The fp32 layout beside it; each limit is measured: {NUM_REFERENCES} fp32 runs of one process,"
        " rounded otherwise"
    )
    print(f"{render(spread, 0.0)}\n")
    if exceeds(spread, 0.0):
        print("In fp32 the layout is farther off than rounding takes one process: a fault in fp32 alone.")
        return EXIT_FAILED
    worst, best = (max(each, key=lambda row: row.error) for each in (compare(found, expected), rows))
    where = f"{worst.error:.2e} ({worst.quantity}, {worst.where})"
    print(f"The fp32 difference is rounding: {where}, and in fp64 {best.error:.2e}")
    return EXIT_DONE


def _report_undecided(expected: Evidence, num_parameters: int) -> None:
    if not expected.undecided:
        return
    number = sum(expected.undecided.values())
    most = max(expected.undecided, key=lambda name: expected.undecided[name])
    print(
        f"{number:,} of {num_parameters:,} weights ({number / num_parameters:.2%}) have updates whose sign is rounding's, most of"
        f" them ({expected.undecided[most]:,}) in {most}: there the sign is taken from the layout"
    )
    if number > MANY_UNDECIDED * num_parameters:
        print(f"That is more than {MANY_UNDECIDED:.0%}: of these weights only the size of the update is verified")


def _narrowest(precision: Precision) -> str:
    words = (precision.compute, precision.master, precision.reduce)
    return next(word for word in (*NARROW, "fp32", "fp64") if word in words)


def _describe_compared(sides: Sides) -> str:
    recipe, world = sides.recipe, derive(sides.recipe).world
    device = recipe.launch.device
    _, backend = choose_rank_device(device, 0, world)
    where = "CPU ranks over gloo" if device == "cpu" else f"{torch.cuda.get_device_name(0)}, ranks over {backend}"
    return f"{sides.dtype} on {where}, zero.stage {recipe.zero.stage}, {recipe.optim.name}, uneven loss masks"


def _shorten(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _how_to_report() -> str:
    return (
        "This is a fault of Meshwright, not of your recipe: please open an issue with this output and that of\n"
        "`meshwright check` for the same overrides. "
        f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    )


# --- coordinates

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
    find_scales(build_meta(config), recipe.model.mup_base)  # raises where there is no muP
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
