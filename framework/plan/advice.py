"""One adviser: which changes of a recipe lower what its ranks hold, what each saves and costs, and which make a plan fit.

Three questions are asked of one list of changes (`list_changes`): `meshwright plan` and `submit` ask what makes a plan fit its
device (`find_changes`), a rank without memory and `doctor` what is cheapest to give up in turn (`find_relief`), and
`plan --options` what each change does by itself (`find_savings`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import torch

from framework.errors import MeshwrightError, OutOfMemory, RecipeError
from framework.output import align, show_bytes
from framework.plan.candidate import OFFLOADED, candidate_of
from framework.plan.cluster import ClusterRates
from framework.plan.forecast_memory import MemoryForecast, describe_shortages
from framework.plan.forecast_plan import LITTLE, PlanForecast, forecast_plan, measure_traffic
from framework.plan.plan import Plan, make_plan
from framework.plan.space import ModelRules
from framework.plan.time import Forecast, TimeModel
from framework.recipe.check import check_recipe
from framework.recipe.keys import with_value
from framework.recipe.schema import Recipe

Setting = tuple[str, Any]

# Changes after which it is another run, within bounds that docs/memory.md states: only `find_savings` names them.
OTHER_ROUNDING: tuple[Setting, ...] = (
    ("precision.moments", "bf16"),
    ("precision.moments", "int8"),
    ("precision.master", "none"),
)
# Costs beside FLOPs and bytes sent.
WORDS: dict[str, str] = {
    "memory.chunked_loss": "the head's matmul once more in backward",
    "memory.gathered_inputs": "inputs of regions gathered again in backward",
    "memory.offload.activations": "copies to the host and back, beside computation",
    "memory.offload.optimizer": "updates on the host's cores",
    "memory.offload.parameters": "copies from the host, beside computation",
    "parallel.cp": "keys and values sent beside attention",
    "precision.moments": "moments are rounded",
    "precision.master": "weights are rounded",
}
# A change that saves less than this share of a rank's memory is not worth a line.
WORTH_SAYING = 0.01
# Changes that are shown where a plan does not fit, where memory ran out and by `doctor`; and how many may be made together.
SHOWN = 3
MOST_TOGETHER = 2

# Messages of the host's allocator, of CUDA outside of torch's allocator (start-up, graph capture), of cuBLAS' workspaces and of
# NCCL's buffers. torch.OutOfMemoryError covers only the caching allocator of GPUs.
SIGNS = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
)


def list_changes(plan: Plan) -> Iterator[Setting]:
    """Changes that leave the run the same, by what they cost a step: next to nothing, more microbatches, messages, copies to the
    host and back, computing parts of forwards twice, all of them, all of them more than twice."""
    derived, stage, microbatch = plan.derived, plan.recipe.zero.stage, plan.derived.sequences_per_microbatch
    stages = range(stage + 1, 4 if derived.dp * derived.cp > 1 else 0)
    yield from (("zero.stage", 1) for each in stages if each == 1)
    yield "memory.chunked_loss", True
    smaller = [size for size in range(microbatch // 2, 0, -1) if microbatch % size == 0]
    yield from (("batch.sequences_per_microbatch", size) for size in smaller[:1])
    yield from (("zero.stage", 2) for each in stages if each == 2)
    yield from (("batch.sequences_per_microbatch", size) for size in dict.fromkeys([*smaller[1::2], *smaller[-1:]]))
    # Twice, four times ... as many ranks for each sequence, as far as data-parallel ranks go.
    powers = range(1, derived.dp.bit_length())
    yield from (("parallel.cp", derived.cp << power) for power in powers if derived.dp % (1 << power) == 0)
    yield "memory.offload.activations", 1.0
    for policy in ("selective", "full", "sqrt"):
        yield "memory.activation_checkpointing", policy
    yield from (("zero.stage", 3) for each in stages if each == 3)
    yield "memory.offload.optimizer", 1.0  # on a device that is the host it is refused, so it is not said


def _write(settings: Sequence[Setting]) -> str:
    """The settings as they are typed on the command line."""
    return " ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in settings)


def _with_settings(recipe: Recipe, settings: Sequence[Setting]) -> Recipe | None:
    """None where the settings contradict the recipe."""
    for key, value in settings:
        recipe = with_value(recipe, key, value)
    return None if check_recipe(recipe, {}) else recipe


def _replan(plan: Plan, recipe: Recipe | None) -> Plan | None:
    """The plan of another recipe for the same model; None where there is none."""
    try:
        return None if recipe is None else make_plan(recipe, plan.config)
    except MeshwrightError:  # its layout does not fit the model
        return None


# --- what makes a plan fit


@dataclass(frozen=True)
class FittingChange:
    """Settings with which a layout fits, and its forecast with them."""

    settings: tuple[Setting, ...]
    forecast: Forecast

    @property
    def overrides(self) -> str:
        """The settings as they are typed on the command line."""
        return _write(self.settings)


def describe_verdict(memory: MemoryForecast, cluster: ClusterRates) -> str:
    """Say whether a layout fits, such as `fits the 79.6 GiB of h100_ib with 9.1 GiB to spare`."""
    limit = f"{show_bytes(memory.limit)} of {cluster.name}{', which is assumed,' if cluster.is_assumed else ''}"
    shortages = list(describe_shortages(memory.node))
    if memory.spare < 0:
        shortages = [f"{show_bytes(-memory.spare)} over the {limit.rstrip(',')}", *shortages]
    if shortages:
        return f"does not fit: {'; '.join(shortages)}"
    node = memory.node
    # The estimates for NCCL and the allocator may be off by as much.
    is_tight = cluster.device != "cpu" and memory.spare < LITTLE * memory.limit
    tight = "tight, it may run out of memory: it " if is_tight else ""
    return f"{tight}fits the {limit} with {show_bytes(memory.spare)} to spare" + (
        f", and a node's host memory with {show_bytes(node.spare)} of {show_bytes(node.there)}"
        if node.offloaded + node.copies
        else ""
    )


def caution_of_fit(plan: Plan) -> str:
    """Why a plan does not fit its cluster, for commands that go on all the same; empty where it fits."""
    try:
        found = forecast_plan(plan)
    except RecipeError as error:  # nodes of another form than the cluster's
        return " ".join(str(error).split())
    if found.forecast.memory.fits:
        return ""
    return f"{describe_verdict(found.forecast.memory, found.cluster)}; `meshwright plan` says what would"


def find_changes(found: PlanForecast) -> list[FittingChange]:
    """The changes with which a plan fits, the cheapest by step time; single ones before those that take two. Empty where nothing
    is missing, or nothing helps."""
    if found.forecast.memory.fits:
        return []
    settings, rules = _list_settings(found), ModelRules(found.plan.shape)
    fitting: list[FittingChange] = []
    for together in range(1, MOST_TOGETHER + 1):
        tried = (_try(found, rules, each) for each in combinations(settings, together))
        # A pair is left out where one of the two is enough.
        enough = [set(each.settings) for each in fitting]
        fits = [each for each in tried if each is not None and not any(few < set(each.settings) for few in enough)]
        fitting += sorted(fits, key=lambda each: each.forecast.time.step_s)
        if len(fitting) >= SHOWN:
            break
    return fitting[:SHOWN]


def describe_changes(found: PlanForecast, changes: Sequence[FittingChange]) -> Iterator[str]:
    """A line for each change, with what it costs; or what is left where none helps."""
    if found.forecast.memory.fits:
        return
    before = found.forecast.time.step_s
    for each in changes:
        ratio = each.forecast.time.step_s / before - 1
        yield f"{each.overrides}: {show_bytes(each.forecast.memory.spare)} to spare, step time {ratio:+.0%}"
    if not changes:
        yield "no two changes make it fit: more ranks, or `meshwright search` for another layout"


def _list_settings(found: PlanForecast) -> list[Setting]:
    """Changes of the layout as well, and those with which ranks take less of a node that has too little."""
    derived, recipe = found.plan.derived, found.plan.recipe
    degrees = [derived.tp << power for power in range(1, 4) if derived.dp % (1 << power) == 0]
    settings = [*list_changes(found.plan)]
    settings += [("parallel.tp", degree) for degree in degrees if degree <= found.cluster.ranks_per_node]
    if not found.forecast.memory.node.fits:
        offload = recipe.memory.offload
        settings += [(f"memory.offload.{name}", 0.0) for name in OFFLOADED if getattr(offload, name)]
        if offload.home == "disk":
            settings += [("memory.offload.home", "host"), ("memory.offload.disk_path", None)]
        if recipe.checkpoint.neighbor_copies:
            settings += [("checkpoint.neighbor_copies", 0), ("checkpoint.neighbor_every_steps", None)]
    return list(dict.fromkeys(settings))


def _try(found: PlanForecast, rules: ModelRules, settings: Sequence[Setting]) -> FittingChange | None:
    """None where the settings contradict one another, the recipe or the model, or do not fit the device either."""
    if len({key for key, _ in settings}) < len(settings):
        return None
    recipe = _with_settings(found.plan.recipe, settings)
    if recipe is None:
        return None
    try:
        candidate = candidate_of(recipe)
        if rules.refuse(candidate):
            return None
        times = TimeModel(found.plan.shape, recipe, found.cluster, imbalance=found.imbalance)
        memory = times.memory.forecast(candidate, found.cluster)
        if not memory.fits:
            return None
        time = times.forecast(candidate)
    except MeshwrightError:
        return None
    return FittingChange(tuple(settings), Forecast(memory, time))


# --- what to give up in turn


@contextmanager
def explain_out_of_memory(plan: Plan, rank: int) -> Iterator[None]:
    """Raise OutOfMemory, with advice, where the device or the host's allocator has no memory left for the body."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        # NCCL's line comes after others.
        lines = str(error).splitlines() or [type(error).__name__]
        line = next((each for each in lines if any(sign in each for sign in SIGNS)), lines[0])
        raise OutOfMemory(f"{line}\n{describe_relief(plan, rank)}") from error


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host has no memory left, by the error's class, else by its text from torch and its libraries."""
    is_typed = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_typed or any(sign in str(error) for sign in SIGNS)


