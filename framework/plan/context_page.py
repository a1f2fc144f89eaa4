"""Lines of `meshwright plan --ranks` on context parallelism: what its method sends beside which attention, which is fastest."""

from collections.abc import Iterator
from functools import reduce
from operator import add

from framework.plan.cluster import Cluster
from framework.plan.context import ContextCost, Links, Method, Times, find_methods
from framework.plan.memory import show_bytes
from framework.plan.plan import Plan

# Methods that are compared in the line, beside the recipe's own.
SHOWN = 3


def describe_context(plan: Plan) -> Iterator[str]:
    """Nothing where no sequence is divided, or no layer has attention."""
    costs = [cost for cost in plan.context_costs(0) if cost is not None]
    if not costs:
        return
    cost, links = max(costs, key=lambda each: each.shape.reach), find_links(plan)
    rows = [*_describe_messages(cost, links), *_compare(plan, cost.method, links)]
    rows += [("Ulysses", _describe_heads(cost)), ("rates", _describe_rates(links))]
    for number, (name, line) in enumerate(rows):
        yield f"{'' if number else 'attention':13} {name:<17} {line}"


def find_links(plan: Plan) -> Links:
    """Those of the cluster that the recipe names, or that is assumed."""
    compute = plan.recipe.precision.compute
    dtype = "bf16" if compute == "fp8" else compute
    return Links(Cluster.from_recipe(plan.recipe), plan.derived.tp, plan.derived.ranks_per_node, dtype)


def compare_methods(plan: Plan, links: Links) -> list[tuple[Method, Times]]:
    """Each that the model's heads allow, with a layer's mean times, the fastest first."""
    widest = max((cost for cost in plan.context_costs(0) if cost is not None), key=lambda each: each.shape.heads)
    methods = find_methods(plan.derived.cp, widest.shape.heads)
    found = [(method, _mean(plan, method, links)) for method in methods]
    return sorted(found, key=lambda each: each[1].total_s)


def _mean(plan: Plan, method: Method, links: Links) -> Times:
    times = [
        cost.times(links, plan.passes_of_layer(number))
        for number, cost in enumerate(plan.costs_of_method(method))
        if cost is not None
    ]
    return 1 / len(times) * reduce(add, times)


def _describe_messages(cost: ContextCost, links: Links) -> Iterator[tuple[str, str]]:
    """What travels for a layer and microbatch, and beside what. Of the layers with the longest reach."""
    if cost.method.ulysses > 1:
        seconds = [links.exchange_s(cost.method, each) for each in cost.exchanged_bytes]
        yield "exchange of heads", f"{_both(cost.exchanged_bytes)}: {_ms(*seconds)}, not hidden"
    if cost.method.gathers:
        yield "gather of K and V", f"{_both(cost.travelling_bytes)}, with their gradients"
    elif cost.num_steps:
        yield from _describe_step(cost, links)


def _describe_step(cost: ContextCost, links: Links) -> Iterator[tuple[str, str]]:
    messages, blocks = zip(*cost.step_s(links), strict=True)
    late = [max(0.0, message - block) for message, block in zip(messages, blocks, strict=True)]
    hidden = f"{_ms(*late)} exposed" if any(late) else "hidden"
    where = "in a node" if links.stays(cost.method) else "between nodes"
    yield (
        "step of the ring",
        f"{_both(cost.step_bytes)}: {_ms(*messages)} {where}, beside {_ms(*blocks)} of attention: {hidden}"
        f"; but for latency it is hidden from {cost.hidden_from(links):,} tokens of a sequence on a rank on",
    )


def _compare(plan: Plan, own: Method, links: Links) -> Iterator[tuple[str, str]]:
    found = compare_methods(plan, links)
    shown = [each for number, each in enumerate(found) if number < SHOWN or each[0] == own]
    best = found[0][0]
    attention_s = next(times.attention_s for method, times in found if method == own)
    totals = ", ".join(f"{method.name} {_ms(times.total_s)}" for method, times in shown)
    yield "a layer", f"{_ms(attention_s)} of attention, forward and backward; with what methods add: {totals}"
    added = ", ".join(
        f"{method.name} {_ms(times.exposed_s, times.memory_s)}" for method, times in shown if method in (best, own)
    )
    fastest = f"{best.name}, as it is" if best == own else f"parallel.context={best.name}"
    yield "fastest", f"{fastest}; exposed messages and copies: {added}"


def _describe_heads(cost: ContextCost) -> str:
    heads, kv_heads = cost.shape.heads, cost.shape.kv_heads
    copies = f", beyond {kv_heads} with copies of key-value heads" if kv_heads < heads else ""
    return f"divides the {heads} heads of a rank over at most {heads} ranks{copies}"


def _describe_rates(links: Links) -> str:
    cluster = links.cluster
    name = f"cluster={cluster.name}" + ", which is assumed (the recipe names none)" * cluster.is_assumed
    near, far = (cluster.device_link(nodes).rate / 1e9 for nodes in (1, 2))
    attention = 1e-12 * 1e15 / links.attention_s(1e15)
    return f"of {name}: {attention:.3g} TFLOP/s in attention, {near:.3g} GB/s in a node, {far:.3g} GB/s between nodes"


def _both(sizes: tuple[int, int]) -> str:
    return f"{show_bytes(sizes[0])} in forward, {show_bytes(sizes[1])} in backward"


def _ms(*seconds: float) -> str:
    numbers = [1e3 * each for each in seconds]
    return f"{' and '.join(f'{each:,.0f}' if each >= 100 else f'{each:.3g}' for each in numbers)} ms"
