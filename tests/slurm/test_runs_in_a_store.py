"""Jobs whose run.root is a bucket: what is lost and goes on ends as the run on a disk does, and commands take the URL."""

import re
import shutil
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from framework.checkpoint.storage import ObjectPath
from framework.track.goodput_log import read_account
from framework.track.sample_ledger import find_ledger_problems, read_lineage
from tests.object_server import serve_s3
from tests.slurm.cluster import APART, RECIPE, SEQUENCES, SLURM, Answer, Desk, call, job_state, wait_for
from tests.slurm.scenarios import WAITS

ROOT = "s3://bucket/desk/runs"
URL = f"{ROOT}/x"
AT = ("run.id=x", f"run.root={ROOT}")
STEPS = 200
# In front of these steps the ranks stop, until what is to happen has: far apart, as a request is heard within half a second.
KILLED, REQUEUED, SAVED, STOPPED = 30, 50, 80, 130
COMMON = (f"train.steps={STEPS}", "track.sample_ledger=true")


@dataclass(frozen=True)
class StoreDesk(Desk):
    """A desk whose runs lie in the bucket. cache: below which this machine has their working folders."""

    cache: Path

    def folder(self, run: str) -> Path:
        return self.cache / "meshwright" / "runs" / "s3" / "bucket" / "desk" / "runs" / run

    def elsewhere(self) -> "StoreDesk":
        """That of a machine which has nothing of the runs."""
        cache = self.cache.with_name("elsewhere")
        return replace(self, cache=cache, environment=self.environment | {"XDG_CACHE_HOME": str(cache)})

    def ask(self, verb: str, file: str) -> subprocess.Popen[str]:
        """`meshwright VERB URL`, once it has left its request."""
        command = [sys.executable, "-m", "framework", verb, URL]
        asking = subprocess.Popen(command, cwd=self.place, env=self.environment, stdout=subprocess.PIPE, text=True)
        wait_for((self.folder("x") / file).exists, f"{verb} to ask")
        return asking


@pytest.fixture(scope="module")
def store_desk(desk: Desk, tmp_path_factory):
    with serve_s3(tmp_path_factory.mktemp("moto") / "log") as variables:
        cache = desk.place / "cache"
        yield StoreDesk(desk.place, desk.environment | variables | {"XDG_CACHE_HOME": str(cache)}, cache)


@pytest.fixture(scope="module")
def evidence(desk: Desk, store_desk: StoreDesk) -> dict[str, Future]:
    """Three things beside one another: a run is lost and goes on, a sweep trains, and the run on a disk."""
    with ThreadPoolExecutor(3) as pool:
        whole = pool.submit(desk.train_here, "store-whole", "launch.ranks=2", *COMMON)
        return {"lost": pool.submit(lose, store_desk), "sweep": pool.submit(sweep, store_desk), "whole": whole}


def lose(desk: StoreDesk) -> dict[str, Any]:
    """A rank is killed; the job is requeued; the run is told to save, and to stop; its working folder is lost; it is submitted
    again."""
    pauses = desk.ledger(KILLED, REQUEUED, SAVED, STOPPED)
    job = desk.submit("x", f"run.root={ROOT}", "launch.nodes=2", WAITS, *COMMON, pauses)
    pids = desk.wait_for_pause("x", KILLED, ranks=2)
    refusal, shown = desk.meshwright("submit", *AT), desk.meshwright("status", URL).out
    call("kill", "-9", str(pids[1]))
    desk.let_go({0: pids[0]})
    pids = desk.wait_for_pause("x", REQUEUED, ranks=2)
    call("scontrol", "requeue", job)
    desk.let_go(pids)
    wait_for(lambda: 85 in desk.ends("x") and job_state(job) == "PENDING", "the requeue", tell=lambda: desk.log("x"))
    call("scontrol", "update", f"JobId={job}", "StartTime=now")
    said = []
    for step, verb, file in ((SAVED, "save", "request-save"), (STOPPED, "stop", "request-stop")):
        pids = desk.wait_for_pause("x", step, ranks=2)
        asking = desk.ask(verb, file)
        desk.let_go(pids)
        said.append(asking.communicate(timeout=60)[0])
    desk.wait_until_gone(job)
    lost = desk.starts("x")
    shutil.rmtree(desk.folder("x"))
    last = desk.resume("x", f"run.root={ROOT}")
    desk.wait_until_gone(last)
    return {
        "refusal": refusal, "shown": shown, "said": said, "lost": lost, "log": desk.log("x"), "ends": desk.ends("x"),
        "states": [job_state(job), job_state(last)],
    }  # fmt: skip


