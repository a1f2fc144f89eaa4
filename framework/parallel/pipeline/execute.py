"""The executor: interprets one rank's list of actions. Gradient accumulation is its case of a single stage.

Between the forward and the backward of a microbatch only the autograd graph lives. What a stage computed is sent and dropped;
what it received is kept by the graph where backward needs it. Two stages on one rank hand tensors over without a message.

Tensors between stages, [B, T, W] with T the tokens that this rank holds of each sequence (`model/borders.py`):

    forward    the values of a border, from stage s to s + 1; with a load-balancing loss also the sums of the routers, [2E + 1]
    backward   the gradients of the same tensors, from stage s + 1 to s

Only the axis `pp` communicates here. What ZeRO and tensor parallelism send is inside the stages' own methods.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from framework.comm.algorithms import Pending
from framework.comm.communicator import Communicator
from framework.comm.p2p import exchange_apart
from framework.mesh.token_layout import TokenLayout
from framework.model.borders import Border, message_dtype, message_width
from framework.parallel.pipeline.lower import FORWARDS, RECEIVES, SENDS, Lowered, StageMessage
from framework.parallel.pipeline.simulate import COMPUTE, Action, ActionKind, Timed

Tensors = tuple[Tensor, ...]
MESSAGES = frozenset((*SENDS, *RECEIVES))


class StageActions(Protocol):
    """The methods that the executor calls on a stage: one for each kind of action that is not a message.

    trains_below: whether a stage before it trains anything: else backward ends in this one.
    """

    trains_below: bool

    def forward(self, microbatch: int, received: Tensors) -> Tensors:
        """Tensors for the next stage, or on the last stage the microbatch's scalar loss. received: empty on the first stage."""

    def validate(self, microbatch: int, received: Tensors) -> Tensors:
        """The forward of a validation microbatch, of tensors shaped as in `forward`: without autograd and random numbers."""

    def backward(self, outputs: Sequence[GradientEdge], gradients: Tensors, is_last: bool) -> None:
        """The whole backward. outputs: edges of the outputs that require a gradient, with their gradients, of their
        shapes; none for the loss. is_last: of this stage in this step: it completes the gradients."""

    def backward_input(self, outputs: Sequence[GradientEdge], gradients: Tensors) -> Any:
        """The gradient of the input alone, [B, s, width] as `backward` leaves it; returns what `backward_weights` needs to
        finish the microbatch."""

    def backward_weights(self, deferred: Any, is_last: bool) -> None:
        """The weight gradients that `backward_input` left out."""

    def unshard(self, is_forward: bool) -> None:
        """Start to unshard the parameters that the next forward, or backward, reads first."""

    def reshard(self) -> None:
        """Reshard the parameters that the stage still holds unsharded."""

    def wait_reduce(self) -> None:
        """Wait for the gradient reductions that have been started."""


@dataclass(frozen=True)
class ActivationSpec:
    """Shapes and dtypes of what stages exchange for a microbatch; all microbatches have the same.

    The values of a border [B, T, W], T the tokens that this rank holds of each sequence, and, if there is a load-balancing loss,
    the sums of the routers [num_sums] in `sums_dtype`. borders: in front of each stage.
    """

    tokens: TokenLayout
    borders: Sequence[Border]
    num_sums: int
    sums_dtype: torch.dtype
    device: torch.device

    def make_buffers(self, stage: int) -> Tensors:
        """Uninitialised tensors on `device` into which a message over the border in front of a stage is received: [B, T, W],
        [num_sums]."""
        border = self.borders[stage]
        shape = self.tokens.hidden_shape(message_width(border))
        values = torch.empty(shape, dtype=message_dtype(border), device=self.device)
        if not self.num_sums:
            return (values,)
        return values, torch.empty(self.num_sums, dtype=self.sums_dtype, device=self.device)


