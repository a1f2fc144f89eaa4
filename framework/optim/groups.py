"""Learning rate and weight decay of each parameter: pure functions of the whole model's names and shapes, and of the step.

The first pattern of `optim.groups` that is found in a name wins; what no pattern takes is in the group "default". Where
a group does not state its decay it is `optim.weight_decay`, and 0 for norms, biases, A_log and D of state-space layers, and
what the model marks: decay pulls towards zero, which is not where a scale of one, an offset or the logarithm of a rate
belongs. Embeddings do decay.

The schedule is a function of s, the 0-based index of an optimizer step, so that a resume has nothing to restore. With
w = warmup_steps and n = total_steps, both s and n counted from `start_step`:

    warm-up   s < w :  peak * (s + 1) / (w + 1)      no step runs at rate zero; index w has the peak
    decay     s >= w:  peak * shape(s), from 1 towards final_ratio, which it reaches at index n, one after the last step

Both ends are open in the same way: neither the first nor the last step of a run that starts or ends at zero is wasted.
"""

import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from transformers import PreTrainedModel

from framework.errors import RecipeError
from framework.model.adapters import B, find_trained
from framework.model.initial import SAME, find_scales
from framework.model.mixtures import find_constants
from framework.model.units import Unit
from framework.optim.matrices import MatrixForm, find_matrices
from framework.recipe.schema import LearningRateSchedule, Optim, Recipe

EMPTY: Mapping[str, MatrixForm] = MappingProxyType({})
DEFAULT_GROUP = "default"
# The end of the key of a group whose matrices Muon updates.
BY_MUON = " by muon"

# The module that owns the parameter is a norm by name: input_layernorm, q_norm, norm, norm1, norm_f, ln_1, ln_f.
_NORM = re.compile(r"norm(_f|\d*)$|^ln(_|\d|$)", re.IGNORECASE)
# Rates and skip connections of state-space layers, of any shape: Mamba marks them, transformers has dropped most marks.
_STATE_SPACE = ("A_log", "D")
_LAYER_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class GroupAssignment:
    """One trained parameter: its group, its learning rate over `optim.lr`, its weight decay, and the optimizer that updates it.
    matrix: how matrices lie in it, None where none do. initial: factor of its initial values."""

    parameter: str
    group: str
    lr_ratio: float
    weight_decay: float
    optimizer: str
    matrix: MatrixForm | None = None
    initial: float = 1.0

    @property
    def key(self) -> str:
        """A key that is equal for parameters that are updated alike."""
        muon = BY_MUON if self.optimizer == "muon" else ""
        return f"{self.group} x{self.lr_ratio:g} decay {self.weight_decay:g}{muon}"


def optimizer_of(optim: Optim, key: str) -> str:
    """The name of the optimizer that updates parameters of this key."""
    return optim.name if optim.name != "muon" else "muon" if key.endswith(BY_MUON) else "adamw"


def group_trained(
    shapes: Mapping[str, tuple[int, ...]],
    freeze: Sequence[str],
    optim: Optim,
    marked: Collection[str] = (),
    matrices: Mapping[str, MatrixForm] = EMPTY,
    constants: Collection[str] = (),
) -> list[GroupAssignment]:
    """One assignment per parameter that no pattern of `model.freeze` takes. shapes: global, of the *whole* model, by name.

    matrices: of layers, which Muon updates. marked: names of parameters that the model marks with `_no_weight_decay`; constants:
    of those that it freezes itself. RecipeError for a pattern that takes nothing, and for patterns that leave nothing.
    """
    for pattern in freeze:
        if not any(re.search(pattern, name) for name in shapes):
            near = difflib.get_close_matches(pattern, shapes, n=3, cutoff=0.3)
            raise RecipeError(
                f"model.freeze: {pattern!r} matches no parameter; names look like {', '.join(near or list(shapes)[:3])}"
            )
    frozen = {name for name in shapes if name in constants or any(re.search(pattern, name) for pattern in freeze)}
    if len(frozen) == len(shapes):
        raise RecipeError("model.freeze leaves no parameter to train: take a pattern out")
    return group_parameters(
        ((name, shape, name not in frozen) for name, shape in shapes.items()), optim, marked, matrices
    )