def sweep(desk: StoreDesk) -> Answer:
    words = (*RECIPE, *SLURM, APART, "launch.ranks=1", "run.name=swept", f"run.root={ROOT}", "train.steps=10")
    answer = desk.meshwright("submit", "-m", *words, "checkpoint.export_every_steps=10", "optim.lr=1e-3,2e-3")
    assert answer.code == 0, answer
    job = next(line.split()[1] for line in answer.out.splitlines() if line.startswith("job"))
    desk.wait_until_gone(job)
    return answer


def test_a_run_that_lost_a_rank_its_nodes_and_its_working_folder_is_the_run_on_a_disk(desk, store_desk, evidence):
    found = evidence["lost"].result()
    evidence["whole"].result()
    assert found["ends"][-1] == 0, found["log"]
    assert store_desk.losses("x") == desk.losses("store-whole")
    assert [step for step, _ in store_desk.losses("x")] == list(range(1, STEPS + 1))
    mine, theirs = store_desk.weights("x"), desk.weights("store-whole")
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    lineages = [read_lineage(folder) for folder in (store_desk.folder("x"), desk.folder("store-whole"))]
    assert find_ledger_problems(lineages[0], STEPS * SEQUENCES, lineages[1]) == []


def test_each_start_goes_on_from_the_bucket_and_what_came_before_is_kept_there(store_desk, evidence):
    found = evidence["lost"].result()
    starts = store_desk.starts("x")
    assert [start["from"] for start in starts[:3]] == [start["from"] for start in found["lost"]]
    assert [start["restart"] for start in starts] == [0, 0, 1, 0]
    assert starts[1]["from"] == 20
    assert REQUEUED <= starts[2]["from"] < SAVED
    assert STOPPED <= starts[3]["from"] < STEPS
    assert found["states"] == ["FAILED", "COMPLETED"], "85 of a run that was asked to stop"
    assert "starts 2 ranks" in found["log"]
    assert len(read_account(store_desk.folder("x")).rows) == 4


def test_commands_take_the_url_of_a_run_in_a_job(store_desk, evidence):
    found = evidence["lost"].result()
    assert found["refusal"].code == 86
    assert "which waits or runs" in found["refusal"].err
    assert f"store    {URL}, held by process" in found["shown"]
    assert "RUNNING on n" in found["shown"]
    saved, stopped = found["said"]
    assert SAVED <= int(re.search(r"^saved    step (\d+)$", saved, re.M)[1]) <= STOPPED
    assert STOPPED <= int(re.search(r"^stopped  step (\d+)$", stopped, re.M)[1]) < STEPS
    assert f"resume   meshwright submit run.id=x run.root={ROOT}\n" in stopped
    there = store_desk.elsewhere().meshwright("status", URL).out
    assert ", done\n" in there
    assert f"saved    step {STEPS}" in there


def test_a_sweep_lies_in_the_bucket_with_its_exports(store_desk, evidence):
    evidence["sweep"].result()
    there = store_desk.elsewhere()
    status = there.meshwright("status", f"{ROOT}/swept-sweep-001")
    assert status.code == 0, status
    assert status.out.count(", done\n") == 2, store_desk.log("swept-sweep-001-0")
    for number in range(2):
        run = f"swept-sweep-001-{number}"
        [export] = ObjectPath(f"{ROOT}/{run}/exports").list()
        assert export.startswith("step-00000010.")
        folder = ObjectPath(f"{ROOT}/{run}/exports/{export}")
        assert {"config.json", "tokenizer.json", "model.safetensors"} <= set(folder.list())
        weights = load((folder / "model.safetensors").read_bytes())
        trained = store_desk.weights(run)
        assert all(torch.equal(weight, trained[f"weight/{name}"]) for name, weight in weights.items())
        assert not (store_desk.folder(run) / "exports").exists()
