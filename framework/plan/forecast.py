"""Forecast of a layout: bytes of each rank of its pipeline and seconds of a step, both in parts that can be checked."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from framework.output import show_bytes

SLACK = "allocator slack"
OUTSIDE = "outside torch"


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a rank at one place of the pipeline, at the moment of a step that needs most."""

    # Tensors of the device by kind: parameters, gradients, master, optimizer, gathered, activations, logits, temporaries,
    # communication, workspace.
    held: Mapping[str, int]
    # Reserved by the allocator beyond what tensors use.
    slack: int
    # The same kinds at each phase of a step, of which `held` is the largest.
    phases: Mapping[str, Mapping[str, int]]
    # The host's memory by kind.
    on_host: Mapping[str, int] = field(default_factory=dict)
    # Device memory outside torch: the driver's context, NCCL's buffers.
    outside: int = 0
    # The rank's file of states.
    disk: int = 0

    @property
    def host(self) -> int:
        """Bytes in the host's memory."""
        return sum(self.on_host.values())

    @property
    def allocated(self) -> int:
        """Bytes of tensors."""
        return sum(self.held.values())

    @property
    def kinds(self) -> dict[str, int]:
        """All bytes of the device by kind: `held`, and what is not in tensors."""
        return {**self.held, OUTSIDE: self.outside, SLACK: self.slack}

    @property
    def reserved(self) -> int:
        """Bytes that the device must have."""
        return self.allocated + self.slack + self.outside


@dataclass(frozen=True)
class NodeForecast:
    """Bytes that the ranks of the fullest node take together of what they share."""

    # The host's memory: offloaded states and activations, and copies of steps in its file system (checkpoint.neighbor_copies).
    offloaded: int = 0
    copies: int = 0
    # All of the host's memory, and the share of it for both.
    there: int = 0
    limit: int = 0
    # Files of states, and the room for them; None where it is unknown.
    disk: int = 0
    disk_limit: int | None = None

    @property
    def spare(self) -> int:
        """Bytes of the host's memory that are left; negative: so many are missing."""
        # Linux gives a file system in memory half of it.
        return min(self.limit - self.offloaded - self.copies, self.there // 2 - self.copies)

    @property
    def fits(self) -> bool:
        """Whether a node has all of it."""
        is_on_disk = self.disk_limit is None or self.disk <= self.disk_limit
        return is_on_disk and (self.spare >= 0 or not self.offloaded + self.copies)


@dataclass(frozen=True)
class MemoryForecast:
    """stages: a rank at each place of the pipeline, in order. limit: bytes of a device that ranks may use. node: what ranks of a
    node share."""

    stages: tuple[StageMemory, ...]
    limit: int
    node: NodeForecast = NodeForecast()

    @property
    def fullest(self) -> StageMemory:
        """The rank that decides whether the run fits."""
        return max(self.stages, key=lambda each: each.reserved)

    @property
    def spare(self) -> int:
        """Bytes that are left on the fullest rank; negative: so many are missing."""
        return self.limit - self.fullest.reserved

    @property
    def fits(self) -> bool:
        """Whether devices and nodes have all of it."""
        return self.spare >= 0 and self.node.fits


@dataclass(frozen=True)
class TimeForecast:
    """Seconds of a step, of the rank that takes longest.

    parts: what adds up to `step_s`: matmuls, attention, elementwise, recomputation, tp, cp, ep and pp that nothing hides,
    bubble, gathers and reductions that nothing hides, contention, imbalance of experts, optimizer, offload, checkpoint, host
    (`plan/time.py`).
    hidden: seconds of communication behind computation, by axis. mfu: useful FLOPs over what the devices could do, by
    `model/flops.py`: the same for every layout. goodput: share of the time that failures leave. hours, cost: of all of
    train.steps, failures included; cost in the cluster's currency. estimated: share of the layers' FLOPs whose matmuls are not
    known."""

    parts: Mapping[str, float]
    hidden: Mapping[str, float]
    tokens: int
    world: int
    mfu: float
    goodput: float = 1.0
    hours: float = 0.0
    cost: float = 0.0
    estimated: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks together."""
        return self.tokens / self.step_s

    @property
    def tokens_per_s_and_rank(self) -> float:
        """Tokens of one rank."""
        return self.tokens_per_s / self.world


@dataclass(frozen=True)
class Forecast:
    """Memory and time of a layout."""

    memory: MemoryForecast
    time: TimeForecast


def describe_shortages(node: NodeForecast) -> Iterator[str]:
    """Resources that a node lacks, each with the key that states what it has; empty where the layout fits."""
    needed = node.offloaded + node.copies
    if needed and node.spare < 0:
        what = [f"{show_bytes(node.offloaded)} of what is offloaded"] * (node.offloaded > 0)
        what += [f"{show_bytes(node.copies)} of copies of steps (checkpoint.neighbor_copies)"] * (node.copies > 0)
        where = f"{show_bytes(node.limit)} of a node's {show_bytes(node.there)} of host memory (cluster.host_memory_gb)"
        if node.offloaded + node.copies <= node.limit:
            where = f"{show_bytes(node.there // 2)} of /dev/shm, half of a node's host memory (cluster.host_memory_gb)"
        yield f"{show_bytes(-node.spare)} over the {where}, for {' and '.join(what)}"
    if node.disk_limit is not None and node.disk > node.disk_limit:
        yield (
            f"{show_bytes(node.disk - node.disk_limit)} over the {show_bytes(node.disk_limit)} of a node's own disks"
            f" (cluster.node_disk_gb), for {show_bytes(node.disk)} of files of states"
        )
