"""Several ranks on this machine under torch's elastic agent, and the causes of their deaths.

The agent is the one that `torchrun` runs. It is held here directly rather than through `elastic_launch`, because it knows the
ranks' process ids, so that signals can be forwarded: on a signal of its own it would give the ranks 30 s to save, kill them,
and forget their exit codes.
"""

import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from framework import errors
from framework.comm.connect import INTERFACES, LOOPBACK, SECRET
from framework.errors import EXIT_DONE, EXIT_INTERRUPTED
from framework.monitor.progress import STOPPING, heard_signals, say_from_handler

# Marks of an error that another rank's end has caused: gloo's sockets, NCCL's and c10d's messages, and ours.
LOST_PEER = (
    "gloo/transport",
    "Connection closed by peer",
    "NCCL",
    "DistNetworkError",
    "DistStoreError",
    "ConnectionFailed",
)

HUNG = errors.HungError.__name__
HOST = "127.0.0.1"

# The agent kills ranks that have not ended 30 s after the first failure; a rank that dies of itself is noticed within a second.
LATE_S = 15
# Seconds between two looks for stopped ranks: the agent's SIGTERM, once a rank has ended, does not reach them.
LOOK_EVERY_S = 0.5
_SIGNAL_HINTS = {
    signal.SIGKILL: ": out of memory? `dmesg` knows",
    signal.SIGABRT: ": NCCL ends a rank so when a collective times out, and has then said which one above",
}


@dataclass(frozen=True)
class Outcome:
    """Exit code of the run, and the message for the user if a rank failed."""

    code: int
    message: str = ""


class LoopbackRendezvous(StaticTCPRendezvous):
    """Rendezvous of the only agent, and the store in which its ranks meet: in this process, on a port of the loopback interface
    that the operating system chooses. Torch's own listen on all interfaces, and its c10d rendezvous reads pickles there."""

    def __init__(self) -> None:
        listener = socket.create_server((HOST, 0), backlog=socket.SOMAXCONN)
        super().__init__(HOST, listener.getsockname()[1], rank=0, world_size=1, run_id="ranks", timeout=600)
        handed_over = listener.detach()
        self._server = TCPStore(HOST, self.master_port, None, True, self.timeout, False, master_listen_fd=handed_over)

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(self._server, self.rank, self.world_size, RendezvousStoreInfo(HOST, self.master_port))


@contextmanager
def forward_signals(agent: LocalElasticAgent) -> Iterator[list[int]]:
    """Send signals to this process on to the ranks, whose end this process waits for. Yields the signals of Ctrl-C so far.

    Ctrl-C reaches only the launching process: the agent gives each rank a session of its own. The first asks the ranks to save
    and stop, the second kills them.
    """
    interrupts: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        pids = _find_pids(agent)
        if not pids:
            raise KeyboardInterrupt
        if number == signal.SIGINT:
            interrupts.append(number)
            if len(interrupts) == 1:
                say_from_handler(STOPPING)
        for pid in pids:
            with suppress(ProcessLookupError):
                if len(interrupts) > 1:
                    os.killpg(pid, signal.SIGKILL)
                else:
                    os.kill(pid, signal.SIGTERM)

    former = {number: signal.signal(number, forward) for number in heard_signals()}
    try:
        yield interrupts
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def kill_stopped(agent: LocalElasticAgent) -> Iterator[set[int]]:
    """Have a thread kill ranks that are stopped (state T) once another rank has ended: SIGTERM does not reach them, and the agent
    would wait half a minute for their end. Yields the process ids of the killed."""
    killed: set[int] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(LOOK_EVERY_S):
            states = {pid: read_state(pid) for pid in _find_pids(agent)}
            if all(state not in ("Z", "X", "") for state in states.values()):
                continue
            for pid in (pid for pid, state in states.items() if state == "T"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)

    thread = threading.Thread(target=watch, name="stopped-ranks", daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        is_over.set()
        thread.join()


def _find_pids(agent: LocalElasticAgent) -> list[int]:
    return [worker.id for worker in agent.get_worker_group().workers if worker.id]


def read_state(pid: int) -> str:
    """State of a process by /proc: R runs, S and D sleep, T is stopped, Z has ended and was not waited for; empty where it is
    gone. S where there is no /proc."""
    if not os.path.isdir("/proc/self"):
        return "S"
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]  # the name before it may have spaces and brackets
    except (FileNotFoundError, ProcessLookupError):
        return ""