def group_parameters(
    parameters: Iterable[tuple[str, tuple[int, ...], bool]],
    optim: Optim,
    marked: Collection[str] = (),
    matrices: Mapping[str, MatrixForm] = EMPTY,
) -> list[GroupAssignment]:
    """One assignment per trained parameter, in the order given; the frozen ones get none.

    parameters: (name, global shape, requires_grad) of the *whole* model, not of one rank, so that every rank agrees.
    RecipeError, all at once: a pattern that is no regular expression, is found in no name, or takes nothing because
    earlier groups took it all; a group by Muon of parameters that are no matrices of layers.
    """
    parameters = list(parameters)
    names = [name for name, _, _ in parameters]
    group_of = _first_matches(names, optim)
    _refuse_vectors(group_of, optim, matrices)
    assignments = []
    for name, shape, requires_grad in parameters:
        if not requires_grad:
            continue
        group = optim.groups.get(group_of.get(name, ""))
        weight_decay = group.weight_decay if group is not None else None
        if weight_decay is None:
            weight_decay = 0.0 if name in marked or is_no_weight(name, shape) else optim.weight_decay
        lr_ratio = group.lr_ratio if group is not None else 1.0
        is_matrix = not is_no_weight(name, shape) and (group is None or group.optimizer != "adamw")
        optimizer, matrix = optim.name, matrices.get(name) if is_matrix else None
        if optim.name == "muon" and matrix is None:
            optimizer = "adamw"
        key = group_of.get(name, DEFAULT_GROUP)
        assignments.append(GroupAssignment(name, key, lr_ratio, weight_decay, optimizer, matrix))
    return assignments


def _refuse_vectors(group_of: Mapping[str, str], optim: Optim, matrices: Mapping[str, MatrixForm]) -> None:
    asked = [key for key, each in optim.groups.items() if each.optimizer == "muon"]
    for key in asked:
        others = [name for name, group in group_of.items() if group == key and name not in matrices]
        if others:
            raise RecipeError(
                f"optim.groups.{key}.optimizer=muon takes {', '.join(others[:3])}{', ...' * (len(others) > 3)}: Muon updates"
                f" matrices of layers only; use optim.groups.{key}.optimizer=auto, or a narrower pattern"
            )


def is_no_weight(name: str, shape: tuple[int, ...]) -> bool:
    """Scales, offsets and rates: under two dims, or named so (biases of stacked experts [E, I], norms per head [H, D], Mamba's
    A_log [I, S])."""
    *path, own_name = name.split(".")
    if len(shape) < 2 or own_name == "bias" or own_name.endswith("_bias") or own_name in _STATE_SPACE:
        return True
    return bool(path) and _NORM.search(path[-1]) is not None


def _first_matches(names: list[str], optim: Optim) -> dict[str, str]:
    """{parameter: the first group whose pattern is found in its name}; RecipeError naming groups that take nothing."""
    taken: dict[str, str] = {}
    problems = []
    for key, group in optim.groups.items():
        where = f"optim.groups.{key}.pattern={group.pattern!r}"
        try:
            found = [name for name in names if re.search(group.pattern, name)]
        except re.error as error:
            problems.append(f"{where} is not a regular expression: {error}")
            continue
        if not found:
            near = ", ".join(_near(group.pattern, names))
            problems.append(f"{where} is found in no parameter name. Near names: {near}")
        elif all(name in taken for name in found):
            earlier = sorted({f"optim.groups.{taken[name]}" for name in found})
            problems.append(f"{where} takes nothing: {', '.join(earlier)} comes first and matches the same parameters")
        for name in found:
            taken.setdefault(name, key)
    if problems:
        raise RecipeError("\n".join(problems))
    return taken


def _near(pattern: str, names: list[str], count: int = 3) -> list[str]:
    """The names, with layer numbers as `*`, that are most like the pattern."""
    shapes_of_names = dict.fromkeys(_LAYER_INDEX.sub("*", name) for name in names)
    words = [word for word in re.split(r"[^A-Za-z0-9_]+", pattern) if word] or [pattern]

    def likeness(name: str) -> float:
        parts = name.split(".")
        return sum(max(difflib.SequenceMatcher(None, word, part).ratio() for part in parts) for word in words)

    return sorted(shapes_of_names, key=likeness, reverse=True)[:count]


