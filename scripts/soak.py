"""One run of a tiny model on a SLURM cluster of this machine suffers many random faults; it must end as one that suffered none.

    python scripts/soak.py --faults 100 --seed 1 --minutes 25 --json soak.json
    python scripts/soak.py --faults 10 --elastic        a run of one or two nodes, which goes on with those that are left

Needs root and Debian's slurm-wlm and munge (scripts/local_cluster.sh install). The cluster has ports and a folder of its own
and is stopped in every case. Kinds and victims follow from the seed; moments depend on the machine, so `events.jsonl` in the
folder has what happened when. The run starts again by its own script; nobody helps it, but that a lost node's power comes back.

Ends with 1 on any violation: a fault that never came, a run that did not go on, weights or losses that are not bitwise those of
the fault-free run of as many steps (with --elastic: not within PARITY of them), a sample that is lost, repeated or of other
tokens, parts of goodput that do not add up to the wall time within 2%, a process that is left over.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from framework.checkpoint.commit import RANK_POINTS, SAVE_POINTS, list_checkpoints, newest_checkpoint, step_of
from framework.commands.inject import damage
from framework.faults import parse_fault, plan_faults, read_log
from framework.track.goodput import read_account
from framework.track.jsonl import METRICS_FILE, read_records
from framework.track.sample_ledger import find_ledger_problems, read_lineage
from tests import tiny_run
from tests.slurm.cluster import SCRIPT, Desk, call, job_state, lives
from tests.slurm.conftest import free_ports, why_not
from tests.slurm.scenarios import left_over
from tests.unit.test_track_wandb import ANSWERS, serve

# The job has three nodes, of which one is spare: a lost one is replaced in the job, the next one by another job on those left.
# Where an elastic run lost one there is no other.
RANKS = 2
NODES, ELASTIC_NODES = 5, RANKS
RUN, REFERENCE = "soak", "fault-free"
EVERY, PER_STEP = 40, 12
RECIPE = (
    *tiny_run.RECIPE,
    "train.steps=1000000",  # the run is stopped after its last fault
    "optim.schedule.name=constant",
    f"batch.sequences_per_step={PER_STEP}",
    "batch.sequences_per_microbatch=2",
    f"checkpoint.every_steps={EVERY}",
    "checkpoint.max_failures=1000",
    "train.validate_every_steps=60",
    "train.validation_sequences=8",
    "data.validation=0.2",
    "track.sample_ledger=true",
    "zero=stage_0",  # two replicas of everything, of which the guard finds one that has changed
    "train.divergence_check_steps=20",
)
# What the job asks for: a spare node takes the place of a lost one; or, elastic, the run goes on with one rank less.
SPARED, ELASTIC = (f"launch.nodes={RANKS}", "launch.spares=1"), (f"launch.nodes=[1,{RANKS}]", "precision=fp64")
SLURM = (
    "launch=slurm",
    "launch.gres=null",
    "launch.ranks_per_node=1",
    'launch.time="08:00:00"',
    "launch.retries=100000",
    "launch.restarts_without_checkpoint=100000",
    "launch.step_deadline_s=20",
    "run.allow_faults=true",
)
# A fault that is not over after so long is a violation. Generous: the machine may be busy with something else.
PATIENCE_S = 300.0
POLL_S = 0.05
# The parts of goodput add up to the wall time within this share; SLURM's stamps are whole seconds.
GOODPUT_SHARE, GOODPUT_SLACK_S = 0.02, 3.0
# Of an elastic run, which is in fp64: sums in another order change losses and weights by no more than this share of them.
PARITY = 1e-9
# How often the controller is asked whether the job is still there.
JOB_POLL_S = 5.0
WORDS = 4000  # of the corpus, so that no two samples are alike


@dataclass
class Event:
    """A fault and what became of it. unix_s: when it came. recovered_s: from then to the first step that a rank reported after it
    (of the ranks' next start, where it ended them); caught_up_s: to the first step that had not been reported before."""

    number: int
    kind: str
    what: str
    restarts: bool
    step: int = 0
    unix_s: float = 0.0
    recovered_s: float | None = None
    caught_up_s: float | None = None
    problem: str = ""


@dataclass
class Report:
    """The content of --json."""

    seed: int
    asked: int
    events: list[Event] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    starts: int = 0
    goodput: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Violation(Exception):
    """Something that must not happen has."""


class Soak:
    """The run under fire. Each of the methods after `kinds` brings one fault, and returns what was done once it has come."""

    def __init__(self, desk: "SoakDesk", rng: random.Random, folder: Path, is_elastic: bool = False):
        self.desk, self.rng, self.folder, self.is_elastic = desk, rng, folder, is_elastic
        self.run = desk.folder(RUN)
        self.planned: set[str] = set()  # ids of the faults that ranks are to do to themselves now
        self.started_s: float | None = None  # when the ranks were seen to start again, where the fault waits for that
        self.job = desk.submit_as(RUN, *RECIPE, *SLURM, *(ELASTIC if is_elastic else SPARED))
        self.submitted_s = time.time()

    # --- how the run stands

    def last(self) -> dict | None:
        """The newest record of metrics.jsonl."""
        with suppress(OSError, KeyError):
            records = list(read_records(self.run / METRICS_FILE, last=2))
            return records[-1] if records else None
        return None

    def step(self) -> int:
        return (self.last() or {"step": 0})["step"]

    def num_starts(self) -> int:
        return len(self.desk.starts(RUN))

    def wait(self, condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
        deadline, look = time.monotonic() + patience_s, time.monotonic() + JOB_POLL_S
        while not condition():
            if time.monotonic() > deadline:
                raise Violation(f"{what} did not come within {patience_s:.0f} s")
            if time.monotonic() > look:
                if job_is_over(self.job):
                    raise Violation(f"the job has ended while waiting for {what}")
                look = time.monotonic() + JOB_POLL_S
            time.sleep(POLL_S)

    def wait_for_new_steps(self, count: int) -> None:
        first = self.step()
        self.wait(lambda: self.step() >= first + count, f"step {first + count:,}")

    def nodes(self) -> list[str]:
        """Nodes of the start that is under way, by rank."""
        return call("scontrol", "show", "hostnames", self.desk.starts(RUN)[-1]["nodes"]).split()

    def wait_for_ranks(self) -> dict[int, int]:
        """Rank -> process, once all train."""
        self.wait(lambda: len(self.pids()) == len(self.nodes()), "the ranks")
        return self.pids()

    def pids(self) -> dict[int, int]:
        """Rank -> process, of the job's newest start: those of a frozen node may still be there."""
        return self.desk.pids(RUN, self.desk.starts(RUN)[-1]["restart"])

    # --- ways to bring a fault

    def plan(self, *words: str) -> str:
        """Have ranks do it to themselves; returns when the first has."""
        faults = [parse_fault(each.split(), SAVE_POINTS) for each in words]
        self.planned = {fault.id for fault in faults}
        plan_faults(self.run, faults)
        self.wait(self.suffered, f"the fault {words[0]}")
        return "; ".join(words)

    def suffered(self) -> list[dict]:
        """Notes of ranks on the faults that were planned last."""
        return [record for record in read_log(self.run) if record["id"] in self.planned]

    def soon(self, room: int = 1) -> int:
        """A step that begins in a moment, with `room` steps before the next checkpoint is due."""
        step = self.step() + 2
        return step if step % EVERY + room < EVERY else step + EVERY - step % EVERY + 1

    def any_rank(self) -> int:
        return self.rng.randrange(len(self.nodes()) if self.is_elastic else RANKS)

    # --- the kinds: what starts the ranks again in the same job

    def kill_rank(self) -> str:
        rank = self.any_rank()
        os.kill(self.wait_for_ranks()[rank], signal.SIGKILL)
        return f"kill -9 of rank {rank}"

    def kill_in_step(self) -> str:
        return self.plan(f"kill rank={self.any_rank()} step={self.soon()}")

    def kill_in_save(self) -> str:
        rank = self.any_rank()
        # None is retired before there are more than are kept.
        has_many = len(list_checkpoints(self.run / "checkpoints")) > 2
        points = RANK_POINTS if rank else SAVE_POINTS if has_many else SAVE_POINTS[: SAVE_POINTS.index("retiring")]
        return self.plan(f"kill rank={rank} point={self.rng.choice(points)}")

    def kill_in_validation(self) -> str:
        return self.plan(f"kill rank={self.any_rank()} phase=validate")

    def kill_in_start_up(self) -> str:
        phase = self.rng.choice(["connect-ranks", "open-data", "build-model", "load-checkpoint"])
        return self.plan(
            f"kill rank={self.any_rank()} step={self.soon()}", f"kill rank={self.any_rank()} phase={phase}"
        )

    def unreadable_samples(self) -> str:
        return self.plan(f"data-error rank={self.any_rank()} step={self.soon()}")

    def nan_then_death(self) -> str:
        """The step is skipped; the rank dies before that is saved, and the step is done again without NaN."""
        rank, step = self.any_rank(), self.soon(room=5)
        return self.plan(f"nan rank={rank} step={step}", f"kill rank={rank} step={step + 2}")

    def flip_then_death(self) -> str:
        rank, step = self.any_rank(), self.soon(room=5)
        return self.plan(f"flip rank={rank} step={step}", f"kill rank={rank} step={step + 2}")

    def flip(self) -> str:
        """The guard finds it, and the run goes on from a checkpoint of before."""
        return self.plan(f"flip rank={self.any_rank()} step={self.soon(room=5)}")

    def damaged_checkpoint(self) -> str:
        """The newest one is damaged, then a rank dies: the run goes on from the one before."""
        self.wait(lambda: len(list_checkpoints(self.run / "checkpoints")) >= 2, "two checkpoints")
        pids = self.wait_for_ranks()
        for pid in pids.values():  # no newer one comes meanwhile
            os.kill(pid, signal.SIGSTOP)
        newest = newest_checkpoint(self.run / "checkpoints")
        assert newest is not None
        how, rank, file = self.rng.choice(["truncate", "flip", "zero", "remove"]), self.any_rank(), self.any_rank()
        damage(newest / f"rank-{file:05d}.bin", how)
        for number in (signal.SIGKILL, signal.SIGCONT):
            for each in [rank] if number == signal.SIGKILL else range(RANKS):
                with suppress(ProcessLookupError):
                    os.kill(pids[each], number)
        return f"{how} of {newest.name}/rank-{file:05d}.bin, kill -9 of rank {rank}"

    # --- what requeues the job

    def terminated_rank(self) -> str:
        return self.plan(f"term rank={self.any_rank()} step={self.soon()}")

    def terminated_in_save(self) -> str:
        return self.plan(f"term rank={self.any_rank()} point={self.rng.choice(RANK_POINTS)}")

    def terminated_in_validation(self) -> str:
        return self.plan(f"term rank={self.any_rank()} phase=validate")

    def time_limit(self) -> str:
        """Send the script what SLURM sends it when the time limit is near."""
        call("scancel", "--signal=USR1", "--batch", self.job)
        return "USR1 to the script: the time limit is near"

    def preemption(self) -> str:
        node = self.rng.choice(self.nodes())
        words = ("-phigh", f"-w{node}", "--exclusive", "--output=/dev/null", "--job-name=high", "--wrap", "sleep 1")
        call("sbatch", "--parsable", *words)
        return f"a job of a higher partition takes {node}"

    def lost_node(self) -> str:
        """Its power goes, and comes back once the run goes on elsewhere, or SLURM has requeued the job."""
        node, before = self.rng.choice(self.nodes()), self.num_starts()
        self.desk.cluster("kill", node)
        how = self.wait_for_others(before)
        self.desk.cluster("boot", node)
        return f"node {node} loses its power; {how}"

    def frozen_node(self) -> str:
        """It stops answering, SLURM gives it up, the run goes on elsewhere; then it thaws, and its ranks must harm nothing."""
        nodes, before = self.nodes(), self.num_starts()
        rank = self.any_rank()
        stale = self.wait_for_ranks()[rank]
        self.desk.cluster("freeze", nodes[rank])
        try:
            how = self.wait_for_others(before)
            self.wait(lambda: (self.last() or {"unix_s": 0})["unix_s"] > self.started_s, "a step of the new start")
        finally:
            self.desk.cluster("thaw", nodes[rank])
        self.wait(lambda: not lives(stale), "the end of the frozen rank")
        return f"node {nodes[rank]} freezes, and thaws once the run goes on elsewhere; {how}"

    def wait_for_others(self, before: int) -> str:
        """Return once the ranks have started without a lost node. A user types what `status` advises against SLURM's delay."""
        is_requeued = lambda: self.num_starts() > before or job_state(self.job) == "PENDING"  # noqa: E731
        self.wait(is_requeued, "a start without the lost node")
        how = "in the same job" if self.num_starts() > before else "by a requeue"
        deadline = time.monotonic() + PATIENCE_S
        while self.num_starts() == before:
            if time.monotonic() > deadline:
                raise Violation("the requeued job did not start")
            time.sleep(1)
            if job_state(self.job) == "PENDING":
                subprocess.run(
                    ["scontrol", "update", f"JobId={self.job}", "StartTime=now"], capture_output=True, check=False
                )
        self.started_s = time.time()
        return how

    def hung_rank(self) -> str:
        """Stopped for good: the watch names it, and the ranks start again."""
        said = self.desk.log(RUN).count(" hangs: ")
        self.wait_for_new_steps(10)  # until steps are measured a hang is given minutes
        what = self.plan(f"stop rank={self.any_rank()} step={self.soon()}")
        self.wait(
            lambda: self.desk.log(RUN).count("hangs") + self.desk.log(RUN).count("hung") > said, "the watch's word"
        )
        return what

    # --- what a user stops and submits again

    def wandb_down(self) -> str:
        """The run goes on with wandb online, whose server answers nobody or nonsense; its end waits for that, a minute at the
        most. Then it goes on as before."""
        how, before = self.rng.choice(["no answer", *sorted(ANSWERS)]), self.num_starts()
        with serve(ANSWERS.get(how)) as address:
            self.submit_again(["track.wandb.mode=online"], {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40})
            self.wait(lambda: self.num_starts() > before, "a start with wandb online")
            self.wait(self.mirrors, "the mirror for wandb")
            self.wait_for_new_steps(30)
            began = time.time()
            self.stop()
            held_s = time.time() - began
        before = self.num_starts()
        self.submit_again(["track.wandb.mode=disabled"], {})
        self.wait(lambda: self.num_starts() > before, "a start without wandb")
        self.started_s = time.time()
        return (
            f"wandb online, whose server gives {how}; the run's end took {held_s:.0f} s, then it goes on without wandb"
        )

    def mirrors(self) -> list[int]:
        """The processes that send this run's metrics to wandb."""
        return self.desk._find(lambda words: b"framework.track.mirror" in words and str(self.run).encode() in words)

    def submit_again(self, words: list[str], variables: dict[str, str]) -> None:
        """Stop the run, unless that is done, and queue it with other words, in an environment that has more variables."""
        self.stop()
        desk = replace(self.desk, environment=self.desk.environment | variables)
        self.job = desk.submit_as(RUN, *words)

    def stop(self) -> None:
        """Have the run save and end, and wait until its job has."""
        if job_is_over(self.job):
            return
        answer = self.desk.meshwright("stop", f"runs/{RUN}")
        if answer.code:
            raise Violation(f"the run did not stop as it was asked to: {answer}")
        deadline = time.monotonic() + PATIENCE_S
        while not job_is_over(self.job):
            if time.monotonic() > deadline:
                raise Violation("the job did not end after it was stopped")
            time.sleep(POLL_S)

    # --- what nobody needs to start again for

    def frozen_rank(self) -> str:
        seconds = self.rng.uniform(0.5, 2.5)
        return self.plan(f"stop rank={self.any_rank()} step={self.soon()} seconds={seconds:.1f}")

    def slow_rank(self) -> str:
        return self.plan(f"slow rank={self.any_rank()} step={self.soon()} seconds=0.1 times=10")

    def full_disk(self) -> str:
        return self.plan(f"disk-full rank={self.any_rank()}")

    def failing_disk(self) -> str:
        return self.plan(f"eio rank={self.any_rank()} seconds={self.rng.uniform(0, 1):.1f}")

    def controller_dies(self) -> str:
        self.desk.cluster("daemon", "kill", "slurmctld")
        time.sleep(self.rng.uniform(0.5, 2))
        self.desk.cluster("daemon", "start", "slurmctld")
        return "kill -9 of slurmctld, started again"

    def controller_dies_with_a_rank(self) -> str:
        self.desk.cluster("daemon", "kill", "slurmctld")
        os.kill(self.wait_for_ranks_quietly()[rank := self.any_rank()], signal.SIGKILL)
        time.sleep(3)
        self.desk.cluster("daemon", "start", "slurmctld")
        return f"kill -9 of slurmctld and, before it is back, of rank {rank}"

    def wait_for_ranks_quietly(self) -> dict[int, int]:
        """While no controller answers."""
        while len(pids := self.pids()) < RANKS:
            time.sleep(POLL_S)
        return pids

    def node_daemon_dies(self) -> str:
        node = self.rng.choice(self.nodes())
        self.desk.cluster("daemon", "kill", node)
        time.sleep(self.rng.uniform(0.2, 1))
        self.desk.cluster("daemon", "start", node)
        return f"kill -9 of the slurmd of {node}, started again"

    def duplicate(self) -> str:
        answer = self.desk.meshwright("submit", f"run.id={RUN}")
        if answer.code != 86 or "waits or runs" not in answer.err:
            raise Violation(f"a second submission was not refused: {answer}")
        return "a second submission, refused"


# Kind -> how often it is drawn, and whether the ranks are started again.
KINDS: dict[Callable[[Soak], str], tuple[int, bool]] = {
    Soak.kill_rank: (10, True),
    Soak.kill_in_step: (5, True),
    Soak.kill_in_save: (10, True),
    Soak.kill_in_validation: (3, True),
    Soak.kill_in_start_up: (3, True),
    Soak.unreadable_samples: (3, True),
    Soak.nan_then_death: (3, True),
    Soak.flip_then_death: (3, True),
    Soak.flip: (3, True),
    Soak.damaged_checkpoint: (5, True),
    Soak.terminated_rank: (3, True),
    Soak.terminated_in_save: (3, True),
    Soak.terminated_in_validation: (2, True),
    Soak.time_limit: (3, True),
    Soak.preemption: (3, True),
    Soak.lost_node: (3, True),
    Soak.controller_dies_with_a_rank: (2, True),
    Soak.frozen_node: (2, True),
    Soak.hung_rank: (3, True),
    Soak.wandb_down: (2, True),
    Soak.frozen_rank: (8, False),
    Soak.slow_rank: (7, False),
    Soak.full_disk: (7, False),
    Soak.failing_disk: (5, False),
    Soak.controller_dies: (5, False),
    Soak.node_daemon_dies: (4, False),
    Soak.duplicate: (2, False),
}
# Those of an elastic run: nodes are lost, and a requeued job has two again. What takes two replicas is not among them.
ELASTIC_KINDS: dict[Callable[[Soak], str], tuple[int, bool]] = {
    Soak.lost_node: (4, True),
    Soak.terminated_rank: (2, True),
    Soak.kill_rank: (1, True),
    Soak.kill_in_step: (1, True),
    Soak.kill_in_save: (1, True),
    Soak.time_limit: (1, True),
}

Kinds = dict[Callable[[Soak], str], tuple[int, bool]]


def choose_kinds(is_elastic: bool, only: list[str] | None) -> Kinds:
    """The kinds of a soak. only: their names, None for all."""
    kinds = ELASTIC_KINDS if is_elastic else KINDS
    return {kind: how for kind, how in kinds.items() if only is None or kind.__name__ in only}


def draw_kinds(faults: int, seed: int, kinds: Kinds = KINDS) -> list[Callable[[Soak], str]]:
    """Every kind about as often as its weight says, in random order: with few faults the heavy ones, with 100 all of them."""
    rng, weights = random.Random(seed), {kind: weight for kind, (weight, _) in kinds.items()}
    total = sum(weights.values())
    exact = {kind: faults * weight / total for kind, weight in weights.items()}
    counts = {kind: int(number) for kind, number in exact.items()}
    by_rest = sorted(kinds, key=lambda kind: (counts[kind] - exact[kind], rng.random()))
    for kind in by_rest[: faults - sum(counts.values())]:
        counts[kind] += 1
    drawn = [kind for kind, count in counts.items() for _ in range(count)]
    rng.shuffle(drawn)
    return drawn


def suffer(soak: Soak, event: Event, kind: Callable[[Soak], str]) -> None:
    """Bring one fault, and wait until the run has got over it."""
    soak.wait_for_new_steps(soak.rng.randrange(3, 30))
    before, soak.planned, soak.started_s = soak.num_starts(), set(), None
    reported = event.step = soak.step()
    event.unix_s = time.time()
    event.what = kind(soak)
    if noted := soak.suffered():  # it came when its rank noted it
        event.unix_s, event.step = noted[0]["unix_s"], noted[0].get("step", event.step)
        reported = max(reported, event.step - 1)
    since_s = event.unix_s
    if event.restarts:
        soak.wait(lambda: soak.num_starts() > before, "another start of the ranks")
        since_s = soak.started_s or time.time()
    first = soak.last() or {"step": 0}
    reported = max(reported, first["step"]) if event.restarts and first["unix_s"] < since_s else reported

    def recovered() -> bool:
        last = soak.last()
        if last is None or last["unix_s"] < since_s or (not event.restarts and last["step"] <= reported):
            return False
        event.recovered_s = event.recovered_s or last["unix_s"] - event.unix_s
        event.caught_up_s = last["unix_s"] - event.unix_s
        return last["step"] > reported

    soak.wait(recovered, "a new step")


def go_through(soak: Soak, report: Report, args: argparse.Namespace, log: Path) -> None:
    """All faults, one after another."""
    deadline, kinds = time.monotonic() + 60 * args.minutes, choose_kinds(args.elastic, args.only)
    for number, kind in enumerate(draw_kinds(args.faults, args.seed, kinds), start=1):
        if time.monotonic() > deadline:
            raise Violation(f"{number - 1} of {args.faults} faults came within {args.minutes:g} minutes")
        event = Event(number, kind.__name__.replace("_", " "), "", kinds[kind][1])
        report.events.append(event)
        try:
            suffer(soak, event, kind)
        except (Violation, subprocess.SubprocessError, OSError, KeyError) as error:
            event.problem = f"{type(error).__name__}: {error}"
            raise Violation(f"fault {number}, {event.kind} ({event.what}): {event.problem}") from error
        finally:
            with log.open("a") as file:
                file.write(json.dumps(asdict(event)) + "\n")
        took = (
            "" if event.recovered_s is None else f" | {event.recovered_s:5.1f} s, caught up {event.caught_up_s:5.1f} s"
        )
        print(f"{number:4} of {args.faults} | step {event.step:6} | {event.kind:28}{took} | {event.what}", flush=True)


def sabotage(soak: Soak) -> None:
    """A NaN on one rank that no restart undoes: the step is skipped for good, and the soak must end with 1."""
    step = soak.soon(room=2)
    soak.plan(f"nan rank=1 step={step}")
    soak.wait(lambda: soak.step() > step + EVERY, "the next checkpoint")


def finish(soak: Soak) -> int:
    """Have the run save and end; the step that it ended at."""
    soak.wait_for_new_steps(5)
    soak.stop()
    newest = newest_checkpoint(soak.run / "checkpoints")
    assert newest is not None
    return step_of(newest)


def compare(desk: "SoakDesk", steps: int, parity: float = 0.0) -> list[str]:
    """Train as many steps without a fault, and say in what the two runs differ. parity: what losses, and all elements of a weight
    together, may differ by, as a share; 0: by no bit."""
    dtype = ["precision=fp64"] if parity else []
    desk.train_as(REFERENCE, *RECIPE, *dtype, f"launch.ranks={RANKS}", f"train.steps={steps}")
    problems = []
    curves = [{r["step"]: r["loss"] for r in read_records(desk.folder(run) / METRICS_FILE)} for run in (RUN, REFERENCE)]
    missing = [step for step in range(1, steps + 1) if any(step not in curve for curve in curves)]
    losses = {step: [torch.tensor([curve[step]]) for curve in curves] for step in curves[0] if step in curves[1]}
    others = sorted(
        [*missing, *(step for step, (found, expected) in losses.items() if not is_equal(found, expected, parity))]
    )
    if others:
        problems.append(f"{len(others):,} of {steps:,} losses differ or are missing, the first of step {others[0]:,}")
    weights = [desk.weights(run) for run in (RUN, REFERENCE)]
    differ = [
        name
        for name in weights[1]
        if name not in weights[0] or not is_equal(weights[0][name], weights[1][name], parity)
    ]
    if differ:
        problems.append(f"{len(differ)} of {len(weights[1])} weights differ, such as {differ[0]}")
    lineages = [read_lineage(desk.folder(run)) for run in (RUN, REFERENCE)]
    return problems + find_ledger_problems(lineages[0], steps * PER_STEP, lineages[1])


def is_equal(found: torch.Tensor, expected: torch.Tensor, parity: float) -> bool:
    """Whether a tensor differs from another one by no more than a share of that, by norm; bit by bit where the share is 0."""
    if parity == 0.0:
        return torch.equal(found, expected)
    difference = torch.linalg.vector_norm(found.double() - expected.double())
    return bool(difference <= parity * torch.linalg.vector_norm(expected.double()))


def check_layouts(soak: Soak) -> list[str]:
    """Whether an elastic run was laid out on fewer nodes, and on all again."""
    counts = [len(call("scontrol", "show", "hostnames", start["nodes"]).split()) for start in soak.desk.starts(RUN)]
    return [] if {1, RANKS} <= set(counts[1:]) else [f"the starts were on {counts} nodes, so no layout has changed"]


def check_goodput(soak: Soak, ended_s: float, report: Report) -> list[str]:
    """Whether the parts of the run's time add up to what a clock outside of it says."""
    account = read_account(soak.run)
    if account is None:
        return ["there is no record of goodput"]
    report.goodput = {part.value: round(seconds, 2) for part, seconds in account.seconds.items()}
    wall_s = ended_s - soak.submitted_s
    off_s = abs(account.wall_s - wall_s)
    if off_s > max(GOODPUT_SLACK_S, GOODPUT_SHARE * wall_s):
        return [f"goodput adds up to {account.wall_s:.1f} s of {wall_s:.1f} s"]
    return []


def job_is_over(job: str) -> bool:
    with suppress(subprocess.SubprocessError, TypeError):  # the controller is down for a moment
        return job_state(job) not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")
    return False


def render(report: Report) -> str:
    """The table of docs/reliability.md."""
    by_kind: dict[str, list[Event]] = defaultdict(list)
    for event in report.events:
        if event.recovered_s is not None:
            by_kind[event.kind].append(event)
    rows = [("fault", "times", "median s", "worst s", "caught up: median s", "worst s")]
    for kind, events in sorted(by_kind.items(), key=lambda item: -statistics.median(e.recovered_s for e in item[1])):
        columns = [[event.recovered_s for event in events], [event.caught_up_s for event in events]]
        rows.append(
            (kind, str(len(events)), *(f"{word(each):.1f}" for each in columns for word in (statistics.median, max)))
        )
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


@dataclass(frozen=True)
class SoakDesk(Desk):
    """A desk whose commands may take long: the machine may be busy."""

    def _call(self, *arguments: str) -> str:
        command = [sys.executable, "-m", "framework", *arguments]
        done = subprocess.run(
            command, cwd=self.place, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise Violation(f"{' '.join(arguments[:1])} ended with {done.returncode}: {done.stderr[-2000:]}")
        return done.stdout

    def submit_as(self, run: str, *overrides: str) -> str:
        found = re.search(r"^job +(\d+)", self._call("submit", *overrides, f"run.id={run}"), re.M)
        assert found is not None
        return found[1]

    def train_as(self, run: str, *overrides: str) -> None:
        self._call("train", *overrides, f"run.id={run}")


def write_corpus(folder: Path) -> None:
    """Text in which no two samples are alike."""
    folder.mkdir()
    rng = random.Random(0)
    for number in range(20):
        (folder / f"{number}.txt").write_text(" ".join(rng.choice(tiny_run.WORDS) for _ in range(WORDS)))


def soak(args: argparse.Namespace, folder: Path) -> Report:
    """The whole story, on a cluster of its own that is stopped in every case."""
    report, began = Report(args.seed, args.faults), time.monotonic()
    nodes = ELASTIC_NODES if args.elastic else NODES
    home = tempfile.mkdtemp(prefix="mw-soak-", dir="/tmp")  # a socket's path is short
    os.environ |= {
        "MESHWRIGHT_CLUSTER": home,
        "MESHWRIGHT_CLUSTER_PORT": str(free_ports(nodes + 1)),
        "PYTHONPATH": str(SCRIPT.parents[1]),
        "SLURM_CONF": f"{home}/slurm.conf",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    desk = SoakDesk(folder, dict(os.environ))
    write_corpus(folder / "corpus")
    try:
        call(str(SCRIPT), "start", str(nodes))
        run = Soak(desk, random.Random(args.seed + 1), folder, args.elastic)
        try:
            go_through(run, report, args, folder / "events.jsonl")
        except Violation as error:
            report.problems.append(str(error))
        if args.sabotage:
            sabotage(run)
        report.steps, report.starts = finish(run), run.num_starts()
        report.seconds = time.monotonic() - began
        report.problems += check_goodput(run, time.time(), report)
        report.problems += compare(desk, report.steps, PARITY if args.elastic else 0.0)
        report.problems += check_layouts(run) if args.elastic else []
        deadline = time.monotonic() + 60
        while (left := left_over(desk)) and time.monotonic() < deadline:
            time.sleep(1)
        if left:
            report.problems.append(f"left running: {left}")
    except Violation as error:
        report.problems.append(str(error))
    except KeyboardInterrupt:
        report.problems.append("interrupted")
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # what was started is ended first
        with suppress(subprocess.SubprocessError):
            call(str(SCRIPT), "stop")
        end_left_over(desk)
        for name in ("slurmctld.log", "munged.log"):
            with suppress(OSError):
                shutil.copy(Path(home, "log", name), folder / name)
        shutil.rmtree(home, ignore_errors=True)
    return report


def end_left_over(desk: Desk) -> None:
    """Kill what still runs in this soak's folder: its path is on the command line."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = str(desk.place / "runs").encode() in (process / "cmdline").read_bytes()
            if is_ours and int(process.name) != os.getpid() and lives(int(process.name)):
                os.kill(int(process.name), signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="S")
    parser.add_argument("--minutes", type=float, default=25.0, metavar="M", help="all faults must come within so many")
    parser.add_argument(
        "--sabotage", action="store_true", help="harm the weights for good at the end: the soak must notice"
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="a run of one or two nodes; it ends within rounding of the fault-free run",
    )
    parser.add_argument("--only", nargs="+", metavar="KIND", help="of these kinds alone, such as wandb_down")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write events and problems")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="a new folder for runs and events, which stays; else in /tmp"
    )
    args = parser.parse_args()
    if args.faults < 1:
        parser.error("--faults: at least one")
    names = [kind.__name__ for kind in choose_kinds(args.elastic, None)]
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"--only {' '.join(sorted(unknown))}: the kinds are {' '.join(names)}")
    if (reason := why_not()) is not None:
        parser.error(reason)
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    folder = (args.folder or Path(tempfile.mkdtemp(prefix="mw-soak-runs-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"--folder {folder}: is not empty")
    print(f"soak: {args.faults} faults, seed {args.seed}, in {folder}", flush=True)
    report = soak(args, folder)
    text = json.dumps(asdict(report), indent=1)
    for path in (args.json, folder / "report.json"):
        if path is not None:
            path.write_text(text + "\n")
    print(f"\n{render(report)}\n")
    came = sum(event.recovered_s is not None for event in report.events)
    print(f"{came} faults in {report.seconds / 60:.1f} minutes, {report.starts} starts, {report.steps:,} steps")
    if report.goodput:
        total = sum(report.goodput.values())
        shares = ", ".join(f"{part} {seconds / total:.1%}" for part, seconds in report.goodput.items() if seconds)
        print(f"goodput of {total:.0f} s: {shares}")
    for problem in report.problems:
        print(f"VIOLATION: {problem}")
    how = f"within {PARITY:g}" if args.elastic else "to the bit"
    print(f"equal to the fault-free run, {how}" if not report.problems else f"{len(report.problems)} violations")
    return 1 if report.problems or came < args.faults else 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
