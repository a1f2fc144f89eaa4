"""A cluster's rates corrected by layouts that were tried: few layouts, so few factors.

Of layout i the forecast's parts p_ik (seconds) were measured to take m_i together. The factors s_k of the four kinds of parts
below minimise

    sum_i ((sum_k s_k p_ik - m_i) / m_i)^2 + PRIOR sum_k (s_k - 1)^2        1/4 <= s_k <= 4

so that factors which the layouts cannot tell apart stay near 1. The rates of kind k are divided by s_k. Waiting in a pipeline
follows from the others, and counts as computation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np
import yaml

from framework.plan.forecast import TimeForecast
from framework.recipe.keys import plain
from framework.recipe.schema import Cluster, ClusterLink, ClusterMatmul

# Each kind of parts, and the rates that it is of.
KINDS: Mapping[str, tuple[str, ...]] = {
    "computation": ("matmuls", "attention", "recomputation", "imbalance", "bubble", "references"),
    "memory": ("elementwise", "optimizer"),
    "links": ("tp", "cp", "ep", "ep_outer", "ep_inner", "pp", "gathers", "reductions", "contention"),
    "host": ("offload", "checkpoint", "host"),
}
PRIOR = 0.02
LEAST, MOST = 0.25, 4.0


@dataclass(frozen=True)
class Tried:
    """A layout that ran. forecast: of its step; step_s: measured, the median of its steps."""

    forecast: TimeForecast
    step_s: float


def fit_factors(tried: Sequence[Tried]) -> dict[str, float]:
    """Measured over predicted seconds of each kind of parts."""
    parts = np.array(
        [[sum(each.forecast.parts.get(name, 0.0) for name in names) for names in KINDS.values()] for each in tried]
    )
    measured = np.array([each.step_s for each in tried])
    rows = np.vstack([parts / measured[:, None], np.sqrt(PRIOR) * np.eye(len(KINDS))])
    wanted = np.concatenate([np.ones(len(tried)), np.full(len(KINDS), np.sqrt(PRIOR))])
    found = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    return {kind: float(min(max(factor, LEAST), MOST)) for kind, factor in zip(KINDS, found, strict=True)}


def correct(group: Cluster, factors: Mapping[str, float], name: str) -> Cluster:
    """The keys of a cluster's file with all rates divided by the factors, and latencies multiplied."""
    compute, memory, links = (factors[kind] for kind in ("computation", "memory", "links"))
    return replace(
        group,
        name=name,
        matmul={dtype: _slower_matmul(each, compute) for dtype, each in group.matmul.items()},
        attention={
            kernel: [[*row[:2], row[2] / compute, row[3] / compute] for row in rows]
            for kernel, rows in group.attention.items()
        },
        attention_share=min(1.0, group.attention_share / compute),
        attention_backward_share=min(1.0, group.attention_backward_share / compute),
        memory_gb_per_s=group.memory_gb_per_s / memory,
        memory_measured=[[size, rate / memory] for size, rate in group.memory_measured],
        softmax_g_per_s=None if group.softmax_g_per_s is None else group.softmax_g_per_s / memory,
        host_gb_per_s=group.host_gb_per_s / factors["host"],
        links={kind: _slower_link(each, links) for kind, each in group.links.items()},
    )


def _slower_matmul(matmul: ClusterMatmul, factor: float) -> ClusterMatmul:
    # Both by the same factor: what was measured says how far single shapes are from the rate.
    share = matmul.share / factor
    peak = matmul.peak_tflops * max(1.0, share)  # a share is at most 1: faster than its data sheet
    measured, gradient = ([[*row[:3], row[3] / factor] for row in rows] for rows in (matmul.measured, matmul.gradient))
    attention = [[*row[:2], row[2] / factor, row[3] / factor] for row in matmul.attention]
    return ClusterMatmul(peak, min(1.0, share), measured, gradient, attention)


def _slower_link(link: ClusterLink, factor: float) -> ClusterLink:
    return replace(
        link,
        gb_per_s=[rate / factor for rate in link.gb_per_s],
        hop_us=[hop * factor for hop in link.hop_us],
        start_us=link.start_us * factor,
        measured=[[size, micros * factor] for size, micros in link.measured],
    )


def describe_factors(factors: Mapping[str, float]) -> str:
    """The factors in a line."""
    words = [f"{kind} x{factor:.2f}" for kind, factor in factors.items()]
    return f"measured over predicted seconds: {', '.join(words)}"


def write_text(group: Cluster, comment: str) -> str:
    """The text of a cluster's file."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.safe_dump(plain(asdict(group)), sort_keys=False, width=120)
