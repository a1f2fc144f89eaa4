"""Jobs on a real cluster whose folder, interpreter and options have names that a shell and sbatch read as something else."""

import re
import shlex
import sys
from dataclasses import replace

from framework.recipe.overrides import write_override
from tests.slurm.cluster import APART, RECIPE, SLURM, Answer, Desk, job_field, job_state

SECRET = "hf_s$ecret it's"
ROOT = 'it\'s 100%j "odd" #x $HOME'
PYTHON = """#!/bin/bash
printf %s "$HF_TOKEN|$TEXT|$PYTHONPATH" > rank-had
exec {python} "$@"
"""
VARIABLES = "launch.environment={HF_TOKEN: '${oc.env:HF_TOKEN}', TEXT: 'it\\'s \"a\" $(id)', PYTHONPATH: /mine}"


def submit(desk: Desk, run: str, *more: str) -> Answer:
    words = (*RECIPE, *SLURM, APART, VARIABLES, "train.steps=2", "launch.ranks=1", f"run.id={run}")
    answer = desk.meshwright("submit", *words, write_override("run.root", ROOT), *more)
    assert answer.code == 0, answer
    return answer


def line_of(answer: Answer, what: str) -> str:
    return re.search(rf"^{what} +(.*)", answer.out, re.M)[1]


def test_odd_names_reach_the_rank_and_a_missing_variable_stops_the_job(desk: Desk):
    python = desk.place / "py 'th on"
    python.write_text(PYTHON.format(python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    having = replace(desk, environment=desk.environment | {"HF_TOKEN": SECRET})
    options = 'launch.sbatch=["--comment=\\"it\'s#a\\" --exclude=n[4-13]", "--export=PATH,SLURM_CONF,OMP_NUM_THREADS,HF_TOKEN"]'
    odd = submit(having, "odd", write_override("launch.python", str(python)), options, "launch.starter=torchrun")
    poor = submit(having, "poor", 'launch.sbatch=["--export=PATH,SLURM_CONF"]')
    for answer in (odd, poor):
        desk.wait_until_gone(line_of(answer, "job"))
    job, run = line_of(odd, "job"), desk.place / ROOT / "odd"
    assert job_state(job) == "COMPLETED", (run / "job.log").read_text()
    assert (desk.place / "rank-had").read_text() == f'{SECRET}|it\'s "a" $(id)|{run}/code:/mine'
    assert job_field(job, "Comment") == "it's#a"
    assert not [path for path in run.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert job_field(line_of(poor, "job"), "ExitCode") == "86:0"
    missing = (desk.place / ROOT / "poor" / "job.log").read_text()
    assert "not started: launch.environment refers to HF_TOKEN" in missing
    assert "starts 1 rank" not in missing
    again = having.meshwright(*shlex.split(line_of(odd, "resume"))[1:], "--dry-run", "train.steps=3")
    assert again.out == (run / "slurm" / "job.sh").read_text(), again.err
