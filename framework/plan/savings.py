"""What each option that lowers memory saves and costs, each by itself, by the plans with it: to be asked before it is tried."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from framework.errors import MeshwrightError
from framework.plan.memory import show_bytes
from framework.plan.plan import Plan, make_plan
from framework.plan.relief import raise_cp, set_key
from framework.recipe.check import check_recipe

# (key, value, what it costs beside what is counted). The last ones round otherwise: another run, within bounds that
# docs/memory.md states.
OPTIONS: tuple[tuple[str, Any, str], ...] = (
    ("zero.stage", 1, ""),
    ("zero.stage", 2, ""),
    ("zero.stage", 3, ""),
    ("memory.chunked_loss", True, "the head's matmul once more in backward"),
    ("memory.gathered_inputs", "regather", "inputs of regions gathered again in backward"),
    ("memory.activation_checkpointing", "selective", ""),
    ("memory.activation_checkpointing", "full", ""),
    ("memory.activation_checkpointing", "sqrt", ""),
    ("memory.offload.activations", 1.0, "copies to the host and back, beside computation"),
    ("memory.offload.optimizer", 1.0, "updates on the host's cores"),
    ("memory.offload.parameters", 1.0, "copies from the host, beside computation"),
    ("precision.moments", "bf16", "moments are rounded"),
    ("precision.moments", "int8", "moments are rounded"),
    ("precision.master", "none", "weights are rounded"),
)


@dataclass(frozen=True)
class Saving:
    """One option. device, host: bytes of a rank less, and more, than without it; flops, sent: what a step computes and sends over
    that without it, 1.0 for as much."""

    override: str
    device: int
    host: int
    flops: float
    sent: float
    words: str

    @property
    def costs(self) -> str:
        """In words; what is next to nothing is left out."""
        counted = [
            f"{ratio - 1:+.0%} {what}"
            for what, ratio in (("FLOPs", self.flops), ("bytes sent", self.sent))
            if abs(ratio - 1) >= 0.005
        ]
        return ", ".join([*counted, *([self.words] if self.words else [])]) or "nothing that is counted"


def find_savings(plan: Plan, rank: int) -> Iterator[Saving]:
    """The options that fit the recipe and the model, and lower what the rank's device holds."""
    recipe = plan.recipe
    device, host, flops, sent = _measure(plan, rank)
    for key, value, words in (*OPTIONS, *_more_ranks_a_sequence(plan)):
        changed = set_key(recipe, key, value)
        try:
            found = None if check_recipe(changed, {}) else _measure(make_plan(changed, plan.config), rank)
        except MeshwrightError:  # its layout does not fit the model
            found = None
        if found is not None and found[0] < device:
            ratios = found[2] / flops, found[3] / sent if sent else 1.0
            yield Saving(f"{key}={str(value).lower()}", device - found[0], found[1] - host, *ratios, words)


def _more_ranks_a_sequence(plan: Plan) -> list[tuple[str, Any, str]]:
    degrees = raise_cp(plan.derived)[:1]
    return [("parallel.cp", degree, "keys and values sent beside attention") for degree in degrees]


def describe_savings(plan: Plan, rank: int) -> Iterator[str]:
    """A table, in lines."""
    yield f"what would lower the {show_bytes(plan.memory(rank).reserved)} that rank {rank} holds, each option by itself:"
    rows = [("option", "saves", "host's more", "costs a step")]
    rows += [
        (each.override, show_bytes(each.device), show_bytes(each.host) if each.host else "", each.costs)
        for each in find_savings(plan, rank)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for option, saves, host, costs in rows:
        yield f"  {option.ljust(widths[0])}  {saves.rjust(widths[1])}  {host.rjust(widths[2])}  {costs}"


def _measure(plan: Plan, rank: int) -> tuple[int, int, float, int]:
    """(bytes of the device, of the host, FLOPs of a token, bytes sent in a step)."""
    memory = plan.memory(rank)
    again = sum(
        plan.activations.costs.flops(counts)
        for each in plan.topology.ranks("pp", 0)
        for counts in plan.checkpointing(each).values()
    )
    return memory.reserved, memory.host, plan.flops_per_token + again, sum(plan.traffic(rank).values())
