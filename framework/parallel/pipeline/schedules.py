"""Schedules: pure functions from (ranks, microbatches, virtual stages) to each rank's list of actions.

P ranks, V stages on each, S = P V stages, M microbatches. Where stages lie:

    loop (interleaved)   stage s on rank s mod P
    V (zbv, dualpipe_v)  stage s on rank s, then back: stage P is on the last rank, stage 2P-1 on the first

Microbatches of a stage go backward in their own order in all schedules, so gradients are summed in one order in all.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil

from framework.errors import ScheduleError
from framework.parallel.pipeline.actions import Action, B, F, I, Kind, Schedule, W


class Writer:
    """One rank's list while it is written: each stage and kind counts its microbatches by itself."""

    def __init__(self, stages: tuple[int, ...], num_microbatches: int):
        self.actions: list[Action] = []
        self.stages, self._num_microbatches = stages, num_microbatches
        self._next = {(stage, kind): 0 for stage in stages for kind in (F, I, W)}

    def write(self, chunk: int, *kinds: Kind) -> None:
        """The next microbatch of the rank's `chunk`-th stage, in each kind. B is the next I and the next W in one."""
        stage = self.stages[chunk]
        for kind in kinds:
            microbatch = self._next[stage, I if kind is B else kind]
            for each in (I, W) if kind is B else (kind,):
                self._next[stage, each] += 1
            if microbatch < self._num_microbatches:
                self.actions.append(Action(stage, kind, microbatch))

    def done(self, chunk: int, kind: Kind) -> int:
        """How many microbatches of that kind have been written."""
        return self._next[self.stages[chunk], kind]


def gpipe(rank: int, num_ranks: int, num_microbatches: int, writer: Writer) -> None:
    """GPipe (Huang et al. 2019): all forwards, then all backwards. All M microbatches are live at once."""
    for kind in (F, B):
        for _ in range(num_microbatches):
            writer.write(0, kind)


def one_forward_one_backward(rank: int, num_ranks: int, num_microbatches: int, writer: Writer) -> None:
    """1F1B (Narayanan et al. 2021, section 2.2.1): P - 1 - rank forwards ahead, then one forward, one backward.

    At most P - rank microbatches are live. With one rank it is F0 B0 F1 B1 ...: gradient accumulation.
    """
    ahead = min(num_ranks - 1 - rank, num_microbatches)
    for _ in range(ahead):
        writer.write(0, F)
    for _ in range(num_microbatches - ahead):
        writer.write(0, F, B)
    for _ in range(ahead):
        writer.write(0, B)


def interleaved(rank: int, num_ranks: int, num_microbatches: int, writer: Writer) -> None:
    """Interleaved 1F1B (Narayanan et al. 2021, section 2.2.2): microbatches go through a rank's stages in groups of P.

    Where P does not divide M, the groups are as equal as they can be and no smaller than P, or all of M where it is less.
    """
    num_virtual = len(writer.stages)
    sizes = group_sizes(num_ranks, num_microbatches)
    forwards = [chunk for size in sizes for chunk in range(num_virtual) for _ in range(size)]
    backwards = [chunk for size in sizes for chunk in reversed(range(num_virtual)) for _ in range(size)]
    ahead = min((num_virtual - 1) * sizes[0] + 2 * (num_ranks - 1 - rank), len(forwards))
    for chunk in forwards[:ahead]:
        writer.write(chunk, F)
    for number, chunk in enumerate(backwards):
        if ahead + number < len(forwards):
            writer.write(forwards[ahead + number], F)
        writer.write(chunk, B)


