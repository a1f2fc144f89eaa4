"""The cost of loading a checkpoint into another layout, beside torch's distributed checkpoints (DCP) of the same bytes.

    python scripts/bench/checkpoint_load.py [--parameters 200e6] [--rounds 5] [--folder /tmp] [--json FILE] [CASE ...]

A Llama with AdamW (fp32) is saved on one layout by our code and by DCP, whose tensors are DTensors of the same shapes and shards
(by rows where ZeRO divides). Other processes then load either in turns into a second layout, over memory that a first round has
touched, which is not counted: from the disk, for which the page cache is emptied of both sides' files, and from the page cache.
DCP verifies nothing, ours every byte.

    seconds     of the slowest rank
    CPU         seconds of all ranks, with all their threads
    read        bytes that a rank has read (rchar of /proc/self/io; what ranks send one another is not of a file), of what it owns

Compare sides of one run only: this machine's load changes by the minute. CPU seconds change less.
"""

import argparse
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from framework.checkpoint.commit import Retention
from framework.checkpoint.load import load_newest
from framework.checkpoint.save import Saver
from framework.comm.collectives import all_reduce
from framework.comm.connect import connect
from framework.comm.objects import all_gather_object
from framework.mesh.layout import part
from framework.plan.plan import make_plan
from framework.recipe.schema import Parallel, Recipe, Zero
from framework.train.build import build
from framework.train.state import read_entries, saved_entries, share_read
from framework.train.step import TrainingRun
from scripts.bench.checkpoint import CPU, cpu_seconds, describe_llama, forget

LAYOUTS: dict[str, tuple[int, Parallel, Zero]] = {
    "1 rank": (1, Parallel(), Zero()),
    "zero 3": (2, Parallel(), Zero(stage=3)),
    "zero 0": (2, Parallel(), Zero(stage=0)),
    "tp 2": (2, Parallel(tp=2), Zero()),
    "pp 2": (2, Parallel(pp=2), Zero()),
}
CASES = {
    "2 to 1": ("zero 3", "1 rank"),
    "1 to 2": ("1 rank", "zero 3"),
    "tp 2 to pp 2": ("tp 2", "pp 2"),
    "zero 3 to 0": ("zero 3", "zero 0"),
}


@dataclass(frozen=True)
class Cost:
    """The cost of one load by all ranks. read: bytes, of the rank that has read most, divided by what it owns."""

    seconds: float
    cpu_s: float
    read: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--parameters", type=float, default=200e6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    found = {}
    for case in options.cases:
        source, target = CASES[case]
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            start(save, source, Path(folder), options)
            start(load, target, Path(folder), options)
            found[case] = json.loads((Path(folder) / "found.json").read_text())
        show(case, found[case])
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def start(work: Callable[..., None], layout: str, folder: Path, options: argparse.Namespace) -> None:
    """Run `work` on the ranks of a layout."""
    ranks = LAYOUTS[layout][0]
    arguments = (work, layout, folder, options)
    torch.multiprocessing.spawn(run_rank, arguments, nprocs=ranks)  # type: ignore[no-untyped-call]


