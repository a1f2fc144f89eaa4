"""A hang on GPUs names the rank: hosts run ahead of devices that are held up, and wait only for values of the step before."""

from collections.abc import Callable
from typing import Any

import pytest

from framework.comm.algorithms import Pending
from framework.comm.connect import Mesh
from framework.monitor.hang import TRAINING, Alarm, Answer, find_culprits, write_report
from framework.monitor.progress import Phase, Progress, name_coordinates
from framework.monitor.watchdog import Watchdog
from framework.parallel.zero import gradients
from framework.train.step import train_step
from tests.grid import IN_TURN, few_of
from tests.nccl.gpu import HostHeld, here
from tests.nccl.layouts import LAYOUTS, LR, build_layout
from tests.nccl.simulator import installed, run_ranks
from tests.ranks.parity import topology_of

pytestmark = IN_TURN

ALARM = Alarm(0, TRAINING, Phase.STEP, 1, 125.0, 120.0, "launch.step_deadline_s")
Harm = Callable[[Callable[[], Pending]], Pending]


class Asleep(Exception):
    """Stands for a host that never goes on."""


def skip(start: Callable[[], Pending]) -> Pending:
    """The rank leaves the operation out."""
    return Pending()


def sleep(start: Callable[[], Pending]) -> Pending:
    """Its host hangs."""
    raise Asleep


def hold_device(start: Callable[[], Pending]) -> Pending:
    """A kernel before the operation does not end; the host knows nothing of it."""
    here().hold()
    return start()


def find_answers(
    name: str, rank: int, harm: Harm, unit: str, monkeypatch: pytest.MonkeyPatch
) -> dict[int, Answer | None]:
    """What each rank of a layout says, once its second step hangs: `rank` is harmed where it reduces the unit's gradient."""
    layout, true_start = LAYOUTS[name], gradients.start_reduce_scatter
    topology = topology_of(layout.recipe, layout.config)
    is_harmed = [False]

    def start(out: Any, x: Any, axis: Any, label: str = "", reduce_dtype: Any = None) -> Pending:
        meshes_rank, begin = axis.ranks[axis.rank], lambda: true_start(out, x, axis, label, reduce_dtype)
        if is_harmed[0] and meshes_rank == rank and unit in label:
            return harm(begin)
        return begin()

    def body(mesh: Mesh) -> Answer:
        run, batches = build_layout(layout, mesh)
        train_step(run, batches[0], 0, LR).read()
        is_harmed[0] = True  # after `read`, so after every rank's reductions of the first step
        try:
            for batch in batches[1:] * 2:  # hosts start a step before they read the one before
                sums = train_step(run, batch, 1, LR)
            sums.read()
        except (HostHeld, Asleep):
            here().computing.num_passed = max(here().computing.num_passed, here().computing.held_at or 0)
        if here().computing.held_at is None:
            here().synchronize()
        progress = Progress(communicators={TRAINING: tuple(mesh.axes.values())})
        progress.phases.begin(Phase.STEP, 1)
        return Watchdog(
            progress, place=(mesh.rank, topology.world), coordinates=name_coordinates(topology, mesh.rank)
        )._answer()

    monkeypatch.setattr(gradients, "start_reduce_scatter", start)
    with installed():
        return dict(enumerate(run_ranks(topology, body, runs_ahead=True)))


# Layout, the rank that is harmed, and the units whose reductions it is harmed in.
WHERE = [
    ("dp 2, zero 3", 1, "layers.1"),
    ("dp 3, zero 1", 1, "layers.0"),
    ("tp 2, dp 2, zero 3", 2, "layers.1"),
    ("pp 2, dp 2, zero 3", 3, "layers.2"),
    ("pp 2, dp 2, zero 3", 0, "layers.0"),
]
CASES = [(*where, harm) for where in WHERE for harm in (sleep, hold_device, skip)]
SHOWN = [("dp 2, zero 3", skip), ("dp 3, zero 1", hold_device), ("pp 2, dp 2, zero 3", sleep)]


@pytest.mark.parametrize(
    ("name", "rank", "unit", "harm"), few_of(CASES, lambda name, rank, unit, harm: bool(rank) and (name, harm) in SHOWN)
)
def test_whoever_holds_up_a_reduction_is_named(
    name: str, rank: int, unit: str, harm: Harm, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = find_answers(name, rank, harm, unit, monkeypatch)
    report = write_report(ALARM, answers, {})
    assert find_culprits(answers, ALARM).ranks == (rank,), report
    told = next(line for line in report.splitlines() if line.startswith(f"rank {rank} [") and "over shard (" in line)
    assert {sleep: "has not started", hold_device: "its device has not come to it", skip: "layers"}[harm] in told, told
