"""A small program that the launcher's tests run as ranks: `python rank_program.py KIND FOLDER`. Its life and its errors are
those of a real rank; only what it does in between is chosen by KIND. Each rank leaves FOLDER/ready-RANK when it is at work.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path

from framework.errors import EXIT_DONE, EXIT_RESUME, DataError, NumericsError
from framework.launch.directory import RunDirectory
from framework.launch.process import end_hung, report_error, run_process
from framework.monitor.progress import FIRST_STEPS, StopRequest
from framework.monitor.watchdog import Watchdog

RANK = int(os.environ["RANK"])


def work(kind: str, folder: Path) -> int:
    with RunDirectory(folder).attend():
        try:
            return globals()[kind](folder)
        except Exception as error:
            return report_error(error)


def get_ready(folder: Path) -> None:
    (folder / f"ready-{RANK}").write_text(str(os.getpid()))


def say_environment(folder: Path) -> int:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    (folder / f"environment-{RANK}").write_text(" ".join(os.environ[name] for name in names))
    return EXIT_DONE


def stop_when_asked(folder: Path) -> int:
    """Rank 1 takes longer to save than rank 0, as ranks do."""
    with StopRequest() as stop:
        get_ready(folder)
        while not stop.requested:
            time.sleep(0.01)
        time.sleep(0.5 * RANK)
        (folder / f"saved-{RANK}").write_text("")
    return EXIT_RESUME


def never_stop(folder: Path) -> int:
    with StopRequest():
        get_ready(folder)
        while True:
            time.sleep(0.01)


def fail_alike(folder: Path) -> int:
    raise NumericsError("loss is not finite")


def fail_on_one_rank(folder: Path) -> int:
    """Rank 1 finds a bad record while rank 0 waits for it in a collective."""
    reduce_forever(folder, at_work=lambda: _raise(DataError("corpus/a.jsonl row 7 is broken")))


def fail_by_our_fault(folder: Path) -> int:
    if RANK == 1:
        {}["no such key"]
    return stop_when_asked(folder)


def die_on_one_rank(folder: Path) -> int:
    reduce_forever(folder, at_work=lambda: os.kill(os.getpid(), signal.SIGKILL))


def hang_until_asked(folder: Path) -> int:
    """Rank 1 does not come to a collective, in which rank 0 waits."""
    reduce_forever(folder, at_work=lambda: _hang(folder))


def hang_until_time_is_up(folder: Path) -> int:
    """The same, with a collective that waits 2 s."""
    reduce_forever(folder, at_work=lambda: _hang(folder), timeout_s=2.0)


def hang_watched(folder: Path) -> int:
    """Rank 1 sleeps in a step, rank 2 is stopped, rank 0 waits for both."""
    reduce_watched(folder, {1: _sleep_in_a_step, 2: _stop_oneself})


def stop_rank_0(folder: Path) -> int:
    """The rank that hosts the store is stopped."""
    reduce_watched(folder, {0: _stop_oneself})


def add_until_asked(folder: Path) -> int:
    """Steps under the watch, with tensors and objects whose values are compared; all ranks stop at one step."""
    import torch

    from framework.comm.collectives import all_reduce
    from framework.comm.connect import connect, launched_place, open_store_beside
    from framework.comm.objects import all_gather_object, broadcast_object
    from framework.mesh.topology import Topology
    from framework.monitor.progress import Phase, Progress
    from framework.recipe.machines import Deadlines

    progress, (rank, world) = Progress(), launched_place()
    deadlines = Deadlines(step=60.0, first_steps=60.0, start=60.0, save=60.0, validate=60.0)
    place = f"dp{rank}"
    watching = Watchdog(progress, deadlines, (rank, world), place, open_store_beside, end_hung, folder)
    with watching, StopRequest() as stop:
        mesh = connect(Topology(dp=world), torch.device("cpu"))
        for step in count(1):
            progress.phases.begin(Phase.STEP, step)
            x = torch.full((2**17,), float(step))
            all_reduce(x, mesh.axis("world"), label="ones")
            assert bool((x == world * step).all()), step
            assert all_gather_object((rank, step), mesh.axis("world")) == [(each, step) for each in range(world)]
            if step == 1:
                get_ready(folder)
            if broadcast_object(lambda: stop.requested, mesh.axis("world")):
                break
        mesh.close()
    return EXIT_RESUME


def reduce_watched(folder, hangs) -> None:
    """Steps under the watch, of which one may take 2 s; after some, ranks do what `hangs` says."""
    import torch

    from framework.comm.collectives import all_reduce
    from framework.comm.connect import connect, launched_place, open_store_beside
    from framework.mesh.topology import Topology
    from framework.monitor.hang import TRAINING
    from framework.monitor.progress import Phase, Progress
    from framework.recipe.machines import Deadlines

    progress, place = Progress(), launched_place()
    deadlines = Deadlines(step=2.0, first_steps=60.0, start=60.0, save=60.0, validate=60.0)
    watching = Watchdog(progress, deadlines, place, f"dp{RANK}", open_store_beside, end_hung, folder)
    with watching as watch, StopRequest() as stop:
        progress.phases.begin(Phase.CONNECT)
        mesh = connect(Topology(dp=place[1]), torch.device("cpu"))
        progress.communicators[TRAINING] = tuple(mesh.axes.values())
        with watch.hear(stop):
            for step in count(1):
                progress.phases.begin(Phase.STEP, step)
                with watch.step(step):
                    if RANK in hangs and step == 40:
                        hangs[RANK](folder)
                    all_reduce(torch.ones(2**19), mesh.axis("world"), label="ones")
                    time.sleep(0.05)  # so that lines are written before the hang


def _sleep_in_a_step(folder: Path) -> None:
    get_ready(folder)
    time.sleep(600)


def _stop_oneself(folder: Path) -> None:
    get_ready(folder)
    os.kill(os.getpid(), signal.SIGSTOP)


def reduce_forever(folder, at_work, timeout_s=1800.0) -> None:
    """A real process group; after some rounds rank 1 does `at_work` instead."""
    import torch

    from framework.comm.collectives import all_reduce
    from framework.comm.connect import connect
    from framework.mesh.topology import Topology
    from framework.torch_private import set_group_timeout

    mesh = connect(Topology(dp=2), torch.device("cpu"))
    # Not `connect`'s: on a busy machine a rank may need longer than that to start.
    set_group_timeout(timedelta(seconds=timeout_s), mesh.axis("world").group)
    with Watchdog(end=end_hung, patience_s=1.0) as watch, StopRequest() as stop, watch.hear(stop):
        for step in count(1):
            with watch.step(step):
                for _ in range(5):
                    all_reduce(torch.ones(4), mesh.axis("world"))
                if RANK == 1 and step > FIRST_STEPS:
                    at_work()
            if RANK == 0:
                get_ready(folder)


def _hang(folder: Path) -> None:
    get_ready(folder)
    while True:
        time.sleep(60)


def _raise(error: Exception) -> None:
    raise error


if __name__ == "__main__":
    run_process(partial(work, sys.argv[1], Path(sys.argv[2])))
