"""`train.epochs`: a run's length in passes over its text, turned into `train.steps` once the text is prepared."""

import math
from dataclasses import replace

from framework.data.pack import count_samples
from framework.data.prepare import prepare
from framework.data.prepared import Prepared
from framework.errors import RecipeError
from framework.launch.directory import RunDirectory
from framework.launch.resume import Change, find_changes
from framework.recipe.check import check_recipe
from framework.recipe.compose import load_recipe
from framework.recipe.derive import derive
from framework.recipe.problem import render_problems
from framework.recipe.schema import Recipe


def settle_steps(recipe: Recipe) -> tuple[Recipe, Prepared | None]:
    """The recipe with `train.steps` for its `train.epochs`, which is null then: recipe.yaml has one word on the run's length; and
    the data, which is prepared for that. A recipe that states its steps comes back as it is, and nothing is prepared.

    Says what the passes over each source come to, for weights repeat some and cut others short. Raises RecipeError where the
    schedule does not fit so many steps.
    """
    if recipe.train.epochs is None:
        return recipe, None
    prepared = prepare(recipe)
    steps, passes = count_steps(recipe, prepared)
    settled = replace(recipe, train=replace(recipe.train, steps=steps, epochs=None))
    problems = check_recipe(settled, {})
    if problems:
        raise RecipeError(f"train.epochs={recipe.train.epochs:g} sets train.steps={steps}\n{render_problems(problems)}")
    each = ", ".join(f"{count:.2f} of {name}" for name, count in passes.items())
    print(f"epochs   {recipe.train.epochs:g} are {steps:,} steps: passes {each}")
    return settled, prepared


def settle_length(
    run: RunDirectory, recipe: Recipe, changes: list[Change]
) -> tuple[Recipe, list[Change], Prepared | None]:
    """`settle_steps` for a run that goes on: the changes are then those of recipe.yaml, which keeps no epochs."""
    if recipe.train.epochs is None:
        return recipe, changes, None
    settled, prepared = settle_steps(recipe)
    keys = ("train.steps", "train.epochs")
    length = [change for change in find_changes(load_recipe(run.recipe), settled) if change.key in keys]
    return settled, [*length, *(change for change in changes if change.key not in keys)], prepared


def count_steps(recipe: Recipe, prepared: Prepared) -> tuple[int, dict[str, float]]:
    """(steps, passes over each source) for `train.epochs` passes over as many sequences as all sources have together."""
    assert recipe.train.epochs is not None, "called for recipes with train.epochs"
    derived, weights = derive(recipe), sum(source.weight for source in prepared.sources)
    sizes = {
        source.name: count_samples(source.streams["train"].num_tokens, derived.context) for source in prepared.sources
    }
    steps = max(1, math.ceil(recipe.train.epochs * sum(sizes.values()) / derived.sequences_per_step))
    read = steps * derived.sequences_per_step
    return steps, {
        source.name: read * source.weight / weights / max(1, sizes[source.name]) for source in prepared.sources
    }
