"""Cost of a step beside forward and backward: the optimizer's update, states that travel to a host or a disk, saves, and the
share that failures take of a run.

The update is passes over memory: of each owned element the gradient and the master, each moment and the parameter are read and
written once (one fused kernel), and the gradient once before that for its norm. Offloaded states go over the host's link,
gradients there and parameters back, and are updated at the rate of that link. An asynchronous save holds training up while
states are copied to the host; a synchronous one until the node's disk has them.
"""

from dataclasses import dataclass
from math import sqrt

from framework.plan.candidate import Candidate
from framework.plan.cluster import ClusterRates, place_group
from framework.plan.profile import Profile
from framework.recipe.schema import Recipe

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 2}  # muon: of what adamw updates; one fewer of matrices
MOMENT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0}
# A run that says nothing of saves is taken to save so often, where failures are counted.
ASSUMED_INTERVAL_S = 3600.0


@dataclass(frozen=True)
class Update:
    """The update of one rank. itemsize: bytes of a parameter that forward reads. matrices: as of `ModelShape`; hidden: features
    of hidden states."""

    settings: Recipe
    cluster: ClusterRates
    profile: Profile
    itemsize: int
    matrices: tuple[float, float] = (0.0, 0.0)
    hidden: int = 1

    @property
    def _state_bytes(self) -> tuple[float, float, float]:
        """(master, gradient, all moments and the average) of an element."""
        precision = self.settings.precision
        wide = 8.0 if precision.master == "fp64" else 4.0
        master = 0.0 if precision.master == "none" else wide
        moment = wide if precision.moments == "fp32" else MOMENT_BYTES[precision.moments]
        average = wide * (self.settings.train.ema is not None)
        return master, wide, moment * (MOMENTS[self.settings.optim.name] - self.matrices[0]) + average

    def seconds(self, elements: float, c: Candidate) -> dict[str, float]:
        """Seconds of a rank that owns so many elements, by part. The norm's sum over ranks is not in it."""
        master, gradient, moments = self._state_bytes
        offload, cluster = self.settings.memory.offload, self.cluster
        away = elements * ("optimizer" in c.offload)
        moved = 2 * (master + moments) + gradient + self.itemsize * (1 if master else 2)
        norm = cluster.memory_seconds(elements * gradient) if elements else 0.0
        here = cluster.memory_seconds((elements - away) * moved * self.profile.optimizer_passes) if elements else 0.0
        host = away * (gradient + self.itemsize + moved) / cluster.host_rate
        if offload.home == "disk":
            host += away * 2 * (master + moments) * c.ranks_per_node / cluster.disk_rate
        return {"optimizer": norm + here + self._orthogonalize(elements, c), "offload": host}

    def _orthogonalize(self, elements: float, c: Candidate) -> float:
        """Seconds of Muon's iterations, and of the way of matrices to their owners and back, for a rank that owns so many
        elements and as many of whole matrices."""
        share, flops = self.matrices
        if not share:
            return 0.0
        dtype = "bf16" if self.settings.optim.muon.dtype == "bf16" else "fp32"
        per_flop = self.cluster.matmul_seconds(self.hidden, self.hidden, self.hidden, dtype) / (2.0 * self.hidden**3)
        num_bytes = elements * share * (2 if dtype == "bf16" else 4)
        shard, tp = (
            place_group(size, stride, c.ranks_per_node, c.world) for size, stride in ((c.shard, c.tp), (c.tp, 1))
        )
        way = sum(self.cluster.collective("all_to_all", num_bytes, each) for each in (shard, tp))
        return elements * flops * per_flop + 2 * way

    def save(self, elements: float, c: Candidate, step_s: float) -> tuple[float, float]:
        """(seconds for which a save holds training up, seconds from one save to the next); 0 and 0 where nothing is saved on the
        way. elements: owned by the rank that owns most."""
        checkpoint, cluster = self.settings.checkpoint, self.cluster
        master, _, moments = self._state_bytes
        num_bytes = elements * (master or self.itemsize) + elements * moments
        on_node = min(c.world, c.ranks_per_node)
        stall_s = num_bytes / cluster.host_rate
        if checkpoint.mode == "sync":
            stall_s += num_bytes * on_node / cluster.disk_rate
        if checkpoint.every_steps is not None:
            return stall_s, checkpoint.every_steps * step_s
        if checkpoint.interval == "young_daly" and checkpoint.mtbf_hours:
            return stall_s, sqrt(2 * stall_s * checkpoint.mtbf_hours * 3600)
        return (stall_s, checkpoint.every_minutes * 60) if checkpoint.every_minutes else (0.0, 0.0)


def expected_goodput(failures_per_s: float, interval_s: float, restart_s: float) -> float:
    """Share of the time that is no restart and no work done again: a failure loses half of the time since the last save, on
    average, and the restart."""
    return 1.0 / (1.0 + failures_per_s * (restart_s + (interval_s or ASSUMED_INTERVAL_S) / 2))
