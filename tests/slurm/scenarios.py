"""What happens to runs, each as one function from the desk to the evidence; four at a time, the long waits first.

A scenario only acts and collects. What must be true of the evidence is said in test_lifecycle.py.
"""

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from framework.checkpoint.node_memory import run_memory
from tests.faults.copying_ranks import spoil_disk
from tests.slurm.cluster import APART, RECIPE, SLURM, STEPS, Desk, call, job_field, job_state, lives, wait_for

Evidence = dict[str, Any]
MINUTE = 'launch.time="00:01:00"'  # the shortest limit that SLURM knows; the signal comes 10 to 40 s after the start
# Where a test says from which step a killed run resumes: ten steps of milliseconds are over before a save behind them is synced.
WAITS = "checkpoint.mode=sync"


def run_scenarios(desk: Desk, wanted: Collection[str]) -> dict[str, Future]:
    """Starts those that are wanted, by the names of their functions; a test waits for the ones it is about."""
    pool = ThreadPoolExecutor(4)
    scenarios: tuple[Callable[[Desk], Evidence], ...] = (
        time_limit, chain, frozen_node, spare_node, fewer_nodes, first_node_lost, node_loss, local_references, preemption,
        killed_ranks, cancelled, layouts, crash_for_ever, users_mistake, bad_node, array, torchrun, all_damaged, unreadable,
        second_job, signals, launcher, script, hung_rank, copies, node_daemon, controller,
    )  # fmt: skip
    unknown = set(wanted) - {scenario.__name__ for scenario in scenarios}
    assert not unknown, f"no such scenarios: {sorted(unknown)}"
    futures: dict[str, Future] = {}

    def act(scenario: Callable[[Desk], Evidence], before: Collection[Future]) -> Evidence:
        wait(before)
        return scenario(desk)

    for scenario in scenarios:
        name = scenario.__name__
        if name == "controller":  # without it the others' commands fail
            before = list(futures.values())
        elif name == "node_daemon":  # on the same node
            before = [futures[each] for each in ("time_limit", "node_loss") if each in futures]
        else:  # the time limit's delays are measured: it has the machine for itself
            before = [futures["time_limit"]] if "time_limit" in futures else []
        if name in wanted:
            futures[name] = pool.submit(act, scenario, before)
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


def frozen_node(desk: Desk) -> Evidence:
    """The node of a run, with its script, freezes; the job starts on another node, and trains on. Then the first one thaws."""
    job = desk.submit("frozen", 'launch.sbatch=["--exclude=n[1-12]"]', "launch.ranks=1", WAITS)
    [stale] = desk.pause("frozen", 30).values()
    desk.cluster("freeze", "n13")
    wait_for(lambda: job_state(job) == "PENDING", f"job {job} requeued by SLURM")
    call("scontrol", "update", f"JobId={job}", "ExcNodeList=n[4-13]", "StartTime=now")
    wait_for(lambda: len(desk.starts("frozen")) > 1, "the second start", tell=lambda: desk.log("frozen"))
    desk.wait_until_said("frozen", "has not let go of it though it is over; taken over")
    second = desk.pause("frozen", 60, restart=1)
    before = files_of(desk.folder("frozen"))
    desk.cluster("thaw", "n13")
    vanish_s = desk.seconds_to_vanish({0: stale})
    after = files_of(desk.folder("frozen"))
    desk.let_go(second)
    desk.wait_until_gone(job)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    notes = [(note["restart"], note["what"], note.get("from")) for note in desk.history("frozen")]
    return {
        "changed": changed,
        "vanish_s": vanish_s,
        "notes": notes,
        "ends": desk.ends("frozen"),
        "log": desk.log("frozen"),
    }


def files_of(run: Path) -> dict[str, bytes]:
    """The bytes of a run's files; not of the log, to which SLURM adds what ranks say, nor of what the job's scripts note."""
    return {
        str(path.relative_to(run)): path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name not in ("job.log", "history")
    }


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


