"""Whole runs of two nodes, killed again and again, that go on from what the nodes hold and never open a checkpoint."""

import multiprocessing
import os
import random
import signal
import time
from functools import partial

import pytest
import torch

from framework.checkpoint.held import newest_listed
from framework.checkpoint.load import Reader
from framework.checkpoint.node_memory import memory_of
from framework.comm.connect import connect
from framework.data.prepare import prepare
from framework.errors import EXIT_DONE
from framework.lease import Lease
from framework.mesh.topology import Topology
from framework.model.load import load_config
from framework.monitor.watchdog import Watchdog
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.track.report import Observers
from framework.train import rank as train
from framework.train import saves
from framework.train.loop import Loop
from tests import tiny_run
from tests.faults.copying_ranks import spoil_disk

STEPS, KILLS = 48, 3
WORDS = ("launch=slurm", "launch.gres=null", "launch.device=cpu", "launch.nodes=2", "launch.ranks_per_node=1")
WORDS += ("batch.sequences_per_step=2", "batch.sequences_per_microbatch=1", f"train.steps={STEPS}")


def train_body(rank, recipe, place, rendezvous, death):
    """One rank of a start; death: (rank, step) dies there, or later, when both nodes hold a step that is not saved."""
    run_dir, plain = place / "run", Loop.find_goal
    memories = [memory_of(run_dir, f"n{number}", place / "shm") for number in range(2)]

    def find_goal(loop):
        time.sleep(0.01)  # steps of milliseconds would leave no time between two saves
        if death is not None and rank == death[0] and loop.state.step >= death[1]:
            while loop.policy.saver.is_busy:
                time.sleep(0.01)
            saved = newest_listed(run_dir / "checkpoints")
            if all(any(name.step > saved for name in memory.list()) for memory in memories):
                os.kill(os.getpid(), signal.SIGKILL)
        return plain(loop)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "find_goal", find_goal)
        patch.setattr(train, "open_observers", lambda *words: Observers())
        patch.setattr(saves, "node_name", lambda: f"n{rank}")
        patch.setattr(saves, "memory_of", partial(memory_of, memory=place / "shm"))
        mesh = connect(Topology(dp=2), torch.device("cpu"), f"file://{rendezvous}", rank, timeout_s=30)
        with Watchdog() as watchdog:
            plan = make_plan(recipe, load_config(recipe.model))
            code = train.train_connected(plan, prepare(recipe), mesh, Lease(run_dir), watchdog)
        mesh.close()
    return code


def start(recipe, place, death=None):
    """Both ranks, each a process of its own: their exit codes."""
    for name in ("run", "shm"):
        (place / name).mkdir(parents=True, exist_ok=True)
    rendezvous = place / f"rendezvous-{len(os.listdir(place))}"

    def body(rank):
        os._exit(train_body(rank, recipe, place, rendezvous, death))

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=body, args=(rank,)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
        process.kill()
    return [process.exitcode for process in ranks]


def values_of(place):
    """All that the last checkpoint has, bit by bit."""
    path = place / "run" / "checkpoints" / f"step-{STEPS:08d}"
    return Reader(path).manifest.state, [file.read_bytes() for file in sorted(path.glob("rank-*"))]


@pytest.fixture
def compose_run(tmp_path, monkeypatch):
    """A function: the recipe with more words."""
    tiny_run.write_corpus(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    words = [*tiny_run.RECIPE, *WORDS, f"data.sources.files.path={tmp_path}/corpus", f"data.root={tmp_path}/data"]
    prepare(compose(words).require())
    return lambda *more: compose([*words, *more]).require()


@pytest.mark.grid  # what nodes hold, and who takes it: test_neighbor_copies.py
@pytest.mark.parametrize("zero", [0, 3])
def test_a_run_that_is_killed_again_and_again_ends_in_the_same_bits_and_reads_no_checkpoint(
    tmp_path, compose_run, capfd, zero
):
    shared = (f"zero.stage={zero}", "checkpoint.every_steps=5")
    copies = ("checkpoint.neighbor_copies=1", "checkpoint.neighbor_every_steps=2")
    assert start(compose_run(*shared), tmp_path / "undisturbed") == [EXIT_DONE] * 2
    recipe, place, draw = compose_run(*shared, *copies), tmp_path / "killed", random.Random(zero)
    for number in range(KILLS):
        death = draw.randrange(2), 3 + 6 * number + draw.randrange(4)
        codes = start(recipe, place, death)
        assert codes[death[0]] == -signal.SIGKILL
        spoil_disk(place / "run")
    assert start(recipe, place) == [EXIT_DONE] * 2
    assert capfd.readouterr().err.count("which the memory of the run's nodes holds") == KILLS
    assert values_of(place) == values_of(tmp_path / "undisturbed")
    assert not list((place / "shm").glob("*/*"))
