"""From a schedule of computations to what each rank really does: messages, and the lifetimes of ZeRO, in their places.

Messages have one order over the whole pipeline, that of the simulated moments at which their contents are there, and every
rank starts its sends and receives in this order. So ranks that talk to each other agree on the order of their messages, and
even if a rank did one after another, and each only when both sides are ready, no cycle of waits could close: a message
waits only for computations that wait for earlier messages.

    SEND      right after what it sends was computed
    RECV      some actions ahead of its use, so that data arrives while the rank computes
    UNSHARD   the stage's first units start to be gathered; the others follow, and go, as computation goes on
    RESHARD   what of the stage is still gathered is given back; not between a forward and the stage's backward right after
    WAIT_REDUCE  the sums of gradients that went on under a backward have ended; as late as its memory allows
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from framework.parallel.pipeline.actions import Action, B, F, I, Kind, Schedule, V, W
from framework.parallel.pipeline.simulate import Costs, simulate

SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)

FORWARDS = (F, V)

# Actions between the start of a receive and its use. With 0 a rank would wait for each message's whole way.
RECEIVE_AHEAD = 1

Frequency = Literal["step", "microbatch"]


@dataclass(frozen=True)
class Message:
    """What one stage's action hands to another rank's: sent after action number `after` of the rank `source`, needed by
    number `before` of `target`."""

    time: float
    source: int
    after: int
    send: Action
    target: int
    before: int
    receive: Action


@dataclass(frozen=True)
class Lowered:
    """Each rank's actions with everything in its place, and the message of each send and receive."""

    ranks: tuple[tuple[Action, ...], ...]
    messages: dict[Action, Message]
    num_stages: int

    def count_backwards(self, stage: int) -> int:
        """After how many actions the gradients of a stage are complete."""
        return sum(each.stage == stage and each.kind in (B, W) for actions in self.ranks for each in actions)


def lower(schedule: Schedule, costs: Costs, unshard: Frequency = "step", reduce: Frequency = "step") -> Lowered:
    """What each rank really does.

    unshard: a stage's parameters are gathered once and kept until the update, or for each forward and backward anew.
    reduce: gradients are summed over ranks once, or after each microbatch's backward.
    """
    messages = sorted(list_messages(schedule, costs), key=lambda each: (each.time, each.source, each.after))
    lowered = []
    for rank, actions in enumerate(schedule.actions):
        slots: list[list[Action]] = [[] for _ in range(len(actions) + 1)]  # what comes before action number i
        # Messages first: a send must not wait for a sum of gradients.
        for slot, action in (*_place_messages(rank, messages), *_place_lifetimes(actions, unshard, reduce)):
            slots[slot].append(action)
        lines = [[*slot, *actions[index : index + 1]] for index, slot in enumerate(slots)]
        lowered.append(tuple(action for line in lines for action in line))
    by_action = {action: each for each in messages for action in (each.send, each.receive)}
    return Lowered(tuple(lowered), by_action, schedule.num_stages)


def list_messages(schedule: Schedule, costs: Costs) -> Iterator[Message]:
    """Everything that goes from a rank to another one."""
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
            yield Message(
                each.end,
                source,
                after,
                Action(stage, send, microbatch),
                target,
                before,
                Action(to, receive, microbatch),
            )


def _place_messages(rank: int, messages: list[Message]) -> Iterator[tuple[int, Action]]:
    """(before which action, message) of a rank, in the order of messages."""
    own = [each for each in messages if rank in (each.source, each.target)]
    slots = [each.after + 1 if each.source == rank else max(each.before - RECEIVE_AHEAD, 0) for each in own]
    # A receive may not wait for its own time if a later message is to be started before.
    for index in range(len(own) - 2, -1, -1):
        if own[index].target == rank:
            slots[index] = min(slots[index], slots[index + 1])
    for index in range(1, len(own)):
        slots[index] = max(slots[index], slots[index - 1])
    for slot, each in zip(slots, own, strict=True):
        yield slot, each.send if each.source == rank else each.receive


def _place_lifetimes(
    actions: tuple[Action, ...], unshard: Frequency, reduce: Frequency
) -> Iterator[tuple[int, Action]]:
    """(before which action, lifetime of ZeRO)."""
    reads = [index for index, action in enumerate(actions) if action.kind is not W]
    gathered: set[int] = set()
    for at, after in zip(reads, [*reads[1:], None], strict=True):
        stage, kind, microbatch = actions[at]
        if stage not in gathered:
            gathered.add(stage)
            yield at, Action(stage, Kind.UNSHARD, microbatch)
        # What forward read last is what a backward of the same stage reads first.
        turns = after is not None and kind is F and actions[after].kind in (B, I) and actions[after].stage == stage
        if unshard == "microbatch" and not turns:
            gathered.discard(stage)
            yield at + 1, Action(stage, Kind.RESHARD, microbatch)
    pending: dict[int, Action] = {}
    for index, (stage, kind, microbatch) in enumerate(actions):
        if kind in (B, W):
            if stage in pending and reduce == "microbatch":
                yield index, pending.pop(stage)
            pending[stage] = Action(stage, Kind.WAIT_REDUCE, microbatch)
    yield from ((len(actions), action) for action in pending.values())
