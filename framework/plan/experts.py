"""Mixtures of experts as a rank holds them: how many experts, their bytes, and what travels to them."""

from collections.abc import Iterator
from dataclasses import dataclass

from framework.mesh.placement import place
from framework.model.flops import experts_per_token
from framework.plan.memory import show_bytes
from framework.plan.plan import Plan


@dataclass(frozen=True)
class RankExperts:
    """What a rank has of the mixtures. num_mixtures: its layers with experts; num_bytes: of their parameters in the compute
    dtype, before ZeRO; sent: bytes over `ep` for one mixture and one microbatch, with equally many tokens for each expert."""

    num_mixtures: int
    num_bytes: int
    sent: int


def measure_experts(plan: Plan, rank: int) -> RankExperts:
    """The experts of a rank."""
    mixtures = plan.mixtures_of(rank)
    num_bytes = sum(
        slot.layout.numel_local * buffer.dtypes.compute.itemsize
        for buffer in plan.of_rank(rank).buffers
        for slot in buffer.slots
        if any(slot.name.startswith(f"{mixture.experts}.") for mixture in mixtures)
    )
    sent = max((plan.expert_traffic(mixture) for mixture in mixtures), default=0)
    return RankExperts(len(mixtures), num_bytes, sent)


def describe_experts(plan: Plan) -> Iterator[str]:
    """Lines of `meshwright plan --ranks`: which experts a rank has and what is sent to them; none for a dense model."""
    if not plan.mixtures:
        return
    ranks = [measure_experts(plan, rank) for rank in plan.topology.ranks("pp", 0)]
    ep, expert_tp = plan.topology.size("ep"), plan.topology.size("expert_tp")
    num_experts = max(mixture.num_experts for mixture in plan.mixtures)
    top_k = experts_per_token(plan.config.get_text_config())
    where = f"ep {ep} x {plan.topology.size('expert_batch')} copies" if ep > 1 else "all on each rank"
    form = "whole" if expert_tp == 1 else f"each sliced over {expert_tp} ranks of tp"
    layers = f"{len(plan.mixtures)} layer{'s' if len(plan.mixtures) != 1 else ''}"
    chosen = f", {top_k} for a token" if top_k else ""
    yield f"experts       {num_experts} in each of {layers}{chosen}; {num_experts // ep} on a rank, {where}, {form}"
    yield f"              their parameters take at most {show_bytes(max(each.num_bytes for each in ranks))} of a rank before ZeRO"
    if ep > 1:
        yield f"              {_describe_traffic(plan, max(ranks, key=lambda each: each.num_mixtures))}"
        if advice := place(plan.derived).advise_experts():
            yield f"              {advice}"


def _describe_traffic(plan: Plan, rank: RankExperts) -> str:
    step = rank.sent * rank.num_mixtures * plan.derived.accumulation
    forwards = max(map(plan.forwards_of, plan.mixtures))
    passes = {1: "forward and backward", 2: "forward twice and backward", 3: "forward three times and backward"}[
        forwards
    ]
    return (
        f"with equally many tokens for each, a rank sends {show_bytes(rank.sent)} per layer and microbatch, there and back in"
        f" {passes}: {show_bytes(step)} a step"
    )
