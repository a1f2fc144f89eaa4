"""Render the SLURM job script.

A template of `slurm/` becomes a file in the run directory; sbatch gets that file, byte for byte. Nothing of
a site is in the templates: it comes from the recipe's `launch` keys.
"""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from framework.launch.jobs import call
from framework.mesh.topology import place
from framework.object_store import is_url, open_place
from framework.recipe.derive import Derived, can_move, derive, has_range, node_counts
from framework.recipe.environment import names_in, shell_word
from framework.recipe.overrides import write_resume
from framework.recipe.problem import Problem
from framework.recipe.schema import Launch, Recipe

RANK_PROGRAM = "framework.train.program"
# Python, autograd's thread, NCCL's proxy, gloo, the loader, threads that save and watch: on one core they starve the proxy.
CPUS_OF_GPU_RANK = 8
TEMPLATES = {"none": "bare.sh", "apptainer": "apptainer.sh", "pyxis": "pyxis.sh"}
_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)
_CONTROL = r"\x00-\x1f\x7f"
# Characters at which apptainer's --bind and pyxis' mounts split a path; pyxis passes on lines of an fstab.
_UNFIT_TO_MOUNT = {"none": "", "apptainer": r":,\\", "pyxis": r":,\\\s"}
# Seconds that srun waits for the other ranks once the first has ended: rank 0 still closes what it writes.
WAIT_S = 180


@dataclass(frozen=True)
class Script:
    """A rendered script. `srun`: the line in it that starts the ranks, with the program."""

    text: str
    srun: str


def render(
    recipe: Recipe, run_dir: Path, here: Path, array: int | None = None, counts: Sequence[int] | None = None
) -> Script:
    """The script of a run, or of a sweep's runs: `array` of them, whose folders are `run_dir`-0, `run_dir`-1 and so on.

    here: the folder in which the recipe's relative paths hold. counts: so many nodes the run can be laid out on, in order; None:
    all that the recipe allows. Pure: the same arguments give the same bytes.
    """
    counts = counts or node_counts(recipe)
    launch, derived = recipe.launch, derive(recipe)
    run = shlex.quote(str(run_dir)) + ('-"$SLURM_ARRAY_TASK_ID"' if array else "")
    log = str(run_dir).replace("%", "%%") + f"{'-%a' if array else ''}/job.log"  # sbatch reads %j, %a and others in it
    moves = can_move(recipe)
    srun, program = _srun(launch, derived, moves), _program(launch, derived, moves)
    template = TEMPLATES[launch.container.kind]
    text = (
        _templates()
        .get_template(template)
        .render(
            title=run_dir.name,
            template=template,
            options=_options(recipe, derived, run_dir.name, log, here, array, counts),
            moves=moves,
            orders=bool(place(derived).units),
            nodes=derived.nodes,
            counts=counts,
            spares=launch.spares,
            ranks_per_node=derived.ranks_per_node,
            run=run,
            go_on=_go_on(recipe, run_dir, array),
            retries=launch.retries,
            restarts_without_checkpoint=launch.restarts_without_checkpoint,
            chain=launch.chain,
            copies=recipe.checkpoint.neighbor_copies,
            assignments=_assignments(launch),
            names=sorted(launch.environment),
            references=sorted({name for value in launch.environment.values() for name in names_in(value)}),
            set_up=launch.set_up,
            ranks=f"{derived.world} rank{'s' if derived.world > 1 else ''}",
            gpus=launch.gres is not None,
            image=launch.container.image,
            mounts=_mounts(recipe, run_dir, here),
            srun=srun,
            program=program,
        )
    )
    begin = text.index(f"{srun} \\\n")
    return Script(text, text[begin : text.index(" &\n", begin)])


def find_script_problems(recipe: Recipe, here: Path) -> Iterator[Problem]:
    """Parts of the recipe that cannot be in the script, beyond the recipe's rules. here: as for `render`."""
    yield from _find_folder_problems(recipe, here)
    if recipe.launch.set_up and shutil.which("bash"):
        yield from _find_open_lines(recipe.launch.set_up)