def group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """M in groups of at least P, larger ones first."""
    num_groups = max(num_microbatches // num_ranks, 1)
    return [ceil((num_microbatches - group) / num_groups) for group in range(num_groups)]


def zb_h1(rank: int, num_ranks: int, num_microbatches: int, writer: Writer) -> None:
    """ZB-H1 (Qi et al. 2023, section 3.1): 1F1B whose weight gradients wait until they fill the bubble at the end.

    Rank r is r weight gradients late, so its live microbatches are P, as on the first rank of 1F1B.
    """
    ahead = min(num_ranks - 1 - rank, num_microbatches)
    for _ in range(ahead):
        writer.write(0, F)
    for number in range(num_microbatches):
        if ahead + number < num_microbatches:
            writer.write(0, F)
        writer.write(0, I)
        # Beyond the last forward the next input gradient is one weight gradient's time away on every rank but the last.
        if number >= rank or ahead + number >= num_microbatches:
            writer.write(0, W)
    for _ in range(num_microbatches - writer.done(0, W)):
        writer.write(0, W)


def zbv(rank: int, num_ranks: int, num_microbatches: int, writer: Writer) -> None:
    """ZB-V (Qi et al. 2023, section 6): two stages a rank, in a V; with equal costs of F, I and W every rank computes
    without a pause between its first action and its last. At most P microbatches are live on each rank.

    Written for 2P - 1 microbatches or more; of fewer, the actions of the missing ones are left out.
    """
    num_written = max(num_microbatches, 2 * num_ranks - 1)
    for _ in range(2 * (num_ranks - rank) - 1):
        writer.write(0, F)
    for _ in range(rank):
        writer.write(1, F)
        writer.write(0, F)
    for _ in range(num_ranks - rank):
        writer.write(1, F, I, W)
    while writer.done(1, F) < num_written:
        if writer.done(0, F) < num_written:
            writer.write(0, F)
        writer.write(0, I, W)
        writer.write(1, F, I, W)
    for _ in range(rank):
        writer.write(0, I)
        writer.write(1, I)
    for _ in range(num_ranks - rank):
        writer.write(0, I, W)
    for chunk in (1, 0):
        while writer.done(chunk, W) < num_written:
            writer.write(chunk, W)


def dualpipe_v(rank: int, num_ranks: int, num_microbatches: int, writer: Writer) -> None:
    """DualPipeV (DeepSeek 2025): DualPipe folded into a V, so that no parameter is held twice. Forwards of one stage are
    neighbours of backwards of the other, for their messages to be hidden. Needs 2P microbatches.
    """
    behind = num_ranks - 1 - rank
    for _ in range(2 * behind):
        writer.write(0, F)
    for _ in range(rank + 1):
        writer.write(0, F)
        writer.write(1, F)
    for _ in range(behind):
        writer.write(1, I, W, F)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        writer.write(0, F)
        writer.write(1, B, F)
        writer.write(0, B)
    for _ in range(behind):
        writer.write(1, B, F)
        writer.write(0, B)
    # From the middle on weight gradients wait, to fill what is left of the bubble.
    waiting: list[int] = []
    for number in range(2 * (rank + 1)):
        chunk = 1 - number % 2
        if number < rank + 1:
            writer.write(chunk, B)
        else:
            writer.write(chunk, I)
            waiting.append(chunk)
    for _ in range(behind):
        writer.write(waiting.pop(0), W)
        writer.write(0, I)
        waiting.append(0)
    for chunk in waiting:
        writer.write(chunk, W)


@dataclass(frozen=True)
class ScheduleSpec:
    """How a schedule is made. virtual_stages: those it can have, None for 2 and more."""

    write: Callable[[int, int, int, Writer], None]
    virtual_stages: int | None = 1
    is_v: bool = False


SCHEDULES = {
    "gpipe": ScheduleSpec(gpipe),
    "1f1b": ScheduleSpec(one_forward_one_backward),
    "interleaved": ScheduleSpec(interleaved, virtual_stages=None),
    "zb_h1": ScheduleSpec(zb_h1),
    "zbv": ScheduleSpec(zbv, virtual_stages=2, is_v=True),
    "dualpipe_v": ScheduleSpec(dualpipe_v, virtual_stages=2, is_v=True),
}


def make_schedule(name: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The named schedule. Raises ScheduleError for numbers of stages and microbatches that it does not have."""
    made = SCHEDULES[name]
    legal = virtual_stages >= 2 if made.virtual_stages is None else virtual_stages == made.virtual_stages
    if not legal:
        raise ScheduleError(
            f"{name} has {made.virtual_stages or '2 or more'} stages on each rank, not {virtual_stages}"
        )
    if name == "dualpipe_v" and num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe_v on {num_ranks} ranks needs {2 * num_ranks} microbatches or more, and there are {num_microbatches}"
        )
    ranks = rank_of_stage(num_ranks, virtual_stages, made.is_v)
    lists = []
    for rank in range(num_ranks):
        writer = Writer(tuple(stage for stage, owner in enumerate(ranks) if owner == rank), num_microbatches)
        made.write(rank, num_ranks, num_microbatches, writer)
        lists.append(tuple(writer.actions))
    return Schedule(name, num_microbatches, ranks, tuple(lists))


def rank_of_stage(num_ranks: int, virtual_stages: int, is_v: bool) -> tuple[int, ...]:
    """The rank of each stage, in a V or in a loop."""
    there: Iterable[int] = range(num_ranks)
    if is_v:
        return (*there, *reversed(range(num_ranks)))
    return tuple(there) * virtual_stages
