"""`meshwright doctor --measure`: the machine's file for `cluster=FILE.yaml`, from what ranks on it have measured."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from framework.errors import EXIT_DONE, RecipeError, RunError
from framework.host import count_host_memory
from framework.launch import measure_rank
from framework.launch.agent import Outcome, run_ranks
from framework.launch.local import rank_variables
from framework.launch.machine import count_memory, describe_machine, find_differences
from framework.launch.measure_order import Order
from framework.launch.measured_file import describe_findings, describe_group, write_text
from framework.launch.timings import ON_CPU, ON_GPU, Effort
from framework.recipe.convert import to_recipe
from framework.recipe.saved import CLUSTER, ENDINGS, read_cluster_file, write_cluster_file
from framework.recipe.schema import ClusterMeasured, Recipe
from framework.start import python_words

DEFAULT_NAME = "measured"
# Collectives need two ranks.
LEAST_RANKS = 2
# Of the cores: a machine whose load of the last minute is higher is not quiet.
BUSY_SHARE = 0.5


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


def measure_command(recipe: Recipe, file: Path, *, overwrites: bool = False, effort: Effort | None = None) -> int:
    """Measure this machine and write its file; the exit code. Nothing is written where ranks fail or are interrupted.

    overwrites: also a file of another machine. effort: how much is measured, None: what suits the device. RecipeError where the
    file is of another machine, or the recipe is for a cluster's nodes."""
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
        outcome = start_ranks(recipe, order, Path(folder))
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
    values, problems = read_cluster_file(file)
    draft, _ = to_recipe({CLUSTER: values}, {})
    measured, ways = draft.cluster.measured, "name another one, or give --overwrite"
    if problems or measured.processor is None:
        raise RecipeError(f"--measure {file}: there is a file already, which doctor has not measured; {ways}")
    if differences := find_differences(measured, here):
        what = f"there is a file already, of another machine: {'; '.join(differences)}"
        raise RecipeError(f"--measure {file}: {what}; {ways}")


def describe_load(here: ClusterMeasured) -> str:
    """How busy other work keeps this machine; empty where it is quiet."""
    load = os.getloadavg()[0]
    return f"its load of the last minute is {load:.1f} on {here.cores} cores" if load > BUSY_SHARE * here.cores else ""


def make_order(recipe: Recipe, here: ClusterMeasured, result: Path, effort: Effort | None) -> Order:
    """What the ranks are to measure: all GPUs, or the recipe's ranks on the cores, two at least."""
    is_gpu = recipe.launch.device != "cpu" and bool(here.gpus)
    ranks = len(here.gpus) if is_gpu else max(LEAST_RANKS, recipe.launch.ranks or 0)
    threads = recipe.launch.threads_per_rank or recipe.launch.cpus_per_rank or max(1, here.cores // ranks)
    root = Path(recipe.run.root).absolute()
    return Order(
        device="cuda" if is_gpu else "cpu",
        ranks=ranks,
        threads=threads,
        dtypes=choose_dtypes(recipe, is_gpu),
        folder=str(next(each for each in (root, *root.parents) if each.is_dir())),
        result=str(result),
        effort=asdict(effort or (ON_GPU if is_gpu else ON_CPU)),
    )


def choose_dtypes(recipe: Recipe, is_gpu: bool) -> list[str]:
    """Of matmuls: what the recipe computes in, then fp32, and what it would choose by itself."""
    import torch

    from framework.model.precision import compute_dtype
    from framework.recipe.schema import Precision

    native = compute_dtype(Precision(), torch.device("cuda" if is_gpu else "cpu"))
    chosen = "bf16" if native == torch.bfloat16 else "fp32"
    compute = {"auto": chosen, "fp8": "bf16"}.get(recipe.precision.compute, recipe.precision.compute)
    return list(dict.fromkeys((compute, chosen, "fp32")))


def start_ranks(recipe: Recipe, order: Order, folder: Path) -> Outcome:
    """How the ranks ended that have measured. folder: for their errors, and the order."""
    path = folder / "order.json"
    order.save(path)
    words = python_words(measure_rank.__name__, str(path))
    return run_ranks(words, order.ranks, folder / "errors", rank_variables(recipe))