class StageLinks:
    """The messages of one step on this rank, over the axis `pp`.

    No rank waits for a send to complete. A sent tensor is held until a message from its receiver shows that it was used: if
    what arrives was computed after the receiver had needed the tensor, then the send is over and its wait returns at once.

    hidden: the shape of what arrives, equal for all microbatches of a step, so that receives can be posted before anything is
    known of them.
    """

    def __init__(self, axis: Communicator, lowered: Lowered, hidden: ActivationSpec):
        self._axis, self._lowered, self._hidden = axis, lowered, hidden
        self._arriving: dict[Action, tuple[Tensors, Pending]] = {}
        self._leaving: list[tuple[StageMessage, Pending]] = []

    def start(self, actions: Sequence[Action], outputs: dict[Action, Tensors]) -> None:
        """Start sends and receives that are neighbours in the list of actions. `outputs` loses what is sent.
        Messages over `pp` have the shapes of the ActivationSpec."""
        batch: list[Action] = []
        for action in actions:
            # NCCL completes a batch as a whole. With two receives in one, the tensor that is needed first would wait for the
            # one that is needed later, and the schedule would slip by a whole action.
            if action.kind in RECEIVES and any(each.kind in RECEIVES for each in batch):
                self._start_batch(batch, outputs)
                batch = []
            batch.append(action)
        self._start_batch(batch, outputs)

    def _start_batch(self, actions: Sequence[Action], outputs: dict[Action, Tensors]) -> None:
        # Both sides list their messages in the order of `lower`, which is one order for the whole pipeline: the n-th send to
        # a rank meets its n-th receive from here, with no tag to match them by.
        sends, receives = [], []
        places: dict[Action, Tensors] = {}
        for action in actions:
            message = self._lowered.messages[action]
            if action.kind in SENDS:
                sends += [(each, message.target) for each in outputs.pop(action)]
            else:
                # A gradient comes over the border behind the stage that waits for it.
                is_behind = action.kind is ActionKind.RECEIVE_GRADIENT
                places[action] = self._hidden.make_buffers(action.stage + is_behind)
                receives += [(each, message.source) for each in places[action]]
        sent, received = exchange_apart(sends, receives, self._axis, " ".join(map(str, actions)))
        self._leaving += [(self._lowered.messages[action], sent) for action in actions if action.kind in SENDS]
        self._arriving |= {action: (place, received) for action, place in places.items()}

    def take(self, action: Action) -> Tensors:
        """The tensors of a receive, shaped as `ActivationSpec` says; waits until they have arrived."""
        place, pending = self._arriving.pop(action)
        pending.wait()
        message = self._lowered.messages[action]
        # This message left after the sender's action number `after`. Whatever the sender needed for an action up to that one
        # it has received: these sends are complete, their wait costs nothing, and their tensors may go.
        leaving, self._leaving = self._leaving, []
        for sent, sending in leaving:
            if sent.target == message.source and sent.before <= message.after:
                sending.wait()
            else:
                self._leaving.append((sent, sending))
        return place

    def range(self, action: Action) -> AbstractContextManager[Any]:
        """Names the action in a profiler's trace: `action 0F3`."""
        return self._axis.range("action", action)

    def finish(self) -> None:
        """Wait for the sends whose receiver has sent nothing back since: the step's last ones."""
        for _, pending in self._leaving:
            pending.wait()
        self._leaving = []
        assert not self._arriving, f"received and never used: {sorted(map(str, self._arriving))}"


