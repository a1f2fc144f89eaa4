"""The script of a job, from hostile recipes: shellcheck finds nothing in it, and the ranks get every byte as it was meant.

The script itself is run, with small programs in the place of SLURM's: srun starts one task, apptainer keeps its image and
starts what comes after it, and python writes down how it was called.
"""

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from framework.cli import main
from framework.errors import EXIT_USER
from framework.launch.slurm import find_script_problems, render
from framework.recipe.check import check_recipe
from framework.recipe.overrides import parse_overrides, write_override
from framework.recipe.schema import Batch, Checkpoint, Container, Launch, Recipe, Run

SHELLCHECK = Path(sys.executable).with_name("shellcheck")
HOSTILE = 'it\'s "a" $HOME `id` $(id) %j #c *?! ;& {a} [b] ~ größe'
ONE_STEP = replace(Recipe(), batch=Batch(sequences_per_step=8))
IMAGE = "docker://it's a $(image)"
VARIABLES = {
    "PLAIN": "WARN",
    "HOSTILE": HOSTILE + "\\ \n second line",
    "EMPTY": "",
    "NUMBER": 3,
    "PYTHONPATH": "/my own/it's",
    "run": "a name of the script's own",
    "job": "another",
    "PATHS": "/x y:${oc.env:OUTER}",
    "HF_TOKEN": "${oc.env:HF_TOKEN}",
    "PROXY": "http://me:${oc.env:OUTER}@it's",
}
OUTER = "o\"u't $er"
# In the place of each program of SLURM's: what the script asks of it, in as few lines as do it.
PROGRAMS = {
    "srun": """while [[ $1 == --* ]]; do shift; done
export SLURM_NODEID=0 SLURM_PROCID=0
exec "$@" """,
    "apptainer": """printf '%s\\0' "$@" > "$NOTES/apptainer"
shift
while [[ $1 == --* ]]; do case $1 in --nv) shift ;; *) shift 2 ;; esac; done
shift
exec "$@" """,
    "scontrol": """case "$*" in
  *hostnames*) echo n1 ;;
  *) echo "JobId=7 JobState=RUNNING EndTime=2099-01-01T00:00:00 PreemptTime=None" ;;
esac""",
    "sbatch": "echo sbatch >> $NOTES/called",
    "squeue": "true",
    "scancel": "true",
}
PYTHON = """#!/bin/bash
printf '%s\\0' "$@" > "$NOTES/argv"
env -0 > "$NOTES/environment"
pwd > "$NOTES/here"
echo 0 > "$MESHWRIGHT_OUTCOME"
"""


def recipe_of(python: Path, container: str, starter: str, array: bool = False, **launch) -> Recipe:
    chosen = Launch(
        kind="slurm",
        ranks=1,
        ranks_per_node=1,
        gres="gpu",
        python=str(python),
        starter=starter,
        container=Container(container, None if container == "none" else IMAGE, ["/data:/data"]),
        environment=VARIABLES,
        set_up=['if true; then export MARKER="set up"', "fi", 'echo "it\'s" \\'],
        sbatch=['--comment="it\\"s # a" --exclusive'],
        **launch,
    )
    return replace(ONE_STEP, launch=chosen, run=Run(root=HOSTILE))


def folders(place: Path, container: str) -> tuple[Path, Path]:
    """(folder of the runs, folder of the submission). Pyxis cannot mount what has spaces."""
    name = HOSTILE if container != "pyxis" else HOSTILE.replace(" ", "")
    runs, here = place / f"runs {name}", place / f"here {name}"
    if container == "pyxis":
        runs, here = place / f"runs{name}", place / f"here{name}"
    runs.mkdir(exist_ok=True)
    here.mkdir(exist_ok=True)
    return runs, here


