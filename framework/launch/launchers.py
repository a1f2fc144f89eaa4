"""Refusal of commands that a launcher (srun, torchrun, mpirun) has started several times: each would begin a run of its own."""

from collections.abc import Iterator, Mapping

from framework.errors import RecipeError

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
