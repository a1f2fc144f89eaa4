"""What happens to runs, each as one function from the desk to the evidence; four at a time, the long waits first.

A scenario only acts and collects. What must be true of the evidence is said in test_lifecycle.py.
"""

import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.slurm.cluster import APART, RECIPE, SLURM, STEPS, Desk, call, job_field, job_state, lives, wait_for

Evidence = dict[str, Any]
MINUTE = 'launch.time="00:01:00"'  # the shortest limit that SLURM knows; the signal comes 10 to 40 s after the start
# Where a test says from which step a killed run resumes: ten steps of milliseconds are over before a save behind them is synced.
WAITS = "checkpoint.mode=sync"


def run_scenarios(desk: Desk) -> dict[str, Future]:
    """Starts all of them; a test waits for the ones it is about. The time limit's delays are measured: it has the machine for
    itself."""
    pool = ThreadPoolExecutor(4)
    scenarios: tuple[Callable[[Desk], Evidence], ...] = (
        chain, node_loss, local_references, preemption, killed_ranks, hung_rank, cancelled, layouts, crash_for_ever,
        users_mistake, bad_node, array, torchrun, all_damaged, unreadable,
    )  # fmt: skip
    measured = pool.submit(time_limit, desk)

    def act(scenario: Callable[[Desk], Evidence]) -> Evidence:
        wait([measured])
        return scenario(desk)

    futures = {"time_limit": measured} | {each.__name__: pool.submit(act, each) for each in scenarios}
    pool.shutdown(wait=False)
    return futures


def local_references(desk: Desk) -> Evidence:
    """The recipe on 1, 2 and 3 ranks of this machine, without SLURM and without harm."""
    for ranks in (1, 2, 3):
        desk.train_here(f"local{ranks}", f"launch.ranks={ranks}")
    return {"losses": {ranks: desk.losses(f"local{ranks}") for ranks in (1, 2, 3)}}


def layouts(desk: Desk) -> Evidence:
    """The recipe on 1, 2 and 3 nodes."""
    shown = desk.meshwright("submit", "--dry-run", *RECIPE, *SLURM, APART, "run.id=nodes2", "launch.nodes=2").out
    existed = desk.folder("nodes2").exists()
    jobs = {nodes: desk.submit(f"nodes{nodes}", f"launch.nodes={nodes}") for nodes in (1, 2, 3)}
    queued = call("scontrol", "write", "batch_script", jobs[2], "-")
    written = (desk.folder("nodes2") / "slurm" / "job.sh").read_text()
    for job in jobs.values():
        desk.wait_until_gone(job)
    losses = {nodes: desk.losses(f"nodes{nodes}") for nodes in jobs}
    return {"losses": losses, "shown": shown, "queued": queued, "written": written, "dry_run_left_a_folder": existed}


def time_limit(desk: Desk) -> Evidence:
    """Two nodes; the time limit cuts the run at least twice."""
    job = desk.submit("limit", "launch.nodes=2", MINUTE, "track=offline")
    for cut, step in enumerate((50, 100), start=1):
        is_told = lambda cut=cut: desk.log("limit").count("the time limit is near") >= cut  # noqa: E731
        pids = desk.pause("limit", step, unless=is_told)
        desk.wait_until_said("limit", "the time limit is near", cut)
        desk.let_go(pids)
        wait_for(lambda cut=cut: len(desk.starts("limit")) > cut, f"start {cut + 1}", tell=lambda: desk.log("limit"))
    desk.wait_until_gone(job)
    return {"job": job, "delays_s": delays(desk, "limit"), "ends": desk.ends("limit")}


def chain(desk: Desk) -> Evidence:
    """Three jobs in a row for one run, each cut by the time limit until the steps are done."""
    job = desk.submit("chain", MINUTE, "launch.chain=3", "launch.ranks=1")
    queued = [line.split() for line in call("squeue", "--noheader", "--name=chain", "--format=%i %T").splitlines()]
    for cut, step in enumerate((50, 100), start=1):
        is_told = lambda cut=cut: desk.log("chain").count("the time limit is near") >= cut  # noqa: E731
        pids = desk.pause("chain", step, unless=is_told)
        desk.wait_until_said("chain", "the time limit is near", cut)
        desk.let_go(pids)
        wait_for(lambda cut=cut: len(desk.starts("chain")) > cut, f"start {cut + 1}", tell=lambda: desk.log("chain"))
    last = str(int(job) + 2)
    for number in sorted(int(each) for each, _ in queued):
        desk.wait_until_gone(str(number))
    return {"queued": queued, "job": job, "last": last, "jobs": [start["job"] for start in desk.starts("chain")]}


