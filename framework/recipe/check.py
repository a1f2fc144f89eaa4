"""Check a recipe by the rules of `layout_rules`, `method_rules`, `run_rules` and `machines`, in order; and the keys that make
its layout.

A layout never changes what a run learns (docs/architecture.md), so `meshwright search` chooses its keys by predicted time.
`parallel.layout=auto` leaves them open until the run begins; rules that read one of them are asked of the chosen recipe.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from framework.recipe.derive import count_virtual_stages
from framework.recipe.files import origin_of
from framework.recipe.keys import default_of, value_of, with_value
from framework.recipe.layout_rules import EXPERT_KEYS, LAYOUT_RULES, USELESS_RULES
from framework.recipe.machines import LAUNCH_RULES
from framework.recipe.problem import Problem, Rule
from framework.recipe.run_rules import RUN_RULES
from framework.recipe.schema import Recipe
from framework.recipe.stages import find_border_problems, find_stage_problems, split_stages

RULES: tuple[Rule, ...] = (*LAYOUT_RULES, *RUN_RULES, *LAUNCH_RULES)
# Each by the name under which `--free` and `--keep` and the table of a search know it.
LAYOUT_KEYS = (
    *(f"parallel.{name}" for name in ("dp", "tp", "sequence", "pp", "cp", "context", "ep", "expert_tp")),
    *("pipeline.schedule", "pipeline.virtual_stages"),
    *("zero.stage", "zero.shard_within"),
    *("memory.activation_checkpointing", "memory.offload.activations"),
    *("memory.offload.optimizer", "memory.offload.parameters"),
    "batch.sequences_per_microbatch",
)
# Keys that are legal with some layouts only: kept there, else at their defaults.
FOLLOWING_KEYS = (
    *("parallel.overlap", *(f"parallel.{name}" for name in EXPERT_KEYS)),
    *("pipeline.layers", "pipeline.table", "pipeline.fill_bubbles"),
    *(f"zero.{name}" for name in ("accumulate", "keep_gathered", "optimizer_within", "secondary_shard")),
    *(f"zero.{name}" for name in ("quantize_gather", "quantize_reduce", "quantize_min_elements")),
    *("optim.muon.ranks_per_matrix", "memory.kept_operations", "memory.budget_gb", "memory.gathered_inputs"),
    *("memory.offload.home", "memory.offload.disk_path"),
)


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


def layout_rules() -> list[Rule]:
    """The rules that read a key of the layout."""
    return [rule for rule in RULES if reads_layout(rule.reads)]


def reads_layout(reads: Iterable[str]) -> bool:
    """Whether a rule that reads these keys or groups reads the layout."""
    return any(key == read or key.startswith(f"{read}.") for read in reads for key in LAYOUT_KEYS)


def let_rest_follow(recipe: Recipe, pinned: frozenset[str]) -> Recipe:
    """The recipe of a chosen layout, where following keys that it has no use for are at their defaults. Pinned keys stay, for the
    rules to refuse. Nothing of a searched recipe is left to `auto`."""
    if recipe.parallel.layout != "stated":
        recipe = with_value(recipe, "parallel.layout", "stated")
    # A table is a schedule beside the one that is chosen.
    recipe = _reset(recipe, {"pipeline.table"} - pinned)
    parallel, pipeline = recipe.parallel, recipe.pipeline
    unfit = set()
    if isinstance(pipeline.layers, list) and len(pipeline.layers) != parallel.pp * count_virtual_stages(pipeline):
        unfit.add("pipeline.layers")
    if isinstance(parallel.expert_hierarchical, int) and parallel.ep % parallel.expert_hierarchical:
        unfit.add("parallel.expert_hierarchical")
    while keys := (unfit | _useless(recipe)) - pinned:
        recipe, unfit = _reset(recipe, keys), set()
    return recipe


def with_layout_of(recipe: Recipe, other: Recipe) -> Recipe:
    """`recipe` with the other's layout."""
    for key in ("parallel.layout", *LAYOUT_KEYS, *FOLLOWING_KEYS):
        recipe = with_value(recipe, key, value_of(other, key))
    return recipe


def _useless(recipe: Recipe) -> set[str]:
    """Following keys that the layout has no use for."""
    found = (problem for rule in USELESS_RULES for problem in rule.find(recipe))
    return {problem.key for problem in found if problem.is_useless and problem.key in FOLLOWING_KEYS}


def _reset(recipe: Recipe, keys: Iterable[str]) -> Recipe:
    for key in keys:  # most are at their defaults already
        if value_of(recipe, key) != default_of(key):
            recipe = with_value(recipe, key, default_of(key))
    return recipe


def is_world_stated(recipe: Recipe) -> bool:
    """Whether the number of ranks follows without the degrees."""
    launch = recipe.launch
    return launch.ranks is not None or (launch.kind == "slurm" and launch.nodes is not None)
