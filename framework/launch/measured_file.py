"""From what ranks have measured to the text of a machine's file, and to lines that people read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from typing import Any

import yaml

from framework.launch.machine import count_names
from framework.launch.measure_order import Order
from framework.plan.cluster import COLLECTIVES, RINGS
from framework.recipe.clusters import find_cluster_problems, name_of_gpu, read_shipped
from framework.recipe.convert import to_recipe
from framework.recipe.keys import plain
from framework.recipe.problem import render_problems
from framework.recipe.schema import Cluster, ClusterMeasured
from framework.track.flops import peak_flops

DIGITS = 5
# What GPUs of no shipped file are taken to be like, where nothing measures it.
UNKNOWN_GPU = {"processors": 1, "tile": [1, 1], "ramp": 0}

Points = Sequence[Sequence[float]]


def describe_group(
    order: Order, found: Mapping[str, Any], here: ClusterMeasured, memory_bytes: int, host_bytes: int
) -> dict[str, Any]:
    """The keys of the file but for its name. memory_bytes: of a device; host_bytes: of the node's main memory. On GPUs what one
    node cannot measure is that of the shipped file for them, where there is one."""
    first, peaks = order.dtypes[0], {dtype: find_peak(order, found, here, dtype) for dtype in order.dtypes}
    *_, forward, backward = found["attention"][first][-1]
    shipped = find_shipped(here)
    known = {} if shipped is None else plain(asdict(shipped))
    group = {
        "device": here.gpus[0] if order.device == "cuda" else "cpu",
        "devices_per_node": order.ranks,
        "memory_gb": memory_bytes / 2**30,
        "host_memory_gb": host_bytes / 2**30,
        "matmul": known.get("matmul", {})
        | {dtype: describe_matmul(dtype, peaks[dtype], found) for dtype in order.dtypes},
        **{name: known.get(name, value) for name, value in UNKNOWN_GPU.items() if order.device == "cuda"},
        "attention_share": min(1.0, 1e12 * forward / peaks[first]),
        "attention_backward_share": min(1.0, 1e12 * backward / peaks[first]),
        "memory_gb_per_s": found["memory"][-1][1],
        "memory_measured": found["memory"],
        "softmax_g_per_s": found["softmax"],
        # On a GPU calls queue up: what they cost the host is no gap between kernels.
        "overhead_us": known.get("overhead_us", 1e6 * found["overhead_s"]),
        "host_gb_per_s": found["host_rate"] / 1e9,
        "disk_gb_per_s": found["disk_rate"] / 1e9,
        "links": {kind: describe_link(kind, found, order.ranks, known) for kind in COLLECTIVES},
        **{name: known.get(name) for name in ("price_per_hour", "device_mtbf_hours")},
        "measured": asdict(here),
    }
    return {name: value for name, value in group.items() if value not in ([], None)}


def find_shipped(here: ClusterMeasured) -> Cluster | None:
    """The shipped file of such GPUs."""
    file = name_of_gpu(here.gpus[0]) if here.gpus else None
    return None if file is None else read_shipped(file)


def find_peak(order: Order, found: Mapping[str, Any], here: ClusterMeasured, dtype: str) -> float:
    """FLOP/s of a device: by its maker's data sheet where that is known, else the best matmul."""
    best = 1e12 * max(rate for *_, rate in found["matmul"][dtype])
    stated = peak_flops(here.gpus[0]) if order.device == "cuda" and dtype == "bf16" else None
    return max(best, stated or 0.0)


