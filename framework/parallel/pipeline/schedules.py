"""Schedules gpipe, 1f1b, interleaved, zb_h1, zbv, dualpipe_v. A new one is an entry of SCHEDULES.

Pure functions from (ranks, microbatches, virtual stages) to each rank's list of actions.

P ranks, V virtual stages on each, S = P V stages, M microbatches. The placement of stages:

    loop (interleaved)   stage s on rank s mod P
    V (zbv, dualpipe_v)  stage s on rank s, then back: stage P is on the last rank, stage 2P-1 on the first

F is a forward. B is a whole backward, which Qi et al. (2023) split into I, the gradient of the input (their B), and W, those
of the weights (their W). In every schedule the microbatches of a stage go backward in the order of their numbers, so that
gradients are summed in the same order.

Each function writes the list of one rank and knows nothing of the others; `validate` proves that the lists fit together.
"""

import csv
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from framework.errors import ScheduleError
from framework.parallel.pipeline.simulate import Action, ActionKind, B, F, I, Schedule, W, parse_action, validate


class Writer:
    """One rank's list of actions while it is written. It counts microbatches for each stage and kind, so that a schedule says
    only which stage and kind comes next."""

    def __init__(self, stages: tuple[int, ...], num_microbatches: int):
        self.actions: list[Action] = []
        self.stages, self._num_microbatches = stages, num_microbatches
        self._next = {(stage, kind): 0 for stage in stages for kind in (F, I, W)}

    def write(self, chunk: int, *kinds: ActionKind) -> None:
        """Append the next microbatch of the rank's `chunk`-th stage, for each kind. B counts as the next I and the next W."""
        stage = self.stages[chunk]
        for kind in kinds:
            microbatch = self._next[stage, I if kind is B else kind]
            for each in (I, W) if kind is B else (kind,):
                self._next[stage, each] += 1
            # ZB-V is defined for 2P - 1 microbatches or more. Of fewer, those beyond M are counted and left out.
            if microbatch < self._num_microbatches:
                self.actions.append(Action(stage, kind, microbatch))

    def done(self, chunk: int, kind: ActionKind) -> int:
        """Number of microbatches of the rank's `chunk`-th stage that have been written for a kind."""
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
    # Warm-up: microbatch 0 passes P - 1 - rank stages after this one before its backward comes back here.
    ahead = min(num_ranks - 1 - rank, num_microbatches)
    for _ in range(ahead):
        writer.write(0, F)
    # Steady state: each forward is followed by the backward of the oldest live microbatch, which frees its memory.
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
    # Warm-up: the first group has to get through all virtual stages but the last before its first backward; the factor 2 is
    # the way to the last rank and back: so many more forwards fit in meanwhile.
    ahead = min((num_virtual - 1) * sizes[0] + 2 * (num_ranks - 1 - rank), len(forwards))
    for chunk in forwards[:ahead]:
        writer.write(chunk, F)
    for number, chunk in enumerate(backwards):
        if ahead + number < len(forwards):
            writer.write(forwards[ahead + number], F)
        writer.write(chunk, B)


