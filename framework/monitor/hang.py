"""The verdict on a run that hangs: the ranks that are behind, from what every rank reports and from those that are silent.

A rank has two threads that communicate: one trains and one saves. Each is a node of a graph. A node that waits in a collective
has an edge to every rank that has not come to this call, and one that waits for a message has edges to its peers; training that
waits for a save has an edge to it. All others wait, through whatever chain, for the nodes without an edge. So no rank is blamed
for waiting.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from framework.monitor.progress import Phase
from framework.track.report import RANKS_FILE

if TYPE_CHECKING:  # `meshwright status` reads ranks without torch
    from framework.comm.communicator import Operation

TRAINING, SAVES = "training", "saves"
# A report names so many ranks that are behind with all that is known of them.
DETAILED = 4
# An answer has so many calls before and behind the point where a thread, or its device, is.
RECENT_BEFORE, RECENT_BEHIND = 32, 128

Node = tuple[int, str]
HasCome = Callable[["Answer | None", str, "Wait"], bool]


@dataclass(frozen=True)
class Wait:
    """A thread waits in the `number`-th call of operation `name` over an axis, for `label`. ranks: the members of the axis; for a
    message (is_message) only the peers."""

    axis: str
    name: str
    label: str
    number: int
    ranks: tuple[int, ...]
    is_message: bool = False

    def __str__(self) -> str:
        return f"{self.name}{f' of {self.label}' if self.label else ''} over {self.axis}"

    @property
    def call(self) -> str:
        """`reduce_scatter 412 over shard (gradient of layers.3)`."""
        return f"{self.name} {self.number} over {self.axis}{f' ({self.label})' if self.label else ''}"


class Said:
    """A value that ranks tell each other as JSON."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))  # type: ignore[call-overload]

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True)
class RankStatus(Said):
    """The line that a rank publishes every second."""

    rank: int
    host: str
    pid: int
    coordinates: str
    phase: str
    step: int | None
    seconds: float  # in this phase
    wait: str = ""  # the operation in which it waits
    saves_s: float | None = None  # how long the save behind training has been under way

    @property
    def name(self) -> str:
        return f"rank {self.rank} [{self.coordinates}] on {self.host}, pid {self.pid}"

    @property
    def doing(self) -> str:
        """The phase with its step."""
        return describe_phase(self.phase, self.step)


@dataclass(frozen=True)
class ThreadStatus:
    """One thread: its wait, the calls it has started ({`axis operation`: count}), and its stack, innermost frame first.

    On GPUs the wait is the device's. ahead: of the calls, those to which the device has not come; next: the first of them.
    recent: the labels of calls around the point where thread or device is ({`axis operation number`: label}).
    """

    wait: Wait | None
    started: dict[str, int]
    stack: tuple[str, ...] = ()
    ahead: dict[str, int] = field(default_factory=dict)
    next: str = ""
    recent: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer(Said):
    """The answer of a rank to an alarm. lanes: of its threads TRAINING and, with a save under way, SAVES."""

    line: RankStatus
    lanes: dict[str, ThreadStatus]

    @classmethod
    def from_json(cls, text: str) -> Self:
        found = json.loads(text)
        return cls(RankStatus(**found["line"]), {name: _read_lane(lane) for name, lane in found["lanes"].items()})


@dataclass(frozen=True)
class Alarm(Said):
    """A rank was in a phase, or had a save under way (lane SAVES), for `seconds`, longer than `deadline_s`, which `key` sets."""

    rank: int
    lane: str
    phase: str
    step: int | None
    seconds: float
    deadline_s: float
    key: str


