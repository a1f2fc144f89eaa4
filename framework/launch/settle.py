"""Settle: the launching process decides once what a recipe leaves open, so that ranks do not decide each for itself.

A node whose GPUs are dead would else train on its CPUs among GPU ranks, two kinds of CPU compute in two dtypes, and each rank
ask the hub for the newest weights. recipe.yaml holds the decisions; no rank ever sees `auto`.
"""

import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from framework.data.prepare import prepare
from framework.data.prepared import Prepared
from framework.errors import ModelError, RecipeError, RunError
from framework.imports import loading_libraries
from framework.launch.directory import RunDirectory, find_run
from framework.launch.places import explain_errors
from framework.launch.resume import find_origin, is_folder_of_weights
from framework.lease import Lease
from framework.plan.candidate import resolve_precision, target_device
from framework.recipe.check import check_recipe
from framework.recipe.compose import load_recipe
from framework.recipe.derive import compiles, derive
from framework.recipe.environment import fill
from framework.recipe.layout_rules import find_offload_to_device
from framework.recipe.problem import render_problems
from framework.recipe.schema import Launch, Memory, Model, Pipeline, Recipe
from framework.recipe.stages import settle_borders


def settle(recipe: Recipe) -> Recipe:
    """The recipe with a device, a compute dtype and a commit of hub weights. Fetches those weights if they are not here.

    Raises RecipeError where this machine has too few GPUs for the ranks, or no compiler for memory.compile.
    """
    launch = settle_device(recipe.launch, derive(recipe).world, partial(_count_gpus, recipe.launch))
    recipe = replace(recipe, launch=launch)
    refuse_offload_to_device(recipe)
    if compiles(recipe) and launch.kind == "local":
        recipe = replace(recipe, memory=_settle_compiler(recipe))
    model = recipe.model
    if model.weights is not None:
        from framework.model.hub import pin_revision  # half a second, which few recipes need

        model = pin_revision(model)
    if model.config_file is not None:
        from framework.model.load import inline_config_file

        model = inline_config_file(model)
    loss = recipe.loss
    if loss.reference is not None:
        loss = replace(loss, reference=settle_reference(loss.reference))
    recipe = replace(recipe, precision=resolve_precision(recipe.precision, launch), model=model, loss=loss)
    return replace(recipe, pipeline=_settle_layers(recipe)) if isinstance(recipe.pipeline.layers, str) else recipe


def _settle_layers(recipe: Recipe) -> Pipeline:
    """`pipeline` with the layers of each stage in place of the run whose times they follow from: it may change, or go."""
    from framework.model.load import load_config
    from framework.plan.plan import make_plan

    plan = make_plan(recipe, load_config(recipe.model))
    if plan.pipeline.gain:
        print(f"split    {plan.pipeline.gain}")
    return plan.recipe.pipeline


def refuse_offload_to_device(recipe: Recipe) -> None:
    """Raises RecipeError where launch.device=auto has become the CPU, whose memory is the host's."""
    problems = list(find_offload_to_device(recipe)) if recipe.launch.device == "cpu" else []
    if problems:
        raise RecipeError(render_problems(problems))


def settle_reference(reference: str) -> str:
    """`loss.reference` as ranks read it: a folder of weights, fetched where it is a name of the hub, or RUN@STEP. Raises
    ModelError or RunError where there is none."""
    with loading_libraries():
        from framework.model.hub import resolve_folder

    if reference == "base" or is_folder_of_weights(reference):
        return reference
    try:
        origin = find_origin(reference, "loss.reference")
    except RunError:
        folder = find_run(reference.rpartition("@")[0] or reference)
        if folder.exists():
            raise
        try:
            return str(resolve_folder(reference, key="loss.reference"))
        except ModelError as error:
            raise ModelError(f"{error}. Nor is it a run: there is no folder {folder}") from error
    if origin.checkpoint is None:
        raise RunError(
            f"loss.reference={reference}: no checkpoint has the weights of step 0. Name a step that was saved"
        )
    if load_recipe(origin.run.recipe).adapter.is_used:
        raise RunError(
            f"loss.reference={reference} has an adapter, whose checkpoints lack the model: set it to the folder that"
            " `meshwright export RUN --merged` writes"
        )
    return str(origin)


def settle_device(launch: Launch, world: int, count_gpus: Callable[[], int]) -> Launch:
    """`launch.device` as cuda or cpu. Under SLURM it is cuda where GPUs are asked for, whatever the login node has; here, where
    there is a GPU for each of `world` ranks."""
    if launch.kind == "slurm":
        device = target_device(launch)
        assert device is not None, "SLURM's nodes are known by launch.gres"
        return replace(launch, device=device)
    if launch.device == "cpu":
        return launch
    count = count_gpus()
    if launch.device == "cuda" and count < world:
        has = f"torch sees {count or 'no'} GPU{'s' if count > 1 else ''} here" + (
            f" for {world} ranks" if count else ""
        )
        fix = f"launch.ranks={count}, launch.device=cpu or auto" if count else "launch.device=cpu or auto"
        raise RecipeError(f"launch.device=cuda, but {has}: use {fix}")
    if 0 < count < world:
        print(
            f"note     {count} of {world} ranks would have a GPU, so all train on CPUs; launch.ranks={count} uses GPUs"
        )
    return replace(launch, device="cuda" if count >= world else "cpu")