def run_rank(rank: int, work: Callable[..., None], layout: str, folder: Path, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    ranks, parallel, zero = LAYOUTS[layout]
    recipe, config = describe_llama(int(options.parameters), ranks)
    recipe = replace(recipe, parallel=parallel, zero=zero)
    plan = make_plan(recipe, config)
    mesh = connect(plan.topology, CPU, f"file://{folder / work.__name__}", rank)
    run = build(plan, mesh, resumes=work is load)
    work(run, recipe, folder, options.rounds)
    mesh.close()


def save(run: TrainingRun, recipe: Recipe, folder: Path, rounds: int) -> None:
    """Both checkpoints, of the same layout."""
    saver = Saver(folder / "ours", run.mesh.axis("world"), Retention(keep=1), is_async=False)
    saver.start(1, saved_entries(run), {"step": 1})
    saver.finish()
    dcp.save(tensors_for_dcp(run, recipe), checkpoint_id=folder / "dcp", no_dist=run.mesh.topology.world == 1)


def load(run: TrainingRun, recipe: Recipe, folder: Path, rounds: int) -> None:
    """Load in turns."""
    tensors = tensors_for_dcp(run, recipe)
    owned = sum(each.nbytes for each in local_tensors(tensors.values()))

    def load_ours() -> int:
        before = bytes_read()
        assert load_newest(folder / "ours", read_entries(run), run.mesh.axis("world")) is not None
        count = bytes_read() - before
        share_read(run)
        return count

    def load_dcp() -> int:
        before = bytes_read()
        dcp.load(tensors, checkpoint_id=folder / "dcp", no_dist=run.mesh.topology.world == 1)
        return bytes_read() - before

    costs: dict[str, list[Cost]] = defaultdict(list)
    for _ in range(rounds + 1):
        for origin in ("disk", "cache"):
            for name, work in (("dcp.load", load_dcp), ("ours", load_ours)):
                if origin == "disk":
                    forget(folder)
                costs[f"{name}, {origin}"].append(measure(work, owned, run))
    if run.mesh.rank == 0:
        found = {name: [vars(each) for each in several] for name, several in costs.items()}
        (folder / "found.json").write_text(json.dumps(found))


def measure(work: Callable[[], int], owned: int, run: TrainingRun) -> Cost:
    world = run.mesh.axis("world")
    all_reduce(torch.ones(1), world)
    began, cpu_s = time.perf_counter(), cpu_seconds()
    count = work()
    mine = (time.perf_counter() - began, cpu_seconds() - cpu_s, count / owned)
    each = all_gather_object(mine, world)
    return Cost(max(one[0] for one in each), sum(one[1] for one in each), max(one[2] for one in each))


def tensors_for_dcp(run: TrainingRun, recipe: Recipe) -> dict[str, Any]:
    """Tensors that a rank of the run holds, as DCP is given them: shards of tensor parallelism as they are, of ZeRO by rows."""
    topology, world = run.mesh.topology, run.mesh.axis("world")
    along = init_device_mesh("cpu", (world.size,)) if topology.world > 1 else None
    divides = recipe.zero.stage == 3
    tensors: dict[str, Any] = {}
    for buffer in run.buffers:
        for slot in buffer.slots:
            layout = slot.layout
            shape, shards = list(layout.shape), list(layout.shards)
            dims = [shard.dim for shard in shards] or ([0] if divides else [])
            for dim in dims:
                low, high = part(shape[dim], world.rank, world.size)
                shape[dim] = high - low
            for name in ("weight", *run.optimizer.state_names):
                local = torch.zeros(shape)
                tensors[f"{name}/{slot.name}"] = place_by_rows(local, layout.shape, along, dims)
    return tensors


def place_by_rows(local: torch.Tensor, shape: tuple[int, ...], along: Any, dims: list[int]) -> Any:
    """A DTensor of a global shape, of which `local` is a rank's shard of a dim; `local` where it is whole."""
    if not dims:
        return local
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, along, [Shard(dims[0])], shape=torch.Size(shape), stride=stride)


def local_tensors(tensors: Iterable[Any]) -> list[torch.Tensor]:
    return [each.to_local() if isinstance(each, DTensor) else each for each in tensors]


def bytes_read() -> int:
    found = re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())
    return int(found[1]) if found else 0


def show(case: str, found: dict[str, list[dict[str, float]]]) -> None:
    """A few lines of the table; the first round is left out."""
    for name, rounds in found.items():
        middle = {key: median(each[key] for each in rounds[1:]) for key in rounds[0]}
        print(
            f"{case:14} {name:16} {middle['seconds']:7.2f} s  CPU {middle['cpu_s']:6.2f} s  read {middle['read']:5.2f}"
        )
    for origin in ("disk", "cache"):
        pairs = list(zip(found[f"ours, {origin}"][1:], found[f"dcp.load, {origin}"][1:], strict=True))
        ratios = [median(mine[key] / other[key] for mine, other in pairs) for key in ("seconds", "cpu_s")]
        print(f"{case:14} {origin}: ours / dcp.load {ratios[0]:.2f} of seconds, {ratios[1]:.2f} of CPU", flush=True)


if __name__ == "__main__":
    main()