def run_ranks(
    arguments: tuple[str, ...], num_ranks: int, log: Path, variables: Mapping[str, str] = MappingProxyType({})
) -> Outcome:
    """Run `python *arguments` as ranks 0 .. num_ranks-1, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT set,
    and with `variables`, which this process does not keep.

    Returns when all have ended; when one fails, the agent ends the others. `log` gets one error file per failed rank.
    """
    rendezvous = LoopbackRendezvous()
    # Signals but SIGQUIT are forwarded.
    own = {SECRET: secrets.token_hex(16), "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"}
    own |= {name: LOOPBACK for name in INTERFACES if name not in os.environ}
    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=arguments,
        max_restarts=0,
        local_addr=HOST,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=str(log)))
    quiet, started_with = _silent_agent(), _variables_set({**own, **variables})
    with quiet, started_with, forward_signals(agent) as interrupts, kill_stopped(agent) as killed:
        try:
            result = agent.run()
        except KeyboardInterrupt:
            return Outcome(EXIT_INTERRUPTED)
        except SignalException as death:
            return Outcome(128 + death.sigval, f"the launching process got {death.sigval.name}")
        finally:
            rendezvous.shutdown()
    outcome = judge(result.failures, killed) if result.is_failed() else Outcome(EXIT_DONE)
    was_cut = outcome.code in (128 + signal.SIGTERM, 128 + signal.SIGKILL)
    return Outcome(EXIT_INTERRUPTED) if interrupts and was_cut else outcome


def judge(failures: Mapping[int, ProcessFailure], killed: Collection[int] = ()) -> Outcome:
    """Exit code of the run and the one message that matters, from the failures of its ranks by rank. killed: process ids of
    stopped ranks that this launcher has killed.

    The first rank that failed of itself is the cause. The others fail because it is gone, or are ended by the agent, first by
    SIGTERM and half a minute later by SIGKILL: a death so long after the first failure says that the rank hung, not why.
    """
    first_s = min(failure.timestamp for failure in failures.values())
    rank, cause = min(failures.items(), key=lambda item: (item[1].pid in killed, *_precedence(item[1], first_s)))
    code = cause.exitcode if cause.exitcode > 0 else 128 - cause.exitcode
    said = {other: _say_hung(failure, first_s, killed) for other, failure in sorted(failures.items()) if other != rank}
    _, known = _read_error(cause)  # a verdict on a hung run all ranks end with alike
    others = "".join(f"\n[rank {other}] {text}" for other, text in said.items() if text not in ("", known))
    if cause.exitcode < 0:
        number = signal.Signals(-cause.exitcode)
        hint = _SIGNAL_HINTS.get(number, "")
        return Outcome(code, f"[rank {rank}] process {cause.pid} was killed by {number.name}{hint}{others}")
    return Outcome(code, f"[rank {rank}] {known}{others}" if known else "")


def _precedence(failure: ProcessFailure, first_s: float) -> tuple[int, float]:
    """Sort key, lowest nearest to the cause: a rank's own errors by the time they were recorded, deaths, lost peers and hung
    steps, the agent's SIGTERM and SIGKILL. first_s: time of the first failure."""
    name, text = _read_error(failure)
    if name:
        is_of_others = name == HUNG or any(mark in f"{name}: {text}" for mark in LOST_PEER)
        return (2 if is_of_others else 0), os.stat(failure.error_file).st_mtime_ns
    is_ended = failure.exitcode == -signal.SIGTERM or _is_killed_late(failure, first_s)
    return (3 if is_ended else 1), failure.exitcode


def _say_hung(failure: ProcessFailure, first_s: float, killed: Collection[int]) -> str:
    """A note on a rank that did not end by itself once another had failed; empty for others."""
    if failure.pid in killed:
        return f"process {failure.pid} was stopped (state T), and was killed"
    if _is_killed_late(failure, first_s):
        return f"process {failure.pid} did not end when it was asked to, and was killed: it hung"
    name, text = _read_error(failure)
    return text if name == HUNG else ""


def _is_killed_late(failure: ProcessFailure, first_s: float) -> bool:
    return failure.exitcode == -signal.SIGKILL and failure.timestamp - first_s > LATE_S


def _read_error(failure: ProcessFailure) -> tuple[str, str]:
    """(class of the error that a rank recorded, message of an error that Meshwright explains, or the traceback of any other);
    empty where it recorded none."""
    message: Any = failure.message
    if not isinstance(message, dict):
        return "", ""
    name, _, text = message["message"].partition(": ")
    kind = getattr(errors, name, None)
    is_explained = isinstance(kind, type) and issubclass(kind, errors.MeshwrightError)
    return name, text if is_explained else message["extraInfo"]["py_callstack"].strip()


@contextmanager
def _variables_set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables in this process's environment, which the agent's ranks inherit: there is no other way to give them any."""
    former = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in former.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


@contextmanager
def _silent_agent() -> Iterator[None]:
    """Keep the agent from logging: the outcome has all that it knows."""
    logger, silent = logging.getLogger("torch.distributed.elastic"), logging.NullHandler()
    former = logger.propagate
    logger.addHandler(silent)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(silent)
        logger.propagate = former