def _find_open_lines(lines: list[str]) -> Iterator[Problem]:
    """Quotes and here-documents that are not closed, which would swallow the script: the job would end well without a rank."""
    reason = call(["bash", "-n", "-c", "\n".join(lines)]).stderr.strip()
    if reason:
        reason = re.sub(r"^.*?line \d+: ", "", reason.splitlines()[0])
        yield Problem("launch.set_up", None, f"bash cannot read these lines: {reason}", "close what they open")


def _find_folder_problems(recipe: Recipe, here: Path) -> Iterator[Problem]:
    """Folders whose path has characters that do not get through. Spaces, quotes and % do.

    For a run's folder: sbatch leaves the %-patterns of `--output` after a backslash, and PYTHONPATH, which has the run's code,
    is split at colons. In a container: see `_UNFIT_TO_MOUNT`.
    """
    kind = recipe.launch.container.kind
    stores = [] if is_url(recipe.data.root) else [("data.root", here / recipe.data.root)]
    for key, folder in (("run.root", here / recipe.run.root), *stores, ("chdir", here)):
        unfit = _CONTROL + r"\\:" * (key == "run.root") + _UNFIT_TO_MOUNT[kind]
        if found := re.search(f"[{unfit}]", str(folder)):
            message = f"the job would not find {str(folder)!r}: a {found[0]!r} in a path does not get through"
            way = (
                "submit from another folder" if key == "chdir" else f"set {key} to another one, or submit from another"
            )
            yield Problem(key, None, message, f"{way}; a link to this one will do")


def _srun(launch: Launch, derived: Derived, moves: bool) -> str:
    """The srun line: every rank is a task, and nodes are filled in order, as `mesh/topology.py` numbers them. A rank that
    fails ends all.

    moves: the script chooses the nodes. SLURM takes a step for running until all of its nodes have said that it is over, which
    a lost one never does: the next step overlaps it.
    """
    is_direct = launch.starter == "srun"
    each = derived.ranks_per_node if is_direct else 1
    words = [
        "srun",
        f"--nodes={derived.nodes}" if not moves else '--nodes="${#nodes[@]}"',
        f"--ntasks={each * derived.nodes}" if not moves else f'--ntasks="$(({each} * ${{#nodes[@]}}))"',
        f"--ntasks-per-node={each}",
        *(['--nodelist="$node_list"', "--overlap", "--job-name=ranks"] if moves else []),
        "--distribution=block",
        "--kill-on-bad-exit=1",
        f"--wait={WAIT_S}",
        "--export=ALL",  # else a job that was submitted with --export=NONE would keep from its ranks what its script sets
    ]
    cpus = choose_cpus(launch)
    if cpus is not None or has_range(launch):  # srun does not take it over from sbatch
        words.append(f"--cpus-per-task={(cpus or 1) * derived.ranks_per_node // each}")
    return " ".join(words)


def choose_cpus(launch: Launch) -> int | None:
    """CPUs of a rank; None: the cluster's default, which is 1 nearly everywhere."""
    return launch.cpus_per_rank or (CPUS_OF_GPU_RANK if launch.gres and launch.device != "cpu" else None)


def _program(launch: Launch, derived: Derived, moves: bool) -> str:
    in_container = launch.container.kind != "none"
    python = shlex.quote(launch.python or ("python" if in_container else sys.executable))
    if launch.starter == "srun":
        return f'{python} -m {RANK_PROGRAM} "$run"'
    # The static rendezvous numbers ranks by nodes; c10d's does not. Its agents pass signals on and wait for the save.
    nodes = '"$SLURM_STEP_NUM_NODES"' if moves else derived.nodes
    torchrun = (
        f"{python} -m torch.distributed.run --nnodes={nodes} --nproc-per-node={derived.ranks_per_node}"
        ' --node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --max-restarts=0'
        f' -m {RANK_PROGRAM} "$0"'
    )
    signals = "TORCHELASTIC_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
    return f'env {signals} bash -c {shlex.quote(torchrun)} "$run"'


