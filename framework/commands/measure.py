"""`meshwright doctor --measure`: measure this machine, and write the file for `cluster=FILE.yaml`.

    command: an `MeasureOrder` --> ranks (this module as a program): timings.py --> medians --> the file, and a table of it

Nothing at the top imports torch, which reads from a rank's environment how many threads it may use.
"""

import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from framework.errors import EXIT_DONE, RecipeError, RunError
from framework.host import count_cores, count_host_memory, peak_flops
from framework.launch.process import let_threads_sleep, report_error, run_process
from framework.plan.cluster import COLLECTIVES, RINGS
from framework.recipe.convert import CLUSTER, read_part, to_recipe, write_cluster_file
from framework.recipe.environment import fill
from framework.recipe.files import ENDINGS
from framework.recipe.keys import plain
from framework.recipe.machines import find_cluster_problems, name_of_gpu, read_shipped
from framework.recipe.problem import render_problems
from framework.recipe.schema import ClusterMeasured, Precision, Recipe
from framework.start import python_words

if TYPE_CHECKING:
    from framework.commands.timings import Effort
    from framework.launch.agent import Outcome

DEFAULT_NAME = "measured"
# Collectives need two ranks.
LEAST_RANKS = 2
# Load of the last minute, as a share of the cores, above which a machine is not quiet.
BUSY_SHARE = 0.5
CONNECT_WITHIN_S = 300.0
# Significant digits of the numbers in the file.
DIGITS = 5
# Values for GPUs of no shipped file, where nothing measures them.
UNKNOWN_GPU = {"processors": 1, "tile": [1, 1], "ramp": 0}

Points = Sequence[Sequence[float]]


@dataclass(frozen=True)
class MeasureOrder:
    """The measurements that ranks make."""

    device: str  # cpu or cuda
    ranks: int  # one for each GPU, or for a share of the node's cores
    threads: int  # CPU threads of a rank
    dtypes: Sequence[str]  # dtypes of matmuls and attention, as recipes name them
    folder: str  # the folder where checkpoints would lie
    result: str  # the file that rank 0 writes
    effort: Mapping[str, Any] | None  # fields of `timings.Effort`; None: those for the device


def choose_file(typed: str, recipe_dirs: Sequence[Path]) -> Path:
    """The file that `--measure FILE` names; without one measured.yaml, in the group of the first --recipes folder or here.

    RecipeError where cluster=FILE could not choose it."""
    if not typed:
        folder = recipe_dirs[0].expanduser() / CLUSTER if recipe_dirs else Path()
        return folder / f"{DEFAULT_NAME}{ENDINGS[0]}"
    file = Path(typed).expanduser()
    if file.suffix not in ENDINGS:
        raise RecipeError(f"--measure {typed}: the file's name ends in .yaml, as in --measure {typed}.yaml")
    return file


def measure_command(recipe: Recipe, file: Path, *, overwrites: bool = False, effort: "Effort | None" = None) -> int:
    """Measure this machine and write its file; returns the exit code. Nothing is written where ranks fail or are interrupted.

    overwrites: also a file of another machine. effort: the amount of measurement, None: that for the device. RecipeError where
    the file is of another machine, or the recipe is for a cluster's nodes."""
    here = describe_machine()
    refuse(recipe, file, here, overwrites)
    busy = describe_load(here)
    if busy:
        print(
            f"caution  not a quiet machine, {busy}: what is measured now is slower than it is, and varies",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        order = make_order(recipe, here, result, effort)
        outcome = _start_ranks(recipe, order, Path(folder))
        if outcome.code != EXIT_DONE:
            print(outcome.message or f"nothing is measured: exit code {outcome.code}")
            return outcome.code
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    memory_bytes = count_memory() // (order.ranks if order.device == "cpu" else 1)
    group = describe_group(order, found, here, memory_bytes, count_host_memory())
    text = write_text(file.stem, group, order, here, busy)
    try:
        write_cluster_file(file, text)
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}; what was measured:\n\n{text}") from error
    print("\n".join(describe_findings(group, order)))
    print(f"written      {file}; use it with {CLUSTER}={file}")
    return EXIT_DONE


def _start_ranks(recipe: Recipe, order: MeasureOrder, folder: Path) -> "Outcome":
    """Run the ranks. folder: for the order, and their errors."""
    from framework.launch.agent import run_ranks

    path = folder / "order.json"
    path.write_text(json.dumps(asdict(order)), encoding="utf-8")
    words = python_words("framework.commands.measure", str(path))
    return run_ranks(words, order.ranks, folder / "errors", fill(recipe.launch.environment, os.environ))


