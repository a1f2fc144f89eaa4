"""Candidate: a layout as numbers, of which bytes and seconds are forecast, and of which a search tries thousands."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, Literal

Checkpointing = Literal["none", "selective", "full", "sqrt"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """The degrees and choices of a recipe that memory and time depend on, all resolved: nothing here is `auto`. A world has
    dp x cp x tp x pp ranks."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    sequence: bool = False
    """Sequence parallelism over tp."""
    ulysses: int = 1
    """Ranks of cp that exchange heads; the others divide keys and values."""
    is_gather: bool = False
    """Whether these gather keys and values instead of passing them round."""
    expert_tp: int = 1
    """Ranks of tp that slice each expert; 1: experts are whole."""
    schedule: str = "1f1b"
    virtual: int = 1
    """Stages of a rank of the pipeline."""
    zero: int = 0
    """ZeRO's stage."""
    shard: int = 1
    """Ranks over which ZeRO shards; 1 at stage 0."""
    checkpointing: Checkpointing = "none"
    """Activation checkpointing of all layers."""
    offload: frozenset[str] = field(default_factory=frozenset)
    """Names as in memory.offload."""
    sequences: int = 1
    """Of a microbatch and a rank."""
    accumulation: int = 1
    """Microbatches of a step."""
    context: int = 4096
    """Tokens of a sequence."""
    ranks_per_node: int = 8

    def changed(self, values: Mapping[str, Any]) -> "Candidate":
        """Replace some fields: `dataclasses.replace` in a fifth of the time, as searches make many."""
        own = list(_READ(self))
        for name, value in values.items():
            own[_PLACES[name]] = value
        return Candidate(*own)

    @property
    def world(self) -> int:
        """Ranks of the run."""
        return self.dp * self.cp * self.tp * self.pp

    @property
    def nodes(self) -> int:
        """Nodes of the run."""
        return -(-self.world // self.ranks_per_node)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a rank, before tp divides anything; padding of cp not counted."""
        return self.sequences * self.context // self.cp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, of all ranks."""
        return self.dp * self.accumulation * self.sequences * self.context


_PLACES = {each.name: place for place, each in enumerate(fields(Candidate))}
_READ = attrgetter(*_PLACES)
