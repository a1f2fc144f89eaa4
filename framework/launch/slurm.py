"""SLURM from outside a job: the script that is submitted, and the few commands that are asked.

The script is rendered from a template of `slurm/` and written into the run directory; that file, byte for byte, is what
sbatch gets. Nothing of a site is in the templates: it comes from the recipe's `launch` keys.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from framework.checkpoint.place import open_place
from framework.errors import RunError
from framework.recipe.derive import Derived, can_move, derive, has_range, node_counts
from framework.recipe.environment import names_in, shell_word
from framework.recipe.overrides import write_resume
from framework.recipe.problem import Problem
from framework.recipe.schema import Launch, Recipe
from framework.start import slurm_environment

RANK_PROGRAM = "framework.train.program"
TEMPLATES = {"none": "bare.sh", "apptainer": "apptainer.sh", "pyxis": "pyxis.sh"}
_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]+", re.ASCII)
_CONTROL = r"\x00-\x1f\x7f"
# What apptainer's --bind and pyxis' mounts split a path at; pyxis passes on lines of an fstab.
_UNFIT_TO_MOUNT = {"none": "", "apptainer": r":,\\", "pyxis": r":,\\\s"}
# How long srun waits for the other ranks once the first has ended: rank 0 still closes what it writes.
WAIT_S = 180
# States in which a job may still train.
WAITING_OR_RUNNING = (
    "PENDING",
    "RUNNING",
    "COMPLETING",
    "CONFIGURING",
    "REQUEUED",
    "SUSPENDED",
    "RESIZING",
    "STAGE_OUT",
)


@dataclass(frozen=True)
class Script:
    """A rendered script. `srun`: the line in it that starts the ranks, with the program."""

    text: str
    srun: str


@dataclass(frozen=True)
class JobState:
    """What SLURM knows of a job now. `restarts`: how often it was requeued."""

    job_id: str
    state: str
    reason: str = ""
    restarts: int = 0
    nodes: str = ""
    start: str = ""


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
    """What cannot be a part of the script, beyond what the recipe's rules say. here: as for `render`."""
    yield from _find_folder_problems(recipe, here)
    if recipe.launch.set_up and shutil.which("bash"):
        yield from _find_open_lines(recipe.launch.set_up)


def _find_open_lines(lines: list[str]) -> Iterator[Problem]:
    """A quote or a here-document that is not closed would swallow the script: the job would end well without a rank."""
    reason = _call(["bash", "-n", "-c", "\n".join(lines)]).stderr.strip()
    if reason:
        reason = re.sub(r"^.*?line \d+: ", "", reason.splitlines()[0])
        yield Problem("launch.set_up", None, f"bash cannot read these lines: {reason}", "close what they open")


def _find_folder_problems(recipe: Recipe, here: Path) -> Iterator[Problem]:
    """Folders with characters that do not get through. Spaces, quotes and % do.

    A run's folder: sbatch leaves the %-patterns of `--output` after a backslash, and PYTHONPATH, which has the run's code, is
    split at colons. In a container: see `_UNFIT_TO_MOUNT`.
    """
    kind = recipe.launch.container.kind
    for key, folder in (("run.root", here / recipe.run.root), ("data.root", here / recipe.data.root), ("chdir", here)):
        unfit = _CONTROL + r"\\:" * (key == "run.root") + _UNFIT_TO_MOUNT[kind]
        if found := re.search(f"[{unfit}]", str(folder)):
            message = f"the job would not find {str(folder)!r}: a {found[0]!r} in a path does not get through"
            way = (
                "submit from another folder" if key == "chdir" else f"set {key} to another one, or submit from another"
            )
            yield Problem(key, None, message, f"{way}; a link to this one will do")


def submit_script(script: Path, after: str | None = None) -> str:
    """Queue a script; returns the job's id. after: the job whose end it waits for. Raises RunError with sbatch's reason."""
    require_sbatch()
    if ignored := sorted(name for name in os.environ if name.startswith("SBATCH_")):
        fix = (
            "what a job is asked for with is in the recipe: launch.partition, launch.account, launch.sbatch and others"
        )
        print(f"note     sbatch does not get {', '.join(ignored)} of this shell: {fix}", file=sys.stderr)
    dependency = [f"--dependency=afterany:{after}"] if after else []
    result = _call(["sbatch", "--parsable", *dependency, str(script)])
    if result.returncode:
        raise RunError(f"sbatch refused the job: {_reason(result)}\nThe script is {script}")
    return result.stdout.strip().partition(";")[0]


def require_sbatch() -> None:
    """Raises RunError where this machine has no sbatch."""
    if shutil.which("sbatch") is None:
        raise RunError(
            "there is no sbatch on the path: submit on a login node of your cluster. To try it on this machine:"
            " scripts/local_cluster.sh (docs/slurm.md); to train here without SLURM: launch=local"
        )