def execute(
    lowered: Lowered,
    rank: int,
    stages: Mapping[int, StageActions],
    links: StageLinks,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[dict[int, Tensor], list[Timed]]:
    """Run the rank's actions of one step.

    stages: this rank's, by number. Returns the losses by microbatch, detached scalars, empty unless this rank has the last
    stage; and the compute actions with the clock's times, which do not include waiting.
    """
    step = _Step(lowered, stages, links, clock)
    timed = []
    # Neighbouring messages start together: NCCL runs what is in one group at once, and one after another what is not.
    for are_messages, group in groupby(lowered.ranks[rank], lambda action: action.kind in MESSAGES):
        actions = list(group)
        if are_messages:
            links.start(actions, step.outputs)
        else:
            timed += [step.run(action) for action in actions]
    links.finish()
    # A schedule that passed `validate` leaves neither: this is a bug of `lower` or of the loops above.
    assert not step.live and not step.left, f"never ran backward: {sorted(map(str, step.live))}"  # noqa: PT018
    return step.losses, [each for each in timed if each.action.kind in COMPUTE]


class _Step:
    """The state between the actions of one step.

    live: by F action, the microbatch's (inputs, outputs) until its backward. left: by W action, the weight gradients that its
    I left out. outputs: by send action, the tensors to send. local: by receive action, the tensors that another stage of this
    rank has handed over instead of sending them.
    """

    def __init__(
        self, lowered: Lowered, stages: Mapping[int, StageActions], links: StageLinks, clock: Callable[[], float]
    ):
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
        """Wait for what the action needs, then do it. The clock starts after the wait, so that a measured timeline shows idle
        time as a gap, as the simulated one does."""
        arrived: Tensors = ()
        if action.kind in FORWARDS and action.stage > 0:
            arrived = self._take(action, ActionKind.RECEIVE_ACTIVATION)
        elif action.kind in (ActionKind.BACKWARD, ActionKind.INPUT) and action.stage < self._last:
            arrived = self._take(action, ActionKind.RECEIVE_GRADIENT)
        start = self._clock()
        with self._links.range(action):
            self._do(action, self._stages[action.stage], arrived)
        return Timed(action, start, self._clock())

    def _do(self, action: Action, stage: StageActions, arrived: Tensors) -> None:
        match action.kind:
            case ActionKind.FORWARD:
                self._forward(action, stage, arrived)
            case ActionKind.VALIDATION:
                with torch.no_grad():
                    self._pass_on(action, stage.validate(action.microbatch, arrived))
            case ActionKind.BACKWARD | ActionKind.INPUT:
                self._backward(action, stage, arrived)
            case ActionKind.WEIGHT:
                stage.backward_weights(self.left.pop(action), self._is_last_of(action.stage))
            case ActionKind.UNSHARD:
                stage.unshard(is_forward=action._replace(kind=ActionKind.FORWARD) not in self.live)
            case ActionKind.RESHARD:
                stage.reshard()
            case ActionKind.WAIT_REDUCE:
                stage.wait_reduce()

    def _forward(self, action: Action, stage: StageActions, received: Tensors) -> None:
        for each in received:
            # A leaf here: backward leaves in .grad what goes back to the stage before.
            each.requires_grad_(stage.trains_below)
        outputs = stage.forward(action.microbatch, received)
        # Edges instead of outputs: the graph needs the node only, and the hidden states are freed as soon as they are sent.
        # An output without a graph (everything below it is frozen) has no edge and gets no backward.
        self.live[action] = received, [get_gradient_edge(x) if x.requires_grad else None for x in outputs]
        self._pass_on(action, outputs)

    def _pass_on(self, action: Action, outputs: Tensors) -> None:
        """Keep the loss, or hand hidden states to the next stage; detached, because no graph crosses a stage's border."""
        if action.stage == self._last:
            (self.losses[action.microbatch],) = (each.detach() for each in outputs)
        else:
            self._hand_on(action, ActionKind.SEND_ACTIVATION, tuple(each.detach() for each in outputs))

    def _backward(self, action: Action, stage: StageActions, gradients: Tensors) -> None:
        received, outputs = self.live.pop(action._replace(kind=ActionKind.FORWARD))
        # The next stage sends gradients of all outputs, of the frozen ones too; the loss on the last stage receives none.
        trained = [edge for edge in outputs if edge is not None]
        gradients = tuple(each for each, edge in zip(gradients, outputs, strict=False) if edge is not None)
        if action.kind is ActionKind.BACKWARD:
            stage.backward(trained, gradients, self._is_last_of(action.stage))
        else:
            self.left[action._replace(kind=ActionKind.WEIGHT)] = stage.backward_input(trained, gradients)
        if received:
            # Whatever is frozen below: the stage before waits for this message and would deadlock without it. It reads nothing
            # of one that has no gradients, which are not computed then.
            found = tuple(each.grad for each in received if each.grad is not None) if stage.trains_below else received
            assert len(found) == len(received), f"{action} gave its input no gradient"
            self._hand_on(action, ActionKind.SEND_GRADIENT, found)

    def _take(self, action: Action, kind: ActionKind) -> Tensors:
        receive = action._replace(kind=kind)
        return self.local.pop(receive) if receive in self.local else self._links.take(receive)

    def _hand_on(self, action: Action, kind: ActionKind, tensors: Tensors) -> None:
        """Pass tensors to the neighbouring stage: as a message, or directly where it is on this rank."""
        send = action._replace(kind=kind)
        if send in self._messages:
            # Messages need contiguous memory, and the gradient of a hidden state may be a transposed view.
            self.outputs[send] = tuple(each.contiguous() for each in tensors)
        elif kind is ActionKind.SEND_ACTIVATION:
            self.local[Action(action.stage + 1, ActionKind.RECEIVE_ACTIVATION, action.microbatch)] = tensors
        else:
            self.local[Action(action.stage - 1, ActionKind.RECEIVE_GRADIENT, action.microbatch)] = tensors

    def _is_last_of(self, stage: int) -> bool:
        # Counts B and W, not I: only weight gradients complete the accumulation, and no reduction may start before.
        self._rest[stage] -= 1
        return self._rest[stage] == 0
