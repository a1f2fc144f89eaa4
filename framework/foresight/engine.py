"""What a search asks of one model, one recipe and one cluster: the forecasts that `plan` prints, by candidate."""

from collections.abc import Mapping
from dataclasses import dataclass

from framework.foresight.candidate import Candidate
from framework.foresight.forecast import MemoryForecast, TimeForecast
from framework.foresight.memory import forecast_memory, spare_bytes, spare_of_activations
from framework.foresight.settings import Settings
from framework.foresight.shape import ModelShape
from framework.foresight.time import TimeModel
from framework.plan.cluster import Cluster

# What ZeRO and offload of states add to a step. Its other parts are the least without ZeRO: then nothing is gathered, and nothing
# is reduced before the end.
STATE_PARTS = ("gathers", "reductions", "contention", "optimizer", "offload", "checkpoint")
# What the layers of a rank take, for each microbatch.
LAYER_PARTS = ("matmuls", "attention", "elementwise", "tp", "cp", "ep")


@dataclass(frozen=True)
class Engine:
    """Forecasts, each remembered by what it depends on."""

    shape: ModelShape
    settings: Settings
    cluster: Cluster
    times: TimeModel

    @classmethod
    def of(cls, shape: ModelShape, settings: Settings, cluster: Cluster) -> "Engine":
        """That of a recipe."""
        return cls(shape, settings, cluster, TimeModel(shape, settings.recipe, cluster))

    def memory(self, candidate: Candidate) -> MemoryForecast:
        """Of each rank of the pipeline."""
        return forecast_memory(self.shape, candidate, self.settings, self.cluster)

    def spare(self, candidate: Candidate) -> int:
        """Bytes that are left on the fullest rank; negative: so many are missing."""
        return spare_bytes(self.shape, candidate, self.settings, self.cluster)

    def most_spare(self, candidate: Candidate) -> int:
        """The same wherever states lie: what activations alone leave."""
        return spare_of_activations(self.shape, candidate, self.settings, self.cluster)

    def time(self, candidate: Candidate) -> TimeForecast:
        """Of a step."""
        return self.times.forecast(candidate)

    def least_seconds(self, candidate: Candidate) -> float:
        """A lower bound of the step, wherever states lie. candidate: with zero=0."""
        parts = self.time(candidate).parts
        return sum(seconds for name, seconds in parts.items() if name not in STATE_PARTS)

    def layer_seconds(self, candidate: Candidate) -> float:
        """A lower bound of a microbatch on one rank that has all layers. candidate: with zero=0, pp=1, no recomputation."""
        parts: Mapping[str, float] = self.time(candidate).parts
        return sum(parts[name] for name in LAYER_PARTS)
