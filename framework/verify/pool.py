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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from framework.errors import ConnectionFailed, MeshwrightError

# After one rank has failed the others can only wait for it; those that end by themselves within this time are heard. So are
# ranks that nobody waits for any more.
GRACE_S = 10.0
# A rank that got SIGUSR1 writes its stacks at once, whatever it waits for.
STACKS_S = 0.5
# Errors of gloo, c10d and NCCL on a rank whose connection to another one broke. A timeout is none of them.
LOST = re.compile(
    r"(closed|reset) by peer|Broken pipe|Connection refused|connectFullMesh|DistNetworkError"
    r"|ncclRemoteError|communicator was aborted"
)


class RankFailed(Exception):
    """Failure of ranks that raised, died or hung; the message has each one's story. explanation: the typed error that explains
    why all of them failed, if one does."""

    def __init__(self, message: str, explanation: MeshwrightError | None = None):
        super().__init__(message)
        self.explanation = explanation


@dataclass(frozen=True)
class _Failure:
    """A rank's failure: its traceback, or where it died or hangs; the error itself if it is typed; whether that says that another
    rank has gone. is_alive: the process can run another body."""

    story: str
    mistake: MeshwrightError | None = None
    is_lost: bool = False
    is_alive: bool = True


def _explain(failures: Sequence[_Failure]) -> MeshwrightError | None:
    """The first typed error that is not the loss of a connection, else the first; None where a rank failed in another way."""
    mistakes = [each.mistake for each in failures if each.mistake is not None]
    if any(each.mistake is None and not each.is_lost for each in failures) or not mistakes:
        return None
    return next((mistake for mistake in mistakes if not isinstance(mistake, ConnectionFailed)), mistakes[0])


class Worker(NamedTuple):
    """One process of the pool and this end of its pipe."""

    process: Any
    pipe: Connection


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
        outcomes = self._wait(world, timeout_s)
        failures = {rank: each for rank, each in enumerate(outcomes) if isinstance(each, _Failure)}
        if failures:
            stories = "\n".join(f"--- rank {rank} {each.story}" for rank, each in failures.items())
            message = f"{name} failed on rank(s) {list(failures)} of {world}\n{stories}"
            raise RankFailed(message, _explain(list(failures.values())))
        return outcomes

    def drop(self) -> None:
        """Wait a while for a run that was not collected, if there is one; processes that do not end are replaced."""
        if self._running is not None:
            (world, _), self._running = self._running, None
            self._wait(world, GRACE_S)

    def close(self) -> None:
        """End all processes."""
        self._kill()
        self._folder.cleanup()

    def _wait(self, world: int, timeout_s: float | None) -> list[Any]:
        """The result or the failure of each rank; once one has failed, waits only GRACE_S longer. Ends all processes where one
        died or hangs."""
        outcomes: dict[int, Any] = {}
        waiting: dict[Any, int] = {worker.pipe: rank for rank, worker in enumerate(self._workers[:world])}
        deadline, has_failed = float("inf") if timeout_s is None else time.monotonic() + timeout_s, False
        while waiting and (ready := wait(list(waiting), _seconds_to(deadline))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                outcomes[rank] = _hear(self._workers[rank])
                has_failed |= isinstance(outcomes[rank], _Failure)
            if has_failed:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in waiting.values():
            reason = "still waiting for a rank that failed" if has_failed else f"hung: not ended after {timeout_s} s"
            outcomes[rank] = _Failure(f"{reason}\n{self._stacks(rank)}", is_alive=False)
        if any(isinstance(each, _Failure) and not each.is_alive for each in outcomes.values()):
            self._kill()
        return [outcomes[rank] for rank in range(world)]

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


def _hear(worker: Worker) -> Any:
    """A rank's outcome: a result or a failure, which it sends, or EOF where it died."""
    try:
        return pickle.loads(worker.pipe.recv_bytes())
    except EOFError:
        worker.process.join()
        return _Failure(f"died with exit code {worker.process.exitcode}", is_alive=False)


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
        return pickle.dumps(_Failure(f"raised\n{traceback.format_exc()}", mistake, is_lost))
    finally:
        # A body that raised did not close its mesh. Closing its connections here wakes the ranks that wait for it.
        disconnect()
        # A run's hooks and its model refer to one another, and hold its process groups, of which each keeps threads alive.
        gc.collect()