def group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """M divided into groups of at least P microbatches, larger groups first.

    With fewer than P the first rank would come to its next virtual stage before the group is through the one before.
    """
    num_groups = max(num_microbatches // num_ranks, 1)
    return [ceil((num_microbatches - group) / num_groups) for group in range(num_groups)]


def zb_h1(rank: int, num_ranks: int, num_microbatches: int, writer: Writer) -> None:
    """ZB-H1, zero bubble with the memory of 1F1B (Qi et al. 2023, section 3.1): weight gradients fill the bubble at the end.

    Rank r is r weight gradients late, so P microbatches are live on it, as on the first rank of 1F1B.
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
    """ZB-V (Qi et al. 2023, section 6): two stages on a rank, in a V. With equal costs of F, I and W no rank is idle between
    its first action and its last. At most P microbatches are live on each rank.

    Written for 2P - 1 microbatches or more; of fewer, the actions of the missing ones are left out.
    """
    num_written = max(num_microbatches, 2 * num_ranks - 1)
    # Warm-up: as many forwards as microbatch 0 passes stages on other ranks between this rank's two, on the way down the V and
    # up again, and its own.
    for _ in range(2 * (num_ranks - rank) - 1):
        writer.write(0, F)
    for _ in range(rank):
        writer.write(1, F)
        writer.write(0, F)
    for _ in range(num_ranks - rank):
        writer.write(1, F, I, W)
    # Steady state: F, I, W of one chunk, then of the other. Each takes 3 units, so the ranks stay in step.
    while writer.done(1, F) < num_written:
        if writer.done(0, F) < num_written:
            writer.write(0, F)
        writer.write(0, I, W)
        writer.write(1, F, I, W)
    # Cool-down: from here on weight gradients wait. Other ranks wait for input gradients; W is for no one but this rank.
    for _ in range(rank):
        writer.write(0, I)
        writer.write(1, I)
    for _ in range(num_ranks - rank):
        writer.write(0, I, W)
    for chunk in (1, 0):
        while writer.done(chunk, W) < num_written:
            writer.write(chunk, W)


def dualpipe_v(rank: int, num_ranks: int, num_microbatches: int, writer: Writer) -> None:
    """DualPipeV (DeepSeek 2025): the DualPipe of DeepSeek-V3 (2024) folded into a V, so that no parameter is held twice.

    The forward of one stage is next to a backward of the other, so that either hides the other's messages. Needs 2P microbatches.
    """
    # The eight loops are the eight steps of the published schedule. behind: ranks between this one and the turn of the V.
    behind = num_ranks - 1 - rank
    for _ in range(2 * behind):
        writer.write(0, F)
    for _ in range(rank + 1):
        writer.write(0, F)
        writer.write(1, F)
    # Backwards come back from the turn, split in I and W: the rank before needs the input gradient as early as possible.
    for _ in range(behind):
        writer.write(1, I, W, F)
    # Steady state: F of one stage next to B of the other, in both directions.
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        writer.write(0, F)
        writer.write(1, B, F)
        writer.write(0, B)
    for _ in range(behind):
        writer.write(1, B, F)
        writer.write(0, B)
    # From the middle of the cool-down on weight gradients wait, as in zero bubble, and fill what is left of the bubble.
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
    """A schedule by name: what writes a rank's list; virtual_stages: how many it has on a rank, None for any number from 2 on;
    is_v: whether stages lie in a V, not in a loop."""

    write: Callable[[int, int, int, Writer], None]
    virtual_stages: int | None = 1
    is_v: bool = False


SCHEDULES: dict[str, ScheduleSpec] = {
    "gpipe": ScheduleSpec(gpipe),
    "1f1b": ScheduleSpec(one_forward_one_backward),
    "interleaved": ScheduleSpec(interleaved, virtual_stages=None),
    "zb_h1": ScheduleSpec(zb_h1),
    "zbv": ScheduleSpec(zbv, virtual_stages=2, is_v=True),
    "dualpipe_v": ScheduleSpec(dualpipe_v, virtual_stages=2, is_v=True),
}


def make_schedule(name: str, num_ranks: int, num_microbatches: int, virtual_stages: int = 1) -> Schedule:
    """The named schedule. Raises ScheduleError for numbers of stages and microbatches that it does not support."""
    spec = SCHEDULES[name]
    legal = virtual_stages >= 2 if spec.virtual_stages is None else virtual_stages == spec.virtual_stages
    if not legal:
        raise ScheduleError(
            f"{name} has {spec.virtual_stages or '2 or more'} stages on each rank, not {virtual_stages}"
        )
    if name == "dualpipe_v" and num_microbatches < 2 * num_ranks:
        raise ScheduleError(
            f"dualpipe_v on {num_ranks} ranks needs {2 * num_ranks} microbatches or more, and there are {num_microbatches}"
        )
    ranks = rank_of_stage(num_ranks, virtual_stages, spec.is_v)
    lists = []
    for rank in range(num_ranks):
        writer = Writer(tuple(stage for stage, owner in enumerate(ranks) if owner == rank), num_microbatches)
        spec.write(rank, num_ranks, num_microbatches, writer)
        lists.append(tuple(writer.actions))
    return Schedule(name, num_microbatches, ranks, tuple(lists))


def rank_of_stage(num_ranks: int, virtual_stages: int, is_v: bool) -> tuple[int, ...]:
    """The rank of each stage, by number, in a V or in a loop."""
    there: Iterable[int] = range(num_ranks)
    if is_v:
        return (*there, *reversed(range(num_ranks)))
    return tuple(there) * virtual_stages


def write_table(path: Path, schedule: Schedule) -> None:
    """Write the file that `read_table` reads."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(schedule.actions)


def read_table(path: Path, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule of a file, checked to be complete and free of deadlock.

    Raises ScheduleError that names the file, and the line where one is wrong.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets begin with a mark of the encoding
            rows = [[cell for cell in row if cell.strip()] for row in csv.reader(file)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ScheduleError(f"pipeline.table={path} cannot be read: {error}") from error
    rows = [row for row in rows if row]
    if len(rows) != num_ranks:
        raise ScheduleError(
            f"{path} has {len(rows)} lines with actions; parallel.pp={num_ranks} needs one for each rank"
        )
    lists = []
    for line, row in enumerate(rows, start=1):
        try:
            lists.append(tuple(parse_action(cell) for cell in row))
        except ScheduleError as error:
            raise ScheduleError(f"{path}, line {line}: {error}") from None
    # The table says which stages are where by itself: any placement may be tried, not only loop and V.
    owners = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    missing = next((stage for stage in range(len(owners)) if stage not in owners), None)
    if missing is not None or len(owners) % num_ranks:
        gap = f"{len(owners)} stages for {num_ranks} ranks" if missing is None else f"nothing of stage {missing}"
        raise ScheduleError(f"{path} has {gap}; stages are numbered from 0, equally many on each rank")
    ranks = tuple(owners[stage] for stage in range(len(owners)))
    schedule = Schedule(path.name, num_microbatches, ranks, tuple(lists))
    validate(schedule)
    return schedule
