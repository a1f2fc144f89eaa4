"""Decorators by which a plugin puts a name into a registry, for recipes to use (docs/extend.md; examples: examples/plugins).

A registry is the dictionary of the file that reads it. A decorator returns what it decorates, and raises RecipeError for a name
that is taken. Registries are imported when they are needed: a plugin with a tracker imports no torch.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from framework.recipe.plugins import add

if TYPE_CHECKING:
    from torch import Tensor

    from framework.model.objective import Statistics
    from framework.optim.update_rules import ElementRule
    from framework.parallel.attention.ring import Transport
    from framework.parallel.pipeline.schedules import Writer
    from framework.recipe.schema import LossSettings
    from framework.track.report import Tracker

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]


def optimizer(name: str, states: dict[str, float] | None = None) -> "Callable[[ElementRule], ElementRule]":
    """`optim.name`: a pure function of single elements,
    `(value, gradient, states, lr, weight_decay, optim) -> (value, states)`, which never learns of shards, clipping and skipped
    steps. states: tensors per element, zeros at first, each with the share of it that an update retains."""
    from framework.optim.update_rules import OPTIMIZERS, RuleOptimizer, UpdateRule, update_in_place
    from framework.plan.sharding import MOMENTS

    def register(rule: "ElementRule") -> "ElementRule":
        def make(optim: Any, groups: list[dict[str, Any]]) -> Any:
            return RuleOptimizer(groups, update_in_place(rule, optim), states or (), lr=optim.lr)

        add("optimizer", OPTIMIZERS, name, UpdateRule(states=lambda optim: dict(states or {}), make=make))
        add("optimizer", MOMENTS, name, len(states or {}))
        return rule

    return register


def loss(name: str) -> "Callable[[Callable[[Statistics, LossSettings], Tensor]], Any]":
    """`loss.name`: `(statistics, settings) -> sum`, the local sum of the losses of a microbatch's tokens, a scalar. The framework
    divides by the number of tokens with a loss of all ranks; `statistics.of_tokens()` has -log p of each."""
    from framework.model.objective import LOSSES, Objective, Terms, count_tokens

    def register(compute: "Callable[[Statistics, LossSettings], Tensor]") -> Any:
        def terms(statistics: "Statistics", settings: "LossSettings") -> Terms:
            return Terms(compute(statistics, settings))

        add("loss", LOSSES, name, Objective(terms, count_tokens))
        return compute

    return register


def schedule(name: str) -> Decorator[Callable[[float], float]]:
    """`optim.schedule.name`: from the share of the way behind the warm-up that is done, 0 to 1, the share of the way between the
    last rate and the peak, 1 at first."""
    from framework.optim.groups import SHAPES

    return _register("schedule", SHAPES, name)


def reader(name: str) -> Decorator[Callable[[Path], Iterable[Any]]]:
    """`data.sources.X.format`: from a file's path its records, mappings of which `field` or `messages` is taken, or texts."""
    from framework.data.records import READERS

    return _register("reader", READERS, name)


def tokenizer(name: str) -> Decorator[Callable[[], Any]]:
    """`model.tokenizer`: a function that makes a fast tokenizer of transformers, which is kept beside the tokens."""
    from framework.data.tokenize import TOKENIZERS

    return _register("tokenizer", TOKENIZERS, name)


def chat_template(name: str) -> Decorator[Callable[[], str]]:
    """`data.chat_template`: a function that returns the text of a template."""
    from framework.data.tokenize import CHAT_TEMPLATES

    def register(write: Callable[[], str]) -> Callable[[], str]:
        add("chat template", CHAT_TEMPLATES, name, write())
        return write

    return register


def evaluation_task(name: str) -> Decorator[Callable[[], Iterable[dict[str, Any]]]]:
    """`eval.tasks`: a function that makes the records of a task, the same ones at each call. docs/evaluation.md lists their
    fields, from which scores follow."""
    from framework.data.tasks import TASKS

    return _register("evaluation task", TASKS, name)


def model(kind: type) -> type:
    """`model.family`: a PreTrainedModel for causal language modeling whose `config_class` has a `model_type` of its own."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

    config: Any = kind.config_class  # type: ignore[attr-defined]
    families: dict[str, Any] = dict.fromkeys(CONFIG_MAPPING)
    add("model", families, config.model_type, kind)
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModelForCausalLM.register(config, kind, exist_ok=True)
    return kind


def context_method(name: str) -> "Callable[[type[Transport]], type[Transport]]":
    """`parallel.context`: a class of one Communicator, `ring`, with the methods of `Transport` in parallel/attention/ring.py."""
    from framework.parallel.attention.attention import TRANSPORTS

    return _register("context method", TRANSPORTS, name)


def pipeline_schedule(
    name: str, virtual_stages: int = 1, is_v: bool = False
) -> "Decorator[Callable[[int, int, int, Writer], None]]":
    """`pipeline.schedule`: `(rank, ranks, microbatches, writer)` writes one rank's list of actions; that all fit
    together is proved. virtual_stages: on each rank; is_v: they lie in a V, not in a loop."""
    from framework.parallel.pipeline.schedules import SCHEDULES, ScheduleSpec
    from framework.recipe.derive import VIRTUAL_STAGES

    def register(write: "Callable[[int, int, int, Writer], None]") -> "Callable[[int, int, int, Writer], None]":
        add("pipeline schedule", SCHEDULES, name, ScheduleSpec(write, virtual_stages, is_v))
        add("pipeline schedule", VIRTUAL_STAGES, name, virtual_stages)
        return write

    return register


def tracker(name: str) -> "Callable[[type[Tracker]], type[Tracker]]":
    """Add a `Tracker` (track/report.py): every run with the plugin has it, in a process of its own that imports the plugin."""
    from framework.track.trackers import TRACKERS

    return _register("tracker", TRACKERS, name)


def _register(kind: str, registry: dict[str, Any], name: str) -> Callable[[Any], Any]:
    def register(value: Any) -> Any:
        add(kind, registry, name, value)
        return value

    return register