def refuse(recipe: Recipe, file: Path, here: ClusterMeasured, overwrites: bool) -> None:
    """Raises RecipeError where this machine's file may not be written there."""
    if recipe.launch.kind != "local":
        raise RecipeError(
            f"doctor --measure measures the machine that it stands on, and launch.kind={recipe.launch.kind} is for others: run it"
            " with launch=local on one of the nodes, such as `srun --exclusive meshwright doctor --measure FILE.yaml`"
        )
    if file.is_dir():
        raise RecipeError(
            f"--measure {file}: this is a folder; name a file in it, such as {file / DEFAULT_NAME}{ENDINGS[0]}"
        )
    there = next(each for each in file.absolute().parents if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise RecipeError(f"--measure {file}: nothing can be written into {there}; name a file in a folder of yours")
    if overwrites or not file.exists():
        return
    values, problems = read_part(CLUSTER, file)
    draft, _ = to_recipe({CLUSTER: values}, {})
    measured, ways = draft.cluster.measured, "name another one, or give --overwrite"
    if problems or measured.processor is None:
        raise RecipeError(f"--measure {file}: there is a file already, which doctor has not measured; {ways}")
    if differences := find_differences(measured, here):
        what = f"there is a file already, of another machine: {'; '.join(differences)}"
        raise RecipeError(f"--measure {file}: {what}; {ways}")


def describe_load(here: ClusterMeasured) -> str:
    """The load by other work on this machine; empty where it is quiet."""
    load = os.getloadavg()[0]
    return f"its load of the last minute is {load:.1f} on {here.cores} cores" if load > BUSY_SHARE * here.cores else ""


def make_order(recipe: Recipe, here: ClusterMeasured, result: Path, effort: "Effort | None") -> MeasureOrder:
    """The order for all GPUs, or for the recipe's ranks on the cores, two at least."""
    is_gpu = recipe.launch.device != "cpu" and bool(here.gpus)
    ranks = len(here.gpus) if is_gpu else max(LEAST_RANKS, recipe.launch.ranks or 0)
    threads = recipe.launch.threads_per_rank or recipe.launch.cpus_per_rank or max(1, here.cores // ranks)
    root = Path(recipe.run.root).absolute()
    return MeasureOrder(
        device="cuda" if is_gpu else "cpu",
        ranks=ranks,
        threads=threads,
        dtypes=choose_dtypes(recipe, is_gpu),
        folder=str(next(each for each in (root, *root.parents) if each.is_dir())),
        result=str(result),
        effort=asdict(effort) if effort else None,
    )


def choose_dtypes(recipe: Recipe, is_gpu: bool) -> list[str]:
    """Dtypes of matmuls: the recipe's, the one that it would choose by itself, fp32."""
    import torch

    from framework.model.precision import compute_dtype

    native = compute_dtype(Precision(), torch.device("cuda" if is_gpu else "cpu"))
    chosen = "bf16" if native == torch.bfloat16 else "fp32"
    compute = {"auto": chosen, "fp8": "bf16"}.get(recipe.precision.compute, recipe.precision.compute)
    return list(dict.fromkeys((compute, chosen, "fp32")))


# --- which machine


def describe_machine() -> ClusterMeasured:
    """This machine as a measured file names it: nodes of one kind are alike, whatever their host names."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_name(index) for index in range(count)]
    return ClusterMeasured(name_processor(), count_cores(), gpus, str(torch.__version__))


def name_processor() -> str:
    """The host's processor, as its maker calls it where the kernel says so, with its family and model: makers reuse names."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8", errors="replace") if info.exists() else ""
    words = [re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE) for name in ("model name", "cpu family", "model")]
    found = [each[1].strip() for each in words if each is not None]
    if len(found) < 3:
        return platform.processor() or platform.machine()
    return f"{found[0]}, family {found[1]}, model {found[2]}"


def count_memory() -> int:
    """Bytes of a GPU's memory; without GPUs of the host's, or of what its container gives."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return count_host_memory()


def check_measured(recipe: Recipe) -> None:
    """Raises RecipeError where the recipe's cluster was measured on another machine than this one, on which it is to run; prints
    a caution where only torch's version differs."""
    measured = recipe.cluster.measured
    if measured.processor is None or recipe.launch.kind != "local":
        return
    here = describe_machine()
    if differences := find_differences(measured, here):
        raise RecipeError(
            f"cluster={recipe.cluster.name} was measured on another machine than this one: {'; '.join(differences)}. To plan for"
            " this machine measure it: meshwright doctor --measure FILE.yaml, then cluster=FILE.yaml; to plan for the other one:"
            " launch=slurm, or run the command there"
        )
    if measured.torch != here.torch:
        print(
            f"caution  cluster={recipe.cluster.name} was measured with torch {measured.torch}, and this is {here.torch}: rates"
            " may differ; `meshwright doctor --measure` measures anew",
            file=sys.stderr,
        )


def find_differences(measured: ClusterMeasured, here: ClusterMeasured) -> list[str]:
    """In what two machines differ, so that rates of one say little of the other."""
    pairs = {
        "its processor is": (measured.processor, here.processor),
        "its cores are": (measured.cores, here.cores),
        "its GPUs are": (count_names(measured.gpus), count_names(here.gpus)),
    }
    return [f"{what} {theirs}, here {ours}" for what, (theirs, ours) in pairs.items() if theirs != ours]


def count_names(names: list[str]) -> str:
    """`8 x NVIDIA H100 80GB HBM3`; `none`."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"


# --- from measurements to the file


def describe_group(
    order: MeasureOrder, found: Mapping[str, Any], here: ClusterMeasured, memory_bytes: int, host_bytes: int
) -> dict[str, Any]:
    """The keys of the file but for its name. memory_bytes: of a device; host_bytes: of the node's main memory. For GPUs the
    shipped file, where there is one, has the values that one node cannot measure."""
    matmul = {dtype: describe_matmul(order, found, here, dtype) for dtype in order.dtypes}
    first = order.dtypes[0]
    *_, forward, backward = found["attention"][first][-1]
    shipped = name_of_gpu(here.gpus[0]) if here.gpus else None
    known = {} if shipped is None else plain(asdict(read_shipped(shipped)))
    group = {
        "device": here.gpus[0] if order.device == "cuda" else "cpu",
        "devices_per_node": order.ranks,
        "memory_gb": memory_bytes / 2**30,
        "host_memory_gb": host_bytes / 2**30,
        "matmul": known.get("matmul", {}) | matmul,
        **{name: known.get(name, value) for name, value in UNKNOWN_GPU.items() if order.device == "cuda"},
        "attention_share": min(1.0, forward / matmul[first]["peak_tflops"]),
        "attention_backward_share": min(1.0, backward / matmul[first]["peak_tflops"]),
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


def describe_matmul(order: MeasureOrder, found: Mapping[str, Any], here: ClusterMeasured, dtype: str) -> dict[str, Any]:
    """The keys of `matmul` of one dtype. The peak is that of its maker's data sheet where that is known, else the best matmul."""
    measured = found["matmul"][dtype]
    best = max(rate for *_, rate in measured)
    stated = peak_flops(here.gpus[0]) if order.device == "cuda" and dtype == "bf16" else None
    peak = max(best, (stated or 0.0) / 1e12)
    other = {name: found[name][dtype] for name in ("gradient", "attention")}
    return {"peak_tflops": peak, "share": best / peak, "measured": measured, **other}


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
    import numpy as np  # which --help need not wait for

    sizes, times = np.array(points, dtype=float).T
    weights = times**-2
    size, time = np.average(sizes, weights=weights), np.average(times, weights=weights)
    spread = np.average((sizes - size) ** 2, weights=weights)
    slope = np.average((sizes - size) * (times - time), weights=weights) / spread if spread else 0.0
    # The largest message is bytes in some part.
    slope = float(min(max(slope, 0.1 * times[np.argmax(sizes)] / max(sizes)), time / size))
    return max(0.0, float(time - slope * size)), slope


def write_text(name: str, group: Mapping[str, Any], order: MeasureOrder, here: ClusterMeasured, busy: str = "") -> str:
    """The file's text. busy: the load by other work meanwhile. AssertionError where the recipe would refuse it: our mistake."""
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


def describe_findings(group: Mapping[str, Any], order: MeasureOrder) -> Iterator[str]:
    """A table of the measurements."""
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


# --- one rank


def main(path: Path) -> int:
    """Measure as the rank that the environment names and return the exit code; an error is reported, not raised."""
    order = MeasureOrder(**json.loads(path.read_text(encoding="utf-8")))
    os.environ["OMP_NUM_THREADS"] = str(order.threads)
    if order.device == "cpu":
        let_threads_sleep()
    try:
        _measure(order)
    except Exception as error:
        return report_error(error)
    return EXIT_DONE


def _measure(order: MeasureOrder) -> None:
    import torch

    from framework.comm.connect import choose_device, connect
    from framework.commands.timings import measure
    from framework.mesh.topology import Topology

    torch.set_num_threads(order.threads)
    mesh = connect(Topology(tp=order.ranks), choose_device(order.device), timeout_s=CONNECT_WITHIN_S)
    measured = measure(mesh, order.dtypes, Path(order.folder), order.threads, order.effort)
    if mesh.rank == 0:
        Path(order.result).write_text(json.dumps(measured), encoding="utf-8")
    mesh.close()


if __name__ == "__main__":
    run_process(partial(main, Path(sys.argv[1])))