def describe_relief(plan: Plan, rank: int) -> str:
    """The bytes that the rank is planned to hold, and the cheapest changes that lower them, each with those before it."""
    memory = plan.memory(rank)
    parts = ", ".join(f"{kind} {show_bytes(size)}" for kind, size in memory.kinds.items() if size)
    lines = [f"This rank is planned to hold {show_bytes(memory.reserved)}: {parts}."]
    rows = list(islice(find_relief(plan, rank), SHOWN))
    if rows:
        lines.append("What lowers that and leaves the run the same, the cheapest first, each with those before it:")
        lines += [f"  {line}" for line in align([(change, show_bytes(size)) for change, size in rows], words=(0, 1))]
    lines.append(
        "`meshwright plan --options` has more, each by itself. Beyond that: more ranks, to shard over or for"
        " parallel.cp, parallel.tp and parallel.pp; or a shorter batch.context."
    )
    return "\n".join(lines)


def find_relief(plan: Plan, rank: int) -> Iterator[tuple[str, int]]:
    """(override, bytes that the rank holds with it and with those before), of changes that are worth it and fit the recipe."""
    recipe, best = plan.recipe, plan.memory(rank).reserved
    for setting in list_changes(plan):
        changed = _with_settings(recipe, [setting])
        found = _replan(plan, changed)
        if found is None or changed is None:
            continue
        size = found.memory(rank).reserved
        if size < (1 - WORTH_SAYING) * best:
            recipe, best = changed, size
            yield _write([setting]), size