def settle_tokens(recipe: Recipe, tokenizer_folder: Path) -> Recipe:
    """The recipe whose model.config has the special tokens of the tokenizer that made the data. Raises DataError where the
    model has fewer entries than the tokenizer."""
    from framework.data.prepared import check_vocabulary
    from framework.data.tokenize import load_tokenizer, read_info
    from framework.model.generate import find_token_ids
    from framework.model.load import load_config

    model, config = recipe.model, load_config(recipe.model)
    if (info := read_info(tokenizer_folder)) is not None:
        check_vocabulary(recipe, info.vocab_size, config.get_text_config().vocab_size)
    ids = find_token_ids(config, load_tokenizer(str(tokenizer_folder)), model.weights is not None)
    known = config.to_dict()  # that of a model of several parts, such as Gemma 3, leaves the ids to its parts
    ids = {name: value for name, value in ids.items() if name in known}
    ids = {name: value for name, value in ids.items() if model.weights is None or value != known[name]}
    for name in ids.keys() & model.config.keys():
        if model.config[name] != ids[name]:
            print(f"note     model.config.{name}={ids[name]}, the tokenizer's; the recipe has {model.config[name]}")
    return replace(recipe, model=replace(model, config={**model.config, **ids}))


def settle_steps(recipe: Recipe) -> tuple[Recipe, Prepared | None]:
    """The recipe with `train.steps` for its `train.epochs`, which is null then: recipe.yaml states the run's length once; and the
    data, which is prepared for that. Where it states its steps nothing is prepared. Borders of stages become steps, which stay
    where they are when a resume has more of them.

    Prints the passes over each source, for weights repeat some and cut others short. Raises RecipeError where the schedule does
    not fit so many steps.
    """
    if recipe.train.epochs is None:
        return settle_borders(recipe), None
    prepared = prepare(recipe)
    steps, passes = count_steps(recipe, prepared)
    settled = replace(recipe, train=replace(recipe.train, steps=steps, epochs=None))
    problems = check_recipe(settled, {})
    if problems:
        raise RecipeError(f"train.epochs={recipe.train.epochs:g} sets train.steps={steps}\n{render_problems(problems)}")
    each = ", ".join(f"{count:.2f} of {name}" for name, count in passes.items())
    print(f"epochs   {recipe.train.epochs:g} are {steps:,} steps: passes {each}")
    return settle_borders(settled), prepared


def count_steps(recipe: Recipe, prepared: Prepared) -> tuple[int, dict[str, float]]:
    """(steps, passes over each source) for `train.epochs` passes over as many sequences as all sources have together, each as
    often as its own `epochs` say."""
    from framework.data.loader import open_packer  # imports torch

    assert recipe.train.epochs is not None, "called for recipes with train.epochs"
    derived, weights = derive(recipe), sum(source.weight for source in prepared.sources)
    data = recipe.data
    packer = open_packer(prepared, "train", derived.context, data.packing, data.overlong, recipe.train.seed)
    sizes = {source.name: size for source, size in zip(prepared.sources, packer.sizes, strict=True)}
    of_epoch = sum(size * (data.sources[name].epochs or 1.0) for name, size in sizes.items())
    steps = max(1, math.ceil(recipe.train.epochs * of_epoch / derived.sequences_per_step))
    read = steps * derived.sequences_per_step
    return steps, {
        source.name: read * source.weight / weights / max(1, sizes[source.name]) for source in prepared.sources
    }


def keep_pretrained(run: RunDirectory, lease: Lease, model: Model) -> None:
    """Copy the small files of the pretrained weights to the run, for its exports: their folder may be gone by then."""
    if model.weights is None:
        return
    from framework.model.hub import find_folder, keep_files

    with explain_errors(run.path), lease.replacing(run.pretrained) as made:
        keep_files(find_folder(model.weights, model.revision), made)


def _settle_compiler(recipe: Recipe) -> Memory:
    """`memory`, with compile=never in the place of `auto` where this machine lacks the compiler that torch.compile needs: for C++
    on CPUs; for C on GPUs, where Triton compiles what launches a kernel. RecipeError where it is `always`."""
    variables = {**os.environ, **fill(recipe.launch.environment, os.environ)}
    variable, default, language = ("CXX", "g++", "C++") if recipe.launch.device == "cpu" else ("CC", "gcc", "C")
    compiler = variables.get(variable, default)
    if shutil.which(compiler, path=variables.get("PATH")) is not None:
        return recipe.memory
    missing = f"there is no {language} compiler here ({compiler}), which torch.compile needs"
    fix = f"install one, name it by launch.environment.{variable}, or use memory.compile=never"
    if recipe.memory.compile == "always":
        raise RecipeError(f"memory.compile=always, but {missing}: {fix}")
    print(f"caution  memory.compile=auto is never: {missing}: {fix}", file=sys.stderr)
    return replace(recipe.memory, compile="never")


def _count_gpus(launch: Launch) -> int:
    """Number of GPUs that ranks on this machine see. Where launch.environment sets variables of CUDA, another process counts:
    CUDA reads them once in the life of a process."""
    if any(name.startswith("CUDA_") for name in launch.environment):
        program = "import torch; print(torch.cuda.device_count())"
        variables = {**os.environ, **fill(launch.environment, os.environ)}
        counted = subprocess.run(
            [sys.executable, "-P", "-c", program], env=variables, check=False, capture_output=True, text=True
        )
        return int(counted.stdout) if counted.returncode == 0 else 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
