"""RankPool: processes of this machine that run body after body as ranks of a small world.

A body is a top-level function `body(rank, world, rendezvous, *args)`; it connects its own mesh through the fresh file
rendezvous and returns something picklable. Starting a body costs milliseconds.

Processes are forked from one that has imported a module (`preload`) for all of them: four that import torch and transformers by
themselves take 15 CPU seconds, once for each pool and once more behind each body in which a rank dies. Forked ones have one
hash seed, and with it one order of their sets, so what depends on that order would never differ between ranks: the first
`spawned` ranks are processes of their own.
"""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

from framework.errors import ConnectionFailed, MeshwrightError

# After one rank has failed the others can only wait for it; those that end by themselves within this time are heard. So are
# ranks that nobody waits for any more.
GRACE_S = 10.0
# A rank that got SIGUSR1 writes its stacks at once, whatever it waits for.
STACKS_S = 0.5
# What a rank raises whose connection to another one broke, by gloo, c10d and NCCL. A timeout is none of it.
LOST = re.compile(
    r"(closed|reset) by peer|Broken pipe|Connection refused|connectFullMesh|DistNetworkError"
    r"|ncclRemoteError|communicator was aborted"
)


class RankFailed(Exception):
    """Failure of ranks that raised, died or hung; the message has each one's story.

    mistakes: by rank, what they raised that is typed. unexplained: ranks that failed in another way, and not because the
    connection to a rank broke.
    """

    def __init__(
        self,
        message: str,
        mistakes: Mapping[int, MeshwrightError] = MappingProxyType({}),
        unexplained: Sequence[int] = (),
    ):
        super().__init__(message)
        self.mistakes, self.unexplained = mistakes, tuple(unexplained)

    @property
    def explanation(self) -> MeshwrightError | None:
        """The typed error that explains why all of them failed, if one does: of the lowest rank that did not just lose others."""
        if self.unexplained or not self.mistakes:
            return None
        by_rank = [self.mistakes[rank] for rank in sorted(self.mistakes)]
        return next((mistake for mistake in by_rank if not isinstance(mistake, ConnectionFailed)), by_rank[0])


@dataclass
class Worker:
    """One process of the pool and this end of its pipe."""

    process: Any
    pipe: Connection


@dataclass
class _Outcomes:
    """The results of a body by rank, and the stories of ranks that failed; among them those that lost their connection."""

    results: dict[int, Any] = field(default_factory=dict)
    stories: dict[int, str] = field(default_factory=dict)
    mistakes: dict[int, MeshwrightError] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    is_sound: bool = True