@dataclass(frozen=True)
class Culprits:
    """The ranks for which all others wait; empty where ranks wait for one another in a cycle.

    silent: ranks that do not answer. busy: nodes that answer and wait for no node. stuck: where there are neither, nodes in an
    operation to which all ranks have come. departed: of a cycle, nodes that have left out what others wait in.
    """

    silent: tuple[int, ...] = ()
    busy: tuple[Node, ...] = ()
    stuck: tuple[Node, ...] = ()
    departed: tuple[Node, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All culprits."""
        return tuple(sorted({*self.silent, *(rank for rank, _ in (*self.busy, *self.stuck, *self.departed))}))


def describe_phase(phase: str, step: int | None) -> str:
    """`step 41`, `validate after step 40`, `connect ranks`."""
    if phase == Phase.STEP and step is not None:
        return f"step {step:,}"
    return phase if step is None else f"{phase}, step {step:,}"


def fold_ranks(ranks: Sequence[int]) -> str:
    """`0, 2-7, 9`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def find_culprits(answers: Mapping[int, Answer | None], alarm: Alarm) -> Culprits:
    """The ends of all chains of waiting. answers: of every rank; None of a rank that gives none."""
    edges = _find_edges(answers, _has_come)
    silent = {rank for rank, answer in answers.items() if answer is None}
    # In training every rank counts, for all of them come to every step. A save that hangs says nothing of a rank that trains.
    reached = [node for node in edges if node[1] == alarm.lane and (alarm.lane == TRAINING or edges[node])]
    reached += [(alarm.rank, alarm.lane)]
    seen: set[Node] = set()
    while reached:
        node = reached.pop()
        if node not in seen:
            seen.add(node)
            reached += edges.get(node, [])
    ends = sorted(node for node in seen if node[0] not in silent and not edges.get(node))
    busy = tuple(node for node in ends if _wait_of(node, answers) is None)
    if silent or busy:
        return Culprits(tuple(sorted(silent)), busy)
    return Culprits(stuck=tuple(ends)) if ends else Culprits(departed=_find_departed(answers, alarm.lane))


def _find_edges(answers: Mapping[int, Answer | None], has_come: HasCome) -> dict[Node, list[Node]]:
    """For whom each node waits."""
    return {
        (rank, name): list(_edges(rank, name, answers, has_come))
        for rank, answer in answers.items()
        if answer is not None
        for name in answer.lanes
    }


def _find_departed(answers: Mapping[int, Answer | None], lane: str) -> tuple[Node, ...]:
    """Ranks of a cycle that have left out what others wait in, as far as that can be told."""
    # Each waits for what another's device has not come to. Hosts run ahead: one that has not even started what others wait in, or
    # has for something else, and whose own call is started everywhere, has left it out.
    edges = _find_edges(answers, _has_started)
    waited_for = {node for nodes in edges.values() for node in nodes}
    return tuple(sorted(node for node in waited_for if not edges.get(node))) or tuple(_find_leapers(answers, lane))


def write_report(alarm: Alarm, answers: Mapping[int, Answer | None], lines: Mapping[int, RankStatus | None]) -> str:
    """The verdict as text. lines: the last ones of ranks that do not answer."""
    behind = find_culprits(answers, alarm)
    parts = [
        f"{_describe_alarm(alarm)} hangs: {_blame(behind, answers, lines)}",
        _describe_deadline(alarm),
        *[_describe_silent(rank, lines.get(rank)) for rank in behind.silent[:DETAILED]],
        *[_describe_missing(node, answers) for node in (*behind.busy, *behind.departed)[:DETAILED]],
        *[_describe_node(node, answers) for node in (*behind.busy, *behind.departed, *behind.stuck[:1])[:DETAILED]],
        *_describe_waits(answers, behind),
    ]
    return "\n".join(part for part in parts if part)


def describe_alone(alarm: Alarm, host: str, silent_s: float | None, first: RankStatus | None, answer: Answer) -> str:
    """The report of a rank that gets no verdict. host: of the store. silent_s: for how long it has not answered; None: it never
    has. first: the last line of rank 0. answer: of this rank."""
    mine, lane = answer.line, answer.lanes.get(alarm.lane)
    is_first = host.startswith("rank 0 ") and first is not None and mine.rank != 0
    who = f"{first.name}, does not answer" if is_first and first is not None else f"{host} does not answer"
    if lane is not None and lane.wait is None:
        who = f"{mine.name}, is behind, and {host} does not answer"
    since = "never has" if silent_s is None else f"has not for {silent_s:.0f} s"
    parts = [
        f"{_describe_alarm(alarm)} hangs: {who}",
        _describe_deadline(alarm),
        f"{host} hosts the store through which ranks tell each other where they are, and {since} answered",
        *([_describe_silent(0, first)] if is_first else []),
        _describe_node((mine.rank, alarm.lane), {mine.rank: answer}),
    ]
    return "\n".join(parts)


def _describe_alarm(alarm: Alarm) -> str:
    if alarm.lane == SAVES:
        return f"the save of {describe_phase(Phase.STEP, alarm.step)}"
    return describe_phase(alarm.phase, alarm.step)


def _describe_deadline(alarm: Alarm) -> str:
    return (
        f"rank {alarm.rank} was in it for {alarm.seconds:.0f} s, longer than its deadline of {alarm.deadline_s:.0f} s"
        f" ({alarm.key})"
    )


def _edges(rank: int, lane: str, answers: Mapping[int, Answer | None], has_come: HasCome) -> Iterator[Node]:
    answer = answers[rank]
    assert answer is not None, "only a rank that answers says for whom it waits"
    wait = answer.lanes[lane].wait
    if wait is None:
        if lane == TRAINING and answer.line.phase == Phase.SAVE and SAVES in answer.lanes:
            yield rank, SAVES
        return
    for other in wait.ranks:
        if other != rank and (wait.is_message or not has_come(answers.get(other), lane, wait)):
            yield other, lane


def _has_come(answer: Answer | None, lane: str, wait: Wait) -> bool:
    """Whether the thread has started the call, and its device has come to it."""
    found, key = answer.lanes.get(lane) if answer is not None else None, f"{wait.axis} {wait.name}"
    is_there = found is not None and found.started.get(key, 0) - found.ahead.get(key, 0) >= wait.number
    return is_there and _has_started(answer, lane, wait)


def _has_started(answer: Answer | None, lane: str, wait: Wait) -> bool:
    """Whether the thread has started the call, and as far as is known for the same."""
    found, key = answer.lanes.get(lane) if answer is not None else None, f"{wait.axis} {wait.name}"
    if found is None or found.started.get(key, 0) < wait.number:
        return False
    return found.recent.get(f"{key} {wait.number}", wait.label) == wait.label


def _find_leapers(answers: Mapping[int, Answer | None], lane: str) -> Iterator[Node]:
    """Ranks that have left out a call: from one number on their labels are those that a rank which waits has by the next number,
    or most ranks wait in what these have not come to."""
    lanes = {rank: each.lanes[lane] for rank, each in answers.items() if each is not None and lane in each.lanes}
    waits = {rank: found.wait for rank, found in lanes.items() if found.wait is not None}
    calls = Counter(wait.call for wait in waits.values())
    for rank, found in lanes.items():
        for other, wait in waits.items():
            is_most = 2 * calls[wait.call] > len(waits)
            is_missing = rank in wait.ranks and not _has_come(answers[rank], lane, wait)
            if is_missing and (is_most or _is_shifted(found.recent, lanes[other].recent, wait)):
                yield rank, lane
                break


def _is_shifted(mine: Mapping[str, str], others: Mapping[str, str], wait: Wait) -> bool:
    for number in (wait.number - 1, wait.number):
        now, following = (f"{wait.axis} {wait.name} {each}" for each in (number, number + 1))
        if now in mine and mine[now] == others.get(following) != others.get(now):
            return True
    return False


def _wait_of(node: Node, answers: Mapping[int, Answer | None]) -> Wait | None:
    answer = answers.get(node[0])
    lane = answer.lanes.get(node[1]) if answer is not None else None
    return lane.wait if lane is not None else None


def _blame(behind: Culprits, answers: Mapping[int, Answer | None], lines: Mapping[int, RankStatus | None]) -> str:
    """The culprits in a few words."""
    if not behind.ranks:
        return "its ranks wait for one another, for they have taken different paths (track.debug_collectives=true finds such)"
    if behind.stuck:
        wait = _wait_of(behind.stuck[0], answers)
        return f"all ranks have come to {wait}, and it does not end: is the network up?"
    known = {rank: answer.line for rank, answer in answers.items() if answer is not None}
    known |= {rank: line for rank, line in lines.items() if line is not None}
    if len(behind.ranks) == 1:
        rank = behind.ranks[0]
        who = known[rank].name if rank in known else f"rank {rank}"
        what = (
            "does not answer" if behind.silent else "is behind" if behind.busy else "has left out what others wait in"
        )
        return f"{who}, {what}"
    if behind.departed:
        return f"ranks {fold_ranks(behind.ranks)} have left out what others wait in"
    silent = [f"ranks {fold_ranks(behind.silent)} do not answer"] if behind.silent else []
    busy = [f"ranks {fold_ranks([rank for rank, _ in behind.busy])} are behind"] if behind.busy else []
    return ", ".join(silent + busy)


def _describe_silent(rank: int, line: RankStatus | None) -> str:
    if line is None:
        return f"rank {rank} does not answer and has not said a word: did it start?"
    place = f" in {line.wait}" if line.wait else ""
    return (
        f"{line.name}, does not answer: stopped, its machine is gone, or held up in a library. Last seen in {line.doing},"
        f" for {line.seconds:.0f} s{place}"
    )


def _describe_missing(node: Node, answers: Mapping[int, Answer | None]) -> str:
    """The call in which most others wait for the node; empty where none waits in a collective."""
    rank, lane = node
    mine = answers.get(rank)
    waits = {each: wait for each in answers if (wait := _wait_of((each, lane), answers)) and rank in wait.ranks}
    missing = [wait for wait in waits.values() if not (wait.is_message or _has_come(mine, lane, wait))]
    if mine is None or not missing:
        return ""
    call = max(missing, key=lambda wait: (not _has_started(mine, lane, wait), missing.count(wait)))
    others = [each for each in call.ranks if each != rank and _has_started(answers.get(each), lane, call)]
    plural = f"rank{'s' if len(others) > 1 else ''} {fold_ranks(others)}"
    found, who = mine.lanes[lane], f"rank {rank} [{mine.line.coordinates}]"
    label = found.recent.get(f"{call.axis} {call.name} {call.number}", call.label)
    if _has_started(mine, lane, call):
        return f"{who} has started {call.call}, but its device has not come to it: it is before {found.next}"
    if label != call.label:
        return f"{who} has started {replace(call, label=label).call}, and {plural} {call.call}"
    return f"{who} has not started {call.call}, that {plural} {'have' if len(others) > 1 else 'has'} started"


def _describe_node(node: Node, answers: Mapping[int, Answer | None]) -> str:
    rank, lane = node
    answer = answers.get(rank)
    if answer is None or lane not in answer.lanes:
        return f"rank {rank} has nothing to say of its {lane}"
    line, found = answer.line, answer.lanes[lane]
    seconds = line.saves_s if lane == SAVES and line.saves_s is not None else line.seconds
    what = "its save behind training" if lane == SAVES else line.doing
    place = f"in {found.wait}" if found.wait else "waits for no other rank"
    stack = "".join(f"\n  {frame}" for frame in found.stack)
    return f"{line.name}, is in {what} for {seconds:.0f} s, {place}. It is at{stack}"


def _describe_waits(answers: Mapping[int, Answer | None], behind: Culprits) -> Iterator[str]:
    """The waits of the other ranks, equal ones in one line."""
    waits: dict[str, list[int]] = {}
    for rank, answer in answers.items():
        for name, lane in answer.lanes.items() if answer is not None else ():
            if lane.wait is not None and (rank, name) not in behind.stuck[:1]:
                label = str(lane.wait) + (" (save)" if name == SAVES else "")
                waits.setdefault(label, []).append(rank)
    for label, ranks in waits.items():
        yield f"rank{'s' if len(ranks) > 1 else ''} {fold_ranks(ranks)} wait{'' if len(ranks) > 1 else 's'} in {label}"


def _read_lane(found: dict[str, Any]) -> ThreadStatus:
    wait = found["wait"]
    if wait is not None:
        wait = Wait(**{**wait, "ranks": tuple(wait["ranks"])})
    return ThreadStatus(**{**found, "wait": wait, "stack": tuple(found["stack"])})


def describe_wait(operation: "Operation") -> Wait:
    """The wait for an operation, as a report shows it."""
    axis, is_message = operation.axis, bool(operation.peers)
    ranks = operation.peers or axis.ranks
    return Wait(axis.name, operation.name, operation.label, operation.number, tuple(ranks), is_message)


def find_recent(recent: "Sequence[Operation]", ahead: "Sequence[Operation]") -> dict[str, str]:
    """`ThreadStatus.recent`. recent: operations in the order of their starts; ahead: of these, those that the device has not come
    to."""
    here = next((place for place in range(len(recent)) if ahead and recent[place] is ahead[0]), len(recent))
    near = recent[max(0, here - RECENT_BEFORE) : here + RECENT_BEHIND]
    return {f"{each.axis.name} {each.name} {each.number}": each.label for each in near if not each.peers}


def write_ranks(folder: Path, lines: list[RankStatus]) -> None:
    """Write RUN/ranks.json atomically."""
    path = folder / RANKS_FILE
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps({"unix_s": time.time(), "ranks": [vars(line) for line in lines]}))
    os.replace(partial, path)


def read_ranks(folder: Path) -> tuple[float, list[RankStatus]]:
    """Read RUN/ranks.json: the wall clock of its writing and its lines; none where there is no such file."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = json.loads((folder / RANKS_FILE).read_text())
        return found["unix_s"], [RankStatus(**line) for line in found["ranks"]]
    return 0.0, []
