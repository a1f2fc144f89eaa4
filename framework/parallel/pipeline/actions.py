"""What a rank does in a step, as data: a list of actions that can be printed, validated and interpreted."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """F: forward of a microbatch; B: its whole backward."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"
