"""`meshwright verify --strict`: the recipe as it is, or a refusal that says what would have to be left out.

Its own sizes, dtypes, ranks and choices are run, `torch.compile` too. Random tokens take the place of its data, and its first
steps that of the whole run: nothing else.
"""

import os
from dataclasses import replace

import torch
from torch import nn
from transformers import PretrainedConfig

from framework.errors import RecipeError
from framework.model.precision import DTYPES, compute_dtype
from framework.recipe.derive import derive
from framework.recipe.schema import Recipe
from framework.verify.left_out import ChangedValue, find_changes, find_dropout, find_lots
from framework.verify.options import Options
from framework.verify.small import CPU_ATTENTION, CPU_EXPERTS

# A few minutes: a core does 1e10 to 1e11 floating-point operations a second, a GPU a thousand times as many.
MAX_FLOPS = {"cpu": 3e13, "cuda": 1e16}
MAX_RANKS = 16
# Bytes of a parameter on each side: weights, gradients, master, two moments, copies, all in fp32; activations come on top.
BYTES_PER_PARAMETER = 32


def keep_whole(recipe: Recipe, config: PretrainedConfig, model: nn.Module, options: Options) -> Recipe:
    """The recipe with its precision explicit, to run on this machine. model: of the config. Raises RecipeError that lists
    everything against it."""
    derived = derive(recipe)
    compute = compute_dtype(recipe.precision, torch.device(options.device))
    chosen = recipe.precision.compute
    word = chosen if chosen != "auto" else next(name for name, dtype in DTYPES.items() if dtype == compute)
    kept = replace(
        recipe,
        precision=replace(recipe.precision, compute=word),  # type: ignore[arg-type]
        launch=replace(recipe.launch, kind="local", ranks=derived.world, device=options.device),
    )
    problems = [str(change) for change in find_dropout(config)]
    problems += [str(change) for change in _find_absent(recipe, options, word)]
    problems += find_lots(model, word)
    problems += _find_too_large(recipe, sum(parameter.numel() for parameter in model.parameters()), options)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise RecipeError(
            f"--strict leaves nothing out, and this recipe cannot be verified whole here:\n{listed}\n"
            "Change these keys, or verify without --strict, which names what it leaves out"
        )
    changes = [change for change in find_changes(recipe, kept, {}) if change.before != "auto"]
    assert not changes, f"--strict has changed {', '.join(map(str, changes))}"
    return kept


def _find_absent(recipe: Recipe, options: Options, dtype: str) -> list[ChangedValue]:
    """The values of the recipe that a verification cannot run."""
    absent = []
    model = recipe.model
    if model.weights is not None:
        absent.append(ChangedValue("model.weights", model.weights, None, "both sides start from seeded weights"))
    if recipe.zero.shard_within == "node":
        absent.append(
            ChangedValue("zero.shard_within", "node", None, "all ranks are on this machine: state the degree")
        )
    if options.device == "cpu" and model.attention not in CPU_ATTENTION:
        absent.append(ChangedValue("model.attention", model.attention, "auto", "it needs --device cuda"))
    if options.device == "cpu" and model.experts not in CPU_EXPERTS:
        absent.append(ChangedValue("model.experts", model.experts, "auto", "it needs --device cuda"))
    if recipe.precision.master == "fp64" and dtype != "fp64":
        absent.append(ChangedValue("precision.master", "fp64", "fp32", f"the oracle's masters are fp32 beside {dtype}"))
    return absent


def _find_too_large(recipe: Recipe, num_parameters: int, options: Options) -> list[str]:
    derived = derive(recipe)
    flops = 6.0 * num_parameters * derived.tokens_per_step * options.steps
    problems = []
    if flops > MAX_FLOPS[options.device]:
        problems.append(
            f"{num_parameters:,} parameters on {derived.tokens_per_step:,} tokens a step, {options.steps} steps: {flops:.0e}"
            f" floating-point operations on each side, more than the {MAX_FLOPS[options.device]:.0e} that --device"
            f" {options.device} may take"
        )
    needed = num_parameters * BYTES_PER_PARAMETER * (derived.world + 1)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        problems.append(
            f"about {needed / 2**30:.0f} GiB for {derived.world} ranks, of {available / 2**30:.0f} GiB here"
        )
    if derived.world > MAX_RANKS:
        problems.append(f"{derived.world} ranks, more than the {MAX_RANKS} that one machine runs here")
    return problems
