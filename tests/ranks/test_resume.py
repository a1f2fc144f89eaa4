"""One file system seen by several ranks: they resume alike, and an error that one of them meets condemns no checkpoint."""

import errno
import os
import resource
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from framework import object_store
from framework.checkpoint.load import load_newest
from framework.checkpoint.staging import Entry
from framework.comm.connect import connect
from framework.data.prepare import prepare
from framework.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER, MeshwrightError
from framework.lease import Lease
from framework.mesh.layout import Layout
from framework.mesh.topology import Topology
from framework.model.load import load_config
from framework.monitor.watchdog import Watchdog
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.track.report import Observers
from framework.train import rank as train
from tests import tiny_run
from tests.grid import few_of
from tests.saving import save_checkpoint

NUMEL = 5_000
NO_PAUSES = (0.0,) * len(object_store.PAUSES_S)
CPU = torch.device("cpu")


def half(rank, world, step):
    interval = (rank * NUMEL // world, (rank + 1) * NUMEL // world)
    return Entry("weight/w", Layout((NUMEL,), interval=interval), torch.full((interval[1] - interval[0],), float(step)))


def save_body(rank, world, rendezvous, root, fault=None):
    """Steps 1 and 2; with `fault` of rank 1 in step 2, the exit code of the error that this rank hears."""
    mesh = connect(Topology(dp=world), CPU, rendezvous, rank, timeout_s=60)
    world_axis = mesh.axis("world")
    save = partial(save_checkpoint, root, world=world_axis, keep=2)
    save(step=1, entries=[half(rank, world, 1)], state={"step": 1})
    faults = {"fault": fault} if fault and rank == 1 else {}
    code = EXIT_DONE
    with patch.object(object_store, "PAUSES_S", NO_PAUSES):
        try:
            save(step=2, entries=[half(rank, world, 2)], state={"step": 2}, **faults)
        except MeshwrightError as error:
            code = error.exit_code
    mesh.close()
    return code


class FailingWrites:
    """A fault of the file system while a rank's file is written, so many times."""

    def __init__(self, number, times):
        self.number, self.left = number, times

    def __call__(self, point):
        if point == "writing" and self.left:
            self.left -= 1
            raise OSError(self.number, os.strerror(self.number))


@contextmanager
def opening_fails(number, times):
    """In this process files of checkpoints cannot be opened for reading, so many times."""
    left = [times]

    def guarded(real):
        def failing(path, *args, **named):
            if left[0] and isinstance(path, (str, os.PathLike)) and "/step-" in os.fspath(path):
                left[0] -= 1
                raise OSError(number, os.strerror(number), os.fspath(path))
            return real(path, *args, **named)

        return failing

    with ExitStack() as patches:
        for name in ("builtins.open", "io.open", "os.open"):
            module, function = name.split(".")
            real = getattr(__import__(module), function)
            patches.enter_context(patch(name, guarded(real)))
        yield


@contextmanager
def no_descriptors():
    """This process cannot open another file: what `ulimit -n` does to a rank with many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # fewer than are open
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def load_body(rank, world, rendezvous, root, trouble, *args):
    """Load while rank 1 is in trouble: the step and whether all values are right, or the error's exit code."""
    mesh = connect(Topology(dp=world), CPU, rendezvous, rank, timeout_s=60)
    filled = half(rank, world, 0)
    with ExitStack() as troubles:
        troubles.enter_context(patch.object(object_store, "PAUSES_S", NO_PAUSES))
        if rank == 1:
            troubles.enter_context(trouble(*args))
        try:
            step = load_newest(root, [filled], mesh.axis("world"))["step"]
            outcome = step, bool((filled.data == step).all())
        except MeshwrightError as error:
            outcome = error.exit_code
    mesh.close()
    return outcome


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("number", few_of([errno.EMFILE, errno.EIO, errno.ESTALE], lambda number: number == errno.EIO))
def test_an_error_that_one_rank_meets_while_reading_and_that_passes_costs_nothing(pool, root, number):
    pool.run(2, save_body, root)
    assert pool.run(2, load_body, root, opening_fails, number, 3) == [(2, True)] * 2
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    "trouble",
    [
        pytest.param((opening_fails, errno.EMFILE, 99), marks=pytest.mark.grid),
        ((opening_fails, errno.EIO, 99)),
        pytest.param((opening_fails, errno.ESTALE, 99), marks=pytest.mark.grid),
        ((no_descriptors,)),
    ],
    ids=["EMFILE", "EIO", "ESTALE", "ulimit"],
)
def test_an_error_that_stays_ends_all_ranks_for_another_start_and_condemns_nothing(pool, root, trouble):
    pool.run(2, save_body, root)
    assert pool.run(2, load_body, root, *trouble) == [EXIT_FAILED] * 2
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002"]


def test_checkpoints_that_are_all_damaged_end_all_ranks_as_the_users_to_mend(pool, root):
    pool.run(2, save_body, root)
    for step in (1, 2):
        file = root / f"step-{step:08d}" / "rank-00001.bin"
        file.write_bytes(bytes(file.stat().st_size))
    assert pool.run(2, load_body, root, nullcontext) == [EXIT_USER] * 2
    assert sorted(os.listdir(root)) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize(
    ("number", "times", "code"),
    [
        (errno.EIO, 3, EXIT_DONE),
        (errno.EIO, 99, EXIT_FAILED),
        (errno.EDQUOT, 99, EXIT_USER),
        (errno.EACCES, 99, EXIT_USER),
    ],
)
def test_a_save_that_fails_on_one_rank_ends_all_with_the_code_that_fits(pool, root, number, times, code):
    assert pool.run(2, save_body, root, FailingWrites(number, times)) == [code] * 2
    assert sorted(os.listdir(root)) == ["step-00000001", *(["step-00000002"] if code == EXIT_DONE else [])]


def train_body(rank, world, rendezvous, recipe, run_dirs):
    """Train on, this rank seeing the run in a folder of its own."""
    prepared, config = prepare(recipe), load_config(recipe.model)
    mesh = connect(Topology(dp=world), CPU, rendezvous, rank, timeout_s=15)
    # Observers draw a report, which takes longer than the steps.
    with (
        Watchdog() as watchdog,
        patch.object(train, "open_observers", lambda *words: Observers()),
    ):
        code = train.train_connected(make_plan(recipe, config), prepared, mesh, Lease(run_dirs[rank]), watchdog)
    mesh.close()
    return code


def test_ranks_that_see_two_states_of_the_folder_resume_alike(pool, tmp_path, monkeypatch):
    """NFS shows one rank the checkpoints and the other an empty folder: rank 0 decides."""
    tiny_run.write_corpus(tmp_path / "corpus")
    monkeypatch.chdir(tmp_path)
    words = [
        *tiny_run.RECIPE,
        f"data.sources.files.path={tmp_path}/corpus",
        f"data.root={tmp_path}/data",
        "launch.ranks=2",
    ]
    words += ["batch.sequences_per_step=2", "batch.sequences_per_microbatch=1"]
    start, more = (compose([*words, f"train.steps={steps}"]).require() for steps in (2, 4))
    prepare(start)
    seen, empty = Path(tmp_path, "seen"), Path(tmp_path, "empty")
    seen.mkdir()
    empty.mkdir()
    assert pool.run(2, train_body, start, (seen, seen)) == [EXIT_DONE] * 2
    assert pool.run(2, train_body, more, (seen, empty), timeout_s=40) == [EXIT_DONE] * 2
    assert "step-00000004" in os.listdir(seen / "checkpoints")
