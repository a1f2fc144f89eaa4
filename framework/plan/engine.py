"""What a search asks of one model, one recipe and one cluster: the forecasts that `plan` prints, by candidate."""

from dataclasses import dataclass

import numpy as np

from framework.plan.candidate import Candidate
from framework.plan.cluster import Cluster
from framework.plan.forecast import MemoryForecast, TimeForecast
from framework.plan.forecast_memory import (
    forecast_memory,
    host_spare_of_options,
    memory_model,
    spare_bytes,
    spare_of_options,
)
from framework.plan.memory_bounds import MemoryBounds
from framework.plan.memory_states import StateOptions, StateTable
from framework.plan.settings import Settings
from framework.plan.shape import ModelShape
from framework.plan.time import TimeModel
from framework.plan.time_bounds import TimeBounds

# What ZeRO and offload of states add to a step. Its other parts are the least without ZeRO: then nothing is gathered, and nothing
# is reduced before the end.
STATE_PARTS = ("gathers", "reductions", "contention", "optimizer", "offload", "checkpoint")


@dataclass(frozen=True)
class Engine:
    """Forecasts and their lower bounds, each remembered by what it depends on."""

    shape: ModelShape
    settings: Settings
    cluster: Cluster
    times: TimeModel
    least_bytes: MemoryBounds
    least_time: TimeBounds

    @classmethod
    def of(cls, shape: ModelShape, settings: Settings, cluster: Cluster) -> "Engine":
        """That of a recipe."""
        times = TimeModel(shape, settings.recipe, cluster)
        return cls(shape, settings, cluster, times, MemoryBounds(memory_model(shape, settings)), TimeBounds(times))

    def memory(self, candidate: Candidate) -> MemoryForecast:
        """Of each rank of the pipeline."""
        return forecast_memory(self.shape, candidate, self.settings, self.cluster)

    def spare(self, candidate: Candidate) -> int:
        """Bytes that are left on the fullest rank; negative: so many are missing."""
        return spare_bytes(self.shape, candidate, self.settings, self.cluster)

    def spare_of_options(self, stages: Candidate, options: StateOptions) -> np.ndarray:
        """The same of each option: `stages` with states in other places."""
        return spare_of_options(self.shape, stages, options, self.settings, self.cluster)

    def host_spare_of_options(self, stages: Candidate, options: StateOptions) -> np.ndarray:
        """Bytes of the host's memory that are left on the fullest node."""
        return host_spare_of_options(self.shape, stages, options, self.settings, self.cluster)

    def states_of_options(self, stages: Candidate, options: StateOptions) -> StateTable:
        """Bytes of states in each of these places."""
        return self.least_bytes.memory.states.of_options(stages, options)

    def time(self, candidate: Candidate) -> TimeForecast:
        """Of a step."""
        return self.times.forecast(candidate)

    def least_seconds(self, candidate: Candidate) -> float:
        """A lower bound of the step wherever states lie, by the schedule's simulation. candidate: with zero=0."""
        parts = self.time(candidate).parts
        return sum(seconds for name, seconds in parts.items() if name not in STATE_PARTS)