def copies(desk: Desk) -> Evidence:
    """A rank is killed between two checkpoints while its node's neighbour holds a newer step; then all checkpoints are spoilt and
    another rank is killed."""
    job = desk.submit(
        "copies", "launch.nodes=2", "checkpoint.neighbor_copies=1", "checkpoint.neighbor_every_steps=3", WAITS,
        "checkpoint.every_steps=40",
    )  # fmt: skip
    for number, rank in enumerate((1, 0)):
        pids = desk.pause("copies", 30 + 40 * number)
        call("kill", "-9", str(pids[rank]))
        spoil_disk(desk.folder("copies"))
        desk.let_go({other: pid for other, pid in pids.items() if other != rank})
        wait_for(lambda n=number: len(desk.starts("copies")) > n + 1, "another start", tell=lambda: desk.log("copies"))
    held = run_memory(desk.folder("copies"))
    desk.wait_until_gone(job)
    return {
        "log": desk.log("copies"),
        "ends": desk.ends("copies"),
        "starts": desk.starts("copies"),
        "left": held.exists(),
    }


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
    held = 'launch.sbatch=["--exclude=n[4-13]", "--hold"]'
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


def spare_node(desk: Desk) -> Evidence:
    """Two nodes and a spare one; one of the two loses its power."""
    only = 'launch.sbatch=["--exclude=n[1-5,9-13]"]'
    job = desk.submit("spare", "launch.nodes=2", "launch.spares=1", only, WAITS, desk.ledger(30))
    lose_node(desk, "spare", "n7")
    desk.wait_until_gone(job)
    return {"job": job, "state": job_state(job), "starts": desk.starts("spare"), "ends": desk.ends("spare")}


def fewer_nodes(desk: Desk) -> Evidence:
    """One or two nodes. The second is lost, the run goes on with one, is stopped, and goes on with two when that is back."""
    only = 'launch.sbatch=["--exclude=n[1-8,11-13]"]'
    job = desk.submit("fewer", "launch.nodes=[1,2]", only, WAITS, desk.ledger(30, 60))
    lose_node(desk, "fewer", "n10")
    pids = desk.wait_for_pause("fewer", 60, ranks=1)
    (desk.folder("fewer") / "request-stop").touch()  # what `meshwright stop` asks, which waits for an answer
    desk.let_go(pids)
    desk.wait_until_gone(job)
    desk.cluster("boot", "n10")
    wait_for(lambda: "idle" in call("sinfo", "--noheader", "--nodes=n10", "--format=%T"), "n10")
    again = desk.resume("fewer")
    desk.wait_until_gone(again)
    return {"jobs": [job, again], "starts": desk.starts("fewer"), "ends": desk.ends("fewer")}


def first_node_lost(desk: Desk) -> Evidence:
    """One or two nodes, and the one with the job's script is lost."""
    only = 'launch.sbatch=["--exclude=n[1-10,13]"]'
    job = desk.submit("headless", "launch.nodes=[1,2]", only, WAITS, desk.ledger(30))
    lose_node(desk, "headless", "n11")
    wait_for(lambda: len(desk.starts("headless")) > 1, "another start", tell=lambda: desk.log("headless"))
    desk.wait_until_gone(job)
    return {"starts": desk.starts("headless"), "log": desk.log("headless")}


def lose_node(desk: Desk, run: str, node: str) -> None:
    """The node loses its power when the run has taken 30 steps, and has saved step 20."""
    pids = desk.wait_for_pause(run, 30, ranks=2)
    desk.cluster("kill", node)
    desk.let_go(pids)


def torchrun(desk: Desk) -> Evidence:
    """One torchrun per node instead of one srun task per rank."""
    desk.wait_until_gone(desk.submit("agents", "launch.nodes=2", "launch.starter=torchrun"))
    return {"losses": desk.losses("agents"), "log": desk.log("agents")}


