"""Variables by which launchers speak to what they start: srun, sbatch, torchrun, mpirun.

Around a command they make it one of several, each of which would begin a run of its own. Left over in a shell they are options of
SLURM's commands: sbatch takes `SBATCH_PARTITION` before the `#SBATCH --partition` of a script, srun in the job would bind all
ranks to the CPUs of an interactive step (`SLURM_CPU_BIND`), and `SQUEUE_FORMAT` changes what is read here. Neither SLURM's
commands nor ranks on this machine get any.
"""

from collections.abc import Iterator, Mapping

from framework.errors import RecipeError

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
# How SLURM's commands find their cluster, and prove who calls.
_KEPT = frozenset(("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_SACK_KEY", "SLURM_SACK_JWKS"))
# (launcher, its number of processes, this one's number)
_LAUNCHERS = (
    ("torchrun or another launcher of ranks", "WORLD_SIZE", "RANK"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
    ("mpirun", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("mpirun", "PMIX_SIZE", "PMIX_RANK"),
    ("jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK"),
)
# Steps from this number on are SLURM's own: the shell that salloc opens on a node, the batch script.
_OWN_STEPS = 0xFFFF_0000


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what launchers have said in it."""
    return {name: value for name, value in environment.items() if not is_of_launcher(name)}


def slurm_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of SLURM's commands. A job has that of its sbatch: there PYTHONSAFEPATH is set by its script, behind the
    site's own commands."""
    return {name: value for name, value in without_launchers(environment).items() if name != "PYTHONSAFEPATH"}


def is_of_launcher(name: str) -> bool:
    """Whether a launcher, or an option of SLURM's commands, is read from this variable."""
    return name not in _KEPT and (name in _NAMES or name.startswith(_PREFIXES))


def list_options(environment: Mapping[str, str]) -> list[str]:
    """The options of sbatch that the environment has and that no job gets."""
    return sorted(name for name in environment if name.startswith("SBATCH_"))


def refuse_launcher(environment: Mapping[str, str], command: str, is_terminal: bool = False) -> None:
    """Raises RecipeError where this process is one of several that a launcher has started. is_terminal: its input is a terminal,
    so that in `srun --pty` it is the one that a user types to."""
    if is_terminal and "SLURM_PTY_PORT" in environment and _number(environment, "SLURM_PROCID", 0) == 0:
        return
    for launcher, size, rank in (*_LAUNCHERS, *_find_srun(environment)):
        if _number(environment, size, 1) > 1 or _number(environment, rank, 0) > 0:
            said = [name for name in (size, rank) if name in environment]
            raise RecipeError(
                f"`meshwright {command}` is one of several processes, started by {launcher}"
                f" ({', '.join(f'{name}={environment[name]}' for name in said)}), and each would do all of it by itself. Run it"
                " once: Meshwright starts the ranks, as many as launch.ranks says; on SLURM: `meshwright submit`. Where the shell"
                f" has this from elsewhere: unset {' '.join(said)}"
            )


def _find_srun(environment: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """srun, if this is a task of a step. In salloc's shell, and in a batch script, SLURM_NTASKS is what a step would have."""
    step = _number(environment, "SLURM_STEP_ID", _number(environment, "SLURM_STEPID", _OWN_STEPS))
    size = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environment), "")
    yield "srun", size if step < _OWN_STEPS else "", "SLURM_PROCID"


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else default
