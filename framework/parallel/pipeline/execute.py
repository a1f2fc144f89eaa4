"""The one executor: interprets a rank's actions. Accumulation, whatever the number of microbatches, is its one-stage case.

Of a microbatch only the graph lives from its F to its B: what a stage computed is sent and forgotten, what it received is in
the graph where backward needs it. Between stages on one rank a tensor changes hands without a message.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from framework.comm.algorithms import Pending
from framework.comm.communicator import Communicator
from framework.comm.p2p import exchange_apart
from framework.model.load_balancing import sums_dtype
from framework.parallel.pipeline.actions import COMPUTE, Action, Kind
from framework.parallel.pipeline.lower import FORWARDS, RECEIVES, SENDS, Lowered, Message
from framework.parallel.pipeline.simulate import Timed

Tensors = tuple[Tensor, ...]


class StageActions(Protocol):
    """A part of the model, with one microbatch of a step at a time. What its forward returns goes to the next stage, or is on
    the last stage the microbatch's loss."""

    def forward(self, microbatch: int, received: Tensors) -> Tensors: ...

    def validate(self, microbatch: int, received: Tensors) -> Tensors:
        """As `forward`, of a microbatch that nothing is learnt from."""

    def backward(self, outputs: Sequence[GradientEdge], gradients: Tensors, is_last: bool) -> None:
        """outputs: those below which something is trained, with their gradients; the loss has none. is_last: of this stage in
        this step: its gradients are then complete."""

    def backward_input(self, outputs: Sequence[GradientEdge], gradients: Tensors) -> Any:
        """The gradient of the input; returns what `backward_weights` needs."""

    def backward_weights(self, left: Any, is_last: bool) -> None: ...

    def unshard(self, is_forward: bool) -> None: ...

    def reshard(self) -> None: ...

    def wait_reduce(self) -> None: ...


