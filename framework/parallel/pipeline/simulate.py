"""Actions and schedules, what ranks do in a step, as data that can be printed, checked, drawn and executed; and their
simulation: when each action happens, what it waits for, and how many microbatches are live at once.

    F(s, m) needs F(s-1, m), V alike   B(s, m), I(s, m) need F(s, m) and B or I of (s+1, m)            W(s, m) needs I(s, m)

A rank runs its actions one after another, in their order; a message between ranks takes `Costs.message`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from framework.errors import ScheduleError


class ActionKind(Enum):
    """Kinds of actions.

    F is the forward of a microbatch; B its whole backward; I and W its two halves, the gradient of the stage's input and, any
    time later, the gradients of its weights; V the forward of a validation microbatch, which has no backward. `lower` adds the
    others: messages and the lifetimes of ZeRO.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"
    VALIDATION = "V"
    RECEIVE_ACTIVATION = "RECV_F"
    SEND_ACTIVATION = "SEND_F"
    RECEIVE_GRADIENT = "RECV_B"
    SEND_GRADIENT = "SEND_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    WAIT_REDUCE = "WAIT_REDUCE"

    # Enum hashes by name, in Python. Actions are keys of dictionaries everywhere, and by identity is ten times as fast.
    __hash__ = object.__hash__  # type: ignore[assignment]


F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT, ActionKind.WEIGHT  # noqa: E741
V = ActionKind.VALIDATION

TRAINING = (F, B, I, W)
COMPUTE = (*TRAINING, V)


class Action(NamedTuple):
    """One thing that a rank does: `kind`, of a stage, for a microbatch. Printed as stage, kind, microbatch: 0F3."""

    # A tuple and no dataclass: the exhaustive tests make millions of them.

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


ACTION = re.compile(rf"(\d+)({'|'.join(kind.value for kind in TRAINING)})(\d+)")


def parse_action(text: str) -> Action:
    """The training action of a text such as 0F3. Raises ScheduleError for other text."""
    found = ACTION.fullmatch(text.strip())
    if found is None:
        raise ScheduleError(f"{text.strip()!r} is no action: stage, F, B, I or W, and microbatch, such as 0F3")
    return Action(int(found[1]), ActionKind(found[2]), int(found[3]))


@dataclass(frozen=True)
class Schedule:
    """The compute actions of each rank, in order.

    rank_of_stage: the rank of each stage; a rank may have several (virtual stages). num_validation: the number of validation
    microbatches, whose numbers come after those of training.
    """

    name: str
    num_microbatches: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]
    num_validation: int = 0

    @property
    def num_stages(self) -> int:
        return len(self.rank_of_stage)

    @property
    def num_ranks(self) -> int:
        return len(self.actions)


@dataclass(frozen=True)
class Costs:
    """Times of one microbatch, by stage, all in the same unit; `input` + `weight` is the time of a whole backward."""

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    message: float = 0.0

    def of(self, kind: ActionKind, stage: int) -> float:
        if kind is F or kind is V:
            return self.forward[stage]
        if kind is B:
            return self.input[stage] + self.weight[stage]
        return self.input[stage] if kind is I else self.weight[stage]


def unit_costs(num_stages: int) -> Costs:
    """F = I = W = 1, so B = 2: a backward has two matmuls for each one of the forward. The papers count in these units."""
    ones = (1.0,) * num_stages
    return Costs(ones, ones, ones)


