"""Stages of a run (`train.stages`): from a step on, other data, batches, lengths, schedules or frozen parameters.

A stage has keys of the recipe, and keeps all values of the stage before that it does not state. `split_stages` makes a recipe of
each, which knows nothing of stages: it is that of a branch (`run.start_from`) that begins where the stage before has ended. So
`train.steps` is the stage's last step, and the schedule of the learning rate still ends with the run, unless the stage states a
key of it: then it is over the steps of the stage.

A ramp is several stages, with equal differences between their values and about equally many tokens in each. It is spelled out
where a recipe is split: nothing else knows of ramps.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from itertools import accumulate
from statistics import harmonic_mean
from typing import Any

from framework.recipe.convert import to_recipe
from framework.recipe.derive import count_sequences, divisors
from framework.recipe.keys import flatten, matches, nest
from framework.recipe.problem import Problem
from framework.recipe.schema import Batch, LearningRateSchedule, Recipe, TrainStage

# The groups of which a stage has keys. Of some only a few: weights, shapes and tokens stay those of the run.
GROUPS = ("data", "batch", "model", "optim", "memory")
MAY_STATE = (
    *("data.sources.*", "data.pack", "data.overlong", "data.train_on"),
    *("model.freeze", "model.config.*", "batch.*", "optim.*", "memory.*"),
)
# Numbers that grow over a stage with a ramp, where it states them.
RAMPED = (
    *("batch.context", "batch.sequences_per_step", "batch.tokens_per_step"),
    *("model.config.*", "data.sources.*.weight"),
)
UNTIL = ("until_step", "until_share", "until_tokens")
STATEMENTS = ("sequences_per_step", "tokens_per_step")


@dataclass(frozen=True)
class RunStage:
    """A stage of a run: it trains steps `start` + 1 to `stop`. name: empty in a run without stages. recipe: of the stage, without
    any; whole: of the run. key: in `train.stages`, its own name or that of its ramp."""

    name: str
    recipe: Recipe
    whole: Recipe
    start: int
    stop: int
    is_last: bool = True
    key: str = ""

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
    for key, stage in recipe.train.stages.items():
        parts = {key: stage} if stage.ramp is None else _spell_out(key, stage, recipe.train.steps, start, tokens, was)
        for name, part in parts.items():
            was, _ = apply_stage(was, part)
            stop = find_stop(part, recipe.train.steps, start, tokens, tokens_per_step(was.batch))
            was = replace(
                was, optim=replace(was.optim, schedule=_place_schedule(was.optim.schedule, part, start, stop))
            )
            schedule = was.optim.schedule
            if schedule.stop_step is None:
                schedule = replace(schedule, stop_step=recipe.train.steps)
            own = replace(was, train=replace(was.train, steps=stop), optim=replace(was.optim, schedule=schedule))
            found.append(RunStage(name, own, recipe, start, stop, False, key))
            tokens, start = tokens + found[-1].num_tokens, stop
    return (*found[:-1], replace(found[-1], is_last=True))


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
    borders = {each.key: each.stop for each in split_stages(recipe)[:-1]}
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


def find_stop(stage: TrainStage, num_steps: int, start: int, tokens: int, pace: float) -> int:
    """The last step of a stage that begins behind `start` steps and `tokens` tokens. pace: its tokens per step."""
    if stage.until_share is not None:
        return round(stage.until_share * num_steps)
    if stage.until_tokens is not None:
        return start - int((tokens - stage.until_tokens) // pace)  # rounded up
    return num_steps if stage.until_step is None else stage.until_step


def find_stage_problems(recipe: Recipe) -> Iterator[Problem]:
    """Mistakes in stages by themselves: keys that no stage has, values that do not fit, borders that are missing or overlap."""
    found, was = list[Problem](), replace(recipe, train=replace(recipe.train, stages={}))
    *_, last = recipe.train.stages or [""]
    for name, stage in recipe.train.stages.items():
        path = f"train.stages.{name}"
        before, (was, wrong) = was, apply_stage(was, stage)
        found += [_in_stage(each, path) for each in wrong]
        if stage.ramp is not None and not wrong:
            found += _find_ramp_problems(path, stage.ramp, _find_ramped(stage, before))
            if name == last:
                message = "the values with which the run ends have no stage: a ramp would move when the run gets longer"
                found.append(
                    Problem(
                        f"{path}.ramp", stage.ramp, message, "an end for it, and a stage behind it that states nothing"
                    )
                )
            taken = recipe.train.stages.keys() & set(_name_parts(name, stage.ramp))
            found += [
                Problem(f"train.stages.{each}", None, f"{path}.ramp makes a stage of this name") for each in taken
            ]
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
    steps = recipe.train.steps
    for each in split_stages(recipe):
        stage, path = recipe.train.stages[each.key], f"train.stages.{each.key}"
        key = next((name for name in UNTIL if getattr(stage, name) is not None), None)
        where, value = (f"{path}.{key}", getattr(stage, key)) if key else (path, None)
        if each.stop <= each.start and each.name != each.key:
            message = f"{each.name} has no step: it begins behind step {each.start:,} and ends with step {each.stop:,}"
            yield Problem(f"{path}.ramp", stage.ramp, message, "fewer parts, or a later end")
            return
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
        schedule, key = each.recipe.optim.schedule, f"{path}.optim.schedule"
        falls = schedule.name in ("linear", "cosine", "wsd") and not schedule.final_ratio  # a plugin's shape is its own
        if falls and (schedule.stop_step or steps) <= each.start:
            message = (
                f"its learning rate is 0: the schedule of a stage before has ended with step {schedule.stop_step:,}"
            )
            yield Problem(key, None, message, f"{key}.warmup_steps=0, a schedule of its own; or a final_ratio before")


def _name_parts(key: str, ramp: int) -> list[str]:
    return [f"{key}_{number}" for number in range(1, ramp + 1)]


def _spell_out(
    key: str, stage: TrainStage, num_steps: int, start: int, tokens: int, was: Recipe
) -> dict[str, TrainStage]:
    """The stages that a ramp is, each with the values and the end that it would state without one. was: the recipe before; other
    arguments as of `find_stop`."""
    assert stage.ramp is not None, "called for a ramp"
    parts, ramped = [], _find_ramped(stage, was)
    for number in range(1, stage.ramp + 1):
        share = Fraction(number, stage.ramp)
        values = nest({name: _between(*ends, share) for name, ends in ramped.items() if ends[0] is not None})
        parts.append(replace(stage, ramp=None, **_merge(_parts(stage), values)))
    paces = [tokens_per_step(apply_stage(was, each)[0].batch) for each in parts]
    stop = find_stop(stage, num_steps, start, tokens, harmonic_mean(paces))
    # Equally many tokens are steps in proportion to 1 / pace.
    shares = list(accumulate(1 / pace for pace in paces))
    stops = [start + round((stop - start) * each / shares[-1]) for each in shares]
    optim = stage.optim
    if "schedule" in optim:  # over the whole ramp
        optim = {**optim, "schedule": {"start_step": start, "stop_step": stop, **optim["schedule"]}}
    ends: list[dict[str, Any]] = [{"until_step": each, "until_share": None, "until_tokens": None} for each in stops]
    named = zip(_name_parts(key, stage.ramp), parts, ends, strict=True)
    return {name: replace(part, optim=optim, **end) for name, part, end in named}


def _find_ramped(stage: TrainStage, was: Recipe) -> dict[str, tuple[Any, Any]]:
    """{key: (value before, value at the end)} of the numbers that grow over a stage; None where nothing says the first."""
    sizes = {
        "batch.sequences_per_step": count_sequences(was.batch),
        "batch.tokens_per_step": tokens_per_step(was.batch),
    }
    known = flatten(asdict(was)) | sizes
    return {
        key: (value if _is_number(value := known.get(key, 0 if key.startswith("data.") else None)) else None, stop)
        for key, stop in flatten(_parts(stage)).items()
        if _is_number(stop) and any(matches(key, pattern) for pattern in RAMPED)
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _between(first: float, stop: float, share: Fraction) -> float:
    """A number between two; whole between whole ones. As decimal numbers, which weights are."""
    low, high = (Fraction(str(each)) for each in (first, stop))
    value = low + (high - low) * share
    return int(value) if isinstance(first, int) and isinstance(stop, int) else float(value)


def _find_ramp_problems(path: str, ramp: int, ramped: Mapping[str, tuple[Any, Any]]) -> Iterator[Problem]:
    whole = {
        key: stop - first for key, (first, stop) in ramped.items() if isinstance(first, int) and isinstance(stop, int)
    }
    for key in (key for key, (first, _) in ramped.items() if first is None):
        yield Problem(
            f"{path}.{key}", None, "nothing says from which value it grows", f"state {key} before {path}, too"
        )
    for key in (key for key, difference in whole.items() if difference % ramp):
        best = min(divisors(math.gcd(*whole.values()))[1:], key=lambda each: abs(each - ramp), default=None)
        message = f"{key} does not go from {ramped[key][0]} to {ramped[key][1]} in {ramp} equal steps of whole numbers"
        yield Problem(f"{path}.ramp", ramp, message, f"{path}.ramp={best}" if best else "other values")
    if all(first == stop for first, stop in ramped.values()):
        message = "the stage changes none of the numbers that may grow: " + ", ".join(RAMPED)
        yield Problem(f"{path}.ramp", ramp, message, f"~{path}.ramp")


def _place_schedule(schedule: LearningRateSchedule, stage: TrainStage, start: int, stop: int) -> LearningRateSchedule:
    """The schedule of a stage: over its own steps where it states a key of it, but for bounds that it states."""
    own = stage.optim.get("schedule", {})
    if own and "start_step" not in own:
        schedule = replace(schedule, start_step=start)
    if own and "stop_step" not in own:
        schedule = replace(schedule, stop_step=stop)
    return schedule


def _in_stage(problem: Problem, path: str) -> Problem:
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