def node_loss(desk: Desk) -> Evidence:
    """The node of a run loses its power and comes back; SLURM requeues the job itself."""
    job = desk.submit("power", 'launch.sbatch=["--nodelist=n5"]', "launch.ranks=1", WAITS)
    pids = desk.pause("power", 30)
    desk.cluster("kill", "n5")
    vanish_s = desk.seconds_to_vanish(pids)
    wait_for(lambda: job_state(job) == "PENDING", f"job {job} requeued by SLURM")
    desk.cluster("boot", "n5")
    status = desk.meshwright("status", "runs/power").out
    advice = next(line for line in status.splitlines() if line.startswith("next"))
    time.sleep(2)  # as long as nobody types it faster
    call(*advice.removeprefix("next").partition("#")[0].split())
    desk.wait_until_gone(job)
    return {"status": status, "vanish_s": vanish_s, "starts": desk.starts("power")}


def preemption(desk: Desk) -> Evidence:
    """A job of a higher partition takes the node."""
    job = desk.submit("yields", 'launch.sbatch=["--nodelist=n4"]', "launch.ranks=1")
    pids = desk.pause("yields", 30)
    saved_before = desk.losses("yields")[-1][0]
    high = call(
        "sbatch", "--parsable", "-phigh", "-wn4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 3"
    ).strip()
    vanish_s = desk.seconds_to_vanish(pids)
    desk.wait_until_gone(high)
    desk.wait_until_gone(job)
    return {"starts": desk.starts("yields"), "ends": desk.ends("yields"), "vanish_s": vanish_s, "at": saved_before}


def killed_ranks(desk: Desk) -> Evidence:
    """kill -9 of rank 1, then of rank 0."""
    job = desk.submit("killed", "launch.nodes=2", "track=offline", WAITS)
    vanish_s = []
    for number, rank in enumerate((1, 0)):
        pids = desk.pause("killed", 30 + 40 * number)
        call("kill", "-9", str(pids[rank]))
        desk.let_go({other: pid for other, pid in pids.items() if other != rank})
        vanish_s.append(desk.seconds_to_vanish(pids))
        wait_for(lambda n=number: len(desk.starts("killed")) > n + 1, "another start", tell=lambda: desk.log("killed"))
    desk.wait_until_gone(job)
    return {"job": job, "vanish_s": vanish_s, "starts": desk.starts("killed"), "ends": desk.ends("killed")}


def hung_rank(desk: Desk) -> Evidence:
    """Rank 1 is stopped and stays so."""
    job = desk.submit("hung", "launch.nodes=2", WAITS, "launch.step_deadline_s=5")
    pids = desk.pause("hung", 30)
    desk.let_go({0: pids[0]})
    vanish_s = desk.seconds_to_vanish(pids)
    wait_for(lambda: len(desk.starts("hung")) > 1, "another start", tell=lambda: desk.log("hung"))
    desk.wait_until_gone(job)
    return {"vanish_s": vanish_s, "starts": desk.starts("hung"), "ends": desk.ends("hung"), "log": desk.log("hung")}


def cancelled(desk: Desk) -> Evidence:
    """scancel saves and stops; the run goes on when it is submitted again, and not while it waits or runs."""
    job = desk.submit("cancelled", "launch.nodes=2")
    pids = desk.pause("cancelled", 30)
    refusal = desk.meshwright("submit", "run.id=cancelled").err
    call("scancel", job)
    vanish_s = desk.seconds_to_vanish(pids)
    desk.wait_until_gone(job)
    time.sleep(3)  # for a job that wrongly comes back
    evidence = {"state": job_state(job), "starts": len(desk.starts("cancelled")), "ends": desk.ends("cancelled")}
    evidence["status"] = desk.meshwright("status", "runs/cancelled").out
    desk.wait_until_gone(desk.resume("cancelled"))
    return evidence | {"refusal": refusal, "vanish_s": vanish_s, "resumed": desk.starts("cancelled")[-1]}


def crash_for_ever(desk: Desk) -> Evidence:
    """The rank dies at step 7, whenever it comes there."""
    crasher = desk.place / "crasher"
    crasher.write_text(
        f"""#!/bin/bash
{sys.executable} "$@" & rank=$!
while kill -0 $rank 2> /dev/null; do
  if grep -q '"step": 7,' "${{@: -1}}/metrics.jsonl" 2> /dev/null; then kill -9 $rank; fi
done
wait $rank
"""
    )
    crasher.chmod(crasher.stat().st_mode | stat.S_IXUSR)
    job = desk.submit(
        "crashes",
        f"launch.python={crasher}",
        "launch.ranks=1",
        "train.steps=1000",
        "checkpoint.every_steps=5",
        WAITS,
        "launch.restarts_without_checkpoint=1",
    )
    desk.wait_until_gone(job)
    return {
        "starts": desk.starts("crashes"),
        "state": job_state(job),
        "status": desk.meshwright("status", "runs/crashes").out,
    }


