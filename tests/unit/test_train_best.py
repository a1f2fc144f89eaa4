"""Which validation is the best of a run, also where its save fails."""

import math

import pytest
import torch

from framework.checkpoint.commit import Retention, list_checkpoints, step_of
from framework.checkpoint.save import Goal, Saver
from framework.checkpoint.staging import Entry
from framework.comm.communicator import Communicator
from framework.errors import CheckpointError
from framework.mesh.layout import Layout
from framework.mesh.topology import Axis
from framework.recipe.schema import Checkpoint
from framework.train.loop import SavePolicy, is_best
from framework.train.state import RunState


@pytest.mark.parametrize(
    ("loss", "former", "best"),
    [
        (2.0, None, True),
        (2.0, 3.0, True),
        (3.0, 3.0, False),
        (math.nan, None, False),
        (math.nan, 3.0, False),
        (math.inf, None, False),
        (2.0, math.nan, True),
    ],
)
def test_the_best_validation_is_the_lowest_finite_one(loss, former, best):
    assert is_best(loss, former) is best


def test_after_a_failed_save_of_the_best_the_former_is_the_best_again(tmp_path):
    """Behind training: how a save has ended is known when the next one begins. keep=1, so the best is kept by `best_step`."""
    root, alone, writes = tmp_path / "checkpoints", Communicator(Axis("world", 1, 0)), iter([False, True, False, False])

    def fault(point):
        if point == "begun" and next(writes):
            raise CheckpointError("EIO")

    saver = Saver(root, alone, Retention(1), max_failures=3, fault=fault)
    policy, state = SavePolicy(Checkpoint(keep_best=True), 100, saver), RunState("r", "")
    left = {}
    for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, 2.2)):
        state.step = step
        policy.note_best(state, loss, {}, alone)
        assert policy._is_best is (step != 30), "2.5 is no better than what is being saved"
        policy.settle_best(state)
        saver.start(step, [Entry("weight/w", Layout((2,)), torch.zeros(2))], state.to_json())
        policy.end_save(step, Goal.DISK)
        if step != 20:
            saver.settle()
        left[step] = state.best_step, sorted(map(step_of, list_checkpoints(root)))
    assert left[30] == (10, [10, 30])
    assert left[40] == (40, [40])
    saver.finish()