# --- what each change does by itself


@dataclass(frozen=True)
class Saving:
    """One change by itself."""

    override: str
    # Bytes of a rank's device less than without it, and of the host more.
    device: int
    host: int
    # Computation and messages of a step, over those without the option; 1.0 for as much.
    flops: float
    sent: float
    words: str

    @property
    def costs(self) -> str:
        """The costs in words; what is next to nothing is left out."""
        counted = [
            f"{ratio - 1:+.0%} {what}"
            for what, ratio in (("FLOPs", self.flops), ("bytes sent", self.sent))
            if abs(ratio - 1) >= 0.005
        ]
        return ", ".join([*counted, *([self.words] if self.words else [])]) or "nothing that is counted"


def find_savings(plan: Plan, rank: int) -> Iterator[Saving]:
    """The changes that fit the recipe and the model, and lower what the rank's device holds."""
    options = [each for each in list_changes(plan) if each[0] != "batch.sequences_per_microbatch"]
    options += [("memory.gathered_inputs", "regather"), ("memory.offload.parameters", 1.0), *OTHER_ROUNDING]
    device, host, flops, sent = _measure(plan, rank)
    for key, value in options:
        found = _replan(plan, _with_settings(plan.recipe, [(key, value)]))
        if found is None:
            continue
        measured = _measure(found, rank)
        if measured[0] < device:
            ratios = measured[2] / flops, measured[3] / sent if sent else 1.0
            words = WORDS.get(key, "")
            yield Saving(_write([(key, value)]), device - measured[0], measured[1] - host, *ratios, words)


def describe_savings(plan: Plan) -> Iterator[str]:
    """The table of `meshwright plan --options`, of the fullest rank, in lines."""
    rank = max(plan.topology.ranks("pp", 0), key=lambda each: plan.memory(each).reserved)
    yield f"what would lower the {show_bytes(plan.memory(rank).reserved)} that rank {rank} holds, each option by itself:"
    rows = [("option", "saves", "host's more", "costs a step")]
    rows += [
        (each.override, show_bytes(each.device), show_bytes(each.host) if each.host else "", each.costs)
        for each in find_savings(plan, rank)
    ]
    for line in align(rows, words=(0, 3)):
        yield f"  {line}"


def _measure(plan: Plan, rank: int) -> tuple[int, int, float, int]:
    """(bytes of the device, of the host, FLOPs of a token, bytes sent in a step)."""
    memory = plan.memory(rank)
    again = sum(plan.activations.costs.flops(counts) for counts in plan.chosen.values())
    return memory.reserved, memory.host, plan.flops_per_token + again, sum(measure_traffic(plan, rank).values())
