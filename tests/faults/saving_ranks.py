"""A training of two small tensors on two ranks that saves after every second step as runs do, in a thread behind the next steps.

What it computes is known: `state_at`. So tests kill a rank anywhere and see what a resume makes of it.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass

import torch

from framework.checkpoint.commit import Retention
from framework.checkpoint.load import load_newest
from framework.checkpoint.save import CPU, Saver
from framework.checkpoint.staging import Entry, StagingMemory
from framework.comm.collectives import all_reduce
from framework.comm.connect import connect, connect_beside
from framework.mesh.layout import Layout
from framework.mesh.topology import Topology

NUMEL, STEPS, EVERY, WORLD = 6_000, 8, 2, 2
SEGMENT_BYTES = 4 << 10
# How long a rank waits before it dies for what the other does meanwhile.
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Death:
    """Where a rank kills itself: in the save of `step`, at `point`, as soon as training has come to `when`.

    when: `at once`; `next step`: the next update is done, or waits for the save; `next due`: the next save waits for this one.
    """

    rank: int
    point: str
    when: str
    step: int = 4


class Progress:
    """How far training has come, for the thread that saves."""

    def __init__(self):
        self._places, self._changed = set(), threading.Condition()

    def come(self, step, what):
        with self._changed:
            self._places.add((step, what))
            self._changed.notify_all()

    def wait_for(self, step, what):
        with self._changed:
            assert self._changed.wait_for(lambda: (step, what) in self._places, PATIENCE_S), self._places
        time.sleep(0.02)  # for a call that comes right after


def update(weight, moment, step):
    """In place, and element by element: halves are updated as the whole is."""
    moment.mul_(0.9).add_(torch.cos(weight + step))
    weight.add_(moment, alpha=-0.1)


def state_at(step):
    """[NUMEL] weight and moment after so many steps, by nobody but this function."""
    weight, moment = torch.linspace(-1, 1, NUMEL), torch.zeros(NUMEL)
    for number in range(step):
        update(weight, moment, number)
    return weight, moment


def halves_at(rank, step):
    bounds = slice(rank * NUMEL // WORLD, (rank + 1) * NUMEL // WORLD)
    return [tensor[bounds].clone() for tensor in state_at(step)]


def entries(rank, tensors):
    layout = Layout((NUMEL,), interval=(rank * NUMEL // WORLD, (rank + 1) * NUMEL // WORLD))
    return [Entry(f"{kind}/w", layout, tensor) for kind, tensor in zip(("weight", "exp_avg"), tensors, strict=True)]


def train(rank, rendezvous, root, death=None, is_whole=True):
    """Until the end, or until this rank or the other dies: the step that it began with, and whether all is as it should be."""
    progress, saves = Progress(), []

    def fault(point):
        saves.extend([point] * (point == "planned"))
        here = (rank, point, began + EVERY * len(saves))
        if death is None or here != (death.rank, death.point, death.step):
            return
        if death.when == "next step":
            progress.wait_for(death.step, "update")
        elif death.when == "next due":
            progress.wait_for(death.step + EVERY, "due")
        os.kill(os.getpid(), signal.SIGKILL)

    mesh = connect(Topology(dp=WORLD), CPU, f"file://{rendezvous}", rank, timeout_s=30)
    world = mesh.axis("world")
    tensors = halves_at(rank, 0)
    state = load_newest(root, entries(rank, tensors), world)
    began = step = state["step"] if state else 0
    is_right = all(map(torch.equal, tensors, halves_at(rank, began)))
    memory = StagingMemory(CPU, 1 << 20 if is_whole else 0, segment_bytes=SEGMENT_BYTES)
    saver = Saver(root, connect_beside(mesh, "saves"), Retention(1), memory, fault=fault)
    while step < STEPS:
        all_reduce(torch.ones(1), world)  # a forward and a backward
        progress.come(step, "update")
        saver.wait_until_staged()
        update(*tensors, step)
        progress.come(step, "updated")
        step += 1
        if step % EVERY == 0:
            progress.come(step, "due")
            saver.start(step, entries(rank, tensors), {"step": step})
    saver.finish()
    mesh.close()
    return began, is_right and all(map(torch.equal, tensors, halves_at(rank, STEPS)))
