"""`meshwright doctor`: what is installed and within reach. Each line says ok, or how to fix it; those that say warn, of what this
recipe can do without."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path

from framework.checkpoint.place import is_url
from framework.errors import EXIT_DONE, EXIT_USER, MeshwrightError, OffloadError
from framework.host import count_cores
from framework.imports import loading_libraries
from framework.launch.machine import check_measured
from framework.launch.places import refuse_unreachable
from framework.launch.slurm import partitions, reach
from framework.optim.disk_file import refuse_folder
from framework.recipe.clusters import find_cluster
from framework.recipe.schema import Recipe

PACKAGES = ("torch", "transformers", "datasets", "hydra-core", "wandb")


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and how to fix it where that is needed. Empty `fix`: ok. `is_needed`: the
    recipe cannot be run without it."""

    what: str
    found: str
    fix: str = ""
    is_needed: bool = True

    @property
    def verdict(self) -> str:
        if not self.fix:
            return "ok"
        return "fix" if self.is_needed else "warn"


def doctor_command(recipe: Recipe) -> int:
    """Print the findings; the exit code is that of a user's mistake if one has to be fixed before the recipe can be run."""
    findings = list(examine(recipe))
    for finding in findings:
        print(f"{finding.verdict:<4} {finding.what:<13} {finding.found}")
        if finding.fix:
            print(f"     {'':13} -> {finding.fix}")
    return EXIT_USER if any(finding.verdict == "fix" for finding in findings) else EXIT_DONE


def examine(recipe: Recipe) -> Iterator[Finding]:
    """All findings, in the order in which one of them explains the next."""
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    for package in PACKAGES:
        yield _package(package)
    yield _devices(recipe)
    yield from _measured(recipe)
    yield from _layout(recipe)
    yield from _disk(recipe)
    yield _slurm(recipe)
    yield _writable("run root", Path(recipe.run.root), "run.root")
    yield from _store(recipe)
    yield _writable("token stores", Path(recipe.data.root), "data.root")
    yield _wandb(recipe)


def _store(recipe: Recipe) -> Iterator[Finding]:
    """Whether a URL of checkpoint.root can be written to."""
    root = recipe.checkpoint.root
    if root is None or not is_url(root):
        return
    try:
        refuse_unreachable(root)
    except MeshwrightError as error:
        yield Finding("checkpoints", f"{root} cannot be used", str(error))
    else:
        yield Finding("checkpoints", f"{root}, objects can be put, read and removed")


def _layout(recipe: Recipe) -> Iterator[Finding]:
    """The plan's words, and what would lower its memory; what does not fit is the user's to fix, and says how."""
    with loading_libraries():
        from framework.plan.check import check_layout, check_weights, describe_need
        from framework.plan.relief import CHEAPEST, find_relief, show_bytes
        from framework.plan.savings import find_savings
        from framework.plan.verdict import caution_of_fit

    try:
        plan = check_layout(recipe)
        check_weights(plan)
    except MeshwrightError as error:
        what = f"{recipe.model.weights or recipe.model.family} cannot be laid out so"
        yield Finding("layout", what, str(error))
        return
    # Of a machine that nobody has named the verdict is a guess.
    yield Finding("layout", describe_need(plan), caution_of_fit(plan), is_needed=recipe.cluster.name is not None)
    cheapest = [f"{change}: {show_bytes(size)}" for change, size in islice(find_relief(plan, 0), CHEAPEST)]
    if cheapest:
        yield Finding("memory", f"would be less with {', then '.join(cheapest)}")
    for each in find_savings(plan, 0):
        host = f", the host holds {show_bytes(each.host)} more" if each.host > 0 else ""
        found = f"{each.override} by itself saves {show_bytes(each.device)}{host}; costs {each.costs}"
        yield Finding("option", found)


def _disk(recipe: Recipe) -> Iterator[Finding]:
    """Whether files of states can be made in the folder that the recipe names; a cluster's nodes look for themselves."""
    path = recipe.memory.offload.disk_path
    if path is None or recipe.launch.kind != "local":
        return
    try:
        refuse_folder(Path(path))
    except OffloadError as error:
        yield Finding("states' disk", f"{path} cannot be used", str(error))
    else:
        yield Finding("states' disk", f"{path}, {shutil.disk_usage(path).free / 2**30:,.0f} GiB free")


def _measured(recipe: Recipe) -> Iterator[Finding]:
    """The cluster by which plan and search foretell, and whether its file is of this machine."""
    from framework.plan.target import resolve_target

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
        yield Finding("cluster", found, str(error))
        return
    yield Finding("cluster", found)


def _package(name: str) -> Finding:
    try:
        return Finding(name, version(name))
    except PackageNotFoundError:
        return Finding(name, "not installed", "make install, in the clone")


def _devices(recipe: Recipe) -> Finding:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        return Finding("devices", f"{count} x {torch.cuda.get_device_name(0)}, CUDA {torch.version.cuda}")
    found = f"no GPU; {count_cores()} CPU cores"
    if recipe.launch.device == "cuda" and recipe.launch.kind == "local":
        return Finding("devices", found, "launch.device=auto; or install a torch for this machine's GPU driver")
    return Finding("devices", found)


def _slurm(recipe: Recipe) -> Finding:
    if shutil.which("sbatch") is None:
        fix = "log in to a node of the cluster; to try it here: scripts/local_cluster.sh"
        return Finding("slurm", "no sbatch on the path", fix if recipe.launch.kind == "slurm" else "")
    why_not = reach()
    if why_not is not None:
        fix = "is SLURM_CONF right, is slurmctld running? scripts/local_cluster.sh start starts one on this machine"
        # Its tools without a controller are on many a workstation, which a run of this machine does not ask.
        return Finding("slurm", f"not reachable: {why_not.splitlines()[0]}", fix, recipe.launch.kind == "slurm")
    return Finding("slurm", partitions())


def _writable(what: str, folder: Path, key: str) -> Finding:
    """A file is made in the folder, or where the folder would be made."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    try:
        with tempfile.TemporaryFile(dir=place):
            free = shutil.disk_usage(place).free
    except OSError as error:
        return Finding(what, f"{folder}: {error.strerror}", f"{key}=a folder of yours")
    return Finding(what, f"{folder}, {free / 2**30:,.0f} GiB free")


def _wandb(recipe: Recipe) -> Finding:
    mode: str = recipe.track.wandb.mode
    has_key = bool(os.environ.get("WANDB_API_KEY")) or "wandb.ai" in _netrc()
    if mode == "auto":
        mode = "online" if has_key else "offline (no key; `wandb login` makes it online, `wandb sync` sends it later)"
    elif mode == "online" and not has_key:
        return Finding("wandb", "online, without a key", "wandb login; or track=offline")
    return Finding("wandb", mode)


def _netrc() -> str:
    path = Path("~/.netrc").expanduser()
    return path.read_text() if path.is_file() else ""