def find_job(job_id: str) -> JobState | None:
    """The job as the controller knows it, else as accounting does; None if neither does, or there is no SLURM here.

    For an array the task that is least advanced stands for all.
    """
    if shutil.which("scontrol") is None:
        return None
    result = _call(["scontrol", "--oneliner", "show", "job", job_id])
    records = [_fields(line) for line in result.stdout.splitlines()]
    if result.returncode == 0 and records and "JobState" in records[0]:
        fields = min(records, key=lambda each: each["JobState"] not in WAITING_OR_RUNNING)
        return JobState(
            job_id,
            fields["JobState"],
            fields.get("Reason", ""),
            int(fields.get("Restarts", "0")),
            fields.get("NodeList", "").replace("(null)", ""),
            fields.get("StartTime", ""),
        )
    return _find_in_accounting(job_id)


def reach() -> str | None:
    """Why the controller cannot be asked; None if it answers."""
    result = _call(["scontrol", "ping"])
    return None if result.returncode == 0 and "UP" in result.stdout else _reason(result)


def partitions() -> str:
    """A word on each partition: name, nodes that are up, GPUs of a node."""
    result = _call(["sinfo", "--noheader", "--format=%R %D nodes %G"])
    return "; ".join(line.strip() for line in result.stdout.splitlines())


def _srun(launch: Launch, derived: Derived, moves: bool) -> str:
    """Every rank as one task, nodes filled in order: the numbering of `mesh/placement.py`. A rank that fails ends all.

    moves: the script chooses the nodes. SLURM takes a step for running until all of its nodes have said that it is over, which a
    lost one never does: the next step overlaps it.
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
    if launch.cpus_per_rank is not None or has_range(launch):  # srun does not take it over from sbatch
        words.append(f"--cpus-per-task={(launch.cpus_per_rank or 1) * derived.ranks_per_node // each}")
    return " ".join(words)


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
    """sbatch's options, in the order of a reader's questions: what, how much, where, how long, and what then."""
    launch = recipe.launch
    is_direct = launch.starter == "srun"
    tasks: int | None = derived.ranks_per_node if is_direct else 1
    cpus = launch.cpus_per_rank and launch.cpus_per_rank * (1 if is_direct else derived.ranks_per_node)
    if has_range(
        launch
    ):  # told of tasks, sbatch takes the least nodes that hold them: a node is one task with all its CPUs
        tasks, cpus = None, (launch.cpus_per_rank or 1) * derived.ranks_per_node
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
        ("time", launch.time),
        ("signal", f"B:USR1@{launch.signal_seconds_before_end}"),
        ("chdir", here),
        ("output", log),
        ("open-mode", "append"),
    ]
    return [f"--{name}={_sbatch_word(str(value))}" for name, value in pairs if value is not None] + [
        "--requeue",
        *(["--no-kill"] if can_move(recipe) else []),
        *launch.sbatch,
    ]


def _sbatch_word(text: str) -> str:
    """A value in a line of sbatch's, which is no shell: a backslash takes the next character as it is, in any quotes."""
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
    """A word of the script: the command that goes on with the run."""
    command = write_resume(recipe.launch.kind, replace(recipe.run, id=run_dir.name))
    if not array:
        return shlex.quote(command)
    before, name, after = command.partition(f"run.id={run_dir.name}")
    return f'{shlex.quote(before + name + "-")}"$SLURM_ARRAY_TASK_ID"{shlex.quote(after)}'


def _mounts(recipe: Recipe, run_dir: Path, here: Path) -> list[str]:
    """Folders that a container needs from outside: the place of the recipe's relative paths, runs, token stores, checkpoints."""
    folders = [here, run_dir.parent, (here / recipe.data.root).resolve()]
    checkpoints = open_place(recipe.checkpoint.root or ".")
    if isinstance(checkpoints, Path):
        folders.append((here / checkpoints.expanduser()).resolve())
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


def _find_in_accounting(job_id: str) -> JobState | None:
    if shutil.which("sacct") is None:
        return None
    result = _call(
        ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State,NodeList", f"--jobs={job_id}"]
    )
    first = result.stdout.splitlines()[0] if result.returncode == 0 and result.stdout.strip() else None
    if first is None:
        return None
    state, _, nodes = first.partition("|")
    return JobState(job_id, state.split()[0], nodes=nodes)


def _fields(line: str) -> dict[str, str]:
    return dict(re.findall(r"(\S+?)=(\S*)", line))


def _call(command: list[str]) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            command, env=slurm_environment(os.environ), check=False, capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _reason(result: "subprocess.CompletedProcess[str]") -> str:
    text = (result.stderr or result.stdout).strip()
    return re.sub(r"^\w+: error: ", "", text, flags=re.MULTILINE) or f"{result.args[0]} ended with {result.returncode}"
