"""Lowering: from a schedule of compute actions to everything a rank does, with its messages and the lifetimes of ZeRO.

Messages have one order over the whole pipeline, the simulated times at which their contents are ready, and every rank starts
its sends and receives in this order. Ranks that talk to each other therefore agree on the order of their messages. And there
is no deadlock, even if a rank handled one message after another and each only when both sides are ready: a message waits only
for computations that wait for earlier messages, so no cycle of waits can close.

    SEND          right after the action that computes the content
    RECV          some actions ahead of its use, so that the data arrives while the rank computes
    UNSHARD       starts to unshard the stage's first units; hooks unshard the others, and reshard them, as computation goes on
    RESHARD       reshards what is still unsharded of the stage; left out between a forward and the same stage's backward after it
    WAIT_REDUCE   waits for the gradient reductions that a backward has started, as late as the memory of gradients allows
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from framework.parallel.pipeline.simulate import COMPUTE, Action, ActionKind, B, Costs, F, I, Schedule, V, W, simulate

SENDS = (ActionKind.SEND_ACTIVATION, ActionKind.SEND_GRADIENT)
RECEIVES = (ActionKind.RECEIVE_ACTIVATION, ActionKind.RECEIVE_GRADIENT)

FORWARDS = (F, V)

# Actions between the start of a receive and its use. With 0 a rank would wait for the whole transfer of each message; 1
# is enough while a transfer is shorter than an action, and each more costs the memory of one more hidden state.
RECEIVE_AHEAD = 1

# Least time of an action, as a share of the longest one's. An action that takes no time, as the backward of a frozen stage,
# would send at the time at which it receives: what it sends could come first in the order, and its rank would wait for itself.
LEAST = 1e-6

Frequency = Literal["step", "microbatch"]


@dataclass(frozen=True)
class StageMessage:
    """A message between two ranks."""

    time: float
    """The simulated time at which the content is ready."""
    source: int
    after: int
    """The number of the source's compute action behind which it is sent."""
    send: Action
    target: int
    before: int
    """The number of the target's compute action that needs it."""
    receive: Action


@dataclass(frozen=True)
class Lowered:
    """The whole lists of actions, by rank, and the message of each send and receive."""

    ranks: tuple[tuple[Action, ...], ...]
    messages: dict[Action, StageMessage]
    num_stages: int

    def count_backwards(self, stage: int) -> int:
        """The number of actions that contribute weight gradients to a stage; after the last one they are complete."""
        return sum(each.stage == stage and each.kind in (B, W) for actions in self.ranks for each in actions)


def lower(schedule: Schedule, costs: Costs, unshard: Frequency = "step", reduce: Frequency = "step") -> Lowered:
    """The schedule with messages and lifetimes.

    unshard: whether a stage's parameters are unsharded once a step and kept until the update, or again for each forward and
    backward. reduce: whether gradients are summed over ranks once a step, or after each microbatch's backward.
    """
    # Rank and action break ties: each rank sorts for itself, and messages with equal times must have the same order everywhere,
    # or two ranks would pair the wrong ones.
    found = list_messages(schedule, _lengthen(costs))
    messages = sorted(found, key=lambda each: (each.time, each.source, each.after))
    # Sorted by rank once, not looked for by each rank among all: a search lowers schedules of thousands of messages.
    own: list[list[StageMessage]] = [[] for _ in schedule.actions]
    for each in messages:
        own[each.source].append(each)
        own[each.target].append(each)
    lowered = []
    for rank, actions in enumerate(schedule.actions):
        slots: list[list[Action]] = [[] for _ in range(len(actions) + 1)]  # what comes before action number i
        # Messages first: a send must not wait for a sum of gradients.
        for slot, action in (*_place_messages(rank, own[rank]), *_place_lifetimes(actions, unshard, reduce)):
            slots[slot].append(action)
        lines = [[*slot, *actions[index : index + 1]] for index, slot in enumerate(slots)]
        lowered.append(tuple(action for line in lines for action in line))
    by_action = {action: each for each in messages for action in (each.send, each.receive)}
    return Lowered(tuple(lowered), by_action, schedule.num_stages)