def all_damaged(desk: Desk) -> Evidence:
    """A job is requeued, and while it waits every checkpoint of the run is cut; then the run is submitted again."""
    job = desk.submit("damaged", "launch.ranks=1")
    desk.let_go(desk.pause("damaged", 30))
    call("scontrol", "requeue", job)  # the ranks save and end
    wait_for(
        lambda: desk.ends("damaged") and job_state(job) == "PENDING", "the requeue", tell=lambda: desk.log("damaged")
    )
    checkpoints = desk.folder("damaged") / "checkpoints"
    files = list(checkpoints.glob("step-*/rank-00000.bin"))
    for file in files:
        os.truncate(file, file.stat().st_size - 1)
    before = sorted(path.name for path in checkpoints.iterdir())
    curve = desk.losses("damaged")
    call("scontrol", "update", f"JobId={job}", "StartTime=now")
    desk.wait_until_gone(job)
    time.sleep(3)  # for a job that wrongly comes back
    return {
        "state": job_state(job), "exit": job_field(job, "ExitCode"), "restarts": job_field(job, "Restarts"),
        "log": desk.log("damaged"), "ends": desk.ends("damaged"), "files": files, "before": before,
        "after": sorted(path.name for path in checkpoints.iterdir()), "curve": curve, "curve_after": desk.losses("damaged"),
        "status": desk.meshwright("status", "runs/damaged").out, "again": desk.meshwright("submit", "run.id=damaged"),
    }  # fmt: skip


def unreadable(desk: Desk) -> Evidence:
    """A rank is killed, the newest manifest cannot be read for a while: the kernel says EIO, as for /proc/self/mem."""
    job = desk.submit("unreadable", "launch.ranks=1", WAITS)
    pids = desk.pause("unreadable", 30)
    manifest = desk.folder("unreadable") / "checkpoints" / "step-00000020" / "manifest.json"
    kept = manifest.rename(manifest.with_name("kept"))
    manifest.symlink_to("/proc/self/mem")
    for pid in pids.values():
        call("kill", "-9", str(pid))
    desk.wait_until_said("unreadable", "ended with 1 at step 20")
    kept.replace(manifest)
    desk.wait_until_gone(job)
    return {"starts": desk.starts("unreadable"), "ends": desk.ends("unreadable"), "log": desk.log("unreadable")}


def users_mistake(desk: Desk) -> Evidence:
    """A mistake that only the ranks can see, for `submit` refuses it: while the job is held, somebody edits its recipe, and the
    model has fewer positions than a sequence."""
    held = 'launch.sbatch=["--exclude=n[4-5]", "--hold"]'
    job = desk.submit("mistake", "model.config.max_position_embeddings=16", "launch.nodes=2", held)
    recipe = desk.folder("mistake") / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("max_position_embeddings: 16", "max_position_embeddings: 8"))
    call("scontrol", "release", job)
    desk.wait_until_gone(job)
    return {"log": desk.log("mistake"), "starts": len(desk.starts("mistake")), "ends": desk.ends("mistake"), "job": job}


def bad_node(desk: Desk) -> Evidence:
    """The recipe wants a GPU and no node has one: each is tried once, until the breaker ends it."""
    job = desk.submit("gpus", "launch.device=cuda", "launch.ranks=1", "launch.restarts_without_checkpoint=1")
    desk.wait_until_gone(job)
    return {"starts": desk.starts("gpus"), "ends": desk.ends("gpus"), "excluded": job_field(job, "ExcNodeList")}


def array(desk: Desk) -> Evidence:
    """A sweep of four runs, two at once."""
    words = (*RECIPE, *SLURM, APART, "launch.ranks=1", "run.name=sweep", "launch.at_once=2", "train.steps=15")
    answer = desk.meshwright("submit", "-m", *words, "optim.lr=1e-3,2e-3,3e-3,4e-3")
    job = next(line.split()[1] for line in answer.out.splitlines() if line.startswith("job"))
    at_once = [0]

    def is_over() -> bool:
        listed = ["squeue", "--noheader", "--array", f"--job={job}", "--format=%T"]
        states = subprocess.run(listed, capture_output=True, text=True, check=False).stdout.split()
        at_once.append(states.count("RUNNING"))
        return not states

    wait_for(is_over, f"the end of array {job}")
    runs = [f"sweep-sweep-001-{index}" for index in range(4)]
    recipes = [(desk.folder(run) / "recipe.yaml").read_text() for run in runs]
    status = desk.meshwright("status", "runs/sweep-sweep-001").out
    return {"at_once": max(at_once), "losses": [desk.losses(run) for run in runs], "recipes": recipes, "status": status}


def torchrun(desk: Desk) -> Evidence:
    """One torchrun per node instead of one srun task per rank."""
    desk.wait_until_gone(desk.submit("agents", "launch.nodes=2", "launch.starter=torchrun"))
    return {"losses": desk.losses("agents"), "log": desk.log("agents")}


def delays(desk: Desk, run: str) -> list[float]:
    """Seconds from each end of the ranks to the first new step of the next start."""
    history = desk.history(run)
    reported = sorted((record["step"], record["unix_s"]) for record in desk.records(run))
    found = []
    for before, after in pairwise(history):
        if (before["what"], after["what"]) == ("end", "start"):
            found.append(next(at for step, at in reported if step > after["from"]) - before["time"])
    return found


def left_over(desk: Desk) -> list[str]:
    """Processes of runs that live on somewhere."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(desk.place / "runs") in command and lives(int(process.name)):
            found.append(command)
    return found


__all__ = ["STEPS", "left_over", "run_scenarios"]
