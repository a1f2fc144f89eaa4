"""Stages of a run (`train.stages`): from a step on, other data, batches, lengths, schedules or frozen parameters.

A stage has keys of the recipe, and keeps all values of the stage before that it does not state. `split_stages` makes a recipe of
each, which knows nothing of stages: it is that of a branch (`run.start_from`) that begins where the stage before has ended. So
`train.steps` is the stage's last step, and the schedule of the learning rate still ends with the run, unless the stage states a
key of it: then it is over the steps of the stage.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from framework.recipe.convert import to_recipe
from framework.recipe.derive import count_sequences
from framework.recipe.keys import flatten, matches
from framework.recipe.problem import Problem
from framework.recipe.schema import Batch, LearningRateSchedule, Recipe, TrainStage

# The groups of which a stage has keys. Of some only a few: weights, shapes and tokens stay those of the run.
GROUPS = ("data", "batch", "model", "optim", "memory")
MAY_STATE = (
    *("data.sources.*", "data.pack", "data.overlong", "data.train_on"),
    *("model.freeze", "model.config.*", "batch.*", "optim.*", "memory.*"),
)
UNTIL = ("until_step", "until_share", "until_tokens")
STATEMENTS = ("sequences_per_step", "tokens_per_step")


@dataclass(frozen=True)
class RunStage:
    """A stage of a run: it trains steps `start` + 1 to `stop`. name: empty in a run without stages. recipe: of the stage, without
    any; whole: of the run."""

    name: str
    recipe: Recipe
    whole: Recipe
    start: int
    stop: int
    is_last: bool = True

    @property
    def num_tokens(self) -> int:
        """Tokens of the stage."""
        return (self.stop - self.start) * tokens_per_step(self.recipe.batch)


def split_stages(recipe: Recipe) -> tuple[RunStage, ...]:
    """The stages of a checked recipe, in order; one for a run without any."""
    if not recipe.train.stages:
        return (RunStage("", recipe, recipe, 0, recipe.train.steps),)
    found, tokens, start = list[RunStage](), 0, 0
    was = replace(recipe, train=replace(recipe.train, stages={}))
    for name, stage in recipe.train.stages.items():
        was, _ = apply_stage(was, stage)
        stop = find_stop(stage, recipe.train.steps, start, tokens, was)
        was = replace(was, optim=replace(was.optim, schedule=_place_schedule(was.optim.schedule, stage, start, stop)))
        schedule = was.optim.schedule
        if schedule.stop_step is None:
            schedule = replace(schedule, stop_step=recipe.train.steps)
        own = replace(was, train=replace(was.train, steps=stop), optim=replace(was.optim, schedule=schedule))
        found.append(RunStage(name, own, recipe, start, stop, len(found) + 1 == len(recipe.train.stages)))
        tokens, start = tokens + found[-1].num_tokens, stop
    return tuple(found)


def stage_after(recipe: Recipe, step: int) -> RunStage:
    """The stage that trains the step after `step`; behind the last step of the run its last one."""
    stages = split_stages(recipe)
    return next((each for each in stages if step < each.stop), stages[-1])


def stage_of(recipe: Recipe, step: int) -> RunStage:
    """The stage that has trained `step`; of step 0 the first."""
    return stage_after(recipe, max(0, step - 1))


def count_tokens(recipe: Recipe) -> int:
    """Tokens of the whole run."""
    return sum(each.num_tokens for each in split_stages(recipe))


def describe_stage(stage: RunStage) -> str:
    """Steps, tokens and batch of a stage in a line."""
    batch = stage.recipe.batch
    sequences = f"{count_sequences(batch)} sequences of {batch.context} tokens"
    return f"steps {stage.start + 1:,} to {stage.stop:,}, {stage.num_tokens:,} tokens, {sequences} a step"


def tokens_per_step(batch: Batch) -> int:
    """Tokens of one optimizer step."""
    return count_sequences(batch) * batch.context


def settle_borders(recipe: Recipe) -> Recipe:
    """The recipe with the step of each border in place of shares and tokens, which would move with train.steps."""
    borders = {each.name: each.stop for each in split_stages(recipe)[:-1]}
    stages = {
        name: replace(stage, until_step=borders.get(name), until_share=None, until_tokens=None)
        for name, stage in recipe.train.stages.items()
    }
    return replace(recipe, train=replace(recipe.train, stages=stages))


def apply_stage(recipe: Recipe, stage: TrainStage) -> tuple[Recipe, list[Problem]]:
    """The recipe with the values of a stage, and the mistakes in these; wrong ones are the schema's defaults."""
    tree = asdict(recipe)
    stated = [name for name in STATEMENTS if name in stage.batch]
    if len(stated) == 1:  # else a batch in tokens and one in sequences would stand beside each other
        tree["batch"] |= dict.fromkeys(STATEMENTS)
    return to_recipe(_merge(tree, _parts(stage)), {})