def _lengthen(costs: Costs) -> Costs:
    """Costs that are all at least LEAST of the largest one."""
    times = costs.forward, costs.input, costs.weight
    least = LEAST * max(map(max, times)) or 1.0
    forward, inputs, weights = ([max(each, least) for each in stages] for stages in times)
    return replace(costs, forward=forward, input=inputs, weight=weights)


def list_messages(schedule: Schedule, costs: Costs) -> Iterator[StageMessage]:
    """All messages between ranks, in no order. Stages on one rank exchange none."""
    # Where each stage's forward and backward are. W has no message: its input stayed on the rank.
    places = {
        (stage, kind in FORWARDS, microbatch): (rank, index)
        for rank, actions in enumerate(schedule.actions)
        for index, (stage, kind, microbatch) in enumerate(actions)
        if kind is not W
    }
    for source, timed in enumerate(simulate(schedule, costs).ranks):
        for after, each in enumerate(timed):
            stage, kind, microbatch = each.action
            to = stage + 1 if kind in FORWARDS else stage - 1
            if kind is W or not 0 <= to < schedule.num_stages or schedule.rank_of_stage[to] == source:
                continue
            send, receive = (SENDS[0], RECEIVES[0]) if kind in FORWARDS else (SENDS[1], RECEIVES[1])
            target, before = places[to, kind in FORWARDS, microbatch]
            yield StageMessage(
                each.end,
                source,
                after,
                Action(stage, send, microbatch),
                target,
                before,
                Action(to, receive, microbatch),
            )


def _place_messages(rank: int, own: list[StageMessage]) -> Iterator[tuple[int, Action]]:
    """Pairs (number of the compute action before which it starts, send or receive), in the order of the rank's own messages."""
    slots = [each.after + 1 if each.source == rank else max(each.before - RECEIVE_AHEAD, 0) for each in own]
    # The one order of messages has to survive in each rank's list. Where a later message starts before an action that an
    # earlier receive was put behind, the receive moves forward with it: receiving early costs memory, a different order
    # than the peer's would pair the wrong messages.
    for index in range(len(own) - 2, -1, -1):
        if own[index].target == rank:
            slots[index] = min(slots[index], slots[index + 1])
    # A send cannot move forward, since its content is not there: what comes after it in the order moves back instead.
    for index in range(1, len(own)):
        slots[index] = max(slots[index], slots[index - 1])
    for slot, each in zip(slots, own, strict=True):
        assert each.source == rank or slot <= each.before, f"{each.receive} of rank {rank} would come behind its use"
        yield slot, each.send if each.source == rank else each.receive


def _place_lifetimes(
    actions: tuple[Action, ...], unshard: Frequency, reduce: Frequency
) -> Iterator[tuple[int, Action]]:
    """Pairs (number of the compute action before which it happens, UNSHARD, RESHARD or WAIT_REDUCE)."""
    # W reads no parameters, only saved factors of the weights' gradients: its stage may be resharded.
    reads = [index for index, action in enumerate(actions) if action.kind is not W]
    unsharded: set[int] = set()
    for at, after in zip(reads, [*reads[1:], None], strict=True):
        stage, kind, microbatch = actions[at]
        if stage not in unsharded:
            unsharded.add(stage)
            yield at, Action(stage, ActionKind.UNSHARD, microbatch)
        # A backward of a stage reads first what its forward read last: a RESHARD between them would free it just to
        # have it unsharded again.
        turns = after is not None and kind is F and actions[after].kind in (B, I) and actions[after].stage == stage
        if unshard == "microbatch" and not turns:
            unsharded.discard(stage)
            yield at + 1, Action(stage, ActionKind.RESHARD, microbatch)
    pending: dict[int, Action] = {}
    for index, (stage, kind, microbatch) in enumerate(actions):
        if kind in (B, W):
            # Reductions go on under whatever comes next. The stage's next weight gradients go into the buffers that they
            # read, so that is how late the wait may be; once a step there is no next, and the wait is the step's end.
            if stage in pending and reduce == "microbatch":
                yield index, pending.pop(stage)
            pending[stage] = Action(stage, ActionKind.WAIT_REDUCE, microbatch)
    yield from ((len(actions), action) for action in pending.values())


