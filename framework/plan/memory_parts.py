"""Parts of a rank's bytes by phase of a step, what stands beside tensors, and where a model's stages lie."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from framework.model.stage import StageBounds
from framework.parallel.pipeline.pipeline import Pipeline
from framework.plan.candidate import Candidate
from framework.plan.settings import Settings
from framework.plan.shape import Degrees, ModelShape

PHASES = ("forward", "loss", "backward", "reduction", "optimizer")
BACKWARD = PHASES.index("backward")
MIB = 2**20
# torch's default for one stream on Hopper (CUBLAS_WORKSPACE_CONFIG); 8.5 MiB on other GPUs. Computation has one stream.
CUBLAS_BYTES = 32 * MIB
# Assumed, not measured here: a CUDA context with torch's kernels loaded, and the buffers of a NCCL communicator over NVLink.
CONTEXT_BYTES = 512 * MIB
COMMUNICATOR_BYTES = 128 * MIB
# Assumed: of what comes and goes (activations, logits, temporaries, gathered units) the caching allocator reserves this share
# more than tensors fill, because free blocks do not fit what is asked for. What lives for the whole run is allocated first, in
# blocks of its own.
FRAGMENTATION = 0.04


class Part(NamedTuple):
    """A part of a rank's bytes. phases: by kind, of each of PHASES; totals: their sums; moving: of those what comes and goes;
    on_host: in the host's memory, by kind; outside: not torch's; disk: in a file of states."""

    phases: tuple[Mapping[str, int], ...]
    totals: tuple[int, ...]
    moving: tuple[int, ...]
    on_host: Mapping[str, int]
    outside: int
    disk: int = 0

    @classmethod
    def of(
        cls, phases: Sequence[Mapping[str, int]], lasting: int, on_host: Mapping[str, int], outside: int, disk: int = 0
    ) -> "Part":
        """lasting: what is there in all phases."""
        totals = tuple(sum(each.values()) for each in phases)
        return cls(tuple(phases), totals, tuple(total - lasting for total in totals), on_host, outside, disk)

    @property
    def host(self) -> int:
        """All bytes in the host's memory."""
        return sum(self.on_host.values())


def slack_of(moving: int) -> int:
    """What the allocator reserves beside tensors that come and go."""
    return int(FRAGMENTATION * moving)


@dataclass(frozen=True)
class Places:
    """A model's stages on the ranks of a pipeline, as ranks with such degrees hold them. owners: the rank of each stage."""

    stages: tuple[StageBounds, ...]
    owners: tuple[int, ...]
    degrees: Degrees

    @cached_property
    def of_ranks(self) -> list[list[StageBounds]]:
        """The stages of each rank, in order of computation."""
        pairs = list(zip(self.stages, self.owners, strict=True))
        return [[stage for stage, owner in pairs if owner == rank] for rank in range(max(self.owners) + 1)]


@dataclass(frozen=True, eq=False)
class Pipelines:
    """The pipelines of one model and one recipe, and what their ranks have whatever is trained. pipeline: that of a plan, in
    the place of what candidates say of stages and schedules."""

    shape: ModelShape
    settings: Settings
    pipeline: Pipeline | None = None
    _known: dict[Any, Places] = field(default_factory=dict, repr=False)

    def places(self, each: Candidate) -> Places:
        """The stages of a pipeline on its ranks."""
        layout = each.pp, each.schedule, each.virtual, each.context, each.tp, each.ep, each.expert_tp, each.sequence
        if self.pipeline is not None:
            return Places(tuple(self.pipeline.stages), tuple(self.pipeline.rank_of_stage), Degrees.of(each))
        if layout not in self._known:
            layers = self.settings.layers(each)
            stages = self.shape.stages(each.pp, each.schedule, each.virtual, each.context, layers)
            self._known[layout] = Places(
                stages, self.shape.owners(each.pp, each.schedule, each.virtual), Degrees.of(each)
            )
        return self._known[layout]

    def outside(self, each: Candidate) -> int:
        """Bytes of the device that are not torch's."""
        if self.settings.device != "cuda":
            return 0
        sizes = (each.world, each.tp, each.dp * each.cp, each.pp, each.cp, each.ep)
        return CONTEXT_BYTES + COMMUNICATOR_BYTES * sum(size > 1 for size in sizes)

    @property
    def workspace(self) -> int:
        """Bytes that cuBLAS keeps for its own use."""
        return CUBLAS_BYTES if self.settings.device == "cuda" else 0