# Keyed by a schedule's name: from the share of the way between warm-up and end that is done, the share of the way between the
# last rate and the peak.
SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: (1 + math.cos(math.pi * progress)) / 2,
}


def learning_rate(step: int, schedule: LearningRateSchedule, peak: float, total_steps: int) -> float:
    """The rate used by the optimizer step of 0-based index `step`; beyond the schedule's end it stays at its last value.
    total_steps: of the run, with which a schedule ends that does not state its end."""
    stop_step = total_steps if schedule.stop_step is None else schedule.stop_step
    # Within the schedule, from here on.
    step, num_steps = max(0, step - schedule.start_step), max(0, stop_step - schedule.start_step)
    warmup_steps = schedule.warmup_steps
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    match schedule.name:
        case "constant":
            return peak
        case "wsd":
            progress = _progress(step, wsd_decay_start(schedule, num_steps), num_steps)
            shape = _decay(progress, schedule.decay_shape, schedule.final_ratio)
        case _:
            shape = SHAPES[schedule.name](_progress(step, warmup_steps, num_steps))
    return peak * (schedule.final_ratio + (1 - schedule.final_ratio) * shape)


def decay_rate(optim: Optim, lr: float) -> float:
    """The rate that weight decay is multiplied by in a step at learning rate `lr` (`optim.decay_follows`)."""
    return optim.lr if optim.decay_follows == "peak" else lr


def _decay(progress: float, shape: str, final_ratio: float) -> float:
    """The shape of a decay, from 1 to 0."""
    if shape == "exponential":  # the rate is peak * final_ratio ** progress
        return (final_ratio**progress - final_ratio) / (1 - final_ratio) if final_ratio < 1 else 1.0
    # Hagele et al. 2024 (arXiv 2405.18392) found 1 - sqrt the best for WSD.
    return 1 - math.sqrt(progress) if shape == "sqrt" else SHAPES[shape](progress)


def wsd_decay_start(schedule: LearningRateSchedule, num_steps: int) -> int:
    """Index of the last step at the peak in a schedule of so many steps; the decay of `decay_steps` follows (null: of a tenth of
    them)."""
    decay_steps = schedule.decay_steps if schedule.decay_steps is not None else math.ceil(num_steps / 10)
    return max(schedule.warmup_steps, num_steps - decay_steps)


def _progress(step: int, start: int, stop: int) -> float:
    """The share of the way from `start` to `stop` that is done at `step`: 0 before, 1 after."""
    if step >= stop:
        return 1.0
    return max(0.0, (step - start) / (stop - start))


def group_parameters_of(recipe: Recipe, whole: PreTrainedModel, units: tuple[Unit, ...]) -> list[GroupAssignment]:
    """Decided on the whole model, so that every rank agrees."""
    parameters = {name: whole.get_parameter(name) for unit in units for name in unit.parameters}
    marked = {name for name, each in parameters.items() if getattr(each, "_no_weight_decay", False)}
    shapes = {name: tuple(each.shape) for name, each in parameters.items()}
    matrices = find_matrices(whole, units, recipe.model.tp_plan, recipe.optim)
    if not recipe.adapter.is_used:
        found = group_trained(shapes, recipe.model.freeze, recipe.optim, marked, matrices, find_constants(whole))
        scales = find_scales(whole, recipe.model.mup_base)
        own = [scales.get(each.parameter, SAME) for each in found]
        return [replace(g, lr_ratio=g.lr_ratio * s.rate, initial=s.initial) for g, s in zip(found, own, strict=True)]
    trained = find_trained(whole, shapes, recipe.adapter)
    groups = group_parameters(
        ((name, shape, name in trained) for name, shape in shapes.items()), recipe.optim, marked, matrices
    )
    ratio = recipe.adapter.b_lr_ratio
    return [replace(each, lr_ratio=each.lr_ratio * ratio) if each.parameter.endswith(B) else each for each in groups]
