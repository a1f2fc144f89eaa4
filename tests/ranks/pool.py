"""The session's pool of ranks. Rank 0 is a process of its own: what depends on the order of a set differs between ranks."""

from framework.verify.pool import RankFailed as RankFailure
from framework.verify.pool import RankPool as AnyRankPool

__all__ = ["RankFailure", "RankPool"]


class RankPool(AnyRankPool):
    """At most `size` ranks that have imported what tests need."""

    def __init__(self, size: int = 4) -> None:
        super().__init__(size, "tests.ranks.preload", spawned=1)
