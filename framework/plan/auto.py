"""Values that a recipe leaves to `auto`, chosen once it is composed: the device and the compute dtype of where it will run,
also on a machine that has no such device, and the layout.

A login node without a GPU plans and submits for the cluster's GPUs. Torch is not imported unless this machine is asked.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from framework.errors import RecipeError
from framework.imports import loading_libraries
from framework.recipe.check import check_recipe
from framework.recipe.compose import Composition, find_pins
from framework.recipe.derive import carry_derived, derive
from framework.recipe.problem import render_problems
from framework.recipe.schema import Launch, Precision, Recipe

Device = Literal["cpu", "cuda"]


def resolve_target(recipe: Recipe) -> Recipe:
    """The recipe with no `auto` left in launch.device and precision.compute, for planning: nothing is checked of this machine,
    and a cluster that the recipe names says what its devices are."""
    device = target_device(recipe.launch)
    if device is None and recipe.cluster.name is not None:
        device = "cpu" if recipe.cluster.device == "cpu" else "cuda"
    if device is None:
        import torch

        has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= derive(recipe).world
        device = "cuda" if has_gpus else "cpu"
    launch = replace(recipe.launch, device=device)
    return carry_derived(recipe, replace(recipe, launch=launch, precision=resolve_precision(recipe.precision, launch)))


def target_device(launch: Launch) -> Device | None:
    """The ranks' device as the recipe states it; None where it leaves that to this machine. Under SLURM it is cuda where GPUs
    are asked for, whatever the login node has."""
    if launch.device != "auto":
        return launch.device
    if launch.kind == "slurm":
        return "cuda" if launch.gres is not None else "cpu"
    return None


def resolve_precision(precision: Precision, launch: Launch) -> Precision:
    """`precision.compute` without auto: bf16 where the target multiplies it natively. Of a cluster's nodes, and of GPUs where
    there are none, only the kind is known: GPUs get bf16, CPUs fp32."""
    if precision.compute != "auto":
        return precision
    is_bf16 = launch.device == "cuda"
    if launch.kind == "local":
        import torch

        from framework.model.precision import compute_dtype

        if launch.device == "cpu" or torch.cuda.is_available():
            is_bf16 = compute_dtype(precision, torch.device(launch.device)) == torch.bfloat16
    return replace(precision, compute="bf16" if is_bf16 else "fp32")


def require_layout(composition: Composition, overrides: Iterable[str], recipe_dirs: Sequence[Path]) -> Recipe:
    """The recipe with a layout: with parallel.layout=auto the chosen one, named in a line on stderr, for stdout may be parsed.
    So are choices of which an experiment has changed keys. RecipeError with all problems, or where no layout can be trained."""
    recipe = composition.require()
    for note in composition.notes:
        print(note, file=sys.stderr, flush=True)
    if recipe.parallel.layout == "stated":
        return recipe
    with loading_libraries():  # which a recipe that states its layout need not wait for
        from framework.plan.find import choose_layout

    chosen, line = choose_layout(recipe, find_pins(composition, overrides, recipe_dirs))
    print(line, file=sys.stderr, flush=True)
    problems = check_recipe(chosen, composition.origins)
    if problems:  # rules that no layout is asked: what they say is wrong whatever the layout is
        raise RecipeError(render_problems(problems))
    return chosen