@dataclass(frozen=True)
class Timed:
    """An action with its times: in the unit of the costs where it was simulated, in seconds where it was measured."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The actions of each rank with their times."""

    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def length(self) -> float:
        """Time from the first start to the last end of all ranks."""
        first = min((each.start for rank in self.ranks for each in rank), default=0.0)
        return max((each.end for rank in self.ranks for each in rank), default=0.0) - first

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they are idle, 0 to 1."""
        busy = sum(each.end - each.start for rank in self.ranks for each in rank)
        return 1.0 - busy / (self.length * len(self.ranks)) if busy else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """The timeline in which every action starts as early as its rank and what it needs allow.

    Raises ScheduleError with the cycle of waiting ranks if the schedule deadlocks.
    """
    ends: dict[tuple[int, int], float] = {}  # of F, at [stage, microbatch]
    ends_back: dict[tuple[int, int], float] = {}  # of B and I
    last_stage, owners = schedule.num_stages - 1, schedule.rank_of_stage
    clocks = [0.0] * schedule.num_ranks
    done: list[list[Timed]] = [[] for _ in schedule.actions]
    # Sweep over the ranks, each as far as it comes, until a sweep moves nobody: then all are done or the rest deadlocks.
    # `needs` is written out here with two dictionaries, because tests run this loop over millions of actions.
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            clock, timed = clocks[rank], done[rank]
            for position in range(len(timed), len(actions)):
                action = actions[position]
                stage, kind, microbatch = action
                source, ended = stage, None
                if kind is F or kind is V:
                    source, ended = stage - 1, ends.get((stage - 1, microbatch)) if stage else 0.0
                elif kind is W:
                    ended = ends_back.get((stage, microbatch))
                elif stage == last_stage:
                    ended = ends.get((stage, microbatch))
                elif (stage, microbatch) in ends:
                    source, ended = stage + 1, ends_back.get((stage + 1, microbatch))
                if ended is None:
                    break  # not simulated yet: this rank waits here until a later sweep
                if source >= 0 and owners[source] != rank:
                    ended += costs.message
                start = clock if clock > ended else ended
                clock = start + costs.of(kind, stage)
                timed.append(Timed(action, start, clock))
                if kind is F or kind is V:
                    ends[stage, microbatch] = clock
                elif kind is not W:
                    ends_back[stage, microbatch] = clock
                moved = True
            clocks[rank] = clock
    if any(len(timed) < len(actions) for timed, actions in zip(done, schedule.actions, strict=True)):
        raise ScheduleError(_explain_deadlock(schedule, [len(timed) for timed in done]))
    return Timeline(tuple(tuple(timed) for timed in done))


def validate(schedule: Schedule) -> Timeline:
    """Check a schedule and return its timeline with unit costs. Raises ScheduleError that lists what is wrong.

    A schedule is valid if each stage has, on its own rank, F and either B or I and W of every training microbatch once, and V
    of every validation microbatch once; and if the ranks' orders fit together without deadlock.
    """
    problems: list[str] = []
    seen: set[tuple[int, ActionKind, int]] = set()
    trained = range(schedule.num_microbatches)
    validated = range(len(trained), len(trained) + schedule.num_validation)
    for rank, actions in enumerate(schedule.actions):
        for action in actions:
            legal = validated if action.kind is V else trained
            if not (0 <= action.stage < schedule.num_stages and action.microbatch in legal):
                problems.append(
                    f"rank {rank} has {action}, but there are stages 0 to {schedule.num_stages - 1} and microbatches"
                    f" {legal.start} to {legal.stop - 1}"
                )
            elif schedule.rank_of_stage[action.stage] != rank:
                problems.append(f"rank {rank} has {action}, but stage {action.stage} is on another rank")
            if action in seen:
                problems.append(f"{action} is there twice")
            seen.add(action)
    for stage in range(schedule.num_stages):
        for microbatch in (each for each in validated if (stage, V, each) not in seen):
            problems.append(f"stage {stage} has nothing of validation microbatch {microbatch}")
        for microbatch in trained:
            has = [(stage, kind, microbatch) in seen for kind in (F, B, I, W)]
            if has not in ([True, True, False, False], [True, False, True, True]):
                there = " ".join(kind.value for kind, is_there in zip((F, B, I, W), has, strict=True) if is_there)
                problems.append(f"stage {stage} has {there or 'nothing'} of microbatch {microbatch}, not F B or F I W")
    # Simulating an incomplete schedule would call it a deadlock. What is missing is the better message.
    if problems:
        more = f"\nand {len(problems) - 8} more" if len(problems) > 8 else ""
        raise ScheduleError(f"schedule {schedule.name}: " + "\n".join(problems[:8]) + more)
    return simulate(schedule, unit_costs(schedule.num_stages))


def peak_live(schedule: Schedule) -> list[int]:
    """Largest number of live microbatches on each rank: those between their F and the end of their backward, W included."""
    peaks = []
    for actions in schedule.actions:
        live = peak = 0
        for _, kind, _ in actions:
            # I frees nothing here: the factors of the weight gradients stay until W.
            live += (kind is F) - (kind is B or kind is W)
            peak = max(peak, live)
        peaks.append(peak)
    return peaks


def needs(schedule: Schedule, action: Action) -> Action | None:
    """The action whose end `action` waits for, beside those before it on its own rank; None for a forward of stage 0."""
    stage, kind, microbatch = action
    if kind is F or kind is V:
        return Action(stage - 1, kind, microbatch) if stage else None
    if kind is W:
        return Action(stage, I, microbatch)
    if stage == schedule.num_stages - 1:
        return Action(stage, F, microbatch)
    after = Action(stage + 1, B, microbatch)
    return after if after in schedule.actions[schedule.rank_of_stage[stage + 1]] else after._replace(kind=I)


def _explain_deadlock(schedule: Schedule, positions: Sequence[int]) -> str:
    """The cycle of ranks that wait for one another, and the whole grid with how far each rank has come."""
    # Waiting rank: (the action it stands before, the action it needs).
    waits: dict[int, tuple[Action, Action]] = {}
    for rank, (actions, position) in enumerate(zip(schedule.actions, positions, strict=True)):
        if position < len(actions):
            # An action that stands before its own F waits for this rank itself, a cycle of one.
            own = actions[position]._replace(kind=F)
            needed = needs(schedule, actions[position])
            waits[rank] = actions[position], own if needed is None or own in actions[position + 1 :] else needed
    # Follow the waits from any rank. They end in a cycle, or at a rank that is done and can give nothing any more.
    rank = next(iter(waits))
    path: list[int] = []
    while rank in waits and rank not in path:
        path.append(rank)
        rank = schedule.rank_of_stage[waits[rank][1].stage]
    cycle = path[path.index(rank) :] if rank in path else path
    lines = [f"rank {each} waits before {waits[each][0]} for {waits[each][1]}" for each in cycle]
    lines = [
        f"{line} of rank {schedule.rank_of_stage[waits[each][1].stage]}"
        for line, each in zip(lines, cycle, strict=True)
    ]
    grid = [
        f"  rank {each}: {' '.join(map(str, actions[:at]))} >>> {' '.join(map(str, actions[at:]))}"
        for each, (actions, at) in enumerate(zip(schedule.actions, positions, strict=True))
    ]
    return "\n".join([f"schedule {schedule.name} deadlocks: " + "; ".join(lines), "done >>> still to do", *grid])


Gaps = tuple[tuple[float, float], ...]

# Relative to the length of the step. Costs are floats and times their sums, so a gap of exactly one forward may be an ulp
# short.
ROUNDING = 1e-9


def fill_bubbles(schedule: Schedule, costs: Costs, most: int | None = None) -> Schedule:
    """The schedule with forward-only microbatches, numbered after its own: as many as there is room for, or `most`."""
    timeline = simulate(schedule, costs)
    end = max((rank[-1].end for rank in timeline.ranks if rank), default=0.0)
    gaps = [_find_gaps(rank, end) for rank in timeline.ranks]
    lists = [list(rank) for rank in timeline.ranks]
    count = 0
    while count != most and (found := _find_room(schedule.rank_of_stage, costs, gaps, end * ROUNDING)) is not None:
        starts, gaps = found
        for stage, start in enumerate(starts):
            action = Action(stage, V, schedule.num_microbatches + count)
            lists[schedule.rank_of_stage[stage]].append(Timed(action, start, start + costs.of(V, stage)))
        count += 1
    # Sorted by end as well: of two actions that start together one has cost 0, and goes first.
    ordered = (sorted(rank, key=lambda each: (each.start, each.end)) for rank in lists)
    return replace(
        schedule, actions=tuple(tuple(each.action for each in rank) for rank in ordered), num_validation=count
    )


def _find_gaps(rank: Sequence[Timed], end: float) -> Gaps:
    starts, ends = [each.start for each in rank], [each.end for each in rank]
    return tuple((start, stop) for start, stop in zip([0.0, *ends], [*starts, end], strict=True) if stop > start)


def _find_room(
    rank_of_stage: Sequence[int], costs: Costs, gaps: Sequence[Gaps], rounding: float
) -> tuple[list[float], list[Gaps]] | None:
    """The times at which one more microbatch starts in each stage, and the gaps that are left; None if there is no room."""
    # First fit. Gaps are tuples that are replaced, not changed: one that fails half way leaves nothing behind.
    left, starts, ready = list(gaps), [], 0.0
    for stage, rank in enumerate(rank_of_stage):
        if stage and rank_of_stage[stage - 1] != rank:
            ready += costs.message
        length = costs.of(V, stage)
        # Earliest possible on each rank in turn: later would only take room from the stages after it.
        fits = (
            (at, max(low, ready))
            for at, (low, high) in enumerate(left[rank])
            if max(low, ready) + length <= high + rounding
        )
        at, start = next(fits, (-1, 0.0))
        if at < 0:
            return None
        ready = start + length
        low, high = left[rank][at]
        rest = tuple(gap for gap in ((low, start), (ready, high)) if gap[1] > gap[0])
        left[rank] = (*left[rank][:at], *rest, *left[rank][at + 1 :])
        starts.append(start)
    return starts, left