def _options(
    recipe: Recipe,
    derived: Derived,
    name: str,
    log: str,
    here: Path,
    array: int | None,
    counts: Sequence[int],
) -> list[str]:
    """sbatch's options: resources, places, times, and restarts."""
    launch = recipe.launch
    is_direct = launch.starter == "srun"
    tasks: int | None = derived.ranks_per_node if is_direct else 1
    of_rank = choose_cpus(launch)
    cpus = of_rank and of_rank * (1 if is_direct else derived.ranks_per_node)
    # Told of tasks, sbatch takes the least nodes that hold them: a node is one task with all its CPUs.
    if has_range(launch):
        tasks, cpus = None, (of_rank or 1) * derived.ranks_per_node
    nodes = dict.fromkeys((counts[0] + launch.spares, counts[-1] + launch.spares))
    memory = launch.memory_per_rank_gb and round(launch.memory_per_rank_gb * 1024) * derived.ranks_per_node
    at_once = f"%{launch.at_once}" if launch.at_once else ""
    pairs: list[tuple[str, Any]] = [
        ("job-name", name),
        ("array", f"0-{array - 1}{at_once}" if array else None),
        ("nodes", "-".join(map(str, nodes))),
        ("ntasks-per-node", tasks),
        ("gres", f"{launch.gres}:{derived.ranks_per_node}" if launch.gres else None),
        ("cpus-per-task", cpus),
        ("mem", f"{memory}M" if memory else None),
        ("partition", launch.partition),
        ("account", launch.account),
        ("qos", launch.qos),
        ("segment", launch.segment),
        ("switches", launch.switches),
        ("time", launch.time),
        ("signal", f"B:USR1@{launch.signal_seconds_before_end}"),
        ("chdir", here),
        ("output", log),
        ("open-mode", "append"),
    ]
    return [f"--{name}={_sbatch_word(str(value))}" for name, value in pairs if value is not None] + [
        "--requeue",
        *(["--exclusive"] if launch.exclusive else []),
        *(["--no-kill"] if can_move(recipe) else []),
        *launch.sbatch,
    ]


def _sbatch_word(text: str) -> str:
    """A value in an `#SBATCH` line, which no shell reads: a backslash takes the next character as it is, in any quotes."""
    return text if _PLAIN.fullmatch(text) else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


def _assignments(launch: Launch) -> list[str]:
    """launch.environment as bash's assignments before a command: they reach the ranks, not the script's own variables.

    PYTHONPATH begins with the run's code in any case, and comes first: bash expands a word after it has assigned those before.
    """
    words = {name: shell_word(value) for name, value in launch.environment.items()}
    if "PYTHONPATH" in words:
        words = {"PYTHONPATH": '"$run/code":' + words.pop("PYTHONPATH")} | words
    # Apptainer keeps its image's PATH and LD_LIBRARY_PATH, and lets nothing in with --cleanenv, unless told by these names.
    prefixes = ("APPTAINERENV_", "") if launch.container.kind == "apptainer" else ("",)
    return [f"{prefix}{name}={word}" for prefix in prefixes for name, word in words.items()]


def _go_on(recipe: Recipe, run_dir: Path, array: int | None) -> str:
    """The command that goes on with the run, as a word of the script."""
    command = write_resume(recipe.launch.kind, replace(recipe.run, id=run_dir.name))
    if not array:
        return shlex.quote(command)
    before, name, after = command.partition(f"run.id={run_dir.name}")
    return f'{shlex.quote(before + name + "-")}"$SLURM_ARRAY_TASK_ID"{shlex.quote(after)}'


def _mounts(recipe: Recipe, run_dir: Path, here: Path) -> list[str]:
    """Folders that a container needs: the folder of the recipe's relative paths, runs, token stores, checkpoints."""
    folders = [here, run_dir.parent]
    for where in (open_place(recipe.data.root), open_place(recipe.checkpoint.root or ".")):
        if isinstance(where, Path):
            folders.append((here / where.expanduser()).resolve())
    outer = [
        folder for folder in dict.fromkeys(folders) if not any(folder.is_relative_to(o) for o in folders if o != folder)
    ]
    return [*(f"{folder}:{folder}" for folder in outer), *recipe.launch.container.mounts]


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parents[1] / "shipped" / "slurm"),
        undefined=jinja2.StrictUndefined,
        comment_start_string="{##",  # "{#" is bash's, of ${#array[@]}
        comment_end_string="##}",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["quote"] = shlex.quote
    return environment