class RankPool:
    """At most `size` ranks. After a death or a hang all processes are replaced, so that the next body finds a sound
    pool."""

    def __init__(self, size: int, preload: str, spawned: int = 0) -> None:
        self.size = size
        self._preload, self._spawned = preload, spawned
        self._folder = tempfile.TemporaryDirectory(prefix="meshwright-ranks-")
        self._num_runs = 0
        self._workers: list[Worker] = []
        self._running: tuple[int, str] | None = None

    def run(self, world: int, body: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """Run `body(rank, world, rendezvous, *args)` on ranks 0..world-1; their results in that order.

        Raises RankFailed when any rank raises, dies, or has not ended after timeout_s.
        """
        self.start(world, body, *args)
        return self.collect(timeout_s)

    def start(self, world: int, body: Callable[..., Any], *args: Any) -> None:
        """Begin a run, and return at once; `collect` waits for it. Raises RankFailed where a process dies before the body."""
        assert 1 <= world <= self.size, f"{world} ranks asked of a pool of {self.size}"
        assert self._running is None, f"{self._running} is not collected"
        if not self._workers:
            self._start_workers()
        self._num_runs += 1
        self._running = world, body.__name__
        rendezvous = f"file://{self._folder.name}/rendezvous-{self._num_runs}"
        for rank, worker in enumerate(self._workers[:world]):
            worker.pipe.send_bytes(pickle.dumps((body, (rank, world, rendezvous, *args))))

    def collect(self, timeout_s: float | None) -> list[Any]:
        """The results of the run that was started. timeout_s None: however long it takes. Raises as `run` does."""
        assert self._running is not None, "nothing was started"
        (world, name), self._running = self._running, None
        found = self._wait(world, timeout_s)
        if not found.is_sound:
            self._kill()
        if found.stories:
            stories = "\n".join(f"--- rank {rank} {found.stories[rank]}" for rank in sorted(found.stories))
            unexplained = sorted(found.stories.keys() - found.mistakes.keys() - found.lost)
            message = f"{name} failed on rank(s) {sorted(found.stories)} of {world}\n{stories}"
            raise RankFailed(message, found.mistakes, unexplained)
        return [found.results[rank] for rank in range(world)]

    def drop(self) -> None:
        """Wait a while for a run that was not collected, if there is one; processes that do not end are replaced."""
        if self._running is not None:
            (world, _), self._running = self._running, None
            if not self._wait(world, GRACE_S).is_sound:
                self._kill()

    def close(self) -> None:
        """End all processes."""
        self._kill()
        self._folder.cleanup()

    def _wait(self, world: int, timeout_s: float | None) -> _Outcomes:
        """Wait for all ranks; once one has failed, only GRACE_S longer."""
        found = _Outcomes()
        waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(self._workers[:world])}
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while waiting and (ready := wait(list(waiting), _seconds_to(deadline))):
            for pipe in ready:
                self._hear(waiting.pop(pipe), found)
            if found.stories:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if waiting:
            found.is_sound = False
            reason = "still waiting for a rank that failed" if found.stories else f"hung: not ended after {timeout_s} s"
            found.stories |= {rank: f"{reason}\n{self._stacks(rank)}" for rank in waiting.values()}
        return found

    def _hear(self, rank: int, found: _Outcomes) -> None:
        """Receive a rank's outcome: a result, an exception, or EOF where it died."""
        worker = self._workers[rank]
        try:
            outcome = pickle.loads(worker.pipe.recv_bytes())
        except EOFError:
            worker.process.join()
            found.is_sound, outcome = False, _Raised(f"died with exit code {worker.process.exitcode}", None)
        if not isinstance(outcome, _Raised):
            found.results[rank] = outcome
            return
        found.stories[rank] = outcome.story
        if outcome.mistake is not None:
            found.mistakes[rank] = outcome.mistake
        if outcome.is_lost:
            found.lost.add(rank)

    def _start_workers(self) -> None:
        """Start all processes side by side and wait until they are ready: no body's time goes into imports."""
        try:
            for index in range(self.size):
                self._start_worker(index)
            for worker in self._workers:
                worker.pipe.recv_bytes()
        except (EOFError, ConnectionError) as error:  # of a worker, or of the fork server
            self._kill()
            raise RankFailed(
                f"a rank died while it was starting: it may have said why above; it imports {self._preload} first"
            ) from error

    def _start_worker(self, index: int) -> None:
        context: Any = multiprocessing.get_context("spawn" if index < self._spawned else "forkserver")
        context.set_forkserver_preload([self._preload])
        pipe, pipe_of_worker = context.Pipe()
        process = context.Process(
            target=_serve, args=(pipe_of_worker, self._stack_file(index), self._preload), daemon=True
        )
        process.start()
        pipe_of_worker.close()  # so that the worker's death closes the last other end and reads as EOF here
        self._workers.append(Worker(process, pipe))

    def _stack_file(self, index: int) -> Path:
        return Path(self._folder.name) / f"stacks-{index}.txt"

    def _stacks(self, rank: int) -> str:
        """Stacks of the threads of a hung rank."""
        os.kill(self._workers[rank].process.pid, signal.SIGUSR1)
        time.sleep(STACKS_S)
        return self._stack_file(rank).read_text()

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.process.join()
            worker.pipe.close()
        self._workers = []


@dataclass(frozen=True)
class _Raised:
    """An exception of a body: its traceback, the error itself if it is typed, and whether it says that another rank has gone."""

    story: str
    mistake: MeshwrightError | None
    is_lost: bool = False


def _seconds_to(deadline: float) -> float | None:
    return None if deadline == float("inf") else max(0.0, deadline - time.monotonic())


def _serve(pipe: Connection, stack_file: Path, preload: str) -> None:
    """Body of a worker process: run bodies until its parent closes the pipe."""
    threading.Thread(target=_end_with_parent, args=(stack_file.parent,), daemon=True).start()
    importlib.import_module(preload)  # what is forked has it already
    with stack_file.open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        pipe.send_bytes(b"ready")
        while True:
            try:
                task = pipe.recv_bytes()
            except EOFError:
                return
            pipe.send_bytes(_attempt(task))


def _end_with_parent(folder: Path) -> None:
    """End this process, also in the midst of a body, once the process that made the pool has gone; remove its folder.

    A process that is killed closes no pool. The fork server, whose children most workers are, ends behind the last of them.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker is started by multiprocessing"
    parent.join()
    shutil.rmtree(folder, ignore_errors=True)  # the other workers clear it away, too
    os._exit(1)


def _attempt(task: bytes) -> bytes:
    """Run one body; its result or exception, pickled."""
    from framework.comm.connect import disconnect  # behind the preload, which may have to act before torch is imported

    try:
        body, args = pickle.loads(task)
        return pickle.dumps(body(*args))
    except Exception as error:
        mistake = error if isinstance(error, MeshwrightError) else None
        is_lost = LOST.search(f"{type(error).__name__}: {error}") is not None
        return pickle.dumps(_Raised(f"raised\n{traceback.format_exc()}", mistake, is_lost))
    finally:
        # A body that raised did not close its mesh. Closing its connections here wakes the ranks that wait for it.
        disconnect()
        # A run's hooks and its model refer to one another, and hold its process groups, of which each keeps threads alive.
        gc.collect()
