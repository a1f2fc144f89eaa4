"""Start a module in a process of its own that runs this copy of the package: `python -P framework/start.py MODULE ARGUMENTS`.

`python -m` searches the working folder first: a user's `random.py` there ends the process, and in another clone of Meshwright the
clone's code runs. `-P` leaves that folder out. Python then finds the installed copy, which need not be the one that starts the
process: this file, which is run by its path, has the package imported from where it lies itself.
"""

import os
import runpy
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder

_PACKAGE = os.path.dirname(os.path.realpath(__file__))
_HOME, _NAME = os.path.split(_PACKAGE)

# Variables of launchers (srun, sbatch, torchrun, mpirun). Left over in a shell they are options of SLURM's commands: sbatch takes
# `SBATCH_PARTITION` before the `#SBATCH --partition` of a script, srun in the job would bind all ranks to the CPUs of an
# interactive step (`SLURM_CPU_BIND`), and `SQUEUE_FORMAT` changes squeue's output. Neither SLURM's commands nor ranks on this
# machine get any.
#
# SLURM's commands, its plugins (_SLURM_, SPANK_), and how MPI's processes find one another.
_PREFIXES = (
    *("SLURM_", "SLURMD_", "SLURMSTEPD_", "_SLURM_", "SPANK_", "SBATCH_", "SRUN_", "SALLOC_", "SATTACH_", "SBCAST_"),
    *("SQUEUE_", "SCANCEL_", "SCONTROL_", "SINFO_", "SACCT_", "SREPORT_", "SSTAT_", "SPRIO_"),
    *("PMI_", "PMI2_", "PMIX_", "OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "JSM_", "TORCHELASTIC_"),
)
# torchrun's.
_NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
)
# Variables by which SLURM's commands find their cluster and authenticate.
_KEPT = frozenset(("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_KEY", "SLURM_SACK_JWKS"))


def python_words(module: str, *arguments: str) -> tuple[str, ...]:
    """The arguments with which Python runs a module, one of this copy or of a library."""
    return ("-P", os.path.join(_PACKAGE, "start.py"), module, *arguments)


def guard_imports() -> None:
    """Have this process, and those that it or a library starts, import nothing from the working folder, and this copy of the
    package. PYTHONPATH may name that folder; an empty word in it, from a colon too many, does not.

    `python -m framework` has the folder in front of its search path, and in a clone finds the package there.
    """
    words = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths, here = [path for path in words if path], os.getcwd()
    # The folders of Python and its libraries come later, and one of them may be the working folder.
    front = slice(1 + len(words))
    if here not in map(os.path.abspath, paths):
        sys.path[front] = [path for path in sys.path[front] if path not in ("", here)]
    if prefer_this_copy():
        paths.insert(0, _HOME)
    os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}


def prefer_this_copy() -> bool:
    """Have imports of the package find this copy, here and in processes of `multiprocessing`, which get this search path. Returns
    whether the path had to be changed: the folder then comes as late as it may, so that nothing else in it hides a library."""
    specs = (finder.find_spec(_NAME, None) for finder in sys.meta_path)
    found = next((spec.origin for spec in specs if spec is not None), None)
    if found is not None and os.path.dirname(os.path.realpath(found)) == _PACKAGE:
        return False
    others = (number for number, folder in enumerate(sys.path) if PathFinder.find_spec(_NAME, [folder]) is not None)
    sys.path.insert(next(others, len(sys.path)), _HOME)
    return True


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without the variables of launchers."""
    return {name: value for name, value in environment.items() if not is_of_launcher(name)}


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of SLURM's commands. A job has that of its sbatch: its script sets PYTHONSAFEPATH, after the site's own
    commands."""
    return {name: value for name, value in without_launchers(environment).items() if name != "PYTHONSAFEPATH"}


def is_of_launcher(name: str) -> bool:
    """Whether a launcher, or an option of SLURM's commands, is read from this variable."""
    return name not in _KEPT and (name in _NAMES or name.startswith(_PREFIXES))


if __name__ == "__main__":
    prefer_this_copy()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