class LiveMoment(NamedTuple):
    """The microbatches and hidden states that a rank holds while it computes."""

    is_forward: bool
    """Forward of `stage`, else backward."""
    stage: int
    live: tuple[tuple[int, int, int], ...]
    """(stage, whole, waiting) of each of the rank's stages: microbatches between their F and the end of their B or I, this one
    included, and those between I and W."""
    between: int = 0
    """Hidden states, or gradients of such, that wait for an action of this rank, arrive ahead of it, or are held until their
    receiver shows that it has them; those that the action itself is given, or gives to the next stage, included."""


def live_moments(lowered: Lowered, rank: int) -> list[LiveMoment]:
    """The moments of a rank's step, those that differ. W is none: it recomputes nothing."""
    actions, last = lowered.ranks[rank], lowered.num_stages - 1
    whole = dict.fromkeys(sorted({each.stage for each in actions}), 0)
    waiting = dict.fromkeys(whole, 0)
    links = _Between(lowered)
    seen: dict[LiveMoment, None] = {}
    for action in actions:
        stage, kind, _ = action
        if kind not in COMPUTE:
            links.start(action)
            continue
        links.take(action)
        whole[stage] += kind is F
        if kind in (F, B, I):
            # This microbatch counts as whole in both: what it keeps goes while its backward runs, the first layers' last.
            live = tuple((each, count, waiting[each]) for each, count in whole.items())
            # A forward has its output in hand by its end, a backward the gradient of its output; of the loss there is none.
            seen[LiveMoment(kind is F, stage, live, links.count + (stage < last))] = None
        links.hand_on(action)
        whole[stage] -= kind in (B, I)
        waiting[stage] += (kind is I) - (kind is W)
    return list(seen)


class _Between:
    """Hidden states between stages, as the executor holds them (`execute.StageLinks`)."""

    def __init__(self, lowered: Lowered):
        self._messages, self._last = lowered.messages, lowered.num_stages - 1
        self._arriving: set[Action] = set()
        self._local: set[Action] = set()
        self._leaving: list[StageMessage] = []

    @property
    def count(self) -> int:
        return len(self._arriving) + len(self._local) + len(self._leaving)

    def start(self, action: Action) -> None:
        """A send or a receive; other actions carry nothing."""
        if action.kind in RECEIVES:
            self._arriving.add(action)
        elif action.kind in SENDS:
            self._leaving.append(self._messages[action])

    def take(self, action: Action) -> None:
        """Use up the tensors that another stage has given to a compute action."""
        if action.kind is W:
            return
        receive = action._replace(kind=RECEIVES[action.kind not in FORWARDS])
        self._local.discard(receive)
        if receive in self._arriving:
            self._arriving.remove(receive)
            came = self._messages[receive]
            # Messages that its sender needed before it sent this have arrived there.
            self._leaving = [each for each in self._leaving if each.target != came.source or each.before > came.after]

    def hand_on(self, action: Action) -> None:
        """Keep the tensors that a compute action gives to a stage on the same rank."""
        stage, kind, microbatch = action
        is_forward = kind in FORWARDS
        to = stage + 1 if is_forward else stage - 1
        send = action._replace(kind=SENDS[not is_forward])
        if kind is not W and 0 <= to <= self._last and send not in self._messages:
            self._local.add(Action(to, RECEIVES[not is_forward], microbatch))