def second_job(desk: Desk) -> Evidence:
    """Somebody queues a running run's script once more, past `submit`, which refuses that; the run waits meanwhile."""
    # The ranks that are paused are not to be taken for hung.
    job = desk.submit("doubled", "launch.ranks=1", "launch.retries=0", "launch.step_deadline_s=450")
    pids = desk.pause("doubled", 30)
    refusal = desk.meshwright("submit", "run.id=doubled")
    steps = desk.losses("doubled")
    second = call("sbatch", "--parsable", str(desk.folder("doubled") / "slurm" / "job.sh")).strip()
    desk.wait_until_gone(second)
    evidence = {"second": job_state(second), "refusal": refusal, "is_untouched": desk.losses("doubled") == steps}
    desk.let_go(pids)
    desk.wait_until_gone(job)
    return evidence | {"log": desk.log("doubled"), "first": job_state(job)}


def signals(desk: Desk) -> Evidence:
    """One rank alone is asked to stop: while it builds its model, in a validation, in a save; then the other one, in a save, is
    killed."""
    planned = (
        "term rank=1 phase=build-model",
        "term rank=0 phase=validate step=30",
        "term rank=1 point=writing step=60",
        "kill rank=0 point=manifest step=80",
    )
    held = 'launch.sbatch=["--exclude=n[4-13]", "--hold"]'
    words = (
        "run.allow_faults=true",
        "train.validate_every_steps=30",
        "data.validation=0.2",
        "track.sample_ledger=true",
    )
    desk.train_here("local-validated", "launch.ranks=2", *words)
    job = desk.submit("signals", "launch.nodes=2", *words, held)
    for fault in planned:
        answer = desk.meshwright("inject", "runs/signals", *fault.split())
        assert answer.code == 0, answer
    call("scontrol", "release", job)
    desk.wait_until_gone(job)
    return {"ends": desk.ends("signals"), "starts": desk.starts("signals"), "log": desk.log("signals")}


def launcher(desk: Desk) -> Evidence:
    """kill -9 of srun, which holds the ranks: what it started is left to itself."""
    job = desk.submit("launcher", "launch.nodes=2")
    pids = desk.pause("launcher", 30)
    for pid in desk.launchers("launcher"):
        with suppress(ProcessLookupError):  # srun has a child, which ends with it
            os.kill(pid, signal.SIGKILL)
    desk.let_go(pids)
    desk.wait_until_gone(job)
    return {"starts": desk.starts("launcher"), "ends": desk.ends("launcher"), "log": desk.log("launcher")}


def script(desk: Desk) -> Evidence:
    """kill -9 of the job's script: SLURM ends the job; the run is submitted again."""
    job = desk.submit("script", "launch.nodes=2")
    pids = desk.pause("script", 30)
    [pid] = desk.scripts(job)
    call("kill", "-9", str(pid))
    desk.let_go(pids)
    desk.wait_until_gone(job)
    vanish_s = desk.seconds_to_vanish(pids)
    state = job_state(job)
    desk.wait_until_gone(desk.resume("script"))
    return {"state": state, "vanish_s": vanish_s, "starts": desk.starts("script"), "log": desk.log("script")}


def node_daemon(desk: Desk) -> Evidence:
    """kill -9 of the slurmd of the run's node, which is started again before SLURM gives the node up."""
    job = desk.submit("daemon", 'launch.sbatch=["--nodelist=n5"]', "launch.ranks=1")
    pids = desk.pause("daemon", 30)
    desk.cluster("daemon", "kill", "n5")
    desk.let_go(pids)
    desk.cluster("daemon", "start", "n5")
    desk.wait_until_gone(job)
    return {"starts": desk.starts("daemon"), "ends": desk.ends("daemon")}


def controller(desk: Desk) -> Evidence:
    """kill -9 of slurmctld; before it is back a rank dies, whose job asks SLURM how it stands. Then the run goes on."""
    job = desk.submit("controller", "launch.nodes=2", WAITS)
    pids = desk.pause("controller", 30)
    desk.cluster("daemon", "kill", "slurmctld")
    call("kill", "-9", str(pids[1]))
    desk.let_go({0: pids[0]})
    desk.seconds_to_vanish(pids)
    time.sleep(3)
    desk.cluster("daemon", "start", "slurmctld")
    desk.wait_until_gone(job)
    return {"starts": desk.starts("controller"), "ends": desk.ends("controller"), "log": desk.log("controller")}


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
