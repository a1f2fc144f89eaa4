"""RankPool: processes that live for the whole test session and run body after body as ranks of a small world.

A body is a top-level function `body(rank, world, rendezvous, *args)`; it connects its own mesh through the fresh file
rendezvous and returns something picklable. Starting a body costs milliseconds.

Ranks 1, 2, 3 are forked from a process that has imported torch and transformers (`tests/ranks/preload.py`): four that import
them by themselves take 15 CPU seconds, once for each session and once more behind each test in which a rank dies. Rank 0 is a
process of its own: forked ones have one hash seed, and with it one order of their sets, so what depends on that order would
never differ between ranks.
"""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# After one rank has failed the others can only wait for it; those that end by themselves within this time are heard.
GRACE_S = 10.0
# A rank that got SIGUSR1 writes its stacks at once, whatever it waits for.
STACKS_S = 0.5


class RankFailure(AssertionError):
    """Some ranks raised, died or hung; the message has each one's story."""


@dataclass
class Worker:
    """One process of the pool and this end of its pipe."""

    process: Any
    pipe: Connection


class RankPool:
    """At most `size` ranks. After a death or a hang all processes are replaced, so that the next body finds a sound
    pool."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-ranks-")
        self._num_runs = 0
        self._workers: list[Worker] = []

    def run(self, world: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """Run `body(rank, world, rendezvous, *args)` on ranks 0..world-1; their results in that order.

        Raises RankFailure when any rank raises, dies, or has not ended after timeout_s.
        """
        assert 1 <= world <= self.size, f"{world} ranks asked of a pool of {self.size}"
        if not self._workers:
            self._start_workers()
        self._num_runs += 1
        rendezvous = f"file://{self._folder.name}/rendezvous-{self._num_runs}"
        for rank, worker in enumerate(self._workers[:world]):
            worker.pipe.send_bytes(pickle.dumps((body, (rank, world, rendezvous, *args))))
        return self._collect(world, body.__name__, timeout_s)

    def close(self) -> None:
        """End all processes."""
        self._kill()
        self._folder.cleanup()

    def _collect(self, world: int, name: str, timeout_s: float) -> list[Any]:
        """Wait for all ranks; once one has failed, only GRACE_S longer."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = {worker.pipe: rank for rank, worker in enumerate(self._workers[:world])}
        deadline = time.monotonic() + timeout_s
        sound = True
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    ended_well, outcome = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    process = self._workers[rank].process
                    process.join()
                    sound, ended_well, outcome = False, False, f"died with exit code {process.exitcode}"
                (results if ended_well else failures)[rank] = outcome
            if failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting:
            sound = False
            reason = "still waiting for a rank that failed" if failures else f"hung: not ended after {timeout_s} s"
            failures |= {rank: f"{reason}\n{self._stacks(rank)}" for rank in waiting.values()}
        if not sound:
            self._kill()
        if failures:
            stories = "\n".join(f"--- rank {rank} {failures[rank]}" for rank in sorted(failures))
            raise RankFailure(f"{name} failed on rank(s) {sorted(failures)} of {world}\n{stories}")
        return [results[rank] for rank in range(world)]

    def _start_workers(self) -> None:
        """Start all processes side by side and wait until they are ready: no body's time goes into imports."""
        self._workers = [self._start_worker(index) for index in range(self.size)]
        for worker in self._workers:
            worker.pipe.recv_bytes()

    def _start_worker(self, index: int) -> Worker:
        context = multiprocessing.get_context("forkserver" if index else "spawn")
        context.set_forkserver_preload(["tests.ranks.preload"])
        pipe, pipe_of_worker = context.Pipe()
        process = context.Process(target=_serve, args=(pipe_of_worker, self._stack_file(index)), daemon=True)
        process.start()
        pipe_of_worker.close()  # so that the worker's death closes the last other end and reads as EOF here
        return Worker(process, pipe)

    def _stack_file(self, index: int) -> Path:
        return Path(self._folder.name) / f"stacks-{index}.txt"

    def _stacks(self, rank: int) -> str:
        """Where each thread of a hung rank is."""
        os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(STACKS_S)
        return self._stack_file(rank).read_text()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._workers = []


def _serve(pipe: Connection, stack_file: Path) -> None:
    """The life of a worker: run bodies until the session closes the pipe."""
    import tests.ranks.preload  # noqa: F401  what is forked has it already

    with stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        pipe.send_bytes(b"ready")
        while True:
            try:
                task = pipe.recv_bytes()
            except EOFError:
                return
            pipe.send_bytes(_attempt(task))


def _attempt(task: bytes) -> bytes:
    """Run one body: pickled (True, result) or (False, what was raised)."""
    import torch.distributed as dist

    try:
        body, args = pickle.loads(task)
        return pickle.dumps((True, body(*args)))
    except Exception:
        return pickle.dumps((False, f"raised\n{traceback.format_exc()}"))
    finally:
        # A body that raised did not close its mesh. Closing its connections here wakes the ranks that wait for it.
        if dist.is_initialized():
            dist.destroy_process_group()
        # A run's hooks and its model refer to one another, and hold its process groups, of which each keeps threads alive.
        gc.collect()
