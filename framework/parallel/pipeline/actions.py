"""Actions and schedules: what ranks do in a step, as data that can be printed, checked, simulated, drawn and executed."""

import re
from dataclasses import dataclass
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