def run_script(text: str, place: Path, here: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    programs = place / "bin"
    programs.mkdir(exist_ok=True)
    for name, body in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    (place / "notes").mkdir(exist_ok=True)
    around = {
        "PATH": f"{programs}:/usr/bin:/bin", "NOTES": str(place / "notes"), "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NAME": "x", "PYTHONPATH": "/outer",
    }  # fmt: skip
    return subprocess.run(
        ["bash", "-c", text], cwd=here, env=around | variables, capture_output=True, text=True, timeout=60, check=False
    )


def noted(place: Path, what: str) -> list[str]:
    return (place / "notes" / what).read_text().split("\0")[:-1]


@pytest.mark.parametrize("array", [None, 3])
@pytest.mark.parametrize("starter", ["srun", "torchrun"])
@pytest.mark.parametrize("container", ["none", "apptainer", "pyxis"])
def test_ranks_get_what_was_meant_to_the_byte(tmp_path, container, starter, array):
    runs, here = folders(tmp_path, container)
    python = tmp_path / "py 'th\"on" / "$(x) py"
    python.parent.mkdir()
    python.write_text(PYTHON)
    python.chmod(0o755)
    run = runs / ("x-2" if array else "x")
    (run / "slurm").mkdir(parents=True)
    (run / "lease").touch()
    script = render(recipe_of(python, container, starter), runs / "x", here, array)
    done = run_script(script.text, tmp_path, here, HF_TOKEN="hf_s$ecret", OUTER=OUTER, SLURM_ARRAY_TASK_ID="2")
    assert done.returncode == 0, done.stdout + done.stderr
    argv = noted(tmp_path, "argv")
    assert argv[-3:] == ["-m", "framework.train.program", str(run)]
    assert starter == "srun" or argv[1] == "torch.distributed.run"
    assert "--node-rank=0" in argv or starter == "srun"
    environment = dict(pair.split("=", 1) for pair in noted(tmp_path, "environment"))
    meant = VARIABLES | {"PATHS": f"/x y:{OUTER}", "HF_TOKEN": "hf_s$ecret", "PROXY": f"http://me:{OUTER}@it's"}
    meant |= {"PYTHONPATH": f"{run}/code:/my own/it's", "NUMBER": "3"}
    assert {name: environment[name] for name in meant} == meant
    assert environment["MARKER"] == "set up"
    for name in ("PYTHONSAFEPATH", "PYTHONUTF8"):
        assert environment[name] == environment[f"APPTAINERENV_{name}"] == "1"
    assert environment["MESHWRIGHT_OUTCOME"] == f"{run}/slurm/outcome.7.0"
    assert (tmp_path / "notes" / "here").read_text() == f"{here}\n"
    if container == "apptainer":
        assert {name: environment[f"APPTAINERENV_{name}"] for name in meant} == meant
        words = noted(tmp_path, "apptainer")
        assert words[: words.index(IMAGE)][:4] == ["exec", "--nv", "--pwd", str(here)]
        assert f"{runs}:{runs}" in words
    assert "hf_s$ecret" not in script.text + done.stdout


@pytest.mark.parametrize("is_whole", [True, False])
def test_ranks_import_the_code_of_the_run_and_not_a_clone_around_them(tmp_path, is_whole):
    """`python -m` looks into its folder before PYTHONPATH: a submission from a clone would train what is edited there later."""
    run, clone = tmp_path / "runs" / "x", tmp_path / "clone"
    for place in (run / "code", clone):
        (place / "framework" / "train").mkdir(parents=True)
        (place / "framework" / "train" / "program.py").write_text(f"print({place.name!r})\n")
    (run / "lease").touch()
    recipe = replace(ONE_STEP, launch=Launch(kind="slurm", ranks=1, ranks_per_node=1, python=sys.executable, retries=0))
    text = render(recipe, run, clone).text
    line = next(line for line in text.splitlines() if line.startswith("export PYTHONSAFEPATH=1"))
    done = run_script(text if is_whole else text.replace(line, ""), tmp_path, clone)
    assert ("code" in done.stdout.splitlines()) == is_whole, done
    assert ("clone" in done.stdout.splitlines()) != is_whole


@pytest.mark.parametrize(("had", "has"), [(None, ""), ("", ""), (":", ""), ("/a:", ":/a"), (":/a::/b:", ":/a:/b")])
def test_a_colon_too_many_does_not_put_the_working_folder_on_the_path(had, has):
    text = render(ONE_STEP, Path("/runs/x"), Path("/here")).text
    lines = text[text.index("PYTHONPATH=$(tr") : text.index("MESHWRIGHT_QUEUED=")]
    words = ["bash", "-ec", f'run=/runs/x; outcome=o\n{lines}\nprintf %s "$PYTHONPATH"']
    environment = {"PATH": os.environ["PATH"]} | ({} if had is None else {"PYTHONPATH": had})
    assert (
        subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
        == f"/runs/x/code{has}"
    )


# (container, what starts ranks, elements of an array, are nodes a range). Of what may stand in a script each is shown once.
SHAPES = [
    (container, starter, None, moves)
    for container in ("none", "apptainer", "pyxis")
    for starter in ("srun", "torchrun")
    for moves in (False, True)
]
SHAPES += [(*row, 3, moves) for row in (("none", "srun"), ("apptainer", "torchrun")) for moves in (False, True)]
SHOWN = [("none", "srun", 3, True), ("apptainer", "torchrun", None, False), ("pyxis", "srun", None, False)]


@pytest.mark.parametrize("shapes", [SHOWN, pytest.param(SHAPES, marks=pytest.mark.grid)], ids=["few", "all"])
def test_shellcheck_finds_nothing_in_what_hostile_recipes_render(tmp_path, shapes):
    files = []
    for number, (container, starter, array, moves) in enumerate(shapes):
        runs, here = folders(tmp_path, container)
        recipe = recipe_of(tmp_path / "py 'th\"on", container, starter)
        if moves:
            recipe = replace(recipe, launch=replace(recipe.launch, ranks=None, nodes=(1, 2), spares=1))
        files.append(tmp_path / f"{number}.sh")
        files[-1].write_text(render(recipe, runs / "x", here, array).text)
    found = subprocess.run([SHELLCHECK, "--exclude=SC2016", *files], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@given(st.dictionaries(st.from_regex(r"X_[A-Z]{1,3}", fullmatch=True), TEXT, min_size=1, max_size=8))
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_reaches_the_ranks(tmp_path, variables):
    """All values at once, through the assignments of a rendered script."""
    recipe = replace(ONE_STEP, launch=Launch(kind="slurm", ranks=1, ranks_per_node=1, environment=variables))
    text = render(recipe, tmp_path / "x", tmp_path).text
    start, end = text.index("  # shellcheck disable=SC2097"), text.index("  srun")
    done = subprocess.run(["bash", "-c", f"{text[start:end]} env -0"], capture_output=True, check=True).stdout.decode()
    environment = dict(pair.split("=", 1) for pair in done.split("\0")[:-1])
    assert {name: environment[name] for name in variables} == variables


@pytest.mark.parametrize("value", [None, ""])
def test_a_job_without_a_variable_that_is_referred_to_stops_with_86_and_names_it(tmp_path, value):
    runs, here = folders(tmp_path, "none")
    (runs / "x" / "slurm").mkdir(parents=True)
    script = render(recipe_of(tmp_path / "python", "none", "srun"), runs / "x", here)
    done = run_script(script.text, tmp_path, here, OUTER=OUTER, **({} if value is None else {"HF_TOKEN": value}))
    assert done.returncode == EXIT_USER
    assert "job 7: not started: launch.environment refers to HF_TOKEN, which this job does not have" in done.stdout
    assert not (tmp_path / "notes" / "argv").exists()


@pytest.mark.parametrize("array", [None, 3])
def test_the_command_that_goes_on_can_be_typed(tmp_path, array):
    runs, here = folders(tmp_path, "none")
    script = render(recipe_of(tmp_path / "python", "none", "srun"), runs / "x", here, array).text
    line = next(line for line in script.splitlines() if line.startswith("go_on="))
    said = subprocess.run(
        ["bash", "-c", f'SLURM_ARRAY_TASK_ID=2\n{line}\necho "$go_on"'], capture_output=True, text=True, check=True
    ).stdout
    words = shlex.split(said.partition("go on with")[2])
    assert words[:3] == ["meshwright", "submit", "run.id=x-2" if array else "run.id=x"]
    assert parse_overrides(words[3:], []).values[0].value() == HOSTILE


@given(TEXT)
def test_an_override_is_written_as_it_is_read(text):
    (override,) = parse_overrides([write_override("run.root", text)], []).values
    assert override.value().replace("\\${", "${") == text or "${" in text


@pytest.mark.parametrize(
    ("root", "container", "is_found"),
    [
        ("it's \"a\" %j b", "none", None), ("a\nb", "none", "'\\n'"), ("a\\b", "none", "'\\\\'"), ("a:b", "none", "':'"),
        ("it's a", "apptainer", None), ("a,b", "apptainer", "','"), ("a,b", "none", None), ("a b", "pyxis", "' '"),
    ],
)  # fmt: skip
def test_folders_that_do_not_get_through_are_refused_with_the_key(root, container, is_found):
    recipe = replace(Recipe(), run=Run(root=root), launch=Launch(container=Container(container)))
    problems = list(find_script_problems(recipe, Path("/here")))
    assert [problem.key for problem in problems] == (["run.root"] if is_found else [])
    assert all(is_found in problem.message and "run.root" in problem.fix for problem in problems)


@pytest.mark.parametrize(("root", "is_mounted"), [("/other", True), ("s3://bucket/other", False)])
def test_a_container_has_the_folder_of_checkpoints(root, is_mounted):
    recipe = replace(ONE_STEP, launch=Launch(kind="slurm", ranks=1, container=Container("apptainer", "a")))
    recipe = replace(recipe, checkpoint=Checkpoint(root=root))
    assert ("/other:/other" in render(recipe, Path("/runs/a"), Path("/here")).text) == is_mounted


def test_a_submission_from_a_folder_that_does_not_get_through_is_refused_before_anything_is_made(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "a:b").mkdir()
    monkeypatch.chdir(tmp_path / "a:b")
    words = ["data=files", "data.sources.files.path=x", "data.bpe_vocab=300", "launch=slurm", "launch.ranks=1"]
    assert main(["submit", "--dry-run", *words]) == EXIT_USER
    assert "run.root" in capsys.readouterr().err
    assert not list((tmp_path / "a:b").iterdir())


@pytest.mark.parametrize(
    ("launch", "key"),
    [
        (Launch(partition="a\nb"), "launch.partition"),
        (Launch(account="a\0b"), "launch.account"),
        (Launch(qos="\t"), "launch.qos"),
        (Launch(gres="gpu\r"), "launch.gres"),
        (Launch(python="a\nb"), "launch.python"),
        (Launch(sbatch=["--comment=a\n#SBATCH --x"]), "launch.sbatch"),
        (Launch(sbatch=["--comment='a"]), "launch.sbatch"),
        (Launch(sbatch=["--exclusive --time=1"]), "launch.sbatch"),
        (Launch(sbatch=["-t5"]), "launch.sbatch"),
        (Launch(sbatch=["-J x"]), "launch.sbatch"),
        (Launch(set_up=["a\r"]), "launch.set_up"),
        (Launch(environment={"A": "x\0"}), "launch.environment.A"),
        (Launch(environment={"A": True}), "launch.environment.A"),
        (Launch(environment={"MASTER_PORT": 5}), "launch.environment.MASTER_PORT"),
        (Launch(environment={"SHELLOPTS": "x"}), "launch.environment.SHELLOPTS"),
        (Launch(environment={"OMP_NUM_THREADS": 4}), "launch.environment.OMP_NUM_THREADS"),
        (Launch(environment={"A": "${oc.env:B}", "B": "x"}), "launch.environment.A"),
        (Launch(container=Container("apptainer", "a\nb")), "launch.container.image"),
        (Launch(container=Container("apptainer", "a", ["/a,b"])), "launch.container.mounts"),
        (Launch(container=Container("pyxis", "a", ["/a b"])), "launch.container.mounts"),
    ],
)
def test_what_cannot_be_a_part_of_the_script_is_refused_with_its_key(launch, key):
    problems = check_recipe(replace(ONE_STEP, launch=replace(launch, kind="slurm", ranks=1)), {})
    (problem,) = (problem for problem in problems if problem.key.startswith("launch"))
    assert problem.key == key
    assert problem.fix or "NUL" in problem.message


@pytest.mark.parametrize("lines", [["echo 'a"], ["cat <<END", "x"], ["if true; then"], ["fi"], ["module load (x"]])
def test_a_set_up_that_would_swallow_the_script_is_refused(lines):
    recipe = replace(Recipe(), launch=Launch(set_up=lines))
    (problem,) = find_script_problems(recipe, Path("/here"))
    assert problem.key == "launch.set_up"
    assert "bash cannot read" in problem.message
