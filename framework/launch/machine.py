"""Which machine this is, and whether a measured file of a cluster is of it."""

import platform
import re
import sys
from pathlib import Path

from framework.errors import RecipeError
from framework.host import count_cores, count_host_memory
from framework.recipe.schema import ClusterMeasured, Recipe


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