def find_stop(stage: TrainStage, num_steps: int, start: int, tokens: int, recipe: Recipe) -> int:
    """The last step of a stage that begins behind `start` steps and `tokens` tokens, with the values of `recipe`."""
    if stage.until_share is not None:
        return round(stage.until_share * num_steps)
    if stage.until_tokens is not None:
        return start - (tokens - stage.until_tokens) // tokens_per_step(recipe.batch)  # rounded up
    return num_steps if stage.until_step is None else stage.until_step


def find_stage_problems(recipe: Recipe) -> Iterator[Problem]:
    """Mistakes in stages by themselves: keys that no stage has, values that do not fit, borders that are missing or overlap."""
    found, was = list[Problem](), replace(recipe, train=replace(recipe.train, stages={}))
    *_, last = recipe.train.stages or [""]
    for name, stage in recipe.train.stages.items():
        path = f"train.stages.{name}"
        was, wrong = apply_stage(was, stage)
        found += [_in_stage(each, path, stage) for each in wrong]
        others = {each.key for each in wrong}
        for key, value in flatten(_parts(stage)).items():
            if key not in others and not any(matches(key, pattern) for pattern in MAY_STATE):
                fix = f"state {key} outside of train.stages"
                found.append(Problem(f"{path}.{key}", value, "is the same in all stages of a run", fix))
        if recipe.data.bpe_vocab is not None and not wrong and list(was.data.read) != list(recipe.data.read):
            names = ", ".join(recipe.data.read)
            message = f"the tokenizer is trained on the sources that are read, {names}: here they are others"
            found.append(Problem(f"{path}.data", None, message, "a small weight, such as 0.001, in place of 0"))
        stated = [each for each in UNTIL if getattr(stage, each) is not None]
        if len(stated) > 1:
            found.append(
                Problem(path, None, f"its end is stated twice: {' and '.join(stated)}", "leave one of them out")
            )
        elif not stated and name != last:
            found.append(Problem(path, None, "nothing says when it ends", f"{path}.until_share=0.8, say"))
    yield from found


def find_border_problems(recipe: Recipe) -> Iterator[Problem]:
    """Stages that overlap, or do not end with the run. Reads stages without other mistakes."""
    steps, stages = recipe.train.steps, split_stages(recipe)
    for each in stages:
        stage, path = recipe.train.stages[each.name], f"train.stages.{each.name}"
        key = next((name for name in UNTIL if getattr(stage, name) is not None), None)
        where, value = (f"{path}.{key}", getattr(stage, key)) if key else (path, None)
        if each.stop <= each.start:
            message = f"it ends with step {each.stop:,} and begins behind step {each.start:,}, with the end of the stage before"
            yield Problem(where, value, message, "ends in ascending order")
        elif each.stop > steps:
            yield Problem(
                where, value, f"it ends with step {each.stop:,} of a run of train.steps={steps}", f"at most {steps}"
            )
        elif each.is_last and each.stop != steps:
            message = f"nothing says what is trained behind its last step {each.stop:,}, up to train.steps={steps}"
            yield Problem(where, value, message, f"leave it out (~{where}), or train.steps={each.stop}")


def _place_schedule(schedule: LearningRateSchedule, stage: TrainStage, start: int, stop: int) -> LearningRateSchedule:
    """The schedule of a stage: over its own steps where it states a key of it, but for bounds that it states."""
    own = stage.optim.get("schedule", {})
    if own and "start_step" not in own:
        schedule = replace(schedule, start_step=start)
    if own and "stop_step" not in own:
        schedule = replace(schedule, stop_step=stop)
    return schedule


def _in_stage(problem: Problem, path: str, stage: TrainStage) -> Problem:
    """A mistake in a stage's values, with the stage's place before its key and before keys that its fix names."""
    fix = re.sub(rf"\b({'|'.join(GROUPS)})(?=[.][a-z])", rf"{path}.\1", problem.fix)
    return replace(problem, key=f"{path}.{problem.key}", fix=fix)


def _parts(stage: TrainStage) -> dict[str, Any]:
    return {group: values for group in GROUPS if (values := getattr(stage, group))}


def _merge(tree: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The tree with values in place of its own; mappings are joined."""
    joined = dict(tree)
    for name, value in values.items():
        is_group = isinstance(value, Mapping) and isinstance(joined.get(name), Mapping)
        joined[name] = _merge(joined[name], value) if is_group else value
    return joined
