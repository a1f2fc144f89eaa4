"""A rank that is slow in real steps is named with its phase, by the times that reports gather; the one that waits is not."""

import time
from itertools import count
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from framework.comm.connect import connect
from framework.data.loader import Loader
from framework.data.prepare import prepare
from framework.errors import EXIT_DONE
from framework.lease import Lease
from framework.mesh.topology import Topology
from framework.model.load import load_config
from framework.monitor.stragglers import BASELINE, LEAST, WARM_UP, WINDOW
from framework.monitor.watchdog import Watchdog
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.train import loop
from framework.train import rank as train
from framework.train import reports as step_reports
from tests import tiny_run
from tests.grid import few_of

SLOW_S = 0.06


class Reports:
    """An observer that keeps what it is told."""

    def __init__(self):
        self.stragglers = []

    def report(self, report):
        self.stragglers.append(report.stragglers)

    def open(self, run): ...

    def close(self, code): ...

    def contain(self, name, call): ...


def slowed(plain, from_call=0):
    calls = count()

    def call(*arguments, **named):
        if next(calls) >= from_call:
            time.sleep(SLOW_S)
        return plain(*arguments, **named)

    return call


def train_body(rank, world, rendezvous, recipe, folder, phase, from_step=0):
    """Train; rank 1 is slow in the phase, from a step on. What rank 0 reports and says of stragglers."""
    prepared, config = prepare(recipe), load_config(recipe.model)
    pp = recipe.parallel.pp
    mesh = connect(Topology(dp=world // pp, pp=pp), torch.device("cpu"), rendezvous, rank, timeout_s=30)
    reports, said = Reports(), []
    where = {"data": (Loader, "batch"), "compute": (loop, "learning_rate")}.get(
        phase if rank == 1 else "", (step_reports, "find_bubble")
    )
    plain = getattr(*where)
    with (
        Watchdog(say=said.append) as watchdog,
        patch.object(train, "open_observers", lambda *words: reports),
        patch.object(*where, slowed(plain, from_step) if where[1] != "find_bubble" else plain),
    ):
        code = train.train_connected(make_plan(recipe, config), prepared, mesh, Lease(folder), watchdog)
    mesh.close()
    return code, said, reports.stragglers


def compose_run(tmp_path: Path, *more):
    tiny_run.write_corpus(tmp_path / "corpus")
    words = [
        *tiny_run.RECIPE,
        f"data.sources.files.path={tmp_path}/corpus",
        f"data.root={tmp_path}/data",
        "launch.ranks=2",
        "batch.sequences_per_step=2",
        "batch.sequences_per_microbatch=1",
        "checkpoint.every_steps=null",
        *more,
    ]
    recipe = compose(words).require()
    prepare(recipe)
    return recipe


@pytest.mark.parametrize("phase", few_of(["data", "compute"], lambda phase: phase == "compute"))
def test_a_slow_rank_is_named_with_its_phase(pool, tmp_path: Path, monkeypatch, phase):
    monkeypatch.chdir(tmp_path)
    recipe = compose_run(tmp_path, "train.steps=30")
    (code, said, stragglers), (other, silent, _) = pool.run(2, train_body, recipe, tmp_path, phase, timeout_s=100)
    assert (code, other, silent) == (EXIT_DONE, EXIT_DONE, [])
    (line,) = said
    assert line.startswith(f"rank 1 [pp0 dp1 cp0 tp0] is slow in {phase}: ")
    assert list(stragglers[-1]) == [f"1 {phase}"]
    assert stragglers[-1][f"1 {phase}"] == pytest.approx(SLOW_S, rel=0.5)
    assert stragglers[0] == {}


@pytest.mark.grid
def test_a_rank_that_becomes_slow_alone_in_its_stage_is_named(pool, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first_slow = WARM_UP + BASELINE + LEAST
    recipe = compose_run(tmp_path, f"train.steps={first_slow + WINDOW}", "parallel.pp=2")
    words = (recipe, tmp_path, "compute", first_slow)
    (code, said, stragglers), (other, silent, _) = pool.run(2, train_body, *words, timeout_s=100)
    assert (code, other, silent) == (EXIT_DONE, EXIT_DONE, [])
    (line,) = said
    assert line.startswith("rank 1 [pp1 dp0 cp0 tp0] is slow in compute: ")
    assert "a step longer than in its first steps" in line
    assert stragglers[-1]["1 compute"] == pytest.approx(SLOW_S, rel=0.5)
