"""Is a recipe's layout one that ranks can build? Asked before anything is written, where the answer costs seconds and no GPU."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PretrainedConfig

from framework.data.open_data import find_sequence_problems
from framework.errors import MeshwrightError, RecipeError
from framework.model.adapters import is_adapter
from framework.model.hub import find_weights, read_generation
from framework.model.initial import refuse_uninitialised
from framework.model.load import load_config, refuse_unaligned_experts
from framework.model.probe import refuse_mixed_dtypes
from framework.model.weights import refuse_other_weights, refuse_unwritable_configs
from framework.parallel.tensor.probe import refuse_unordered_layers
from framework.plan.plan import Plan, make_plan
from framework.plan.text import show_bytes
from framework.recipe.origins import origin_of
from framework.recipe.problem import render_problems
from framework.recipe.schema import Recipe
from framework.recipe.stages import split_stages

# The groups of keys that a layout depends on.
GROUPS = ("model", "adapter", "batch", "parallel", "pipeline", "zero", "memory", "precision", "optim")


def check_layout(recipe: Recipe, origins: Mapping[str, str] | None = None) -> Plan:
    """The recipe's plan, with each rank of one pipeline laid out: ranks that differ in other coordinates are laid out alike.

    Raises what the ranks would raise: ModelError, TopologyError, RecipeError, ScheduleError. Asks the hub for a config that is
    not here yet. origins: where the recipe's keys were set, for messages.
    """
    config = load_config(recipe.model)
    problems = [
        replace(problem, origin=origin_of(origins or {}, problem.key) if origins else "")
        for problem in find_sequence_problems(recipe, config)
    ]
    try:
        plan = lay_out_ranks(recipe, config)
    except MeshwrightError as error:
        if not problems:
            raise
        raise RecipeError(f"{render_problems(problems)}\n\n{error}") from error
    if problems:
        raise RecipeError(render_problems(problems))
    refuse_unwritable_configs(plan.whole)
    return plan


def check_weights(plan: Plan) -> None:
    """Raises ModelError where the pretrained weights that a new run begins with are here and are not this model's, as ranks would
    that read them. Reads the files' headers."""
    folder = find_weights(plan.recipe.model)
    if folder is not None:
        refuse_other_weights(folder, plan.whole, [name for name in plan.whole.state_dict() if not is_adapter(name)])
        read_generation(plan.whole, folder)


def check_stages(recipe: Recipe) -> list[Plan]:
    """The plan of the recipe, and those of its stages. Raises as `check_layout`, and RecipeError for a stage of other shapes."""
    plans = [check_layout(recipe)]
    for stage in split_stages(recipe) if recipe.train.stages else ():
        try:
            plans.append(check_layout(stage.recipe))
        except RecipeError as error:
            raise RecipeError(f"stage {stage.name}: {error}") from error
        shapes, others = (
            {name: each.shape for name, each in plan.whole.named_parameters()} for plan in (plans[0], plans[-1])
        )
        if other := next((name for name in shapes | others if shapes.get(name) != others.get(name)), None):
            raise RecipeError(
                f"train.stages.{stage.name}.model.config: {other} is {list(others.get(other, ()))} there and"
                f" {list(shapes.get(other, ()))} before: a stage keeps the shapes of the run; state such keys outside of it"
            )
    return plans


def check_layouts(recipes: Sequence[Recipe]) -> Plan:
    """The plan that holds most bytes a rank. Runs of a sweep that differ in nothing that a layout depends on are planned once."""
    different = {
        repr([recipe.data.isolates, recipe.train.stages, *(getattr(recipe, name) for name in GROUPS)]): recipe
        for recipe in recipes
    }
    return max((plan for recipe in different.values() for plan in check_stages(recipe)), key=most_bytes)


def lay_out_ranks(recipe: Recipe, config: PretrainedConfig) -> Plan:
    """`check_layout` of a model's config, with what ranks find out in their first step: do kernels take the widths of experts, do
    layers run in an order in which tokens can be divided, has each parameter an initial value?"""
    plan = make_plan(recipe, config)
    is_dispatched = (
        plan.derived.ep > 1 or plan.derived.expert_tp < plan.derived.tp or recipe.model.expert_capacity is not None
    )
    for rank in plan.topology.ranks("pp", 0):
        for stage in plan.of_rank(rank).stages:
            if not is_dispatched and (plan.device.type == "cpu" or plan.compute_dtype == torch.bfloat16):
                refuse_unaligned_experts(stage.model.model, plan.compute_dtype)
    if plan.derived.tp > 1 and recipe.parallel.sequence:
        refuse_unordered_layers(config)
    if plan.device.type == "cpu":
        refuse_mixed_dtypes(plan.whole, config, plan.compute_dtype)
    if recipe.model.weights is None:
        refuse_uninitialised(config)
    return plan


def most_bytes(plan: Plan) -> int:
    """The most memory that a rank is planned to hold."""
    return max(plan.memory(rank).reserved for rank in plan.topology.ranks("pp", 0))


def describe_need(plan: Plan) -> str:
    """The model's size and the most memory that a rank is planned to hold, in a line."""
    return f"{plan.size.total:,} parameters in {plan.recipe.precision.compute}, at most {show_bytes(most_bytes(plan))} a rank"
