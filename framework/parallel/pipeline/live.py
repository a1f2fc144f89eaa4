"""What a rank of a pipeline has live while it computes: microbatches, and hidden states between stages."""

from typing import NamedTuple

from framework.parallel.pipeline.actions import COMPUTE, Action, B, F, I, W
from framework.parallel.pipeline.lower import FORWARDS, RECEIVES, SENDS, Lowered, Message


class LiveMoment(NamedTuple):
    """What a rank has live while it computes: forward (else backward) of a stage, and (stage, whole, waiting) of each of its
    stages: microbatches between their F and the end of their B or I, this one included, and those between I and W.

    between: hidden states, or gradients of such, that wait for an action of this rank, arrive ahead of it, or are held until
    their receiver shows that it has them; what the moment's own action gives to the next stage, or was given, included.
    """

    is_forward: bool
    stage: int
    live: tuple[tuple[int, int, int], ...]
    between: int = 0


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
    """Hidden states between stages, as the executor holds them (`execute.Links`)."""

    def __init__(self, lowered: Lowered):
        self._messages, self._last = lowered.messages, lowered.num_stages - 1
        self._arriving: set[Action] = set()
        self._local: set[Action] = set()
        self._leaving: list[Message] = []

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
        """What a compute action was given by another stage."""
        if action.kind is W:
            return
        receive = action._replace(kind=RECEIVES[action.kind not in FORWARDS])
        self._local.discard(receive)
        if receive in self._arriving:
            self._arriving.remove(receive)
            came = self._messages[receive]
            # What its sender had needed before it sent this has arrived there.
            self._leaving = [each for each in self._leaving if each.target != came.source or each.before > came.after]

    def hand_on(self, action: Action) -> None:
        """What a compute action gives to a stage on the same rank waits there."""
        stage, kind, microbatch = action
        is_forward = kind in FORWARDS
        to = stage + 1 if is_forward else stage - 1
        send = action._replace(kind=SENDS[not is_forward])
        if kind is not W and 0 <= to <= self._last and send not in self._messages:
            self._local.add(Action(to, RECEIVES[not is_forward], microbatch))