@dataclass(frozen=True)
class ActivationSpec:
    """What goes from stage to stage. `width`: of hidden states; `token_parts`: so many ranks divide every sequence's tokens
    among themselves, the last part padded, and each sends its own. `num_sums`: of routers, beside them."""

    width: int
    token_parts: int
    num_sums: int
    dtype: torch.dtype
    device: torch.device

    def make_places(self, sequences: int, tokens: int) -> Tensors:
        """For what a rank receives of a microbatch of so many sequences of so many tokens."""
        shape = sequences, -(-tokens // self.token_parts), self.width
        hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
        if not self.num_sums:
            return (hidden,)
        return hidden, torch.empty(self.num_sums, dtype=sums_dtype(self.dtype), device=self.device)


class Links:
    """The messages of one step on this rank. Tensors that were sent are held until the receiver has used them: what comes back
    from it later says so, so no rank is ever idle because of a send."""

    def __init__(self, axis: Communicator, lowered: Lowered, hidden: ActivationSpec, microbatch: tuple[int, int]):
        """microbatch: sequences and their tokens, of which every microbatch has the same."""
        self._axis, self._lowered, self._hidden, self._microbatch = axis, lowered, hidden, microbatch
        self._arriving: dict[Action, tuple[Tensors, Pending]] = {}
        self._leaving: list[tuple[Message, Pending]] = []

    def start(self, actions: Sequence[Action], outputs: dict[Action, Tensors]) -> None:
        """Start sends and receives that stand side by side. One batch has one receive: a batch may end as a whole only, and
        what is needed first must not wait for what comes later."""
        batch: list[Action] = []
        for action in actions:
            if action.kind in RECEIVES and any(each.kind in RECEIVES for each in batch):
                self._start_batch(batch, outputs)
                batch = []
            batch.append(action)
        self._start_batch(batch, outputs)

    def _start_batch(self, actions: Sequence[Action], outputs: dict[Action, Tensors]) -> None:
        sends, receives = [], []
        places: dict[Action, Tensors] = {}
        for action in actions:
            message = self._lowered.messages[action]
            if action.kind in SENDS:
                sends += [(each, message.target) for each in outputs.pop(action)]
            else:
                places[action] = self._hidden.make_places(*self._microbatch)
                receives += [(each, message.source) for each in places[action]]
        sent, received = exchange_apart(sends, receives, self._axis)
        self._leaving += [(self._lowered.messages[action], sent) for action in actions if action.kind in SENDS]
        self._arriving |= {action: (place, received) for action, place in places.items()}

    def take(self, action: Action) -> Tensors:
        """What a receive brought, once it is there."""
        place, pending = self._arriving.pop(action)
        pending.wait()
        message = self._lowered.messages[action]
        used = [each for each in self._leaving if each[0].target == message.source and each[0].before <= message.after]
        for each in used:
            self._leaving.remove(each)
            each[1].wait()
        return place

    def finish(self) -> None:
        """Wait for what is still under way."""
        for _, pending in self._leaving:
            pending.wait()
        self._leaving = []


def execute(
    lowered: Lowered,
    rank: int,
    stages: Mapping[int, StageActions],
    links: Links,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[int, Tensor], list[Timed]]:
    """Run the rank's actions. Returns the losses by microbatch, detached, of the last stage only; and when what was done."""
    step = _Step(lowered, stages, links, clock)
    timed = []
    for are_messages, group in groupby(lowered.ranks[rank], lambda action: action.kind in SENDS + RECEIVES):
        actions = list(group)
        if are_messages:
            links.start(actions, step.outputs)
        else:
            timed += [step.run(action) for action in actions]
    links.finish()
    assert not step.live and not step.left, f"never ran backward: {sorted(map(str, step.live))}"  # noqa: PT018
    return step.losses, [each for each in timed if each.action.kind in COMPUTE]


class _Step:
    """What is alive between the actions of a step. live: (inputs, outputs) of a microbatch by its F; left: for a later W;
    outputs: to be sent, by the send; local: for another stage of this rank, by the receive that it stands for."""

    def __init__(self, lowered: Lowered, stages: Mapping[int, StageActions], links: Links, clock: Callable[[], float]):
        self._stages, self._links, self._clock = stages, links, clock
        self._last = lowered.num_stages - 1
        self._messages = lowered.messages
        self._rest = {stage: lowered.count_backwards(stage) for stage in stages}
        self.live: dict[Action, tuple[Tensors, list[GradientEdge | None]]] = {}
        self.left: dict[Action, Any] = {}
        self.outputs: dict[Action, Tensors] = {}
        self.local: dict[Action, Tensors] = {}
        self.losses: dict[int, Tensor] = {}

    def run(self, action: Action) -> Timed:
        """Wait for what the action needs, then do it; only the doing is timed."""
        arrived: Tensors = ()
        if action.kind in FORWARDS and action.stage > 0:
            arrived = self._take(action, Kind.RECEIVE_ACTIVATION)
        elif action.kind in (Kind.BACKWARD, Kind.INPUT) and action.stage < self._last:
            arrived = self._take(action, Kind.RECEIVE_GRADIENT)
        start = self._clock()
        self._do(action, self._stages[action.stage], arrived)
        return Timed(action, start, self._clock())

    def _do(self, action: Action, stage: StageActions, arrived: Tensors) -> None:
        match action.kind:
            case Kind.FORWARD:
                self._forward(action, stage, arrived)
            case Kind.VALIDATION:
                with torch.no_grad():
                    self._pass_on(action, stage.validate(action.microbatch, arrived))
            case Kind.BACKWARD | Kind.INPUT:
                self._backward(action, stage, arrived)
            case Kind.WEIGHT:
                stage.backward_weights(self.left.pop(action), self._is_last_of(action.stage))
            case Kind.UNSHARD:
                stage.unshard(is_forward=action._replace(kind=Kind.FORWARD) not in self.live)
            case Kind.RESHARD:
                stage.reshard()
            case Kind.WAIT_REDUCE:
                stage.wait_reduce()

    def _forward(self, action: Action, stage: StageActions, received: Tensors) -> None:
        for each in received:
            each.requires_grad_()
        outputs = stage.forward(action.microbatch, received)
        self.live[action] = received, [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        self._pass_on(action, outputs)

    def _pass_on(self, action: Action, outputs: Tensors) -> None:
        """What a forward has computed: the loss is kept, hidden states go to the next stage."""
        if action.stage == self._last:
            (self.losses[action.microbatch],) = (each.detach() for each in outputs)
        else:
            self._hand_on(action, Kind.SEND_ACTIVATION, tuple(each.detach() for each in outputs))

    def _backward(self, action: Action, stage: StageActions, gradients: Tensors) -> None:
        received, outputs = self.live.pop(action._replace(kind=Kind.FORWARD))
        trained = [edge for edge in outputs if edge is not None]
        gradients = tuple(each for each, edge in zip(gradients, outputs, strict=False) if edge is not None)
        if action.kind is Kind.BACKWARD:
            stage.backward(trained, gradients, self._is_last_of(action.stage))
        else:
            self.left[action._replace(kind=Kind.WEIGHT)] = stage.backward_input(trained, gradients)
        if received:
            found = tuple(each.grad for each in received if each.grad is not None)
            assert len(found) == len(received), f"{action} gave its input no gradient"
            self._hand_on(action, Kind.SEND_GRADIENT, found)

    def _take(self, action: Action, kind: Kind) -> Tensors:
        receive = action._replace(kind=kind)
        return self.local.pop(receive) if receive in self.local else self._links.take(receive)

    def _hand_on(self, action: Action, kind: Kind, tensors: Tensors) -> None:
        """To another rank if there is a message for it, else to another stage of this one."""
        send = action._replace(kind=kind)
        if send in self._messages:
            self.outputs[send] = tuple(each.contiguous() for each in tensors)
        elif kind is Kind.SEND_ACTIVATION:
            self.local[Action(action.stage + 1, Kind.RECEIVE_ACTIVATION, action.microbatch)] = tensors
        else:
            self.local[Action(action.stage - 1, Kind.RECEIVE_GRADIENT, action.microbatch)] = tensors

    def _is_last_of(self, stage: int) -> bool:
        self._rest[stage] -= 1
        return self._rest[stage] == 0