def describe_matmul(dtype: str, peak: float, found: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `matmul` of one dtype."""
    measured = found["matmul"][dtype]
    best = 1e12 * max(rate for *_, rate in measured)
    other = {name: found[name][dtype] for name in ("gradient", "attention")}
    return {"peak_tflops": peak / 1e12, "share": best / peak, "measured": measured, **other}


def describe_link(kind: str, found: Mapping[str, Any], ranks: int, known: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a link: latency and bandwidth that fit best, the measured points; between nodes what a shipped file says."""
    measured = found["links"][kind]
    latency_us, us_per_mb = fit_line(measured)
    passes = 2 if kind == "all_reduce" else 1
    part = passes * (ranks - 1) / ranks if kind != "send" else 1.0
    steps = passes * (ranks - 1) if kind in (*RINGS, "all_to_all") else 1
    far = known.get("links", {}).get(kind, {"nodes": [1], "gb_per_s": [0.0], "hop_us": [0.0]})
    return {
        "nodes": far["nodes"],
        "gb_per_s": [1e3 * part / us_per_mb, *far["gb_per_s"][1:]],
        "hop_us": [latency_us / steps, *far["hop_us"][1:]],
        "measured": measured,
    }


def fit_line(points: Points) -> tuple[float, float]:
    """(latency, time of a unit) of the line through (size, time) whose relative errors have the least sum of squares; neither is
    negative."""
    weights = [1 / time**2 for _, time in points]
    total = sum(weights)
    size = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    time = sum(w * t for w, (_, t) in zip(weights, points, strict=True)) / total
    spread = sum(w * (x - size) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = (
        sum(w * (x - size) * (t - time) for w, (x, t) in zip(weights, points, strict=True)) / spread if spread else 0.0
    )
    largest, longest = max((x, t) for x, t in points)
    slope = min(max(slope, 0.1 * longest / largest), time / size)  # the largest message is bytes in some part
    return max(0.0, time - slope * size), slope


def write_text(name: str, group: Mapping[str, Any], order: Order, here: ClusterMeasured, busy: str = "") -> str:
    """The file's text. busy: what other work was done meanwhile. AssertionError where the recipe would refuse it: our mistake."""
    values = _rounded({"name": name, **group})
    recipe, problems = to_recipe({"cluster": values}, {})
    problems += find_cluster_problems(recipe) if not problems else []
    assert not problems, render_problems(problems)
    what = count_names(here.gpus) if here.gpus else f"{here.cores} cores"
    far = "" if order.device == "cpu" else "; between nodes, price and failures by recipes/cluster"
    head = (
        f"# {here.processor}, {what}: measured by `meshwright doctor --measure` on {date.today()} with torch {here.torch},"
        f" {order.ranks} ranks\n# of {order.threads} threads at the same time{far}. Use it with cluster=FILE.yaml.\n"
    )
    head += f"# Not a quiet machine: {busy}.\n" if busy else ""
    return head + yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)


def describe_findings(group: Mapping[str, Any], order: Order) -> Iterator[str]:
    """A table of what was found."""
    yield f"ranks        {order.ranks} of {order.threads} threads, at the same time; {group['memory_gb']:.1f} GiB each"
    for dtype, matmul in group["matmul"].items():
        if matmul.get("measured"):
            rates = sorted(1e3 * row[3] for row in matmul["measured"])
            yield (
                f"matmul {dtype:5} best {rates[-1]:,.4g} GFLOP/s, median of {len(rates)} shapes {rates[len(rates) // 2]:,.4g},"
                f" worst {rates[0]:,.4g}"
            )
            forward, backward = ([1e3 * row[column] for row in matmul["attention"]] for column in (2, 3))
            yield (
                f"attention {dtype:5} {min(forward):,.4g} to {max(forward):,.4g} GFLOP/s in forward,"
                f" {min(backward):,.4g} to {max(backward):,.4g} in backward"
            )
    yield "memory       " + ", ".join(f"{rate:.3g} GB/s at {size:,.3g} MB" for size, rate in group["memory_measured"])
    yield f"calls        {group['overhead_us']:.3g} us each, forward and backward"
    yield f"copies       {group['host_gb_per_s']:.3g} GB/s from the host, {group['disk_gb_per_s']:.3g} GB/s to disk"
    for kind, link in group["links"].items():
        (small, small_us), (large, large_us) = link["measured"][0], link["measured"][-1]
        yield (
            f"{kind:14} {small_us:,.4g} us of {1e3 * small:.3g} KB, {large_us / 1e3:,.4g} ms of {large:.3g} MB: bus"
            f" {link['gb_per_s'][0]:.3g} GB/s"
        )


def _rounded(value: Any) -> Any:
    """Numbers with as many digits as a measurement has; whole ones as such."""
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else float(f"{value:.{DIGITS}g}")
    return value
