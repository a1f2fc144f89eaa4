"""Workers forked from the process that has collected the tests: `pytest -p tests.workers --workers N`.

What tests import, and their collection, take 15 CPU seconds: here once, where workers that are started (pytest-xdist's) take them
once each, and each compiles what a fresh environment has not compiled yet. A file's tests stay on one worker, for which its
fixtures are made. Files whose tests need ranks begin on half of the workers: each worker that runs one has a pool of them.
"""

import gc
import multiprocessing
import os
import threading
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

RANKS = "pool"  # the fixture
NUMBER_BYTES = 2  # of a file's number in a queue
# What reports to the terminal, or draws there; a worker reports to the process that it was forked from.
TERMINAL = ("terminalreporter", "terminalprogress")


@dataclass
class Worker:
    """A process, this end of its pipe, and the test that it is at: node id and location."""

    process: Any
    pipe: Connection
    at: tuple[str, Any] | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, metavar="N", help="run the tests on N processes, forked from this one")


def pytest_report_header(config: pytest.Config) -> str | None:
    number = config.getoption("--workers")
    return f"{number} workers" if number else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """None: pytest's own loop, which also ends a session whose collection has failed."""
    number = session.config.getoption("--workers")
    if not number or session.config.option.collectonly or session.testsfailed:
        return None
    assert threading.active_count() == 1, f"a fork would lose threads: {threading.enumerate()}"
    session.config._tmp_path_factory.getbasetemp()  # made and cleared away by this process, parted among the workers
    session.config.pluginmanager.getplugin("capturemanager").read_global_capture()
    gc.collect()
    gc.freeze()  # what is shared stays shared: collections in the workers do not look through it
    files = group_by_file(session.items)
    queues = [make_queue(files, has_ranks) for has_ranks in (True, False)]
    workers: list[Worker] = []
    try:
        for index in range(number):
            order = queues if index < (number + 1) // 2 else queues[::-1]
            workers.append(start_worker(session, index, files, order))
        num_run = listen(session, workers)
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.join()
    if num_run < len(session.items):
        session.shouldfail = f"{len(session.items) - num_run} tests were not run: a worker died"
        raise session.Failed(session.shouldfail)
    return True


def group_by_file(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    files: dict[Any, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    return list(files.values())


def make_queue(files: Sequence[Sequence[pytest.Item]], has_ranks: bool) -> int:
    """The reading end of a pipe that holds these files' numbers; workers take them one by one."""
    reading, writing = os.pipe()
    for number, items in enumerate(files):
        if any(RANKS in getattr(item, "fixturenames", ()) for item in items) == has_ranks:
            os.write(writing, number.to_bytes(NUMBER_BYTES, "big"))
    os.close(writing)
    return reading


def start_worker(
    session: pytest.Session, index: int, files: Sequence[Sequence[pytest.Item]], queues: Sequence[int]
) -> Worker:
    pipe, pipe_of_worker = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(
        target=serve, args=(session, index, files, queues, pipe_of_worker)
    )
    process.start()
    pipe_of_worker.close()  # so that the worker's death closes the last other end and reads as EOF here
    return Worker(process, pipe)


def listen(session: pytest.Session, workers: Sequence[Worker]) -> int:
    """Pass on what workers say until all have ended; the number of tests that have begun."""
    hook, num_run = session.config.hook, 0
    waiting = {worker.pipe: worker for worker in workers}
    while waiting:
        for pipe in wait(list(waiting)):
            worker = waiting[pipe]
            try:
                what, values = pipe.recv()
            except EOFError:
                del waiting[pipe]
                report_death(session, worker)
                continue
            if what == "start":
                worker.at, num_run = values, num_run + 1
            elif what == "report":
                hook.pytest_runtest_logreport(
                    report=hook.pytest_report_from_serializable(config=session.config, data=values)
                )
            elif what == "warning":
                hook.pytest_warning_recorded.call_historic(kwargs=values)
            else:
                hook.pytest_runtest_logfinish(nodeid=values[0], location=values[1])
                worker.at = None
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    return num_run


def report_death(session: pytest.Session, worker: Worker) -> None:
    """A failure of the test that a worker has died of; nothing where it has ended."""
    worker.process.join()
    code = worker.process.exitcode
    if code == 0 and worker.at is None:
        return
    name, location = worker.at or (f"worker {worker.process.name}", ("", None, ""))
    story = f"the worker died here with exit code {code}; the other tests of this file were not run"
    report = pytest.TestReport(name, location, {}, "failed", story, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


class Sender:
    """What a worker reports goes to the process that it was forked from."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self.config, self.pipe = config, pipe

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self.pipe.send(("start", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.pipe.send(("report", self.config.hook.pytest_report_to_serializable(config=self.config, report=report)))

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        self.pipe.send(("finish", (nodeid, location)))

    def pytest_warning_recorded(self, warning_message: Any, when: Any, nodeid: str, location: Any) -> None:
        """Its text: what a warning refers to may be anything."""
        category = warning_message.category if warning_message.category.__module__ == "builtins" else UserWarning
        said = warnings.WarningMessage(
            str(warning_message.message), category, warning_message.filename, warning_message.lineno
        )
        self.pipe.send(("warning", {"warning_message": said, "when": when, "nodeid": nodeid, "location": location}))


def serve(
    session: pytest.Session,
    index: int,
    files: Sequence[Sequence[pytest.Item]],
    queues: Sequence[int],
    pipe: Connection,
) -> None:
    """The life of a worker: take files until the queues are empty, then tear down what its session has set up."""
    config = session.config
    for name in TERMINAL:
        if config.pluginmanager.has_plugin(name):
            config.pluginmanager.unregister(name=name)
    config.pluginmanager.register(Sender(config, pipe))
    # Files that catch output, and the folder in which tests' folders are numbered, are a worker's own.
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    config._tmp_path_factory._basetemp /= f"worker-{index}"
    config._tmp_path_factory._basetemp.mkdir(mode=0o700)
    try:
        for queue in queues:
            while number := os.read(queue, NUMBER_BYTES):
                items = files[int.from_bytes(number, "big")]
                # Behind a file's last test nothing but the session's fixtures stays.
                for item, following in zip(items, [*items[1:], session], strict=True):
                    config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        session._setupstate.teardown_exact(None)
    finally:
        capture.stop_global_capturing()  # what is raised from here on is seen
