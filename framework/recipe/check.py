"""Check a recipe by the rules of `layout_rules`, `run_rules` and `launch_rules`, in order."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from framework.recipe.launch_rules import LAUNCH_RULES
from framework.recipe.layout_keys import reads_layout
from framework.recipe.layout_rules import LAYOUT_RULES
from framework.recipe.origins import origin_of
from framework.recipe.problem import Problem, Rule, RuleBody
from framework.recipe.run_rules import RUN_RULES
from framework.recipe.schema import Recipe
from framework.recipe.stages import find_border_problems, find_stage_problems, split_stages

RULES: tuple[Rule, ...] = (*LAYOUT_RULES, *RUN_RULES, *LAUNCH_RULES)


def check_recipe(recipe: Recipe, origins: Mapping[str, str], broken: Collection[str] = ()) -> list[Problem]:
    """Check a recipe by all rules. broken: keys whose single values are wrong already, whose rules are silent."""
    problems: list[Problem] = []
    is_open = recipe.parallel.layout == "auto"  # the rules of layouts are asked of the layout that is chosen
    for rule in RULES:
        if is_open and reads_layout(rule.reads):
            continue
        wrong = [*broken, *(problem.key for problem in problems)]
        if not any(key == read or key.startswith(f"{read}.") for key in wrong for read in rule.reads):
            problems += [replace(found, origin=origin_of(origins, found.key)) for found in rule.find(recipe)]
    return problems + list(_check_stages(recipe, origins, problems, broken))


def _check_stages(
    recipe: Recipe, origins: Mapping[str, str], others: list[Problem], broken: Collection[str]
) -> Iterator[Problem]:
    """The mistakes in stages, and those that a stage's values make beside the rest. others: of the recipe without them."""
    problems = list(find_stage_problems(recipe))
    # With epochs, borders are judged when the steps are known: launch/settle.py.
    if recipe.train.stages and recipe.train.epochs is None and not (problems or others or broken):
        problems = list(find_border_problems(recipe))
        for stage in split_stages(recipe):
            if not stage.start < stage.stop <= recipe.train.steps:
                break
            path = f"train.stages.{stage.key}"
            is_part = stage.name != stage.key
            if is_part and any(each.key.startswith(f"{path}.") for each in problems):
                continue  # the parts of a ramp are alike
            where = f"{stage.name}, a part of this ramp" if is_part else "this stage"
            for found in check_recipe(stage.recipe, {}):
                fix = f"within {path}: {found.fix}" * bool(found.fix)
                message = f"in {where}: {found.message}"
                problems.append(replace(found, key=f"{path}.{found.key}", message=message, fix=fix))
    yield from (replace(each, origin=origin_of(origins, each.key)) for each in problems)


def layout_rules() -> list[tuple[tuple[str, ...], RuleBody]]:
    """The rules that read a key of the layout, with all keys or groups that they read."""
    return [(rule.reads, rule.find) for rule in RULES if reads_layout(rule.reads)]
