"""Runs that save behind training save what runs do that wait for the disk, byte for byte, whatever lives where."""

import time
from unittest.mock import patch

import pytest
import torch

from framework.checkpoint.commit import list_checkpoints, step_of
from framework.checkpoint.staging import StagedFile
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
from framework.train.update import StepOptimizer
from tests import tiny_run
from tests.grid import few_of

STEPS = 7
LAYOUTS = {
    "zero 3": ("zero.stage=3",),
    "replicas": ("zero.stage=0",),
    "offload": ("zero.stage=2", "memory.offload.optimizer=1.0"),
    "int8": ("zero.stage=1", "precision.moments=int8"),
    "bf16": ("zero.stage=1", "precision=bf16"),
    "fp16": ("zero.stage=3", "precision.compute=fp16"),
    "pipeline": ("parallel.pp=2", "pipeline.schedule=1f1b"),
    "disk": ("zero.stage=3", "memory.offload.optimizer=1.0", "memory.offload.home=disk"),
}


def train_body(rank, world, rendezvous, recipe, run_dir, holds):
    """A run whose bytes are staged slowly: the next update would come before."""
    mesh = connect(
        Topology(dp=world // recipe.parallel.pp, pp=recipe.parallel.pp), torch.device("cpu"), rendezvous, rank
    )
    plain = StagedFile._fill

    def fill_late(*args):
        time.sleep(0.1)
        yield from plain(*args)

    with (
        Watchdog() as watchdog,
        patch.object(train, "open_observers", lambda *words: Observers()),
        patch.object(StagedFile, "_fill", fill_late),
        patch.object(StepOptimizer, "hold", StepOptimizer.hold if holds else lambda *args: None),
    ):
        plan = make_plan(recipe, load_config(recipe.model))
        code = train.train_connected(plan, prepare(recipe), mesh, Lease(run_dir), watchdog)
    mesh.close()
    return code


def save_all(pool, folder, mode, words, holds=True):
    """Every second checkpoint's files of a run: {(step, name): bytes}."""
    folder.mkdir()
    disk = [f"memory.offload.disk_path={folder.parent}/disk"] if "memory.offload.home=disk" in words else []
    recipe = compose(
        [
            *tiny_run.RECIPE,
            *words,
            *disk,
            f"data.sources.files.path={folder.parent}/corpus",
            f"data.root={folder.parent}/data",
            "launch.ranks=2",
            "batch.sequences_per_step=2",
            "batch.sequences_per_microbatch=1",
            f"train.steps={STEPS}",
            "checkpoint.every_steps=2",
            "checkpoint.keep=10",
            f"checkpoint.mode={mode}",
        ]
    ).require()
    prepare(recipe)
    assert pool.run(2, train_body, recipe, folder / "run", holds, timeout_s=60) == [EXIT_DONE] * 2
    found = list_checkpoints(folder / "run" / "checkpoints")
    assert [step_of(path) for path in found] == [7, 6, 4, 2]
    return {
        (step_of(path), file.name): file.read_bytes()
        for path in found
        for file in path.iterdir()
        if file.suffix == ".bin"
    }


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    place = tmp_path_factory.mktemp("saves")
    tiny_run.write_corpus(place / "corpus")
    return place


@pytest.fixture(scope="module")
def waiting(pool, corpus):
    """The files of runs that wait for the disk, by layout."""
    found = {}

    def files_of(name):
        if name not in found:
            found[name] = save_all(pool, corpus / f"sync-{name}", "sync", LAYOUTS[name])
        return found[name]

    return files_of


@pytest.mark.parametrize("name", few_of(LAYOUTS, lambda name: False))
def test_a_save_behind_training_is_the_save_that_training_waits_for(pool, corpus, waiting, name):
    assert save_all(pool, corpus / f"async-{name}", "async", LAYOUTS[name]) == waiting(name)
    assert len(waiting(name)) == 12


def test_sabotaged_an_update_that_does_not_wait_for_staging_is_noticed(pool, corpus, waiting):
    sabotaged = save_all(pool, corpus / "sabotaged", "async", LAYOUTS["zero 3"], holds=False)
    assert sabotaged.keys() == waiting("zero 3").keys()
    assert sabotaged != waiting("zero 3")
