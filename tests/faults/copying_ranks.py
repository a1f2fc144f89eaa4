"""Ranks of several nodes that train what `saving_ranks` trains, hold every second step in the nodes' memory and save every sixth.

A node is a name and a folder: its ranks share it, and it stays when they die. Removing it is a power loss.
"""

import multiprocessing
import os
import shutil
import signal
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from framework.checkpoint.commit import Retention
from framework.checkpoint.held import HeldSteps, begin_generation
from framework.checkpoint.load import load_newest
from framework.checkpoint.neighbors import COPY_POINTS, CopyKeeper, meet_neighbours
from framework.checkpoint.node_memory import memory_of, run_memory
from framework.checkpoint.save import CPU, Goal, Saver
from framework.checkpoint.staging import Entry, StagingMemory
from framework.comm.collectives import all_reduce
from framework.comm.connect import connect, connect_beside
from framework.comm.objects import broadcast_object
from framework.lease import Lease
from framework.mesh.layout import Layout
from framework.mesh.topology import Topology
from tests.faults.saving_ranks import NUMEL, SEGMENT_BYTES, state_at, update

HELD_EVERY, SAVED_EVERY, STEPS = 2, 6, 12


@dataclass(frozen=True)
class Ranks:
    """A start of the run: the node of each rank, how many copies, the last step, and where a rank dies: (rank, point, step)."""

    nodes: tuple[str, ...] = ("a", "b")
    copies: int = 1
    stop: int = STEPS
    death: tuple[int, str, int] | None = None
    ends: bool = False  # whether the run ends in order
    is_whole: bool = True  # whether there is memory to stage a step at once
    patches: dict = field(default_factory=dict)  # {(module, name): replacement} on every rank


def entries(rank, world, tensors):
    layout = Layout((NUMEL,), interval=(rank * NUMEL // world, (rank + 1) * NUMEL // world))
    return [Entry(f"{kind}/w", layout, tensor) for kind, tensor in zip(("weight", "exp_avg"), tensors, strict=True)]


def part_at(rank, world, step):
    return [x[rank * NUMEL // world : (rank + 1) * NUMEL // world].clone() for x in state_at(step)]


def restore(copies, run_dir, own):
    """The step that a start goes on from, the held one if it was that, and the name of the new generation."""
    start = copies.find_start(run_dir, run_dir / "checkpoints")
    state, held = (copies.load(start.held, own), start.held.name) if start.held else (None, None)
    if state is None:
        held, state = None, load_newest(run_dir / "checkpoints", own, copies.world, start.found)
    step = state["step"] if state else 0
    generation = broadcast_object(partial(begin_generation, Lease(run_dir), step), copies.world)
    copies.clear(held)
    return step, held, generation


def goal_at(step):
    memory = Goal.MEMORY if step % HELD_EVERY == 0 else Goal(0)
    return memory | (Goal.DISK if step % SAVED_EVERY == 0 else Goal(0))


def open_saver(mesh, run_dir, copies, generation, fault, is_whole):
    beside = connect_beside(mesh, "saves")
    keeper = CopyKeeper(copies.memory, copies.neighbours, generation, beside, fault)
    memory = StagingMemory(CPU, 1 << 20 if is_whole else 0, segment_bytes=SEGMENT_BYTES)
    return Saver(run_dir / "checkpoints", beside, Retention(2), memory, hold=keeper.hold)


def train(rank, ranks, rendezvous, place):
    """Until `stop`, or until a rank dies: the step that it began with, whether nodes held that, and whether all is right."""
    size, node, run_dir, begun = len(ranks.nodes), ranks.nodes[rank], place / "run", []

    def fault(point):
        begun.extend([point] * (point == COPY_POINTS[0]))
        if ranks.death == (rank, point, began + HELD_EVERY * len(begun)):
            os.kill(os.getpid(), signal.SIGKILL)

    mesh = connect(Topology(dp=size), CPU, f"file://{rendezvous}", rank, timeout_s=30)
    world = mesh.axis("world")
    copies = HeldSteps(memory_of(run_dir, node, place / "shm"), meet_neighbours(node, ranks.copies, world), world)
    tensors = part_at(rank, size, 0)
    began, held, generation = restore(copies, run_dir, entries(rank, size, tensors))
    is_right = all(map(torch.equal, tensors, part_at(rank, size, began)))
    saver = open_saver(mesh, run_dir, copies, generation, fault, ranks.is_whole)
    for step in range(began, ranks.stop):
        all_reduce(torch.ones(1), world)  # a forward and a backward
        saver.wait_until_staged()
        update(*tensors, step)
        if goal_at(step + 1):
            saver.start(step + 1, entries(rank, size, tensors), {"step": step + 1}, goal=goal_at(step + 1))
    saver.finish()
    if ranks.ends:
        copies.leave()
    mesh.close()
    return began, held is not None, is_right and all(map(torch.equal, tensors, part_at(rank, size, ranks.stop)))


def run(place, ranks):
    """All ranks, each a process of its own: exit codes, and what those have returned that came to the end."""
    context = multiprocessing.get_context("fork")
    found, rendezvous = context.Queue(), place / f"rendezvous-{len(os.listdir(place))}"
    for name in ("run", "shm"):
        (place / name).mkdir(exist_ok=True)

    def body(rank):
        with pytest.MonkeyPatch.context() as patch:
            for (owner, name), replacement in ranks.patches.items():
                patch.setattr(owner, name, replacement)
            found.put(train(rank, ranks, rendezvous, place))
        found.close()
        found.join_thread()
        os._exit(0)  # as ranks end: past Python's teardown, which waits for the thread that saves

    processes = [context.Process(target=body, args=(rank,)) for rank in range(len(ranks.nodes))]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        process.kill()
    codes = [process.exitcode for process in processes]
    return codes, [found.get(timeout=5) for code in codes if code == 0]


def held_on(place, node):
    """The folders of whole steps in a node's memory."""
    memory = memory_of(place / "run", node, place / "shm")
    return [memory.folder(name) for name in sorted(memory.list())]


def copy_place(source, place):
    """The run's folder and its nodes, which know it by its path, in another place."""
    shutil.copytree(source / "run", place / "run")
    memory = run_memory(place / "run", place / "shm")
    memory.parent.mkdir(mode=0o700, parents=True)
    shutil.copytree(run_memory(source / "run", source / "shm"), memory)


def cut_power(place, *nodes):
    for node in nodes:
        shutil.rmtree(memory_of(place / "run", node, place / "shm").path)


def spoil_disk(run_dir):
    """Every byte of every checkpoint: who opens one finds damage."""
    for path in (run_dir / "checkpoints").rglob("*.*"):
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
