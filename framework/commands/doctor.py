"""`meshwright doctor`: software, devices, disks and SLURM that a recipe needs. Each line says ok, or how to fix it; `warn` marks
what this recipe can do without."""

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

from framework.commands.arguments import compose_recipe
from framework.errors import EXIT_DONE, EXIT_USER, MeshwrightError, RecipeError
from framework.host import count_cores
from framework.imports import loading_libraries
from framework.launch.jobs import find_option_problems, partitions, reach
from framework.launch.places import refuse_unreachable, refuse_unwritable
from framework.object_store import is_url
from framework.optim.disk_file import refuse_folder
from framework.recipe.machines import find_cluster
from framework.recipe.schema import Recipe

PACKAGES = ("torch", "transformers", "datasets", "hydra-core", "wandb")


@dataclass(frozen=True)
class DoctorLine:
    """One line of the output."""

    what: str
    found: str
    fix: str = ""  # the fix; empty where it is ok
    is_needed: bool = True  # the recipe cannot be run without it

    @property
    def verdict(self) -> str:
        if not self.fix:
            return "ok"
        return "fix" if self.is_needed else "warn"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "--measure",
        nargs="?",
        const="",
        metavar="FILE",
        help="measure this machine in under two minutes and write its rates for plan and search, as cluster=FILE"
        " (default: measured.yaml)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="with --measure: replace the file of another machine, too"
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the lines, or measure the machine. The exit code is that of a user's mistake if something has to be fixed before the
    recipe can be run."""
    if arguments.measure is not None:
        return _measure(arguments)
    if arguments.overwrite:
        raise RecipeError("--overwrite is for the file of --measure FILE")
    lines = list(examine(compose_recipe(arguments)))
    for line in lines:
        print(f"{line.verdict:<4} {line.what:<13} {line.found}")
        if line.fix:
            print(f"     {'':13} -> {line.fix}")
    return EXIT_USER if any(line.verdict == "fix" for line in lines) else EXIT_DONE


def _measure(arguments: argparse.Namespace) -> int:
    typed = arguments.measure
    if "=" in typed:  # argparse takes the override behind a lone --measure for its file
        arguments.overrides, typed = [typed, *arguments.overrides], ""
    recipe = compose_recipe(arguments)
    from framework.commands.measure import choose_file, measure_command

    return measure_command(recipe, choose_file(typed, arguments.recipes), overwrites=arguments.overwrite)


def examine(recipe: Recipe) -> Iterator[DoctorLine]:
    """All lines, in the order in which one explains the next."""
    yield DoctorLine("python", f"{platform.python_version()} ({sys.executable})")
    for package in PACKAGES:
        try:
            yield DoctorLine(package, version(package))
        except PackageNotFoundError:
            yield DoctorLine(package, "not installed", "make install, in the clone")
    yield _devices(recipe)
    yield from _measured(recipe)
    yield from _layout(recipe)
    disk, checkpoints = recipe.memory.offload.disk_path, recipe.checkpoint.root
    if disk is not None and recipe.launch.kind == "local":  # a cluster's nodes look for themselves
        yield _place("states' disk", disk, lambda: refuse_folder(Path(disk)))
    yield _slurm(recipe)
    yield _place("run root", recipe.run.root, lambda: refuse_unwritable(Path(recipe.run.root)))
    if checkpoints is not None:
        yield _place("checkpoints", checkpoints, lambda: refuse_unreachable(checkpoints))
    yield _place("token stores", recipe.data.root, lambda: refuse_unreachable(recipe.data.root, "data.root"))
    yield _wandb(recipe)


def _place(what: str, place: str, refuse: Callable[[], None]) -> DoctorLine:
    """A line on a folder or a URL. refuse: tries it, and raises what is wrong."""
    try:
        refuse()
    except MeshwrightError as error:
        return DoctorLine(what, f"{place} cannot be used", str(error))
    if is_url(place):
        return DoctorLine(what, f"{place}, objects can be put, read and removed")
    folder = Path(place).expanduser().absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return DoctorLine(what, f"{place}, {shutil.disk_usage(there).free / 2**30:,.0f} GiB free")


def _layout(recipe: Recipe) -> Iterator[DoctorLine]:
    """The layout's memory, and options that would lower it. A layout that does not fit is the user's to fix."""
    with loading_libraries():
        from framework.output import show_bytes
        from framework.plan.advice import SHOWN, caution_of_fit, find_relief, find_savings
        from framework.plan.check import check_layout, check_weights, describe_need

    try:
        plan = check_layout(recipe)
        check_weights(plan)
    except MeshwrightError as error:
        what = f"{recipe.model.weights or recipe.model.family} cannot be laid out so"
        yield DoctorLine("layout", what, str(error))
        return
    # The verdict is a guess for a machine that nobody has named.
    yield DoctorLine("layout", describe_need(plan), caution_of_fit(plan), is_needed=recipe.cluster.name is not None)
    cheapest = [f"{change}: {show_bytes(size)}" for change, size in islice(find_relief(plan, 0), SHOWN)]
    if cheapest:
        yield DoctorLine("memory", f"would be less with {', then '.join(cheapest)}")
    for each in find_savings(plan, 0):
        host = f", the host holds {show_bytes(each.host)} more" if each.host > 0 else ""
        found = f"{each.override} by itself saves {show_bytes(each.device)}{host}; costs {each.costs}"
        yield DoctorLine("option", found)


def _measured(recipe: Recipe) -> Iterator[DoctorLine]:
    """The cluster of the forecasts of plan and search, and whether its file is of this machine."""
    from framework.commands.measure import check_measured
    from framework.plan.candidate import resolve_target

    try:
        described, is_assumed = find_cluster(resolve_target(recipe))
    except MeshwrightError:  # the layout's line says why
        return
    found = (
        f"{described.name}, by data sheets" if described.measured.processor is None else f"{described.name}, measured"
    )
    if is_assumed:
        found += "; assumed, as the recipe names none (`meshwright doctor --measure` measures this machine)"
    try:
        check_measured(recipe)
    except MeshwrightError as error:
        yield DoctorLine("cluster", found, str(error))
        return
    yield DoctorLine("cluster", found)


def _devices(recipe: Recipe) -> DoctorLine:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return DoctorLine("devices", f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")
    found = f"no GPU; {count_cores()} CPU cores"
    if recipe.launch.device == "cuda" and recipe.launch.kind == "local":
        return DoctorLine("devices", found, "launch.device=auto; or install a torch for this machine's GPU driver")
    return DoctorLine("devices", found)


def _slurm(recipe: Recipe) -> DoctorLine:
    if shutil.which("sbatch") is None:
        fix = "log in to a node of the cluster; to try it here: scripts/local_cluster.sh"
        return DoctorLine("slurm", "no sbatch on the path", fix if recipe.launch.kind == "slurm" else "")
    why_not = reach()
    if why_not is not None:
        fix = "is SLURM_CONF right, is slurmctld running? scripts/local_cluster.sh start starts one on this machine"
        # Its tools without a controller are on many a workstation, which a run of this machine does not ask.
        return DoctorLine("slurm", f"not reachable: {why_not.splitlines()[0]}", fix, recipe.launch.kind == "slurm")
    if recipe.launch.kind == "slurm" and (problem := next(find_option_problems(recipe.launch), None)) is not None:
        return DoctorLine("slurm", f"{problem.key}={problem.value} {problem.message}", problem.fix)
    return DoctorLine("slurm", partitions())


def _wandb(recipe: Recipe) -> DoctorLine:
    mode: str = recipe.track.wandb.mode
    netrc = Path("~/.netrc").expanduser()
    has_key = bool(os.environ.get("WANDB_API_KEY")) or (netrc.is_file() and "wandb.ai" in netrc.read_text())
    if mode == "auto":
        mode = "online" if has_key else "offline (no key; `wandb login` makes it online, `wandb sync` sends it later)"
    elif mode == "online" and not has_key:
        return DoctorLine("wandb", "online, without a key", "wandb login; or track=offline")
    return DoctorLine("wandb", mode)
